//! Settings, with the names of Linux's KSM (Documentation/admin-guide/mm/ksm.rst).

use serde::{Deserialize, Serialize};

/// Activity of the merging thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Run {
    /// Nothing; merged pages stay merged (KSM: 0).
    #[default]
    Stop,
    /// Searches for equal pages and merges them (KSM: 1).
    Merge,
    /// Unmerges every merged page, drops all records, and then does nothing (KSM: 2).
    Unmerge,
}

/// Whether pages of different nodes are merged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Nodes {
    /// All pages of a domain may share, wherever they are; the page that they share is on the node of
    /// its first user (KSM: `merge_across_nodes` = 1).
    #[default]
    Across,
    /// Only pages of the same node share, and the page that they share is on this node (KSM:
    /// `merge_across_nodes` = 0).
    Apart,
}

impl std::fmt::Display for Nodes {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(match self {
            Self::Across => "merge across nodes",
            Self::Apart => "keep nodes apart",
        })
    }
}

/// Settings of merging and of its pace.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// Activity of the merging thread.
    pub run: Run,
    /// Pages scanned between two sleeps, where neither `pages_per_second` nor `target_scan_seconds`
    /// determines it.
    pub pages_to_scan: u64,
    /// Length of these sleeps; where one of the two determines the number of pages, it includes the
    /// time of the scan.
    pub sleep_millisecs: u64,
    /// Whether pages of different nodes are merged. Can be changed only while nothing is merged.
    pub merge_across_nodes: Nodes,
    /// Maximum number of sharers of a stable page. Can be changed only while nothing is merged.
    pub max_page_sharing: u32,
    /// Pages that changed after they were hashed or merged are hashed again only after 2 more clean
    /// passes, then 4, and so on up to 32 (KSM: 1 to 8 passes).
    pub smart_scan: bool,
    /// Pages of zeros are discarded instead of merged with each other: they need no mapping. (KSM
    /// has this off by default, because its zero page may have the wrong colour for some caches;
    /// here no page is used at all.)
    pub use_zero_pages: bool,
    /// Target duration of a pass over all memory in seconds, as far as the other settings allow it.
    /// (KSM: the scan-time advisor.)
    pub target_scan_seconds: Option<u64>,
    /// Maximum number of pages scanned per second, whatever `target_scan_seconds` says.
    pub pages_per_second: Option<u64>,
    /// Maximum share of one processor that merging may use, in percent, whatever the other settings
    /// say.
    pub max_cpu_percent: u32,
    /// Minimum time between the begins of two passes over all memory. It determines for how long a
    /// page must be unchanged before it is worth merging: in a small guest a pass alone would take
    /// a fraction of a second. And each scan of a page that was written to costs the guest a fault
    /// at its next write. While a memory hardly changes, it grows to 16 times as much.
    pub min_pass_millisecs: u64,
    /// Passes in which a page must be found unchanged before it is read.
    pub clean_passes: u8,
    /// Maximum number of pages found written to per second: a guest that writes to all of them has
    /// as many faults.
    pub max_written_per_second: u64,
    /// Passes before a huge page is read, and between the first two times: only what was the same
    /// in both may be merged. Later it is read again at growing intervals.
    pub huge_cold_passes: u8,
    /// Minimum number of duplicate or zero pages, of the 512 of a huge page, for which it is split.
    ///
    /// With fewer than half of them, more memory would lose the huge mapping than would be saved;
    /// and Linux's khugepaged rebuilds a huge page from 512 pages if at most 256 are shared
    /// (`max_ptes_shared`), which would undo the merging.
    pub huge_min_duplicates: u16,
    /// Number of neighbours that must be replaced together once mappings are scarce.
    ///
    /// A scattered page costs two mappings (about 420 bytes of the kernel's memory, and two of the
    /// 65,530 that a process may have by default); in runs of eight these are 52 bytes per page,
    /// and the limit is reached at 1 GiB of merged memory instead of at 128 MiB.
    pub min_run_pages: u32,
    /// Maximum number of stable pages that a content gets at once, for neighbouring pages that all
    /// have it (one for each eight of them): neighbours whose stable pages are neighbours take one
    /// mapping, and those that share one stable page take one each. KSM has 1.
    pub most_copies: u16,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            run: Run::Stop,
            pages_to_scan: 1000,
            sleep_millisecs: 20,
            merge_across_nodes: Nodes::Across,
            max_page_sharing: 256,
            smart_scan: true,
            use_zero_pages: true,
            target_scan_seconds: None,
            pages_per_second: None,
            max_cpu_percent: 20,
            min_pass_millisecs: 2000,
            clean_passes: 2,
            max_written_per_second: 25_000,
            huge_cold_passes: 3,
            huge_min_duplicates: 256,
            min_run_pages: 8,
            most_copies: 64,
        }
    }
}

/// Maximum number of sharers that a stable page can have.
pub const MAX_PAGE_SHARING: u32 = 0x7fff;

/// Reason why settings were not changed. They all stay unchanged then.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SettingsError {
    /// The setting decides which pages may share, and some do.
    #[error(
        "{setting} cannot be changed while {merged_pages} pages are merged: set run to unmerge, \
         wait until pages_shared and pages_sharing are 0, and try again"
    )]
    Merged {
        /// Name of the setting.
        setting: &'static str,
        /// Number of merged pages.
        merged_pages: u64,
    },
    /// A value is out of range.
    #[error("{setting} is {value}, but must be between {least} and {most}")]
    OutOfRange {
        /// Name of the setting.
        setting: &'static str,
        /// The requested value.
        value: u64,
        /// Smallest value.
        least: u64,
        /// Largest value.
        most: u64,
    },
    /// The merging thread has ended, or did not answer in time.
    #[error("the merging thread does not answer: settings are unchanged")]
    NoAnswer,
}

impl Settings {
    /// Checks each value on its own.
    pub fn check(&self) -> Result<(), SettingsError> {
        let within = |setting, value: u64, least: u64, most: u64| {
            if (least..=most).contains(&value) {
                Ok(())
            } else {
                Err(SettingsError::OutOfRange { setting, value, least, most })
            }
        };
        within("pages_to_scan", self.pages_to_scan, 1, u64::from(u32::MAX))?;
        within("sleep_millisecs", self.sleep_millisecs, 0, 3_600_000)?;
        within("max_page_sharing", self.max_page_sharing.into(), 2, MAX_PAGE_SHARING.into())?;
        within("target_scan_seconds", self.target_scan_seconds.unwrap_or(1), 1, 86_400)?;
        within("pages_per_second", self.pages_per_second.unwrap_or(1), 1, 1 << 40)?;
        within("max_cpu_percent", self.max_cpu_percent.into(), 1, 100)?;
        within("huge_min_duplicates", self.huge_min_duplicates.into(), 1, 512)?;
        within("min_pass_millisecs", self.min_pass_millisecs, 0, 86_400_000)?;
        within("clean_passes", self.clean_passes.into(), 1, 64)?;
        within("max_written_per_second", self.max_written_per_second, 1, 1 << 40)?;
        within("huge_cold_passes", self.huge_cold_passes.into(), 1, 255)?;
        within("min_run_pages", self.min_run_pages.into(), 1, 512)?;
        within("most_copies", self.most_copies.into(), 1, 512)
    }

    /// Name of a setting in `other` that decides which pages may share, and differs there.
    pub(crate) fn decides_sharing(&self, other: &Self) -> Option<&'static str> {
        if self.merge_across_nodes != other.merge_across_nodes {
            Some("merge_across_nodes")
        } else if self.max_page_sharing != other.max_page_sharing {
            Some("max_page_sharing")
        } else {
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_valid_and_out_of_range_values_are_not() {
        assert_eq!(Settings::default().check(), Ok(()));
        let refused = [
            Settings { pages_to_scan: 0, ..Settings::default() },
            Settings { max_page_sharing: 1, ..Settings::default() },
            Settings { max_page_sharing: 0x8000, ..Settings::default() },
            Settings { max_cpu_percent: 0, ..Settings::default() },
            Settings { pages_per_second: Some(0), ..Settings::default() },
            Settings { target_scan_seconds: Some(0), ..Settings::default() },
            Settings { huge_min_duplicates: 513, ..Settings::default() },
        ];
        for settings in refused {
            assert!(
                matches!(settings.check(), Err(SettingsError::OutOfRange { .. })),
                "{settings:?}"
            );
        }
    }

    #[test]
    fn json_has_ksms_names() {
        let json = serde_json::to_value(Settings::default()).unwrap();
        assert_eq!(json["run"], "stop");
        assert_eq!(json["merge_across_nodes"], "across");
        assert_eq!(serde_json::from_value::<Settings>(json).unwrap(), Settings::default());
        assert!(serde_json::from_str::<Settings>(r#"{"pages_to_scn": 1}"#).is_err());
    }
}

//! Same-page merging: documents.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

pub use crate::config::MergeBackend;

/// The most pages a second that can be asked for: 64 GiB.
pub const MAX_MERGE_PAGES_PER_SECOND: u64 = 16 << 20;
/// The longest time for a scan of everything that can be asked for: a day.
pub const MAX_MERGE_SCAN_SECONDS: u64 = 24 * 60 * 60;
/// The longest time that a scan of everything can be made to take: a day.
pub const MAX_MERGE_PASS_MILLISECS: u64 = 24 * 60 * 60 * 1000;
/// The most scans over which a page must not be written to that can be asked for.
pub const MAX_MERGE_CLEAN_PASSES: u64 = 64;
/// The most sharers of one page that can be asked for.
pub const MAX_MERGE_PAGE_SHARING: u64 = 1 << 20;

/// What is to be done about equal pages (KSM's `run`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MergeRun {
    /// Nothing more is merged; what is merged stays so.
    Stop,
    /// Equal pages are merged.
    #[default]
    Merge,
    /// All pages of the machine get memory of their own again, and nothing more is merged.
    Unmerge,
}

impl MergeRun {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Stop, Self::Merge, Self::Unmerge];

    /// As it is written.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Merge => "merge",
            Self::Unmerge => "unmerge",
        }
    }
}

/// What merging is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MergeState {
    /// It was not asked for.
    #[default]
    Off,
    /// It was asked for and is not possible here; the machine runs on without it.
    Unavailable,
    /// Pages are merged.
    Merging,
    /// Pages are merged, but not as well as was asked for.
    Degraded,
    /// Nothing more is merged.
    Stopped,
    /// Pages get memory of their own again.
    Unmerging,
    /// No page is merged, and none will be.
    Unmerged,
}

impl MergeState {
    /// As it is written.
    pub fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Unavailable => "unavailable",
            Self::Merging => "merging",
            Self::Degraded => "degraded",
            Self::Stopped => "stopped",
            Self::Unmerging => "unmerging",
            Self::Unmerged => "unmerged",
        }
    }
}

/// What counters are about.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MergeScope {
    /// This machine.
    #[default]
    Machine,
    /// All processes of the host whose pages the kernel merges.
    Host,
}

/// `GET /merge`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MergeInfo {
    /// Who merges.
    pub backend: MergeBackend,
    /// The trust domain; `None` for a machine on its own.
    pub domain: Option<String>,
    /// Socket of the broker, if machines of the domain share pages through one.
    pub broker: Option<PathBuf>,
    /// What merging is doing.
    pub state: MergeState,
    /// Why it is unavailable or degraded, or what went wrong last.
    pub reason: Option<String>,
    /// How pages are merged; `None` where nobody does.
    pub settings: Option<MergeSettings>,
    /// What has been counted; `None` where nobody does.
    pub statistics: Option<MergeStatistics>,
}

/// How pages are merged. Names are KSM's where it has the setting; `None` for what is not set, or
/// what the kernel does not have.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MergeSettings {
    /// What is to be done.
    pub run: MergeRun,
    /// Whether pages of different NUMA nodes are merged.
    pub merge_across_nodes: Option<bool>,
    /// How many pages share one at most.
    pub max_page_sharing: Option<u64>,
    /// Whether pages of zeros are merged with none at all.
    pub use_zero_pages: Option<bool>,
    /// Whether pages that could not be merged are looked at less often.
    pub smart_scan: Option<bool>,
    /// Fixed pace in pages a second; `None` if the pace follows from the others.
    pub pages_per_second: Option<u64>,
    /// Processor time that may be used, in percent of one processor.
    pub cpu_percent: Option<u64>,
    /// How long a scan of everything is to take, in seconds.
    pub target_scan_seconds: Option<u64>,
    /// Milliseconds that a scan of everything takes at least; only where the monitor merges.
    pub min_pass_millisecs: Option<u64>,
    /// Scans over which a page must not have been written to before it is looked at; only where the
    /// monitor merges.
    pub clean_passes: Option<u64>,
}

/// What has been counted. The first ones are KSM's, by its names; `None` for what is not counted
/// here.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MergeStatistics {
    /// What the counters are about.
    pub scope: MergeScope,
    /// Pages that are shared.
    pub pages_shared: Option<u64>,
    /// Further pages that share them: what is saved.
    pub pages_sharing: Option<u64>,
    /// Pages without equal so far.
    pub pages_unshared: Option<u64>,
    /// Pages that change too fast.
    pub pages_volatile: Option<u64>,
    /// Pages looked at.
    pub pages_scanned: Option<u64>,
    /// Pages left out because they could not be merged several times.
    pub pages_skipped: Option<u64>,
    /// Scans of everything.
    pub full_scans: Option<u64>,
    /// Pages of zeros that cost nothing.
    pub ksm_zero_pages: Option<u64>,
    /// Memory saved without what it costs, in bytes.
    pub general_profit: Option<i64>,
    /// Shared pages of which there are copies, because one may not have so many sharers.
    pub stable_node_chains: Option<u64>,
    /// Those copies.
    pub stable_node_dups: Option<u64>,
    /// Memory of this machine that is shared, in bytes.
    pub merged_bytes: Option<u64>,
    /// Pages of this machine that share one of another NUMA node than their own.
    pub remote_merged_pages: Option<u64>,
    /// Pages whose content was looked at.
    pub hashed_pages: Option<u64>,
    /// Pages that had not been written to since the last scan.
    pub clean_pages: Option<u64>,
    /// Merged pages that were written to, and so share no more.
    pub broken_pages: Option<u64>,
    /// Of these, pages that were made ordinary memory again, which can be merged.
    pub brought_back_pages: Option<u64>,
    /// Of these, pages that were merged again.
    pub remerged_pages: Option<u64>,
    /// Memory that merging needs for itself, in bytes.
    pub metadata_bytes: Option<u64>,
    /// What became of pages that were to be replaced.
    pub replaced: Option<MergeReplaced>,
}

/// What became of pages that were to be replaced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MergeReplaced {
    /// They share one now.
    pub done: u64,
    /// They had changed meanwhile.
    pub different: u64,
    /// They were in use by the host's kernel.
    pub busy: u64,
    /// The run was too short for the mappings that are left.
    pub no_mappings: u64,
    /// They were gone.
    pub gone: u64,
}

/// `PUT /merge`: what is `None` stays as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MergeChange {
    /// What is to be done.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run: Option<MergeRun>,
    /// Whether pages of different NUMA nodes are merged; only while nothing is merged.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub merge_across_nodes: Option<bool>,
    /// How many pages share one at most; as above with the kernel's merging.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_page_sharing: Option<u64>,
    /// Whether pages of zeros are merged with none at all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub use_zero_pages: Option<bool>,
    /// Whether pages that could not be merged are looked at less often.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub smart_scan: Option<bool>,
    /// A fixed pace in pages a second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pages_per_second: Option<u64>,
    /// Processor time that may be used, in percent of one processor.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_percent: Option<u64>,
    /// How long a scan of everything is to take, in seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target_scan_seconds: Option<u64>,
    /// Milliseconds that a scan of everything takes at least; only where the monitor merges.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_pass_millisecs: Option<u64>,
    /// Scans over which a page must not have been written to before it is looked at; only where the
    /// monitor merges.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clean_passes: Option<u64>,
}

impl MergeChange {
    /// Whether it changes nothing.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

//! KSM's settings and counters by name (Linux Documentation/admin-guide/mm/ksm.rst, mm/ksm.c).

use std::fmt;

/// A setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Knob {
    /// 0: stop, merged pages stay merged; 1: merge; 2: unmerge all, then stop.
    Run,
    /// Pages scanned before each sleep.
    PagesToScan,
    /// Length of a sleep.
    SleepMillisecs,
    /// 1: pages of all NUMA nodes are merged with each other; 0: only those of the same node.
    MergeAcrossNodes,
    /// Maximum number of sharers of a page.
    MaxPageSharing,
    /// Interval of pruning the lists of duplicates of shared pages.
    StableNodeChainsPruneMillisecs,
    /// Whether pages of zeros are merged with the kernel's zero page.
    UseZeroPages,
    /// Whether pages that could not be merged are scanned less often.
    SmartScan,
    /// 0: none; 1: the kernel sets `pages_to_scan` itself so that a scan takes
    /// `advisor_target_scan_time`.
    AdvisorMode,
    /// Share of a processor that the advisor allows, in percent.
    AdvisorMaxCpu,
    /// Lower bound of the advisor's setting.
    AdvisorMinPagesToScan,
    /// Upper bound of the advisor's setting.
    AdvisorMaxPagesToScan,
    /// Target duration of a scan of all pages, in seconds.
    AdvisorTargetScanTime,
}

/// Value of [`Knob::Run`]: no further pages are merged.
pub const RUN_STOP: u64 = 0;
/// Value of [`Knob::Run`]: pages are merged.
pub const RUN_MERGE: u64 = 1;
/// Value of [`Knob::Run`]: all pages are unmerged.
pub const RUN_UNMERGE: u64 = 2;
/// Value of [`Knob::AdvisorMode`].
pub const ADVISOR_NONE: u64 = 0;
/// Value of [`Knob::AdvisorMode`].
pub const ADVISOR_SCAN_TIME: u64 = 1;

/// The words of `advisor_mode`, by value.
const ADVISOR_WORDS: [&str; 2] = ["none", "scan-time"];

impl Knob {
    /// All settings.
    pub const ALL: [Self; 13] = [
        Self::Run,
        Self::PagesToScan,
        Self::SleepMillisecs,
        Self::MergeAcrossNodes,
        Self::MaxPageSharing,
        Self::StableNodeChainsPruneMillisecs,
        Self::UseZeroPages,
        Self::SmartScan,
        Self::AdvisorMode,
        Self::AdvisorMaxCpu,
        Self::AdvisorMinPagesToScan,
        Self::AdvisorMaxPagesToScan,
        Self::AdvisorTargetScanTime,
    ];

    /// Name of the setting's file.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Run => "run",
            Self::PagesToScan => "pages_to_scan",
            Self::SleepMillisecs => "sleep_millisecs",
            Self::MergeAcrossNodes => "merge_across_nodes",
            Self::MaxPageSharing => "max_page_sharing",
            Self::StableNodeChainsPruneMillisecs => "stable_node_chains_prune_millisecs",
            Self::UseZeroPages => "use_zero_pages",
            Self::SmartScan => "smart_scan",
            Self::AdvisorMode => "advisor_mode",
            Self::AdvisorMaxCpu => "advisor_max_cpu",
            Self::AdvisorMinPagesToScan => "advisor_min_pages_to_scan",
            Self::AdvisorMaxPagesToScan => "advisor_max_pages_to_scan",
            Self::AdvisorTargetScanTime => "advisor_target_scan_time",
        }
    }

    /// The first Linux version with this setting.
    pub const fn since(self) -> &'static str {
        match self {
            Self::Run | Self::PagesToScan | Self::SleepMillisecs => "2.6.32",
            Self::MergeAcrossNodes => "3.9 (on hosts with NUMA)",
            Self::MaxPageSharing | Self::StableNodeChainsPruneMillisecs => "4.13",
            Self::UseZeroPages => "4.12",
            Self::SmartScan => "6.7",
            Self::AdvisorMode
            | Self::AdvisorMaxCpu
            | Self::AdvisorMinPagesToScan
            | Self::AdvisorMaxPagesToScan
            | Self::AdvisorTargetScanTime => "6.8",
        }
    }

    /// Whether the setting can only be changed while no page is shared.
    pub const fn needs_nothing_shared(self) -> bool {
        matches!(self, Self::MergeAcrossNodes | Self::MaxPageSharing)
    }

    /// `value` in the format of the setting's file.
    pub fn text(self, value: u64) -> String {
        match (self, ADVISOR_WORDS.get(usize::try_from(value).unwrap_or(usize::MAX))) {
            (Self::AdvisorMode, Some(word)) => (*word).to_owned(),
            _ => value.to_string(),
        }
    }

    /// The setting of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|knob| knob.name() == name)
    }

    /// Parses the first line of the setting's file: a number, or for the advisor the word in
    /// brackets, or alone.
    pub fn parse(self, text: &str) -> Option<u64> {
        let line = text.lines().next()?.trim();
        if self != Self::AdvisorMode {
            return line.parse().ok();
        }
        let word = match line.split_once('[') {
            Some((_, rest)) => rest.split_once(']')?.0,
            None => line,
        };
        ADVISOR_WORDS.iter().zip(0..).find(|(known, _)| **known == word).map(|(_, value)| value)
    }

    const fn index(self) -> usize {
        self as usize
    }
}

/// A counter of the whole host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Counter {
    /// Shared pages.
    PagesShared,
    /// Further pages that share them: the saved ones.
    PagesSharing,
    /// Unique pages that are scanned repeatedly.
    PagesUnshared,
    /// Pages that change too often.
    PagesVolatile,
    /// Pages scanned so far (Linux 6.1).
    PagesScanned,
    /// Pages skipped by smart scan (Linux 6.7).
    PagesSkipped,
    /// Complete scans.
    FullScans,
    /// Pages merged with the zero page (Linux 6.5).
    KsmZeroPages,
    /// Bytes saved, less the bytes of metadata (Linux 6.4).
    GeneralProfit,
    /// Pages with more sharers than one page may have.
    StableNodeChains,
    /// Duplicates of those.
    StableNodeDups,
}

impl Counter {
    /// All counters.
    pub const ALL: [Self; 11] = [
        Self::PagesShared,
        Self::PagesSharing,
        Self::PagesUnshared,
        Self::PagesVolatile,
        Self::PagesScanned,
        Self::PagesSkipped,
        Self::FullScans,
        Self::KsmZeroPages,
        Self::GeneralProfit,
        Self::StableNodeChains,
        Self::StableNodeDups,
    ];

    /// Name of the counter's file.
    pub const fn name(self) -> &'static str {
        match self {
            Self::PagesShared => "pages_shared",
            Self::PagesSharing => "pages_sharing",
            Self::PagesUnshared => "pages_unshared",
            Self::PagesVolatile => "pages_volatile",
            Self::PagesScanned => "pages_scanned",
            Self::PagesSkipped => "pages_skipped",
            Self::FullScans => "full_scans",
            Self::KsmZeroPages => "ksm_zero_pages",
            Self::GeneralProfit => "general_profit",
            Self::StableNodeChains => "stable_node_chains",
            Self::StableNodeDups => "stable_node_dups",
        }
    }
}

/// Values of some settings; absent ones do not exist in this kernel, or are to stay unchanged.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Values([Option<u64>; Knob::ALL.len()]);

impl Values {
    /// No value.
    pub fn new() -> Self {
        Self::default()
    }

    /// The value of `knob`.
    pub fn get(&self, knob: Knob) -> Option<u64> {
        self.0[knob.index()]
    }

    /// Sets the value of `knob`.
    pub fn set(&mut self, knob: Knob, value: u64) {
        self.0[knob.index()] = Some(value);
    }

    /// Returns the values with `knob` set to `value`.
    #[must_use]
    pub fn with(mut self, knob: Knob, value: u64) -> Self {
        self.set(knob, value);
        self
    }

    /// All present values.
    pub fn iter(&self) -> impl Iterator<Item = (Knob, u64)> + '_ {
        Knob::ALL.into_iter().filter_map(|knob| Some((knob, self.get(knob)?)))
    }

    /// Whether there are no values.
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(Option::is_none)
    }
}

impl fmt::Debug for Values {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_map()
            .entries(self.iter().map(|(knob, value)| (knob.name(), value)))
            .finish()
    }
}

impl FromIterator<(Knob, u64)> for Values {
    fn from_iter<I: IntoIterator<Item = (Knob, u64)>>(values: I) -> Self {
        values.into_iter().fold(Self::new(), |all, (knob, value)| all.with(knob, value))
    }
}

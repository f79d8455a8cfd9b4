//! Same-page merging: documents.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use crate::config::MergeBackend;

/// Operation of merging (KSM's `run`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum MergeRun {
    /// No further pages are merged; merged pages stay merged.
    Stop,
    /// Equal pages are merged.
    #[default]
    Merge,
    /// All pages of the machine become private again, and no more are merged.
    Unmerge,
}

/// State of merging.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum MergeState {
    /// Not configured.
    #[default]
    Off,
    /// Configured but not possible here; the machine runs without it.
    Unavailable,
    /// Pages are merged.
    Merging,
    /// Pages are merged, but with restrictions.
    Degraded,
    /// No further pages are merged.
    Stopped,
    /// Merged pages are becoming private again.
    Unmerging,
    /// No page is merged, and none will be.
    Unmerged,
}

/// Scope of the counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum MergeScope {
    /// This machine.
    #[default]
    Machine,
    /// All processes of the host whose pages the kernel merges.
    Host,
}

/// `GET /merge`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "Merge")]
pub struct MergeInfo {
    /// The component that merges.
    pub backend: MergeBackend,
    /// The trust domain: the monitor never merges pages of different domains. Null for a machine on
    /// its own.
    pub domain: Option<String>,
    /// Socket of the broker, if machines of the domain share pages through one.
    pub broker: Option<PathBuf>,
    /// State of merging.
    pub state: MergeState,
    /// Why merging is unavailable or degraded, or its last error.
    pub reason: Option<String>,
    /// How pages are merged; null without merging.
    pub settings: Option<MergeSettings>,
    /// Counters of merging; null without merging.
    pub statistics: Option<MergeStatistics>,
}

/// How pages are merged, with KSM's names where it has the setting. In answers, null marks a
/// setting that is not set or not supported by the host's kernel; in `PUT /merge`, an omitted
/// setting is left unchanged.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct MergeSettings {
    /// Operation of merging.
    pub run: Option<MergeRun>,
    /// Whether pages of different NUMA nodes of the host are merged. Can only be changed while no
    /// page is merged: unmerge first.
    pub merge_across_nodes: Option<bool>,
    /// Most pages that share one. Can only be changed while no page is merged.
    #[schemars(range(min = 2, max = 32_767), extend("x-unit" = "pages"))]
    pub max_page_sharing: Option<u64>,
    /// Whether zero pages are freed instead of sharing a page.
    pub use_zero_pages: Option<bool>,
    /// Whether pages that repeatedly could not be merged are scanned less often.
    pub smart_scan: Option<bool>,
    /// A fixed rate, in pages of 4096 bytes a second; not together with target_scan_seconds. At
    /// most 64 GiB.
    #[schemars(range(min = 1, max = 16_777_216), extend("x-unit" = "pages"))]
    #[schemars(extend("x-conflicts-with" = "target_scan_seconds"))]
    pub pages_per_second: Option<u64>,
    /// Limit of processor time, in percent of one processor.
    #[schemars(range(min = 1, max = 100), extend("x-unit" = "percent"))]
    pub cpu_percent: Option<u64>,
    /// Target time of a full scan, in seconds; the rate is derived from it.
    #[schemars(range(min = 1, max = 86_400), extend("x-unit" = "seconds"))]
    pub target_scan_seconds: Option<u64>,
    /// Minimum time of a full scan in milliseconds; only where the monitor merges.
    #[schemars(range(max = 86_400_000), extend("x-unit" = "milliseconds"))]
    pub min_pass_millisecs: Option<u64>,
    /// Number of scans during which a page must not have been written to before it is considered;
    /// only where the monitor merges.
    #[schemars(range(min = 1, max = 64), extend("x-unit" = "scans"))]
    pub clean_passes: Option<u64>,
}

/// Settings to change.
pub type MergeChange = MergeSettings;

/// Counters of merging. The first ones are KSM's, by its names; `None` for counters that are not
/// kept here.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MergeStatistics {
    /// machine: this machine. host: all processes of the host whose pages the kernel merges;
    /// merged_bytes always covers this machine only.
    pub scope: MergeScope,
    /// Pages that are shared.
    pub pages_shared: Option<u64>,
    /// Further mappings of them: the pages saved.
    pub pages_sharing: Option<u64>,
    /// Pages without an equal one so far.
    pub pages_unshared: Option<u64>,
    /// Pages that change too fast to be merged.
    pub pages_volatile: Option<u64>,
    /// Equal pages that could not be shared, and are tried again later. Only where the monitor
    /// merges.
    pub pages_refused: Option<u64>,
    /// Pages scanned.
    pub pages_scanned: Option<u64>,
    /// Pages skipped because they repeatedly could not be merged.
    pub pages_skipped: Option<u64>,
    /// Full scans.
    pub full_scans: Option<u64>,
    /// Zero pages that take no memory.
    pub ksm_zero_pages: Option<u64>,
    /// Memory saved minus its cost, in bytes.
    pub general_profit: Option<i64>,
    /// Shared pages with several copies, because the number of sharers of one is limited.
    pub stable_node_chains: Option<u64>,
    /// Number of these copies.
    pub stable_node_dups: Option<u64>,
    /// Shared memory of this machine, as far as it is not known to have been written to since.
    pub merged_bytes: Option<u64>,
    /// Pages of this machine that share a page of another NUMA node.
    pub remote_merged_pages: Option<u64>,
    /// Pages whose content was hashed.
    pub hashed_pages: Option<u64>,
    /// Pages that had not been written to since the last scan.
    pub clean_pages: Option<u64>,
    /// Pages that had been written to since the last scan. Only where the monitor merges.
    pub written_pages: Option<u64>,
    /// Pages of huge pages, of which it is not tracked whether they are written to. Only where the
    /// monitor merges.
    pub untracked_pages: Option<u64>,
    /// Huge pages that were split because enough of their pages had equal ones. Only where the
    /// monitor merges.
    pub huge_pages_split: Option<u64>,
    /// Of these, huge pages of which too few pages could be shared.
    pub huge_pages_split_in_vain: Option<u64>,
    /// Blocks of memory that were made huge pages again, when none of their pages was shared any
    /// more.
    pub huge_pages_collapsed: Option<u64>,
    /// Merged pages that were written to, and so are no longer shared. Only where the monitor
    /// merges.
    pub broken_pages: Option<u64>,
    /// Of these, pages that later became ordinary memory again and can be merged.
    pub brought_back_pages: Option<u64>,
    /// Of these, pages that were merged again.
    pub remerged_pages: Option<u64>,
    /// Memory used by merging itself.
    pub metadata_bytes: Option<u64>,
    /// Attempts to replace a page by a shared one, by result.
    pub replaced: Option<MergeReplaced>,
}

/// Attempts to replace a page by a shared one, by result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MergeReplaced {
    /// The page is shared now.
    pub done: u64,
    /// The content had changed meanwhile.
    pub different: u64,
    /// The page was in use by the host's kernel.
    pub busy: u64,
    /// The run was too short for the limit of mappings of a process.
    pub no_mappings: u64,
    /// The page no longer existed.
    pub gone: u64,
}

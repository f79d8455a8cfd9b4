//! Same-page merging: documents.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use crate::config::MergeBackend;

/// What is to be done about equal pages (KSM's `run`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
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

/// What merging is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
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

/// What counters are about.
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
    /// Who merges.
    pub backend: MergeBackend,
    /// The trust domain: pages of different domains are never merged by the monitor. Null for a
    /// machine on its own.
    pub domain: Option<String>,
    /// Socket of the broker, if machines of the domain share pages through one.
    pub broker: Option<PathBuf>,
    /// What merging is doing.
    pub state: MergeState,
    /// Why it is unavailable or degraded, or what went wrong last.
    pub reason: Option<String>,
    /// How pages are merged; null where nobody does.
    pub settings: Option<MergeSettings>,
    /// What has been counted; null where nobody merges.
    pub statistics: Option<MergeStatistics>,
}

/// How pages are merged, and what is to change about it. Names are KSM's where it has the setting.
/// Asked for with `GET /merge`, null is what is not set, or what the host's kernel does not have;
/// with `PUT /merge`, what is left out stays as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct MergeSettings {
    /// What is to be done about equal pages.
    pub run: Option<MergeRun>,
    /// Whether pages of different NUMA nodes of the host are merged; changes only while nothing is
    /// merged: unmerge first.
    pub merge_across_nodes: Option<bool>,
    /// How many pages share one at most; changes only while nothing is merged.
    #[schemars(range(min = 2, max = 32_767), extend("x-unit" = "pages"))]
    pub max_page_sharing: Option<u64>,
    /// Whether pages of zeros are merged with none at all.
    pub use_zero_pages: Option<bool>,
    /// Whether pages that could not be merged several times are looked at less often.
    pub smart_scan: Option<bool>,
    /// A fixed pace, in pages of 4096 bytes a second; not together with target_scan_seconds. At
    /// most 64 GiB.
    #[schemars(range(min = 1, max = 16_777_216), extend("x-unit" = "pages"))]
    #[schemars(extend("x-conflicts-with" = "target_scan_seconds"))]
    pub pages_per_second: Option<u64>,
    /// Processor time that may be used, in percent of one processor.
    #[schemars(range(min = 1, max = 100), extend("x-unit" = "percent"))]
    pub cpu_percent: Option<u64>,
    /// How long a scan of everything is to take, in seconds; the pace follows from it.
    #[schemars(range(min = 1, max = 86_400), extend("x-unit" = "seconds"))]
    pub target_scan_seconds: Option<u64>,
    /// Milliseconds that a scan of everything takes at least; only where the monitor merges.
    #[schemars(range(max = 86_400_000), extend("x-unit" = "milliseconds"))]
    pub min_pass_millisecs: Option<u64>,
    /// Scans over which a page must not have been written to before it is looked at; only where the
    /// monitor merges.
    #[schemars(range(min = 1, max = 64), extend("x-unit" = "scans"))]
    pub clean_passes: Option<u64>,
}

/// Settings that are to change.
pub type MergeChange = MergeSettings;

/// What has been counted. The first ones are KSM's, by its names; `None` for what is not counted
/// here.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MergeStatistics {
    /// machine: this machine. host: all processes of the host whose pages the kernel merges;
    /// merged_bytes is about this machine in any case.
    pub scope: MergeScope,
    /// Pages that are shared.
    pub pages_shared: Option<u64>,
    /// Further pages that share them: what is saved.
    pub pages_sharing: Option<u64>,
    /// Pages without equal so far.
    pub pages_unshared: Option<u64>,
    /// Pages that change too fast to be merged.
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
    /// Memory of this machine that is shared, as far as it is known that it was not written to
    /// since.
    pub merged_bytes: Option<u64>,
    /// Pages of this machine that share one of another NUMA node than their own.
    pub remote_merged_pages: Option<u64>,
    /// Pages whose content was looked at.
    pub hashed_pages: Option<u64>,
    /// Pages that had not been written to since the last scan.
    pub clean_pages: Option<u64>,
    /// Merged pages that were written to, and so share no more. Only where the monitor merges.
    pub broken_pages: Option<u64>,
    /// Of these, pages that were made ordinary memory again some time later, and so can be merged.
    pub brought_back_pages: Option<u64>,
    /// Of these, pages that were merged again.
    pub remerged_pages: Option<u64>,
    /// Memory that merging needs for itself.
    pub metadata_bytes: Option<u64>,
    /// Pages that were to be replaced by a shared one, by what became of them.
    pub replaced: Option<MergeReplaced>,
}

/// What became of pages that were to be replaced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MergeReplaced {
    /// They share one now.
    pub done: u64,
    /// They had changed meanwhile.
    pub different: u64,
    /// They were in use by the host's kernel.
    pub busy: u64,
    /// Their run was too short for the mappings that a process may have.
    pub no_mappings: u64,
    /// There was nothing to be replaced any more.
    pub gone: u64,
}

//! Same-page merging: changes and the table.

use clap::ValueEnum;
use ebb_vmm::api::{
    Client, MAX_MERGE_CLEAN_PASSES, MAX_MERGE_PAGE_SHARING, MAX_MERGE_PAGES_PER_SECOND,
    MAX_MERGE_PASS_MILLISECS, MAX_MERGE_SCAN_SECONDS, MergeBackend, MergeChange, MergeInfo,
    MergeRun, MergeScope, MergeSettings, MergeState, MergeStatistics,
};

use super::{Row, bytes, row};
use crate::run::Toggle;

/// What is to change.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Stop (what is merged stays so), merge, or give all pages of the machine memory of their own
    /// again
    #[arg(long, value_enum)]
    run: Option<Run>,
    /// A fixed pace, in pages of 4096 bytes a second
    #[arg(long, value_name = "N", conflicts_with = "target_scan_seconds", value_parser = clap::value_parser!(u64).range(1..=MAX_MERGE_PAGES_PER_SECOND))]
    pages_per_second: Option<u64>,
    /// Processor time that may be used, in percent of one processor
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=100))]
    cpu_percent: Option<u64>,
    /// How long a scan of everything is to take; the pace follows from it
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=MAX_MERGE_SCAN_SECONDS))]
    target_scan_seconds: Option<u64>,
    /// Whether pages of different NUMA nodes are merged; only while nothing is merged
    #[arg(long, value_enum)]
    merge_across_nodes: Option<Toggle>,
    /// How many pages share one at most; only while nothing is merged
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(2..=MAX_MERGE_PAGE_SHARING))]
    max_page_sharing: Option<u64>,
    /// Whether pages of zeros are merged with none at all
    #[arg(long, value_enum)]
    use_zero_pages: Option<Toggle>,
    /// Whether pages that could not be merged several times are looked at less often
    #[arg(long, value_enum)]
    smart_scan: Option<Toggle>,
    /// How long a scan of everything takes at least, in milliseconds (merge=owner)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(0..=MAX_MERGE_PASS_MILLISECS))]
    min_pass_millisecs: Option<u64>,
    /// Scans over which a page must not have been written to before it is looked at (merge=owner)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=MAX_MERGE_CLEAN_PASSES))]
    clean_passes: Option<u64>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Run {
    /// Nothing more is merged.
    Stop,
    /// Equal pages are merged.
    Merge,
    /// Nothing stays merged.
    Unmerge,
}

impl Args {
    fn change(&self) -> MergeChange {
        let on = |toggle: Option<Toggle>| toggle.map(|toggle| matches!(toggle, Toggle::On));
        MergeChange {
            run: self.run.map(|run| match run {
                Run::Stop => MergeRun::Stop,
                Run::Merge => MergeRun::Merge,
                Run::Unmerge => MergeRun::Unmerge,
            }),
            merge_across_nodes: on(self.merge_across_nodes),
            max_page_sharing: self.max_page_sharing,
            use_zero_pages: on(self.use_zero_pages),
            smart_scan: on(self.smart_scan),
            pages_per_second: self.pages_per_second,
            cpu_percent: self.cpu_percent,
            target_scan_seconds: self.target_scan_seconds,
            min_pass_millisecs: self.min_pass_millisecs,
            clean_passes: self.clean_passes,
        }
    }

    /// Changes what is to change, and tells how it is.
    pub(super) fn execute(&self, client: &Client) -> anyhow::Result<MergeInfo> {
        let change = self.change();
        Ok(if change.is_empty() {
            client.get("/merge")?
        } else {
            client.put_json("/merge", &change)?
        })
    }
}

fn state(state: MergeState) -> &'static str {
    match state {
        MergeState::Unavailable => "not possible here",
        state => state.name(),
    }
}

fn backend(info: &MergeInfo) -> String {
    match (info.backend, &info.domain) {
        (MergeBackend::Off, _) => "nobody".to_owned(),
        (MergeBackend::Owner, None) => "the monitor, pages of this machine only".to_owned(),
        (MergeBackend::Owner, Some(domain)) => format!("the monitor, trust domain '{domain}'"),
        (MergeBackend::Kernel, None) => {
            "the kernel, with all that it merges on this host".to_owned()
        }
        (MergeBackend::Kernel, Some(domain)) => format!("the kernel, trust domain '{domain}'"),
    }
}

/// The table.
pub(super) fn rows(info: &MergeInfo) -> Vec<Row> {
    let mut rows = vec![row("state", state(info.state)), row("merged by", backend(info))];
    if let Some(reason) = &info.reason {
        rows.push(row("reason", reason.as_str()));
    }
    if let Some(broker) = &info.broker {
        rows.push(row("broker", broker.display().to_string()));
    }
    rows.extend(info.settings.iter().flat_map(settings_rows));
    rows.extend(info.statistics.iter().flat_map(statistics_rows));
    rows
}

fn settings_rows(settings: &MergeSettings) -> Vec<Row> {
    let nodes =
        settings.merge_across_nodes.map(|across| if across { "merged" } else { "kept apart" });
    let pace: Vec<String> = [
        settings.pages_per_second.map(|pages| format!("{pages} pages/s")),
        settings.target_scan_seconds.map(|seconds| format!("a scan in {seconds} s")),
        settings.cpu_percent.map(|percent| format!("at most {percent} % of a processor")),
    ]
    .into_iter()
    .flatten()
    .collect();
    let mut rows = vec![row("run", settings.run.name())];
    rows.extend(nodes.map(|nodes| row("pages of different nodes", nodes)));
    if !pace.is_empty() {
        rows.push(row("pace", pace.join(", ")));
    }
    rows
}

fn statistics_rows(statistics: &MergeStatistics) -> Vec<Row> {
    let mut rows = Vec::new();
    if let Some(merged_bytes) = statistics.merged_bytes {
        rows.push(row("memory shared", bytes(merged_bytes)));
    }
    if statistics.scope == MergeScope::Host {
        rows.push(row("counted below", "all that the kernel merges on this host"));
    }
    let counts = [
        ("pages_shared", statistics.pages_shared),
        ("pages_sharing", statistics.pages_sharing),
        ("pages_unshared", statistics.pages_unshared),
        ("pages_volatile", statistics.pages_volatile),
        ("ksm_zero_pages", statistics.ksm_zero_pages),
        ("pages_scanned", statistics.pages_scanned),
        ("pages_skipped", statistics.pages_skipped),
        ("full_scans", statistics.full_scans),
        ("stable_node_chains", statistics.stable_node_chains),
        ("stable_node_dups", statistics.stable_node_dups),
        ("remote_merged_pages", statistics.remote_merged_pages),
        ("hashed_pages", statistics.hashed_pages),
        ("clean_pages", statistics.clean_pages),
        ("broken_pages", statistics.broken_pages),
        ("brought_back_pages", statistics.brought_back_pages),
        ("remerged_pages", statistics.remerged_pages),
    ];
    rows.extend(counts.into_iter().filter_map(|(name, count)| Some(row(name, count?.to_string()))));
    if let Some(profit) = statistics.general_profit {
        let sign = if profit < 0 { "-" } else { "" };
        rows.push(row("general_profit", format!("{sign}{}", bytes(profit.unsigned_abs()))));
    }
    if let Some(metadata_bytes) = statistics.metadata_bytes {
        rows.push(row("memory it needs", bytes(metadata_bytes)));
    }
    if let Some(replaced) = statistics.replaced {
        let text = format!(
            "{}; not: {} changed, {} busy, {} in too short runs, {} gone",
            replaced.done, replaced.different, replaced.busy, replaced.no_mappings, replaced.gone
        );
        rows.push(row("pages replaced", text));
    }
    rows
}

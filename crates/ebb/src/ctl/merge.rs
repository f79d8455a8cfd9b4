//! Same-page merging: changes of settings, and the table.

use ebb_vmm::api::{
    Client, ClientError, MergeBackend, MergeInfo, MergeScope, MergeSettings, MergeState,
    MergeStatistics,
};
use ebb_vmm::words::to_word;

use super::{Row, bytes, row};

/// Applies the change, if any, and returns the resulting state.
pub(super) fn execute(change: &MergeSettings, client: &Client) -> Result<MergeInfo, ClientError> {
    if *change == MergeSettings::default() {
        client.get("/merge")
    } else {
        client.put_json("/merge", change)
    }
}

fn state(state: MergeState) -> String {
    match state {
        MergeState::Unavailable => "unavailable".to_owned(),
        state => to_word(state),
    }
}

fn backend(info: &MergeInfo) -> String {
    match (info.backend, &info.domain) {
        (MergeBackend::Off, _) => "none".to_owned(),
        (MergeBackend::Owner, None) => "the monitor, pages of this machine only".to_owned(),
        (MergeBackend::Owner, Some(domain)) => format!("the monitor, trust domain '{domain}'"),
        (MergeBackend::Kernel, None) => {
            "the kernel, with all memory that it merges on this host".to_owned()
        }
        (MergeBackend::Kernel, Some(domain)) => format!("the kernel, trust domain '{domain}'"),
    }
}

/// Rows of the table.
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
    let mut rows: Vec<_> = settings.run.map(|run| row("run", to_word(run))).into_iter().collect();
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
        rows.push(row("counted below", "all memory that the kernel merges on this host"));
    }
    let counts = [
        ("pages_shared", statistics.pages_shared),
        ("pages_sharing", statistics.pages_sharing),
        ("pages_unshared", statistics.pages_unshared),
        ("pages_volatile", statistics.pages_volatile),
        ("pages_refused", statistics.pages_refused),
        ("ksm_zero_pages", statistics.ksm_zero_pages),
        ("pages_scanned", statistics.pages_scanned),
        ("pages_skipped", statistics.pages_skipped),
        ("full_scans", statistics.full_scans),
        ("stable_node_chains", statistics.stable_node_chains),
        ("stable_node_dups", statistics.stable_node_dups),
        ("remote_merged_pages", statistics.remote_merged_pages),
        ("hashed_pages", statistics.hashed_pages),
        ("clean_pages", statistics.clean_pages),
        ("written_pages", statistics.written_pages),
        ("untracked_pages", statistics.untracked_pages),
        ("huge_pages_split", statistics.huge_pages_split),
        ("huge_pages_split_in_vain", statistics.huge_pages_split_in_vain),
        ("huge_pages_collapsed", statistics.huge_pages_collapsed),
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
        rows.push(row("metadata", bytes(metadata_bytes)));
    }
    if let Some(replaced) = statistics.replaced {
        let text = format!(
            "{}; not replaced: {} changed, {} busy, {} in too short runs, {} gone",
            replaced.done, replaced.different, replaced.busy, replaced.no_mappings, replaced.gone
        );
        rows.push(row("pages replaced", text));
    }
    rows
}

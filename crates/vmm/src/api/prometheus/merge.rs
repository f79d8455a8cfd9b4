//! Counters of same-page merging.

use super::{Kind, Text};
use crate::api::control::KindCount;
use crate::api::merge::{MergeScope, MergeStatistics};

/// Adds what is counted. Counters of the host's kernel have names of their own, since each machine
/// tells the same ones.
pub(super) fn render(text: &mut Text, merge: &MergeStatistics) {
    let prefix = match merge.scope {
        MergeScope::Machine => "ebb_merge",
        MergeScope::Host => "ebb_merge_host",
    };
    let values = [
        (Kind::Gauge, "pages_shared", "Pages that are shared.", merge.pages_shared),
        (Kind::Gauge, "pages_sharing", "Further pages that share them.", merge.pages_sharing),
        (Kind::Gauge, "pages_unshared", "Pages without equal so far.", merge.pages_unshared),
        (
            Kind::Gauge,
            "pages_volatile",
            "Pages that change too fast to be merged.",
            merge.pages_volatile,
        ),
        (Kind::Gauge, "ksm_zero_pages", "Pages of zeros that cost nothing.", merge.ksm_zero_pages),
        (
            Kind::Gauge,
            "stable_node_chains",
            "Shared pages of which there are copies.",
            merge.stable_node_chains,
        ),
        (Kind::Gauge, "stable_node_dups", "Copies of shared pages.", merge.stable_node_dups),
        (Kind::Counter, "pages_scanned_total", "Pages looked at.", merge.pages_scanned),
        (
            Kind::Counter,
            "pages_skipped_total",
            "Pages left out by smart scan.",
            merge.pages_skipped,
        ),
        (Kind::Counter, "full_scans_total", "Scans of everything.", merge.full_scans),
        (
            Kind::Gauge,
            "remote_merged_pages",
            "Pages that share one of another NUMA node.",
            merge.remote_merged_pages,
        ),
        (
            Kind::Counter,
            "hashed_pages_total",
            "Pages whose content was looked at.",
            merge.hashed_pages,
        ),
        (
            Kind::Counter,
            "clean_pages_total",
            "Pages that had not been written to since the last scan.",
            merge.clean_pages,
        ),
        (
            Kind::Counter,
            "broken_pages_total",
            "Merged pages that were written to.",
            merge.broken_pages,
        ),
        (
            Kind::Counter,
            "brought_back_pages_total",
            "Pages that were written to after a merge and are ordinary memory again.",
            merge.brought_back_pages,
        ),
        (
            Kind::Counter,
            "remerged_pages_total",
            "Pages that were written to after a merge and are merged again.",
            merge.remerged_pages,
        ),
        (
            Kind::Gauge,
            "metadata_bytes",
            "Memory that merging needs for itself.",
            merge.metadata_bytes,
        ),
    ];
    for (kind, name, help, value) in values {
        if let Some(value) = value {
            text.value(kind, &format!("{prefix}_{name}"), help, value);
        }
    }
    if let Some(profit) = merge.general_profit {
        let name = format!("{prefix}_general_profit_bytes");
        text.help(Kind::Gauge, &name, "Memory saved without what it costs.");
        text.line(format_args!("{name} {profit}"));
    }
    if let Some(merged_bytes) = merge.merged_bytes {
        let help = "Memory of this machine that is shared.";
        text.value(Kind::Gauge, "ebb_merge_merged_bytes", help, merged_bytes);
    }
    if let Some(replaced) = &merge.replaced {
        let kinds = [
            KindCount::new("done", replaced.done),
            KindCount::new("different", replaced.different),
            KindCount::new("busy", replaced.busy),
            KindCount::new("no_mappings", replaced.no_mappings),
            KindCount::new("gone", replaced.gone),
        ];
        let help = "Pages that were to be replaced by a shared one, by what became of them.";
        text.kinds("ebb_merge_replaced_pages_total", help, &kinds);
    }
}

#[cfg(test)]
mod tests {
    use super::super::{parse, render};
    use crate::api::control::Metrics;
    use crate::api::merge::MergeReplaced;

    use super::*;

    fn names(merge: MergeStatistics) -> Vec<String> {
        let text = render(&Metrics { merge: Some(merge), ..Metrics::default() });
        let samples = parse(&text).unwrap();
        samples
            .into_iter()
            .map(|sample| sample.name)
            .filter(|name| name.contains("merge"))
            .collect()
    }

    #[test]
    fn only_what_is_counted_is_told() {
        assert!(names(MergeStatistics::default()).is_empty());
        let counted = MergeStatistics {
            pages_shared: Some(3),
            general_profit: Some(-5),
            replaced: Some(MergeReplaced { done: 7, ..MergeReplaced::default() }),
            ..MergeStatistics::default()
        };
        let own = names(counted.clone());
        assert_eq!(own.iter().filter(|name| *name == "ebb_merge_replaced_pages_total").count(), 5);
        assert!(own.contains(&"ebb_merge_pages_shared".to_owned()), "{own:?}");
        let host = names(MergeStatistics { scope: MergeScope::Host, ..counted });
        assert!(host.contains(&"ebb_merge_host_pages_shared".to_owned()), "{host:?}");
        assert!(host.contains(&"ebb_merge_host_general_profit_bytes".to_owned()), "{host:?}");
    }
}

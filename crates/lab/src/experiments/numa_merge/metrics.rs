//! Results of a series on merged pages on several nodes, as metrics and tables.

use ebb_vmm::api::{MergeScope, MergeStatistics};

use super::model::{self, PUBLISHED, Spread};
use crate::harness::merging::{Merging, Nodes, SharedCounts};
use crate::harness::survey::{GuestSurvey, Survey};
use crate::report::figures::{DataTable, Value};
use crate::report::metrics::{self, Metric};
use crate::report::results::{MetricInfo, Series};

/// Results of one guest.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct GuestFound {
    /// Its node.
    pub(super) node: u32,
    /// Time of a read before its pages were merged, ns.
    pub(super) before_ns: f64,
    /// Time of a read afterwards, ns.
    pub(super) after_ns: Option<f64>,
    /// Its monitor's statistics.
    pub(super) statistics: MergeStatistics,
}

impl GuestFound {
    /// Zero pages that its monitor has discarded; the host's kernel counts for the whole host.
    fn zeroed_pages(&self) -> Option<u64> {
        self.statistics.ksm_zero_pages.filter(|_| self.is_counted())
    }

    /// Whether its monitor counts for this guest.
    fn is_counted(&self) -> bool {
        self.statistics.scope == MergeScope::Machine
    }
}

/// Results of a series.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Found {
    /// Nodes of the host.
    pub(super) nodes: u32,
    /// The guests, in the order of starting.
    pub(super) guests: Vec<GuestFound>,
    /// Time until no more pages were merged, s.
    pub(super) merge_s: Option<f64>,
    /// Time of a read during merging, in one guest, ns.
    pub(super) meanwhile_ns: Option<f64>,
    /// Decrease of the host's memory in use, MiB.
    pub(super) freed_mib: Option<f64>,
    /// Shared pages according to the broker or kernel.
    pub(super) shared: Option<SharedCounts>,
    /// Merged pages, seen from outside.
    pub(super) survey: Option<Survey>,
    /// Pages of guests on another node than their guest before anything was merged.
    pub(super) misplaced_before: Option<u64>,
}

impl Found {
    /// Zero pages that occupy no memory: discarded, or shared like any others.
    fn zero_pages(&self) -> Option<u64> {
        let survey = self.survey.as_ref()?;
        let zeroed: u64 = self.guests.iter().filter_map(GuestFound::zeroed_pages).sum();
        Some(zeroed + survey.guests.iter().map(|guest| guest.zero_pages).sum::<u64>())
    }

    /// Number of pages saved by merging: further sharers, and discarded zero pages.
    fn saved_pages(&self) -> Option<u64> {
        let zeroed: u64 = self.guests.iter().filter_map(GuestFound::zeroed_pages).sum();
        Some(self.shared?.pages_sharing + zeroed)
    }

    /// Merged pages on other nodes, as the monitors count them.
    fn counted_remote(&self) -> Option<u64> {
        self.guests.iter().map(|guest| guest.statistics.remote_merged_pages).sum::<Option<u64>>()
    }
}

/// All metrics.
fn metrics() -> Vec<Metric<Found>> {
    fn survey(name: &str, title: &str, value: fn(&Survey) -> u64) -> Metric<Found> {
        Metric::higher(name, title, "", move |found: &Found| {
            found.survey.as_ref().map(|survey| value(survey) as f64)
        })
    }
    type Of = fn(&Found) -> Option<f64>;
    let count = |name, title, value: Of| Metric::higher(name, title, "", value);
    let ns = |name, title, value: Of| Metric::lower(name, title, "ns", value);
    let percent = |name, title, value: Of| Metric::lower(name, title, "%", value);
    vec![
        count("pages_shared", "Pages that are shared", |found| {
            Some(found.shared?.pages_shared as f64)
        }),
        count("pages_sharing", "Further pages that share them", |found| {
            Some(found.shared?.pages_sharing as f64)
        }),
        count("zero_pages", "Pages of zeros merged with each other, or taken away", |found| {
            Some(found.zero_pages()? as f64)
        }),
        survey("seen_merged_pages", "Merged pages, seen from outside", |survey| {
            survey.pages_shared + survey.pages_sharing
        }),
        survey("read_merged_pages", "of these read by their guest since", |survey| {
            survey.guests.iter().map(|guest| guest.read_pages).sum()
        }),
        Metric::lower(
            "remote_merged_pages",
            "Merged pages on another node than their guest",
            "",
            |found: &Found| Some(found.survey.as_ref()?.remote_merged_pages as f64),
        ),
        Metric::lower(
            "remote_merged_pages_counted",
            "the same, as the monitors count them",
            "",
            |found: &Found| Some(found.survey.as_ref().and(found.counted_remote())? as f64),
        ),
        Metric::lower(
            "misplaced_pages",
            "Pages of guests on another node before merging",
            "",
            |found: &Found| Some(found.misplaced_before? as f64),
        ),
        Metric::higher("saved_mib", "Saved", "MiB", |found: &Found| {
            Some(found.saved_pages()? as f64 / 256.0)
        }),
        Metric::higher(
            "host_freed_mib",
            "Memory that the host has in use less",
            "MiB",
            |found: &Found| found.freed_mib,
        ),
        Metric::lower("merge_s", "Until nothing more was merged", "s", |found: &Found| {
            found.merge_s
        }),
        ns("access_before_ns", "Read before merging, mean of guests", |found| {
            let times: Vec<f64> = found.guests.iter().map(|guest| guest.before_ns).collect();
            Some(Spread::new(&times)?.mean)
        }),
        ns("access_meanwhile_ns", "Read of a merged page during merging, first guest", |found| {
            found.meanwhile_ns
        }),
        ns(
            "access_ns",
            "Read of a merged page, mean of guests (all nodes are equally far here)",
            |found| Some(after(found)?.mean),
        ),
        percent(
            "access_deviation_percent",
            "its deviation between nodes (noise: all are equally far)",
            |found| Some(after(found)?.percent(0.0)),
        ),
        ns("modelled_access_ns", "Modelled: access to a merged page, mean of guests", |found| {
            Some(modelled(found)?.mean)
        }),
        percent("modelled_deviation_percent", "Modelled: its deviation between nodes", |found| {
            Some(modelled(found)?.percent(0.0))
        }),
    ]
}

/// Descriptions of the metrics.
pub(super) fn describe() -> Vec<MetricInfo> {
    metrics::describe(metrics())
}

/// Times of a read after merging, by guest.
fn after(found: &Found) -> Option<Spread> {
    Spread::new(&found.guests.iter().map(|guest| guest.after_ns).collect::<Option<Vec<f64>>>()?)
}

/// Modelled times of an access to merged pages, by guest.
fn modelled(found: &Found) -> Option<Spread> {
    let survey = found.survey.as_ref()?;
    let times: Option<Vec<f64>> = found
        .guests
        .iter()
        .zip(&survey.guests)
        .map(|(guest, seen)| model::access_ns(found.nodes, guest.node, &seen.placement))
        .collect();
    Spread::new(&times?)
}

/// Fills in a series' metrics and its tables.
pub(super) fn fill(found: &Found, series: &mut Series) {
    metrics::measure(&metrics(), found, series);
    let Some(survey) = &found.survey else { return };
    if survey.pages_without_node > 0 {
        let count = survey.pages_without_node;
        series.notes.push(format!("the node of {count} merged pages is unknown"));
    }
    series.notes.extend(disagreement(found, survey));
    let guests: Vec<Guest<'_>> = found.guests.iter().zip(&survey.guests).collect();
    series.details.extend([places(found, &guests), reasons(&guests)]);
    series.details.extend(remote(&guests));
}

/// A guest's results, and its survey from outside.
type Guest<'a> = (&'a GuestFound, &'a GuestSurvey);

/// A note if the monitors' count of remote pages differs from the survey.
fn disagreement(found: &Found, survey: &Survey) -> Option<String> {
    let (counted, seen) = (found.counted_remote()?, survey.remote_merged_pages);
    // Guests write to a few pages between the last check of their monitors and the survey.
    let most = seen / 50 + 64;
    (counted.abs_diff(seen) > most).then(|| {
        format!(
            "the monitors count {counted} remote pages, but {seen} are seen from outside: one \
             of them is wrong"
        )
    })
}

/// Each guest's times, and the places of its merged pages.
fn places(found: &Found, guests: &[Guest<'_>]) -> DataTable {
    let columns = ["guest's node", "read before, ns", "read after, ns", "modelled, ns"];
    let merged = (0..found.nodes).map(|node| format!("merged pages on node {node}"));
    let row = |(guest, seen): &Guest<'_>| {
        let placement = &seen.placement;
        let modelled = model::access_ns(found.nodes, guest.node, placement);
        let mut row: Vec<Value> =
            vec![guest.node.into(), guest.before_ns.into(), guest.after_ns.into(), modelled.into()];
        let on = |node| placement.get(&node).copied().unwrap_or(0);
        row.extend((0..found.nodes).map(|node| Value::from(on(node))));
        row
    };
    let columns = columns.map(str::to_owned).into_iter().chain(merged);
    DataTable::new("guests by node", columns, guests.iter().map(row))
}

/// The state of each guest's pages, and the reasons why some are not merged.
fn reasons(guests: &[Guest<'_>]) -> DataTable {
    let counted = |guest: &GuestFound, count: fn(&MergeStatistics) -> Option<u64>| {
        Value::from(count(&guest.statistics).filter(|_| guest.is_counted()))
    };
    let rest = |(guest, seen): &Guest<'_>| {
        let statistics = &guest.statistics;
        let known = statistics.pages_unshared.zip(statistics.pages_volatile)?;
        guest.is_counted().then(|| seen.other_pages.saturating_sub(known.0 + known.1))
    };
    DataTable::of(
        "what became of the guests' pages, and of the monitors' attempts to replace pages",
        guests,
        &[
            ("guest's node", &|(guest, _): &Guest<'_>| guest.node.into()),
            ("merged", &|(_, seen)| seen.placement.values().sum::<u64>().into()),
            ("zeros", &|(guest, seen)| {
                (guest.zeroed_pages().unwrap_or(0) + seen.zero_pages).into()
            }),
            ("written since they were merged", &|(_, seen)| seen.copied_pages.into()),
            ("other pages at the host", &|(_, seen)| seen.other_pages.into()),
            ("of these: without a duplicate", &|(guest, _)| counted(guest, |s| s.pages_unshared)),
            ("of these: written lately", &|(guest, _)| counted(guest, |s| s.pages_volatile)),
            ("of these: duplicates that were not replaced, and pages not scanned yet", &|guest| {
                rest(guest).into()
            }),
            ("attempts: done", &|(guest, _)| counted(guest, |s| Some(s.replaced?.done))),
            ("content had changed", &|(guest, _)| counted(guest, |s| Some(s.replaced?.different))),
            ("pinned", &|(guest, _)| counted(guest, |s| Some(s.replaced?.busy))),
            ("too few mappings", &|(guest, _)| counted(guest, |s| Some(s.replaced?.no_mappings))),
            ("gone", &|(guest, _)| counted(guest, |s| Some(s.replaced?.gone))),
        ],
    )
}

/// All remote pages, if they are few.
fn remote(guests: &[Guest<'_>]) -> Option<DataTable> {
    const MOST: usize = 64;
    let runs =
        guests.iter().flat_map(|(guest, seen)| seen.remote.iter().map(|run| (guest.node, *run)));
    let runs: Vec<(u32, (u64, u64, u32))> = runs.collect();
    let table = || {
        DataTable::of(
            "merged pages on another node than their guest",
            &runs,
            &[
                ("guest's node", &|(home, _)| (*home).into()),
                ("first page of its memory", &|(_, (place, ..))| (*place).into()),
                ("pages", &|(_, (_, pages, _))| (*pages).into()),
                ("their node", &|(_, (.., node))| (*node).into()),
            ],
        )
    };
    (1..=MOST).contains(&runs.len()).then(table)
}

/// Compares the table of the patch with the model's results for the places of merged pages.
pub(super) fn compare(all: &mut [Series], case_of: &dyn Fn(&str) -> (Merging, u32)) {
    let spread = |merging: Merging, nodes: u32| {
        let series = all.iter().find(|series| case_of(&series.name) == (merging, nodes))?;
        let value = |name: &str| series.metrics.get(name).copied().flatten();
        let (mean, percent) = (value("modelled_access_ns")?, value("modelled_deviation_percent")?);
        Some(Spread { mean, deviation: mean * percent / 100.0 })
    };
    let by = [Merging::Owner, Merging::Kernel].map(|by: fn(Nodes) -> Merging| by);
    // One number is taken from the published table: the part of an access that does not depend on
    // the node.
    let (first_nodes, first_percent, _) = PUBLISHED[0];
    let constants = by.map(|by| {
        spread(by(Nodes::Across), first_nodes).and_then(|spread| spread.constant_for(first_percent))
    });
    let mut rows = Vec::new();
    for (nodes, across, apart) in PUBLISHED {
        for (which, published) in [(Nodes::Across, across), (Nodes::Apart, apart)] {
            let mut row = vec![
                Value::from(nodes),
                Value::from(match which {
                    Nodes::Across => "across",
                    Nodes::Apart => "apart",
                }),
                Value::from(published),
            ];
            for (by, constant) in by.iter().zip(constants) {
                let spread = spread(by(which), nodes);
                row.push(spread.map(|spread| spread.percent(0.0)).into());
                let with_constant = spread.zip(constant);
                row.push(with_constant.map(|(spread, constant)| spread.percent(constant)).into());
            }
            rows.push(row);
        }
    }
    let columns = [
        "nodes",
        "merged",
        "published, %",
        "owner: memory alone, %",
        "owner: with the published share of memory, %",
        "kernel: memory alone, %",
        "kernel: with the published share of memory, %",
    ];
    if let Some(first) = all.first_mut() {
        let title = "deviation of access times between nodes: published, and MODELLED from where \
                     merged pages are";
        first.tables.push(DataTable::new(title, columns, rows));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn found(nodes: u32, which: Nodes) -> Found {
        let on = |home: u32| match which {
            Nodes::Across => BTreeMap::from([(0, 100)]),
            Nodes::Apart => BTreeMap::from([(home, 100)]),
        };
        let seen = |home: u32| GuestSurvey {
            placement: on(home),
            read_pages: 60,
            other_pages: 20,
            remote: vec![(3, 2, 0)],
            ..GuestSurvey::default()
        };
        let guest = |node| GuestFound {
            node,
            before_ns: 50.0,
            after_ns: Some(50.0 + f64::from(node)),
            statistics: MergeStatistics {
                scope: MergeScope::Machine,
                remote_merged_pages: Some(7),
                ksm_zero_pages: Some(128),
                pages_unshared: Some(9),
                pages_volatile: Some(5),
                ..MergeStatistics::default()
            },
        };
        Found {
            nodes,
            guests: (0..nodes).map(guest).collect(),
            merge_s: Some(3.0),
            meanwhile_ns: Some(60.0),
            freed_mib: Some(12.0),
            shared: Some(SharedCounts { pages_shared: 100, pages_sharing: 512 }),
            survey: Some(Survey {
                pages_shared: 100,
                pages_sharing: 512,
                remote_merged_pages: 100,
                guests: (0..nodes).map(seen).collect(),
                ..Survey::default()
            }),
            misplaced_before: Some(0),
        }
    }

    fn filled(name: &str, nodes: u32, which: Nodes) -> Series {
        let mut filled = Series::new(name, String::new());
        fill(&found(nodes, which), &mut filled);
        filled
    }

    #[test]
    fn metrics_follow_from_what_was_found() {
        let filled = filled("x", 2, Nodes::Across);
        assert!(filled.metrics.values().all(Option::is_some), "{:?}", filled.metrics);
        // The pages of zeros of both, too.
        assert_eq!(filled.metrics["saved_mib"], Some(3.0));
        assert_eq!(filled.metrics["zero_pages"], Some(256.0));
        assert_eq!(filled.metrics["read_merged_pages"], Some(120.0));
        assert_eq!(filled.metrics["remote_merged_pages_counted"], Some(14.0));
        assert_eq!(filled.metrics["modelled_access_ns"], Some(139.5));
        assert!(filled.details.iter().all(|table| table.rows.len() == 2));
        assert_eq!(
            filled.details[1].rows[0][7],
            Value::from(6_u64),
            "neither unique nor written lately"
        );
        assert_eq!(filled.details[2].rows[1][1..], [3_u64, 2, 0].map(Value::from));
    }

    #[test]
    fn wrong_counts_of_monitors_are_reported() {
        let mut found = found(2, Nodes::Across);
        let mut survey = found.survey.clone().unwrap();
        assert!(disagreement(&found, &survey).unwrap().contains("14 remote pages, but 100"));
        survey.remote_merged_pages = 70;
        assert_eq!(disagreement(&found, &survey), None);
        found.guests[0].statistics = MergeStatistics::default();
        assert_eq!(disagreement(&found, &survey), None, "the kernel counts no remote pages");
    }

    #[test]
    fn missing_results_are_not_shown() {
        let mut empty = Series::new("x", String::new());
        fill(&Found::default(), &mut empty);
        assert!(empty.metrics.values().all(Option::is_none), "{:?}", empty.metrics);
    }

    #[test]
    fn the_published_table_is_put_beside_the_model() {
        let cases = [
            ("across-2", 2, Nodes::Across),
            ("apart-2", 2, Nodes::Apart),
            ("across-8", 8, Nodes::Across),
        ];
        let mut all = cases.map(|(name, nodes, which)| filled(name, nodes, which));
        compare(&mut all, &|name| {
            let (_, nodes, which) = cases.iter().find(|case| case.0 == name).unwrap();
            (Merging::Owner(*which), *nodes)
        });
        let rows = &all[0].tables[0].rows;
        assert_eq!(rows.len(), 6);
        // The value that the one number was taken from is reproduced; pages on their own node are
        // equally far.
        assert_eq!(rows[0][4], Value::from(1.4));
        assert_eq!(rows[1][3], Value::from(0.0));
        assert_eq!(rows[2][3], Value::from("-"));
        assert!(
            matches!(&rows[4][4], Value::Float(percent) if (1.0..3.0).contains(percent)),
            "{rows:?}"
        );
    }
}

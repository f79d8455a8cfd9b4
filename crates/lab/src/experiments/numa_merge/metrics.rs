//! What is told of merged pages on several nodes.

use ebb_vmm::api::{MergeScope, MergeStatistics};

use super::model::{self, PUBLISHED, Spread};
use crate::harness::merging::{Merging, Nodes, SharedCounts};
use crate::harness::survey::{GuestSurvey, Survey};
use crate::report::figures::{DataTable, Value};
use crate::report::results::{Better, MetricInfo, Series, rounded};

/// What one guest showed.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct GuestFound {
    /// The node that it is on.
    pub(super) node: u32,
    /// Time of a read before its pages were merged, ns.
    pub(super) before_ns: f64,
    /// And afterwards.
    pub(super) after_ns: Option<f64>,
    /// What its monitor has counted.
    pub(super) statistics: MergeStatistics,
}

impl GuestFound {
    /// Pages of zeros that its monitor has taken away; the host's kernel counts for the whole host.
    fn zeroed_pages(&self) -> Option<u64> {
        self.statistics.ksm_zero_pages.filter(|_| self.is_counted())
    }

    /// Whether its monitor counts for this guest.
    fn is_counted(&self) -> bool {
        self.statistics.scope == MergeScope::Machine
    }
}

/// What a series has found.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Found {
    /// Nodes of the host.
    pub(super) nodes: u32,
    /// The guests, in the order of starting.
    pub(super) guests: Vec<GuestFound>,
    /// Until nothing more was merged, s.
    pub(super) merge_s: Option<f64>,
    /// Time of a read while merging goes on, in one guest, ns.
    pub(super) meanwhile_ns: Option<f64>,
    /// What the host has in use less than before, MiB.
    pub(super) freed_mib: Option<f64>,
    /// What is shared, as broker or kernel count it.
    pub(super) shared: Option<SharedCounts>,
    /// Merged pages, seen from outside.
    pub(super) survey: Option<Survey>,
    /// Pages of guests on another node than their guest before anything was merged.
    pub(super) misplaced_before: Option<u64>,
}

impl Found {
    /// Pages of zeros that nobody has to keep: taken away, or shared like any others.
    fn zero_pages(&self) -> Option<u64> {
        let survey = self.survey.as_ref()?;
        let zeroed: u64 = self.guests.iter().filter_map(GuestFound::zeroed_pages).sum();
        Some(zeroed + survey.guests.iter().map(|guest| guest.zero_pages).sum::<u64>())
    }

    /// Pages less than without merging: further ones that share, and pages of zeros that were taken
    /// away.
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
pub(super) fn metrics() -> Vec<MetricInfo> {
    let lower =
        |name: &str, title: &str, unit: &str| MetricInfo::new(name, title, unit, Better::Lower);
    let higher =
        |name: &str, title: &str, unit: &str| MetricInfo::new(name, title, unit, Better::Higher);
    vec![
        higher("pages_shared", "Pages that are shared", ""),
        higher("pages_sharing", "Further pages that share them", ""),
        higher("zero_pages", "Pages of zeros merged with each other, or taken away", ""),
        higher("seen_merged_pages", "Merged pages, seen from outside", ""),
        higher("read_merged_pages", "of these read by their guest since", ""),
        lower("remote_merged_pages", "Merged pages on another node than their guest", ""),
        lower("remote_merged_pages_counted", "the same, as the monitors count them", ""),
        lower("misplaced_pages", "Pages of guests on another node before merging", ""),
        higher("saved_mib", "Saved", "MiB"),
        higher("host_freed_mib", "Memory that the host has in use less", "MiB"),
        lower("merge_s", "Until nothing more was merged", "s"),
        lower("access_before_ns", "Read before merging, mean of guests", "ns"),
        lower(
            "access_meanwhile_ns",
            "Read of a merged page while merging goes on, first guest",
            "ns",
        ),
        lower(
            "access_ns",
            "Read of a merged page, mean of guests (all nodes are equally far here)",
            "ns",
        ),
        lower(
            "access_deviation_percent",
            "its deviation between nodes (noise: all are equally far)",
            "%",
        ),
        lower("modelled_access_ns", "Modelled: access to a merged page, mean of guests", "ns"),
        lower("modelled_deviation_percent", "Modelled: its deviation between nodes", "%"),
    ]
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

/// Fills in a series' metrics and its table.
pub(super) fn series(found: &Found, series: &mut Series) {
    let before: Vec<f64> = found.guests.iter().map(|guest| guest.before_ns).collect();
    let after: Option<Vec<f64>> = found.guests.iter().map(|guest| guest.after_ns).collect();
    let after = after.and_then(|times| Spread::new(&times));
    let modelled = modelled(found);
    let survey = found.survey.as_ref();
    let of_survey = |value: fn(&Survey) -> u64| survey.map(|survey| value(survey) as f64);
    let metrics = [
        ("pages_shared", found.shared.map(|shared| shared.pages_shared as f64)),
        ("pages_sharing", found.shared.map(|shared| shared.pages_sharing as f64)),
        ("zero_pages", found.zero_pages().map(|pages| pages as f64)),
        ("seen_merged_pages", of_survey(|survey| survey.pages_shared + survey.pages_sharing)),
        (
            "read_merged_pages",
            of_survey(|survey| survey.guests.iter().map(|guest| guest.read_pages).sum()),
        ),
        ("remote_merged_pages", of_survey(|survey| survey.remote_merged_pages)),
        (
            "remote_merged_pages_counted",
            found.counted_remote().filter(|_| survey.is_some()).map(|count| count as f64),
        ),
        ("misplaced_pages", found.misplaced_before.map(|pages| pages as f64)),
        ("saved_mib", found.saved_pages().map(|pages| pages as f64 / 256.0)),
        ("host_freed_mib", found.freed_mib),
        ("merge_s", found.merge_s),
        ("access_before_ns", Spread::new(&before).map(|spread| spread.mean)),
        ("access_meanwhile_ns", found.meanwhile_ns),
        ("access_ns", after.map(|spread| spread.mean)),
        ("access_deviation_percent", after.map(|spread| spread.percent(0.0))),
        ("modelled_access_ns", modelled.map(|spread| spread.mean)),
        ("modelled_deviation_percent", modelled.map(|spread| spread.percent(0.0))),
    ];
    series.metrics = metrics.map(|(name, value)| (name.to_owned(), value.map(rounded))).into();
    if let Some(survey) = survey {
        if survey.pages_without_node > 0 {
            series.notes.push(format!(
                "of {} merged pages the node is not known",
                survey.pages_without_node
            ));
        }
        series.notes.extend(disagreement(found, survey));
        series.details.push(places(found, survey));
        series.details.push(reasons(found, survey));
        series.details.extend(remote(found, survey));
    }
}

/// Says so if the monitors count other numbers of remote pages than there are.
fn disagreement(found: &Found, survey: &Survey) -> Option<String> {
    let (counted, seen) = (found.counted_remote()?, survey.remote_merged_pages);
    // Guests write to a few pages between the last look of their monitors and that from outside.
    let most = seen / 50 + 64;
    (counted.abs_diff(seen) > most).then(|| {
        format!("the monitors count {counted} remote pages, but {seen} are seen from outside: one of them is wrong")
    })
}

/// Each guest by itself: times, and where its merged pages are.
fn places(found: &Found, survey: &Survey) -> DataTable {
    let mut columns: Vec<String> =
        ["guest's node", "read before, ns", "read after, ns", "modelled, ns"]
            .map(str::to_owned)
            .into();
    columns.extend((0..found.nodes).map(|node| format!("merged pages on node {node}")));
    let row = |(guest, seen): (&GuestFound, &GuestSurvey)| {
        let number = |value: Option<f64>| {
            value.map_or(Value::from("-"), |value| Value::from(rounded(value)))
        };
        let placement = &seen.placement;
        let mut row = vec![
            Value::from(u64::from(guest.node)),
            Value::from(rounded(guest.before_ns)),
            number(guest.after_ns),
            number(model::access_ns(found.nodes, guest.node, placement)),
        ];
        row.extend(
            (0..found.nodes).map(|node| Value::from(placement.get(&node).copied().unwrap_or(0))),
        );
        row
    };
    DataTable {
        title: "guests by node".to_owned(),
        columns,
        rows: found.guests.iter().zip(&survey.guests).map(row).collect(),
    }
}

/// What became of each guest's pages, and why some are not merged.
fn reasons(found: &Found, survey: &Survey) -> DataTable {
    let columns = [
        "guest's node",
        "merged",
        "zeros",
        "written since they were merged",
        "other pages at the host",
        "of these: without a duplicate",
        "of these: written lately",
        "of these: duplicates that were not replaced, and pages not looked at yet",
        "attempts: done",
        "content had changed",
        "pinned",
        "too few mappings",
        "gone",
    ];
    let row = |(guest, seen): (&GuestFound, &GuestSurvey)| {
        let number = |value: Option<u64>| {
            value.filter(|_| guest.is_counted()).map_or_else(|| Value::from("-"), Value::from)
        };
        let statistics = &guest.statistics;
        let known = statistics.pages_unshared.zip(statistics.pages_volatile);
        let rest =
            known.map(|(unshared, lately)| seen.other_pages.saturating_sub(unshared + lately));
        let replaced = statistics.replaced;
        vec![
            Value::from(u64::from(guest.node)),
            Value::from(seen.placement.values().sum::<u64>()),
            Value::from(guest.zeroed_pages().unwrap_or(0) + seen.zero_pages),
            Value::from(seen.copied_pages),
            Value::from(seen.other_pages),
            number(statistics.pages_unshared),
            number(statistics.pages_volatile),
            number(rest),
            number(replaced.map(|replaced| replaced.done)),
            number(replaced.map(|replaced| replaced.different)),
            number(replaced.map(|replaced| replaced.busy)),
            number(replaced.map(|replaced| replaced.no_mappings)),
            number(replaced.map(|replaced| replaced.gone)),
        ]
    };
    DataTable {
        title: "what became of the guests' pages, and of the monitors' attempts to replace pages"
            .to_owned(),
        columns: columns.map(str::to_owned).into(),
        rows: found.guests.iter().zip(&survey.guests).map(row).collect(),
    }
}

/// Remote pages one by one, where they are few enough to be read.
fn remote(found: &Found, survey: &Survey) -> Option<DataTable> {
    const MOST: usize = 64;
    let all = found.guests.iter().zip(&survey.guests);
    let rows: Vec<Vec<Value>> = all
        .flat_map(|(guest, seen)| seen.remote.iter().map(|run| (guest.node, *run)))
        .map(|(home, (place, pages, node))| {
            let home = Value::from(u64::from(home));
            vec![home, Value::from(place), Value::from(pages), Value::from(u64::from(node))]
        })
        .collect();
    (1..=MOST).contains(&rows.len()).then(|| DataTable {
        title: "merged pages on another node than their guest".to_owned(),
        columns: ["guest's node", "first page of its memory", "pages", "their node"]
            .map(str::to_owned)
            .into(),
        rows,
    })
}

/// Puts the table of the patch beside what the model makes of the places of merged pages.
pub(super) fn compare(all: &mut [Series], case_of: &dyn Fn(&str) -> Option<(Merging, u32)>) {
    let spread = |merging: Merging, nodes: u32| {
        let series = all.iter().find(|series| case_of(&series.name) == Some((merging, nodes)))?;
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
                Value::from(u64::from(nodes)),
                Value::from(match which {
                    Nodes::Across => "across",
                    Nodes::Apart => "apart",
                }),
                Value::from(published),
            ];
            let number = |value: Option<f64>| {
                value.map_or(Value::from("-"), |value| Value::from(rounded(value)))
            };
            for (by, constant) in by.iter().zip(constants) {
                let spread = spread(by(which), nodes);
                row.push(number(spread.map(|spread| spread.percent(0.0))));
                row.push(number(
                    spread.zip(constant).map(|(spread, constant)| spread.percent(constant)),
                ));
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
        first.tables.push(DataTable {
            title:
                "deviation of access times between nodes: published, and MODELLED from where merged pages are"
                    .to_owned(),
            columns: columns.map(str::to_owned).to_vec(),
            rows,
        });
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

    fn told(name: &str, nodes: u32, which: Nodes) -> Series {
        let mut told = Series::new(name, String::new());
        series(&found(nodes, which), &mut told);
        told
    }

    #[test]
    fn every_metric_that_is_described_is_there() {
        let told = told("x", 2, Nodes::Across);
        let described: Vec<String> = metrics().into_iter().map(|info| info.name).collect();
        assert_eq!(told.metrics.len(), described.len());
        assert!(described.iter().all(|name| told.metrics[name].is_some()), "{:?}", told.metrics);
        // The pages of zeros of both, too.
        assert_eq!(told.metrics["saved_mib"], Some(3.0));
        assert_eq!(told.metrics["zero_pages"], Some(256.0));
        assert_eq!(told.metrics["read_merged_pages"], Some(120.0));
        assert_eq!(told.metrics["remote_merged_pages_counted"], Some(14.0));
        assert_eq!(told.metrics["modelled_access_ns"], Some(139.5));
        assert!(told.details.iter().all(|table| table.rows.len() == 2));
        assert_eq!(
            told.details[1].rows[0][7],
            Value::from(6_u64),
            "neither unique nor written lately"
        );
        assert_eq!(told.details[2].rows[1][1..], [3_u64, 2, 0].map(Value::from));
    }

    #[test]
    fn monitors_that_count_something_else_are_told() {
        let mut found = found(2, Nodes::Across);
        let mut survey = found.survey.clone().unwrap();
        assert!(disagreement(&found, &survey).unwrap().contains("14 remote pages, but 100"));
        survey.remote_merged_pages = 70;
        assert_eq!(disagreement(&found, &survey), None);
        found.guests[0].statistics = MergeStatistics::default();
        assert_eq!(disagreement(&found, &survey), None, "the kernel counts no remote pages");
    }

    #[test]
    fn nothing_found_is_nothing_told() {
        let mut empty = Series::new("x", String::new());
        series(&Found::default(), &mut empty);
        assert!(empty.metrics.values().all(Option::is_none), "{:?}", empty.metrics);
    }

    #[test]
    fn the_published_table_is_put_beside_the_model() {
        let cases = [
            ("across-2", 2, Nodes::Across),
            ("apart-2", 2, Nodes::Apart),
            ("across-8", 8, Nodes::Across),
        ];
        let mut all = cases.map(|(name, nodes, which)| told(name, nodes, which));
        compare(&mut all, &|name| {
            let (_, nodes, which) = cases.iter().find(|case| case.0 == name)?;
            Some((Merging::Owner(*which), *nodes))
        });
        let rows = &all[0].tables[0].rows;
        assert_eq!(rows.len(), 6);
        // What the one number was taken from comes out again; pages on their own node are equally
        // far.
        assert_eq!(rows[0][4], Value::from(1.4));
        assert_eq!(rows[1][3], Value::from(0.0));
        assert_eq!(rows[2][3], Value::from("-"));
        assert!(
            matches!(&rows[4][4], Value::Float(percent) if (1.0..3.0).contains(percent)),
            "{rows:?}"
        );
    }
}

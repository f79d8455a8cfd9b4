//! Merging of equal pages on hosts with several NUMA nodes: the saving, and the distance of guests
//! from their merged pages.
//!
//! The patch "ksm: allow trees per NUMA node" (2013) measured the access times of guests that were
//! pinned to the nodes of machines with 2, 4 and 8 of them, with pages merged across nodes and
//! within each. Here the machines are virtual hosts, whose nodes are all equally far: the places of
//! merged pages are real and examined from outside, but the times of remote memory come from a
//! model.

use std::time::Duration;

use ebb_agent::protocol::Command;
use ebb_agent::timed_reads::ReadReport;
use serde::Serialize;

use crate::LabError;
use crate::error::GuestProblem;
use crate::harness::experiment::{Experiment, Needs, Run, SeriesPlan, parameters};
use crate::harness::merging::{Merging, Nodes};
use crate::harness::monitor::Setup;
use crate::harness::size::{GuestSize, HostShape};
use crate::harness::survey::Survey;
use crate::harness::testbed::Testbed;
use crate::report::results::{Scale, Series};
use metrics::{Found, GuestFound};

mod metrics;
mod model;

/// The experiment.
pub static NUMA_MERGE: Experiment = Experiment {
    name: "numa-merge",
    summary: "Guests pinned to the nodes of a host with 2, 4 and 8: what merging their equal pages \
              across and within nodes saves, and how far they are from their merged pages",
    host: |scale, name| host_shape(scale, case(name).1),
    parameters: |scale| {
        let largest = host_shape(scale, MOST_NODES);
        let mut parameters = parameters(&sizes(scale));
        for (name, value) in [
            ("host_mib", largest.memory_mib),
            ("copies", COPIES),
            ("pages_per_second", PAGES_PER_SECOND),
        ] {
            parameters.insert(name.to_owned(), value);
        }
        parameters
    },
    guests: |_| MOST_NODES,
    needs: Needs { merging: true, ..Experiment::DEFAULT.needs },
    metrics: metrics::describe,
    series: || NAMES.map(plan).into(),
    compare: |series| metrics::compare(series, &case),
    ..Experiment::DEFAULT
};

/// Sizes of one scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
struct Sizes {
    /// Memory of each node.
    node_mib: u64,
    #[serde(flatten)]
    guest: GuestSize,
    /// Memory with the same content in all guests.
    same_mib: u64,
    /// Number of times that it is read.
    passes: u32,
}

fn sizes(scale: Scale) -> Sizes {
    match scale {
        Scale::Demo => Sizes {
            node_mib: 448,
            guest: GuestSize { memory_mib: 256, cpus: 1 },
            same_mib: 32,
            passes: 20,
        },
        Scale::Full => Sizes {
            node_mib: 1024,
            guest: GuestSize { memory_mib: 512, cpus: 1 },
            same_mib: 256,
            passes: 50,
        },
    }
}

/// The most nodes of a host.
const MOST_NODES: u32 = 8;
/// Series with more nodes run only when named.
const MOST_BY_DEFAULT: u32 = 4;
/// A host of two nodes would have too little for itself with nodes as small as the others'.
const LEAST_HOST_MIB: u64 = 1536;
/// Seed of the content that is the same in all guests.
const PATTERN: u64 = 0x0eb5;
/// Each page of it occurs twice in each guest, so that pages can be merged within a node as well.
const COPIES: u64 = 2;
/// Pages scanned per second: an emulated processor is slow.
const PAGES_PER_SECOND: u64 = 200_000;
/// Number of times that memory is read during merging, in one guest.
const MEANWHILE_PASSES: u32 = 3;
/// Time limit; reading all of it once takes far less.
const READ_LIMIT: Duration = Duration::from_secs(180);

fn host_shape(scale: Scale, nodes: u32) -> HostShape {
    let sizes = sizes(scale);
    HostShape {
        memory_mib: (u64::from(nodes) * sizes.node_mib).max(LEAST_HOST_MIB),
        swap_mib: match scale {
            Scale::Demo => 0,
            Scale::Full => 256,
        },
        nodes,
    }
}

/// All series, by name and summary; neighbours share a host.
const NAMES: [(&str, &str); 12] = [
    ("owner-across-2", "merged by the monitors across 2 nodes"),
    ("owner-apart-2", "merged by the monitors within each of 2 nodes"),
    ("kernel-across-2", "merged by the kernel across 2 nodes"),
    ("kernel-apart-2", "merged by the kernel within each of 2 nodes"),
    ("owner-across-4", "the same with 4 nodes"),
    ("owner-apart-4", "the same with 4 nodes"),
    ("kernel-across-4", "the same with 4 nodes"),
    ("kernel-apart-4", "the same with 4 nodes"),
    ("owner-across-8", "the same with 8 nodes"),
    ("owner-apart-8", "the same with 8 nodes"),
    ("kernel-across-8", "the same with 8 nodes"),
    ("kernel-apart-8", "the same with 8 nodes"),
];

/// Parses the name of a series: how pages are merged, and the number of nodes.
fn case(name: &str) -> (Merging, u32) {
    let nodes = if name.contains("-across-") { Nodes::Across } else { Nodes::Apart };
    let merging =
        if name.starts_with("owner") { Merging::Owner(nodes) } else { Merging::Kernel(nodes) };
    let count = name.rsplit('-').next().and_then(|count| count.parse().ok());
    (merging, count.unwrap_or(1))
}

fn plan((name, summary): (&'static str, &'static str)) -> SeriesPlan {
    let (merging, nodes) = case(name);
    let setup = Setup { merging, ..Setup::EBB };
    let plan = SeriesPlan::new(name, summary, Run::Guests(setup, run));
    // Eight guests on an emulated host take minutes to boot.
    if nodes > MOST_BY_DEFAULT { plan.when_named() } else { plan }
}

fn run(testbed: &mut Testbed<'_>, series: &mut Series) -> Result<(), LabError> {
    let (sizes, (_, nodes)) = (sizes(testbed.scale()), case(&series.name));
    let mut found = Found { nodes, ..Found::default() };
    let measured = measure(testbed, sizes, nodes, &mut found, series);
    metrics::fill(&found, series);
    measured
}

/// Starts a guest on each node, writes the same content to all of them, merges it, and measures.
fn measure(
    testbed: &mut Testbed<'_>,
    sizes: Sizes,
    nodes: u32,
    found: &mut Found,
    series: &mut Series,
) -> Result<(), LabError> {
    let homes: Vec<u32> = (0..testbed.guests(nodes)).collect();
    series.guests = testbed.start_guests_on_nodes(sizes.guest, &homes)?;
    let guests: Vec<u32> = series.guests.iter().map(|record| record.guest).collect();
    let read = |testbed: &mut Testbed<'_>, guest: u32, passes: u32| -> Result<f64, LabError> {
        let command = Command::ReadHeld { passes, seed: PATTERN };
        let answer = testbed.work(guest, command, READ_LIMIT)?;
        let report: ReadReport =
            serde_json::from_value(answer).map_err(|error| LabError::unexpected(guest, error))?;
        crate::report::statistics::median(report.ns_per_read)
            .ok_or_else(|| LabError::unexpected(guest, "it read nothing"))
    };
    for (guest, home) in guests.iter().zip(&homes) {
        testbed.events().step(*guest, "holds and reads its memory");
        for _ in 0..COPIES {
            let hold = Command::Hold { bytes: (sizes.same_mib / COPIES) << 20, pattern: PATTERN };
            testbed.work(*guest, hold, READ_LIMIT)?;
        }
        let before_ns = read(testbed, *guest, sizes.passes)?;
        found.guests.push(GuestFound { node: *home, before_ns, ..GuestFound::default() });
    }
    let placed: Vec<(u32, u32)> = guests.iter().copied().zip(homes.iter().copied()).collect();
    found.misplaced_before = Some(misplaced(&testbed.survey(&placed)?));
    let used_mib = testbed.usage()?.used_mib;
    testbed.set_merging(&guests, Some(PAGES_PER_SECOND))?;
    testbed.events().step(0, "waits until nothing more is merged");
    let settled = testbed.wait_for_merging(&guests)?;
    found.merge_s = Some(settled.elapsed_s);
    if !settled.quiet {
        series.notes.push("pages were still being merged when the lab stopped waiting".to_owned());
    }
    if let Some(guest) = guests.first() {
        testbed.events().step(*guest, "reads its memory during merging");
        found.meanwhile_ns = Some(read(testbed, *guest, MEANWHILE_PASSES)?);
    }
    testbed.set_merging(&guests, None)?;
    for (guest, guest_found) in guests.iter().zip(&mut found.guests) {
        testbed.events().step(*guest, "reads its memory");
        guest_found.after_ns = Some(read(testbed, *guest, sizes.passes)?);
        guest_found.statistics = testbed.merge_info(*guest)?.statistics.unwrap_or_default();
    }
    found.shared = Some(testbed.shared(&guests)?);
    found.freed_mib = Some(used_mib - testbed.usage()?.used_mib);
    found.survey = Some(testbed.survey(&placed)?);
    for guest in &guests {
        let answer = testbed.work(*guest, Command::VerifyHeld, READ_LIMIT)?;
        if answer["wrong_pages"].as_u64() != Some(0) {
            return Err(LabError::guest(*guest, GuestProblem::Damaged(answer.to_string())));
        }
    }
    Ok(())
}

/// Pages that are on another node than their guest is bound to: its own ones and merged ones.
fn misplaced(survey: &Survey) -> u64 {
    survey.remote_merged_pages
        + survey.guests.iter().map(|guest| guest.misplaced_pages).sum::<u64>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn series_with_the_same_host_are_neighbours() {
        let hosts = NAMES.map(|(name, _)| (NUMA_MERGE.host)(Scale::Demo, name).nodes);
        assert_eq!(hosts, [2, 2, 2, 2, 4, 4, 4, 4, 8, 8, 8, 8]);
        let cases = NAMES.map(|(name, _)| case(name));
        assert_eq!(cases[0], (Merging::Owner(Nodes::Across), 2));
        assert_eq!(cases[11], (Merging::Kernel(Nodes::Apart), 8));
    }

    #[test]
    fn a_node_has_memory_for_its_guest_and_for_the_host() {
        for scale in [Scale::Demo, Scale::Full] {
            let sizes = sizes(scale);
            assert!(sizes.guest.memory_mib + 128 < sizes.node_mib);
            assert!(sizes.same_mib * 2 <= sizes.guest.memory_mib);
        }
    }
}

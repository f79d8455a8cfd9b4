//! Merging of equal pages on hosts with several NUMA nodes: what is saved, and how far guests are
//! from their merged pages.
//!
//! The patch "ksm: allow trees per NUMA node" (2013) measured the access times of guests that were
//! pinned to the nodes of machines with 2, 4 and 8 of them, with pages merged across nodes and
//! within each. Here the machines are virtual hosts, whose nodes are all equally far: where merged
//! pages are is real and is looked at from outside, the times of remote memory are a model's.

use std::collections::BTreeMap;
use std::time::Duration;

use ebb_agent::protocol::Command;
use ebb_agent::timed_reads::ReadReport;

use crate::LabError;
use crate::error::GuestProblem;
use crate::harness::experiment::{Experiment, HostShape, NeedsKernel, Runs, SeriesPlan, Subject};
use crate::harness::merging::{Merging, Nodes};
use crate::harness::monitor::{GuestSize, HugePages, Setup};
use crate::harness::survey::Survey;
use crate::harness::testbed::Testbed;
use crate::report::results::{MetricInfo, Scale, Series};
use metrics::{Found, GuestFound};

mod metrics;
mod model;

/// The experiment.
#[derive(Debug, Clone, Copy)]
pub struct NumaMerge;

/// Sizes of one scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Sizes {
    /// Memory of each node.
    node_mib: u64,
    guest: GuestSize,
    /// Memory with the same content in all guests.
    same_mib: u64,
    /// How often it is read.
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

/// Numbers of nodes.
const NODES: [u32; 3] = [2, 4, 8];
/// Series with more are run when they are named.
const MOST_BY_DEFAULT: u32 = 4;
/// A host of two nodes would have too little for itself with nodes as small as the others'.
const LEAST_HOST_MIB: u64 = 1536;
/// Seed of the content that is the same in all guests.
const PATTERN: u64 = 0x0eb5;
/// Each page of it is twice in each guest, so that there is something to merge within a node as
/// well.
const COPIES: u64 = 2;
/// How fast pages are looked at: an emulated processor is slow.
const PAGES_PER_SECOND: u64 = 200_000;
/// How often memory is read while merging goes on, in one guest.
const MEANWHILE_PASSES: u32 = 3;
/// Reading all of it once takes far less.
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

/// One series: who merges, how, and on how many nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Case {
    name: &'static str,
    summary: &'static str,
    merging: Merging,
    nodes: u32,
}

/// All series; neighbours share a host.
const CASES: [Case; 12] = [
    case(
        "owner-across-2",
        "merged by the monitors across 2 nodes",
        Merging::Owner(Nodes::Across),
        2,
    ),
    case(
        "owner-apart-2",
        "merged by the monitors within each of 2 nodes",
        Merging::Owner(Nodes::Apart),
        2,
    ),
    case(
        "kernel-across-2",
        "merged by the kernel across 2 nodes",
        Merging::Kernel(Nodes::Across),
        2,
    ),
    case(
        "kernel-apart-2",
        "merged by the kernel within each of 2 nodes",
        Merging::Kernel(Nodes::Apart),
        2,
    ),
    case("owner-across-4", "the same with 4 nodes", Merging::Owner(Nodes::Across), 4),
    case("owner-apart-4", "the same with 4 nodes", Merging::Owner(Nodes::Apart), 4),
    case("kernel-across-4", "the same with 4 nodes", Merging::Kernel(Nodes::Across), 4),
    case("kernel-apart-4", "the same with 4 nodes", Merging::Kernel(Nodes::Apart), 4),
    case("owner-across-8", "the same with 8 nodes", Merging::Owner(Nodes::Across), 8),
    case("owner-apart-8", "the same with 8 nodes", Merging::Owner(Nodes::Apart), 8),
    case("kernel-across-8", "the same with 8 nodes", Merging::Kernel(Nodes::Across), 8),
    case("kernel-apart-8", "the same with 8 nodes", Merging::Kernel(Nodes::Apart), 8),
];

const fn case(name: &'static str, summary: &'static str, merging: Merging, nodes: u32) -> Case {
    Case { name, summary, merging, nodes }
}

fn nodes_of(name: &str) -> u32 {
    CASES.iter().find(|case| case.name == name).map_or(1, |case| case.nodes)
}

impl Experiment for NumaMerge {
    fn name(&self) -> &'static str {
        "numa-merge"
    }

    fn summary(&self) -> &'static str {
        "Guests pinned to the nodes of a host with 2, 4 and 8: what merging their equal pages across and within nodes saves, and how \
         far they are from their merged pages"
    }

    fn host(&self, scale: Scale) -> HostShape {
        host_shape(scale, NODES.into_iter().max().unwrap_or(1))
    }

    fn host_of(&self, scale: Scale, plan: &SeriesPlan) -> HostShape {
        host_shape(scale, nodes_of(plan.name))
    }

    fn needs_kernel(&self) -> NeedsKernel {
        NeedsKernel::Merging
    }

    fn parameters(&self, scale: Scale) -> BTreeMap<String, u64> {
        let sizes = sizes(scale);
        BTreeMap::from([
            // Of the host with the most nodes.
            ("host_mib".to_owned(), self.host(scale).memory_mib),
            ("node_mib".to_owned(), sizes.node_mib),
            ("guest_mib".to_owned(), sizes.guest.memory_mib),
            ("guest_cpus".to_owned(), u64::from(sizes.guest.cpus)),
            ("same_mib".to_owned(), sizes.same_mib),
            ("copies".to_owned(), COPIES),
            ("passes".to_owned(), u64::from(sizes.passes)),
            ("pages_per_second".to_owned(), PAGES_PER_SECOND),
        ])
    }

    fn metrics(&self) -> Vec<MetricInfo> {
        metrics::metrics()
    }

    fn series(&self) -> Vec<SeriesPlan> {
        let plan = |case: Case| SeriesPlan {
            name: case.name,
            summary: case.summary,
            // Eight guests on an emulated host take minutes to boot.
            runs: if case.nodes > MOST_BY_DEFAULT { Runs::WhenNamed } else { Runs::ByDefault },
            subject: Subject::Guests(Setup {
                merging: case.merging,
                huge_pages: HugePages::Off,
                ..Setup::EBB
            }),
        };
        CASES.map(plan).to_vec()
    }

    fn guests(&self, _scale: Scale) -> u32 {
        NODES.into_iter().max().unwrap_or(1)
    }

    fn run(&self, testbed: &mut Testbed<'_>, series: &mut Series) -> Result<(), LabError> {
        let (sizes, nodes) = (sizes(testbed.scale()), nodes_of(&series.name));
        let mut found = Found { nodes, ..Found::default() };
        let measured = measure(testbed, sizes, nodes, &mut found, series);
        metrics::series(&found, series);
        measured
    }

    fn compare(&self, series: &mut [Series]) {
        metrics::compare(series, &|name| {
            let case = CASES.iter().find(|case| case.name == name)?;
            Some((case.merging, case.nodes))
        });
    }
}

/// Starts a guest on each node, gives all of them the same memory, lets it be merged, and looks.
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
        let report: ReadReport = serde_json::from_value(answer)
            .map_err(|error| wrong(guest, GuestProblem::Protocol(error.to_string())))?;
        crate::report::statistics::median(report.ns_per_read)
            .ok_or_else(|| wrong(guest, GuestProblem::Protocol("it read nothing".to_owned())))
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
        series
            .notes
            .push("pages were still merged when the lab did not wait any longer".to_owned());
    }
    if let Some(guest) = guests.first() {
        testbed.events().step(*guest, "reads its memory while merging goes on");
        found.meanwhile_ns = Some(read(testbed, *guest, MEANWHILE_PASSES)?);
    }
    testbed.set_merging(&guests, None)?;
    for (guest, told) in guests.iter().zip(&mut found.guests) {
        testbed.events().step(*guest, "reads its memory");
        told.after_ns = Some(read(testbed, *guest, sizes.passes)?);
        told.statistics = testbed.merge_info(*guest)?.statistics.unwrap_or_default();
    }
    found.shared = Some(testbed.shared()?);
    found.freed_mib = Some(used_mib - testbed.usage()?.used_mib);
    found.survey = Some(testbed.survey(&placed)?);
    for guest in &guests {
        let answer = testbed.work(*guest, Command::VerifyHeld, READ_LIMIT)?;
        if answer["wrong_pages"].as_u64() != Some(0) {
            return Err(wrong(*guest, GuestProblem::Damaged(answer.to_string())));
        }
    }
    Ok(())
}

/// Pages that are on another node than their guest is bound to: its own ones and merged ones.
fn misplaced(survey: &Survey) -> u64 {
    survey.remote_merged_pages
        + survey.guests.iter().map(|guest| guest.misplaced_pages).sum::<u64>()
}

fn wrong(guest: u32, problem: GuestProblem) -> LabError {
    LabError::Guest { guest, problem, diagnostics: String::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn series_with_the_same_host_are_neighbours() {
        let plans = NumaMerge.series();
        let hosts: Vec<u32> =
            plans.iter().map(|plan| NumaMerge.host_of(Scale::Demo, plan).nodes).collect();
        assert!(hosts.is_sorted(), "{hosts:?}");
        assert_eq!(hosts.chunk_by(|one, other| one == other).count(), NODES.len());
        assert!(plans.iter().all(|plan| plan.name.ends_with(&nodes_of(plan.name).to_string())));
    }

    #[test]
    fn a_node_has_room_for_its_guest_and_for_the_host() {
        for scale in [Scale::Demo, Scale::Full] {
            let sizes = sizes(scale);
            assert!(sizes.guest.memory_mib + 128 < sizes.node_mib);
            assert!(sizes.same_mib * 2 <= sizes.guest.memory_mib);
        }
    }
}

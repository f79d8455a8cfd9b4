//! The price of merging equal pages: by the processes that own the memory, and by the kernel's
//! thread on the same memory.
//!
//! Neither guests nor KVM are needed. Memories of several shapes, each of a process of its own, are
//! merged by each side in turns. Freed pages are counted by the page frames of the memory
//! (`/proc/PID/pagemap`), so that the result does not depend on either side's counters. The price
//! is all processor time of these processes, of the merge broker and of the kernel's threads until
//! the pages are merged and were read again.

use ebb_virtual_host::kernel::is_at_least;
use serde::Serialize;

use crate::LabError;
use crate::harness::experiment::{Experiment, Needs, OnMachine, Run, SeriesPlan, parameters};
use crate::harness::host;
use crate::harness::in_virtual_host::MERGING_SINCE;
use crate::harness::size::HostShape;
use crate::report::results::{Scale, Series};
use content::Shape;
use measure::{Amount, Company};
use metrics::Found;
use side::side;

mod content;
mod ksmd;
mod measure;
pub mod member;
mod members;
mod memory;
mod metrics;
mod owner;
mod price;
mod sibling;
mod side;

/// The experiment.
pub static MERGE_SPEED: Experiment = Experiment {
    name: "merge-speed",
    summary: "What merging of equal pages costs: in the processes that own the memory, and by \
              the kernel's thread on the same memory",
    host: |scale, _| host_shape(scale),
    parameters: |scale| {
        parameters(&Sizes {
            host: host_shape(scale),
            amount: amount(scale),
            run_pages: content::RUN_PAGES,
            copies: content::COPIES,
            clones: content::CLONES,
        })
    },
    needs: Needs { merging: true, ..Experiment::DEFAULT.needs },
    machine_lacks,
    metrics: metrics::describe,
    series: || {
        let plan = |name, summary| SeriesPlan::new(name, summary, Run::MachineInTurns(run));
        vec![
            plan(metrics::OWNER, "the processes themselves (merge=owner), two with a broker"),
            plan(
                metrics::MANY_MAPPINGS,
                "the same, and a process may have 1,048,576 mappings (vm.max_map_count)",
            ),
            plan(metrics::KSMD, "KSM with the kernel's defaults, but without sleeps"),
        ]
    },
    compare: metrics::compare,
    ..Experiment::DEFAULT
};

/// Sizes of one scale, for the document.
#[derive(Serialize)]
struct Sizes {
    #[serde(flatten)]
    host: HostShape,
    #[serde(flatten)]
    amount: Amount,
    run_pages: usize,
    copies: usize,
    clones: usize,
}

fn host_shape(scale: Scale) -> HostShape {
    match scale {
        Scale::Demo => HostShape { memory_mib: 1536, swap_mib: 0, nodes: 1 },
        Scale::Full => HostShape { memory_mib: 6 * 1024, swap_mib: 256, nodes: 1 },
    }
}

fn amount(scale: Scale) -> Amount {
    match scale {
        Scale::Demo => {
            Amount { unique_mib: 128, scattered_mib: 64, runs_mib: 128, clones_mib: 128, rounds: 2 }
        }
        // Single small pages need a mapping or two each, of which a process has 65,530
        // (vm.max_map_count).
        Scale::Full => Amount {
            unique_mib: 2048,
            scattered_mib: 128,
            runs_mib: 2048,
            clones_mib: 2048,
            rounds: 2,
        },
    }
}

fn machine_lacks() -> Option<String> {
    let (major, minor) = MERGING_SINCE;
    let kernel = host::machine().map_or_else(|_| String::new(), |machine| machine.kernel);
    if !is_at_least(&kernel, major, minor) {
        return Some(format!("it runs Linux {kernel}, and the owner's side needs {major}.{minor}"));
    }
    if !std::path::Path::new(ebb_page_merge::kernel::SYSFS).exists() {
        return Some("its kernel has no KSM".to_owned());
    }
    (!rustix::process::geteuid().is_root())
        .then(|| "only root can configure KSM and read page frame numbers".to_owned())
}

fn run(machine: OnMachine<'_>, series: &mut [Series]) {
    let amount = amount(machine.size.scale);
    let mut found: Vec<Found> = series.iter().map(|_| Found::default()).collect();
    for turn in turns(amount.rounds) {
        for (series, found) in series.iter_mut().zip(&mut found) {
            // A side that has failed once is not retried.
            if series.error.is_none() {
                machine.events.step(0, format!("{}: {}", series.name, turn.describe()));
                series.error =
                    turn.take(&series.name, amount, found).err().map(|error| error.to_string());
            }
        }
    }
    for (series, found) in series.iter_mut().zip(&found) {
        metrics::fill(found, series);
    }
}

/// A measurement of all sides, one after another, on the same memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Turn {
    shape: Shape,
    company: Company,
    /// Seed of the memory's content.
    seed: u64,
}

/// All turns of a run.
fn turns(rounds: u64) -> Vec<Turn> {
    let of_round = |round: u64| {
        let alone = Shape::ALL.into_iter().map(|shape| (shape, Company::Alone));
        let beside = metrics::MERGED.into_iter().map(|shape| (shape, Company::Sibling));
        let cases = alone.chain(beside).collect::<Vec<_>>();
        cases.into_iter().zip(0_u64..).map(move |((shape, company), case)| Turn {
            shape,
            company,
            seed: 1 + round * 16 + case,
        })
    };
    (0..rounds).flat_map(of_round).collect()
}

impl Turn {
    fn describe(self) -> String {
        match self.company {
            Company::Alone => self.shape.title().to_owned(),
            Company::Sibling => format!("{}, beside a busy thread", self.shape.title()),
        }
    }

    fn take(self, name: &str, amount: Amount, found: &mut Found) -> Result<(), LabError> {
        let mut side = side(name, self.shape.processes())?;
        if self.shape == Shape::Unique {
            found.scannings.push(measure::scan(side.as_mut(), amount, self.seed)?);
        } else {
            let merging =
                measure::merge(side.as_mut(), self.shape, self.company, amount, self.seed)?;
            found.mergings.push(merging);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn each_turn_has_contents_of_its_own() {
        let turns = turns(3);
        assert_eq!(turns.len(), 3 * (5 + 4));
        assert_eq!(turns.iter().map(|turn| turn.seed).collect::<BTreeSet<_>>().len(), turns.len());
        assert!(
            turns.iter().all(|turn| turn.shape != Shape::Unique || turn.company == Company::Alone)
        );
    }

    #[test]
    fn the_host_has_room_for_the_largest_memory_twice() {
        for scale in [Scale::Demo, Scale::Full] {
            let amount = amount(scale);
            let largest_mib = amount.unique_mib.max(amount.runs_mib).max(amount.clones_mib);
            assert!(2 * largest_mib + 512 < host_shape(scale).memory_mib);
        }
    }
}

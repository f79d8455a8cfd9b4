//! Merging of equal pages: the process that owns the memory against the kernel's thread, on the
//! same memory in one process.
//!
//! Neither guests nor KVM are needed. Memories of four shapes are merged by each side in turns.
//! Freed pages are counted by the page frames of the memory (`/proc/self/pagemap`), so that the
//! result does not depend on either side's counters. Processor time is that of the thread that
//! merges.

use ebb_virtual_host::kernel::is_at_least;
use serde::Serialize;

use crate::LabError;
use crate::harness::experiment::{Experiment, Needs, OnMachine, Run, SeriesPlan, parameters};
use crate::harness::host;
use crate::harness::in_virtual_host::MERGING_SINCE;
use crate::harness::size::HostShape;
use crate::report::results::{Scale, Series};
use content::Shape;
use ksmd::{Ksmd, SmartScan};
use measure::{Amount, Company};
use metrics::Found;
use owner::Owner;
use side::Side;

mod content;
mod ksmd;
mod measure;
mod memory;
mod metrics;
mod owner;
mod sibling;
mod side;

/// The experiment.
pub static MERGE_SPEED: Experiment = Experiment {
    name: "merge-speed",
    summary: "What merging of equal pages costs: in the process that owns the memory, and by the \
              kernel's thread on the same memory",
    host: |scale, _| host_shape(scale),
    parameters: |scale| {
        parameters(&Sizes {
            host: host_shape(scale),
            amount: amount(scale),
            run_pages: content::RUN_PAGES,
            copies: content::COPIES,
        })
    },
    needs: Needs { merging: true, ..Experiment::DEFAULT.needs },
    machine_lacks,
    metrics: metrics::describe,
    series: || {
        let plan = |name, summary| SeriesPlan::new(name, summary, Run::MachineInTurns(run));
        vec![
            plan(
                metrics::OWNER,
                "the process itself, by moving pages away, comparing and mapping (merge=owner)",
            ),
            plan(
                metrics::KSMD,
                "KSM without sleeps, each page scanned in each pass (smart_scan 0)",
            ),
            plan(metrics::KSMD_SMART, "KSM without sleeps, with smart_scan"),
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
        // Single pages need a mapping or two each, of which a process has 65,530
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

/// A side, by the name of its series.
fn side(name: &str) -> Result<Box<dyn Side>, LabError> {
    Ok(match name {
        metrics::OWNER => Box::new(Owner::new()),
        metrics::KSMD => Box::new(Ksmd::join(SmartScan::Off)?),
        metrics::KSMD_SMART => Box::new(Ksmd::join(SmartScan::On)?),
        other => return Err(LabError::Merging(format!("no side is called '{other}'"))),
    })
}

/// Passes before the steady state, and passes of it. Smart scan scans a page that it could not
/// merge in each of the first passes, and in one of five after the eighth (mm/ksm.c, `skip_age`).
fn steady_passes(name: &str) -> (u64, u64) {
    if name == metrics::KSMD_SMART { (12, 5) } else { (2, 2) }
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
        let mut side = side(name)?;
        if self.shape == Shape::Unique {
            let (settle, steady) = steady_passes(name);
            found.scannings.push(measure::scan(side.as_mut(), amount, self.seed, settle, steady)?);
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
        assert_eq!(turns.len(), 3 * (4 + 3));
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

//! Failures of memory policies in production, as runs of the model.
//!
//! Sources are GitHub's issues and pull requests of the repositories named.

use ebb_host_policy::{Action, GIB, MIB};

use crate::guest::Equipment;
use crate::host::HostShape;
use crate::simulation::{Moment, Outcome, Simulation};
use crate::strategy::Strategy;
use crate::trace::{Activity, Growth, Honesty, Kind, MachineTrace, Phase, Trace};

/// A failure, and the run that shows whether a policy repeats it.
pub struct Incident {
    /// Where: a repository and the number of its issue or pull request, or a short name.
    pub name: &'static str,
    /// What happened.
    pub story: &'static str,
    simulation: Simulation,
    trace: Trace,
    check: fn(&Outcome, &[Moment]) -> Result<(), String>,
}

impl Incident {
    /// Runs it under a policy.
    ///
    /// # Errors
    /// The harm that was done again.
    pub fn survives(&self, strategy: &mut dyn Strategy) -> Result<Outcome, String> {
        let mut moments = Vec::new();
        let outcome = self.simulation.observe(&self.trace, strategy, |moment| {
            moments.push(moment.clone());
        });
        (self.check)(&outcome, &moments).map(|()| outcome)
    }
}

const MINUTE_MS: u64 = 60_000;

fn phase(activity: Activity, seconds: u64, programs_mib: u64, files_mib: u64) -> Phase {
    Phase {
        activity,
        duration_ms: seconds * 1000,
        programs_bytes: programs_mib * MIB,
        growth: Growth::Burst,
        files_bytes: files_mib * MIB,
    }
}

fn work(seconds: u64, programs_mib: u64, files_mib: u64) -> Phase {
    phase(Activity::Work, seconds, programs_mib, files_mib)
}

fn wait(seconds: u64, programs_mib: u64, files_mib: u64) -> Phase {
    phase(Activity::Wait, seconds, programs_mib, files_mib)
}

fn machine(size_bytes: u64, phases: Vec<Phase>) -> MachineTrace {
    let (kind, statistics) = (Kind::Service, Honesty::Honest);
    MachineTrace { arrives_ms: 0, kind, size_bytes, statistics, phases }
}

fn simulation(host_bytes: u64, equipment: Equipment, minutes: u64) -> Simulation {
    let duration_ms = minutes * MINUTE_MS;
    Simulation { host: HostShape::of(host_bytes), equipment, interval_ms: 1000, duration_ms }
}

fn at_most(what: &str, value: u64, most: u64) -> Result<(), String> {
    if value > most { Err(format!("{what}: {value}, at most {most} wanted")) } else { Ok(()) }
}

/// How often a target is raised to more than a tenth of the machine, by machine: the most.
fn squeezes(moments: &[Moment]) -> u64 {
    let machines = moments.iter().flat_map(|moment| &moment.snapshot.machines);
    let mut seen = std::collections::BTreeMap::<&str, (bool, u64)>::new();
    for machine in machines {
        let target = machine.balloon.map_or(0, |balloon| balloon.target_bytes);
        let is_squeezed = target > machine.size_bytes / 10;
        let (was_squeezed, count) = seen.entry(&machine.name).or_default();
        *count += u64::from(is_squeezed && !*was_squeezed);
        *was_squeezed = is_squeezed;
    }
    seen.values().map(|(_, count)| *count).max().unwrap_or(0)
}

/// How often targets change their direction, by machine: the most.
fn reversals(moments: &[Moment]) -> u64 {
    #[derive(Default)]
    struct Way {
        target: u64,
        is_up: Option<bool>,
        count: u64,
    }
    let mut ways = std::collections::BTreeMap::<&str, Way>::new();
    for machine in moments.iter().flat_map(|moment| &moment.snapshot.machines) {
        let way = ways.entry(&machine.name).or_default();
        let target = machine.balloon.map_or(0, |balloon| balloon.target_bytes);
        if target.abs_diff(way.target) >= 8 * MIB {
            let is_up = target > way.target;
            way.count += u64::from(way.is_up.is_some_and(|was_up| was_up != is_up));
            way.is_up = Some(is_up);
            way.target = target;
        }
    }
    ways.values().map(|way| way.count).max().unwrap_or(0)
}

/// All of them.
pub fn all() -> Vec<Incident> {
    let ebb = Equipment::ebb();
    vec![
        Incident {
            name: "arcboxlabs/arcbox#390",
            story: "A machine counted as idle, because it got no requests, and was \
                squeezed to 128 MiB while its own services ran: its processors did nothing but \
                look for memory, for 18 hours.",
            simulation: simulation(32 * GIB, ebb, 60),
            trace: Trace { machines: vec![machine(16 * GIB, vec![work(7_200, 700, 300)])] },
            check: |outcome, _| {
                at_most("out of puff, in ms", outcome.troubles.out_of_puff_ms, 1_000)?;
                at_most("slowdown in thousandths", outcome.slowdown_milli, 1_010)
            },
        },
        Incident {
            name: "arcboxlabs/arcbox#469",
            story: "Squeezed, without memory, given all of it back, idle, squeezed again: every \
                five minutes, with the host short of memory all the time.",
            simulation: simulation(20 * GIB, ebb, 60),
            trace: Trace {
                machines: vec![
                    machine(16 * GIB, vec![wait(7_200, 700, 300)]),
                    machine(20 * GIB, vec![work(7_200, 18_500, 100)]),
                ],
            },
            check: |outcome, moments| {
                at_most("squeezes in an hour", squeezes(moments), 2)?;
                at_most("out of puff, in ms", outcome.troubles.out_of_puff_ms, 1_000)
            },
        },
        Incident {
            name: "vm0-ai/vm0#30227",
            story: "A guest of 4 GiB whose balloon held 3.3 GiB began to work; it got its memory \
                back in parts, and stood still meanwhile.",
            simulation: simulation(6 * GIB, ebb, 10),
            trace: Trace {
                machines: vec![
                    machine(
                        4 * GIB,
                        vec![wait(120, 150, 100), work(60, 3_000, 100), wait(400, 150, 100)],
                    ),
                    // It leaves little for the other, until that begins.
                    machine(6 * GIB, vec![work(118, 4_800, 50), work(500, 300, 50)]),
                ],
            },
            check: |outcome, _| {
                at_most("stalled, in ms", outcome.troubles.stalled_ms, 5_000)?;
                at_most("processes killed", outcome.troubles.oom_kills, 0)
            },
        },
        Incident {
            name: "vm0-ai/vm0#34723",
            story: "Six guests had done their work and kept 13 GiB: caches are not free memory, so \
                reporting free pages does not return them.",
            simulation: simulation(15 * GIB, ebb, 10),
            trace: Trace {
                machines: (0..6)
                    .map(|_| {
                        let phases = vec![work(60, 1_500, 2_000), wait(500, 80, 2_000)];
                        machine(4 * GIB, phases)
                    })
                    .chain([MachineTrace {
                        arrives_ms: 2 * MINUTE_MS,
                        ..machine(6 * GIB, vec![work(120, 5_000, 100)])
                    }])
                    .collect(),
            },
            check: |outcome, moments| {
                at_most("written to swap", outcome.swap_out_bytes, 0)?;
                let last = moments.last().map_or(0, |moment| moment.snapshot.machines.len());
                at_most("machines at the end", last as u64, 6)
            },
        },
        Incident {
            name: "aws-samples/sample-multi-tenant-openclaw-on-firecracker#244",
            story: "Statistics were read at the wrong place of the answer, so guests seemed to \
                have nothing available; nothing was ever done, without a message.",
            simulation: simulation(8 * GIB, ebb, 10),
            trace: Trace {
                machines: (0..4)
                    .map(|index| MachineTrace {
                        statistics: Honesty::Silent,
                        arrives_ms: index * MINUTE_MS,
                        ..machine(4 * GIB, vec![work(30, 1_200, 1_500), wait(500, 80, 1_500)])
                    })
                    .collect(),
            },
            check: |outcome, _| at_most("written to swap", outcome.swap_out_bytes, 0),
        },
        Incident {
            name: "firecracker-microvm/firecracker#4324",
            story: "A large balloon, and the guest's own way to take memory out of it before it \
                kills a process: the guest hung, with its processors at 100 %.",
            simulation: simulation(8 * GIB, ebb, 15),
            trace: Trace {
                machines: vec![machine(
                    4 * GIB,
                    vec![wait(400, 100, 50), work(60, 2_500, 50), wait(400, 100, 50)],
                )],
            },
            check: |outcome, _| at_most("stalled, in ms", outcome.troubles.stalled_ms, 5_000),
        },
        Incident {
            name: "shakenfist/shakenfist#3920",
            story: "Without free page reporting a guest's memory in the host is a high-water mark: \
                4.9 GiB of unused pages lay in the host's swap.",
            simulation: simulation(12 * GIB, Equipment::balloon(), 20),
            trace: Trace {
                machines: (0..4)
                    .map(|index| MachineTrace {
                        arrives_ms: index * 2 * MINUTE_MS,
                        ..machine(8 * GIB, vec![work(60, 4_000, 200), wait(1_200, 300, 200)])
                    })
                    .collect(),
            },
            check: |outcome, _| at_most("written to swap", outcome.swap_out_bytes, 0),
        },
        Incident {
            name: "averages of pressure",
            story: "The kernel's averages stay above zero for minutes after a short wait, and \
                guests were squeezed all that time.",
            simulation: simulation(6 * GIB, ebb, 10),
            trace: Trace {
                machines: vec![
                    machine(4 * GIB, vec![wait(600, 200, 1_000)]),
                    machine(
                        8 * GIB,
                        vec![wait(60, 200, 10), work(4, 7_000, 10), wait(500, 200, 10)],
                    ),
                ],
            },
            check: |_, moments| {
                // Under any policy nothing waits for memory after this time.
                let late = moments.iter().filter(|moment| moment.snapshot.at_ms > 110_000);
                let squeezes = late.flat_map(|moment| &moment.orders).filter(|order| {
                    matches!(order.action, Action::Balloon { target_bytes } if target_bytes > 0)
                });
                at_most("squeezes after that", squeezes.count() as u64, 2)
            },
        },
        Incident {
            name: "hunting",
            story: "The target was the deficit of the moment: what was taken made the deficit \
                vanish, so it was given back, and so on.",
            simulation: simulation(8 * GIB, ebb, 10),
            trace: Trace {
                machines: (0..3)
                    .map(|_| machine(2_448 * MIB, vec![work(1_200, 700, 1_600)]))
                    .collect(),
            },
            check: |_, moments| at_most("changes of direction", reversals(moments), 6),
        },
    ]
}

//! What machines do: arrivals on a host, and the memory that the programs of each need.
//!
//! A trace describes demand. A machine that waits for memory is later with all that follows, so one
//! trace is the same work under each policy.

use ebb_host_policy::{GIB, MIB};
use serde::{Deserialize, Serialize};

use crate::random::{Quantiles, Random};

/// Seeds of the traces that policies are made and tuned with.
pub const SEEDS: [u64; 3] = [1, 2, 3];
/// The seed of the trace on which results count. No policy is tuned with it.
pub const JUDGING_SEED: u64 = 4;

/// Seeds of the traces that a host's history is made of.
const HISTORY_SEEDS: [u64; 3] = [101, 102, 103];

/// Machines in the order of their arrival.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trace {
    /// The machines.
    pub machines: Vec<MachineTrace>,
}

/// What one machine does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineTrace {
    /// When it is asked for, in milliseconds from the start.
    pub arrives_ms: u64,
    /// What kind of work it does.
    pub kind: Kind,
    /// Its memory.
    pub size_bytes: u64,
    /// What its guest says about its memory.
    pub statistics: Honesty,
    /// Its work, one part after the other; then it ends.
    pub phases: Vec<Phase>,
}

/// A part of a machine's work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Phase {
    /// Whether the machine works.
    pub activity: Activity,
    /// Its duration without any shortage of memory.
    pub duration_ms: u64,
    /// Memory of programs at its end.
    pub programs_bytes: u64,
    /// How programs get there.
    pub growth: Growth,
    /// Files that are read repeatedly.
    pub files_bytes: u64,
}

/// Whether a machine works.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activity {
    /// It works; a shortage of memory makes the phase longer.
    Work,
    /// It waits for an external event.
    Wait,
}

/// How memory of programs grows or shrinks in a phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Growth {
    /// As fast as memory is given.
    Burst,
    /// In equal parts over the phase.
    Steady,
}

/// Kinds of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Waits for a model, then runs tools: long quiet and short high peaks.
    Agent,
    /// Serves requests, more by day than by night.
    Service,
    /// Serves requests, and never gives back what it has.
    Leak,
    /// Reads many files with little memory of its own.
    Files,
}

/// What a guest says about its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Honesty {
    /// What is true.
    Honest,
    /// More available memory than the machine has.
    Liar,
    /// Nothing.
    Silent,
    /// The values of the last time that it answered.
    FallsSilent {
        /// Time of the last answer after the start, in milliseconds.
        after_ms: u64,
    },
}

/// What a trace is made of.
#[derive(Clone, Copy, Debug)]
pub struct Recipe {
    /// Decides everything that is not said here.
    pub seed: u64,
    /// Number of machines.
    pub machines: usize,
    /// Mean time from one arrival to the next, in milliseconds.
    pub every_ms: u64,
    /// How many in a thousand machines are not agents, but each of the other kinds.
    pub others_permille: u64,
    /// How many in a thousand guests lie, and how many never say anything.
    pub dishonest_permille: u64,
}

impl Recipe {
    /// The recipe of experiments: agents beside a few of each other kind.
    pub fn fleet(seed: u64) -> Self {
        let (machines, every_ms) = (400, 6_000);
        Self { seed, machines, every_ms, others_permille: 40, dishonest_permille: 20 }
    }

    /// The traces that a host of experiments has run before.
    pub fn history() -> [Trace; 3] {
        HISTORY_SEEDS.map(|seed| Self::fleet(seed).trace())
    }

    /// Makes the trace.
    pub fn trace(&self) -> Trace {
        let mut random = Random::new(self.seed);
        let mut arrives_ms = 0;
        let machines = (0..self.machines).map(|_| {
            // Machines of one trace are the same whatever the others do.
            let mut random = random.split();
            arrives_ms += random.below(2 * self.every_ms + 1);
            self.machine(arrives_ms, &mut random)
        });
        Trace { machines: machines.collect() }
    }

    fn machine(&self, arrives_ms: u64, random: &mut Random) -> MachineTrace {
        let kind = match random.below(1000) / self.others_permille.max(1) {
            0 => Kind::Service,
            1 => Kind::Leak,
            2 => Kind::Files,
            _ => Kind::Agent,
        };
        let statistics = match random.below(1000) / self.dishonest_permille.max(1) {
            0 => Honesty::Liar,
            1 => Honesty::Silent,
            2 => Honesty::FallsSilent { after_ms: 1000 * random.below(600) },
            _ => Honesty::Honest,
        };
        let (size_bytes, phases) = match kind {
            Kind::Agent => agent(random),
            Kind::Service => service(random),
            Kind::Leak => leak(random),
            Kind::Files => files(random),
        };
        MachineTrace { arrives_ms, kind, size_bytes, statistics, phases }
    }
}

/// Rounded up to whole 256 MiB, as people size machines.
fn size_for(most_bytes: u64) -> u64 {
    // The guest's kernel, and what programs and caches need beside the most.
    (most_bytes + most_bytes / 8 + 192 * MIB).next_multiple_of(256 * MIB)
}

/// An agent: from 56 to 74 % of its time it runs tools, else it waits for its model; its highest
/// need is 15.4 times the mean, and grows by up to 3 GB/s ("AgentCgroup: Understanding and
/// Controlling OS Resources of AI Agents", arXiv 2602.09345).
fn agent(random: &mut Random) -> (u64, Vec<Phase>) {
    /// Memory of its own programs, in MiB.
    const BASE: Quantiles = Quantiles(&[(0, 90), (500, 160), (900, 240), (1000, 320)]);
    const CALLS: Quantiles = Quantiles(&[(0, 12), (500, 30), (900, 70), (1000, 120)]);
    const WAIT_MS: Quantiles =
        Quantiles(&[(0, 1_500), (500, 5_000), (900, 15_000), (1000, 60_000)]);
    const TOOL_MS: Quantiles = Quantiles(&[(0, 300), (500, 4_000), (900, 30_000), (1000, 120_000)]);
    /// Memory of a tool, in percent of the programs that run anyhow.
    const TOOL: Quantiles = Quantiles(&[(0, 5), (500, 30), (800, 90), (950, 300), (1000, 700)]);
    /// What a tool reads, in MiB.
    const READS: Quantiles = Quantiles(&[(0, 5), (500, 60), (900, 300), (1000, 900)]);
    let base = MIB * random.draw(&BASE);
    let calls = random.draw(&CALLS);
    // The highest: a build or a large test, short, and once or twice in a machine's life.
    let highest = [random.below(calls), random.below(calls)];
    let mut phases = Vec::new();
    let mut files_bytes = MIB * 40;
    for call in 0..calls {
        phases.push(Phase {
            activity: Activity::Wait,
            duration_ms: random.draw(&WAIT_MS),
            programs_bytes: base,
            growth: Growth::Burst,
            files_bytes,
        });
        let mut duration_ms = random.draw(&TOOL_MS);
        let mut tool = base * random.draw(&TOOL) / 100;
        if highest.contains(&call) {
            tool = base * 25;
            duration_ms = duration_ms.clamp(1_000, 8_000);
        }
        files_bytes = MIB * random.draw(&READS);
        phases.push(Phase {
            activity: Activity::Work,
            duration_ms,
            programs_bytes: base + tool,
            growth: Growth::Burst,
            files_bytes,
        });
    }
    (size_for(base * 26), phases)
}

/// A service whose day lasts twenty minutes.
fn service(random: &mut Random) -> (u64, Vec<Phase>) {
    const DAY_MS: u64 = 20 * 60 * 1000;
    /// Percent of the day's highest need, hour by hour.
    const HOURS: [u64; 24] = [
        35, 32, 30, 30, 30, 33, 40, 52, 68, 82, 92, 97, 100, 98, 96, 95, 93, 90, 86, 80, 70, 60,
        48, 40,
    ];
    let most = MIB * (200 + random.below(1_000));
    let first_hour = random.below(24) as usize;
    let files_bytes = MIB * (100 + random.below(400));
    let phases = (0..36).map(|hour| {
        let percent = HOURS[(first_hour + hour) % HOURS.len()];
        let noise = 95 + random.below(11);
        Phase {
            activity: Activity::Work,
            duration_ms: DAY_MS / 24,
            programs_bytes: most * percent * noise / 10_000,
            growth: Growth::Steady,
            files_bytes,
        }
    });
    let phases = phases.collect();
    (size_for(most + most / 10), phases)
}

/// A service that leaks until it is started anew.
fn leak(random: &mut Random) -> (u64, Vec<Phase>) {
    let base = MIB * (100 + random.below(200));
    let most = base * (3 + random.below(4));
    let work = |duration_ms, programs_bytes, growth| Phase {
        activity: Activity::Work,
        duration_ms,
        programs_bytes,
        growth,
        files_bytes: 80 * MIB,
    };
    let lives = (0..3).flat_map(|_| {
        let duration_ms = 1000 * (120 + random.below(360));
        [work(1_000, base, Growth::Burst), work(duration_ms, most, Growth::Steady)]
    });
    let phases = lives.collect();
    (size_for(most), phases)
}

/// Reads of many files, at times others than before.
fn files(random: &mut Random) -> (u64, Vec<Phase>) {
    let size_bytes = GIB * (1 + random.below(4));
    let base = MIB * (60 + random.below(100));
    let phases = (0..30).flat_map(|_| {
        let files_bytes = size_bytes / 100 * (10 + random.below(60));
        let phase = |activity, duration_ms| Phase {
            activity,
            duration_ms,
            programs_bytes: base,
            growth: Growth::Burst,
            files_bytes,
        };
        [
            phase(Activity::Work, 1000 * (5 + random.below(40))),
            phase(Activity::Wait, 1000 * random.below(40)),
        ]
    });
    let phases = phases.collect();
    (size_bytes, phases)
}

impl MachineTrace {
    /// How long all of its work takes if memory is never waited for, in milliseconds.
    pub fn duration_ms(&self) -> u64 {
        self.phases.iter().map(|phase| phase.duration_ms).sum()
    }

    /// The highest need of its programs.
    pub fn most_bytes(&self) -> u64 {
        self.phases.iter().map(|phase| phase.programs_bytes).max().unwrap_or(0)
    }

    /// The mean need of its programs over time.
    pub fn mean_bytes(&self) -> u64 {
        let (mut sum, mut before) = (0, 0);
        for phase in &self.phases {
            let mean = match phase.growth {
                Growth::Burst => phase.programs_bytes,
                Growth::Steady => u64::midpoint(before, phase.programs_bytes),
            };
            sum += u128::from(mean) * u128::from(phase.duration_ms);
            before = phase.programs_bytes;
        }
        (sum / u128::from(self.duration_ms().max(1))) as u64
    }
}

//! The traces of `ebb-fleet-model` on a smaller host and in less time, as work of real guests.

use std::time::Duration;

use ebb_agent::trace_load::{Part, TraceLoad};
use ebb_fleet_model::Trace;
use ebb_fleet_model::trace::{Activity, Growth, MachineTrace, Phase};
use ebb_host_policy::MIB;
use serde::Serialize;

/// What a scale divides memory and times by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(super) struct Divisors {
    #[serde(rename = "memory_divided_by")]
    pub memory: u64,
    #[serde(rename = "times_divided_by")]
    pub time: u64,
}

/// The part of a machine's size for its guest's kernel, which is the same at each scale.
const KERNEL_BYTES: u64 = 192 * MIB;

impl Divisors {
    /// A trace on a host of this scale.
    pub fn apply(self, trace: &Trace) -> Trace {
        let phase = |phase: &Phase| Phase {
            duration_ms: phase.duration_ms.div_ceil(self.time),
            programs_bytes: self.bytes(phase.programs_bytes),
            files_bytes: self.bytes(phase.files_bytes),
            ..*phase
        };
        let machine = |machine: &MachineTrace| MachineTrace {
            arrives_ms: machine.arrives_ms / self.time,
            size_bytes: (KERNEL_BYTES
                + self.bytes(machine.size_bytes.saturating_sub(KERNEL_BYTES)))
            .next_multiple_of(MIB),
            phases: machine.phases.iter().map(phase).collect(),
            ..*machine
        };
        Trace { machines: trace.machines.iter().map(machine).collect() }
    }

    /// An amount of memory at this scale.
    pub fn bytes(self, bytes: u64) -> u64 {
        bytes / self.memory
    }

    /// A time at this scale.
    pub fn duration(self, ms: u64) -> Duration {
        Duration::from_millis(ms / self.time)
    }
}

/// All that a machine reads.
pub(super) fn files_bytes(machine: &MachineTrace) -> u64 {
    let most = machine.phases.iter().map(|phase| phase.files_bytes).max();
    most.unwrap_or(0).next_multiple_of(MIB)
}

/// The work of a machine, for its agent.
pub(super) fn load(machine: &MachineTrace, files: &str, report: &str) -> TraceLoad {
    let part = |phase: &Phase| Part {
        works: phase.activity == Activity::Work,
        duration_ms: phase.duration_ms,
        programs_kib: phase.programs_bytes >> 10,
        is_steady: phase.growth == Growth::Steady,
        files_kib: phase.files_bytes >> 10,
    };
    TraceLoad {
        files: files.to_owned(),
        report: report.to_owned(),
        parts: machine.phases.iter().map(part).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ebb_agent::protocol::{COMMAND_LIMIT_BYTES, Command, Request};
    use ebb_fleet_model::Recipe;
    use ebb_fleet_model::trace::JUDGING_SEED;

    #[test]
    fn all_but_the_kernel_is_divided() {
        let whole = Recipe::fleet(JUDGING_SEED).trace();
        let same = Divisors { memory: 1, time: 1 }.apply(&whole);
        assert_eq!(same, whole);
        let part = Divisors { memory: 5, time: 8 }.apply(&whole);
        for (part, whole) in part.machines.iter().zip(&whole.machines) {
            let rest = |machine: &MachineTrace| machine.size_bytes - KERNEL_BYTES;
            assert!(rest(part).abs_diff(rest(whole) / 5) <= MIB);
            assert_eq!(part.most_bytes(), whole.most_bytes() / 5);
            let rounded_up = part.phases.len() as u64;
            assert!(part.duration_ms().abs_diff(whole.duration_ms() / 8) <= rounded_up);
            assert!(part.most_bytes() < part.size_bytes);
        }
    }

    #[test]
    fn each_work_fits_in_a_command() {
        for machine in Recipe::fleet(JUDGING_SEED).trace().machines {
            assert!(files_bytes(&machine).is_multiple_of(MIB));
            let command = Command::TraceLoad(load(&machine, "/dev/vda", "/report"));
            let line = Request { id: 1, command }.to_line().unwrap();
            assert!(line.len() < COMMAND_LIMIT_BYTES, "{}", line.len());
        }
    }
}

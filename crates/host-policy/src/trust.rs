//! Whether what a guest says about its memory can be used.

use serde::{Deserialize, Serialize};

use crate::snapshot::Machine;

/// A guest's memory by its own statistics, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Known {
    /// What its kernel and programs use and cannot do without.
    pub(crate) used: u64,
    /// What programs can still get.
    pub(crate) available: u64,
    /// Memory on its free lists.
    pub(crate) free: u64,
}

/// Why a guest's statistics are not used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Doubt {
    /// It has never sent any.
    Never,
    /// They are too old.
    Old {
        /// Their age, in milliseconds.
        age_ms: u64,
    },
    /// They do not say what is available, or what there is.
    Incomplete,
    /// They say that there is more than the machine has.
    Impossible {
        /// What they say: of what is available, free and all memory, the highest.
        said_bytes: u64,
        /// What there is outside of the balloon.
        most_bytes: u64,
    },
}

/// Checks a guest's statistics.
pub(crate) fn assess(machine: &Machine, at_ms: u64, stale_ms: u64) -> Result<Known, Doubt> {
    let said = machine.statistics.ok_or(Doubt::Never)?;
    // A time of the future comes from a clock that has jumped.
    let age_ms = at_ms.abs_diff(said.taken_ms);
    if age_ms > stale_ms {
        return Err(Doubt::Old { age_ms });
    }
    let (Some(total), Some(available)) = (said.total_bytes, said.available_bytes) else {
        return Err(Doubt::Incomplete);
    };
    let free = said.free_bytes.unwrap_or(0);
    let inside = machine.outside_balloon_bytes();
    // The balloon may have moved since; a guest's total without it follows later.
    let most_bytes = inside + machine.size_bytes / 16;
    let said_bytes = total.max(available).max(free);
    let most_bytes = most_bytes.min(machine.size_bytes);
    if total > machine.size_bytes || available > most_bytes || free > most_bytes {
        return Err(Doubt::Impossible { said_bytes, most_bytes });
    }
    Ok(Known { used: inside.saturating_sub(available), available, free })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::{Balloon, Means, Statistics};
    use crate::{GIB, MIB};

    fn machine(balloon: u64, change: impl Fn(&mut Statistics)) -> Machine {
        let mut statistics = Statistics {
            taken_ms: 100_000,
            total_bytes: Some(GIB - balloon - 20 * MIB),
            available_bytes: Some(600 * MIB),
            free_bytes: Some(500 * MIB),
            caches_bytes: Some(100 * MIB),
            major_faults: None,
            swap_out_bytes: None,
            oom_kills: None,
        };
        change(&mut statistics);
        Machine {
            name: "a".into(),
            size_bytes: GIB,
            resident_bytes: Some(GIB / 2),
            swapped_bytes: None,
            processor_ms: None,
            is_paused: false,
            balloon: Some(Balloon { target_bytes: balloon, actual_bytes: balloon }),
            statistics: Some(statistics),
            means: Means::default(),
        }
    }

    fn doubt(change: impl Fn(&mut Statistics)) -> Doubt {
        assess(&machine(0, change), 105_000, 15_000).unwrap_err()
    }

    #[test]
    fn a_guest_that_tells_the_truth_is_believed() {
        let known = assess(&machine(100 * MIB, |_| {}), 105_000, 15_000).unwrap();
        assert_eq!(known.used, GIB - 700 * MIB);
        assert_eq!((known.available, known.free), (600 * MIB, 500 * MIB));
    }

    #[test]
    fn doubts() {
        let mut silent = machine(0, |_| {});
        silent.statistics = None;
        assert_eq!(assess(&silent, 0, 15_000), Err(Doubt::Never));
        assert_eq!(doubt(|said| said.taken_ms = 80_000), Doubt::Old { age_ms: 25_000 });
        assert_eq!(doubt(|said| said.taken_ms = 180_000), Doubt::Old { age_ms: 75_000 });
        assert_eq!(doubt(|said| said.available_bytes = None), Doubt::Incomplete);
        assert_eq!(doubt(|said| said.total_bytes = None), Doubt::Incomplete);
        let impossible = Doubt::Impossible { said_bytes: 2 * GIB, most_bytes: GIB };
        assert_eq!(doubt(|said| said.available_bytes = Some(2 * GIB)), impossible);
        assert_eq!(doubt(|said| said.free_bytes = Some(2 * GIB)), impossible);
        assert_eq!(doubt(|said| said.total_bytes = Some(2 * GIB)), impossible);
    }
}

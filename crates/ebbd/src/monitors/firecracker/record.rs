//! When values were taken that have no time.
//!
//! Firecracker polls the guest every few seconds and keeps the last values. Its API has neither
//! their time nor whether the guest still answers. Two things show that values are not old:
//!
//! - They have changed since the look before: the guest has answered in between.
//! - They are the same, and the monitor has hardly run since the look before. An idle guest answers
//!   the same again and again: one with Linux 6.1 and no program did so 90 times of 90. What has
//!   not run has not used memory either, so the values still hold.
//!
//! A guest that runs for longer and whose values stay the same does not answer. Then the values
//! have the time at which they were last known to hold, until they change. What is seen first has
//! no time: it may be from before a snapshot. Nothing is new while the machine is paused, since
//! a guest that stands still does not answer.

use super::{State, Values};

/// A guest that needs no more than this part of a processor is idle: a fifth.
const IDLE_DIVISOR: u64 = 5;
/// A guest that has run for longer than this beyond it would have used or freed memory, or had a
/// page fault: its values would have changed.
const MOST_BEYOND_MS: u64 = 2000;

/// A look at a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Look {
    /// The moment, on the snapshot's clock.
    pub(super) at_ms: u64,
    pub(super) state: State,
    /// Processor time of the monitor since its start.
    pub(super) processor_ms: u64,
}

/// The values of the last look, and their time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Record {
    values: Values,
    look: Look,
    /// When the values held, at the earliest; `None` if that is not known.
    pub(super) taken_ms: Option<u64>,
    /// How long it has run beyond what is idle since its values have changed.
    beyond_ms: u64,
}

impl Record {
    /// Begins with values of any age.
    pub(super) fn first(values: Values, look: Look) -> Self {
        Self { values, look, taken_ms: None, beyond_ms: 0 }
    }

    /// The record after one more look.
    pub(super) fn next(self, values: Values, look: Look) -> Self {
        let before_ms = self.look.at_ms;
        if values != self.values {
            return Self { values, look, taken_ms: Some(before_ms), beyond_ms: 0 };
        }
        let next = Self { look, ..self };
        let is_silent = self.beyond_ms > MOST_BEYOND_MS;
        if is_silent || self.look.state != State::Running || look.state != State::Running {
            return next;
        }
        let ran_ms = look.processor_ms.saturating_sub(self.look.processor_ms);
        let idle_ms = look.at_ms.saturating_sub(before_ms) / IDLE_DIVISOR;
        let beyond_ms = self.beyond_ms.saturating_add(ran_ms).saturating_sub(idle_ms);
        if beyond_ms > MOST_BEYOND_MS {
            return Self { beyond_ms, ..next };
        }
        Self { beyond_ms, taken_ms: Some(before_ms), ..next }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: Values = Values {
        swap_in: None,
        swap_out: None,
        major_faults: None,
        minor_faults: Some(1),
        free_memory: Some(100),
        total_memory: Some(500),
        available_memory: Some(200),
        disk_caches: None,
        oom_kill: None,
    };
    const NEW: Values = Values { minor_faults: Some(2), ..OLD };

    fn look(at_ms: u64, processor_ms: u64) -> Look {
        Look { at_ms, processor_ms, state: State::Running }
    }

    fn paused(at_ms: u64) -> Look {
        Look { at_ms, processor_ms: 0, state: State::Paused }
    }

    #[test]
    fn values_that_change_are_not_older_than_the_look_before() {
        let record = Record::first(OLD, look(1000, 0));
        assert_eq!(record.taken_ms, None);
        // It has run all the time.
        let record = record.next(NEW, look(2000, 1000));
        assert_eq!(record.taken_ms, Some(1000));
        assert_eq!(record.next(OLD, look(9000, 8000)).taken_ms, Some(2000));
    }

    #[test]
    fn an_idle_guest_answers_the_same() {
        let mut record = Record::first(OLD, look(0, 0));
        for second in 1..100 {
            record = record.next(OLD, look(second * 1000, second * 200));
            assert_eq!(record.taken_ms, Some((second - 1) * 1000));
        }
    }

    #[test]
    fn a_guest_that_runs_and_says_nothing_new_is_silent() {
        let record = Record::first(OLD, look(0, 0)).next(OLD, look(1000, 1000));
        assert_eq!(record.taken_ms, Some(0));
        let record = record.next(OLD, look(2000, 2000));
        assert_eq!(record.taken_ms, Some(1000));
        let record = record.next(OLD, look(3000, 3000));
        assert_eq!(record.taken_ms, Some(1000));
        // That it has stopped running does not make what it said before true.
        let record = record.next(OLD, look(4000, 3000)).next(OLD, look(90_000, 3000));
        assert_eq!(record.taken_ms, Some(1000));
        let record = record.next(NEW, look(91_000, 3000));
        assert_eq!(record.taken_ms, Some(90_000));
        assert_eq!(record.next(NEW, look(92_000, 3000)).taken_ms, Some(91_000));
    }

    #[test]
    fn a_guest_may_run_for_a_moment() {
        let mut record = Record::first(OLD, look(0, 0));
        for round in 1..10 {
            record = record.next(OLD, look(round * 10_000 - 8000, round * 1500));
            record = record.next(OLD, look(round * 10_000, round * 1500));
            assert_eq!(record.taken_ms, Some(round * 10_000 - 8000));
        }
    }

    #[test]
    fn a_paused_guest_does_not_answer() {
        let record = Record::first(OLD, look(0, 0)).next(OLD, look(1000, 0));
        let record = record.next(OLD, paused(2000)).next(OLD, paused(3000));
        assert_eq!(record.taken_ms, Some(0));
        let record = record.next(OLD, look(4000, 0));
        assert_eq!(record.taken_ms, Some(0));
        assert_eq!(record.next(OLD, look(5000, 0)).taken_ms, Some(4000));
    }

    #[test]
    fn clocks_that_go_back_and_absurd_times_do_no_harm() {
        let record = Record::first(OLD, look(5000, u64::MAX)).next(OLD, look(4000, 0));
        assert_eq!(record.taken_ms, Some(5000));
        assert_eq!(record.next(OLD, look(u64::MAX, u64::MAX)).taken_ms, Some(5000));
    }
}

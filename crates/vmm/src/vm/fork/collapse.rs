//! Makes the memory of a machine huge again that is split when it is written to after a checkpoint
//! ([`ebb_guest_ram::Collapse`]), in the machine that goes on.
//!
//! The thread for checkpoints, which has nothing else to do, does it in short passes. After a round
//! over all memory it rests, for longer if there was nothing to do.

use std::time::{Duration, Instant};

use ebb_guest_ram::{Collapse, PassEnd};
use ebb_page_merge::{Clock as _, SystemClock};

use crate::vm::Vm;

/// Longest time of a processor for a pass, but for the block that it ends with.
const PASS_LIMIT: Duration = Duration::from_millis(200);
/// Shortest and longest rest after a pass.
const SHORTEST_REST: Duration = Duration::from_secs(1);
const LONGEST_REST: Duration = Duration::from_secs(60);

/// The work since the last checkpoint.
pub(in crate::vm) struct Collapsing<'a> {
    vm: &'a Vm,
    /// `None` if there is nothing to do.
    work: Option<Work<'a>>,
}

struct Work<'a> {
    blocks: Collapse<'a>,
    /// Blocks that were made huge in this round.
    huge: usize,
    /// After a round.
    rest: Duration,
    /// Time of the next pass.
    due: Instant,
}

impl<'a> Collapsing<'a> {
    /// Of a machine before its first checkpoint. One that was forked is to stay small, and a
    /// thousand idle ones are not to look at their memory again and again.
    pub(in crate::vm) fn new(vm: &'a Vm) -> Self {
        Self { vm, work: None }
    }

    /// All memory is shared with a checkpoint now.
    pub(in crate::vm) fn begin(&mut self) {
        self.work = match self.vm.ram.collapse() {
            Ok(blocks) => {
                let due = Instant::now() + SHORTEST_REST;
                Some(Work { blocks, huge: 0, rest: SHORTEST_REST, due })
            }
            Err(reason) => {
                tracing::debug!("memory is not made huge again: {reason}");
                None
            }
        };
    }

    /// When the next pass is due, if any.
    pub(in crate::vm) fn due(&self) -> Option<Instant> {
        self.work.as_ref().map(|work| work.due)
    }

    /// Does what can be done in a short time. Other tasks come first.
    pub(in crate::vm) fn pass(&mut self) {
        let Some(work) = &mut self.work else { return };
        let limit = SystemClock.cpu() + PASS_LIMIT;
        let is_over = || !self.vm.migrations.is_idle() || SystemClock.cpu() > limit;
        let pass = work.blocks.pass(&is_over);
        let left = work.blocks.left();
        if pass.huge > 0 {
            tracing::debug!("{} blocks of memory are huge again, {left} are not", pass.huge);
        }
        work.huge += pass.huge;
        let rest = if pass.end == PassEnd::Stopped {
            SHORTEST_REST
        } else {
            work.rest = rest_after(pass.end, work.huge, work.rest);
            work.huge = 0;
            work.rest
        };
        if pass.end == PassEnd::NoMemory {
            tracing::debug!("there is no memory to make blocks huge; the next try is in {rest:?}");
        }
        work.due = Instant::now() + rest;
        if left == 0 {
            self.work = None;
        }
    }
}

/// How long to rest after a round that has made `huge` blocks huge, and has followed such a rest.
fn rest_after(end: PassEnd, huge: usize, before: Duration) -> Duration {
    let has_more = huge > 0 && end == PassEnd::Round;
    let rest = if has_more { before / 2 } else { before * 2 };
    rest.clamp(SHORTEST_REST, LONGEST_REST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_without_success_is_followed_by_a_longer_rest() {
        let seconds = Duration::from_secs;
        let mut rest = SHORTEST_REST;
        let rests: Vec<u64> = std::iter::from_fn(|| {
            rest = rest_after(PassEnd::Round, 0, rest);
            Some(rest.as_secs())
        })
        .take(8)
        .collect();
        assert_eq!(rests, [2, 4, 8, 16, 32, 60, 60, 60]);
        assert_eq!(rest_after(PassEnd::Round, 1, seconds(60)), seconds(30));
        assert_eq!(rest_after(PassEnd::Round, 1, seconds(1)), seconds(1));
        // The host needs its memory for others, or the machine its pages as they are.
        assert_eq!(rest_after(PassEnd::NoMemory, 5, seconds(4)), seconds(8));
        assert_eq!(rest_after(PassEnd::Held, 0, seconds(4)), seconds(8));
    }
}

//! Leases: a balloon that is released, and a pause that ends, unless their client renews them.
//!
//! What is leased is undone by the thread `api`. A snapshot, a checkpoint and a migration undo it
//! first: the machine that they lead to does not know the client.

use std::time::{Duration, Instant};

use super::{Vm, lock};
use crate::api::balloon::BalloonTarget;
use crate::api::control::ControlError;
use crate::api::lease::PauseRequest;
use crate::api::vm::VmState;

/// Interval of attempts to undo something while the machine is being saved or sent.
const RETRY: Duration = Duration::from_millis(50);

/// What is leased.
#[derive(Debug, Default)]
pub(super) struct Leases {
    balloon: Option<BalloonLease>,
    pause: Option<Instant>,
}

/// A balloon that is released at a time, if it still has the leased target then.
#[derive(Clone, Copy, Debug)]
struct BalloonLease {
    until: Instant,
    target_bytes: u64,
}

impl Leases {
    fn next(&self) -> Option<Instant> {
        let balloon = self.balloon.map(|lease| lease.until);
        balloon.into_iter().chain(self.pause).min()
    }
}

impl Vm {
    pub(super) fn set_balloon(&self, target: &BalloonTarget) -> Result<(), ControlError> {
        let target_bytes = target.target_bytes;
        self.change_balloon(None, target_bytes)?;
        let lease = |ms| BalloonLease { until: after(ms), target_bytes };
        lock(&self.leases).balloon = target.lease_ms.map(lease);
        Ok(())
    }

    pub(super) fn ask_pause(&self, request: PauseRequest) -> Result<(), ControlError> {
        if request.lease_ms.is_some() {
            // After a migration with unknown outcome, a machine must not be resumed by time.
            self.migrations.check_idle()?;
        }
        let state = self.state();
        let leased = lock(&self.leases).pause;
        self.pause()?;
        let is_others = state == VmState::Paused && leased.is_none();
        lock(&self.leases).pause = request.lease_ms.filter(|_| !is_others).map(after);
        Ok(())
    }

    pub(super) fn ask_resume(&self) -> Result<(), ControlError> {
        self.resume()?;
        lock(&self.leases).pause = None;
        Ok(())
    }

    /// Time left of the balloon's lease, in milliseconds.
    pub(super) fn balloon_lease_ms(&self) -> Option<u64> {
        lock(&self.leases).balloon.map(|lease| left_ms(lease.until))
    }

    /// Time left of the pause's lease, in milliseconds.
    pub(super) fn pause_lease_ms(&self) -> Option<u64> {
        lock(&self.leases).pause.map(left_ms)
    }

    /// Undoes what is leased, before another machine is made of this one.
    pub(super) fn end_leases(&self) -> Result<(), ControlError> {
        let leases = std::mem::take(&mut *lock(&self.leases));
        if let Some(lease) = leases.balloon {
            self.change_balloon(Some(lease.target_bytes), 0)?;
        }
        if leases.pause.is_some() && self.end_pause() == Undone::Later {
            return Err(ControlError::not_running(self.state()));
        }
        Ok(())
    }

    /// Undoes what is due. Returns when to be called again.
    pub(super) fn end_due_leases(&self, now: Instant) -> Option<Instant> {
        let (balloon, pause) = {
            let leases = lock(&self.leases);
            (leases.balloon, leases.pause)
        };
        if let Some(lease) = balloon.filter(|lease| lease.until <= now) {
            // Another target than the leased one is a client's or a parking's.
            let undone = self.change_balloon(Some(lease.target_bytes), 0);
            let again = BalloonLease { until: now + RETRY, ..lease };
            lock(&self.leases).balloon = undone.is_err().then_some(again);
            tracing::debug!(released = undone.is_ok(), "the balloon's lease has ended");
        }
        if pause.is_some_and(|until| until <= now) {
            let undone = self.end_pause();
            lock(&self.leases).pause = (undone == Undone::Later).then_some(now + RETRY);
            tracing::debug!(?undone, "the pause's lease has ended");
        }
        lock(&self.leases).next()
    }

    fn end_pause(&self) -> Undone {
        match self.state() {
            VmState::Saving | VmState::Migrating => Undone::Later,
            VmState::Paused if self.resume().is_err() => Undone::Later,
            _ => Undone::Yes,
        }
    }
}

/// Whether something was undone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Undone {
    /// It was, or there is nothing left to undo.
    Yes,
    /// It must be tried again.
    Later,
}

fn after(ms: u64) -> Instant {
    Instant::now() + Duration::from_millis(ms)
}

fn left_ms(until: Instant) -> u64 {
    let left = until.saturating_duration_since(Instant::now());
    u64::try_from(left.as_millis()).unwrap_or(u64::MAX)
}

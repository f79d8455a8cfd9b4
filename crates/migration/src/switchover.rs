//! The guest between two hosts.

use std::time::Instant;

use crate::{Guest, MigrationError, Report, Tracker};

/// All memory is at the destination and the guest stands still. Who holds this decides where it
/// goes on.
///
/// Exactly one of both ends may run it. So the guest stays as it is when this is dropped: to let it
/// go on here is right only if it is certain that the destination does not run it.
#[must_use]
pub struct Switchover<'a> {
    tracker: Tracker<'a>,
    guest: &'a mut dyn Guest,
    report: Report,
    paused_at: Instant,
}

impl<'a> Switchover<'a> {
    pub(crate) fn new(
        tracker: Tracker<'a>,
        guest: &'a mut dyn Guest,
        report: Report,
        paused_at: Instant,
    ) -> Self {
        Self { tracker, guest, report, paused_at }
    }

    /// What the migration was up to here.
    pub fn report(&self) -> &Report {
        &self.report
    }

    /// When the guest was told to stop.
    pub fn paused_at(&self) -> Instant {
        self.paused_at
    }

    /// The destination runs the guest.
    pub fn complete(self) -> Report {
        self.report
    }

    /// It is not known whether the destination runs the guest. It stays paused here, without the
    /// dirty log.
    pub fn stay_paused(self) -> Report {
        self.report
    }

    /// Leaves the guest to the caller, paused. The second part switches the dirty log off when it
    /// is dropped, which takes time that the guest does not wait for if it is dropped after the
    /// guest goes on somewhere.
    pub fn release(self) -> (Report, Tracker<'a>) {
        (self.report, self.tracker)
    }

    /// The destination does not run the guest and never will. It goes on here.
    ///
    /// # Errors
    /// `because`, or [`MigrationError::Resume`] if it cannot go on; with what the migration was.
    pub fn resume_source(self, because: MigrationError) -> (MigrationError, Report) {
        let Self { tracker, guest, report, .. } = self;
        drop(tracker);
        if let Err(error) = guest.throttle(0) {
            tracing::warn!("the guest may stay slowed down: {error}");
        }
        let error = match guest.resume() {
            Ok(()) => because,
            Err(source) => MigrationError::Resume { first: Box::new(because), source },
        };
        (error, report)
    }
}

//! The guest between source and destination.

use std::time::Instant;

use crate::{Guest, MigrationError, Report, Tracker};

/// All memory is at the destination and the guest is paused. The owner of this value decides where
/// the guest continues.
///
/// Exactly one end may run it. So the guest stays paused when this is dropped: resuming it here is
/// safe only if it is certain that the destination does not run it.
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

    /// Report up to here.
    pub fn report(&self) -> &Report {
        &self.report
    }

    /// Time at which the guest was paused.
    pub fn paused_at(&self) -> Instant {
        self.paused_at
    }

    /// Ends the migration: the destination runs the guest.
    pub fn complete(self) -> Report {
        self.report
    }

    /// Ends the migration with an unknown outcome: the destination may run the guest. It stays
    /// paused here, with the dirty log disabled.
    pub fn stay_paused(self) -> Report {
        self.report
    }

    /// Leaves the paused guest to the caller. Dropping the second part disables the dirty log; drop
    /// it after the guest continues somewhere, so that the guest need not wait for that.
    pub fn release(self) -> (Report, Tracker<'a>) {
        (self.report, self.tracker)
    }

    /// Resumes the guest here: the destination does not run it and never will.
    ///
    /// # Errors
    /// `because`, or [`MigrationError::Resume`] if the guest cannot be resumed; with the report.
    pub fn resume_source(self, because: MigrationError) -> (MigrationError, Report) {
        let Self { tracker, guest, report, .. } = self;
        drop(tracker);
        if let Err(error) = guest.throttle(0) {
            tracing::warn!("the guest may stay throttled: {error}");
        }
        let error = match guest.resume() {
            Ok(()) => because,
            Err(source) => MigrationError::Resume { first: Box::new(because), source },
        };
        (error, report)
    }
}

//! Moving a machine to another monitor, and taking one in.
//!
//! How monitors talk, and how memory gets across, is the crate `ebb-migration`. A
//! [`description`] goes ahead of the memory: whatever the destination cannot provide is found
//! before the first byte of memory is sent. The state that goes behind the memory is that of a
//! snapshot, a [`MachineState`](crate::snapshot::MachineState) without RAM.
//!
//! At the source, the API asks and looks ([`Migrations`]); a thread of its own
//! ([`MigrationThread`]) does the work, because that takes system calls that no other thread may
//! make, and waits for the network. The [`destination`] is a monitor that has no machine yet.

pub(super) mod description;
pub(super) mod destination;
mod guest;
mod hints;
mod machine;
pub(super) mod request;
mod source;

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::{Vm, VmError};
use crate::api::control::{BEING_MOVED, ControlError, Document, Outcome, TimeLeft, Wait};
use crate::api::migration::{MigrationPhase, MigrationReport, MigrationRequest, MigrationStatus};
use crate::api::vm::VmState;
use crate::exit::GuestExit;
use crate::seccomp::{Filters, ThreadKind};

/// How long the monitor waits for somebody to read the report of a completed migration before it
/// ends.
const REPORT_TIME_LIMIT: Duration = Duration::from_secs(1);

/// The migration that is under way, or the last one.
#[derive(Default)]
pub(super) struct Migrations {
    slot: Mutex<Slot>,
    changed: Condvar,
}

#[derive(Default)]
struct Slot {
    status: MigrationStatus,
    /// Asked for, and not taken up by the thread.
    request: Option<MigrationRequest>,
    /// When the present one was asked for.
    asked_at: Option<Instant>,
    /// Ends the present one, from when there is something to end.
    cancel: Option<Box<dyn Fn() + Send>>,
    /// It is to be given up.
    cancelled: bool,
    /// The machine was given away: too late for giving up.
    committed: bool,
    /// The thread is to end.
    ending: bool,
    /// Somebody has read the report.
    report_read: bool,
}

impl Migrations {
    fn lock(&self) -> MutexGuard<'_, Slot> {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a migration is under way.
    pub(super) fn is_active(&self) -> bool {
        self.lock().status.phase.is_active()
    }

    /// Hands the request to the thread.
    pub(super) fn ask(&self, request: MigrationRequest) -> Result<(), ControlError> {
        let mut slot = self.lock();
        if slot.status.phase.is_active() {
            let to = slot.status.to.as_deref().unwrap_or_default();
            let message = format!("{BEING_MOVED} already, to {to}");
            return Err(ControlError::wrong_state(
                message,
                "wait for the end of that migration, or cancel it",
            ));
        }
        if slot.ending {
            return Err(ControlError::wrong_state(
                "the virtual machine has ended",
                "start it again",
            ));
        }
        slot.status = MigrationStatus {
            phase: MigrationPhase::Connecting,
            to: Some(request.to.clone()),
            ..MigrationStatus::default()
        };
        slot.asked_at = Some(Instant::now());
        slot.request = Some(request);
        (slot.cancel, slot.cancelled, slot.committed, slot.report_read) =
            (None, false, false, false);
        self.changed.notify_all();
        Ok(())
    }

    /// How far it is.
    pub(super) fn status(&self) -> MigrationStatus {
        let mut slot = self.lock();
        let mut status = slot.status.clone();
        if status.phase.is_active() {
            status.elapsed_ms = slot.asked_at.map_or(0, |at| in_ms(at.elapsed()));
        }
        if status.phase.is_end() {
            slot.report_read = true;
            self.changed.notify_all();
        }
        status
    }

    /// The same as an answer of the API.
    pub(super) fn document(&self) -> Document {
        Document::Migration(Box::new(self.status()))
    }

    /// How far it is; at its end, or after `wait`, if it is under way.
    pub(super) fn outcome(self: &Arc<Self>, wait: Option<Duration>) -> Outcome {
        let Some(wait) = wait.filter(|_| self.is_active()) else { return self.document().into() };
        let migrations = self.clone();
        Outcome::Await(Wait::until(Instant::now() + wait, move |left| {
            let is_due = left == TimeLeft::None || !migrations.is_active();
            is_due.then(|| Ok(migrations.document()))
        }))
    }

    /// Gives the migration under way up.
    pub(super) fn cancel(&self) -> Result<(), ControlError> {
        let mut slot = self.lock();
        if !slot.status.phase.is_active() {
            return Err(ControlError::wrong_state(
                "no migration is under way",
                "look at /vm/migration for the last one",
            ));
        }
        if slot.committed {
            return Err(ControlError::wrong_state(
                "the virtual machine has been given away to its destination already",
                "wait for the end of the migration",
            ));
        }
        slot.give_up();
        Ok(())
    }

    /// Waits for the next request; `None` when the thread is to end.
    fn next_request(&self) -> Option<MigrationRequest> {
        let mut slot = self.lock();
        loop {
            if slot.ending {
                return None;
            }
            if let Some(request) = slot.request.take() {
                return Some(request);
            }
            slot = self.changed.wait(slot).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// What ends the present migration from now on. It is called at once if it was given up
    /// already.
    fn set_cancel(&self, cancel: impl Fn() + Send + 'static) {
        let mut slot = self.lock();
        if slot.cancelled {
            cancel();
        }
        slot.cancel = Some(Box::new(cancel));
    }

    fn is_cancelled(&self) -> bool {
        self.lock().cancelled
    }

    /// Notes that the machine is given away now, unless the migration was given up. Returns whether
    /// it was noted.
    fn commit(&self) -> bool {
        let mut slot = self.lock();
        slot.committed = !slot.cancelled && !slot.ending;
        slot.committed
    }

    fn update(&self, change: impl FnOnce(&mut MigrationStatus)) {
        change(&mut self.lock().status);
    }

    /// Time since the request.
    fn elapsed(&self) -> Duration {
        self.lock().asked_at.map_or(Duration::ZERO, |at| at.elapsed())
    }

    /// The end of the present migration.
    fn finish(&self, mut report: MigrationReport) {
        let mut slot = self.lock();
        report.total_ms = slot.asked_at.map_or(0, |at| in_ms(at.elapsed()));
        slot.status.phase = report.status;
        slot.status.elapsed_ms = report.total_ms;
        slot.status.bytes_sent = report.bytes_sent;
        (slot.status.remaining_bytes, slot.status.throttle_percent) = (0, 0);
        slot.status.expected_downtime_ms = None;
        slot.status.report = Some(report);
        slot.cancel = None;
        self.changed.notify_all();
    }

    /// Waits until somebody has read the report, for a short time.
    fn wait_for_reader(&self) {
        let deadline = Instant::now() + REPORT_TIME_LIMIT;
        let mut slot = self.lock();
        while !slot.report_read && !slot.ending {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            slot = self.changed.wait_timeout(slot, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// No more requests: the thread ends, and gives up what it is doing unless it is too late.
    fn end(&self) {
        let mut slot = self.lock();
        slot.ending = true;
        if !slot.committed {
            slot.give_up();
        }
        self.changed.notify_all();
    }
}

/// The thread that moves the machine when it is asked to; dropped, it ends.
pub(super) struct MigrationThread {
    vm: Arc<Vm>,
    thread: Option<JoinHandle<()>>,
}

impl MigrationThread {
    /// Starts the thread, which waits for a request.
    pub(super) fn start(vm: &Arc<Vm>, filters: &Filters) -> Result<Self, VmError> {
        let (machine, filter) = (vm.clone(), filters.for_thread(ThreadKind::Migrate));
        let thread = std::thread::Builder::new()
            .name("migrate".to_owned())
            .spawn(move || match filter.apply() {
                Ok(()) => work(&machine),
                Err(error) => machine.exit.raise(GuestExit::Monitor { message: error.to_string() }),
            })
            .map_err(VmError::host("start the thread for migrations"))?;
        Ok(Self { vm: vm.clone(), thread: Some(thread) })
    }
}

impl Drop for MigrationThread {
    fn drop(&mut self) {
        self.vm.migrations.end();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has been printed where it happened.
            let _ = thread.join();
        }
    }
}

fn work(vm: &Arc<Vm>) {
    while let Some(request) = vm.migrations.next_request() {
        let report = source::migrate(vm, &request);
        let status = report.status;
        if let Some(problem) = &report.error {
            tracing::warn!(
                "the migration to {} has ended as {}: {problem}",
                request.to,
                status.name()
            );
        }
        if status == MigrationPhase::Completed {
            *super::lock(&vm.state) = VmState::Stopping;
        }
        vm.migrations.finish(report);
        if status == MigrationPhase::Completed {
            vm.migrations.wait_for_reader();
            vm.exit.raise(GuestExit::Migrated { to: request.to });
            return;
        }
    }
}

impl Slot {
    fn give_up(&mut self) {
        self.cancelled = true;
        if let Some(cancel) = &self.cancel {
            cancel();
        }
    }
}

fn in_ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;

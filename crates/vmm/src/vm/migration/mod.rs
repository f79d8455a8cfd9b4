//! Migration of a machine to another monitor, and reception of one.
//!
//! The protocol between monitors and the transfer of memory are in the crate `ebb-migration`. A
//! [`description`] is sent ahead of the memory, so that anything the destination cannot provide is
//! found before the first byte of memory is sent. The state sent after the memory is that of a
//! snapshot, a [`MachineState`](crate::snapshot::MachineState) without RAM.
//!
//! At the source, the API starts and observes migrations ([`Migrations`]). A separate thread
//! ([`MigrationThread`]) does the work, because it needs system calls that no other thread may
//! make, and waits for the network. It also does other [tasks](Task). The [`destination`] is a
//! monitor that has no machine yet.

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

use ebb_migration::session::CancelHandle;

use super::fork::Collapsing;
use super::task::{Task, TaskKind, Ticket};
use super::{Vm, VmError};
use crate::api::control::{BEING_MOVED, ControlError, Document, Outcome, TimeLeft, Wait};
use crate::api::migration::{MigrationPhase, MigrationReport, MigrationStatus};
use crate::api::vm::VmState;
use crate::ending::join_until;
use crate::exit::GuestExit;
use crate::seccomp::{Filters, ThreadKind};
use request::Order;

/// How long the monitor waits for a client to read the report of a completed migration before it
/// ends.
const REPORT_TIME_LIMIT: Duration = Duration::from_secs(1);

/// The migration in progress, or the last one.
#[derive(Default)]
pub(super) struct Migrations {
    slot: Mutex<Slot>,
    changed: Condvar,
}

#[derive(Default)]
struct Slot {
    status: MigrationStatus,
    /// Requested, and not yet taken by the thread.
    request: Option<Job>,
    /// The task that is requested or being done.
    task: Option<Arc<Ticket>>,
    /// When the current one was requested.
    asked_at: Option<Instant>,
    /// Cancels the current one; set while there is something to cancel.
    cancel: Option<Box<dyn Fn() + Send>>,
    /// The current one should be cancelled.
    cancelled: bool,
    /// The migration is committed: too late to cancel.
    committed: bool,
    /// The thread should end.
    ending: bool,
    /// A client has read the report.
    report_read: bool,
}

/// What a thread does next.
enum Turn {
    Job(Job),
    /// The time has come that it waits for.
    Due,
    End,
}

/// A job of the thread.
enum Job {
    Migrate(Box<Order>),
    Task(Task),
}

impl Job {
    /// The thread that does it.
    fn thread(&self) -> ThreadKind {
        match self {
            Self::Task(task) if task.ticket().kind() == TaskKind::Checkpoint => ThreadKind::Fork,
            _ => ThreadKind::Migrate,
        }
    }
}

impl Migrations {
    fn lock(&self) -> MutexGuard<'_, Slot> {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a migration is in progress.
    pub(super) fn is_active(&self) -> bool {
        self.lock().status.phase.is_active()
    }

    /// Refuses what must not begin during a migration or another job.
    pub(super) fn check_idle(&self) -> Result<(), ControlError> {
        let slot = self.lock();
        if slot.status.phase.is_active() {
            return Err(ControlError::not_running(VmState::Migrating));
        }
        slot.check_free()
    }

    /// Passes the order to the thread.
    pub(super) fn ask(&self, order: Order) -> Result<(), ControlError> {
        let mut slot = self.lock();
        if slot.status.phase.is_active() {
            let to = slot.status.to.as_deref().unwrap_or_default();
            let message = format!("{BEING_MOVED} already, to {to}");
            return Err(ControlError::wrong_state(
                message,
                "wait for the end of that migration, or cancel it",
            ));
        }
        slot.check_free()?;
        slot.status = MigrationStatus {
            phase: MigrationPhase::Connecting,
            to: Some(order.request.to.clone()),
            ..MigrationStatus::default()
        };
        slot.asked_at = Some(Instant::now());
        slot.request = Some(Job::Migrate(Box::new(order)));
        (slot.cancel, slot.cancelled, slot.committed, slot.report_read) =
            (None, false, false, false);
        self.changed.notify_all();
        Ok(())
    }

    /// Passes a task to the thread.
    pub(super) fn ask_task(&self, task: Task) -> Result<Outcome, ControlError> {
        let mut slot = self.lock();
        if slot.status.phase.is_active() {
            // A guest must neither be stopped for long nor change much while it is sent, and it
            // would be unclear whether a snapshot or the destination is newer.
            return Err(ControlError::not_running(VmState::Migrating));
        }
        slot.check_free()?;
        let outcome = task.ticket().outcome();
        slot.task = Some(task.ticket().clone());
        slot.request = Some(Job::Task(task));
        self.changed.notify_all();
        Ok(outcome)
    }

    /// Ends the current task with its answer.
    fn finish_task(&self, ticket: &Ticket, answer: Result<Document, ControlError>) {
        // First: a client that has the answer may request the next one.
        self.lock().task = None;
        ticket.finish(answer);
    }

    /// Progress of the migration.
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

    /// [`status`](Self::status) as an API document.
    pub(super) fn document(&self) -> Document {
        Document::Migration(Box::new(self.status()))
    }

    /// Progress of the migration; at its end, or after `wait`, if it is in progress.
    pub(super) fn outcome(self: &Arc<Self>, wait: Option<Duration>) -> Outcome {
        let Some(wait) = wait.filter(|_| self.is_active()) else { return self.document().into() };
        let migrations = self.clone();
        Outcome::Await(Wait::until(Instant::now() + wait, move |left| {
            let is_due = left == TimeLeft::None || !migrations.is_active();
            is_due.then(|| Ok(migrations.document()))
        }))
    }

    /// Cancels the migration in progress.
    pub(super) fn cancel(&self) -> Result<(), ControlError> {
        let mut slot = self.lock();
        if !slot.status.phase.is_active() {
            return Err(ControlError::wrong_state(
                "no migration is under way",
                "GET /vm/migration reports the last one",
            ));
        }
        if slot.committed {
            return Err(ControlError::wrong_state(
                "the migration is committed: its destination may run the virtual machine",
                "wait for the end of the migration",
            ));
        }
        slot.give_up();
        Ok(())
    }

    /// Waits for the next request for this thread, until `due` if that is set.
    fn next_turn(&self, thread: ThreadKind, due: Option<Instant>) -> Turn {
        let mut slot = self.lock();
        loop {
            if slot.ending {
                return Turn::End;
            }
            if let Some(request) = slot.request.take_if(|job| job.thread() == thread) {
                return Turn::Job(request);
            }
            let left = due.map(|due| due.saturating_duration_since(Instant::now()));
            slot = match left {
                None => self.changed.wait(slot).unwrap_or_else(PoisonError::into_inner),
                Some(Duration::ZERO) => return Turn::Due,
                Some(left) => {
                    let waited = self.changed.wait_timeout(slot, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }

    /// Whether no migration and no other task is requested or in progress.
    pub(super) fn is_idle(&self) -> bool {
        let slot = self.lock();
        !slot.status.phase.is_active() && slot.check_free().is_ok()
    }

    /// Sets the function that cancels the current migration. Called at once if the migration is
    /// cancelled already.
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

    /// Records that the machine is handed over now, unless the migration was cancelled. Returns
    /// whether it was recorded.
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

    /// Ends the current migration with its report.
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

    /// Waits until a client has read the report, for at most [`REPORT_TIME_LIMIT`].
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

    /// Stops accepting requests: the thread ends, and cancels its task, or its migration unless that
    /// is committed.
    fn end(&self) {
        let mut slot = self.lock();
        slot.ending = true;
        if !slot.committed {
            slot.give_up();
        }
        if let Some(ticket) = &slot.task {
            ticket.cancel();
        }
        // One that the thread has not taken.
        if let Some(Job::Task(task)) = slot.request.take() {
            task.ticket().finish(Err(task.ticket().kind().cancelled()));
            slot.task = None;
        }
        self.changed.notify_all();
    }
}

/// The thread that runs migrations and does other tasks on request, and the one that makes
/// checkpoints. Dropping it cancels them and ends the threads.
pub(super) struct MigrationThread {
    vm: Arc<Vm>,
    threads: Vec<JoinHandle<()>>,
}

impl MigrationThread {
    /// Starts the threads, which wait for requests.
    pub(super) fn start(vm: &Arc<Vm>, filters: &Filters) -> Result<Self, VmError> {
        let (machine, filter) = (vm.clone(), filters.for_thread(ThreadKind::Migrate));
        // Its descriptor cannot be created behind the filter.
        let cancel = CancelHandle::new().map_err(VmError::host("create an event"))?;
        let thread = std::thread::Builder::new()
            .name("migrate".to_owned())
            .spawn(move || match filter.apply() {
                Ok(()) => work(&machine, &cancel),
                Err(error) => machine.exit.raise(GuestExit::Monitor { message: error.to_string() }),
            })
            .map_err(VmError::host("start the thread for migrations"))?;
        let mut started = Self { vm: vm.clone(), threads: vec![thread] };
        if vm.forkable.is_some() {
            let (machine, filter) = (vm.clone(), filters.for_thread(ThreadKind::Fork));
            let thread = std::thread::Builder::new()
                .name("fork".to_owned())
                .spawn(move || match filter.apply() {
                    Ok(()) => make_checkpoints(&machine),
                    Err(error) => {
                        machine.exit.raise(GuestExit::Monitor { message: error.to_string() });
                    }
                })
                .map_err(VmError::host("start the thread for checkpoints"))?;
            started.threads.push(thread);
        }
        Ok(started)
    }
}

impl Drop for MigrationThread {
    fn drop(&mut self) {
        self.vm.migrations.end();
        for thread in self.threads.drain(..) {
            // It holds the machine: what it uses stays.
            let _ = join_until(thread, self.vm.exit.end_deadline());
        }
    }
}

fn make_checkpoints(vm: &Arc<Vm>) {
    let mut collapsing = Collapsing::new(vm);
    loop {
        match vm.migrations.next_turn(ThreadKind::Fork, collapsing.due()) {
            Turn::Job(Job::Task(task)) => {
                let ticket = task.ticket().clone();
                let answer = task.carry_out(vm);
                if answer.is_ok() {
                    collapsing.begin();
                }
                vm.migrations.finish_task(&ticket, answer);
            }
            Turn::Due => collapsing.pass(),
            Turn::Job(Job::Migrate(_)) | Turn::End => return,
        }
    }
}

fn work(vm: &Arc<Vm>, cancel: &CancelHandle) {
    while let Turn::Job(job) = vm.migrations.next_turn(ThreadKind::Migrate, None) {
        let order = match job {
            Job::Migrate(order) => order,
            Job::Task(task) => {
                let ticket = task.ticket().clone();
                vm.migrations.finish_task(&ticket, task.carry_out(vm));
                continue;
            }
        };
        let to = order.request.to.clone();
        cancel.reset();
        let report = source::migrate(vm, *order, cancel);
        let status = report.status;
        if let Some(problem) = &report.error {
            tracing::warn!("the migration to {to} has ended as {}: {problem}", status.name());
        }
        if status == MigrationPhase::Completed {
            *super::lock(&vm.state) = VmState::Stopping;
        }
        vm.migrations.finish(report);
        if status == MigrationPhase::Completed {
            vm.migrations.wait_for_reader();
            vm.exit.raise(GuestExit::Migrated { to });
            return;
        }
    }
}

impl Slot {
    /// Refuses a request while the thread does a task, or if it ends.
    fn check_free(&self) -> Result<(), ControlError> {
        if self.ending {
            return Err(ControlError::wrong_state(
                "the virtual machine has ended",
                "start it again",
            ));
        }
        match &self.task {
            Some(ticket) => Err(ticket.kind().busy()),
            None => Ok(()),
        }
    }

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

//! Operations of the API on a virtual machine.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt as _;
use std::sync::MutexGuard;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::balloon;
use super::migration::request::Order;
use super::save::Save;
use super::start_parts::StartParts;
use super::task::{Task, TaskKind};
use super::vsock::VsockHandle;
use super::{Vm, lock};
use crate::api::control::{ControlError, Document, Machine, Operation, Outcome};
use crate::api::metrics::{KindCount, Metrics};
use crate::api::migration::MigrationRequest;
use crate::api::vm::{SnapshotTarget, TrimReport, VmInfo, VmState};
use crate::api::working_set::WorkingSet;
use crate::exit::GuestExit;

impl Machine for Vm {
    fn handle(
        &self,
        operation: Operation,
        descriptors: Vec<OwnedFd>,
    ) -> Result<Outcome, ControlError> {
        let document = match operation {
            Operation::OpenApi => Document::OpenApi,
            Operation::VmInfo => self.info(),
            Operation::Pause(request) => self.ask_pause(request).map(|()| self.info())?,
            Operation::Resume => self.ask_resume().map(|()| self.info())?,
            Operation::PowerButton => self.power_button().map(|()| self.info())?,
            Operation::Kill => {
                *lock(&self.state) = VmState::Stopping;
                self.exit.raise(GuestExit::Killed);
                self.info()
            }
            Operation::Trim => Document::Trim(self.trim()?),
            Operation::Park(request) => return self.ask_park(request),
            Operation::ParkStatus => return Ok(self.park_status()),
            Operation::Snapshot(target) => return self.snapshot(target, descriptors),
            Operation::WorkingSet => Document::WorkingSet(self.working_set()?),
            Operation::Checkpoint(target) => return self.ask_checkpoint(target, descriptors),
            Operation::Migrate(request) => {
                self.migrate(*request, descriptors)?;
                self.migrations.document()
            }
            Operation::Migration { wait } => return Ok(self.migrations.outcome(wait)),
            Operation::CancelMigration => {
                self.migrations.cancel()?;
                self.migrations.document()
            }
            Operation::Balloon => Document::Balloon(self.balloon_info()?),
            Operation::SetBalloon(target) => {
                self.set_balloon(&target)?;
                Document::Balloon(self.balloon_info()?)
            }
            Operation::Statistics { max_age } => return self.statistics(max_age),
            Operation::SetStatisticsInterval(interval) => {
                let seconds = interval.interval_seconds;
                self.set_statistics_interval((seconds != 0).then(|| Duration::from_secs(seconds)))?;
                Document::Balloon(self.balloon_info()?)
            }
            Operation::FreePages(request) => return self.free_pages(request),
            Operation::Reclaim(request) => {
                self.not_being_copied()?;
                return self.reclaim(request);
            }
            Operation::HintRun(run) => Document::HintRun(self.hint_run(run)?),
            Operation::Disks => Document::Disks(self.disks()),
            Operation::ResizeDisk(change) => {
                self.change_disk(&change, descriptors)?;
                Document::Disks(self.disks())
            }
            Operation::Limits => Document::Limits(self.limits()),
            Operation::SetLimits(change) => {
                self.set_limits(&change)?;
                Document::Limits(self.limits())
            }
            Operation::Net => Document::Net(self.net()),
            Operation::SetNet(change) => {
                self.set_net(&change)?;
                Document::Net(self.net())
            }
            Operation::Merge => Document::Merge(Box::new(self.merging.info()?)),
            Operation::SetMerge(change) => {
                // Unlocked: the kernel may take seconds. In a machine that is given away meanwhile,
                // merging is paused, and the change has no effect on its memory.
                drop(self.not_given_away()?);
                self.merging.change(&change)?;
                Document::Merge(Box::new(self.merging.info()?))
            }
            Operation::AttachConsole => Document::Console(self.attach_console(descriptors)?),
            Operation::Metrics => Document::Metrics(Box::new(self.metrics())),
        };
        Ok(document.into())
    }

    fn on_time(&self, now: Instant) -> Option<Instant> {
        self.end_due_leases(now)
    }
}

impl Vm {
    /// Locks the state for a change of the machine. Refused if the machine was saved or is being
    /// saved, which cannot begin while the lock is held: a change after it would be lost.
    pub(super) fn not_given_away(&self) -> Result<MutexGuard<'_, VmState>, ControlError> {
        unless_given_away(lock(&self.state))
    }

    pub(super) fn state(&self) -> VmState {
        *lock(&self.state)
    }

    /// Memory that shares pages with other memory; `None` without merging.
    pub(super) fn merged_bytes(&self) -> Option<u64> {
        self.merging.merged_bytes()
    }

    fn uptime_ms(&self) -> u64 {
        match self.state() {
            VmState::Starting | VmState::Receiving => 0,
            _ => u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX),
        }
    }

    fn info(&self) -> Document {
        Document::Vm(VmInfo {
            state: self.state(),
            cpus: u32::from(self.config.cpus),
            memory_bytes: self.ram.size_bytes(),
            backing: self.ram.backing(),
            resident_bytes: self.ram.resident_bytes().unwrap_or(0),
            merged_bytes: self.merged_bytes(),
            snapshot_bytes: self
                .ram
                .is_restored()
                .then(|| self.ram.residency().map_or(0, |r| r.file_bytes)),
            uptime_ms: self.uptime_ms(),
            pause_lease_ms: self.pause_lease_ms(),
            clock: *lock(&self.clock_info),
            kernel: self
                .config
                .boot
                .as_ref()
                .map_or_else(String::new, |boot| boot.kernel.display().to_string()),
            pid: std::process::id(),
            isolation: self.isolation.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            balloon: self.balloon.as_ref().map(|shared| balloon::info(&lock(shared)).into()),
            vsock: self.vsock.as_ref().map(VsockHandle::info),
        })
    }

    pub(super) fn pause(&self) -> Result<(), ControlError> {
        let mut state = lock(&self.state);
        match *state {
            VmState::Paused => Ok(()),
            VmState::Running => {
                self.freeze().map_err(ControlError::failed)?;
                *state = VmState::Paused;
                Ok(())
            }
            state => Err(ControlError::not_running(state)),
        }
    }

    pub(super) fn resume(&self) -> Result<(), ControlError> {
        let mut state = lock(&self.state);
        match *state {
            VmState::Running => Ok(()),
            VmState::Paused => {
                // After a migration with unknown outcome, a destination that runs holds the disks.
                self.reacquire_exclusive().map_err(|problem| {
                    ControlError::wrong_state(problem, "end the other process")
                })?;
                self.thaw().map_err(ControlError::failed)?;
                *lock(&self.handed_over) = None;
                *state = VmState::Running;
                Ok(())
            }
            state => Err(ControlError::not_running(state)),
        }
    }

    fn power_button(&self) -> Result<(), ControlError> {
        let _running = only_running(lock(&self.state), "react to its power button")?;
        lock(&self.acpi).press_power_button();
        Ok(())
    }

    fn trim(&self) -> Result<TrimReport, ControlError> {
        match self.state() {
            VmState::Running | VmState::Paused => {}
            state => return Err(ControlError::not_running(state)),
        }
        self.not_being_copied()?;
        self.trim_some().map_err(ControlError::failed)
    }

    fn working_set(&self) -> Result<WorkingSet, ControlError> {
        let snapshot = self.restored_from.ok_or_else(|| {
            ControlError::wrong_state(
                "this virtual machine was not restored from a snapshot",
                "ask a machine that `ebb restore` has started",
            )
        })?;
        let extents = self.ram.working_set().map_err(ControlError::failed)?;
        Ok(WorkingSet::new(snapshot, &extents))
    }

    fn snapshot(
        &self,
        target: SnapshotTarget,
        descriptors: Vec<OwnedFd>,
    ) -> Result<Outcome, ControlError> {
        match self.state() {
            VmState::Running | VmState::Paused => {}
            state => return Err(ControlError::not_running(state)),
        }
        let save = Save::new(target, descriptors, self.companion.as_ref())?;
        self.end_leases()?;
        self.migrations.ask_task(Task::new(TaskKind::Snapshot, move |vm, ticket| {
            vm.write_snapshot(save, ticket).map(Document::Snapshot)
        }))
    }

    fn migrate(
        &self,
        request: MigrationRequest,
        descriptors: Vec<OwnedFd>,
    ) -> Result<(), ControlError> {
        match self.state() {
            VmState::Running | VmState::Paused => {
                let order = Order::new(request, descriptors)?;
                self.end_leases()?;
                self.migrations.ask(order)
            }
            state => Err(ControlError::not_running(state)),
        }
    }

    fn metrics(&self) -> Metrics {
        let count = |kind: &'static str, counter: &AtomicU64| {
            KindCount::new(kind, counter.load(Ordering::Relaxed))
        };
        let counters = &self.counters;
        let residency = self.ram.process_residency().unwrap_or_default();
        Metrics {
            memory_bytes: self.ram.size_bytes(),
            guest_resident_bytes: residency.guest.private_bytes,
            guest_shared_bytes: residency.guest.merged_bytes,
            process_resident_bytes: self.process_memory.resident_bytes().unwrap_or(0),
            overhead_resident_bytes: residency.other_bytes.unwrap_or(0),
            uptime_ms: self.uptime_ms(),
            balloon: self.balloon.as_ref().map(|shared| balloon::metrics(&lock(shared))),
            vsock: self.vsock.as_ref().map(VsockHandle::metrics),
            // Unreadable statistics are omitted here; `GET /merge` reports the error.
            merge: self.merging.statistics().ok().flatten(),
            delayed_requests: self.delayed_requests(),
            net_frames: self.net_counters(|net| [&net.received, &net.sent]),
            net_bytes: self.net_counters(|net| [&net.received_bytes, &net.sent_bytes]),
            net_dropped: self.net_counters(|net| [&net.received_dropped, &net.sent_dropped]),
            vcpu_exits: vec![
                count("port_in", &counters.port_in),
                count("port_out", &counters.port_out),
                count("mmio_read", &counters.mmio_read),
                count("mmio_write", &counters.mmio_write),
                count("kicked", &counters.kicked),
            ],
            start_us: self.start_parts.get().map_or_else(Vec::new, StartParts::counts),
        }
    }
}

fn unless_given_away(
    state: MutexGuard<'_, VmState>,
) -> Result<MutexGuard<'_, VmState>, ControlError> {
    match *state {
        VmState::Migrating | VmState::Receiving | VmState::Saving => {
            Err(ControlError::not_running(*state))
        }
        _ => Ok(state),
    }
}

/// Locks the state of a running machine for a request to its guest.
pub(super) fn only_running<'a>(
    state: MutexGuard<'a, VmState>,
    cannot: &str,
) -> Result<MutexGuard<'a, VmState>, ControlError> {
    if *state == VmState::Running {
        return Ok(state);
    }
    let message = format!("a virtual machine that is not running cannot {cannot}");
    Err(ControlError::wrong_state(message, "resume it"))
}

/// Resident memory of this process, guest memory included (Linux
/// Documentation/filesystems/proc.rst, `statm`). Its file is opened once: a monitor has no access
/// to /proc later on.
#[derive(Debug, Default)]
pub(super) struct ProcessMemory(Option<File>);

impl ProcessMemory {
    pub(super) fn open() -> Self {
        let file = File::open("/proc/self/statm")
            .inspect_err(|error| tracing::debug!("/proc/self/statm cannot be read: {error}"));
        Self(file.ok())
    }

    /// That of the process that `file` is about.
    pub(super) fn of(file: Option<File>) -> Self {
        Self(file)
    }

    /// Its size in bytes; `None` if it cannot be read.
    pub(super) fn resident_bytes(&self) -> Option<u64> {
        let mut text = [0; 128];
        let length = self.0.as_ref()?.read_at(&mut text, 0).ok()?;
        let text = std::str::from_utf8(&text[..length]).ok()?;
        let pages: u64 = text.split_ascii_whitespace().nth(1)?.parse().ok()?;
        // Pages of the host; x86_64 has one base page size.
        Some(pages * ebb_abi::PAGE_SIZE_BYTES)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    /// Otherwise the state could be saved for another monitor between check and change.
    #[test]
    fn a_state_that_allows_a_change_stays_while_it_is_made() {
        let state = Mutex::new(VmState::Running);
        for check in 0..2 {
            let held = match check {
                0 => unless_given_away(lock(&state)).unwrap(),
                _ => only_running(lock(&state), "answer").unwrap(),
            };
            assert!(state.try_lock().is_err());
            drop(held);
            assert!(state.try_lock().is_ok());
        }
        for now in [VmState::Migrating, VmState::Receiving, VmState::Saving] {
            *state.lock().unwrap() = now;
            assert!(unless_given_away(lock(&state)).is_err());
            assert!(only_running(lock(&state), "answer").is_err());
            assert!(state.try_lock().is_ok());
        }
    }

    #[test]
    fn touched_memory_is_counted() {
        // Much more than the other tests of this process allocate and free meanwhile.
        const BYTES: usize = 256 << 20;
        let memory = ProcessMemory::open();
        let before = memory.resident_bytes().unwrap();
        let touched = std::hint::black_box(vec![1u8; BYTES]);
        let after = memory.resident_bytes().unwrap();
        assert!(after >= before + BYTES as u64 / 2, "{before} -> {after}");
        drop(touched);
    }
}

//! What the API does to a virtual machine.

use std::borrow::Cow;
use std::path::Path;
use std::time::Duration;

use super::free_pages::Question;
use super::migrate::BEING_MOVED;
use super::migrate::request::check_address;
use super::snapshot::WriteError;
use super::{SharedTransport, Vm, VmError, lock, metrics};
use crate::api::control::{
    BalloonInfo, BalloonState, BalloonSummary, ControlError, DriverPresence, Metrics,
    SnapshotReport, StatisticsReading, TrimReport, VmControl, VmInfo, VmState,
};
use crate::api::free_pages::{FreePagesAnswer, FreePagesRequest};
use crate::api::merge::{MergeChange, MergeInfo};
use crate::api::migration::{MigrationRequest, MigrationStatus};
use crate::devices::virtio::balloon::BalloonDevice;
use crate::devices::virtio::mmio::MmioTransport;
use crate::exit::GuestExit;
use crate::snapshot::SnapshotError;

impl Vm {
    fn balloon_transport(&self) -> Result<&SharedTransport, ControlError> {
        self.balloon.as_ref().ok_or(ControlError::NoBalloon)
    }

    /// The balloon, if a driver in the guest can answer a question for `what` now.
    fn answering_balloon(&self, what: &str) -> Result<&SharedTransport, ControlError> {
        let transport = self.balloon_transport()?;
        if self.state() != VmState::Running {
            let message = format!("a virtual machine that does not run cannot tell {what}");
            return Err(wrong_state(message, "resume it"));
        }
        if driver(&lock(transport)) == DriverPresence::Absent {
            let remedy = "load virtio_balloon or ebb_balloon in the guest";
            return Err(wrong_state("no driver in the guest runs the balloon", remedy));
        }
        Ok(transport)
    }

    /// Refuses to change what has been saved for another monitor.
    fn not_given_away(&self) -> Result<(), ControlError> {
        match self.state() {
            state @ (VmState::Migrating | VmState::Receiving) => Err(standing_still(state)),
            _ => Ok(()),
        }
    }

    pub(super) fn state(&self) -> VmState {
        *lock(&self.state)
    }

    /// Memory that shares pages with other memory, if anybody merges.
    pub(super) fn merged_bytes(&self) -> Option<u64> {
        self.merging.merged_bytes()
    }

    fn uptime_ms(&self) -> u64 {
        match self.state() {
            VmState::Starting | VmState::Receiving => 0,
            _ => u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX),
        }
    }
}

fn driver(transport: &MmioTransport<BalloonDevice>) -> DriverPresence {
    if transport.is_active() { DriverPresence::Present } else { DriverPresence::Absent }
}

fn summary(transport: &MmioTransport<BalloonDevice>) -> BalloonSummary {
    let (target_bytes, actual_bytes) = transport.device().sizes_bytes();
    let state = BalloonState::from_sizes(driver(transport), target_bytes, actual_bytes);
    BalloonSummary { target_bytes, actual_bytes, state }
}

/// What is to be said of a machine that neither runs nor is paused.
pub(super) fn standing_still(state: VmState) -> ControlError {
    match state {
        VmState::Migrating => {
            wrong_state(BEING_MOVED, "wait for the end of the migration, or cancel it")
        }
        VmState::Receiving => {
            wrong_state("the virtual machine has not arrived here yet", "wait until it runs")
        }
        _ => wrong_state("the virtual machine is not running", "wait until it runs"),
    }
}

pub(super) fn wrong_state(message: impl Into<String>, remedy: &str) -> ControlError {
    ControlError::WrongState { message: message.into(), remedy: Some(remedy.to_owned()) }
}

fn failed(error: impl std::fmt::Display) -> ControlError {
    ControlError::Failed { message: error.to_string() }
}

/// What is wrong with the path is the client's to mend; what the disk says is not.
fn snapshot_error(error: VmError) -> ControlError {
    match error {
        VmError::Snapshot(
            problem @ (SnapshotError::Path { .. } | SnapshotError::Exists { .. }),
        ) => ControlError::Invalid { field: "path", message: problem.to_string(), remedy: None },
        error => failed(error),
    }
}

impl VmControl for Vm {
    fn info(&self) -> VmInfo {
        VmInfo {
            state: self.state(),
            cpus: u32::from(self.config.cpus),
            memory_bytes: self.ram.size_bytes(),
            backing: self.ram.backing().into(),
            resident_bytes: self.ram.resident_bytes().unwrap_or(0),
            merged_bytes: self.merged_bytes(),
            snapshot_bytes: self
                .ram
                .is_restored()
                .then(|| self.ram.residency().map_or(0, |r| r.file_bytes)),
            uptime_ms: self.uptime_ms(),
            clock: *lock(&self.clock_info),
            kernel: self
                .config
                .boot
                .as_ref()
                .map_or_else(String::new, |boot| boot.kernel.display().to_string()),
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            balloon: self.balloon.as_ref().map(|balloon| summary(&lock(balloon))),
        }
    }

    fn pause(&self) -> Result<(), ControlError> {
        let mut state = lock(&self.state);
        match *state {
            VmState::Paused => Ok(()),
            VmState::Running => {
                self.freeze().map_err(failed)?;
                *state = VmState::Paused;
                Ok(())
            }
            state => Err(standing_still(state)),
        }
    }

    fn resume(&self) -> Result<(), ControlError> {
        let mut state = lock(&self.state);
        match *state {
            VmState::Running => Ok(()),
            VmState::Paused => {
                // After a migration whose end is unknown: a destination that runs has the disks.
                self.take_devices_back()
                    .map_err(|problem| wrong_state(problem, "end the other one"))?;
                self.thaw().map_err(failed)?;
                *lock(&self.handed_over) = None;
                *state = VmState::Running;
                Ok(())
            }
            state => Err(standing_still(state)),
        }
    }

    fn power_button(&self) -> Result<(), ControlError> {
        if self.state() != VmState::Running {
            return Err(wrong_state(
                "a virtual machine that does not run cannot notice its power button",
                "resume it",
            ));
        }
        let pressed = lock(&self.acpi).press_power_button();
        pressed.map_err(|error| ControlError::Failed {
            message: format!("cannot interrupt the guest: {error}"),
        })
    }

    fn trim(&self) -> Result<TrimReport, ControlError> {
        match self.state() {
            VmState::Running | VmState::Paused => {}
            state => return Err(standing_still(state)),
        }
        self.trim_some().map_err(failed)
    }

    fn snapshot(&self, path: &Path) -> Result<SnapshotReport, ControlError> {
        self.write_snapshot(path).map_err(|error| match error {
            WriteError::State(problem) => wrong_state(problem, "wait until it runs"),
            WriteError::Vm(error) => snapshot_error(error),
        })
    }

    fn migrate(&self, request: MigrationRequest) -> Result<(), ControlError> {
        match self.state() {
            VmState::Running | VmState::Paused => {
                check_address(&request.to)?;
                self.migrations.ask(request)
            }
            state => Err(standing_still(state)),
        }
    }

    fn migration(&self) -> MigrationStatus {
        self.migrations.status()
    }

    fn cancel_migration(&self) -> Result<(), ControlError> {
        self.migrations.cancel()
    }

    fn kill(&self) -> Result<(), ControlError> {
        *lock(&self.state) = VmState::Stopping;
        self.exit.raise(GuestExit::Killed);
        Ok(())
    }

    fn balloon(&self) -> Result<BalloonInfo, ControlError> {
        let transport = lock(self.balloon_transport()?);
        Ok(transport.device().describe(summary(&transport).state))
    }

    fn set_balloon_target(&self, target_bytes: u64) -> Result<(), ControlError> {
        self.not_given_away()?;
        let mut transport = lock(self.balloon_transport()?);
        let changed = transport.device_mut().set_target_bytes(target_bytes)?;
        if changed {
            transport.config_changed();
        }
        Ok(())
    }

    fn request_statistics(&self) -> Result<(), ControlError> {
        let mut transport = lock(self.answering_balloon("statistics")?);
        if transport.device_mut().request_statistics()? {
            transport.interrupt_used();
        }
        Ok(())
    }

    fn statistics(&self) -> Result<StatisticsReading, ControlError> {
        Ok(lock(self.balloon_transport()?).device().statistics())
    }

    fn set_statistics_interval(&self, interval: Option<Duration>) -> Result<(), ControlError> {
        self.not_given_away()?;
        let mut transport = lock(self.balloon_transport()?);
        transport.device_mut().set_statistics_interval(interval);
        transport.wake();
        Ok(())
    }

    fn request_free_pages(
        &self,
        request: FreePagesRequest,
    ) -> Result<Box<dyn FreePagesAnswer>, ControlError> {
        let transport = self.answering_balloon("its free pages")?;
        Ok(Box::new(Question::ask(request, transport, &self.ram)?))
    }

    fn merge(&self) -> Result<MergeInfo, ControlError> {
        self.merging.info()
    }

    fn set_merge(&self, change: &MergeChange) -> Result<(), ControlError> {
        self.not_given_away()?;
        self.merging.change(change)
    }

    fn metrics(&self) -> Metrics {
        use crate::api::control::KindCount;
        use std::sync::atomic::Ordering::Relaxed;
        let count = |kind: &'static str, counter: &std::sync::atomic::AtomicU64| {
            KindCount::new(Cow::Borrowed(kind), counter.load(Relaxed))
        };
        let counters = &self.counters;
        let residency = self.ram.residency().unwrap_or_default();
        Metrics {
            memory_bytes: self.ram.size_bytes(),
            guest_resident_bytes: residency.private_bytes,
            guest_shared_bytes: residency.merged_bytes,
            process_resident_bytes: metrics::process_resident_bytes().unwrap_or(0),
            uptime_ms: self.uptime_ms(),
            balloon: self.balloon.as_ref().map(|balloon| lock(balloon).device().metrics()),
            // What cannot be read now is told by `GET /merge`.
            merge: self.merging.statistics().ok().flatten(),
            vcpu_exits: vec![
                count("port_in", &counters.port_in),
                count("port_out", &counters.port_out),
                count("mmio_read", &counters.mmio_read),
                count("mmio_write", &counters.mmio_write),
                count("kicked", &counters.kicked),
            ],
        }
    }
}

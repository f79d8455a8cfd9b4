//! The API of a monitor whose machine has not arrived yet: it says so, and can be told to end.
//! Everything else it passes on to the machine as soon as that is built.

use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use ebb_kvm_clock::ClockPolicy;

use crate::api::control::{
    BalloonInfo, ClockInfo, ControlError, Metrics, RamBacking, SnapshotReport, StatisticsReading,
    TrimReport, VmControl, VmInfo, VmState,
};
use crate::api::free_pages::{FreePagesAnswer, FreePagesRequest};
use crate::api::merge::{MergeChange, MergeInfo};
use crate::api::migration::{MigrationRequest, MigrationStatus};
use crate::exit::{ExitSignal, GuestExit};
use crate::vm::Vm;
use crate::vm::control::standing_still;

/// A machine that will come, or has.
pub(super) struct Expected {
    vm: OnceLock<Arc<Vm>>,
    exit: Arc<ExitSignal>,
    clock: ClockPolicy,
    since: Instant,
}

impl Expected {
    pub(super) fn new(exit: Arc<ExitSignal>, clock: ClockPolicy) -> Self {
        Self { vm: OnceLock::new(), exit, clock, since: Instant::now() }
    }

    /// The machine is built.
    pub(super) fn arrive(&self, vm: &Arc<Vm>) {
        // There is one machine only.
        let _ = self.vm.set(vm.clone());
    }

    fn vm(&self) -> Result<&Arc<Vm>, ControlError> {
        self.vm.get().ok_or_else(|| standing_still(VmState::Receiving))
    }
}

impl VmControl for Expected {
    fn info(&self) -> VmInfo {
        self.vm.get().map_or_else(
            || VmInfo {
                state: VmState::Receiving,
                cpus: 0,
                memory_bytes: 0,
                backing: RamBacking::Anon,
                resident_bytes: 0,
                merged_bytes: None,
                snapshot_bytes: None,
                uptime_ms: 0,
                clock: ClockInfo { policy: self.clock, ..ClockInfo::default() },
                kernel: String::new(),
                pid: std::process::id(),
                version: env!("CARGO_PKG_VERSION").to_owned(),
                balloon: None,
            },
            |vm| vm.info(),
        )
    }

    fn pause(&self) -> Result<(), ControlError> {
        self.vm()?.pause()
    }

    fn resume(&self) -> Result<(), ControlError> {
        self.vm()?.resume()
    }

    fn power_button(&self) -> Result<(), ControlError> {
        self.vm()?.power_button()
    }

    fn trim(&self) -> Result<TrimReport, ControlError> {
        self.vm()?.trim()
    }

    fn snapshot(&self, path: &Path) -> Result<SnapshotReport, ControlError> {
        self.vm()?.snapshot(path)
    }

    fn migrate(&self, request: MigrationRequest) -> Result<(), ControlError> {
        self.vm()?.migrate(request)
    }

    fn migration(&self) -> MigrationStatus {
        self.vm.get().map_or_else(MigrationStatus::default, |vm| vm.migration())
    }

    fn cancel_migration(&self) -> Result<(), ControlError> {
        self.vm()?.cancel_migration()
    }

    fn kill(&self) -> Result<(), ControlError> {
        if let Some(vm) = self.vm.get() {
            return vm.kill();
        }
        self.exit.raise(GuestExit::Killed);
        Ok(())
    }

    fn balloon(&self) -> Result<BalloonInfo, ControlError> {
        self.vm()?.balloon()
    }

    fn set_balloon_target(&self, target_bytes: u64) -> Result<(), ControlError> {
        self.vm()?.set_balloon_target(target_bytes)
    }

    fn request_statistics(&self) -> Result<(), ControlError> {
        self.vm()?.request_statistics()
    }

    fn statistics(&self) -> Result<StatisticsReading, ControlError> {
        self.vm()?.statistics()
    }

    fn set_statistics_interval(&self, interval: Option<Duration>) -> Result<(), ControlError> {
        self.vm()?.set_statistics_interval(interval)
    }

    fn request_free_pages(
        &self,
        request: FreePagesRequest,
    ) -> Result<Box<dyn FreePagesAnswer>, ControlError> {
        self.vm()?.request_free_pages(request)
    }

    fn merge(&self) -> Result<MergeInfo, ControlError> {
        self.vm()?.merge()
    }

    fn set_merge(&self, change: &MergeChange) -> Result<(), ControlError> {
        self.vm()?.set_merge(change)
    }

    fn metrics(&self) -> Metrics {
        self.vm.get().map_or_else(
            || Metrics {
                process_resident_bytes: crate::vm::metrics::process_resident_bytes().unwrap_or(0),
                uptime_ms: u64::try_from(self.since.elapsed().as_millis()).unwrap_or(u64::MAX),
                ..Metrics::default()
            },
            |vm| vm.metrics(),
        )
    }
}

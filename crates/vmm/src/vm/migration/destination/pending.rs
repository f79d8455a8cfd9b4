//! The API of a machine that has not arrived yet: it reports its state and can be killed. Once the
//! machine is built, all operations are passed on to it.

use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use ebb_guest_ram::Backing;
use ebb_kvm_clock::ClockPolicy;

use crate::api::control::{ControlError, Document, Machine, Operation, Outcome};
use crate::api::metrics::Metrics;
use crate::api::vm::{ClockInfo, VmInfo, VmState};
use crate::exit::{ExitSignal, GuestExit};
use crate::isolation::IsolationInfo;
use crate::vm::Vm;
use crate::vm::control::ProcessMemory;

/// A machine that will arrive or has arrived.
pub(super) struct PendingVm {
    vm: OnceLock<Arc<Vm>>,
    exit: Arc<ExitSignal>,
    clock: ClockPolicy,
    process_memory: ProcessMemory,
    since: Instant,
}

impl PendingVm {
    pub(super) fn new(exit: Arc<ExitSignal>, clock: ClockPolicy) -> Self {
        let process_memory = ProcessMemory::open();
        Self { vm: OnceLock::new(), exit, clock, process_memory, since: Instant::now() }
    }

    /// Sets the built machine.
    pub(super) fn arrive(&self, vm: &Arc<Vm>) {
        // Set only once.
        let _ = self.vm.set(vm.clone());
    }

    fn info(&self) -> Document {
        Document::Vm(VmInfo {
            state: VmState::Receiving,
            cpus: 0,
            memory_bytes: 0,
            backing: Backing::Anonymous,
            resident_bytes: 0,
            merged_bytes: None,
            snapshot_bytes: None,
            uptime_ms: 0,
            pause_lease_ms: None,
            clock: ClockInfo { policy: self.clock, ..ClockInfo::default() },
            kernel: String::new(),
            pid: std::process::id(),
            isolation: IsolationInfo::default(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            balloon: None,
            vsock: None,
        })
    }

    fn metrics(&self) -> Metrics {
        let resident_bytes = self.process_memory.resident_bytes().unwrap_or(0);
        Metrics {
            process_resident_bytes: resident_bytes,
            overhead_resident_bytes: resident_bytes,
            uptime_ms: u64::try_from(self.since.elapsed().as_millis()).unwrap_or(u64::MAX),
            ..Metrics::default()
        }
    }
}

impl Machine for PendingVm {
    fn handle(
        &self,
        operation: Operation,
        descriptors: Vec<OwnedFd>,
    ) -> Result<Outcome, ControlError> {
        if let Some(vm) = self.vm.get() {
            return vm.handle(operation, descriptors);
        }
        let document = match operation {
            Operation::OpenApi => Document::OpenApi,
            Operation::VmInfo => self.info(),
            Operation::Kill => {
                self.exit.raise(GuestExit::Killed);
                self.info()
            }
            Operation::Migration { .. } => Document::Migration(Box::default()),
            Operation::Metrics => Document::Metrics(Box::new(self.metrics())),
            _ => return Err(ControlError::not_running(VmState::Receiving)),
        };
        Ok(document.into())
    }
}

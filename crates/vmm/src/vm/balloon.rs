//! Balloon operations of the API.

use std::time::Duration;

use ebb_abi::PAGE_SIZE_BYTES;
use ebb_abi::balloon::QueueKind;

use super::control::only_running;
use super::{SharedTransport, Vm, lock};
use crate::api::balloon::{BalloonInfo, DriverPresence, HintRun, HintRunStatus};
use crate::api::control::{ControlError, Outcome};
use crate::api::free_pages::{FreePagesRequest, ReclaimRequest};
use crate::api::metrics::BalloonMetrics;
use crate::api::statistics::fresh_statistics;
use crate::devices::virtio::balloon::BalloonDevice;
use crate::devices::virtio::mmio::MmioTransport;

use super::free_pages::{Question, Wish};

/// State of the balloon behind `transport`.
pub(super) fn info(transport: &MmioTransport<BalloonDevice>) -> BalloonInfo {
    BalloonInfo::of(transport.device().balloon(), driver(transport))
}

/// Sizes and counters of the balloon behind `transport`.
pub(super) fn metrics(transport: &MmioTransport<BalloonDevice>) -> BalloonMetrics {
    let balloon = transport.device().balloon();
    BalloonMetrics {
        target_bytes: balloon.target_bytes(),
        actual_bytes: balloon.actual_bytes(),
        counters: balloon.counters(),
    }
}

fn driver(transport: &MmioTransport<BalloonDevice>) -> DriverPresence {
    if transport.is_active() { DriverPresence::Present } else { DriverPresence::Absent }
}

impl Vm {
    fn balloon_transport(&self) -> Result<&SharedTransport, ControlError> {
        self.balloon.as_ref().ok_or(ControlError::NoBalloon)
    }

    /// Calls `ask` with the balloon, if a driver in the guest can report `what` now. The machine
    /// is running until `ask` has returned.
    fn with_answering_balloon<T>(
        &self,
        what: &str,
        ask: impl FnOnce(&SharedTransport) -> Result<T, ControlError>,
    ) -> Result<T, ControlError> {
        let transport = self.balloon_transport()?;
        let _running = only_running(lock(&self.state), &format!("report {what}"))?;
        if driver(&lock(transport)) == DriverPresence::Absent {
            let remedy = "load virtio_balloon or ebb_balloon in the guest";
            return Err(ControlError::wrong_state(
                "no driver in the guest has initialized the balloon",
                remedy,
            ));
        }
        ask(transport)
    }

    pub(super) fn balloon_info(&self) -> Result<BalloonInfo, ControlError> {
        let info = info(&lock(self.balloon_transport()?));
        Ok(BalloonInfo { lease_ms: self.balloon_lease_ms(), ..info })
    }

    /// Sets the balloon's target, if it is still `former_bytes` where one is given; returns whether
    /// it was.
    pub(super) fn change_balloon(
        &self,
        former_bytes: Option<u64>,
        target_bytes: u64,
    ) -> Result<bool, ControlError> {
        let invalid = |message: String| ControlError::Invalid {
            field: "target_bytes",
            message,
            remedy: Some(
                "ask for a multiple of 4096 that is at most the guest's memory".to_owned(),
            ),
        };
        let _kept = self.not_given_away()?;
        let mut transport = lock(self.balloon_transport()?);
        if !target_bytes.is_multiple_of(PAGE_SIZE_BYTES) {
            return Err(invalid(format!("{target_bytes} bytes are not a whole number of pages")));
        }
        let balloon = transport.device_mut().balloon_mut();
        if former_bytes.is_some_and(|former| former != balloon.target_bytes()) {
            return Ok(false);
        }
        if balloon.set_target_bytes(target_bytes).map_err(|error| invalid(error.to_string()))? {
            transport.config_changed();
        }
        Ok(true)
    }

    pub(super) fn statistics(&self, max_age: Option<Duration>) -> Result<Outcome, ControlError> {
        let transport = self.balloon_transport()?.clone();
        let read = move || Ok(lock(&transport).device().balloon().statistics());
        fresh_statistics(max_age, read, || self.request_statistics())
    }

    fn request_statistics(&self) -> Result<(), ControlError> {
        self.with_answering_balloon("statistics", |transport| {
            let mut transport = lock(transport);
            let balloon = transport.device_mut().balloon_mut();
            if balloon.queue_index(QueueKind::Statistics).is_none() {
                return Err(ControlError::wrong_state(
                    "the guest's balloon driver has not negotiated statistics",
                    "start with --balloon statistics=on and use a driver that supports them",
                ));
            }
            if balloon.request_statistics() {
                transport.interrupt_used();
            }
            Ok(())
        })
    }

    pub(super) fn set_statistics_interval(
        &self,
        interval: Option<Duration>,
    ) -> Result<(), ControlError> {
        let _kept = self.not_given_away()?;
        let mut transport = lock(self.balloon_transport()?);
        transport.device_mut().set_statistics_interval(interval);
        transport.wake();
        Ok(())
    }

    /// Starts, ends and describes a run of hints.
    pub(super) fn hint_run(&self, run: HintRun) -> Result<HintRunStatus, ControlError> {
        let state = lock(&self.state);
        let mut transport = lock(self.balloon_transport()?);
        let device = transport.device_mut();
        let changed = match run {
            HintRun::Describe => false,
            HintRun::Start(after) => {
                let _running = only_running(state, "report its free pages")?;
                device.start_hint_run(after).map_err(|error| {
                    ControlError::wrong_state(
                        error.to_string(),
                        "start the machine with hinting=on",
                    )
                })?;
                true
            }
            HintRun::Stop => device.stop_hint_run(),
        };
        let (host_command, driver_command) = device.balloon().hint_commands();
        if changed {
            transport.config_changed();
        }
        Ok(HintRunStatus { host_command, driver_command })
    }

    pub(super) fn free_pages(&self, request: FreePagesRequest) -> Result<Outcome, ControlError> {
        self.ask(Wish::Names(request))
    }

    pub(super) fn reclaim(&self, request: ReclaimRequest) -> Result<Outcome, ControlError> {
        self.ask(Wish::Reports(request))
    }

    fn ask(&self, wish: Wish) -> Result<Outcome, ControlError> {
        let ask = |transport: &SharedTransport| Question::ask(wish, transport, &self.ram);
        let question = self.with_answering_balloon("its free pages", ask)?;
        Ok(Outcome::Await(question.wait()))
    }
}

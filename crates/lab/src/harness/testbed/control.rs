//! Operations of a testbed through a guest's monitor: balloon, trim, counters.

use std::thread;
use std::time::{Duration, Instant};

use ebb_vmm::api::{FreePagesReport, ParkReport, ReclaimReport, RequestStatus, TrimReport};

use super::Testbed;
use crate::LabError;
use crate::error::GuestProblem;
use crate::harness::balloon::{Balloon, BalloonError, Control, ControlSocket};
use crate::harness::counters::Counters;
use crate::harness::devices::Device;
use crate::harness::guest::Guest;
use crate::harness::size::GuestSize;
use crate::report::results::GuestRecord;

/// Time limit for a balloon to reach its target.
const BALLOON_LIMIT: Duration = Duration::from_secs(600);
/// A balloon's size is polled again after this fraction of the elapsed time, within these bounds,
/// so that its time is known to a few percent and polling takes little processor time from the
/// guest.
const BALLOON_INTERVAL_PART: u32 = 50;
const SHORTEST_INTERVAL: Duration = Duration::from_millis(2);
const LONGEST_INTERVAL: Duration = Duration::from_millis(20);
/// A guest's memory is stable if it has not changed for this time.
const REST: Duration = Duration::from_millis(200);
/// Smallest change that counts, in MiB.
const REST_MIB: f64 = 1.0;
/// Interval of reading it.
const REST_INTERVAL: Duration = Duration::from_millis(10);

/// Result of a balloon's change of size.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Resized {
    /// Time until the guest reported the new size, in seconds.
    pub elapsed_s: f64,
    /// Time until the guest's memory on the host was stable, in seconds.
    pub settled_s: f64,
}

impl Testbed<'_> {
    /// As [`Testbed::start_guest`], with a control socket, so that the guest's balloon can be
    /// changed.
    ///
    /// # Errors
    /// As [`Testbed::start_guest`], and [`LabError::SystemFile`] when the directory of the socket
    /// cannot be created.
    pub fn start_controlled_guest(&mut self, size: GuestSize) -> Result<GuestRecord, LabError> {
        self.start_with(size, &[])
    }

    /// As [`Testbed::start_controlled_guest`], with more devices.
    ///
    /// # Errors
    /// As [`Testbed::start_controlled_guest`].
    pub fn start_with(
        &mut self,
        size: GuestSize,
        devices: &[Device<'_>],
    ) -> Result<GuestRecord, LabError> {
        let arguments = self.arguments(devices);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let socket = ControlSocket::new()?;
        let record = self.start(size, Some(&socket.path()), &arguments)?;
        self.control(record.guest, size, socket)?;
        Ok(record)
    }

    /// The monitor's arguments for these devices.
    pub(super) fn arguments(&self, devices: &[Device<'_>]) -> Vec<String> {
        let monitor = self.setup.monitor;
        devices.iter().flat_map(|device| device.arguments(monitor)).collect()
    }

    /// Starts the next guest's monitor with a control socket, without waiting for the guest.
    pub(super) fn launch_controlled(
        &mut self,
        size: GuestSize,
        arguments: &[&str],
    ) -> Result<Guest, LabError> {
        let socket = ControlSocket::new()?;
        let guest = self.launch(size, Some(&socket.path()), arguments)?;
        self.control(guest.number(), size, socket)?;
        Ok(guest)
    }

    fn control(
        &mut self,
        guest: u32,
        size: GuestSize,
        socket: ControlSocket,
    ) -> Result<(), LabError> {
        let control = Control::open(guest, self.setup.monitor, socket, size.memory_mib)
            .map_err(|error| LabError::unexpected(guest, error))?;
        self.controls.push(control);
        Ok(())
    }

    /// Trims a guest: discards its pages of zeros.
    ///
    /// # Errors
    /// [`LabError::Guest`] when the monitor refuses or the guest has no control socket.
    pub fn trim(&mut self, guest: u32) -> Result<TrimReport, LabError> {
        self.events.step(guest, "is trimmed");
        self.through(guest, Balloon::trim)
    }

    /// Parks a guest, which keeps `keep_mib` of memory available.
    ///
    /// # Errors
    /// [`LabError::Guest`] when the monitor refuses or the guest has no control socket.
    pub fn park(&mut self, guest: u32, keep_mib: u64) -> Result<ParkReport, LabError> {
        self.events.step(guest, "is parked");
        self.through(guest, |balloon| balloon.park(keep_mib))
    }

    /// The monitor's counters for a guest; `None` under QEMU.
    ///
    /// # Errors
    /// [`LabError::Guest`].
    pub fn monitor_counters(&mut self, guest: u32) -> Result<Option<Counters>, LabError> {
        self.through(guest, Balloon::counters)
    }

    /// Requests a guest's free blocks of at least this order.
    ///
    /// # Errors
    /// [`LabError::Guest`] when the monitor refuses, as it does without Ebb's driver in the guest.
    pub fn free_pages(&mut self, guest: u32, min_order: u8) -> Result<FreePagesReport, LabError> {
        self.through(guest, |balloon| balloon.free_pages(min_order))
    }

    /// Has a guest report its free memory at once, all of it.
    ///
    /// # Errors
    /// [`LabError::Guest`] when the monitor refuses, as it does without Ebb's driver in the guest, or
    /// the answer is not complete.
    pub fn reclaim(&mut self, guest: u32) -> Result<ReclaimReport, LabError> {
        self.events.step(guest, "reports its free memory on request");
        let report = self.through(guest, Balloon::reclaim)?;
        if report.status != RequestStatus::Done {
            let what = format!("its answer ended as {:?}", report.status);
            return Err(LabError::unexpected(guest, what));
        }
        Ok(report)
    }

    /// Sets the target of a guest's balloon, and waits until the balloon reaches it and the guest's
    /// memory is stable.
    ///
    /// # Errors
    /// [`LabError::Guest`] when the monitor refuses, the guest ends, or it takes too long.
    pub fn balloon_to(
        &mut self,
        guest: u32,
        target_mib: u64,
        what: &str,
    ) -> Result<Resized, LabError> {
        self.events.step(guest, what);
        let begin = Instant::now();
        self.through(guest, |balloon| balloon.set_target_mib(target_mib))?;
        let elapsed = loop {
            if self.through(guest, Balloon::actual_mib)? == target_mib {
                break begin.elapsed();
            }
            if begin.elapsed() > BALLOON_LIMIT {
                let problem = GuestProblem::TimeOut {
                    what: "balloon of its target size",
                    limit: BALLOON_LIMIT,
                };
                return Err(LabError::guest(guest, problem));
            }
            let interval = begin.elapsed() / BALLOON_INTERVAL_PART;
            thread::sleep(interval.clamp(SHORTEST_INTERVAL, LONGEST_INTERVAL));
        };
        let settled = self.wait_for_rest(guest, begin)?;
        Ok(Resized {
            elapsed_s: elapsed.as_secs_f64(),
            settled_s: settled.max(elapsed).as_secs_f64(),
        })
    }

    /// Waits until a guest's memory is stable; returns the time of the last change since `begin`, 0
    /// without a change.
    fn wait_for_rest(&mut self, guest: u32, begin: Instant) -> Result<Duration, LabError> {
        let mut last_mib = self.footprint_mib(guest)?;
        let (mut changed, mut since) = (Duration::ZERO, Instant::now());
        while since.elapsed() < REST && begin.elapsed() < BALLOON_LIMIT {
            thread::sleep(REST_INTERVAL);
            let now_mib = self.footprint_mib(guest)?;
            if (now_mib - last_mib).abs() >= REST_MIB {
                (last_mib, since, changed) = (now_mib, Instant::now(), begin.elapsed());
            }
        }
        Ok(changed)
    }

    /// Runs an operation through a guest's monitor.
    ///
    /// # Errors
    /// [`LabError::Guest`] when the operation fails or the guest has no control socket.
    pub(crate) fn through<T>(
        &mut self,
        guest: u32,
        action: impl FnOnce(&mut Balloon) -> Result<T, BalloonError>,
    ) -> Result<T, LabError> {
        let control = self.controls.iter_mut().find(|control| control.guest == guest);
        let control =
            control.ok_or_else(|| LabError::unexpected(guest, "it has no control socket"))?;
        action(&mut control.balloon).map_err(|error| {
            // If the monitor has ended, report that instead of the missing answer; it closes its
            // socket first.
            thread::sleep(REST);
            let ended = self.guest(guest).ok().and_then(Guest::ended_by_itself);
            ended.unwrap_or_else(|| LabError::unexpected(guest, error))
        })
    }
}

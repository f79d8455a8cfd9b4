//! Operations of a testbed that start guests.

use std::path::Path;
use std::time::{Duration, Instant};

use super::{BOOT_LIMIT, Testbed, footprint_mib};
use crate::LabError;
use crate::error::GuestProblem;
use crate::harness::devices::Device;
use crate::harness::guest::Guest;
use crate::harness::merging::Merging;
use crate::harness::monitor::Idle;
use crate::harness::size::GuestSize;
use crate::report::results::GuestRecord;
use crate::report::statistics::rounded;

impl Testbed<'_> {
    /// Starts the next guest and waits until its agent is ready; with a control socket if the
    /// series needs one.
    ///
    /// # Errors
    /// [`LabError::StartMonitor`], [`LabError::Missing`] and [`LabError::Guest`].
    pub fn start_guest(&mut self, size: GuestSize) -> Result<GuestRecord, LabError> {
        if self.setup.idle != Idle::Left || self.setup.merging != Merging::Off {
            self.start_controlled_guest(size)
        } else {
            self.start(size, None, &[])
        }
    }

    pub(super) fn start(
        &mut self,
        size: GuestSize,
        control: Option<&Path>,
        arguments: &[&str],
    ) -> Result<GuestRecord, LabError> {
        let mut guest = self.launch(size, control, arguments)?;
        let number = guest.number();
        let ready = guest.wait_ready(BOOT_LIMIT);
        let pid = guest.pid();
        let ready = ready?;
        guest.require_driver(self.setup.driver.in_guest())?;
        self.guests.push(guest);
        Ok(GuestRecord {
            guest: number,
            start_to_init_s: Some(rounded(ready.as_secs_f64())),
            booted_rss_mib: footprint_mib(pid).map(rounded),
            ..GuestRecord::default()
        })
    }

    /// Starts the next guest, which has no agent, and waits until `answers` finds that it does what
    /// it was started for; returns its record, and the time from the start of the monitor.
    ///
    /// # Errors
    /// As [`Self::start_guest`].
    pub fn start_silent_guest(
        &mut self,
        size: GuestSize,
        devices: &[Device<'_>],
        what: &'static str,
        mut answers: impl FnMut() -> bool,
    ) -> Result<(GuestRecord, Duration), LabError> {
        let arguments = self.arguments(devices);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let mut guest = self.launch(size, None, &arguments)?;
        let took = loop {
            let took = guest.since_start(Instant::now());
            if answers() {
                break guest.since_start(Instant::now());
            }
            if let Some(error) = guest.ended_by_itself() {
                return Err(error);
            }
            if took > BOOT_LIMIT {
                return Err(guest.failed(GuestProblem::TimeOut { what, limit: BOOT_LIMIT }));
            }
        };
        let record = GuestRecord {
            guest: guest.number(),
            booted_rss_mib: footprint_mib(guest.pid()).map(rounded),
            ..GuestRecord::default()
        };
        self.guests.push(guest);
        Ok((record, took))
    }

    /// As [`Self::start_guest`], with the monitor's control socket at this path.
    ///
    /// # Errors
    /// As [`Self::start_guest`].
    pub fn start_at(&mut self, size: GuestSize, control: &Path) -> Result<GuestRecord, LabError> {
        self.start(size, Some(control), &[])
    }

    /// Starts the next guest's monitor, with more arguments for it, without waiting for the guest.
    pub(super) fn launch(
        &mut self,
        size: GuestSize,
        control: Option<&Path>,
        arguments: &[&str],
    ) -> Result<Guest, LabError> {
        self.prepare_merging()?;
        self.started += 1;
        let number = self.started;
        self.events.step(number, "starts");
        let mut command = self.assets.command(&self.setup, size, control)?;
        command.args(arguments);
        let guest = Guest::start(number, command)?;
        self.processes.add(guest.pid());
        Ok(guest)
    }

    /// Starts the next guest's monitor with its control socket at this path, without waiting for
    /// the guest; returns the guest's number.
    ///
    /// # Errors
    /// [`LabError::StartMonitor`] and [`LabError::Missing`].
    pub fn begin_start(
        &mut self,
        size: GuestSize,
        control: &Path,
        devices: &[Device<'_>],
        arguments: &[&str],
    ) -> Result<u32, LabError> {
        let devices = self.arguments(devices);
        let all: Vec<&str> =
            devices.iter().map(String::as_str).chain(arguments.iter().copied()).collect();
        let guest = self.launch(size, Some(control), &all)?;
        let number = guest.number();
        self.guests.push(guest);
        Ok(number)
    }
}

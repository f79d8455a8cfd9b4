//! The testbed of one series: it starts guests, runs their work, and samples the host meanwhile.

use std::path::Path;
use std::process::Command as Program;
use std::thread;
use std::time::{Duration, Instant};

use ebb_agent::protocol::Command;
use serde_json::Value;

use crate::LabError;
use crate::error::Missing;
use crate::harness::balloon::Control;
use crate::harness::counters::Counters;
use crate::harness::disk_image::WorkDisk;
use crate::harness::driver::Driver;
use crate::harness::guest::{Answer, Guest};
use crate::harness::host::{self, Gauge, Usage};
use crate::harness::merging::{Broker, HostKsm, Merging};
use crate::harness::monitor::{Assets, Idle, Setup};
use crate::harness::proc;
use crate::harness::sampler::{GuestProcesses, Sampler};
use crate::harness::size::{GuestSize, RunSize};
use crate::harness::watch::{AfterReturn, Patience, ReturnWatch, Verdict};
use crate::report::event::Events;
use crate::report::results::{GuestRecord, Scale};
use crate::report::statistics::rounded;

mod control;
pub mod merging;
mod start;
mod work;

/// Interval of reading a guest's memory while it is returned.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);
/// Time limit for a guest's boot; an emulated host that swaps may be slow.
const BOOT_LIMIT: Duration = Duration::from_secs(240);
/// Time limit for a program, plus the time that its memory takes at [`SLOWEST_MIB_PER_S`].
const PROGRAM_LIMIT: Duration = Duration::from_secs(120);
/// Rate of writing to memory while the host swaps on an emulated disk.
const SLOWEST_MIB_PER_S: u64 = 4;
/// Swap in use up to which a host does not count as full, as a fraction of its RAM: a kernel swaps
/// out pages that its own services have not used since boot before it is short of memory.
const SWAP_THRESHOLD_PART: f64 = 1.0 / 200.0;

/// Time limit for the answer of an idle guest.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);
/// Counters of the module `ebb_balloon`, one line per counter with a name and a value.
const DRIVER_COUNTERS: &str = "/sys/kernel/debug/ebb_balloon/counters";
/// Order of the smallest blocks that Linux reports by default on x86: 2 MiB (`pageblock_order`).
const PAGEBLOCK_ORDER: usize = 9;

/// Environment of a series.
pub struct Testbed<'a> {
    // Dropped in this order: no sample is taken of ended guests.
    sampler: Option<Sampler>,
    controls: Vec<Control>,
    guests: Vec<Guest>,
    /// Dropped after the guests, which share pages through it.
    broker: Option<Broker>,
    /// Restores the kernel's settings when the guests have ended.
    ksm: Option<HostKsm>,
    /// Number of guests started.
    started: u32,
    processes: GuestProcesses,
    size: RunSize,
    setup: Setup,
    assets: &'a Assets,
    /// The disk of the series' Debian guest.
    work_disk: Option<WorkDisk<'a>>,
    gauge: Gauge,
    host_memory_mib: u64,
    events: Events,
}

impl<'a> Testbed<'a> {
    /// Sets up a series and starts sampling.
    pub fn new(
        series: &str,
        size: RunSize,
        setup: Setup,
        assets: &'a Assets,
        gauge: Gauge,
        host_memory_mib: u64,
        events: Events,
    ) -> Self {
        let interval = match size.scale {
            Scale::Demo => Duration::from_millis(500),
            Scale::Full => Duration::from_secs(2),
        };
        let processes = GuestProcesses::default();
        let sampler =
            Sampler::start(series.to_owned(), interval, gauge, processes.clone(), events.clone());
        Self {
            sampler: Some(sampler),
            controls: Vec::new(),
            guests: Vec::new(),
            broker: None,
            ksm: None,
            started: 0,
            processes,
            size,
            setup,
            assets,
            work_disk: None,
            gauge,
            host_memory_mib,
            events,
        }
    }

    /// The scale of the run.
    pub fn scale(&self) -> Scale {
        self.size.scale
    }

    /// Number of guests to start when the experiment itself would start `planned`.
    pub fn guests(&self, planned: u32) -> u32 {
        self.size.guests(planned)
    }

    /// Setup of the guests of this series.
    pub fn setup(&self) -> Setup {
        self.setup
    }

    /// Changes the setup of further guests, for series that share them.
    pub fn run_like(&mut self, setup: Setup) {
        self.setup = setup;
    }

    /// Receiver of the events.
    pub fn events(&self) -> &Events {
        &self.events
    }

    /// The command that runs a guest of this series, for an experiment that manages its guests
    /// itself.
    ///
    /// # Errors
    /// [`LabError::Missing`].
    pub fn command(&self, size: GuestSize, control: Option<&Path>) -> Result<Program, LabError> {
        Ok(self.assets.command(&self.setup, size, control)?)
    }

    /// The command of a monitor whose guest is forked. If the monitors merge, those of the forks
    /// do: a machine whose monitor merges its pages cannot be forked.
    ///
    /// # Errors
    /// [`LabError::Missing`].
    pub fn template_command(
        &self,
        size: GuestSize,
        control: Option<&Path>,
    ) -> Result<Program, LabError> {
        let merging = match self.setup.merging {
            Merging::Owner(_) | Merging::Alone => Merging::Off,
            merging => merging,
        };
        Ok(self.assets.command(&Setup { merging, ..self.setup }, size, control)?)
    }

    /// The command that continues a guest of this series from its snapshot.
    pub fn restore_command(&self, snapshot: &Path, control: &Path) -> Program {
        self.assets.restore_command(&self.setup, snapshot, control)
    }

    /// The command of a monitor that receives a guest of this series.
    ///
    /// # Errors
    /// [`LabError::Missing`].
    pub fn receive_command(
        &self,
        size: GuestSize,
        address: &str,
        control: &Path,
    ) -> Result<Program, LabError> {
        Ok(self.assets.receive_command(&self.setup, size, address, control)?)
    }

    /// The program `ebb`.
    pub fn ebb(&self) -> Program {
        Program::new(&self.assets.ebb)
    }

    /// Sets the processes in the samples, for an experiment that manages its only guest itself.
    pub fn show(&self, pids: &[u32]) {
        self.processes.only(pids);
    }

    /// The host's current use.
    pub fn usage(&self) -> Result<Usage, LabError> {
        self.gauge.read()
    }

    /// The host counts as full if more than this many MiB of swap are in use: half a percent of its
    /// RAM.
    pub fn swap_threshold_mib(&self) -> f64 {
        self.host_memory_mib as f64 * SWAP_THRESHOLD_PART
    }

    /// The image of a Debian guest's root.
    ///
    /// # Errors
    /// [`LabError::Missing`].
    pub fn debian_root(&self) -> Result<&Path, LabError> {
        Ok(self.assets.debian.as_ref().map(|files| &*files.root).ok_or(Missing::Debian)?)
    }

    /// Runs a program that uses `program_mib` in a guest, and records the guest's peak.
    ///
    /// # Errors
    /// [`LabError::Guest`].
    pub fn run_program(
        &mut self,
        record: &mut GuestRecord,
        command: Command,
        program_mib: u64,
    ) -> Result<Answer, LabError> {
        self.events.step(record.guest, "runs its program");
        let guest = self.guest(record.guest)?;
        let pid = guest.pid();
        let limit = PROGRAM_LIMIT + Duration::from_secs(program_mib / SLOWEST_MIB_PER_S);
        let mut peak_mib: f64 = 0.0;
        let answer = guest.command(command, limit, &mut || {
            peak_mib = peak_mib.max(footprint_mib(pid).unwrap_or(0.0));
        })?;
        peak_mib = peak_mib.max(footprint_mib(pid).unwrap_or(0.0));
        record.peak_mib = Some(rounded(peak_mib));
        record.program_s = Some(rounded(answer.elapsed.as_secs_f64()));
        record.swap_used_mib = Some(rounded(self.usage()?.swap_used_mib));
        Ok(answer)
    }

    /// Sends a short command and returns its result.
    ///
    /// # Errors
    /// [`LabError::Guest`].
    pub fn ask(&mut self, guest: u32, command: Command) -> Result<Value, LabError> {
        self.work(guest, command, ANSWER_LIMIT)
    }

    /// Starts a command that the guest executes until it ends.
    ///
    /// # Errors
    /// [`LabError::Guest`].
    pub fn begin(&mut self, guest: u32, command: Command) -> Result<(), LabError> {
        self.guest(guest)?.begin(command).map(drop)
    }

    /// Sends a command with this time limit and returns its result.
    ///
    /// # Errors
    /// [`LabError::Guest`].
    pub fn work(
        &mut self,
        guest: u32,
        command: Command,
        limit: Duration,
    ) -> Result<Value, LabError> {
        Ok(self.work_timed(guest, command, limit)?.result)
    }

    /// As [`Self::work`], with the times of the command.
    ///
    /// # Errors
    /// [`LabError::Guest`].
    pub fn work_timed(
        &mut self,
        guest: u32,
        command: Command,
        limit: Duration,
    ) -> Result<Answer, LabError> {
        self.guest(guest)?.command(command, limit, &mut || {})
    }

    /// Sends a short command; returns its result, and the time between the monitor's start and the
    /// middle of the time in which the guest executed it.
    ///
    /// # Errors
    /// [`LabError::Guest`].
    pub fn ask_when(
        &mut self,
        guest: u32,
        command: Command,
    ) -> Result<(Value, Duration), LabError> {
        let guest = self.guest(guest)?;
        let answer = guest.command(command, ANSWER_LIMIT, &mut || {})?;
        let waited = answer.answered.saturating_duration_since(answer.sent);
        Ok((answer.result, guest.since_start(answer.sent) + waited / 2))
    }

    /// How often threads of a guest's monitor have waited: voluntary context switches so far.
    ///
    /// # Errors
    /// [`LabError::Guest`] when it has ended.
    pub fn waits(&mut self, number: u32) -> Result<u64, LabError> {
        let guest = self.guest(number)?;
        host::waits(guest.pid()).ok_or_else(|| guest.lost("its threads"))
    }

    /// How long vCPUs of a guest have waited for a processor so far, in milliseconds.
    ///
    /// # Errors
    /// [`LabError::Guest`] when it has ended.
    pub fn vcpus_waited_ms(&mut self, number: u32) -> Result<f64, LabError> {
        let guest = self.guest(number)?;
        host::vcpus_waited_ms(guest.pid()).ok_or_else(|| guest.lost("the times of its vCPUs"))
    }

    /// Page faults of a guest's monitor so far, which are those of the guest at memory that the host
    /// has to provide.
    ///
    /// # Errors
    /// [`LabError::Guest`] when it has ended.
    pub fn faults(&mut self, number: u32) -> Result<u64, LabError> {
        let guest = self.guest(number)?;
        host::minor_faults(guest.pid()).ok_or_else(|| guest.lost("its page faults"))
    }

    /// The counters of the guest's balloon driver; `None` for Linux's own, which has no counters.
    ///
    /// # Errors
    /// [`LabError::Guest`].
    pub fn driver_counters(&mut self, guest: u32) -> Result<Option<Counters>, LabError> {
        if self.setup.driver == Driver::Stock {
            return Ok(None);
        }
        let answer = self.ask(guest, Command::read_file(DRIVER_COUNTERS))?;
        Ok(answer["text"].as_str().map(Counters::of_driver))
    }

    /// Ends a guest and frees its memory.
    pub fn end_guest(&mut self, number: u32) {
        self.controls.retain(|control| control.guest != number);
        self.guests.retain(|guest| guest.number() != number);
    }

    /// Waits until the memory of a program that has just ended is returned to the host, or no more
    /// is returned.
    ///
    /// # Errors
    /// [`LabError::Guest`] when the guest ends meanwhile.
    pub fn wait_for_return(
        &mut self,
        record: &mut GuestRecord,
        program_mib: u64,
    ) -> Result<(), LabError> {
        let ended = Instant::now();
        self.events.step(record.guest, "returns its memory");
        let mut patience = patience(self.size.scale);
        if self.setup.idle == Idle::Parked {
            // Parking it returns the rest.
            patience.after_return = AfterReturn::Stop;
        }
        let guest = self.guest(record.guest)?;
        let mut watch =
            ReturnWatch::new(record.peak_mib.unwrap_or(0.0), program_mib as f64, patience);
        loop {
            let Some(footprint_mib) = footprint_mib(guest.pid()) else {
                return Err(guest.lost("its memory"));
            };
            if watch.observe(ended.elapsed().as_secs_f64(), footprint_mib) == Verdict::Over {
                record.return_90_s = watch.return_90_s().map(rounded);
                return Ok(());
            }
            thread::sleep(LOOK_INTERVAL);
        }
    }

    /// Finds guests that have ended by themselves while idle, and records it.
    ///
    /// Their memory is free again, so that they must not count as guests that fit.
    ///
    /// # Errors
    /// [`LabError::Guest`] for the first of them, with its last messages.
    pub fn find_ended(&mut self, records: &mut [GuestRecord]) -> Result<(), LabError> {
        let mut first = Ok(());
        for record in records {
            if let Some(error) = self.guest(record.guest)?.ended_by_itself() {
                record.ended = Some(error.to_string());
                first = first.and(Err(error));
            }
        }
        first
    }

    /// Waits until the idle guests return no more memory, and records their remaining memory.
    ///
    /// # Errors
    /// [`LabError::Guest`] when a guest has ended.
    pub fn measure_idle(
        &mut self,
        records: &mut [GuestRecord],
        size: GuestSize,
    ) -> Result<(), LabError> {
        self.events.step(0, "waits until the guests' memory is stable");
        let pids: Vec<u32> = self.guests.iter().map(Guest::pid).collect();
        let total = || pids.iter().filter_map(|&pid| footprint_mib(pid)).sum::<f64>();
        let patience =
            Patience { after_return: AfterReturn::UntilQuiet, ..patience(self.size.scale) };
        let begin = Instant::now();
        let mut watch = ReturnWatch::new(total(), size.memory_mib as f64, patience);
        while watch.observe(begin.elapsed().as_secs_f64(), total()) == Verdict::Continue {
            thread::sleep(LOOK_INTERVAL);
        }
        let merging = self.setup.merging;
        for record in running(records) {
            self.events.step(record.guest, "its remaining memory is measured");
            let guest = self.guest(record.guest)?;
            let (pid, lost) = (guest.pid(), "its idle memory");
            let footprint = footprint_mib(pid);
            record.idle_rss_mib = Some(rounded(footprint.ok_or_else(|| guest.lost(lost))?));
            record.idle_pss_mib = host::proportional_mib(pid).map(rounded);
            // Memory with merged pages consists of many mappings, which cannot be distinguished
            // from the monitor's own.
            if merging == Merging::Off {
                record.monitor_rss_mib = host::monitor_rss_mib(pid, size.memory_mib).map(rounded);
            }
        }
        Ok(())
    }

    /// Queries the idle guests' own use of memory, which explains their remaining memory on the
    /// host.
    ///
    /// # Errors
    /// [`LabError::Guest`] when a guest does not answer.
    pub fn ask_idle(
        &mut self,
        records: &mut [GuestRecord],
        size: GuestSize,
    ) -> Result<(), LabError> {
        for record in running(records) {
            self.events.step(record.guest, "is asked for its use of memory");
            let memory = self.ask(record.guest, Command::MemInfo)?;
            let free_kib = memory["MemFree"].as_u64();
            record.guest_in_use_mib =
                free_kib.map(|free_kib| rounded(size.memory_mib as f64 - host::mib(free_kib)));
            let command = Command::read_file("/proc/buddyinfo");
            let blocks = self.ask(record.guest, command)?;
            record.guest_fragments_mib = blocks["text"]
                .as_str()
                .map(|text| rounded(host::mib(proc::free_below_order_kib(text, PAGEBLOCK_ORDER))));
        }
        Ok(())
    }

    /// A guest's memory on the host, resident and swapped, MiB.
    ///
    /// # Errors
    /// [`LabError::Guest`] when it has ended.
    pub fn footprint_mib(&mut self, number: u32) -> Result<f64, LabError> {
        let guest = self.guest(number)?;
        footprint_mib(guest.pid()).ok_or_else(|| guest.lost("its memory"))
    }

    /// The process of a guest's monitor.
    ///
    /// # Errors
    /// [`LabError::Guest`] when it was never started.
    pub fn pid(&mut self, number: u32) -> Result<u32, LabError> {
        self.guest(number).map(|guest| guest.pid())
    }

    /// A guest that was started and not ended.
    ///
    /// # Errors
    /// [`LabError::Guest`] for any other.
    pub fn guest(&mut self, number: u32) -> Result<&mut Guest, LabError> {
        let guest = self.guests.iter_mut().find(|guest| guest.number() == number);
        guest.ok_or_else(|| LabError::unexpected(number, "it was never started"))
    }
}

impl Drop for Testbed<'_> {
    fn drop(&mut self) {
        self.sampler = None;
        // All at once: each takes a while to free its memory.
        self.guests.iter_mut().for_each(Guest::kill);
    }
}

/// The records of guests that have not ended.
fn running(records: &mut [GuestRecord]) -> impl Iterator<Item = &mut GuestRecord> {
    records.iter_mut().filter(|record| record.ended.is_none())
}

/// A guest's memory on the host, resident and swapped; `None` when it has ended.
pub(crate) fn footprint_mib(pid: u32) -> Option<f64> {
    host::process_memory(pid).map(|memory| host::mib(memory.footprint_kib()))
}

/// Time limits for the return of memory. Linux reports 2 s after a page was freed, then every 2 s a
/// sixteenth of free memory and a batch (`mm/page_reporting.c`): no change for more than two such
/// passes means that all is reported.
pub(crate) fn patience(scale: Scale) -> Patience {
    match scale {
        Scale::Demo => Patience {
            beginning_s: 4.0,
            quiet_s: 4.5,
            whole_s: 30.0,
            after_return: AfterReturn::Stop,
        },
        Scale::Full => Patience {
            beginning_s: 12.0,
            quiet_s: 6.0,
            whole_s: 60.0,
            after_return: AfterReturn::UntilQuiet,
        },
    }
}

//! The bench of one series: it starts guests, lets them work, and watches the host meanwhile.

use std::thread;
use std::time::{Duration, Instant};

use ebb_agent::protocol::Command;

use crate::LabError;
use crate::error::GuestProblem;
use crate::event::Events;
use crate::guest::{Answer, Guest};
use crate::host::{self, Gauge, Usage};
use crate::monitor::{Assets, GuestSize, Setup};
use crate::results::{GuestRecord, Scale, rounded};
use crate::sampler::{GuestProcesses, Sampler};
use crate::watch::{AfterReturn, Patience, ReturnWatch, Verdict};

/// How often the memory of a guest is looked at while it comes back.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);
/// A guest that is not there by then will not come; an emulated host that swaps may be slow.
const BOOT_LIMIT: Duration = Duration::from_secs(240);
/// A program may take so long, plus the time that its memory takes at [`SLOWEST_MIB_PER_S`].
const PROGRAM_LIMIT: Duration = Duration::from_secs(120);
/// Writing to memory while the host swaps on an emulated disk.
const SLOWEST_MIB_PER_S: u64 = 4;
/// Swap that is no sign of a full host, as a part of its RAM: a kernel moves out pages that its own services have
/// not used since boot before it is short of memory.
const SWAP_THRESHOLD_PART: f64 = 1.0 / 200.0;

/// What a series has at hand.
pub struct Bench<'a> {
    // Dropped in this order: no sample is taken of guests that are gone.
    sampler: Option<Sampler>,
    guests: Vec<Guest>,
    processes: GuestProcesses,
    scale: Scale,
    setup: Setup,
    assets: &'a Assets,
    gauge: Gauge,
    host_memory_mib: u64,
    events: Events,
}

impl<'a> Bench<'a> {
    /// Sets up for a series, and starts sampling.
    pub fn new(
        series: &str,
        scale: Scale,
        setup: Setup,
        assets: &'a Assets,
        gauge: Gauge,
        host_memory_mib: u64,
        events: Events,
    ) -> Self {
        let interval = match scale {
            Scale::Demo => Duration::from_millis(500),
            Scale::Full => Duration::from_secs(2),
        };
        let processes = GuestProcesses::default();
        let sampler = Sampler::start(series.to_owned(), interval, gauge, processes.clone(), events.clone());
        Self {
            sampler: Some(sampler),
            guests: Vec::new(),
            processes,
            scale,
            setup,
            assets,
            gauge,
            host_memory_mib,
            events,
        }
    }

    /// The scale of the run.
    pub fn scale(&self) -> Scale {
        self.scale
    }

    /// The host's present use.
    pub fn usage(&self) -> Result<Usage, LabError> {
        self.gauge.read()
    }

    /// Swap in use beyond this many MiB says that the host is full: half a percent of its RAM.
    pub fn swap_threshold_mib(&self) -> f64 {
        self.host_memory_mib as f64 * SWAP_THRESHOLD_PART
    }

    /// Starts the next guest and waits until its agent is ready.
    ///
    /// # Errors
    /// [`LabError::StartMonitor`], [`LabError::Missing`] and [`LabError::Guest`].
    pub fn start_guest(&mut self, size: GuestSize) -> Result<GuestRecord, LabError> {
        let number = self.guests.len() as u32 + 1;
        self.events.step(number, "starts");
        let command = self.assets.command(&self.setup, size)?;
        let mut guest = Guest::start(number, command)?;
        self.processes.add(guest.pid());
        let ready = guest.wait_ready(BOOT_LIMIT);
        let pid = guest.pid();
        self.guests.push(guest);
        Ok(GuestRecord {
            guest: number,
            start_to_init_s: Some(rounded(ready?.as_secs_f64())),
            booted_rss_mib: footprint_mib(pid).map(rounded),
            ..GuestRecord::default()
        })
    }

    /// Runs a program that uses `program_mib` in a guest, noting the guest's peak.
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
        let answer = guest
            .command(command, limit, &mut || peak_mib = peak_mib.max(footprint_mib(pid).unwrap_or(0.0)))?;
        peak_mib = peak_mib.max(footprint_mib(pid).unwrap_or(0.0));
        record.peak_mib = Some(rounded(peak_mib));
        record.program_s = Some(rounded(answer.elapsed.as_secs_f64()));
        record.swap_used_mib = Some(rounded(self.usage()?.swap_used_mib));
        Ok(answer)
    }

    /// Waits until the memory of a program that has just ended is back at the host, or nothing more comes.
    ///
    /// # Errors
    /// [`LabError::Guest`] when the guest ends meanwhile.
    pub fn wait_for_return(&mut self, record: &mut GuestRecord, program_mib: u64) -> Result<(), LabError> {
        let ended = Instant::now();
        self.events.step(record.guest, "gives its memory back");
        let patience = patience(self.scale);
        let guest = self.guest(record.guest)?;
        let mut watch = ReturnWatch::new(record.peak_mib.unwrap_or(0.0), program_mib as f64, patience);
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

    /// Waits until the idle guests give back nothing more, and notes what each of them still has.
    ///
    /// # Errors
    /// [`LabError::Guest`] when a guest has ended.
    pub fn measure_idle(&mut self, records: &mut [GuestRecord], size: GuestSize) -> Result<(), LabError> {
        self.events.step(0, "waits until the guests are quiet");
        let pids: Vec<u32> = self.guests.iter().map(Guest::pid).collect();
        let total = || pids.iter().filter_map(|&pid| footprint_mib(pid)).sum::<f64>();
        let patience = Patience { after_return: AfterReturn::UntilQuiet, ..patience(self.scale) };
        let begin = Instant::now();
        let mut watch = ReturnWatch::new(total(), size.memory_mib as f64, patience);
        while watch.observe(begin.elapsed().as_secs_f64(), total()) == Verdict::Continue {
            thread::sleep(LOOK_INTERVAL);
        }
        for record in records {
            let guest = self.guest(record.guest)?;
            let (pid, lost) = (guest.pid(), "its idle memory");
            let footprint = footprint_mib(pid);
            record.idle_rss_mib = Some(rounded(footprint.ok_or_else(|| guest.lost(lost))?));
            record.monitor_rss_mib = host::monitor_rss_mib(pid, size.memory_mib).map(rounded);
        }
        Ok(())
    }

    fn guest(&mut self, number: u32) -> Result<&mut Guest, LabError> {
        self.guests.iter_mut().find(|guest| guest.number() == number).ok_or_else(|| LabError::Guest {
            guest: number,
            problem: GuestProblem::Protocol("it was never started".to_owned()),
            diagnostics: String::new(),
        })
    }
}

impl Drop for Bench<'_> {
    fn drop(&mut self) {
        self.sampler = None;
        // All at once: each takes a while to give its memory back.
        self.guests.iter_mut().for_each(Guest::kill);
    }
}

/// What a guest occupies at the host, resident and swapped; `None` when it has ended.
fn footprint_mib(pid: u32) -> Option<f64> {
    host::process_memory(pid).map(|memory| host::mib(memory.footprint_kib()))
}

/// How long memory may take to come back. Linux reports 2 s after a page was freed, then every 2 s a sixteenth of
/// what is free and a batch (`mm/page_reporting.c`): quiet for more than two such passes means that all is reported.
fn patience(scale: Scale) -> Patience {
    match scale {
        Scale::Demo => {
            Patience { beginning_s: 5.0, quiet_s: 4.5, whole_s: 30.0, after_return: AfterReturn::Stop }
        }
        Scale::Full => {
            Patience { beginning_s: 12.0, quiet_s: 6.0, whole_s: 60.0, after_return: AfterReturn::UntilQuiet }
        }
    }
}

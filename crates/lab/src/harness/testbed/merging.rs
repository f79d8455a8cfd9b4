//! Operations of a testbed for the merging of its guests' pages.

use std::num::NonZero;
use std::thread;
use std::time::{Duration, Instant};

use ebb_page_merge::kernel::Knob;
use ebb_page_merge::kernel::knobs::{RUN_MERGE, RUN_STOP};
use ebb_vmm::api::{MergeChange, MergeInfo, MergeRun, MergeState};

use super::{BOOT_LIMIT, Testbed, footprint_mib};
use crate::LabError;
use crate::harness::balloon::Balloon;
use crate::harness::guest::Guest;
use crate::harness::merging::{self, Broker, HostKsm, Merging, SharedCounts};
use crate::harness::size::GuestSize;
use crate::harness::survey::{self, Survey};
use crate::report::results::GuestRecord;
use crate::report::statistics::rounded;

/// Time limit for the first answer of a starting monitor.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);
/// Interval of reading the progress of merging.
const MERGE_INTERVAL: Duration = Duration::from_millis(500);
/// Merging has settled when no more pages were merged for this number of passes over all memory: a
/// monitor reads a huge page 3 passes after it has found it, and again 3 passes later.
const QUIET_PASSES: u64 = 7;
/// Time limit for it to settle.
const MERGE_LIMIT: Duration = Duration::from_secs(300);
/// Monitors look at memory that does not change ever more rarely. That is ended at most this often
/// while something is merged: it begins a pass at once, which costs processor time.
const END_OF_CALM_INTERVAL: Duration = Duration::from_secs(8);
/// A change of up to this number of pages in each guest is ignored: guests are never completely
/// idle.
const FEW_PAGES: u64 = 64;

/// How merging has settled.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Settled {
    /// Time until the last pages were merged, s.
    pub elapsed_s: f64,
    /// Whether it settled before the time limit.
    pub quiet: bool,
}

/// Detects when merging has settled.
#[derive(Debug, Default)]
struct Rest {
    merged: u64,
    /// Passes over all memory by each merger at the first observation: the kernel counts from its
    /// start.
    first: Vec<u64>,
    /// Passes at the last change of the number of merged pages.
    at_change: Vec<u64>,
}

/// Result of an observation of merging.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Seen {
    /// Merging continues.
    Change,
    /// Nothing has been merged yet.
    Nothing,
    /// Merging has settled.
    Rest,
}

impl Rest {
    /// Adds an observation: the number of merged pages, and the passes of each merger.
    fn observe(&mut self, merged: u64, passes: &[u64]) -> Seen {
        let is_first = self.first.is_empty();
        if is_first {
            self.first = passes.to_vec();
        }
        let few = FEW_PAGES * passes.len() as u64;
        if is_first || merged.abs_diff(self.merged) > few {
            self.merged = merged;
            self.at_change = passes.to_vec();
            return Seen::Change;
        }
        // A page is merged in the second pass at the earliest, and the first one may have been in
        // progress.
        let enough = |(now, (first, change)): (&u64, (&u64, &u64))| {
            *now >= change + QUIET_PASSES && *now > first + QUIET_PASSES + 1
        };
        let is_quiet = passes.iter().zip(self.first.iter().zip(&self.at_change)).all(enough);
        if is_quiet { Seen::Rest } else { Seen::Nothing }
    }
}

/// Decides when the monitors' calm is to be ended: each change may have made them calm again
/// before they have looked at what follows from it.
#[derive(Debug, Default)]
struct Wake {
    /// When it was ended last.
    at: Option<Duration>,
    has_changed: bool,
}

impl Wake {
    /// Whether it is to be ended at `elapsed`, when this was seen.
    fn is_due(&mut self, elapsed: Duration, seen: Seen) -> bool {
        self.has_changed |= seen == Seen::Change;
        let is_due = self.has_changed
            && self.at.is_none_or(|at| elapsed.saturating_sub(at) >= END_OF_CALM_INTERVAL);
        if is_due {
            *self = Self { at: Some(elapsed), has_changed: false };
        }
        is_due
    }
}

impl Testbed<'_> {
    /// Prepares the host for the merging of a series' guests: the broker of monitors that merge, or
    /// the kernel's settings.
    ///
    /// # Errors
    /// As [`Broker::start`] and [`HostKsm::join`].
    pub fn prepare_merging(&mut self) -> Result<(), LabError> {
        match self.setup.merging {
            Merging::Owner(_) if self.broker.is_none() => {
                self.broker = Some(Broker::start(&self.assets.ebb)?);
            }
            Merging::Kernel(nodes) if self.ksm.is_none() => self.ksm = Some(HostKsm::join(nodes)?),
            _ => {}
        }
        Ok(())
    }

    /// Starts the merging of the pages of all guests of the series, with a rate in pages per
    /// second, or pauses it.
    ///
    /// # Errors
    /// [`LabError::Guest`], [`LabError::Merging`].
    pub fn set_merging(
        &mut self,
        guests: &[u32],
        pages_per_second: Option<u64>,
    ) -> Result<(), LabError> {
        // The kernel's settings belong to the host, not to a monitor.
        if let Some(ksm) = &self.ksm {
            if let Some(pages) = pages_per_second {
                ksm.set_pace(pages)?;
            }
            return ksm
                .set(Knob::Run, if pages_per_second.is_some() { RUN_MERGE } else { RUN_STOP });
        }
        let run = if pages_per_second.is_some() { MergeRun::Merge } else { MergeRun::Stop };
        let change = MergeChange { run: Some(run), pages_per_second, ..MergeChange::default() };
        for guest in guests {
            self.through(*guest, |balloon| balloon.change_merging(&change))?;
        }
        Ok(())
    }

    /// Starts guests, each with its memory on one of these nodes of the host, with a control
    /// socket. Merging is paused. At most as many guests boot at a time as the host has processors:
    /// more would take longer, each of them and in total.
    ///
    /// # Errors
    /// As [`Testbed::start_guest`], and [`Testbed::set_merging`].
    pub fn start_guests_on_nodes(
        &mut self,
        size: GuestSize,
        nodes: &[u32],
    ) -> Result<Vec<GuestRecord>, LabError> {
        let at_once = thread::available_parallelism().map_or(1, NonZero::get);
        let mut records = Vec::new();
        for some in nodes.chunks(at_once) {
            let mut starting = Vec::new();
            for node in some {
                let on_node = format!("size={}M,cpus=0,host_node={node}", size.memory_mib);
                let guest = self.launch_controlled(size, &["--numa", &on_node])?;
                self.events
                    .step(guest.number(), format!("boots on node {node} of {}", nodes.len()));
                starting.push(guest);
            }
            // Each monitor begins to merge when it starts, or starts the kernel's merging.
            let numbers: Vec<u32> = starting.iter().map(Guest::number).collect();
            self.stop_merging_from_the_start(&numbers)?;
            let mut booting = Vec::new();
            for mut guest in starting {
                let ready = guest.wait_ready(BOOT_LIMIT)?;
                booting.push((guest.number(), ready, guest.pid()));
                self.guests.push(guest);
            }
            records.extend(booting.into_iter().map(|(guest, ready, pid)| GuestRecord {
                guest,
                start_to_init_s: Some(rounded(ready.as_secs_f64())),
                booted_rss_mib: footprint_mib(pid).map(rounded),
                ..GuestRecord::default()
            }));
        }
        Ok(records)
    }

    /// Pauses merging as soon as the starting monitors of these guests accept requests.
    fn stop_merging_from_the_start(&mut self, guests: &[u32]) -> Result<(), LabError> {
        let begin = Instant::now();
        for guest in guests {
            // A monitor that answers has begun to merge.
            while let Err(error) = self.merge_info(*guest) {
                if begin.elapsed() > ANSWER_LIMIT {
                    return Err(error);
                }
            }
        }
        self.set_merging(guests, None)
    }

    /// The report on merging of a guest's monitor.
    ///
    /// # Errors
    /// [`LabError::Guest`].
    pub fn merge_info(&mut self, guest: u32) -> Result<MergeInfo, LabError> {
        self.through(guest, Balloon::merge_info)
    }

    /// Waits until no more pages are merged in any of the guests.
    ///
    /// # Errors
    /// [`LabError::Guest`], also for a guest whose pages are not merged.
    pub fn wait_for_merging(&mut self, guests: &[u32]) -> Result<Settled, LabError> {
        let begin = Instant::now();
        let (mut rest, mut changed_s) = (Rest::default(), 0.0);
        let mut wake = Wake::default();
        loop {
            let (mut merged, mut passes) = (0, Vec::new());
            for guest in guests {
                let info = self.merge_info(*guest)?;
                if matches!(info.state, MergeState::Off | MergeState::Unavailable) {
                    let reason = info.reason.unwrap_or_default();
                    let what = format!("its pages are not merged: {reason}");
                    return Err(LabError::unexpected(*guest, what));
                }
                let statistics = info.statistics.unwrap_or_default();
                merged += statistics.merged_bytes.unwrap_or(0) / 4096
                    + statistics.pages_sharing.unwrap_or(0);
                passes.push(statistics.full_scans.unwrap_or(0));
            }
            let elapsed = begin.elapsed();
            let seen = rest.observe(merged, &passes);
            if seen == Seen::Change {
                changed_s = elapsed.as_secs_f64();
            }
            if wake.is_due(elapsed, seen) {
                self.end_calm(guests)?;
            }
            if seen == Seen::Rest || elapsed > MERGE_LIMIT {
                return Ok(Settled { elapsed_s: rounded(changed_s), quiet: seen == Seen::Rest });
            }
            thread::sleep(MERGE_INTERVAL);
        }
    }

    /// Has the monitors of these guests look at all memory again at their ordinary intervals.
    fn end_calm(&mut self, guests: &[u32]) -> Result<(), LabError> {
        if self.ksm.is_some() {
            return Ok(());
        }
        // Each change of settings does that, also one that changes nothing.
        let change = MergeChange { run: Some(MergeRun::Merge), ..MergeChange::default() };
        for guest in guests {
            self.through(*guest, |balloon| balloon.change_merging(&change))?;
        }
        Ok(())
    }

    /// Processor time of merging so far: that of the threads of the guests' monitors, or of the
    /// kernel's.
    ///
    /// # Errors
    /// [`LabError::SystemFile`], [`LabError::MissingField`], [`LabError::Merging`].
    pub fn merging_cpu_s(&self) -> Result<f64, LabError> {
        let ns = match self.setup.merging {
            Merging::Off => 0,
            Merging::Kernel(_) => {
                let thread = merging::kernel_thread()?;
                merging::running_ns(thread, thread)?
            }
            Merging::Owner(_) | Merging::Alone => {
                let times =
                    self.guests.iter().map(|guest| merging::monitor_running_ns(guest.pid()));
                times.sum::<Result<u64, LabError>>()?
            }
        };
        Ok(Duration::from_nanos(ns).as_secs_f64())
    }

    /// The shared pages of these guests according to the broker, the kernel, or each monitor that
    /// shares none with others.
    ///
    /// # Errors
    /// [`LabError::Merging`], [`LabError::Guest`].
    pub fn shared(&mut self, guests: &[u32]) -> Result<SharedCounts, LabError> {
        match (&self.broker, &self.ksm) {
            (Some(broker), _) => return broker.shared(),
            (None, Some(ksm)) => return ksm.shared(),
            (None, None) => {}
        }
        let mut counts = SharedCounts::default();
        for guest in guests {
            let statistics = self.merge_info(*guest)?.statistics.unwrap_or_default();
            counts.pages_shared += statistics.pages_shared.unwrap_or(0);
            counts.pages_sharing += statistics.pages_sharing.unwrap_or(0);
        }
        Ok(counts)
    }

    /// Surveys the merged pages of guests from outside; each guest has a node of the host.
    ///
    /// # Errors
    /// [`LabError::SystemFile`], [`LabError::Merging`].
    pub fn survey(&mut self, guests: &[(u32, u32)]) -> Result<Survey, LabError> {
        let Some(by) = self.setup.merging.by() else { return Ok(Survey::default()) };
        let mut processes = Vec::new();
        for (guest, node) in guests {
            let pid = self.guest(*guest).map(|guest| Guest::pid(guest))?;
            processes.push((*node, survey::of_process(pid, by)?));
        }
        Ok(Survey::new(&processes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merging_has_settled_when_passes_merge_no_more_pages() {
        let mut rest = Rest::default();
        assert_eq!(rest.observe(0, &[0, 0]), Seen::Change);
        assert_eq!(rest.observe(900, &[2, 2]), Seen::Change);
        assert_eq!(rest.observe(1_000, &[9, 8]), Seen::Nothing, "few for two guests");
        assert_eq!(rest.observe(1_000, &[10, 9]), Seen::Rest);
    }

    #[test]
    fn calm_is_ended_after_the_last_change_too() {
        let mut wake = Wake::default();
        let mut due = |s, seen| wake.is_due(Duration::from_secs(s), seen);
        assert!(due(0, Seen::Change));
        assert!(!due(1, Seen::Change) && !due(7, Seen::Nothing), "it was ended just now");
        assert!(due(8, Seen::Nothing));
        assert!(!due(60, Seen::Nothing) && due(61, Seen::Change));
    }

    #[test]
    fn passes_of_earlier_series_do_not_count() {
        let mut rest = Rest::default();
        assert_eq!(rest.observe(0, &[70]), Seen::Change);
        assert_eq!(rest.observe(0, &[78]), Seen::Nothing, "it may not have merged anything yet");
        assert_eq!(rest.observe(5000, &[79]), Seen::Change);
        assert_eq!(rest.observe(5000, &[86]), Seen::Rest);
    }
}

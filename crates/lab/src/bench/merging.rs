//! What a bench does about the merging of its guests' pages.

use std::thread;
use std::time::{Duration, Instant};

use ebb_page_merge::kernel::Knob;
use ebb_page_merge::kernel::knobs::{RUN_MERGE, RUN_STOP};
use ebb_vmm::api::{MergeChange, MergeInfo, MergeRun, MergeState};

use super::{BOOT_LIMIT, Bench, footprint_mib};
use crate::LabError;
use crate::balloon::Balloon;
use crate::error::GuestProblem;
use crate::guest::Guest;
use crate::merging::{Broker, HostKsm, Merging, SharedCounts};
use crate::monitor::GuestSize;
use crate::results::{GuestRecord, rounded};
use crate::survey::{self, Survey};

/// How often it is asked how far merging has come.
const MERGE_INTERVAL: Duration = Duration::from_millis(500);
/// Merging is over when nothing more was merged for so many passes over all memory.
const QUIET_PASSES: u64 = 2;
/// And it is not waited for longer than this.
const MERGE_LIMIT: Duration = Duration::from_secs(150);
/// A change of so few pages is none: guests do something now and then.
const FEW_PAGES: u64 = 64;

/// How merging has come to rest.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Settled {
    /// Until the last pages were merged, s.
    pub elapsed_s: f64,
    /// Whether it did.
    pub quiet: bool,
}

impl Bench<'_> {
    /// Readies the host for the merging of a series' guests: the broker of monitors that merge, or the kernel's settings.
    ///
    /// # Errors
    /// As [`Broker::start`] and [`HostKsm::join`].
    pub(super) fn prepare_merging(&mut self) -> Result<(), LabError> {
        match self.setup.merging {
            Merging::Owner(_) if self.broker.is_none() => {
                self.broker = Some(Broker::start(&self.assets.ebb)?);
            }
            Merging::Kernel(nodes) if self.ksm.is_none() => self.ksm = Some(HostKsm::join(nodes)?),
            _ => {}
        }
        Ok(())
    }

    /// Lets the pages of all guests of the series be merged, so many a second, or not any more for now.
    ///
    /// # Errors
    /// [`LabError::Guest`], [`LabError::Merging`].
    pub fn set_merging(&mut self, guests: &[u32], pages_per_second: Option<u64>) -> Result<(), LabError> {
        // The kernel's settings are the host's, and no single monitor's.
        if let Some(ksm) = &self.ksm {
            if let Some(pages) = pages_per_second {
                ksm.set_pace(pages)?;
            }
            return ksm.set(Knob::Run, if pages_per_second.is_some() { RUN_MERGE } else { RUN_STOP });
        }
        let run = if pages_per_second.is_some() { MergeRun::Merge } else { MergeRun::Stop };
        let change = MergeChange { run: Some(run), pages_per_second, ..MergeChange::default() };
        for guest in guests {
            self.through(*guest, |balloon| balloon.change_merging(&change))?;
        }
        Ok(())
    }

    /// Starts guests, each with its memory on one of these nodes of the host, at the same time, with a control socket.
    ///
    /// # Errors
    /// As [`Bench::start_guest`].
    pub fn start_guests_on_nodes(
        &mut self,
        size: GuestSize,
        nodes: &[u32],
    ) -> Result<Vec<GuestRecord>, LabError> {
        let mut starting = Vec::new();
        for node in nodes {
            let on_node = format!("size={}M,cpus=0,host_node={node}", size.memory_mib);
            starting.push(self.launch_controlled(size, &["--numa", &on_node])?);
        }
        let mut records = Vec::new();
        for mut guest in starting {
            let ready = guest.wait_ready(BOOT_LIMIT)?;
            records.push(GuestRecord {
                guest: guest.number(),
                start_to_init_s: Some(rounded(ready.as_secs_f64())),
                booted_rss_mib: footprint_mib(guest.pid()).map(rounded),
                ..GuestRecord::default()
            });
            self.guests.push(guest);
        }
        Ok(records)
    }

    /// What a guest's monitor says of merging.
    ///
    /// # Errors
    /// [`LabError::Guest`].
    pub fn merge_info(&mut self, guest: u32) -> Result<MergeInfo, LabError> {
        self.through(guest, Balloon::merge_info)
    }

    /// Waits until nothing more is merged in any of the guests.
    ///
    /// # Errors
    /// [`LabError::Guest`], also for a guest whose pages are not merged at all.
    pub fn wait_for_merging(&mut self, guests: &[u32]) -> Result<Settled, LabError> {
        let begin = Instant::now();
        let (mut last, mut changed_s) = (0_u64, 0.0);
        let mut passes_at_change = vec![0; guests.len()];
        loop {
            let (mut merged, mut passes) = (0, Vec::new());
            for guest in guests {
                let info = self.merge_info(*guest)?;
                if matches!(info.state, MergeState::Off | MergeState::Unavailable) {
                    let text = format!("its pages are not merged: {}", info.reason.unwrap_or_default());
                    let problem = GuestProblem::Protocol(text);
                    return Err(LabError::Guest { guest: *guest, problem, diagnostics: String::new() });
                }
                let statistics = info.statistics.unwrap_or_default();
                merged += statistics.merged_bytes.unwrap_or(0) / 4096 + statistics.pages_sharing.unwrap_or(0);
                passes.push(statistics.full_scans.unwrap_or(0));
            }
            let elapsed = begin.elapsed();
            if merged.abs_diff(last) > FEW_PAGES {
                (last, changed_s) = (merged, elapsed.as_secs_f64());
                passes_at_change.clone_from(&passes);
            }
            let quiet = passes
                .iter()
                .zip(&passes_at_change)
                .all(|(now, then)| *now >= then + QUIET_PASSES && *now > QUIET_PASSES + 1);
            if quiet || elapsed > MERGE_LIMIT {
                return Ok(Settled { elapsed_s: rounded(changed_s), quiet });
            }
            thread::sleep(MERGE_INTERVAL);
        }
    }

    /// What all guests share, as broker or kernel count it.
    ///
    /// # Errors
    /// [`LabError::Merging`].
    pub fn shared(&self) -> Result<SharedCounts, LabError> {
        match (&self.broker, &self.ksm) {
            (Some(broker), _) => broker.shared(),
            (None, Some(ksm)) => ksm.shared(),
            (None, None) => Ok(SharedCounts::default()),
        }
    }

    /// Looks at the merged pages of guests from outside, each of which is on a node of the host.
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

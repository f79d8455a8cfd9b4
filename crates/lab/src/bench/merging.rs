//! What a bench does about the merging of its guests' pages.

use std::thread;
use std::time::{Duration, Instant};

use ebb_vmm::api::{MergeChange, MergeInfo, MergeState};

use super::{BOOT_LIMIT, Bench, footprint_mib};
use crate::LabError;
use crate::error::GuestProblem;
use crate::guest::Guest;
use crate::merging::Broker;
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
    /// Starts the broker of a series whose guests need one.
    ///
    /// # Errors
    /// As [`Broker::start`].
    pub(super) fn ensure_broker(&mut self) -> Result<(), LabError> {
        if self.broker.is_none() && self.setup.merging.needs_broker() {
            self.broker = Some(Broker::start(&self.assets.ebb)?);
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
        self.through(guest, |balloon| balloon.merge_info())
    }

    /// Changes how a guest's pages are merged.
    ///
    /// # Errors
    /// [`LabError::Guest`].
    pub fn change_merging(&mut self, guest: u32, change: &MergeChange) -> Result<MergeInfo, LabError> {
        self.through(guest, |balloon| balloon.change_merging(change))
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

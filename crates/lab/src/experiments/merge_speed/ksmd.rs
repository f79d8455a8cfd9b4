//! The kernel's side: KSM's thread on memory of this process.

use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use ebb_guest_ram::{GuestRam, KernelMerging};
use ebb_page_merge::kernel::knobs::{RUN_MERGE, RUN_STOP, RUN_UNMERGE};
use ebb_page_merge::kernel::{
    Counter, Counters, KernelDomain, Knob, Ksm, KsmGuard, RUN_FOLDER, SYSFS, Values,
};

use super::memory::Arena;
use super::side::{PASSES_IN_VAIN, Side, Until, Work};
use crate::LabError;
use crate::harness::{merging, proc};

/// Pages that the kernel's thread scans between two checks of its settings: it cannot be stopped in
/// between.
const PAGES_TO_SCAN: u64 = 500;
/// Interval of reading its counters.
const LOOK: Duration = Duration::from_micros(500);
/// Time limit for any merging.
const LIMIT: Duration = Duration::from_secs(300);
/// Fraction of the pages of a first pass to wait for: with all of them, the thread would be in the
/// middle of the second pass when it is stopped.
const MOST_OF: f64 = 0.95;
/// `struct ksm_rmap_item` of Linux 6.x on 64-bit machines (mm/ksm.c), where the kernel does not
/// report it.
const ITEM_BYTES: u64 = 64;
const ITEM_SIZE_FILE: &str = "/sys/kernel/slab/ksm_rmap_item/object_size";

/// Whether KSM skips pages that it could not merge several times (`smart_scan`, Linux 6.7).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SmartScan {
    /// KSM skips them.
    On,
    /// KSM scans all of them in each pass.
    Off,
}

/// KSM, used by this process alone.
#[derive(Debug)]
pub(super) struct Ksmd {
    guard: KsmGuard,
    _domain: KernelDomain,
    pid: u32,
}

fn failed(error: impl std::fmt::Display) -> LabError {
    LabError::Merging(error.to_string())
}

impl Ksmd {
    /// Becomes KSM's only user, with settings that let it run without sleeps.
    ///
    /// # Errors
    /// [`LabError::Merging`]: no KSM, no permission to change it, or another process uses it.
    pub(super) fn join(smart_scan: SmartScan) -> Result<Self, LabError> {
        let domain =
            KernelDomain::join(Path::new(RUN_FOLDER), "lab merge-speed").map_err(failed)?;
        let ksm = Ksm::open(Path::new(SYSFS)).map_err(failed)?;
        if let Some(name) = other_user() {
            return Err(LabError::Merging(format!(
                "KSM would merge the pages of '{name}' as well; end it first, or start it with \
                 merging disabled (QEMU: -M ...,mem-merge=off)"
            )));
        }
        // Before the first change: it restores the settings, whatever happens below.
        let guard = KsmGuard::new(ksm).map_err(failed)?;
        let known = || -> Result<u64, LabError> {
            let counters = guard.ksm().counters().map_err(failed)?;
            Ok(counters.count(Counter::PagesShared) + counters.count(Counter::PagesUnshared))
        };
        let mut others = known()?;
        if others > 0 && kernel_reports_users() {
            // Pages of processes that have ended, which KSM has not noticed while it was stopped.
            let unmerge = Values::from_iter([(Knob::Run, RUN_UNMERGE)]);
            guard.ksm().apply(&unmerge).map_err(failed)?;
            others = known()?;
        }
        if others > 0 {
            return Err(LabError::Merging(format!(
                "KSM has {others} pages of other programs already; end them first, or let it \
                 unmerge them (write 2 to {SYSFS}/run)"
            )));
        }
        let wanted = [
            (Knob::Run, RUN_STOP),
            (Knob::PagesToScan, PAGES_TO_SCAN),
            (Knob::SleepMillisecs, 0),
            (Knob::MaxPageSharing, 256),
            (Knob::UseZeroPages, 1),
            (Knob::SmartScan, u64::from(smart_scan == SmartScan::On)),
            (Knob::AdvisorMode, 0),
        ];
        let wanted: Values =
            wanted.into_iter().filter(|(knob, _)| guard.before().get(*knob).is_some()).collect();
        guard.ksm().apply(&wanted).map_err(failed)?;
        Ok(Self { guard, _domain: domain, pid: merging::kernel_thread()? })
    }

    fn run(&self, value: u64) -> Result<(), LabError> {
        self.guard.ksm().apply(&Values::from_iter([(Knob::Run, value)])).map_err(failed)
    }

    fn counters(&self) -> Result<Counters, LabError> {
        self.guard.ksm().counters().map_err(failed)
    }

    /// Checks that it has scanned only pages of this process.
    fn check_alone(&self) -> Result<(), LabError> {
        let now = self.counters()?;
        let kinds = [
            Counter::PagesShared,
            Counter::PagesSharing,
            Counter::PagesUnshared,
            Counter::PagesVolatile,
        ];
        let all: u64 = kinds.into_iter().map(|kind| now.count(kind)).sum();
        let own = own_items()?;
        if all > own + own / 20 {
            return Err(LabError::Merging(format!(
                "KSM knows {all} pages, of which this process has {own}: another process has begun \
                 to use it"
            )));
        }
        Ok(())
    }

    /// Its processor time; exact while it is stopped.
    fn cpu_ns(&self) -> Result<u64, LabError> {
        merging::running_ns(self.pid, self.pid)
    }
}

impl Drop for Ksmd {
    fn drop(&mut self) {
        // Restores KSM for its next user; a failure would show there.
        let _ = self.run(RUN_UNMERGE);
    }
}

impl Side for Ksmd {
    fn prepare(&self, ram: &GuestRam) -> Result<(), LabError> {
        ram.advise_mergeable(KernelMerging::Allow).map_err(failed)
    }

    fn merge(&mut self, _arena: &Arena, until: Until) -> Result<Work, LabError> {
        let (before, cpu_ns, begin) = (self.counters()?, self.cpu_ns()?, Instant::now());
        let since =
            |now: &Counters, counter| now.count(counter).saturating_sub(before.count(counter));
        let covered =
            |now: &Counters| since(now, Counter::PagesScanned) + since(now, Counter::PagesSkipped);
        self.run(RUN_MERGE)?;
        loop {
            thread::sleep(LOOK);
            let now = self.counters()?;
            let passes = since(&now, Counter::FullScans);
            let over = match until {
                Until::Covered(pages) => covered(&now) >= pages,
                Until::Passes(wanted) => passes >= wanted,
                Until::Freed(pages) => {
                    since(&now, Counter::PagesSharing) >= pages || passes >= PASSES_IN_VAIN
                }
            };
            if over {
                break;
            }
            if begin.elapsed() > LIMIT {
                self.run(RUN_STOP)?;
                return Err(LabError::Merging(format!("KSM did not finish within {LIMIT:?}")));
            }
        }
        let wall_ns = begin.elapsed().as_nanos() as u64;
        self.run(RUN_STOP)?;
        // It goes to sleep shortly after it was stopped, and its time is then exact.
        thread::sleep(2 * LOOK);
        self.check_alone()?;
        Ok(Work { cpu_ns: self.cpu_ns()? - cpu_ns, wall_ns, pages: covered(&self.counters()?) })
    }

    fn first_pass(&self, arena: &Arena) -> Until {
        Until::Covered((arena.contents().pages() as f64 * MOST_OF) as u64)
    }

    fn metadata_bytes(&mut self, _arena: &Arena) -> Result<u64, LabError> {
        let items = own_items()?;
        let item_bytes =
            fs::read_to_string(ITEM_SIZE_FILE).ok().and_then(|text| text.trim().parse().ok());
        Ok(items * item_bytes.unwrap_or(ITEM_BYTES))
    }
}

/// Pages of this process that KSM knows.
fn own_items() -> Result<u64, LabError> {
    const PATH: &str = "/proc/self/ksm_stat";
    let text = fs::read_to_string(PATH).map_err(LabError::of_file(PATH))?;
    proc::named_number(&text, "ksm_rmap_items")
        .ok_or(LabError::MissingField { path: PATH.into(), field: "ksm_rmap_items" })
}

/// Whether the kernel reports which processes have enabled merging by KSM (Linux 6.16).
fn kernel_reports_users() -> bool {
    fs::read_to_string("/proc/self/ksm_stat").is_ok_and(|text| text.contains("ksm_mergeable: "))
}

/// The name of another process that has enabled merging by KSM, if the kernel reports it (Linux
/// 6.16).
fn other_user() -> Option<String> {
    let own = std::process::id().to_string();
    fs::read_dir("/proc")
        .ok()?
        .flatten()
        .filter(|entry| entry.file_name() != own.as_str())
        .find_map(|entry| {
            let text = fs::read_to_string(entry.path().join("ksm_stat")).ok()?;
            if !text.lines().any(|line| line.trim() == "ksm_mergeable: yes") {
                return None;
            }
            fs::read_to_string(entry.path().join("comm")).ok().map(|name| name.trim().to_owned())
        })
}

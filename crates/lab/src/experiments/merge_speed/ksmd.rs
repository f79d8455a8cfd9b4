//! The kernel's side: KSM's thread, with the kernel's own settings except for its pace.

use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use ebb_page_merge::kernel::knobs::{RUN_MERGE, RUN_STOP, RUN_UNMERGE};
use ebb_page_merge::kernel::{
    Counter, Counters, KernelDomain, Knob, Ksm, KsmGuard, RUN_FOLDER, SYSFS, Values,
};

use super::member::Means;
use super::members::Members;
use super::side::{Goal, PASSES, Side};
use crate::LabError;
use crate::harness::proc;

/// Pages that the kernel's thread scans between two checks of its settings: it cannot be stopped in
/// between.
const PAGES_TO_SCAN: u64 = 500;
/// Interval of reading its counters.
const LOOK: Duration = Duration::from_micros(500);
/// Time limit for any merging.
const LIMIT: Duration = Duration::from_secs(300);
/// `struct ksm_rmap_item` of Linux 6.x on 64-bit machines (mm/ksm.c), where the kernel does not
/// report it.
const ITEM_BYTES: u64 = 64;
const ITEM_SIZE_FILE: &str = "/sys/kernel/slab/ksm_rmap_item/object_size";

/// KSM, used by the lab alone.
#[derive(Debug)]
pub(super) struct Ksmd {
    guard: KsmGuard,
    _domain: KernelDomain,
}

fn failed(error: impl std::fmt::Display) -> LabError {
    LabError::Merging(error.to_string())
}

impl Ksmd {
    /// Becomes KSM's only user, with Linux's defaults (mm/ksm.c), but without sleeps.
    ///
    /// # Errors
    /// [`LabError::Merging`]: no KSM, no permission to change it, or another process uses it.
    pub(super) fn join() -> Result<Self, LabError> {
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
            (Knob::MergeAcrossNodes, 1),
            (Knob::UseZeroPages, 0),
            (Knob::SmartScan, 1),
            (Knob::AdvisorMode, 0),
        ];
        let wanted: Values =
            wanted.into_iter().filter(|(knob, _)| guard.before().get(*knob).is_some()).collect();
        guard.ksm().apply(&wanted).map_err(failed)?;
        Ok(Self { guard, _domain: domain })
    }

    fn run(&self, value: u64) -> Result<(), LabError> {
        self.guard.ksm().apply(&Values::from_iter([(Knob::Run, value)])).map_err(failed)
    }

    fn counters(&self) -> Result<Counters, LabError> {
        self.guard.ksm().counters().map_err(failed)
    }

    /// Checks that it has scanned only pages of these processes.
    fn check_alone(&self, members: &Members) -> Result<(), LabError> {
        let now = self.counters()?;
        let kinds = [
            Counter::PagesShared,
            Counter::PagesSharing,
            Counter::PagesUnshared,
            Counter::PagesVolatile,
        ];
        let all: u64 = kinds.into_iter().map(|kind| now.count(kind)).sum();
        let own = items(members)?;
        if all > own + own / 20 {
            return Err(LabError::Merging(format!(
                "KSM knows {all} pages, of which the lab has {own}: another process has begun to \
                 use it"
            )));
        }
        Ok(())
    }

    /// Lets it merge until `over`, and waits until it sleeps.
    fn run_until(&self, over: impl Fn(Since) -> bool) -> Result<Since, LabError> {
        let (before, begin) = (self.counters()?, Instant::now());
        self.run(RUN_MERGE)?;
        loop {
            thread::sleep(LOOK);
            if over(Since::new(&before, &self.counters()?)) {
                break;
            }
            if begin.elapsed() > LIMIT {
                self.run(RUN_STOP)?;
                return Err(LabError::Merging(format!("KSM did not finish within {LIMIT:?}")));
            }
        }
        self.run(RUN_STOP)?;
        thread::sleep(2 * LOOK);
        Ok(Since::new(&before, &self.counters()?))
    }
}

/// What KSM has done meanwhile.
#[derive(Debug, Clone, Copy)]
struct Since {
    passes: u64,
    /// Scanned or skipped pages.
    covered: u64,
    sharing: u64,
}

impl Since {
    fn new(before: &Counters, now: &Counters) -> Self {
        let since = |counter| now.count(counter).saturating_sub(before.count(counter));
        Self {
            passes: since(Counter::FullScans),
            covered: since(Counter::PagesScanned) + since(Counter::PagesSkipped),
            sharing: since(Counter::PagesSharing),
        }
    }
}

impl Drop for Ksmd {
    fn drop(&mut self) {
        // Restores KSM for its next user; a failure would show there.
        let _ = self.run(RUN_UNMERGE);
    }
}

impl Side for Ksmd {
    fn means(&self) -> Means {
        Means::Kernel
    }

    fn pass(&mut self, members: &mut Members, passes: u64) -> Result<u64, LabError> {
        let done = self.run_until(|since| since.passes >= passes)?;
        self.check_alone(members)?;
        Ok(done.covered)
    }

    fn read_once(&mut self, members: &mut Members) -> Result<u64, LabError> {
        self.pass(members, 1)
    }

    fn passes_to_settle(&self) -> u64 {
        // Smart scan reads a page that it could not merge in each of the first passes, and in one
        // of five after the eighth (mm/ksm.c, `skip_age`).
        12
    }

    fn merge(&mut self, members: &mut Members, goal: Goal) -> Result<(), LabError> {
        self.run_until(|since| since.sharing >= goal.surplus || since.passes >= PASSES)?;
        self.check_alone(members)
    }

    fn metadata_bytes(&mut self, members: &mut Members) -> Result<u64, LabError> {
        let item_bytes =
            fs::read_to_string(ITEM_SIZE_FILE).ok().and_then(|text| text.trim().parse().ok());
        Ok(items(members)? * item_bytes.unwrap_or(ITEM_BYTES))
    }
}

/// Pages of these processes that KSM knows.
fn items(members: &Members) -> Result<u64, LabError> {
    let of = |pid: u32| {
        let path = format!("/proc/{pid}/ksm_stat");
        let text = fs::read_to_string(&path).map_err(LabError::of_file(&path))?;
        proc::named_number(&text, "ksm_rmap_items")
            .ok_or(LabError::MissingField { path: path.into(), field: "ksm_rmap_items" })
    };
    members.pids().map(of).sum()
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

//! Merging by Linux's KSM.

use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use ebb_guest_ram::{GuestRam, KernelMerging as Advice};
use ebb_page_merge::kernel::knobs::{ADVISOR_NONE, ADVISOR_SCAN_TIME, RUN_MERGE, RUN_STOP};
use ebb_page_merge::kernel::users::RUN_FOLDER;
use ebb_page_merge::kernel::{
    Counter, Counters, Knob, Ksm, KsmError, KsmUsers, Membership, SYSFS, Values,
};

use super::{Status, failed, wrong_state};
use crate::api::control::ControlError;
use crate::api::merge::{
    MergeChange, MergeRun, MergeScope, MergeSettings, MergeState, MergeStatistics,
};
use crate::config::MergeConfig;
use crate::config::merge::DEFAULT_KERNEL_DOMAIN;
use crate::exit::{ExitSignal, GuestExit};
use crate::seccomp::{Filters, ThreadKind};
use crate::vm::lock;

/// The pages scanned in one go follow from the pace; between two goes the kernel's thread rests so
/// long.
const SLEEP_MILLISECS: u64 = 20;
/// How long whoever asks for a change waits for it. The kernel may have to unmerge the whole host.
const ANSWER_TIME_LIMIT: Duration = Duration::from_secs(2);

type Answer = Result<(), ControlError>;

/// A change, and who waits for it.
struct Request {
    change: MergeChange,
    answer: Sender<Answer>,
}

/// What the thread and the API know.
struct Shared {
    ram: Arc<GuestRam>,
    membership: Arc<Membership>,
    status: Mutex<Status>,
}

/// Merging by the kernel; dropped, it ends, while what was merged stays so.
pub(super) struct KernelMerging {
    shared: Arc<Shared>,
    requests: Option<Sender<Request>>,
    thread: Option<JoinHandle<()>>,
}

impl KernelMerging {
    /// Lets the kernel merge the pages of `ram`.
    ///
    /// # Errors
    /// Why it cannot.
    pub(super) fn start(
        config: &MergeConfig,
        ram: &Arc<GuestRam>,
        filters: &Filters,
        exit: &Arc<ExitSignal>,
    ) -> Result<Self, String> {
        Self::start_among(Path::new(RUN_FOLDER), config, ram, filters, exit)
    }

    /// The same among the users that are noted in `folder`.
    fn start_among(
        folder: &Path,
        config: &MergeConfig,
        ram: &Arc<GuestRam>,
        filters: &Filters,
        exit: &Arc<ExitSignal>,
    ) -> Result<Self, String> {
        let ksm = Ksm::open(Path::new(SYSFS)).map_err(text)?;
        let mut wanted = Values::new().with(Knob::Run, RUN_MERGE);
        if let Some(across) = config.across_nodes {
            wanted.set(Knob::MergeAcrossNodes, u64::from(across));
        }
        let domain = config.domain.as_deref().unwrap_or(DEFAULT_KERNEL_DOMAIN);
        let users = KsmUsers::open(folder).map_err(text)?;
        let membership = Arc::new(users.join(Arc::new(ksm), domain, &wanted).map_err(text)?);
        // Only now: nobody of another domain is there.
        ram.advise_mergeable(Advice::Allow).map_err(|error| error.to_string())?;
        let shared = Arc::new(Shared {
            ram: ram.clone(),
            membership,
            status: Mutex::new(Status::default()),
        });
        let (requests, incoming) = mpsc::channel::<Request>();
        let (worker, filter, exit) =
            (shared.clone(), filters.for_thread(ThreadKind::Merge), exit.clone());
        let thread = std::thread::Builder::new()
            .name("merge".to_owned())
            .spawn(move || match filter.apply() {
                Ok(()) => incoming.into_iter().for_each(|request| worker.serve(request)),
                Err(error) => exit.raise(GuestExit::Monitor { message: error.to_string() }),
            })
            .map_err(|error| format!("the thread for merging cannot be started: {error}"))?;
        Ok(Self { shared, requests: Some(requests), thread: Some(thread) })
    }

    /// What keeps KSM's settings as they are for this machine.
    pub(super) fn membership(&self) -> Arc<Membership> {
        self.shared.membership.clone()
    }

    pub(super) fn status(&self) -> Status {
        let mut status = lock(&self.shared.status).clone();
        let run = self.shared.ksm().settings().ok().and_then(|values| values.get(Knob::Run));
        if status.state == MergeState::Merging && run != Some(RUN_MERGE) {
            status.state = MergeState::Stopped;
            status.reason =
                Some(format!("somebody has stopped the kernel's merging: {SYSFS}/run is not 1"));
        }
        status
    }

    pub(super) fn settings(&self) -> Result<MergeSettings, ControlError> {
        let values = self.shared.ksm().settings().map_err(failed)?;
        Ok(settings(&values, lock(&self.shared.status).run))
    }

    pub(super) fn merged_bytes(&self) -> Option<u64> {
        self.shared.ram.residency().ok().map(|residency| residency.merged_bytes)
    }

    pub(super) fn statistics(&self) -> Result<MergeStatistics, ControlError> {
        let counters = self.shared.ksm().counters().map_err(failed)?;
        Ok(MergeStatistics { merged_bytes: self.merged_bytes(), ..statistics(&counters) })
    }

    /// Asks for a change, and waits a while for it.
    pub(super) fn change(&self, change: &MergeChange) -> Answer {
        let (answer, answered) = mpsc::channel();
        let request = Request { change: change.clone(), answer };
        let sent = self.requests.as_ref().map(|requests| requests.send(request));
        match (sent, answered.recv_timeout(ANSWER_TIME_LIMIT)) {
            (Some(Ok(())), Ok(answer)) => answer,
            // It goes on, and its end is told in the state.
            (Some(Ok(())), Err(RecvTimeoutError::Timeout)) => Ok(()),
            _ => Err(failed("the thread for merging has ended")),
        }
    }
}

impl Drop for KernelMerging {
    fn drop(&mut self) {
        drop(self.requests.take());
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has been printed where it happened.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn ksm(&self) -> &Ksm {
        self.membership.ksm()
    }

    fn serve(&self, Request { change, answer }: Request) {
        let result = self.change(&change);
        if let Err(error) = &result {
            lock(&self.status).reason = Some(error.to_string());
        }
        let unmerges = result.is_ok() && change.run == Some(MergeRun::Unmerge);
        if unmerges {
            lock(&self.status).state = MergeState::Unmerging;
        }
        // Nobody waits any more if it took too long.
        let _ = answer.send(result);
        if unmerges {
            self.unmerge();
        }
    }

    fn change(&self, change: &MergeChange) -> Answer {
        if change.min_pass_millisecs.is_some() || change.clean_passes.is_some() {
            return Err(wrong_state(
                "the kernel has no settings 'min_pass_millisecs' and 'clean_passes'",
                "leave them out, or let the monitor merge (merge=owner)",
            ));
        }
        let present = self.ksm().settings().map_err(failed)?;
        let mut wanted = values(change, &present);
        self.check_unmerged(&present, &wanted)?;
        match change.run {
            None | Some(MergeRun::Unmerge) => {}
            Some(MergeRun::Merge) => wanted.set(Knob::Run, RUN_MERGE),
            Some(MergeRun::Stop) => {
                let others = self.membership.others().map_err(|error| refused(&error))?;
                if others > 0 {
                    let present = present.get(Knob::Run).unwrap_or(RUN_MERGE);
                    return Err(refused(&KsmError::NotAlone { knob: Knob::Run, present, others }));
                }
                wanted.set(Knob::Run, RUN_STOP);
            }
        }
        self.membership.change(&wanted).map_err(|error| refused(&error))?;
        let Some(run) = change.run else { return Ok(()) };
        if run == MergeRun::Merge {
            self.ram.advise_mergeable(Advice::Allow).map_err(failed)?;
        }
        let state = if run == MergeRun::Merge { MergeState::Merging } else { MergeState::Stopped };
        *lock(&self.status) = Status { run, state, reason: None };
        Ok(())
    }

    /// Whether settings that decide which pages may share can change: not while pages of this
    /// machine do. What the kernel counts may be of pages that it has not noticed to be gone, so a
    /// machine that was unmerged is believed.
    fn check_unmerged(&self, present: &Values, wanted: &Values) -> Answer {
        let changes =
            |knob: &Knob| wanted.get(*knob).is_some_and(|value| present.get(*knob) != Some(value));
        let guarded =
            Knob::ALL.into_iter().find(|knob| knob.needs_nothing_shared() && changes(knob));
        let Some(knob) = guarded.filter(|_| lock(&self.status).state != MergeState::Unmerged)
        else {
            return Ok(());
        };
        match self.ksm().counters().map_err(failed)?.count(Counter::PagesShared) {
            0 => Ok(()),
            pages_shared => Err(refused(&KsmError::Busy { knob, pages_shared })),
        }
    }

    /// Gives this machine's pages memory of their own; those of others stay as they are.
    fn unmerge(&self) {
        let result = self.ram.advise_mergeable(Advice::Forbid);
        let mut status = lock(&self.status);
        status.run = MergeRun::Unmerge;
        match result {
            Ok(()) => (status.state, status.reason) = (MergeState::Unmerged, None),
            Err(error) => {
                status.state = MergeState::Stopped;
                status.reason = Some(format!("not all pages could be unmerged: {error}"));
            }
        }
    }
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// What somebody else decides, or what has to be done first, is no failure.
fn refused(error: &KsmError) -> ControlError {
    let message = error.to_string();
    match error {
        KsmError::Busy { .. }
        | KsmError::NotAlone { .. }
        | KsmError::NoKnob { .. }
        | KsmError::Refused { .. }
        | KsmError::StillShared { .. }
        | KsmError::Permission { .. } => ControlError::WrongState { message, remedy: None },
        _ => ControlError::Failed { message },
    }
}

/// A change in KSM's terms.
fn values(change: &MergeChange, present: &Values) -> Values {
    let mut values = Values::new();
    let mut set = |knob, value: Option<u64>| {
        if let Some(value) = value {
            values.set(knob, value);
        }
    };
    set(Knob::MergeAcrossNodes, change.merge_across_nodes.map(u64::from));
    set(Knob::MaxPageSharing, change.max_page_sharing);
    set(Knob::UseZeroPages, change.use_zero_pages.map(u64::from));
    set(Knob::SmartScan, change.smart_scan.map(u64::from));
    if let Some(pages_per_second) = change.pages_per_second {
        // An older kernel has no advisor that would have to go.
        set(Knob::AdvisorMode, present.get(Knob::AdvisorMode).map(|_| ADVISOR_NONE));
        let (pages, sleep_ms) = pace(pages_per_second);
        set(Knob::PagesToScan, Some(pages));
        set(Knob::SleepMillisecs, Some(sleep_ms));
    }
    if change.pages_per_second.is_none()
        && (change.cpu_percent.is_some() || change.target_scan_seconds.is_some())
    {
        set(Knob::AdvisorMode, Some(ADVISOR_SCAN_TIME));
    }
    set(Knob::AdvisorMaxCpu, change.cpu_percent);
    set(Knob::AdvisorTargetScanTime, change.target_scan_seconds);
    values
}

/// Pages to scan between two rests, and the length of a rest in milliseconds, for about
/// `pages_per_second`.
fn pace(pages_per_second: u64) -> (u64, u64) {
    let goes_per_second = 1000 / SLEEP_MILLISECS;
    match pages_per_second {
        0..50 => (1, 1000 / pages_per_second.max(1)),
        many => (many / goes_per_second, SLEEP_MILLISECS),
    }
}

/// KSM's settings in our terms.
fn settings(values: &Values, run: MergeRun) -> MergeSettings {
    let on = |knob| values.get(knob).map(|value| value != 0);
    let is_advised = values.get(Knob::AdvisorMode) == Some(ADVISOR_SCAN_TIME);
    let advised = |knob| values.get(knob).filter(|_| is_advised);
    let rests = values.get(Knob::SleepMillisecs).filter(|sleep_ms| *sleep_ms > 0 && !is_advised);
    MergeSettings {
        run,
        merge_across_nodes: on(Knob::MergeAcrossNodes),
        max_page_sharing: values.get(Knob::MaxPageSharing),
        use_zero_pages: on(Knob::UseZeroPages),
        smart_scan: on(Knob::SmartScan),
        pages_per_second: values
            .get(Knob::PagesToScan)
            .zip(rests)
            .map(|(pages, sleep_ms)| pages.saturating_mul(1000) / sleep_ms),
        cpu_percent: advised(Knob::AdvisorMaxCpu),
        target_scan_seconds: advised(Knob::AdvisorTargetScanTime),
        min_pass_millisecs: None,
        clean_passes: None,
    }
}

/// KSM's counters, which are about the whole host.
fn statistics(counters: &Counters) -> MergeStatistics {
    let count = |counter| counters.get(counter).and_then(|value| u64::try_from(value).ok());
    MergeStatistics {
        scope: MergeScope::Host,
        pages_shared: count(Counter::PagesShared),
        pages_sharing: count(Counter::PagesSharing),
        pages_unshared: count(Counter::PagesUnshared),
        pages_volatile: count(Counter::PagesVolatile),
        pages_scanned: count(Counter::PagesScanned),
        pages_skipped: count(Counter::PagesSkipped),
        full_scans: count(Counter::FullScans),
        ksm_zero_pages: count(Counter::KsmZeroPages),
        general_profit: counters.get(Counter::GeneralProfit),
        stable_node_chains: count(Counter::StableNodeChains),
        stable_node_dups: count(Counter::StableNodeDups),
        ..MergeStatistics::default()
    }
}

#[cfg(test)]
mod tests;

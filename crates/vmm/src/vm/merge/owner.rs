//! Merging by the monitor itself, on a thread of its own.

use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ebb_guest_ram::merge::MergeFiles;
use ebb_guest_ram::{GuestRam, MergeSession, StableMemory, StableSegments};
use ebb_page_merge::broker::{BrokerStore, MemberConfig};
use ebb_page_merge::{
    Clock as _, Control, Merger, Nodes, Paused, Run, Secret, Settings, SettingsError, StablePages,
    StableStore, Statistics, SystemClock, Worker,
};

use super::{Status, failed, wrong_state};
use crate::api::control::ControlError;
use crate::api::merge::{
    MergeChange, MergeReplaced, MergeRun, MergeScope, MergeSettings, MergeState, MergeStatistics,
};
use crate::config::MergeConfig;
use crate::ending::join_until;
use crate::exit::{ExitSignal, GuestExit};
use crate::isolation::ConnectLink;
use crate::seccomp::{Filters, ThreadKind};
use crate::vm::lock;

/// Merging by the monitor. Dropping it ends it; merged pages stay merged.
pub(super) struct OwnerMerging {
    ram: Arc<GuestRam>,
    control: Arc<Control>,
    /// The scope of sharing.
    sharing: Arc<Mutex<Sharing>>,
    /// Pauses the thread while the machine is paused.
    brake: Mutex<Option<Paused>>,
    exit: Arc<ExitSignal>,
    thread: Option<JoinHandle<()>>,
}

/// The machine's own stable pages, or those of its domain.
type Store = Box<dyn StableStore + Send>;

/// The scope of sharing.
enum Sharing {
    /// This machine only.
    Alone,
    /// This machine only although a broker was configured, for this reason.
    WithoutBroker(String),
    /// All machines of the broker's domain, while the broker is connected.
    Broker,
}

/// What a forked process, which cannot open anything, is given for merging.
pub(in crate::vm) struct Given {
    /// Files of the system.
    pub files: MergeFiles,
    /// A connection with the broker.
    pub broker: Option<OwnedFd>,
    /// What makes further ones.
    pub link: Option<ConnectLink>,
}

/// Resources opened for merging.
struct Prepared {
    ram: Arc<GuestRam>,
    session: MergeSession,
    segments: Arc<StableSegments>,
    settings: Settings,
}

impl OwnerMerging {
    /// Prepares everything that needs privileges, and starts the thread paused.
    ///
    /// # Errors
    /// Why the pages of this machine cannot be merged.
    pub(super) fn start(
        config: &MergeConfig,
        ram: &Arc<GuestRam>,
        link: Option<ConnectLink>,
        filters: &Filters,
        exit: &Arc<ExitSignal>,
    ) -> Result<Self, String> {
        let segments = StableSegments::new();
        ram.enable_merging(segments.clone()).map_err(text)?;
        let prepared = Prepared::new(config, ram, segments)?;
        let member = prepared.member(config);
        let store = member
            .as_ref()
            .map(|member| BrokerStore::connect(member, prepared.segments.clone()).map_err(text));
        prepared.merge(store, member.zip(link), filters, exit)
    }

    /// The same in a forked process: pages are merged that the machine has alone.
    ///
    /// # Errors
    /// Why the pages of this machine cannot be merged.
    pub(super) fn in_fork(
        config: &MergeConfig,
        ram: &Arc<GuestRam>,
        given: Given,
        filters: &Filters,
        exit: &Arc<ExitSignal>,
    ) -> Result<Self, String> {
        let segments = StableSegments::new();
        ram.enable_merging_in_fork(segments.clone(), given.files).map_err(text)?;
        let prepared = Prepared::new(config, ram, segments)?;
        let member = prepared.member(config);
        let store = member.as_ref().zip(given.broker).map(|(member, connection)| {
            let segments = prepared.segments.clone();
            BrokerStore::over(connection, member, segments, Arc::default()).map_err(text)
        });
        prepared.merge(store, member.zip(given.link), filters, exit)
    }

    /// Pauses merging. Returns when no operation is in progress.
    pub(super) fn pause(&self) {
        let paused = self.control.pause();
        *lock(&self.brake) = Some(paused);
    }

    /// Resumes merging.
    pub(super) fn resume(&self) {
        *lock(&self.brake) = None;
    }

    pub(super) fn status(&self) -> Status {
        let settings = self.control.settings();
        let lost = match &*lock(&self.sharing) {
            Sharing::Alone => None,
            Sharing::WithoutBroker(reason) => Some(reason.clone()),
            Sharing::Broker => self.control.why_gone().map(|reason| {
                format!("the broker of shared pages is gone ({reason}); merged pages stay merged")
            }),
        };
        let (run, state) = match settings.run {
            Run::Stop => (MergeRun::Stop, MergeState::Stopped),
            Run::Merge if lost.is_some() => (MergeRun::Merge, MergeState::Degraded),
            Run::Merge => (MergeRun::Merge, MergeState::Merging),
            Run::Unmerge => {
                let statistics = self.control.statistics();
                let is_done = statistics.merged_pages == 0 && statistics.pages_shared == 0;
                (
                    MergeRun::Unmerge,
                    if is_done { MergeState::Unmerged } else { MergeState::Unmerging },
                )
            }
        };
        Status { run, state, reason: lost.or_else(|| self.control.last_error()) }
    }

    pub(super) fn settings(&self) -> MergeSettings {
        settings(&self.control.settings())
    }

    pub(super) fn merged_bytes(&self) -> u64 {
        self.ram.merged_bytes()
    }

    pub(super) fn statistics(&self) -> MergeStatistics {
        MergeStatistics {
            merged_bytes: Some(self.merged_bytes()),
            ..statistics(&self.control.statistics())
        }
    }

    /// Changes settings, and waits until the thread has applied them.
    pub(super) fn change(&self, change: &MergeChange) -> Result<(), ControlError> {
        if !matches!(*lock(&self.sharing), Sharing::Alone)
            && (change.merge_across_nodes.is_some() || change.max_page_sharing.is_some())
        {
            return Err(wrong_state(
                "merge_across_nodes and max_page_sharing are the same for all machines of a \
                 domain, and the broker gets them at the start",
                "restart the machine with another merge_across_nodes, or the broker with another \
                 limit",
            ));
        }
        self.control
            .change(|settings| apply(change, settings))
            .map(drop)
            .map_err(|error| refused(&error))
    }
}

impl Drop for OwnerMerging {
    fn drop(&mut self) {
        self.control.stop();
        self.resume();
        if let Some(thread) = self.thread.take() {
            // It keeps what it uses.
            let _ = join_until(thread, self.exit.end_deadline());
        }
    }
}

/// The stable pages of a domain.
type DomainStore = BrokerStore<Arc<StableSegments>>;

/// Connects the machine with the next broker when it has lost the one before, or was started without
/// one.
struct Rejoin {
    link: ConnectLink,
    member: MemberConfig,
    segments: Arc<StableSegments>,
    sharing: Arc<Mutex<Sharing>>,
    /// When a connection was requested last.
    requested: Option<Instant>,
    /// Whether the answer is still to come.
    is_pending: bool,
}

/// Pause between two requests.
const REJOIN_AGAIN: Duration = Duration::from_secs(2);

impl Rejoin {
    /// The store of the next broker, once there is one. Called before each pass.
    fn next(&mut self, lost: Option<&str>, hurry: &Arc<AtomicBool>) -> Option<(Store, Secret)> {
        let is_missing = matches!(*lock(&self.sharing), Sharing::WithoutBroker(_));
        if lost.is_none() && !is_missing {
            return None;
        }
        if !self.is_pending {
            if self.requested.is_none_or(|at| at.elapsed() >= REJOIN_AGAIN) {
                self.requested = Some(Instant::now());
                // Without a companion there will be no answer.
                self.is_pending = self.link.request(0).unwrap_or(false);
            }
            return None;
        }
        let connection = match self.link.answer() {
            Ok(None) => return None,
            Ok(Some(answer)) => answer,
            Err(error) => Err(error.to_string()),
        };
        self.is_pending = false;
        let store = connection.and_then(|connection| {
            BrokerStore::over(connection, &self.member, self.segments.clone(), hurry.clone())
                .map_err(text)
        });
        let store = store.inspect_err(|error| tracing::debug!("no merge broker yet: {error}"));
        let store = store.ok()?;
        *lock(&self.sharing) = Sharing::Broker;
        tracing::info!("pages are shared through a merge broker again");
        let secret = store.secret();
        Some((Box::new(store), secret))
    }
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

impl Prepared {
    fn new(
        config: &MergeConfig,
        ram: &Arc<GuestRam>,
        segments: Arc<StableSegments>,
    ) -> Result<Self, String> {
        let session = MergeSession::new(ram.clone()).map_err(text)?;
        let nodes = if config.across_nodes == Some(false) { Nodes::Apart } else { Nodes::Across };
        let settings =
            Settings { run: Run::Merge, merge_across_nodes: nodes, ..Settings::default() };
        Ok(Self { ram: ram.clone(), session, segments, settings })
    }

    /// How the machine joins its domain, if a broker is configured.
    fn member(&self, config: &MergeConfig) -> Option<MemberConfig> {
        let (path, domain) = config.member()?;
        Some(MemberConfig::new(path.to_owned(), domain, self.settings.merge_across_nodes))
    }

    /// Merges with the pages of a domain, or alone. `next` connects with the domain's next broker.
    fn merge(
        self,
        store: Option<Result<DomainStore, String>>,
        next: Option<(MemberConfig, ConnectLink)>,
        filters: &Filters,
        exit: &Arc<ExitSignal>,
    ) -> Result<OwnerMerging, String> {
        let (sharing, (store, secret)) = match store {
            None => (Sharing::Alone, self.alone()?),
            Some(Ok(store)) => {
                let secret = store.secret();
                (Sharing::Broker, (Box::new(store) as Store, secret))
            }
            Some(Err(reason)) => {
                tracing::warn!("pages are merged within the machine only: {reason}");
                (Sharing::WithoutBroker(reason), self.alone()?)
            }
        };
        let sharing = Arc::new(Mutex::new(sharing));
        let rejoin = next.map(|(member, link)| Rejoin {
            link,
            member,
            segments: self.segments.clone(),
            sharing: sharing.clone(),
            requested: None,
            is_pending: false,
        });
        self.merge_with(store, secret, sharing, rejoin, filters, exit)
    }

    /// A store of the machine's own, with its secret.
    fn alone(&self) -> Result<(Store, Secret), String> {
        let mut secret = [0; 32];
        rustix::rand::getrandom(&mut secret, rustix::rand::GetRandomFlags::empty())
            .map_err(|error| format!("no random numbers are available: {error}"))?;
        let store = StablePages::new(StableMemory::own(self.segments.clone()));
        Ok((Box::new(store), Secret(secret)))
    }

    fn merge_with(
        self,
        store: Store,
        secret: Secret,
        sharing: Arc<Mutex<Sharing>>,
        rejoin: Option<Rejoin>,
        filters: &Filters,
        exit: &Arc<ExitSignal>,
    ) -> Result<OwnerMerging, String> {
        let merger = Merger::new(self.session, store, secret, self.settings)
            .map_err(|error| error.to_string())?;
        let (mut worker, control) = Worker::new(merger);
        if let Some(mut rejoin) = rejoin {
            worker.renew_with(Box::new(move |lost, hurry| rejoin.next(lost, hurry)));
        }
        let brake = Mutex::new(Some(control.pause()));
        // The first read of a clock locates the kernel's vDSO, with calls that the filter does not
        // allow.
        let _ = SystemClock.now();
        let (filter, failed) = (filters.for_thread(ThreadKind::Merge), exit.clone());
        let thread = std::thread::Builder::new()
            .name("merge".to_owned())
            .spawn(move || match filter.apply() {
                Ok(()) => worker.run(&SystemClock),
                Err(error) => failed.raise(GuestExit::Monitor { message: error.to_string() }),
            })
            .map_err(|error| format!("the thread for merging cannot be started: {error}"))?;
        Ok(OwnerMerging {
            ram: self.ram,
            control,
            sharing,
            brake,
            exit: exit.clone(),
            thread: Some(thread),
        })
    }
}

fn refused(error: &SettingsError) -> ControlError {
    let message = error.to_string();
    match error {
        SettingsError::Merged { .. } => ControlError::WrongState { message, remedy: None },
        SettingsError::OutOfRange { setting, .. } => {
            ControlError::Invalid { field: setting, message, remedy: None }
        }
        SettingsError::NoAnswer => failed(message),
    }
}

/// Applies `change` to `settings`.
fn apply(change: &MergeChange, settings: &mut Settings) {
    fn set<T>(setting: &mut T, value: Option<T>) {
        if let Some(value) = value {
            *setting = value;
        }
    }
    let number = |value: u64| u32::try_from(value).unwrap_or(u32::MAX);
    set(
        &mut settings.run,
        change.run.map(|run| match run {
            MergeRun::Stop => Run::Stop,
            MergeRun::Merge => Run::Merge,
            MergeRun::Unmerge => Run::Unmerge,
        }),
    );
    let nodes = |across| if across { Nodes::Across } else { Nodes::Apart };
    set(&mut settings.merge_across_nodes, change.merge_across_nodes.map(nodes));
    set(&mut settings.max_page_sharing, change.max_page_sharing.map(number));
    set(&mut settings.use_zero_pages, change.use_zero_pages);
    set(&mut settings.smart_scan, change.smart_scan);
    // Mutually exclusive settings.
    if change.pages_per_second.is_some() {
        settings.pages_per_second = change.pages_per_second;
        settings.target_scan_seconds = None;
    }
    if change.target_scan_seconds.is_some() {
        settings.target_scan_seconds = change.target_scan_seconds;
        settings.pages_per_second = None;
    }
    set(&mut settings.min_pass_millisecs, change.min_pass_millisecs);
    set(
        &mut settings.clean_passes,
        change.clean_passes.and_then(|passes| u8::try_from(passes).ok()),
    );
    set(&mut settings.max_cpu_percent, change.cpu_percent.map(number));
}

fn settings(settings: &Settings) -> MergeSettings {
    MergeSettings {
        run: Some(match settings.run {
            Run::Stop => MergeRun::Stop,
            Run::Merge => MergeRun::Merge,
            Run::Unmerge => MergeRun::Unmerge,
        }),
        merge_across_nodes: Some(settings.merge_across_nodes == Nodes::Across),
        max_page_sharing: Some(settings.max_page_sharing.into()),
        use_zero_pages: Some(settings.use_zero_pages),
        smart_scan: Some(settings.smart_scan),
        pages_per_second: settings.pages_per_second,
        cpu_percent: Some(settings.max_cpu_percent.into()),
        target_scan_seconds: settings.target_scan_seconds,
        min_pass_millisecs: Some(settings.min_pass_millisecs),
        clean_passes: Some(settings.clean_passes.into()),
    }
}

fn statistics(statistics: &Statistics) -> MergeStatistics {
    MergeStatistics {
        scope: MergeScope::Machine,
        pages_shared: Some(statistics.pages_shared),
        pages_sharing: Some(statistics.pages_sharing),
        pages_unshared: Some(statistics.pages_unshared),
        pages_volatile: Some(statistics.pages_volatile),
        pages_refused: Some(statistics.pages_refused),
        pages_scanned: Some(statistics.pages_scanned),
        pages_skipped: Some(statistics.pages_skipped),
        full_scans: Some(statistics.full_scans),
        ksm_zero_pages: Some(statistics.ksm_zero_pages),
        general_profit: Some(statistics.general_profit),
        stable_node_chains: Some(statistics.stable_node_chains),
        stable_node_dups: Some(statistics.stable_node_dups),
        merged_bytes: None,
        remote_merged_pages: Some(statistics.remote_merged_pages),
        hashed_pages: Some(statistics.hashed_pages),
        clean_pages: Some(statistics.clean_pages),
        written_pages: Some(statistics.written_pages),
        untracked_pages: Some(statistics.untracked_pages),
        huge_pages_split: Some(statistics.huge_pages_split),
        huge_pages_split_in_vain: Some(statistics.huge_pages_split_in_vain),
        huge_pages_collapsed: Some(statistics.huge_pages_collapsed),
        broken_pages: Some(statistics.broken_pages),
        brought_back_pages: Some(statistics.brought_back_pages),
        remerged_pages: Some(statistics.remerged_pages),
        metadata_bytes: Some(statistics.metadata_bytes),
        replaced: Some(MergeReplaced {
            done: statistics.replaced_done,
            different: statistics.replaced_different,
            busy: statistics.replaced_busy,
            no_mappings: statistics.replaced_no_mappings,
            gone: statistics.replaced_gone,
        }),
    }
}

#[cfg(test)]
mod tests;

//! A migration at the source, from the request to its end.

use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ebb_guest_ram::kvm_dirty::DirtyBitmap;
use ebb_guest_ram::{InhibitReason, PageBitmap, SharedRam};
use ebb_migration::session::{
    self, Address, CancelHandle, Cancellation, Greeting, Outcome, Security, SourcePrepared,
    SourceStreaming, TimeLimits,
};
use ebb_migration::{
    BoxError, Cancel, DirtySource, FreePageSource, Guest, Phase, Precopy, Progress, Report,
    RoundSync, WithWriteLog,
};

use super::guest::{MovedGuest, Stopped};
use super::hints::FreePages;
use super::request::{Order, config};
use super::{Migrations, in_ms};
use crate::api::migration::{
    FreePageChoice, MigrationPhase, MigrationReport, MigrationRequest, MigrationRound,
};
use crate::api::vm::VmState;
use crate::cpu::threads::process_time;
use crate::vm::{Vm, lock};

/// A migration that was not completed.
enum Broken {
    /// The machine continues here.
    Failed(String),
    /// It is unknown where the machine runs.
    Unknown(String),
}

impl<E: std::error::Error> From<E> for Broken {
    fn from(error: E) -> Self {
        Self::Failed(with_causes(&error))
    }
}

/// An error with its causes, each printed once.
fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let words = cause.to_string();
        if !text.contains(&words) {
            text = format!("{text}: {words}");
        }
        next = cause.source();
    }
    text
}

/// This monitor's introduction to its peer.
pub(in crate::vm) fn greeting() -> Greeting {
    Greeting { monitor: format!("ebb {}", env!("CARGO_PKG_VERSION")), capabilities: Vec::new() }
}

/// Migrates the machine; returns the report. `cancel` is ready for this session.
pub(super) fn migrate(vm: &Arc<Vm>, order: Order, cancel: &CancelHandle) -> MigrationReport {
    let cpu_before = monitor_time(vm);
    let mut report =
        MigrationReport { memory_bytes: vm.ram.size_bytes(), ..MigrationReport::default() };
    let Order { request, address, sockets, security } = order;
    let request = &request;
    let result = Migration { vm, migrations: &vm.migrations, request, report: &mut report }
        .run(sockets, &address, &security, cancel);
    report.source_cpu_ms = in_ms(monitor_time(vm).saturating_sub(cpu_before));
    (report.status, report.error) = match result {
        Ok(()) => (MigrationPhase::Completed, None),
        Err(Broken::Unknown(problem)) => (MigrationPhase::Unknown, Some(problem)),
        Err(Broken::Failed(problem)) if vm.migrations.is_cancelled() => {
            tracing::debug!("a cancelled migration ended with: {problem}");
            (MigrationPhase::Cancelled, Some("it was cancelled".to_owned()))
        }
        Err(Broken::Failed(problem)) => (MigrationPhase::Failed, Some(problem)),
    };
    report
}

/// Processor time of this process without that of the vCPUs.
fn monitor_time(vm: &Vm) -> Duration {
    process_time().saturating_sub(vm.vcpus.processor_time())
}

struct Migration<'a> {
    vm: &'a Arc<Vm>,
    migrations: &'a Migrations,
    request: &'a MigrationRequest,
    report: &'a mut MigrationReport,
}

impl Migration<'_> {
    fn run(
        &mut self,
        sockets: Vec<OwnedFd>,
        address: &Address,
        security: &Security,
        cancel_session: &CancelHandle,
    ) -> Result<(), Broken> {
        let cancel = Cancel::new();
        let (session, engine) = (cancel_session.clone(), cancel.clone());
        self.migrations.set_cancel(move || {
            // The session first: it knows whether it is too late.
            if session.cancel() == Cancellation::Cancelled {
                engine.cancel();
            }
        });

        let limits = TimeLimits::default();
        let session =
            session::connect(sockets, address, security, &greeting(), &limits, cancel_session)?;
        let mut description = self.vm.describe()?;
        let shared = self.shared(address)?;
        description.shared = shared.as_ref().map(|shared| shared.layout.clone());
        let streams = if shared.is_some() { 1 } else { self.request.streams };
        let mut accepted = session.setup(&description, streams)?;
        if let Some(shared) = &shared {
            let files: Vec<_> = shared.files.iter().map(AsFd::as_fd).collect();
            accepted.send_descriptors(&files)?;
        }
        let (streaming, streams) = accepted.open_streams()?;
        self.report.setup_ms = in_ms(self.migrations.elapsed());
        if shared.is_some() {
            return self.send_shared(streaming);
        }
        let streams = streams.into_iter().map(|stream| {
            let connection = stream.shutdown_handle();
            cancel.on_cancel(move || connection.shut_down());
            Box::new(stream) as Box<dyn Write + Send>
        });
        let streams: Vec<_> = streams.collect();
        self.send(streaming, streams, &cancel)
    }

    /// The files of the memory, if they should be shared.
    fn shared(&self, address: &Address) -> Result<Option<SharedRam>, Broken> {
        if !self.request.share_memory {
            return Ok(None);
        }
        if !matches!(address, Address::Unix { .. }) {
            return Err(Broken::Failed(format!(
                "memory can only be shared on the same host, and {address} may be another one; \
                 use a unix: address, or omit --share-memory"
            )));
        }
        self.vm.ram.share()?.map(Some).ok_or_else(|| {
            Broken::Failed(format!(
                "this machine's memory is private to its monitor ({}), so it cannot be shared; \
                 omit --share-memory, or start machines with --memory backing=memfd",
                self.vm.ram.backing()
            ))
        })
    }

    /// Hands over to a destination that has the memory already.
    fn send_shared(&mut self, streaming: SourceStreaming) -> Result<(), Broken> {
        self.report.shared_memory = true;
        self.report.free_pages = FreePageChoice::Off;
        let stopped = Stopped::default();
        let mut guest = MovedGuest::new(self.vm.clone(), stopped.clone());
        self.migrations.update(|status| status.phase = MigrationPhase::SwitchOver);
        if let Err(error) = guest.flush() {
            tracing::warn!("the disks cannot be written back before the pause: {error}");
        }
        if let Err(error) = guest.pause_and_save() {
            let problem = format!("the machine cannot be stopped: {}", with_causes(&*error));
            streaming.abort(problem.as_str());
            return Err(Kept::Stopped(problem).end(&mut guest));
        }
        // Memory discarded here from now on would be missing at the destination.
        let kept = self.vm.ram.inhibit_discard(InhibitReason::Migration);
        let result = self.hand_over(&stopped, &Mutex::new(Some(streaming)));
        if matches!(result, Err(Kept::Paused(_))) {
            *lock(&self.vm.handed_over) = Some(kept);
        }
        result.map_err(|kept| kept.end(&mut guest))
    }

    /// Sends memory, then hands the machine over.
    fn send(
        &mut self,
        streaming: SourceStreaming,
        streams: Vec<Box<dyn Write + Send>>,
        cancel: &Cancel,
    ) -> Result<(), Broken> {
        let vm = self.vm;
        let streaming = Arc::new(Mutex::new(Some(streaming)));
        let give_up = |problem: String| {
            let said =
                lock(&streaming).take().and_then(|streaming| streaming.abort(problem.clone()));
            // An error that the peer reported first is the better reason.
            Broken::Failed(said.map_or(problem, |said| with_causes(&said)))
        };
        // SAFETY: the regions of `vm.ram` are the memory slots of `vm.kvm` in their order, see
        // `register_memory`; the machine keeps them mapped as long as it lives.
        let log = unsafe { DirtyBitmap::new(&vm.kvm, &vm.ram) };
        let log = log.map_err(|error| give_up(with_causes(&error)))?;
        let mut dirty = WithWriteLog::new(GuestWrites(log), vm.ram.clone());
        let stopped = Stopped::default();
        let mut guest = MovedGuest::new(vm.clone(), stopped.clone());
        let mut free_pages = self.free_pages();
        let mut rounds = Rounds(streaming.clone());
        let observer = Observer { migrations: self.migrations };
        let precopy = Precopy {
            config: config(self.request),
            memory: &*vm.ram as &dyn ebb_migration::SourceMemory,
            dirty: &mut dirty,
            guest: &mut guest,
            free_pages: free_pages.as_mut().map(|free_pages| free_pages as &mut dyn FreePageSource),
            streams,
            round_sync: &mut rounds,
            observer: &mut |progress| observer.report(progress),
            cancel: cancel.clone(),
        };
        let switchover = match precopy.run() {
            Ok(switchover) => switchover,
            Err(failure) => {
                fill(self.report, &failure.report);
                return Err(give_up(with_causes(&failure.error)));
            }
        };
        fill(self.report, switchover.report());
        if let Some(at) = stopped.at() {
            tracing::debug!("all memory arrived {:?} after the stop", at.elapsed());
        }
        // All memory has arrived. The dirty log stays enabled until the machine has moved:
        // disabling it takes time while the guest is paused.
        let result = self.hand_over(&stopped, &streaming);
        switchover.stay_paused();
        drop(dirty);
        self.report.free_pages = free_pages.as_ref().map_or(FreePageChoice::Off, FreePages::used);
        result.map_err(|kept| kept.end(&mut guest))
    }

    /// Hands the machine over, if the destination can run it.
    fn hand_over(
        &mut self,
        stopped: &Stopped,
        streaming: &Mutex<Option<SourceStreaming>>,
    ) -> Result<(), Kept> {
        let stopped_at = stopped.at();
        let prepared = self.prepare(stopped, streaming).map_err(Kept::Stopped)?;
        if let Err(problem) = self.vm.release_exclusive() {
            prepared.abort(problem.as_str());
            return Err(Kept::Stopped(problem));
        }
        if !self.migrations.commit() {
            prepared.abort("it was cancelled");
            return Err(Kept::Stopped("it was cancelled".to_owned()));
        }
        if let Some(at) = stopped_at {
            tracing::debug!("the destination is ready {:?} after the stop", at.elapsed());
        }
        match prepared.commit() {
            Outcome::Moved => {
                self.report.downtime_ms = stopped_at.map_or(0, |at| in_ms(at.elapsed()));
                Ok(())
            }
            Outcome::RunsOn(error) => Err(Kept::Stopped(with_causes(&error))),
            Outcome::Unknown(error) => {
                let mut state = lock(&self.vm.state);
                if *state == VmState::Migrating {
                    *state = VmState::Paused;
                }
                self.report.downtime_ms = stopped_at.map_or(0, |at| in_ms(at.elapsed()));
                Err(Kept::Paused(format!(
                    "{}; the virtual machine stays paused here: \
                     resume it only if it does not run at {}",
                    with_causes(&error),
                    self.request.to
                )))
            }
        }
    }

    /// Sends the state, and waits until the destination is ready to start the guest.
    fn prepare(
        &mut self,
        stopped: &Stopped,
        streaming: &Mutex<Option<SourceStreaming>>,
    ) -> Result<SourcePrepared, String> {
        let state = stopped.take_state().ok_or("the machine's state is missing")?;
        let bytes = serde_json::to_vec(&state).map_err(|error| error.to_string())?;
        self.report.bytes_sent += bytes.len() as u64;
        let streaming = lock(streaming).take().ok_or("the session has ended")?;
        streaming.send_state(bytes).map_err(|error| with_causes(&error))
    }

    /// The guest's driver, if it should be asked for free pages.
    fn free_pages(&self) -> Option<FreePages> {
        let balloon = self.vm.balloon.clone()?;
        let asks =
            self.request.free_pages != FreePageChoice::Off && self.vm.state() == VmState::Running;
        asks.then(|| FreePages::new(balloon, self.request.free_pages))
    }
}

/// A machine that was stopped but not handed over, and the reason.
enum Kept {
    /// The machine must continue here.
    Stopped(String),
    /// The destination may run the machine: it must not continue here.
    Paused(String),
}

impl Kept {
    /// Resumes the machine here if allowed; returns the failure to report.
    fn end(self, guest: &mut MovedGuest) -> Broken {
        let problem = match self {
            Self::Paused(problem) => return Broken::Unknown(problem),
            Self::Stopped(problem) => problem,
        };
        match guest.resume() {
            Ok(()) => Broken::Failed(problem),
            Err(error) => Broken::Failed(format!(
                "{problem}; and the guest cannot be resumed, it stays paused: {}",
                with_causes(&*error)
            )),
        }
    }
}

/// The session, for the engine's rounds.
struct Rounds(Arc<Mutex<Option<SourceStreaming>>>);

impl RoundSync for Rounds {
    fn wait_round_done(&mut self, round: u32) -> Result<(), BoxError> {
        let mut streaming = lock(&self.0);
        let streaming = streaming.as_mut().ok_or("the session has ended")?;
        Ok(streaming.wait_round_done(round)?)
    }
}

/// KVM's dirty log, for the engine.
struct GuestWrites<'a>(DirtyBitmap<'a>);

impl DirtySource for GuestWrites<'_> {
    fn arm(&mut self) -> Result<(), BoxError> {
        Ok(self.0.enable()?)
    }

    fn sync(&mut self, found: &mut PageBitmap) -> Result<(), BoxError> {
        Ok(self.0.get(found)?)
    }

    fn clear(&mut self, range: ebb_abi::PageRange) -> Result<(), BoxError> {
        Ok(self.0.clear(range)?)
    }

    fn clear_all(&mut self, pages: &PageBitmap) -> Result<(), BoxError> {
        Ok(self.0.clear_all(pages)?)
    }

    fn disarm(&mut self) -> Result<(), BoxError> {
        Ok(self.0.disable()?)
    }
}

/// Passes progress on to the API.
struct Observer<'a> {
    migrations: &'a Migrations,
}

impl Observer<'_> {
    fn report(&self, progress: &Progress) {
        self.migrations.update(|status| {
            status.phase = match progress.phase {
                Phase::Final | Phase::Sent => MigrationPhase::SwitchOver,
                _ => MigrationPhase::Precopy,
            };
            status.round = u64::from(progress.round) + 1;
            status.remaining_bytes = progress.remaining_bytes;
            status.bytes_sent = progress.sent_bytes;
            status.rate_bytes_per_s = progress.bandwidth_bytes_per_s.unwrap_or(0);
            status.expected_downtime_ms = progress.expected_downtime.map(in_ms);
            status.throttle_percent = progress.throttle_percent;
        });
    }
}

/// Copies the engine's counters into the report.
fn fill(report: &mut MigrationReport, engine: &Report) {
    report.bytes_sent = engine.bytes_sent;
    report.rounds = u64::from(engine.rounds);
    report.pages_data = engine.pages.data;
    report.pages_zero = engine.pages.zero;
    report.pages_discarded = engine.pages.discarded;
    report.pages_skipped = engine.pages.skipped;
    report.downtime_ms = engine.downtime_ms;
    report.bandwidth_bytes_per_s = engine.bandwidth_bytes_per_s.unwrap_or(0);
    report.free_pages_error.clone_from(&engine.hints_error);
    report.rounds_detail = engine
        .rounds_detail
        .iter()
        .map(|round| MigrationRound {
            round: u64::from(round.round) + 1,
            elapsed_ms: round.total_ms,
            pages_data: round.pages.data,
            pages_zero: round.pages.zero,
            pages_discarded: round.pages.discarded,
            pages_skipped: round.pages.skipped,
            bytes_sent: round.bytes_sent,
            pages_written: round.pages_written,
            hint_wait_ms: round.hint_wait_ms,
            throttle_percent: round.throttle_percent,
        })
        .collect();
}

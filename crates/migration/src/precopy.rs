//! Pre-copy: memory is sent in rounds while the guest runs, and the rest while it is paused.

use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ebb_abi::migration::RoundKind;
use ebb_abi::{PAGE_SIZE_BYTES, PageRange};

use crate::convergence::{Next, Policy, RoundOutcome};
use crate::hint_deadline::HintDeadline;
use crate::progress::{PageCounters, Phase, Progress, Report, RoundReport};
use crate::rate::{Bandwidth, RateLimiter};
use crate::sender::{Round, RoundControl, Stream};
use crate::tracker::FirstPages;
use crate::{
    AtTimeLimit, BoxError, Cancel, Config, DirtySource, Failure, FreePageSource, Guest, HintRounds,
    HintWindow, MigrationError, PageFeed, RoundSync, SourceMemory, Switchover, Tracker,
};

/// Longest single wait for hints, between two checks.
const HINT_POLL: Duration = Duration::from_millis(20);

/// The source of a migration.
///
/// Without a time limit and without throttling, it does not end while the guest writes faster than
/// its memory can be sent.
pub struct Precopy<'a> {
    /// Settings.
    pub config: Config,
    /// The guest's memory.
    pub memory: &'a dyn SourceMemory,
    /// Dirty log of that memory. Not armed.
    pub dirty: &'a mut dyn DirtySource,
    /// The guest, running.
    pub guest: &'a mut dyn Guest,
    /// Source of free page hints, if any.
    pub free_pages: Option<&'a mut dyn FreePageSource>,
    /// Data streams to the destination, at least one. Records are written with
    /// [`write_vectored`](Write::write_vectored).
    pub streams: Vec<Box<dyn Write + Send + 'a>>,
    /// Acknowledgements of rounds from the destination.
    pub round_sync: &'a mut dyn RoundSync,
    /// Called with the progress several times per second and at the start of each phase.
    pub observer: &'a mut dyn FnMut(&Progress),
    /// Cancels the migration. Its callbacks must make writes to the streams and waits for rounds
    /// return; the engine also cancels when one stream has failed and another is stuck.
    pub cancel: Cancel,
}

impl<'a> Precopy<'a> {
    /// Sends the guest's memory. On success the guest is paused, its state is saved, and the
    /// destination has confirmed all of its memory.
    ///
    /// # Errors
    /// [`Failure`]; the guest runs with all of its pages, the dirty log is disarmed, and nothing of
    /// the migration is left.
    pub fn run(self) -> Result<Switchover<'a>, Box<Failure>> {
        let regions = self.memory.regions();
        let report = Report {
            memory_bytes: regions.iter().map(|region| region.size_bytes()).sum(),
            ..Report::default()
        };
        let mut engine = Engine {
            config: self.config,
            memory: self.memory,
            regions,
            guest: self.guest,
            free_pages: self.free_pages,
            streams: self.streams.into_iter().map(Stream::new).collect(),
            round_sync: self.round_sync,
            observer: self.observer,
            cancel: self.cancel,
            started: Instant::now(),
            report,
            bandwidth: Bandwidth::default(),
            policy: Policy::new(self.config),
            limiter: RateLimiter::new(self.config.bandwidth_limit),
            sent_bytes: AtomicU64::new(0),
            asked: false,
            paused_at: None,
        };
        let result = engine.migrate(self.dirty);
        engine.close_report();
        let Engine { guest, report, policy, paused_at, .. } = engine;
        match (result, paused_at) {
            (Ok(tracker), Some(paused_at)) => {
                Ok(Switchover::new(tracker, guest, report, paused_at))
            }
            // `migrate` pauses the guest before it succeeds.
            (Ok(_), None) => Err(Box::new(Failure { error: MigrationError::Cancelled, report })),
            (Err(error), paused_at) => {
                let error = run_on(guest, policy.throttle_percent(), paused_at, error);
                Err(Box::new(Failure { error, report }))
            }
        }
    }
}

/// Resumes the guest at full speed after a failure.
fn run_on(
    guest: &mut dyn Guest,
    throttle_percent: u8,
    paused_at: Option<Instant>,
    error: MigrationError,
) -> MigrationError {
    if throttle_percent > 0
        && let Err(error) = guest.throttle(0)
    {
        tracing::warn!("the guest stays throttled: {error}");
    }
    match paused_at.map(|_| guest.resume()) {
        Some(Err(source)) => MigrationError::Resume { first: Box::new(error), source },
        _ => error,
    }
}

/// A migration in progress.
struct Engine<'a> {
    config: Config,
    memory: &'a dyn SourceMemory,
    regions: Vec<PageRange>,
    guest: &'a mut dyn Guest,
    free_pages: Option<&'a mut dyn FreePageSource>,
    streams: Vec<Stream<'a>>,
    round_sync: &'a mut dyn RoundSync,
    observer: &'a mut dyn FnMut(&Progress),
    cancel: Cancel,
    started: Instant,
    report: Report,
    bandwidth: Bandwidth,
    policy: Policy,
    limiter: RateLimiter,
    sent_bytes: AtomicU64,
    /// Whether hints were requested before.
    asked: bool,
    /// When the guest was paused.
    paused_at: Option<Instant>,
}

impl<'a> Engine<'a> {
    /// Runs the whole migration. Dropping the tracker disarms the dirty source on every error.
    fn migrate(&mut self, dirty: &'a mut dyn DirtySource) -> Result<Tracker<'a>, MigrationError> {
        if self.streams.is_empty() {
            return Err(MigrationError::NoStreams);
        }
        self.check_cancel()?;
        self.publish(Phase::Arming, 0, None);
        let mut tracker = Tracker::arm(dirty, &self.regions)?;
        self.report.setup_ms = milliseconds(self.started.elapsed());

        let first = self.probe(&mut tracker)?;
        for round in first.. {
            let outcome = self.round_while_guest_runs(&mut tracker, round)?;
            match self.policy.after_round(outcome, self.bandwidth) {
                Next::Round => {}
                Next::Throttle(percent) => {
                    tracing::info!(
                        "the guest writes faster than memory can be sent: throttling its vCPUs by \
                         {percent} %"
                    );
                    if let Err(error) = self.guest.throttle(percent) {
                        tracing::warn!("the guest cannot be throttled: {error}");
                    }
                }
                Next::SwitchOver => {
                    self.last_round(&mut tracker, round + 1)?;
                    return Ok(tracker);
                }
                Next::GiveUp => return Err(self.time_limit(outcome.remaining_bytes)),
            }
        }
        // 32 bit round numbers last for years.
        Err(MigrationError::Cancelled)
    }

    /// Measures the link's bandwidth with a few pages if there is a source of hints. Returns the
    /// number of the next round.
    fn probe(&mut self, tracker: &mut Tracker<'_>) -> Result<u32, MigrationError> {
        let pages = self.config.probe_pages;
        if self.free_pages.is_none() || tracker.remaining_pages() / 4 < pages || pages == 0 {
            return Ok(0);
        }
        let start = RoundStart::now(self, tracker, 0);
        let feed = FirstPages { feed: tracker.round(), left: AtomicU64::new(pages) };
        let sent = self.send(0, RoundKind::More, &feed)?;
        self.end_round(tracker, start, (sent, Duration::ZERO))?;
        Ok(1)
    }

    /// Sends one round, waits for its confirmation and syncs the dirty log.
    fn round_while_guest_runs(
        &mut self,
        tracker: &mut Tracker<'_>,
        round: u32,
    ) -> Result<RoundOutcome, MigrationError> {
        let start = RoundStart::now(self, tracker, round);
        let asks = !self.asked || self.config.hint_rounds == HintRounds::Every;
        let hinted = if asks { self.hinted_round(tracker, round)? } else { None };
        let sent = if let Some(hinted) = hinted {
            hinted
        } else {
            (self.send(round, RoundKind::More, &tracker.round())?, Duration::ZERO)
        };
        self.end_round(tracker, start, sent)
    }

    /// Ends a round while the guest runs: waits for its confirmation and syncs the dirty log.
    fn end_round(
        &mut self,
        tracker: &mut Tracker<'_>,
        RoundStart { started, sent_before, mut detail }: RoundStart,
        (pages, hint_wait): (PageCounters, Duration),
    ) -> Result<RoundOutcome, MigrationError> {
        detail.pages = pages;
        self.confirm(detail.round, tracker.remaining_pages())?;
        let elapsed = started.elapsed();
        if let Err(error) = self.guest.flush() {
            tracing::warn!("the guest's data cannot be written back before it is paused: {error}");
        }
        detail.pages_written = tracker.sync()?;
        detail.bytes_sent = self.sent_bytes.load(Ordering::Relaxed) - sent_before;
        detail.total_ms = milliseconds(elapsed);
        detail.hint_wait_ms = milliseconds(hint_wait);
        self.record(detail, elapsed.saturating_sub(hint_wait));
        Ok(RoundOutcome {
            elapsed: self.started.elapsed(),
            sent_bytes: detail.bytes_sent,
            written_bytes: detail.pages_written * PAGE_SIZE_BYTES,
            remaining_bytes: tracker.remaining_pages() * PAGE_SIZE_BYTES,
        })
    }

    /// Sends a round with hints. Returns its pages and the time spent waiting for hints; `None` if
    /// hints cannot be requested.
    fn hinted_round(
        &mut self,
        tracker: &mut Tracker<'_>,
        round: u32,
    ) -> Result<Option<(PageCounters, Duration)>, MigrationError> {
        let Some(source) = self.free_pages.take() else { return Ok(None) };
        self.asked = true;
        let window = tracker.hint_window()?;
        let asked = RequestedHints(&mut *source);
        let result = match asked.0.start(window.receiver()) {
            Ok(()) => self
                .wait_for_hints(&window, round)
                .and_then(|wait| Ok((self.send(round, RoundKind::More, &window)?, wait)))
                .map(Some),
            Err(error) => {
                tracing::warn!("the guest's free pages are not known: {error}");
                self.report.hints_error = Some(error.to_string());
                Ok(None)
            }
        };
        asked.0.stop();
        let skipped = window.close();
        drop(asked);
        self.free_pages = Some(source);
        Ok(result?.map(|(pages, wait)| (PageCounters { skipped, ..pages }, wait)))
    }

    fn wait_for_hints(
        &mut self,
        window: &HintWindow<'_>,
        round: u32,
    ) -> Result<Duration, MigrationError> {
        let started = Instant::now();
        let mut deadline = HintDeadline::new(&self.config, self.bandwidth);
        loop {
            self.publish(Phase::Hints, round, Some(window));
            let waited = started.elapsed();
            let wait = self.config.hint_wait.saturating_sub(waited).min(HINT_POLL);
            if !deadline.keep_waiting(waited, window.skipped_pages()) || window.wait_for_end(wait) {
                return Ok(started.elapsed());
            }
            self.check_cancel()?;
            if self.config.time_limit.is_some_and(|limit| self.started.elapsed() >= limit.after) {
                return Ok(started.elapsed());
            }
        }
    }

    /// Pauses the guest and sends the rest.
    fn last_round(&mut self, tracker: &mut Tracker<'_>, round: u32) -> Result<(), MigrationError> {
        self.check_cancel()?;
        let paused_at = Instant::now();
        self.paused_at = Some(paused_at);
        self.guest.pause_and_save().map_err(MigrationError::Pause)?;
        let sent_before = self.sent_bytes.load(Ordering::Relaxed);
        let pages_written = tracker.sync()?;
        let mut detail = RoundReport {
            round,
            pages_to_send: tracker.remaining_pages(),
            pages_written,
            throttle_percent: self.policy.throttle_percent(),
            ..RoundReport::default()
        };
        detail.pages = self.send(round, RoundKind::Last, &tracker.last_round())?;
        self.confirm(round, 0)?;
        self.check_cancel()?;
        detail.bytes_sent = self.sent_bytes.load(Ordering::Relaxed) - sent_before;
        detail.total_ms = milliseconds(paused_at.elapsed());
        self.record(detail, paused_at.elapsed());
        self.publish(Phase::Sent, round, None);
        Ok(())
    }

    /// Sends the pages of a feed on all streams.
    fn send(
        &mut self,
        number: u32,
        kind: RoundKind,
        feed: &dyn PageFeed,
    ) -> Result<PageCounters, MigrationError> {
        let phase = if kind == RoundKind::Last { Phase::Final } else { Phase::Sending };
        self.publish(phase, number, Some(feed));
        let mut streams = std::mem::take(&mut self.streams);
        let state = State::of(self);
        let round = Round {
            number,
            kind,
            config: &self.config,
            memory: self.memory,
            regions: &self.regions,
            feed,
            limiter: &self.limiter,
            cancel: &self.cancel,
            sent_bytes: &self.sent_bytes,
        };
        let limit = self.config.time_limit.filter(|_| kind == RoundKind::More);
        let (observer, sent_bytes) = (&mut *self.observer, &self.sent_bytes);
        let mut poll = || {
            observer(&state.progress(
                phase,
                number,
                Some(feed),
                sent_bytes.load(Ordering::Relaxed),
            ));
            match limit {
                Some(limit) if state.started.elapsed() >= limit.after => match limit.then {
                    AtTimeLimit::Force => Ok(RoundControl::EndEarly),
                    AtTimeLimit::Cancel => {
                        let remaining_bytes = feed.remaining_pages() * PAGE_SIZE_BYTES;
                        Err(MigrationError::TimeLimit { limit: limit.after, remaining_bytes })
                    }
                },
                _ => Ok(RoundControl::Continue),
            }
        };
        let result = round.send(&mut streams, &mut poll);
        self.streams = streams;
        result
    }

    /// Waits until the destination confirms a round.
    fn confirm(&mut self, round: u32, remaining_pages: u64) -> Result<(), MigrationError> {
        let sent_bytes = self.sent_bytes.load(Ordering::Relaxed);
        let mut progress = State::of(self).progress(Phase::Acknowledging, round, None, sent_bytes);
        progress.remaining_bytes = remaining_pages * PAGE_SIZE_BYTES;
        (self.observer)(&progress);
        self.round_sync.wait_round_done(round).map_err(|source: BoxError| {
            if self.cancel.is_cancelled() {
                MigrationError::Cancelled
            } else {
                MigrationError::NotConfirmed { round, source }
            }
        })
    }

    /// Records a round that took `sending`, waits for hints excluded.
    fn record(&mut self, detail: RoundReport, sending: Duration) {
        let pages = detail.pages;
        let handled_bytes = (pages.data + pages.zero + pages.discarded) * PAGE_SIZE_BYTES;
        self.bandwidth.observe(detail.bytes_sent, handled_bytes, sending);
        self.report.pages += pages;
        self.report.rounds += 1;
        self.report.rounds_detail.push(detail);
    }

    fn close_report(&mut self) {
        self.report.total_ms = milliseconds(self.started.elapsed());
        self.report.downtime_ms =
            self.paused_at.map_or(0, |paused_at| milliseconds(paused_at.elapsed()));
        self.report.bytes_sent = self.sent_bytes.load(Ordering::Relaxed);
        self.report.bandwidth_bytes_per_s = self.bandwidth.bytes_per_s();
    }

    fn publish(&mut self, phase: Phase, round: u32, feed: Option<&dyn PageFeed>) {
        let sent_bytes = self.sent_bytes.load(Ordering::Relaxed);
        let progress = State::of(self).progress(phase, round, feed, sent_bytes);
        (self.observer)(&progress);
    }

    fn check_cancel(&self) -> Result<(), MigrationError> {
        if self.cancel.is_cancelled() { Err(MigrationError::Cancelled) } else { Ok(()) }
    }

    fn time_limit(&self, remaining_bytes: u64) -> MigrationError {
        let limit = self.config.time_limit.map_or(Duration::ZERO, |limit| limit.after);
        MigrationError::TimeLimit { limit, remaining_bytes }
    }
}

/// Start of a round.
struct RoundStart {
    started: Instant,
    sent_before: u64,
    detail: RoundReport,
}

impl RoundStart {
    fn now(engine: &Engine<'_>, tracker: &Tracker<'_>, round: u32) -> Self {
        let detail = RoundReport {
            round,
            pages_to_send: tracker.remaining_pages(),
            throttle_percent: engine.policy.throttle_percent(),
            ..RoundReport::default()
        };
        let sent_before = engine.sent_bytes.load(Ordering::Relaxed);
        Self { started: Instant::now(), sent_before, detail }
    }
}

/// Values that do not change while a round is sent.
#[derive(Clone, Copy)]
struct State {
    started: Instant,
    bandwidth: Bandwidth,
    throttle_percent: u8,
    pages: PageCounters,
}

impl State {
    fn of(engine: &Engine<'_>) -> Self {
        Self {
            started: engine.started,
            bandwidth: engine.bandwidth,
            throttle_percent: engine.policy.throttle_percent(),
            pages: engine.report.pages,
        }
    }

    fn progress(
        &self,
        phase: Phase,
        round: u32,
        feed: Option<&dyn PageFeed>,
        sent_bytes: u64,
    ) -> Progress {
        let remaining_bytes = feed.map_or(0, PageFeed::remaining_pages) * PAGE_SIZE_BYTES;
        let mut pages = self.pages;
        pages.skipped += feed.map_or(0, PageFeed::skipped_pages);
        Progress {
            phase,
            round,
            remaining_bytes,
            sent_bytes,
            bandwidth_bytes_per_s: self.bandwidth.bytes_per_s(),
            expected_downtime: self.bandwidth.time_for(remaining_bytes),
            throttle_percent: self.throttle_percent,
            elapsed: self.started.elapsed(),
            pages,
        }
    }
}

/// Hints that were requested. The guest gets its pages back when this is dropped.
struct RequestedHints<'a>(&'a mut dyn FreePageSource);

impl Drop for RequestedHints<'_> {
    fn drop(&mut self) {
        self.0.finish();
    }
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

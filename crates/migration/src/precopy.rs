//! Pre-copy: memory is sent while the guest runs, round after round, and the rest while it stands
//! still.

use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ebb_abi::migration::RoundKind;
use ebb_abi::{PAGE_SIZE_BYTES, PageRange};

use crate::decision::{Next, Policy, RoundOutcome};
use crate::patience::Patience;
use crate::progress::{PageCounters, Phase, Progress, Report, RoundReport};
use crate::rate::{Bandwidth, RateLimiter};
use crate::sender::{Look, Round, Stream};
use crate::tracker::FirstPages;
use crate::{
    AtTimeLimit, BoxError, Cancel, Config, DirtySource, Failure, FreePageSource, Guest, HintRounds,
    HintWindow, MigrationError, PageFeed, RoundSync, SourceMemory, Switchover, Tracker,
};

/// How long hints are waited for at a time.
const HINT_LOOK: Duration = Duration::from_millis(20);

/// A migration at its source, with all that it needs.
///
/// Without a time limit and without slowing the guest down, it goes on as long as the guest writes
/// faster than its memory can be sent.
pub struct Precopy<'a> {
    /// What was asked for.
    pub config: Config,
    /// The guest's memory.
    pub memory: &'a dyn SourceMemory,
    /// What is written to it. Not armed.
    pub dirty: &'a mut dyn DirtySource,
    /// The guest, running.
    pub guest: &'a mut dyn Guest,
    /// Whom to ask for free pages, if anybody.
    pub free_pages: Option<&'a mut dyn FreePageSource>,
    /// Data streams to the destination, at least one. Records are written with
    /// [`write_vectored`](Write::write_vectored).
    pub streams: Vec<Box<dyn Write + Send + 'a>>,
    /// Tells when the destination is through with a round.
    pub round_sync: &'a mut dyn RoundSync,
    /// Is told how far it is, some times a second and when something begins.
    pub observer: &'a mut dyn FnMut(&Progress),
    /// Calls it off. Its callbacks must make writes to the streams and waits for rounds return; the
    /// engine calls it by itself when one stream has failed and another is stuck.
    pub cancel: Cancel,
}

impl<'a> Precopy<'a> {
    /// Sends the guest's memory. When this returns without an error, the guest stands still, its
    /// state has been taken, and the destination has confirmed all of its memory.
    ///
    /// # Errors
    /// [`Failure`]; the guest runs, without the dirty log and with all of its pages, and nothing of
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

/// Lets the guest go on after a failure, as fast as it did before.
fn run_on(
    guest: &mut dyn Guest,
    throttle_percent: u8,
    paused_at: Option<Instant>,
    error: MigrationError,
) -> MigrationError {
    if throttle_percent > 0
        && let Err(error) = guest.throttle(0)
    {
        tracing::warn!("the guest stays slowed down: {error}");
    }
    match paused_at.map(|_| guest.resume()) {
        Some(Err(source)) => MigrationError::Resume { first: Box::new(error), source },
        _ => error,
    }
}

/// A migration that is going on.
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
    /// The guest has been asked for free pages.
    asked: bool,
    /// When the guest was told to stop.
    paused_at: Option<Instant>,
}

impl<'a> Engine<'a> {
    /// All of it. The tracker is dropped, and so the dirty source disarmed, on every error.
    fn migrate(&mut self, dirty: &'a mut dyn DirtySource) -> Result<Tracker<'a>, MigrationError> {
        if self.streams.is_empty() {
            return Err(MigrationError::NoStreams);
        }
        self.check_cancel()?;
        self.tell(Phase::Arming, 0, None);
        let mut tracker = Tracker::arm(dirty, &self.regions)?;
        self.report.setup_ms = milliseconds(self.started.elapsed());

        let first = self.probe(&mut tracker)?;
        for round in first.. {
            let outcome = self.round_while_guest_runs(&mut tracker, round)?;
            match self.policy.after_round(outcome, self.bandwidth) {
                Next::Round => {}
                Next::Throttle(percent) => {
                    tracing::info!(
                        "the guest writes faster than memory can be sent: taking {percent} % of its time"
                    );
                    if let Err(error) = self.guest.throttle(percent) {
                        tracing::warn!("the guest cannot be slowed down: {error}");
                    }
                }
                Next::SwitchOver => {
                    self.last_round(&mut tracker, round + 1)?;
                    return Ok(tracker);
                }
                Next::GiveUp => return Err(self.time_limit(outcome.remaining_bytes)),
            }
        }
        // Rounds are numbered with 32 bits, which last for years.
        Err(MigrationError::Cancelled)
    }

    /// Sends a little, to find out how fast that goes, if hints are to be waited for. Returns the
    /// number of the next round.
    fn probe(&mut self, tracker: &mut Tracker<'_>) -> Result<u32, MigrationError> {
        let pages = self.config.probe_pages;
        if self.free_pages.is_none() || tracker.remaining_pages() / 4 < pages || pages == 0 {
            return Ok(0);
        }
        let begun = Begun::now(self, tracker, 0);
        let feed = FirstPages { feed: tracker.round(), left: AtomicU64::new(pages) };
        let sent = self.send(0, RoundKind::More, &feed)?;
        self.end_round(tracker, begun, (sent, Duration::ZERO))?;
        Ok(1)
    }

    /// One round, its confirmation, and a look at what was written meanwhile.
    fn round_while_guest_runs(
        &mut self,
        tracker: &mut Tracker<'_>,
        round: u32,
    ) -> Result<RoundOutcome, MigrationError> {
        let begun = Begun::now(self, tracker, round);
        let asks = !self.asked || self.config.hint_rounds == HintRounds::Every;
        let hinted = if asks { self.hinted_round(tracker, round)? } else { None };
        let sent = if let Some(hinted) = hinted {
            hinted
        } else {
            (self.send(round, RoundKind::More, &tracker.round())?, Duration::ZERO)
        };
        self.end_round(tracker, begun, sent)
    }

    /// The end of a round while the guest runs: its confirmation, and a look at what was written
    /// meanwhile.
    fn end_round(
        &mut self,
        tracker: &mut Tracker<'_>,
        Begun { started, sent_before, mut detail }: Begun,
        (pages, hint_wait): (PageCounters, Duration),
    ) -> Result<RoundOutcome, MigrationError> {
        detail.pages = pages;
        self.confirm(detail.round, tracker.remaining_pages())?;
        let elapsed = started.elapsed();
        detail.pages_written = tracker.sync()?;
        detail.bytes_sent = self.sent_bytes.load(Ordering::Relaxed) - sent_before;
        detail.total_ms = milliseconds(elapsed);
        detail.hint_wait_ms = milliseconds(hint_wait);
        self.note(detail, elapsed.saturating_sub(hint_wait));
        Ok(RoundOutcome {
            elapsed: self.started.elapsed(),
            sent_bytes: detail.bytes_sent,
            written_bytes: detail.pages_written * PAGE_SIZE_BYTES,
            remaining_bytes: tracker.remaining_pages() * PAGE_SIZE_BYTES,
        })
    }

    /// A round in which the guest is asked for free pages; `None` if it cannot be. Returns the time
    /// without sending, too.
    fn hinted_round(
        &mut self,
        tracker: &mut Tracker<'_>,
        round: u32,
    ) -> Result<Option<(PageCounters, Duration)>, MigrationError> {
        let Some(source) = self.free_pages.take() else { return Ok(None) };
        self.asked = true;
        let window = tracker.hint_window()?;
        let asked = Asked(&mut *source);
        let result = match asked.0.start(window.receiver()) {
            Ok(()) => self
                .wait_for_hints(&window, round)
                .and_then(|wait| Ok((self.send(round, RoundKind::More, &window)?, wait)))
                .map(Some),
            Err(error) => {
                tracing::warn!("free pages of the guest are not known: {error}");
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
        let mut patience = Patience::new(&self.config, self.bandwidth);
        loop {
            self.tell(Phase::Hints, round, Some(window));
            let waited = started.elapsed();
            let look = self.config.hint_wait.saturating_sub(waited).min(HINT_LOOK);
            if !patience.goes_on(waited, window.skipped_pages()) || window.wait_for_end(look) {
                return Ok(started.elapsed());
            }
            self.check_cancel()?;
            if self.config.time_limit.is_some_and(|limit| self.started.elapsed() >= limit.after) {
                return Ok(started.elapsed());
            }
        }
    }

    /// Stops the guest and sends the rest.
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
        self.note(detail, paused_at.elapsed());
        self.tell(Phase::Sent, round, None);
        Ok(())
    }

    /// Sends what a feed has, on all streams.
    fn send(
        &mut self,
        number: u32,
        kind: RoundKind,
        feed: &dyn PageFeed,
    ) -> Result<PageCounters, MigrationError> {
        let phase = if kind == RoundKind::Last { Phase::Final } else { Phase::Sending };
        self.tell(phase, number, Some(feed));
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
        let mut look = || {
            observer(&state.progress(
                phase,
                number,
                Some(feed),
                sent_bytes.load(Ordering::Relaxed),
            ));
            match limit {
                Some(limit) if state.started.elapsed() >= limit.after => match limit.then {
                    AtTimeLimit::Force => Ok(Look::EndEarly),
                    AtTimeLimit::Cancel => {
                        let remaining_bytes = feed.remaining_pages() * PAGE_SIZE_BYTES;
                        Err(MigrationError::TimeLimit { limit: limit.after, remaining_bytes })
                    }
                },
                _ => Ok(Look::GoOn),
            }
        };
        let result = round.send(&mut streams, &mut look);
        self.streams = streams;
        result
    }

    /// Waits until the destination is through with a round.
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

    /// Writes a round down that took `sending` without waits for hints.
    fn note(&mut self, detail: RoundReport, sending: Duration) {
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

    fn tell(&mut self, phase: Phase, round: u32, feed: Option<&dyn PageFeed>) {
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

/// A round that has begun.
struct Begun {
    started: Instant,
    sent_before: u64,
    detail: RoundReport,
}

impl Begun {
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

/// What does not change while a round is sent.
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

/// Somebody who has been asked for free pages. The guest gets its pages back when this is dropped.
struct Asked<'a>(&'a mut dyn FreePageSource);

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        self.0.finish();
    }
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

//! Parking: makes an idle guest as small as it can be without harm, as a [task](super::task) of the
//! thread for migrations.
//!
//! What keeps an idle guest large is cold file caches, free memory that was not reported yet, and
//! zeros. The stages take them in this order. The first one is a pulse of the balloon: the guest's
//! own reclaim decides what it gives up, and everything that was in the balloon is discarded at the
//! host page by page, whatever its size. What is still free then, which no balloon takes, has just
//! been used for caches, so it is resident: the second one reports it, in fragments of any size.

mod pulse;

use std::time::{Duration, Instant};

use ebb_balloon::StatisticsValues;

use self::pulse::{Next, Sample, Unanswered};
use super::balloon::info;
use super::free_pages::reported_bytes;
use super::task::{Task, TaskKind, Ticket};
use super::{SharedTransport, Vm, lock};
use crate::api::balloon::{BalloonFeature, BalloonInfo, BalloonState};
use crate::api::control::{ControlError, Document, Outcome, Wait};
use crate::api::free_pages::{ReclaimRequest, RequestStatus};
use crate::api::park::{
    ParkReport, ParkRequest, ParkSince, ParkStage, ParkStageEnd, ParkStageName, ParkStatus,
};
use crate::api::vm::VmState;

/// Interval of looks for an answer of the guest.
const POLL: Duration = Duration::from_millis(5);
/// Time between looks at the balloon.
const LOOK: Duration = Duration::from_millis(20);
/// A balloon that has made no progress in so many looks, at least a second, makes none any more:
/// Linux's driver rests for 200 ms after a failed allocation (`fill_balloon`,
/// drivers/virtio/virtio_balloon.c). Looks are counted and not time, because a look waits while the
/// host discards what the guest has given, and the guest can give no more then.
const NO_PROGRESS_LOOKS: u32 = 50;
/// A guest that reports by itself and has not in so many looks, at least 2.5 s, has reported what it
/// can: Linux waits for two seconds after a block was freed (`PAGE_REPORTING_DELAY`,
/// mm/page_reporting.c).
const REPORTED_LOOKS: u32 = 125;

/// The last parking.
#[derive(Clone)]
pub(super) struct Parked {
    report: ParkReport,
    at: Instant,
    /// What the guest reported at its end.
    statistics: StatisticsValues,
}

/// How a stage ended.
struct Ended(ParkStageEnd, Option<String>);

impl Ended {
    const DONE: Self = Self(ParkStageEnd::Done, None);

    fn skipped(reason: impl Into<String>) -> Self {
        Self(ParkStageEnd::Skipped, Some(reason.into()))
    }

    fn stopped(reason: impl Into<String>) -> Self {
        Self(ParkStageEnd::Stopped, Some(reason.into()))
    }

    fn timeout(reason: impl Into<String>) -> Self {
        Self(ParkStageEnd::Timeout, Some(reason.into()))
    }
}

impl Vm {
    /// Passes the request to the thread.
    pub(super) fn ask_park(&self, request: ParkRequest) -> Result<Outcome, ControlError> {
        match self.state() {
            VmState::Running | VmState::Paused => {}
            state => return Err(ControlError::not_running(state)),
        }
        let memory_bytes = self.ram.size_bytes();
        if request.keep_bytes > memory_bytes {
            return Err(ControlError::Invalid {
                field: "keep_bytes",
                message: format!(
                    "{} bytes are more than the guest's memory, {memory_bytes} bytes",
                    request.keep_bytes
                ),
                remedy: Some("keep less".to_owned()),
            });
        }
        self.migrations.ask_task(Task::new(TaskKind::Park, move |vm, ticket| {
            vm.park(request, ticket).map(Document::Park)
        }))
    }

    /// The last parking, with the guest's current figures if it answers.
    pub(super) fn park_status(&self) -> Outcome {
        let Some(parked) = lock(&self.parked).clone() else {
            return Document::ParkStatus(ParkStatus { last: None, since: None }).into();
        };
        let mut statistics = match self.statistics(None) {
            Ok(Outcome::Await(wait)) => Some(wait),
            _ => None,
        };
        let ram = self.ram.clone();
        Outcome::Await(Wait::without_limit(move || {
            let now = match statistics.as_mut().map(Wait::poll) {
                Some(None) => return None,
                Some(Some(Ok(Document::Statistics(document)))) => document.statistics,
                _ => StatisticsValues::default(),
            };
            let since = parked.since(&now, ram.resident_bytes().unwrap_or(0));
            let last = Some(parked.report.clone());
            Some(Ok(Document::ParkStatus(ParkStatus { last, since: Some(since) })))
        }))
    }

    /// Carries out all stages.
    fn park(&self, request: ParkRequest, ticket: &Ticket) -> Result<ParkReport, ControlError> {
        let began = Instant::now();
        let deadline = began + Duration::from_millis(request.timeout_ms);
        let resident_before_bytes = self.resident_bytes();
        let mut stages = Vec::new();
        let mut resident_bytes = resident_before_bytes;
        for name in [ParkStageName::Evict, ParkStageName::Report, ParkStageName::Trim] {
            let stage_began = Instant::now();
            let Ended(end, reason) = if stage_began >= deadline {
                Ended::timeout("there was no time left")
            } else {
                match name {
                    ParkStageName::Evict if !request.evict => {
                        Ended::skipped("the request leaves it out")
                    }
                    ParkStageName::Evict => self.evict(request.keep_bytes, deadline, ticket),
                    ParkStageName::Report => {
                        let evict: Option<&ParkStage> = stages.first();
                        let is_evicted = evict.is_some_and(|it| it.end != ParkStageEnd::Skipped);
                        self.report_all(is_evicted, deadline, ticket)
                    }
                    ParkStageName::Trim => self.trim_all(deadline, ticket),
                }
            };
            if ticket.is_cancelled() {
                return Err(TaskKind::Park.cancelled());
            }
            let before = std::mem::replace(&mut resident_bytes, self.resident_bytes());
            stages.push(ParkStage {
                stage: name,
                end,
                reason,
                returned_bytes: before.saturating_sub(resident_bytes),
                elapsed_us: microseconds(stage_began),
            });
        }
        let elapsed_us = microseconds(began);
        let report = ParkReport { stages, resident_before_bytes, resident_bytes, elapsed_us };
        let statistics =
            self.sample(ticket).map_or_else(|_| StatisticsValues::default(), |it| it.statistics);
        *lock(&self.parked) =
            Some(Parked { report: report.clone(), at: Instant::now(), statistics });
        Ok(report)
    }

    fn resident_bytes(&self) -> u64 {
        self.ram.resident_bytes().unwrap_or(0)
    }

    /// Stage 1: the balloon takes what the guest can do without, and gives it back.
    fn evict(&self, keep_bytes: u64, deadline: Instant, ticket: &Ticket) -> Ended {
        let Some(transport) = &self.balloon else {
            return Ended::skipped(ControlError::NoBalloon.to_string());
        };
        let balloon = info(&lock(transport));
        let idle_bytes = balloon.target_bytes;
        match (balloon.state, balloon.poison, balloon.discard_inhibited) {
            (BalloonState::Idle, None | Some(0), None) => {}
            (BalloonState::DriverAbsent, ..) => {
                return Ended::skipped("no driver in the guest has initialized the balloon");
            }
            (BalloonState::Inflating | BalloonState::Deflating, ..) => {
                return Ended::skipped("the balloon has not reached its target");
            }
            (_, Some(1..), _) => {
                return Ended::skipped("the guest relies on the content of its free pages");
            }
            (.., Some(reason)) => return Ended::skipped(reason),
        }
        let first = match self.sample(ticket) {
            Ok(first) => first,
            Err(error) => return Ended::skipped(error.to_string()),
        };
        let mut pulse = Pulse { vm: self, transport, idle_bytes, target_bytes: idle_bytes };
        // Deflating takes about as long.
        let half = Instant::now() + deadline.saturating_duration_since(Instant::now()) / 2;
        let ended = pulse.inflate(&first, keep_bytes, half, ticket);
        if !pulse.end() {
            return changed();
        }
        match pulse.wait_for_deflation(deadline, ticket) {
            None => ended,
            Some(left) => left,
        }
    }

    /// Stage 2: what is free comes back, even if nothing else is possible.
    fn report_all(&self, is_evicted: bool, deadline: Instant, ticket: &Ticket) -> Ended {
        // A guest that does not answer must not cost the trim its time.
        let half = deadline.saturating_duration_since(Instant::now()) / 2;
        let timeout_ms = u64::try_from(half.as_millis()).unwrap_or(u64::MAX).max(1);
        let answer = self
            .reclaim(ReclaimRequest { timeout_ms, min_order: 0 })
            .and_then(|outcome| finish(outcome, ticket));
        match answer {
            Ok(Document::Reclaim(report)) => match report.status {
                RequestStatus::Done => Ended::DONE,
                RequestStatus::Aborted => Ended::stopped("the guest could not report; see its log"),
                RequestStatus::Timeout => Ended::timeout("the guest did not answer in time"),
                RequestStatus::Reset => Ended::stopped("the guest's driver was reset"),
            },
            Ok(_) => Ended::DONE,
            // A balloon that was inflated has returned all that Linux would report by itself.
            Err(_) if !is_evicted && self.reports_by_itself() => {
                self.wait_for_reports(deadline, ticket)
            }
            Err(error) => Ended::skipped(error.to_string()),
        }
    }

    /// Whether the guest runs, and has a driver that reports free pages but not on request.
    fn reports_by_itself(&self) -> bool {
        let reports = |balloon: BalloonInfo| {
            let has = |feature| balloon.negotiated_features.contains(&feature);
            has(BalloonFeature::PageReporting) && !has(BalloonFeature::ReportRequest)
        };
        self.state() == VmState::Running && self.balloon_info().is_ok_and(reports)
    }

    /// Waits until the guest's kernel has nothing more to report.
    fn wait_for_reports(&self, deadline: Instant, ticket: &Ticket) -> Ended {
        let Some(transport) = &self.balloon else { return Ended::DONE };
        let (mut bytes, mut unchanged) = (0, 0);
        while unchanged < REPORTED_LOOKS {
            let last = bytes;
            bytes = reported_bytes(lock(transport).device().balloon());
            unchanged = if bytes == last { unchanged + 1 } else { 0 };
            if Instant::now() >= deadline || ticket.is_cancelled() {
                return Ended::timeout("the guest goes on to report free memory");
            }
            std::thread::park_timeout(LOOK);
        }
        Ended::DONE
    }

    /// Stage 3: all of memory is searched for zeros.
    fn trim_all(&self, deadline: Instant, ticket: &Ticket) -> Ended {
        *lock(&self.trim_cursor) = 0;
        loop {
            match self.trim_some() {
                Ok(part) if part.complete => {
                    // Of no use before: each stage discards parts of huge pages.
                    self.ram.free_rest_of_huge_pages();
                    return Ended::DONE;
                }
                Ok(_) if Instant::now() >= deadline || ticket.is_cancelled() => {
                    return Ended::timeout("a part of memory was not searched");
                }
                Ok(_) => {}
                Err(error) => return Ended::stopped(error.to_string()),
            }
        }
    }

    /// Fresh figures of the guest.
    fn sample(&self, ticket: &Ticket) -> Result<Sample, ControlError> {
        let Document::Statistics(document) = finish(self.statistics(None)?, ticket)? else {
            return Err(ControlError::failed("the guest's statistics are missing"));
        };
        let balloon = self.balloon_info()?;
        // A bare buffer of Linux's driver has 256 pages, but one message may have all that is still
        // to be taken.
        let has_messages = [BalloonFeature::PageBitmap, BalloonFeature::PageRanges]
            .iter()
            .any(|feature| balloon.negotiated_features.contains(feature));
        let rest = balloon.target_bytes.saturating_sub(balloon.actual_bytes);
        Ok(Sample {
            statistics: document.statistics,
            balloon_bytes: balloon.actual_bytes,
            on_the_way_bytes: if has_messages { rest } else { 0 },
        })
    }
}

impl Parked {
    fn since(&self, now: &StatisticsValues, resident_bytes: u64) -> ParkSince {
        let grown = |value: fn(&StatisticsValues) -> Option<u64>| {
            Some(value(now)?.saturating_sub(value(&self.statistics)?))
        };
        ParkSince {
            elapsed_ms: u64::try_from(self.at.elapsed().as_millis()).unwrap_or(u64::MAX),
            resident_bytes,
            major_faults: grown(|values| values.major_faults),
            caches_grown_bytes: grown(|values| values.disk_caches_bytes),
            swapped_in_bytes: grown(|values| values.swap_in_bytes),
        }
    }
}

/// Another client has set the balloon's target.
fn changed() -> Ended {
    Ended::stopped("the balloon's target was changed")
}

/// A balloon that is larger than its user wanted. Dropping it gives the memory back to the guest.
struct Pulse<'a> {
    vm: &'a Vm,
    transport: &'a SharedTransport,
    /// The target before and after.
    idle_bytes: u64,
    /// The target now.
    target_bytes: u64,
}

impl Pulse<'_> {
    fn inflate(
        &mut self,
        first: &Sample,
        keep_bytes: u64,
        deadline: Instant,
        ticket: &Ticket,
    ) -> Ended {
        let (mut last, mut now) = (*first, *first);
        let mut unchanged = 0;
        loop {
            match pulse::next(first, &last, &now, self.target_bytes, keep_bytes, unchanged) {
                Next::Inflate(bytes) => {
                    let target_bytes = bytes.min(self.vm.ram.size_bytes());
                    if target_bytes <= self.target_bytes {
                        return Ended::DONE;
                    }
                    match self.set(target_bytes) {
                        Ok(true) => {}
                        Ok(false) => return changed(),
                        Err(error) => return Ended::stopped(error.to_string()),
                    }
                    unchanged = 0;
                }
                Next::Wait => {}
                Next::Done => return Ended::DONE,
                Next::Needed(reason) => {
                    return Ended::stopped(format!("the guest needs memory: {reason}"));
                }
                Next::Unknown(what) => {
                    return Ended::skipped(format!("the guest does not report its {what}"));
                }
            }
            if unchanged == NO_PROGRESS_LOOKS {
                return Ended(ParkStageEnd::Done, Some("the guest gives no more".to_owned()));
            }
            if Instant::now() >= deadline {
                return Ended::timeout("the guest could have given more");
            }
            last = now;
            now = match self.look(deadline, ticket) {
                Ok(sample) => sample,
                Err(ended) => return ended,
            };
            unchanged = if pulse::has_progressed(&last, &now) { 0 } else { unchanged + 1 };
        }
    }

    /// The guest's figures after a moment; or why there are none.
    fn look(&self, deadline: Instant, ticket: &Ticket) -> Result<Sample, Ended> {
        let mut unanswered = Unanswered::new(info(&lock(self.transport)).actual_bytes);
        loop {
            std::thread::park_timeout(LOOK);
            let sample = self.vm.sample(ticket);
            let balloon = info(&lock(self.transport));
            if balloon.target_bytes != self.target_bytes {
                return Err(changed());
            }
            let error = match sample {
                Ok(sample) => return Ok(sample),
                Err(error) => error,
            };
            let is_late = error.is_unanswered() && unanswered.is_late(balloon.actual_bytes);
            if !is_late || Instant::now() >= deadline {
                return Err(Ended::stopped(error.to_string()));
            }
        }
    }

    /// Sets the target, unless another client has; returns whether it did.
    fn set(&mut self, target_bytes: u64) -> Result<bool, ControlError> {
        let is_ours = self.vm.change_balloon(Some(self.target_bytes), target_bytes)?;
        if is_ours {
            self.target_bytes = target_bytes;
        }
        Ok(is_ours)
    }

    /// Gives the memory back, unless the target is another one by now; returns whether it is not.
    fn end(&mut self) -> bool {
        if self.target_bytes != self.idle_bytes {
            // What is kept back for a whole huge page would not be discarded after it has left.
            lock(self.transport).device_mut().flush();
        }
        // An error means that the machine has become another monitor's.
        self.set(self.idle_bytes).unwrap_or(true)
    }

    /// Waits until the guest has its memory back; returns why it has not.
    fn wait_for_deflation(&self, deadline: Instant, ticket: &Ticket) -> Option<Ended> {
        let (mut size, mut unchanged) = (u64::MAX, 0);
        loop {
            let balloon = info(&lock(self.transport));
            if balloon.actual_bytes <= self.idle_bytes || ticket.is_cancelled() {
                return None;
            }
            unchanged = if balloon.actual_bytes == size { unchanged + 1 } else { 0 };
            size = balloon.actual_bytes;
            let rest = || format!("{} bytes are still in the balloon", size - self.idle_bytes);
            if Instant::now() >= deadline {
                return Some(Ended::timeout(rest()));
            }
            if unchanged == NO_PROGRESS_LOOKS {
                return Some(Ended::stopped(rest()));
            }
            std::thread::park_timeout(LOOK);
        }
    }
}

impl Drop for Pulse<'_> {
    fn drop(&mut self) {
        let _ = self.end();
    }
}

/// Waits for an answer. A cancelled task waits no longer.
fn finish(outcome: Outcome, ticket: &Ticket) -> Result<Document, ControlError> {
    let mut wait = match outcome {
        Outcome::Done(document) => return Ok(*document),
        Outcome::Await(wait) => wait,
    };
    loop {
        if let Some(answer) = wait.poll() {
            return answer;
        }
        if ticket.is_cancelled() {
            return Err(TaskKind::Park.cancelled());
        }
        std::thread::park_timeout(POLL);
    }
}

fn microseconds(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX)
}

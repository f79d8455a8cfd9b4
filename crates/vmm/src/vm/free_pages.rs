//! Requests about the guest's free pages, on behalf of the API.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ebb_abi::Order;
use ebb_abi::balloon::QueueKind;
use ebb_balloon::{Balloon, BalloonError, FreePageCollector, HintEnd};
use ebb_guest_ram::GuestRam;

use super::{SharedTransport, lock};
use crate::api::control::{ControlError, Document, TimeLeft, Wait};
use crate::api::free_pages::{
    FreeBlocks, FreePagesReport, FreePagesRequest, MessageEncodings, ReclaimReport, ReclaimRequest,
    RequestStatus,
};

/// What the guest is to do with its free pages.
#[derive(Clone, Copy)]
pub(super) enum Wish {
    /// Name them.
    Names(FreePagesRequest),
    /// Report them.
    Reports(ReclaimRequest),
}

/// A request in progress.
pub(super) struct Question {
    transport: SharedTransport,
    ram: Arc<GuestRam>,
    collector: FreePageCollector,
    request_id: u64,
    wish: Wish,
    before: Before,
    asked_at: Instant,
}

/// Figures from before a request.
struct Before {
    reported_bytes: u64,
    resident_bytes: u64,
}

impl Question {
    /// Sends the request. The device is locked only for that.
    pub(super) fn ask(
        wish: Wish,
        transport: &SharedTransport,
        ram: &Arc<GuestRam>,
    ) -> Result<Self, ControlError> {
        let collector = FreePageCollector::new(ram);
        let resident_bytes = ram.resident_bytes().unwrap_or(0);
        let asked_at = Instant::now();
        let mut locked = lock(transport);
        let device = locked.device_mut();
        let before = Before { reported_bytes: reported_bytes(device.balloon()), resident_bytes };
        let sink = Box::new(collector.clone());
        let asked = match wish {
            Wish::Names(request) => device.request_free_pages(Order(request.min_order), sink),
            Wish::Reports(request) => device.request_report(Order(request.min_order), sink),
        };
        let (request_id, mut interrupt) = asked.map_err(|error| refused(wish, &error))?;
        let balloon = device.balloon_mut();
        // Statistics for comparison; guests without them are asked for free pages all the same.
        if matches!(wish, Wish::Names(_)) && balloon.queue_index(QueueKind::Statistics).is_some() {
            interrupt |= balloon.request_statistics();
        }
        if interrupt {
            locked.interrupt_used();
        }
        drop(locked);
        let (transport, ram) = (transport.clone(), ram.clone());
        Ok(Self { transport, ram, collector, request_id, wish, before, asked_at })
    }

    /// Waits for the answer; the request is withdrawn after the time limit.
    pub(super) fn wait(self) -> Wait {
        let timeout_ms = match self.wish {
            Wish::Names(request) => request.timeout_ms,
            Wish::Reports(request) => request.timeout_ms,
        };
        Wait::until(self.asked_at + Duration::from_millis(timeout_ms), move |left| {
            Some(Ok(match left {
                TimeLeft::Some => self.report()?,
                TimeLeft::None => self.give_up(),
            }))
        })
    }

    /// The guest's answer, once it is complete; `None` before.
    fn report(&self) -> Option<Document> {
        self.collector.answer().end.map(|(end, ended_at)| self.describe(end, ended_at))
    }

    /// Withdraws the request, unless it has just ended; returns the answer so far.
    fn give_up(&self) -> Document {
        self.withdraw();
        let (end, ended_at) =
            self.collector.answer().end.unwrap_or((HintEnd::Cancelled, Instant::now()));
        self.describe(end, ended_at)
    }

    fn withdraw(&self) {
        let mut transport = lock(&self.transport);
        if transport.device_mut().cancel_request(self.request_id) {
            transport.interrupt_used();
        }
    }

    fn describe(&self, end: HintEnd, ended_at: Instant) -> Document {
        let status = match end {
            HintEnd::Complete => RequestStatus::Done,
            HintEnd::Aborted => RequestStatus::Aborted,
            HintEnd::Cancelled => RequestStatus::Timeout,
            HintEnd::Reset => RequestStatus::Reset,
        };
        let elapsed = ended_at.saturating_duration_since(self.asked_at);
        let elapsed_us = u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX);
        match self.wish {
            Wish::Names(request) => {
                Document::FreePages(self.describe_names(request, status, elapsed_us))
            }
            Wish::Reports(request) => {
                let reported_bytes = reported_bytes(lock(&self.transport).device().balloon());
                Document::Reclaim(ReclaimReport {
                    request_id: self.request_id,
                    status,
                    min_order: request.min_order,
                    reported_bytes: reported_bytes.saturating_sub(self.before.reported_bytes),
                    resident_before_bytes: self.before.resident_bytes,
                    resident_bytes: self.ram.resident_bytes().unwrap_or(0),
                    elapsed_us,
                })
            }
        }
    }

    fn describe_names(
        &self,
        request: FreePagesRequest,
        status: RequestStatus,
        elapsed_us: u64,
    ) -> FreePagesReport {
        let (summary, answer) = (self.collector.summary(), self.collector.answer());
        let statistics = lock(&self.transport).device().balloon().statistics();
        let free_memory_bytes = statistics.values.free_memory_bytes;
        let by_order: Vec<_> = (0..)
            .zip(summary.blocks)
            .filter(|(_, blocks)| *blocks > 0)
            .map(|(order, blocks)| {
                let block_bytes = Order(order).bytes();
                FreeBlocks { order, block_bytes, blocks, bytes: blocks * block_bytes }
            })
            .collect();
        let encodings = answer.encodings;
        FreePagesReport {
            request_id: self.request_id,
            status,
            min_order: request.min_order,
            bytes: summary.bytes,
            blocks: summary.blocks.iter().sum(),
            ranges: summary.ranges,
            largest_range_bytes: summary.largest_range_bytes,
            by_order,
            poisoned_bytes: answer.poisoned_bytes,
            memory_bytes: self.ram.size_bytes(),
            free_memory_bytes,
            free_memory_age_ms: statistics.age_ms.filter(|_| free_memory_bytes.is_some()),
            coverage_percent: free_memory_bytes
                .filter(|free| *free > 0)
                .map(|free| (summary.bytes as f64 / free as f64 * 1000.0).round() / 10.0),
            messages: encodings.pfns + encodings.bitmaps + encodings.ranges,
            encodings: MessageEncodings {
                pfns: encodings.pfns,
                bitmaps: encodings.bitmaps,
                ranges: encodings.ranges,
            },
            message_bytes: answer.message_bytes,
            translate_ns: answer.translate_ns,
            elapsed_us,
        }
    }
}

/// Memory that the guest has reported, in bytes.
pub(super) fn reported_bytes(balloon: &Balloon) -> u64 {
    balloon.counters().reporting.bytes
}

/// The error for a refused request.
fn refused(wish: Wish, error: &BalloonError) -> ControlError {
    match (wish, error) {
        (_, BalloonError::RequestActive) => {
            ControlError::wrong_state(error.to_string(), "ask again when it has answered")
        }
        (Wish::Reports(_), _) => ControlError::wrong_state(
            "the guest's balloon driver cannot report its free pages on request",
            "start with --balloon reporting=on,host_requests=on and use a driver that supports \
             this, such as ebb_balloon; other drivers report by themselves, within seconds",
        ),
        _ => ControlError::wrong_state(
            "the guest's balloon driver has not negotiated host requests",
            "start with --balloon host_requests=on and use a driver that supports them, such as \
             ebb_balloon",
        ),
    }
}

impl Drop for Question {
    fn drop(&mut self) {
        if self.collector.answer().end.is_none() {
            self.withdraw();
        }
    }
}

#[cfg(test)]
mod tests;

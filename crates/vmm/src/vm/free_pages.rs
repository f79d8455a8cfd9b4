//! Requests for the guest's free pages, on behalf of the API.

use std::time::{Duration, Instant};

use ebb_abi::Order;
use ebb_abi::balloon::QueueKind;
use ebb_balloon::{BalloonError, FreePageCollector, HintEnd};

use super::{SharedTransport, lock};
use crate::api::control::{ControlError, Document, TimeLeft, Wait};
use crate::api::free_pages::{
    FreeBlocks, FreePagesReport, FreePagesRequest, FreePagesStatus, MessageEncodings,
};

/// A request in progress.
pub(super) struct Question {
    transport: SharedTransport,
    collector: FreePageCollector,
    request_id: u64,
    request: FreePagesRequest,
    memory_bytes: u64,
    asked_at: Instant,
}

impl Question {
    /// Sends the request. The device is locked only for that.
    pub(super) fn ask(
        request: FreePagesRequest,
        transport: &SharedTransport,
        ram: &ebb_guest_ram::GuestRam,
    ) -> Result<Self, ControlError> {
        let collector = FreePageCollector::new(ram);
        let asked_at = Instant::now();
        let mut locked = lock(transport);
        let device = locked.device_mut();
        let (request_id, mut interrupt) = device
            .request_free_pages(Order(request.min_order), Box::new(collector.clone()))
            .map_err(|error| refused(&error))?;
        let balloon = device.balloon_mut();
        // Statistics for comparison; guests without them are asked for free pages all the same.
        if balloon.queue_index(QueueKind::Statistics).is_some() {
            interrupt |= balloon.request_statistics();
        }
        if interrupt {
            locked.interrupt_used();
        }
        Ok(Self {
            transport: transport.clone(),
            collector,
            request_id,
            request,
            memory_bytes: ram.size_bytes(),
            asked_at,
        })
    }

    /// Waits for the answer; the request is withdrawn after the time limit.
    pub(super) fn wait(self) -> Wait {
        let deadline = self.asked_at + Duration::from_millis(self.request.timeout_ms);
        Wait::until(deadline, move |left| {
            let report = match left {
                TimeLeft::Some => self.report()?,
                TimeLeft::None => self.give_up(),
            };
            Some(Ok(Document::FreePages(report)))
        })
    }

    /// The guest's answer, once it is complete; `None` before.
    fn report(&self) -> Option<FreePagesReport> {
        self.collector.answer().end.map(|(end, ended_at)| self.describe(end, ended_at))
    }

    /// Withdraws the request, unless it has just ended; returns the answer so far.
    fn give_up(&self) -> FreePagesReport {
        self.withdraw();
        let (end, ended_at) =
            self.collector.answer().end.unwrap_or((HintEnd::Cancelled, Instant::now()));
        self.describe(end, ended_at)
    }

    fn withdraw(&self) {
        let mut transport = lock(&self.transport);
        if transport.device_mut().cancel_free_pages(self.request_id) {
            transport.interrupt_used();
        }
    }

    fn describe(&self, end: HintEnd, ended_at: Instant) -> FreePagesReport {
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
            status: match end {
                HintEnd::Complete => FreePagesStatus::Done,
                HintEnd::Aborted => FreePagesStatus::Aborted,
                HintEnd::Cancelled => FreePagesStatus::Timeout,
                HintEnd::Reset => FreePagesStatus::Reset,
            },
            min_order: self.request.min_order,
            bytes: summary.bytes,
            blocks: summary.blocks.iter().sum(),
            ranges: summary.ranges,
            largest_range_bytes: summary.largest_range_bytes,
            by_order,
            poisoned_bytes: answer.poisoned_bytes,
            memory_bytes: self.memory_bytes,
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
            elapsed_us: u64::try_from(
                ended_at.saturating_duration_since(self.asked_at).as_micros(),
            )
            .unwrap_or(u64::MAX),
        }
    }
}

/// The error for a refused request.
fn refused(error: &BalloonError) -> ControlError {
    match error {
        BalloonError::RequestActive => {
            ControlError::wrong_state(error.to_string(), "ask again when it has answered")
        }
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

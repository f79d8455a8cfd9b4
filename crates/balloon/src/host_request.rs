//! The host request queue (docs/extension.md, "Host requests").
//!
//! The driver leaves a buffer with the device. For a request of the owner, the device writes it,
//! with a number, into the buffer and returns it; the driver answers with messages. There are two
//! kinds. Free pages that the driver names may be in use again by the time they are read, as with
//! free page hinting, so they go to a [`HintSink`] and are never discarded. Or the driver reports
//! its free pages on the reporting queue, where they are discarded, and the answer names none.

use ebb_abi::balloon::extension::{
    AnswerStatus, HostRequest, MAX_PAGE_SHIFT, Purpose, REQUEST_BYTES,
};
use ebb_abi::balloon::{Feature, Features, QueueKind};
use ebb_abi::{Order, PAGE_SHIFT};
use ebb_guest_ram::GuestMemory;
use serde::{Deserialize, Serialize};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

use crate::budget::Budget;
use crate::chain::{Chain, ChainReader, Directions};
use crate::counters::GuestError;
use crate::message::{Message, Verdict};
use crate::queue::DeviceQueue;
use crate::{AnswerMessage, Balloon, BalloonError, HintEnd, HintSink, Progress};

/// Maximum number of pieces of a request buffer: one per byte.
const MAX_PIECES: usize = REQUEST_BYTES;

/// What a request wants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum RequestKind {
    /// The driver names its free pages.
    #[default]
    FreePages,
    /// The driver reports its free pages and answers when the device has taken them.
    Report,
}

impl RequestKind {
    /// The feature that the driver must have negotiated.
    const fn feature(self) -> Feature {
        match self {
            Self::FreePages => Feature::HostRequest,
            Self::Report => Feature::ReportRequest,
        }
    }
}

/// State of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RequestPhase {
    /// No request is active.
    #[default]
    Idle,
    /// The driver has not left a buffer for the request yet.
    Waiting,
    /// The request is sent and the driver has not begun to answer.
    Sent,
    /// The driver is answering.
    Answering,
}

/// Location of a request buffer in guest memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestBuffer {
    /// Head of the chain.
    pub head: u16,
    /// Guest-physical addresses and lengths in bytes of the pieces of the buffer's first
    /// [`REQUEST_BYTES`].
    pub pieces: Vec<(u64, u32)>,
}

impl RequestBuffer {
    /// Whether a whole request can be written.
    pub(crate) fn is_usable(&self, memory: &GuestMemory) -> bool {
        let inside = |(address, length): &(u64, u32)| {
            memory.check_range(GuestAddress(*address), *length as usize)
        };
        let bytes: u64 = self.pieces.iter().map(|(_, length)| u64::from(*length)).sum();
        self.pieces.len() <= MAX_PIECES
            && bytes == REQUEST_BYTES as u64
            && self.pieces.iter().all(inside)
    }

    fn write(
        &self,
        memory: &GuestMemory,
        request: HostRequest,
    ) -> Result<(), vm_memory::GuestMemoryError> {
        let bytes = request.to_bytes();
        let mut rest = &bytes[..];
        for (address, length) in &self.pieces {
            let (piece, after) = rest.split_at((*length as usize).min(rest.len()));
            memory.write_slice(piece, GuestAddress(*address))?;
            rest = after;
        }
        Ok(())
    }
}

/// The state machine.
#[derive(Default)]
pub(crate) struct HostRequests {
    phase: RequestPhase,
    /// Number of the latest request.
    pub(crate) last_id: u64,
    kind: RequestKind,
    page_shift: u32,
    /// The buffer that the driver left.
    pub(crate) buffer: Option<RequestBuffer>,
    /// A request that the owner cancelled and that the driver may still be answering.
    withdrawn: Option<u64>,
    sink: Option<Box<dyn HintSink>>,
}

impl std::fmt::Debug for HostRequests {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("HostRequests")
            .field("phase", &self.phase)
            .field("last_id", &self.last_id)
            .field("buffer", &self.buffer)
            .field("withdrawn", &self.withdrawn)
            .finish_non_exhaustive()
    }
}

impl HostRequests {
    pub(crate) fn phase(&self) -> RequestPhase {
        self.phase
    }

    /// The message to send once there is a buffer.
    fn wanted(&self) -> Option<HostRequest> {
        let withdrawn = self.withdrawn.map(|request_id| HostRequest::Cancel { request_id });
        match self.phase {
            RequestPhase::Waiting => {
                let (request_id, page_shift) = (self.last_id, self.page_shift);
                Some(match self.kind {
                    RequestKind::FreePages => HostRequest::FreePages { request_id, page_shift },
                    RequestKind::Report => HostRequest::Report { request_id, page_shift },
                })
            }
            RequestPhase::Idle => withdrawn,
            RequestPhase::Sent | RequestPhase::Answering => None,
        }
    }

    /// Records that a request was sent. It ends earlier answers.
    fn sent(&mut self) {
        self.withdrawn = None;
        if self.phase == RequestPhase::Waiting {
            self.phase = RequestPhase::Sent;
        }
    }

    /// Whether this is the active request; its first message starts the answer.
    fn accept(&mut self, request_id: u64) -> bool {
        let in_force = matches!(self.phase, RequestPhase::Sent | RequestPhase::Answering);
        let accepted = in_force && request_id == self.last_id;
        if accepted {
            self.phase = RequestPhase::Answering;
        }
        accepted
    }

    fn end(&mut self, end: HintEnd) {
        self.phase = RequestPhase::Idle;
        if let Some(mut sink) = self.sink.take() {
            sink.ended(end);
        }
    }

    /// Drops the driver's state. Numbering continues.
    pub(crate) fn reset(&mut self) {
        self.buffer = None;
        self.withdrawn = None;
        self.end(HintEnd::Reset);
    }
}

impl Balloon {
    /// Requests the free blocks of at least this order from the driver; `sink` receives them.
    /// Returns whether the interrupt of the host request queue must be raised.
    ///
    /// The guest may never answer: the caller sets a time limit and calls
    /// [`cancel_request`](Self::cancel_request). If a migration is to skip pages because of the
    /// answer, writes to memory must be recorded from before this call on.
    ///
    /// # Errors
    /// [`BalloonError::NotNegotiated`], [`BalloonError::RequestActive`].
    pub fn request_free_pages(
        &mut self,
        smallest: Order,
        sink: Box<dyn HintSink>,
    ) -> Result<bool, BalloonError> {
        self.request(RequestKind::FreePages, smallest, sink)
    }

    /// Requests that the driver reports its free blocks of at least this order at once. `sink`
    /// receives only the end: what was reported is discarded by then. Otherwise as
    /// [`request_free_pages`](Self::request_free_pages).
    ///
    /// # Errors
    /// [`BalloonError::NotNegotiated`], [`BalloonError::RequestActive`].
    pub fn request_report(
        &mut self,
        smallest: Order,
        sink: Box<dyn HintSink>,
    ) -> Result<bool, BalloonError> {
        self.request(RequestKind::Report, smallest, sink)
    }

    fn request(
        &mut self,
        kind: RequestKind,
        smallest: Order,
        sink: Box<dyn HintSink>,
    ) -> Result<bool, BalloonError> {
        let feature = kind.feature();
        let has_queue = self.queue_index(QueueKind::HostRequest).is_some();
        if !has_queue || !self.negotiated().contains(feature) {
            return Err(BalloonError::NotNegotiated { feature: feature.name() });
        }
        let requests = &mut self.requests;
        if requests.phase != RequestPhase::Idle {
            return Err(BalloonError::RequestActive);
        }
        requests.last_id = requests.last_id.saturating_add(1);
        requests.kind = kind;
        requests.page_shift = (PAGE_SHIFT + u32::from(smallest.0)).min(MAX_PAGE_SHIFT);
        requests.phase = RequestPhase::Waiting;
        requests.sink = Some(sink);
        Ok(self.send_request_now())
    }

    /// Cancels the active request, if any: further answers are ignored. Must be called at the end
    /// of a time limit, and when the requester has ended. Returns whether the interrupt of the host
    /// request queue must be raised.
    pub fn cancel_request(&mut self) -> bool {
        let requests = &mut self.requests;
        match requests.phase {
            RequestPhase::Idle => return false,
            RequestPhase::Waiting => {}
            RequestPhase::Sent | RequestPhase::Answering => {
                requests.withdrawn = Some(requests.last_id);
            }
        }
        requests.end(HintEnd::Cancelled);
        self.counters.requests.cancelled += 1;
        self.send_request_now()
    }

    /// Number of the latest request, which may have ended; 0 if none was ever made.
    pub fn last_request_id(&self) -> u64 {
        self.requests.last_id
    }

    /// State of the request.
    pub fn request_phase(&self) -> RequestPhase {
        self.requests.phase()
    }

    /// Sends the pending message, outside of the queue's processing; returns whether the queue's
    /// interrupt must be raised.
    fn send_request_now(&mut self) -> bool {
        let Some(mut active) = self.active.take() else { return false };
        let mut interrupt = false;
        if let Some(queue) = active.queue_mut(QueueKind::HostRequest) {
            self.send_request(queue);
            interrupt = queue.wants_interrupt(self.ram.memory());
        }
        self.active = Some(active);
        interrupt
    }

    /// Sends the pending message if the driver left a buffer for it.
    fn send_request(&mut self, queue: &mut DeviceQueue) {
        let Some(request) = self.requests.wanted() else { return };
        let Some(buffer) = self.requests.buffer.take() else { return };
        let memory = self.ram.memory();
        if let Err(error) = buffer.write(memory, request) {
            self.faults.count(GuestError::ShortRequestBuffer, error);
            queue.complete(memory, buffer.head, &mut self.faults);
            return;
        }
        queue.complete_written(memory, buffer.head, REQUEST_BYTES as u32, &mut self.faults);
        self.requests.sent();
        self.counters.requests.sent += u64::from(!matches!(request, HostRequest::Cancel { .. }));
    }

    pub(crate) fn process_host_requests(
        &mut self,
        queue: &mut DeviceQueue,
        negotiated: Features,
    ) -> Progress {
        let ram = self.ram.clone();
        let mut budget = Budget::new();
        loop {
            let mut message = if let Some(message) = queue.take_message() {
                message
            } else {
                let next = queue.next_chain(ram.memory(), &mut budget, &mut self.faults);
                let Some(chain) = next else { break };
                // A chain is a buffer or a message, depending on the first descriptor's direction.
                if chain.clone().next().is_some_and(|descriptor| descriptor.is_write_only()) {
                    self.receive_buffer(chain, queue, &mut budget);
                    continue;
                }
                self.read_timed_message(chain, QueueKind::HostRequest, negotiated, &mut budget)
            };
            self.receive_answer(&mut message, negotiated, &mut budget);
            if !message.is_finished() {
                queue.keep(message);
                break;
            }
            let head = message.head;
            self.finish_answer(message);
            queue.complete(ram.memory(), head, &mut self.faults);
        }
        queue.finish_round(ram.memory(), &budget, &mut self.faults)
    }

    /// Takes a request buffer of the driver.
    fn receive_buffer(&mut self, chain: Chain<'_>, queue: &mut DeviceQueue, budget: &mut Budget) {
        let ram = self.ram.clone();
        let head = chain.head_index();
        let mut reader = ChainReader { memory: ram.memory(), budget, faults: &mut self.faults };
        let buffer = RequestBuffer {
            head,
            pieces: reader.read_space(chain, REQUEST_BYTES as u32, MAX_PIECES, Directions::One),
        };
        self.counters.host_request.buffers += 1;
        if !buffer.is_usable(ram.memory()) {
            self.faults.count(
                GuestError::ShortRequestBuffer,
                format_args!("{} pieces", buffer.pieces.len()),
            );
            queue.complete(ram.memory(), head, &mut self.faults);
        } else if head >= queue.size() {
            // A chain that can never be returned must not take the place of one that can.
            queue.complete(ram.memory(), head, &mut self.faults);
        } else {
            if let Some(former) = self.requests.buffer.replace(buffer) {
                self.faults.count(GuestError::ExtraRequestBuffer, "a second request buffer");
                queue.complete(ram.memory(), former.head, &mut self.faults);
            }
            self.send_request(queue);
        }
    }

    /// Passes the pages of a message on, as far as the budget allows.
    fn receive_answer(&mut self, message: &mut Message, negotiated: Features, budget: &mut Budget) {
        // Unlike a hinted page, a free page is not allocated: when the guest next takes it, it
        // expects its poison pattern or zeros there, which a migration that skips the page would
        // have to provide.
        let poisoned = negotiated.relies_on_free_pages();
        let accepted = match message.verdict {
            Verdict::Accepted(Purpose::FreePages { request_id, .. }) => {
                self.requests.accept(request_id)
            }
            _ => false,
        };
        while self.next_portion(message, QueueKind::HostRequest, budget) {
            if accepted && self.requests.kind == RequestKind::Report {
                // The answer names nothing that the reporting queue has not had.
            } else if accepted && poisoned {
                let bytes: u64 = self.scratch.ranges.iter().map(|range| range.size_bytes()).sum();
                self.counters.requests.poisoned_bytes += bytes;
                message.poisoned_bytes += bytes;
            } else if accepted && let Some(sink) = &mut self.requests.sink {
                sink.hint(&self.scratch.ranges);
            }
        }
    }

    /// Ends a message, which may be the answer's last.
    fn finish_answer(&mut self, message: Message) {
        let verdict = message.verdict;
        let answered = AnswerMessage {
            encoding: message.encoding,
            size_bytes: message.size_bytes,
            translate_ns: message.translate_ns,
            poisoned_bytes: message.poisoned_bytes,
        };
        self.finish_message(message);
        let Verdict::Accepted(Purpose::FreePages { request_id, status }) = verdict else { return };
        let is_last = status != AnswerStatus::More;
        if is_last && self.requests.withdrawn == Some(request_id) {
            self.requests.withdrawn = None;
        }
        if !self.requests.accept(request_id) {
            self.faults.count(
                GuestError::StaleAnswer,
                format_args!("{status:?} of request {request_id} while {:?}", self.requests.phase),
            );
            return;
        }
        if let Some(sink) = &mut self.requests.sink {
            sink.answered(answered);
        }
        match status {
            AnswerStatus::More => {}
            AnswerStatus::Done => {
                self.counters.requests.completed += 1;
                self.requests.end(HintEnd::Complete);
            }
            AnswerStatus::Aborted => {
                self.counters.requests.aborted += 1;
                self.requests.end(HintEnd::Aborted);
            }
        }
    }
}

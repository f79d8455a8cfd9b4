//! Free page hinting (virtio 1.3 section 5.5.6.5).
//!
//! The device sets a command number in the configuration space. The driver repeats it on the queue,
//! then sends free blocks, then STOP. The driver may use a hinted page again at any time without
//! notice: a hint says only that the page's content did not matter when the command was issued. So
//! nothing is ever discarded on a hint; hints go to a [`HintSink`], such as a migration that skips
//! those pages unless they are written to later.

use ebb_abi::PageRange;
use ebb_abi::balloon::extension::Encoding;
use ebb_abi::balloon::{COMMAND_ID_BYTES, Feature, HintCommand};
use serde::Serialize;

use crate::budget::Budget;
use crate::chain::{ChainReader, Directions};
use crate::config::ConfigSpace;
use crate::counters::GuestError;
use crate::queue::DeviceQueue;
use crate::{Balloon, BalloonError, Progress};

/// Receives the hints of free page hinting and of the answers to requests for free pages. Called
/// with the device locked: it must not call the device and should be quick.
///
/// A migration may skip hinted pages unless they were written to since the command or request was
/// issued, whether it has seen the write already or not. Hints permit nothing else: the guest may
/// already use the pages.
pub trait HintSink: Send {
    /// The content of these pages did not matter when the command or request was issued. The ranges
    /// are sorted, disjoint and inside guest memory; further calls may name the same pages again.
    fn hint(&mut self, ranges: &[PageRange]);

    /// A message of the answer to a request for free pages has been processed. Free page hinting
    /// has no messages.
    fn answered(&mut self, _message: AnswerMessage) {}

    /// No more hints will come for this command or request, for the given reason.
    fn ended(&mut self, end: HintEnd);
}

/// A message of an answer to a request for free pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AnswerMessage {
    /// Its encoding of pages.
    pub encoding: Encoding,
    /// Its length in bytes, header included.
    pub size_bytes: u64,
    /// Time spent reading it and computing its ranges, in nanoseconds.
    pub translate_ns: u64,
    /// Bytes named in it but not passed on because the guest relies on the content of free pages.
    pub poisoned_bytes: u64,
}

/// Reason for the end of the hints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HintEnd {
    /// The driver has named all its free pages.
    Complete,
    /// The driver aborted. The pages named are valid but incomplete.
    Aborted,
    /// The owner stopped or finished before the driver was done.
    Cancelled,
    /// The driver reset the device.
    Reset,
}

/// State of free page hinting.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum HintPhase {
    /// Not active.
    #[default]
    Idle,
    /// The command is set and the driver has not begun.
    Requested,
    /// The driver is sending hints.
    Running,
    /// No more hints arrive; the driver keeps the hinted pages aside until the owner finishes.
    Stopped,
}

/// The state machine.
#[derive(Default)]
pub(crate) struct Hinting {
    phase: HintPhase,
    /// Number of the latest start command.
    pub(crate) last_id: u32,
    /// Number of a start command after which the driver has not sent STOP.
    pub(crate) unstopped_id: Option<u32>,
    /// The number that the driver has sent last.
    driver_id: Option<u32>,
    sink: Option<Box<dyn HintSink>>,
}

impl std::fmt::Debug for Hinting {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Hinting")
            .field("phase", &self.phase)
            .field("last_id", &self.last_id)
            .field("unstopped_id", &self.unstopped_id)
            .finish_non_exhaustive()
    }
}

impl Hinting {
    pub(crate) fn phase(&self) -> HintPhase {
        self.phase
    }

    /// Starts; returns the command to set. A number that the driver has not stopped is not reused.
    fn start(&mut self, sink: Box<dyn HintSink>) -> HintCommand {
        let mut command = HintCommand::start_after(self.last_id);
        if self.unstopped_id == Some(command.id()) {
            command = HintCommand::start_after(command.id());
        }
        self.last_id = command.id();
        self.unstopped_id = Some(command.id());
        self.phase = HintPhase::Requested;
        self.sink = Some(sink);
        command
    }

    /// Handles a command number of the driver. Returns whether it was valid.
    fn receive_id(&mut self, id: u32) -> bool {
        self.driver_id = Some(id);
        match (HintCommand::from_id(id), self.phase) {
            (HintCommand::Start(id), HintPhase::Requested) if id == self.last_id => {
                self.phase = HintPhase::Running;
                true
            }
            (HintCommand::Stop, HintPhase::Running) => {
                self.unstopped_id = None;
                self.end(HintPhase::Stopped, HintEnd::Complete);
                true
            }
            (HintCommand::Stop, _) => {
                // For a command that has been cancelled since.
                self.unstopped_id = None;
                true
            }
            // Linux repeats the number it saw, which the owner may have replaced since.
            _ => false,
        }
    }

    /// Passes hints on if they belong to the active command.
    fn receive(&mut self, ranges: &[PageRange]) -> bool {
        let running = self.phase == HintPhase::Running;
        if let Some(sink) = self.sink.as_mut().filter(|_| running && !ranges.is_empty()) {
            sink.hint(ranges);
        }
        running
    }

    /// Enters `phase`; notifies the sink the first time that hints end.
    fn end(&mut self, phase: HintPhase, end: HintEnd) {
        self.phase = phase;
        if let Some(mut sink) = self.sink.take() {
            sink.ended(end);
        }
    }

    pub(crate) fn reset(&mut self) {
        (self.unstopped_id, self.driver_id) = (None, None);
        self.end(HintPhase::Idle, HintEnd::Reset);
    }
}

impl Balloon {
    /// Asks the driver for hints, which go to `sink`. The configuration changes: raise its
    /// interrupt.
    ///
    /// # Errors
    /// [`BalloonError::NotNegotiated`], [`BalloonError::HintingActive`].
    pub fn start_hinting(&mut self, sink: Box<dyn HintSink>) -> Result<(), BalloonError> {
        if !self.negotiated().contains(Feature::FreePageHint) {
            return Err(BalloonError::NotNegotiated { feature: Feature::FreePageHint.name() });
        }
        if self.hinting.phase != HintPhase::Idle {
            return Err(BalloonError::HintingActive);
        }
        let command = self.hinting.start(sink);
        self.space.set_hint_command(command);
        Ok(())
    }

    /// Asks the driver to send no more hints; it keeps the hinted pages aside. Returns whether the
    /// configuration changed, which means that its interrupt must be raised.
    pub fn stop_hinting(&mut self) -> bool {
        if !matches!(self.hinting.phase, HintPhase::Requested | HintPhase::Running) {
            return false;
        }
        self.hinting.end(HintPhase::Stopped, HintEnd::Cancelled);
        self.space.set_hint_command(HintCommand::Stop)
    }

    /// Lets the driver use the hinted pages again. Must be called when the user of the hints ends,
    /// also after cancellation or failure, and when the virtual machine stops. Returns whether the
    /// configuration changed, which means that its interrupt must be raised.
    pub fn finish_hinting(&mut self) -> bool {
        if self.hinting.phase == HintPhase::Idle {
            return false;
        }
        self.hinting.end(HintPhase::Idle, HintEnd::Cancelled);
        self.space.set_hint_command(HintCommand::Done)
    }

    /// State of hinting.
    pub fn hint_phase(&self) -> HintPhase {
        self.hinting.phase()
    }

    /// The command number in the configuration space, and the one that the driver has sent last.
    pub fn hint_commands(&self) -> (u32, Option<u32>) {
        (self.space.hint_command(), self.hinting.driver_id)
    }

    pub(crate) fn process_hinting(&mut self, queue: &mut DeviceQueue) -> Progress {
        let ram = self.ram.clone();
        let mut budget = Budget::new();
        while let Some(chain) = queue.next_chain(ram.memory(), &mut budget, &mut self.faults) {
            let head = chain.head_index();
            // A chain is a command number or blocks, depending on the first descriptor's direction.
            let is_hint = chain.clone().next().is_some_and(|descriptor| descriptor.is_write_only());
            if is_hint {
                self.read_ranges(chain, &mut budget);
                for range in &self.scratch.ranges {
                    self.counters.hinting.count(*range);
                }
                if !self.hinting.receive(&self.scratch.ranges) {
                    self.faults.count(
                        GuestError::StaleHint,
                        format_args!("hint while {:?}", self.hinting.phase),
                    );
                }
            } else {
                let mut reader = ChainReader {
                    memory: ram.memory(),
                    budget: &mut budget,
                    faults: &mut self.faults,
                };
                reader.read_bytes(
                    chain,
                    COMMAND_ID_BYTES,
                    Directions::One,
                    &mut self.scratch.bytes,
                );
                self.receive_command_bytes();
            }
            self.counters.hinting.buffers += 1;
            queue.complete(ram.memory(), head, &mut self.faults);
        }
        queue.finish_round(ram.memory(), &budget, &mut self.faults)
    }

    fn receive_command_bytes(&mut self) {
        match self.scratch.bytes.as_slice().try_into().map(u32::from_le_bytes) {
            Ok(id) if self.hinting.receive_id(id) => {}
            Ok(id) => self.faults.count(GuestError::StaleHint, format_args!("command number {id}")),
            Err(_) if self.scratch.bytes.is_empty() => {}
            Err(_) => self.faults.count(GuestError::PartialEntry, "incomplete command number"),
        }
    }

    /// Writes hinting's part of the configuration space after a reset.
    pub(crate) fn reset_hinting(hinting: &mut Hinting, space: &mut ConfigSpace) {
        hinting.reset();
        space.set_hint_command(HintCommand::Stop);
    }
}

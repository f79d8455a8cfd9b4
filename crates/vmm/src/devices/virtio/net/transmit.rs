//! Frames from the guest (virtio 1.3 section 5.1.6.2).

use std::io;
use std::ops::Range;
use std::time::Instant;

use ebb_guest_ram::GuestMemory;
use virtio_queue::Queue;

use super::chain::{Direction, Unusable, push};
use super::parts::{MAX_PREFIXES, Parts};
use super::receive::{Failure, MAX_BYTES};
use super::stream::{LEAST_FRAME_BYTES, MAX_FRAME_BYTES, Progress, Stream, broken_write};
use super::tap::{HEADER_BYTES, Tap};
use crate::devices::throttle::{Admission, Throttle};
use crate::devices::virtio::ring::{Used, pop, publish, unpop};
use crate::mmds::{HEAD_BYTES, Stack};

/// Bytes sent to a stream in one call, after which no further frame is added.
const BATCH_BYTES: usize = 256 << 10;
/// Parts after which no further frame is added: a frame of Linux has 18 at most.
const BATCH_PARTS: usize = 512;

/// The state of sending.
pub(super) struct Transmit {
    memory: GuestMemory,
    parts: Parts,
    used: Vec<Used>,
    frames: Vec<Frame>,
    /// The backend takes no frames now.
    is_blocked: bool,
}

/// A frame in the parts.
struct Frame {
    head: u16,
    /// Its bytes in the parts; 0 for a chain that is not sent.
    bytes: usize,
}

/// What a call has done.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sent {
    /// Frames that the backend has taken, and their bytes.
    pub(super) frames: u64,
    pub(super) bytes: u64,
    /// Frames that were dropped.
    pub(super) dropped: u64,
    /// There may be more in the queue.
    pub(super) more: bool,
}

impl Transmit {
    pub(super) fn new(memory: GuestMemory) -> Self {
        Self {
            parts: Parts::new(memory.clone()),
            memory,
            used: Vec::new(),
            frames: Vec::new(),
            is_blocked: false,
        }
    }

    /// Whether frames wait for the backend.
    pub(super) fn is_blocked(&self) -> bool {
        self.is_blocked
    }

    /// Forgets the driver.
    pub(super) fn reset(&mut self) {
        self.is_blocked = false;
    }

    /// Sends at most `most` frames to a tap interface, directly from the driver's buffers.
    pub(super) fn send_to_tap(
        &mut self,
        queue: &mut Queue,
        tap: &Tap,
        throttle: &Throttle,
        most: usize,
        mut metadata: Option<&mut Stack>,
    ) -> Result<Sent, Failure> {
        self.is_blocked = false;
        self.used.clear();
        let mut sent = Sent { more: true, ..Sent::default() };
        let mut gone = None;
        let now = Instant::now();
        for _ in 0..most {
            let Some(chain) = pop(queue, &self.memory) else {
                sent.more = false;
                break;
            };
            let head = chain.head_index();
            self.parts.clear();
            let pushed = push(&mut self.parts, chain, Direction::FromGuest, 0);
            let bytes = self.parts.bytes();
            let fits = (HEADER_BYTES + LEAST_FRAME_BYTES..=MAX_BYTES).contains(&bytes);
            if pushed.is_err() || !fits {
                crate::devices::guest_log!("virtio-net: a chain of {bytes} bytes is no frame");
                sent.dropped += 1;
                self.used.push((head, 0));
                continue;
            }
            let frame_bytes = (bytes - HEADER_BYTES) as u64;
            if throttle.admit(frame_bytes, now) == Admission::Later {
                unpop(queue, 1);
                sent.more = false;
                break;
            }
            let range = HEADER_BYTES..bytes;
            if detour(&self.parts, range, metadata.as_deref_mut(), now) {
                sent.frames += 1;
                sent.bytes += frame_bytes;
                self.used.push((head, 0));
                continue;
            }
            match self.parts.write(&tap.port) {
                Ok(_) => {
                    sent.frames += 1;
                    sent.bytes += frame_bytes;
                }
                Err(error) if is_full(&error) => {
                    unpop(queue, 1);
                    self.is_blocked = true;
                    sent.more = false;
                    break;
                }
                Err(error) => {
                    gone = gone_tap(&error);
                    sent.dropped += 1;
                }
            }
            self.used.push((head, 0));
            if gone.is_some() {
                break;
            }
        }
        publish(queue, &self.memory, &self.used)?;
        gone.map_or(Ok(sent), |problem| Err(Failure::Backend(problem)))
    }

    /// Sends at most `most` frames to a stream, several in a system call.
    pub(super) fn send_to_stream(
        &mut self,
        queue: &mut Queue,
        stream: &mut Stream,
        throttle: &Throttle,
        most: usize,
        mut metadata: Option<&mut Stack>,
    ) -> Result<Sent, Failure> {
        let mut sent = Sent { more: true, ..Sent::default() };
        let mut left = most;
        while left > 0 && sent.more {
            self.is_blocked = stream.flush().map_err(Failure::Backend)? == Progress::None;
            if self.is_blocked {
                sent.more = false;
                return Ok(sent);
            }
            let most = left.min(MAX_PREFIXES);
            sent.more = self.gather(queue, throttle, most, metadata.as_deref_mut(), &mut sent);
            left -= self.frames.len().min(left);
            if self.parts.count() > 0 {
                self.send_batch(queue, stream, &mut sent)?;
            }
            self.used.clear();
            self.used.extend(self.frames.iter().map(|frame| (frame.head, 0)));
            publish(queue, &self.memory, &self.used)?;
        }
        Ok(sent)
    }

    /// Collects the next frames. Returns whether there may be more.
    fn gather(
        &mut self,
        queue: &mut Queue,
        throttle: &Throttle,
        most: usize,
        mut metadata: Option<&mut Stack>,
        sent: &mut Sent,
    ) -> bool {
        self.parts.clear();
        self.frames.clear();
        let now = Instant::now();
        while self.frames.len() < most
            && self.parts.bytes() < BATCH_BYTES
            && self.parts.count() < BATCH_PARTS
        {
            let Some(chain) = pop(queue, &self.memory) else { return false };
            let head = chain.head_index();
            let (count, before) = (self.parts.count(), self.parts.bytes());
            let pushed = push(&mut self.parts, chain, Direction::FromGuest, HEADER_BYTES);
            let bytes = self.parts.bytes() - before;
            if pushed == Err(Unusable::TooManyParts) && count > 0 {
                self.parts.truncate(count);
                unpop(queue, 1);
                return true;
            }
            if pushed.is_err() || !(LEAST_FRAME_BYTES..=MAX_FRAME_BYTES).contains(&bytes) {
                crate::devices::guest_log!("virtio-net: a chain of {bytes} bytes is no frame");
                self.parts.truncate(count);
                sent.dropped += 1;
                self.frames.push(Frame { head, bytes: 0 });
                continue;
            }
            if throttle.admit(bytes as u64, now) == Admission::Later {
                self.parts.truncate(count);
                unpop(queue, 1);
                return false;
            }
            let range = before..before + bytes;
            if detour(&self.parts, range, metadata.as_deref_mut(), now) {
                self.parts.truncate(count);
                sent.frames += 1;
                sent.bytes += bytes as u64;
                self.frames.push(Frame { head, bytes: 0 });
                continue;
            }
            self.parts.insert_prefix(count, bytes as u32);
            self.frames.push(Frame { head, bytes: self.parts.bytes() - before });
        }
        true
    }

    /// Sends the collected frames. Those that the socket has no room for return to the queue; of
    /// the one that it has taken a part of, the rest is kept.
    fn send_batch(
        &mut self,
        queue: &mut Queue,
        stream: &mut Stream,
        sent: &mut Sent,
    ) -> Result<(), Failure> {
        let written = match self.parts.write(&stream.port) {
            Ok(written) => written,
            Err(error) if is_full(&error) => 0,
            // The guest's memory is a file that has been cut, for example; nothing was sent.
            Err(error) if error.raw_os_error() == Some(libc::EFAULT) => {
                sent.dropped += self.frames.iter().filter(|frame| frame.bytes > 0).count() as u64;
                return Ok(());
            }
            Err(error) => {
                unpop(queue, self.frames.len());
                return Err(Failure::Backend(broken_write(&error)));
            }
        };
        let (mut end, mut taken) = (0, 0);
        for frame in &self.frames {
            if end >= written && frame.bytes > 0 {
                break;
            }
            end += frame.bytes;
            taken += 1;
            if frame.bytes > 0 {
                sent.frames += 1;
                sent.bytes += frame.bytes as u64;
            }
        }
        if end > written {
            stream.keep(self.parts.copy_out(written, end - written));
        }
        let left = self.frames.len() - taken;
        unpop(queue, left);
        self.frames.truncate(taken);
        self.is_blocked = left > 0 || stream.is_waiting();
        sent.more &= !self.is_blocked;
        Ok(())
    }

    /// Drops at most `most` frames, because there is no link.
    pub(super) fn discard(&mut self, queue: &mut Queue, most: usize) -> Result<Sent, Failure> {
        self.is_blocked = false;
        self.used.clear();
        while self.used.len() < most {
            let Some(chain) = pop(queue, &self.memory) else { break };
            self.used.push((chain.head_index(), 0));
        }
        publish(queue, &self.memory, &self.used)?;
        let dropped = self.used.len();
        Ok(Sent { dropped: dropped as u64, more: dropped == most, ..Sent::default() })
    }
}

/// Gives a frame to the metadata service if it is for it, in place of the backend.
fn detour(parts: &Parts, range: Range<usize>, metadata: Option<&mut Stack>, now: Instant) -> bool {
    let Some(stack) = metadata else { return false };
    let mut head = [0; HEAD_BYTES];
    let head = &mut head[..HEAD_BYTES.min(range.len())];
    parts.copy_to(range.start, head);
    if !stack.takes(head) {
        return false;
    }
    // The guest may have changed it since; what is copied counts.
    stack.receive(&parts.copy_out(range.start, range.len()), now);
    true
}

fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// Why a tap interface can no longer be used; `None` if it has refused only this frame: the
/// interface is down (EIO), its header is invalid (EINVAL), or memory is short.
fn gone_tap(error: &io::Error) -> Option<String> {
    match error.raw_os_error() {
        Some(libc::EBADFD | libc::EBADF) => Some("it was removed".to_owned()),
        Some(libc::EPIPE | libc::ECONNRESET) => Some("it has ended".to_owned()),
        _ => None,
    }
}

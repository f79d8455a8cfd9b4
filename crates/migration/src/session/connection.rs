//! A connection to the other side whose reads and writes end at a time limit and when the session
//! is cancelled.

use std::fmt;
use std::io::{self, IoSlice, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use thiserror::Error;

use super::cancel::CancelHandle;
use super::error::SessionError;
use super::tls;
use super::wire::Wire;

/// A connection to the other side: a data stream, or the control connection inside a session.
///
/// A read or write fails with [`io::ErrorKind::TimedOut`] when no byte has moved for the session's
/// limit, and at once when the session is cancelled. After a failed write all later writes fail. A
/// write returns when the kernel has accepted the bytes, also with TLS; there is nothing to flush.
pub struct Connection {
    wire: Wire,
    cancel: Option<CancelHandle>,
    limit: Limit,
    peer: String,
    /// A write has failed: the rest of its bytes must never be sent.
    broken: bool,
}

/// Shuts a connection down from another thread, whose reads and writes then end at once.
#[derive(Debug, Clone)]
pub struct ShutdownHandle(Arc<OwnedFd>);

impl ShutdownHandle {
    /// Ends the connection in both directions.
    pub fn shut_down(&self) {
        // Fails only if the connection has already ended.
        let _ = rustix::net::shutdown(&*self.0, rustix::net::Shutdown::Both);
    }
}

/// Whether the kernel may have accepted a part of a frame whose write failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Begun {
    No,
    /// No more writes are possible: the bytes would be taken for the rest of the frame.
    Perhaps,
}

/// When a wait ends.
#[derive(Debug, Clone, Copy)]
pub(super) enum Limit {
    /// This long after the last byte.
    Progress(Duration),
    /// At this time; with the whole limit, for messages.
    Until(Instant, Duration),
}

impl Limit {
    /// Starts the limit now.
    pub(super) fn from_now(limit: Duration) -> Self {
        Self::Until(Instant::now() + limit, limit)
    }

    fn deadline(self) -> (Instant, Duration) {
        match self {
            Self::Progress(limit) => (Instant::now() + limit, limit),
            Self::Until(deadline, limit) => (deadline, limit),
        }
    }
}

/// Reason why a wait ended without a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub(super) enum Trouble {
    #[error("no byte has moved for {} s", .0.as_secs_f64())]
    TimedOut(Duration),
    #[error("the migration was cancelled")]
    Cancelled,
    #[error("an earlier write has failed")]
    Broken,
}

impl Trouble {
    fn of(error: &io::Error) -> Option<Self> {
        error.get_ref()?.downcast_ref().copied()
    }
}

impl From<Trouble> for io::Error {
    fn from(trouble: Trouble) -> Self {
        let kind = match trouble {
            Trouble::TimedOut(_) => io::ErrorKind::TimedOut,
            Trouble::Cancelled => io::ErrorKind::Other,
            Trouble::Broken => io::ErrorKind::BrokenPipe,
        };
        Self::new(kind, trouble)
    }
}

/// Waits until `socket` is ready, `deadline` passes, or the session is cancelled.
pub(super) fn wait(
    socket: BorrowedFd<'_>,
    flags: PollFlags,
    cancel: Option<&CancelHandle>,
    (deadline, limit): (Instant, Duration),
) -> io::Result<()> {
    let mut descriptors = vec![PollFd::from_borrowed_fd(socket, flags)];
    descriptors
        .extend(cancel.map(|cancel| PollFd::from_borrowed_fd(cancel.event(), PollFlags::IN)));
    poll_until(&mut descriptors, deadline)?;
    if descriptors.get(1).is_some_and(|event| !event.revents().is_empty()) {
        return Err(Trouble::Cancelled.into());
    }
    if descriptors.iter().all(|descriptor| descriptor.revents().is_empty())
        && Instant::now() >= deadline
    {
        return Err(Trouble::TimedOut(limit).into());
    }
    Ok(())
}

/// ppoll(2) until `deadline`; a signal ends it early.
pub(super) fn poll_until(descriptors: &mut [PollFd<'_>], deadline: Instant) -> io::Result<()> {
    let left = deadline.saturating_duration_since(Instant::now());
    let timeout = Timespec {
        tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: left.subsec_nanos().into(),
    };
    match rustix::event::poll(descriptors, Some(&timeout)) {
        Ok(_) => Ok(()),
        Err(rustix::io::Errno::INTR) => {
            descriptors.iter_mut().for_each(PollFd::clear_revents);
            Ok(())
        }
        Err(errno) => Err(errno.into()),
    }
}

impl Connection {
    pub(super) fn new(wire: Wire, peer: String, limit: Limit, cancel: CancelHandle) -> Self {
        Self { wire, cancel: Some(cancel), limit, peer, broken: false }
    }

    /// Name of the other end, for messages.
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// Whether the connection is encrypted.
    pub const fn is_encrypted(&self) -> bool {
        self.wire.is_encrypted()
    }

    /// Returns a handle by which another thread can end this connection.
    pub fn shutdown_handle(&self) -> ShutdownHandle {
        ShutdownHandle(Arc::clone(self.wire.socket()))
    }

    /// Sets the longest time a read or write may take without moving a byte.
    pub fn set_progress_limit(&mut self, limit: Duration) {
        self.limit = Limit::Progress(limit);
    }

    pub(super) fn set_limit(&mut self, limit: Limit) {
        self.limit = limit;
    }

    /// From here on cancelling the session does not end waits: the final messages must be sent.
    pub(super) fn ignore_cancel(&mut self) {
        self.cancel = None;
    }

    /// Writes all of `frame`. After a failure the other side cannot have it: the kernel did not
    /// accept its last byte.
    pub(super) fn write_frame(&mut self, frame: &[u8]) -> Result<(), (io::Error, Begun)> {
        let mut left = frame;
        while !left.is_empty() {
            match self.write(left) {
                Ok(taken) => left = &left[taken..],
                Err(error) => {
                    // A cancelled session is noticed before anything is written, and perhaps
                    // between two writes.
                    if left.len() < frame.len() {
                        self.break_off();
                    }
                    return Err((error, if self.broken { Begun::Perhaps } else { Begun::No }));
                }
            }
        }
        Ok(())
    }

    /// Completes the TLS handshake.
    pub(super) fn handshake(&mut self) -> io::Result<()> {
        let deadline = self.limit.deadline();
        loop {
            match self.wire.try_handshake() {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.wait(self.wire.interest(), deadline)?;
                }
                result => return result,
            }
        }
    }

    /// Announces the end of output, and waits up to `limit` until the other side has read
    /// everything.
    pub(super) fn close(mut self, limit: Duration) {
        self.close_until((Instant::now() + limit, limit));
    }

    /// Like [`close`](Self::close), with a deadline.
    pub(super) fn close_until(&mut self, deadline: (Instant, Duration)) {
        self.ignore_cancel();
        self.end_of_output();
        // The deadline also stops a peer that sends without end.
        while self.wire.drain() && Instant::now() < deadline.0 {
            if self.wait(PollFlags::IN, deadline).is_err() {
                return;
            }
        }
    }

    /// Announces the end of output. The rest of a failed write is not sent: it might complete a
    /// message that counts as unsent.
    pub(super) fn end_of_output(&mut self) {
        if !self.broken {
            self.wire.end_of_output();
        }
    }

    /// Makes all later writes fail.
    fn break_off(&mut self) {
        self.broken = true;
        self.wire.seal();
    }

    /// Converts an error of a read or write into one for the operator. `doing` completes a
    /// sentence: "while waiting for its hello".
    pub(super) fn explain(&self, error: &io::Error, doing: &'static str) -> SessionError {
        let peer = self.peer.clone();
        if let Some(error) = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>())
        {
            return tls::explain(error, peer);
        }
        match Trouble::of(error) {
            Some(Trouble::Cancelled) => SessionError::Cancelled,
            Some(Trouble::TimedOut(limit)) => {
                SessionError::TimedOut { peer, waiting_for: doing, limit }
            }
            _ if error.kind() == io::ErrorKind::UnexpectedEof => {
                SessionError::Cut { peer, doing, problem: "the peer closed it".to_owned() }
            }
            _ => SessionError::Cut { peer, doing, problem: error.to_string() },
        }
    }

    /// Also ends a connection that never has to wait.
    fn check_cancelled(&self) -> io::Result<()> {
        match &self.cancel {
            Some(cancel) if cancel.is_cancelled() => Err(Trouble::Cancelled.into()),
            _ => Ok(()),
        }
    }

    fn wait(&self, flags: PollFlags, deadline: (Instant, Duration)) -> io::Result<()> {
        wait(self.wire.as_fd(), flags, self.cancel.as_ref(), deadline)
    }

    /// Writes everything that TLS has buffered to the socket.
    fn push(&mut self) -> io::Result<()> {
        let mut deadline = self.limit.deadline();
        loop {
            match self.wire.try_flush() {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.wait(PollFlags::OUT, deadline)?;
                    deadline = self.limit.deadline();
                }
                result => return result,
            }
        }
    }

    /// Performs one write, until the kernel has accepted all bytes taken.
    fn write_with(
        &mut self,
        mut attempt: impl FnMut(&mut Wire) -> io::Result<usize>,
    ) -> io::Result<usize> {
        if self.broken {
            return Err(Trouble::Broken.into());
        }
        self.check_cancelled()?;
        let deadline = self.limit.deadline();
        let result = loop {
            match attempt(&mut self.wire) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if let Err(error) = self.wait(PollFlags::OUT, deadline) {
                        break Err(error);
                    }
                }
                Ok(taken) => break self.push().map(|()| taken),
                Err(error) => break Err(error),
            }
        };
        if result.is_err() {
            self.break_off();
        }
        result
    }
}

impl Read for Connection {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        self.check_cancelled()?;
        let deadline = self.limit.deadline();
        loop {
            match self.wire.try_read(buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.wait(self.wire.interest(), deadline)?;
                }
                result => return result,
            }
        }
    }
}

impl Write for Connection {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_with(|wire| wire.try_write(bytes))
    }

    fn write_vectored(&mut self, buffers: &[IoSlice<'_>]) -> io::Result<usize> {
        self.write_with(|wire| wire.try_write_vectored(buffers))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wire.as_fd()
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection")
            .field("peer", &self.peer)
            .field("broken", &self.broken)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;

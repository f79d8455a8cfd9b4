//! A connection as the broker sees it: bytes that came, and messages that are to go. Never waits.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::RecvFlags;

use super::domains::{Membership, OutMessage};
use super::hello::{PREAMBLE_BYTES, Role};
use super::peer::Peer;
use super::socket::send;

/// What is read at a time, so that one client does not keep the others waiting.
const PIECE_BYTES: usize = 64 << 10;

/// How far a connection has come.
#[derive(Debug)]
pub(super) enum Stage {
    /// It has not said what it is.
    Stranger,
    /// It has shown its preamble and must say hello.
    Greeting,
    /// It is a client.
    Member(Membership),
    /// It has to read its last message.
    Leaving,
}

/// Somebody who has connected.
#[derive(Debug)]
pub(super) struct Connection {
    socket: OwnedFd,
    pub(super) peer: Arc<Peer>,
    pub(super) stage: Stage,
    incoming: Vec<u8>,
    /// Bytes at its beginning that were taken. They go when more is read: a client may send many
    /// small messages.
    taken: usize,
    outgoing: VecDeque<OutMessage>,
    /// Bytes of the first outgoing message that have gone.
    gone: usize,
    ended: bool,
    /// Since when something is expected of the other side.
    pub(super) waiting_since: Option<Instant>,
}

/// The other side has gone away.
#[derive(Debug)]
pub(super) struct Gone;

impl Connection {
    pub(super) fn new(socket: OwnedFd, peer: Arc<Peer>, now: Instant) -> Self {
        Self {
            socket,
            peer,
            stage: Stage::Stranger,
            incoming: Vec::new(),
            taken: 0,
            outgoing: VecDeque::new(),
            gone: 0,
            ended: false,
            waiting_since: Some(now),
        }
    }

    pub(super) fn membership(&self) -> Option<&Membership> {
        match &self.stage {
            Stage::Member(membership) => Some(membership),
            _ => None,
        }
    }

    /// What to wait for. A client that has not read its answer is not listened to.
    pub(super) fn interest(&self) -> PollFlags {
        if self.outgoing.is_empty() { PollFlags::IN } else { PollFlags::OUT }
    }

    /// Whether everything has gone that should.
    pub(super) fn is_flushed(&self) -> bool {
        self.outgoing.is_empty()
    }

    /// What has come and was not taken.
    pub(super) fn incoming(&self) -> &[u8] {
        &self.incoming[self.taken..]
    }

    /// Forgets the first bytes of what has come, which were a message.
    pub(super) fn take(&mut self, bytes: usize) {
        self.waiting_since = None;
        self.taken += bytes;
        if self.incoming().is_empty() {
            self.forget_incoming();
        }
    }

    /// The preamble, once it has come.
    pub(super) fn take_role(&mut self) -> Result<Option<Role>, super::hello::PreambleError> {
        let role = Role::parse(self.incoming())?;
        if role.is_some() {
            self.take(PREAMBLE_BYTES);
        }
        Ok(role)
    }

    pub(super) fn push(&mut self, messages: impl IntoIterator<Item = OutMessage>) {
        self.outgoing.extend(messages);
    }

    /// Reads what is there, once. Descriptors that come with it are closed by the system, since
    /// there is no room for them.
    pub(super) fn read(&mut self) -> Result<(), Gone> {
        if self.ended {
            return Ok(());
        }
        self.incoming.drain(..std::mem::take(&mut self.taken));
        let before = self.incoming.len();
        self.incoming.resize(before + PIECE_BYTES, 0);
        let room = &mut self.incoming[before..];
        let received = rustix::io::retry_on_intr(|| {
            rustix::net::recv(&self.socket, &mut *room, RecvFlags::empty())
        });
        self.incoming.truncate(before + received.as_ref().map_or(0, |(bytes, _)| *bytes));
        match received {
            Ok((0, _)) => self.ended = true,
            Ok(_) | Err(Errno::AGAIN) => {}
            Err(_) => return Err(Gone),
        }
        Ok(())
    }

    /// Whether nothing more will come.
    pub(super) fn has_ended(&self) -> bool {
        self.ended
    }

    /// Sends what the other side takes.
    pub(super) fn flush(&mut self) -> Result<(), Gone> {
        while let Some((bytes, descriptor)) = self.outgoing.front() {
            // The descriptor goes with the first byte.
            let descriptor = descriptor.as_ref().filter(|_| self.gone == 0).map(AsFd::as_fd);
            match send(&self.socket, &bytes[self.gone..], descriptor) {
                Ok(sent) => self.gone += sent,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(_) => return Err(Gone),
            }
            if self.gone == bytes.len() {
                self.outgoing.pop_front();
                self.gone = 0;
            }
        }
        Ok(())
    }

    /// Notes whether something is expected of the other side: the rest of a message, a hello, that
    /// it reads.
    pub(super) fn note_waiting(&mut self, now: Instant) {
        let introduced = matches!(self.stage, Stage::Member(_));
        let waiting = !introduced || !self.outgoing.is_empty() || !self.incoming().is_empty();
        self.waiting_since = if waiting { self.waiting_since.or(Some(now)) } else { None };
    }

    /// Whether it has been waited for too long.
    pub(super) fn is_late(&self, now: Instant, patience: Duration) -> bool {
        self.waiting_since.is_some_and(|since| now.saturating_duration_since(since) >= patience)
    }

    /// Nothing that has come matters any more.
    pub(super) fn forget_incoming(&mut self) {
        (self.incoming, self.taken) = (Vec::new(), 0);
    }

    /// What a late client was expected to do.
    pub(super) fn expected(&self) -> &'static str {
        if !self.outgoing.is_empty() {
            "reading an answer"
        } else if matches!(self.stage, Stage::Member(_)) {
            "sending a message"
        } else {
            "saying hello"
        }
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

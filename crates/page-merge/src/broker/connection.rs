//! The broker's end of a connection: received bytes, and messages to send. Never waits.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::process::Pid;

use super::domains::{Membership, OutMessage};
use super::hello::{PREAMBLE_BYTES, Role};
use super::name::DomainName;
use super::peer::Peer;
use super::socket::{receive_from, send};

/// Maximum number of bytes read at a time, so that one client does not keep the others waiting.
const PIECE_BYTES: usize = 64 << 10;

/// Stage of a connection.
#[derive(Debug)]
pub(super) enum Stage {
    /// No preamble yet, or an introduction.
    Stranger,
    /// The preamble of an introduction has arrived, and its hello is missing.
    Introducing,
    /// The preamble has arrived and the hello is missing.
    Greeting,
    /// It is a client.
    Member(Membership),
    /// The last message has to be read by the peer.
    Leaving,
}

/// A connected peer.
#[derive(Debug)]
pub(super) struct Connection {
    socket: OwnedFd,
    /// The process that has connected it, and from hello on the one that has sent that.
    pub(super) peer: Arc<Peer>,
    pub(super) stage: Stage,
    /// The only domain that the process may join which the connection was made for.
    pub(super) introduced: Option<DomainName>,
    /// Process that has sent the last bytes.
    sender: Option<Pid>,
    incoming: Vec<u8>,
    /// Number of processed bytes at the beginning of the buffer. They are removed with the next
    /// read: a client may send many small messages.
    taken: usize,
    outgoing: VecDeque<OutMessage>,
    /// Number of sent bytes of the first outgoing message.
    gone: usize,
    ended: bool,
    /// Time since which the peer is expected to act.
    pub(super) waiting_since: Option<Instant>,
}

/// The peer has closed the connection.
#[derive(Debug)]
pub(super) struct Gone;

impl Connection {
    pub(super) fn new(socket: OwnedFd, peer: Arc<Peer>, now: Instant) -> Self {
        Self {
            socket,
            peer,
            stage: Stage::Stranger,
            introduced: None,
            sender: None,
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

    /// Events to wait for. Requests of a client that has not read its answer are not read.
    pub(super) fn interest(&self) -> PollFlags {
        if self.outgoing.is_empty() { PollFlags::IN } else { PollFlags::OUT }
    }

    /// Whether everything has been sent.
    pub(super) fn is_flushed(&self) -> bool {
        self.outgoing.is_empty()
    }

    /// Received bytes that are not processed.
    pub(super) fn incoming(&self) -> &[u8] {
        &self.incoming[self.taken..]
    }

    /// Removes the first bytes of the received ones, which were a message.
    pub(super) fn take(&mut self, bytes: usize) {
        self.waiting_since = None;
        self.taken += bytes;
        if self.incoming().is_empty() {
            self.forget_incoming();
        }
    }

    /// The preamble, once it has arrived.
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

    /// Makes the process that has sent the last bytes the peer. Returns whether it is another one.
    pub(super) fn meet_sender(&mut self) -> io::Result<bool> {
        let is_other =
            self.sender.is_none_or(|sender| sender.as_raw_nonzero().get() != self.peer.pid);
        if is_other {
            self.peer = Arc::new(self.peer.sender(self.sender)?);
        }
        Ok(is_other)
    }

    /// Reads the available bytes of one sender, once. The kernel closes descriptors that come with
    /// them, since there is no room for them.
    pub(super) fn read(&mut self) -> Result<(), Gone> {
        if self.ended {
            return Ok(());
        }
        self.incoming.drain(..std::mem::take(&mut self.taken));
        let before = self.incoming.len();
        self.incoming.resize(before + PIECE_BYTES, 0);
        let received = receive_from(&self.socket, &mut self.incoming[before..]);
        self.incoming.truncate(before + received.as_ref().map_or(0, |(bytes, _)| *bytes));
        match received {
            Ok((0, _)) => self.ended = true,
            Ok((_, sender)) => self.sender = sender,
            Err(Errno::AGAIN) => {}
            Err(_) => return Err(Gone),
        }
        Ok(())
    }

    /// Whether nothing more will be received.
    pub(super) fn has_ended(&self) -> bool {
        self.ended
    }

    /// Sends as much as the socket takes.
    pub(super) fn flush(&mut self) -> Result<(), Gone> {
        while let Some((bytes, descriptor)) = self.outgoing.front() {
            // The descriptor is sent with the first byte.
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

    /// Records whether the peer is expected to act: to send the rest of a message or a hello, or to
    /// read.
    pub(super) fn note_waiting(&mut self, now: Instant) {
        let introduced = matches!(self.stage, Stage::Member(_));
        let waiting = !introduced || !self.outgoing.is_empty() || !self.incoming().is_empty();
        self.waiting_since = if waiting { self.waiting_since.or(Some(now)) } else { None };
    }

    /// Whether the peer has been waited for too long.
    pub(super) fn is_late(&self, now: Instant, patience: Duration) -> bool {
        self.waiting_since.is_some_and(|since| now.saturating_duration_since(since) >= patience)
    }

    /// Drops all received bytes.
    pub(super) fn forget_incoming(&mut self) {
        (self.incoming, self.taken) = (Vec::new(), 0);
    }

    /// The action expected of a late client.
    pub(super) fn expected(&self) -> &'static str {
        if !self.outgoing.is_empty() {
            "reading an answer"
        } else if matches!(self.stage, Stage::Member(_)) {
            "sending a message"
        } else {
            "sending hello"
        }
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

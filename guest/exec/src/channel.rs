//! A connection that carries frames, for either side.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::SendFlags;

use crate::wire::{Control, DATA_BYTES, Decoder, Frame, WireError};

/// Outgoing bytes from which on [`Channel::has_room`] is false.
const BACKLOG_BYTES: usize = 4 * DATA_BYTES;

/// A connection whose peer is not trusted. Does not block, apart from the methods that say so.
#[derive(Debug)]
pub struct Channel {
    socket: OwnedFd,
    decoder: Decoder,
    outgoing: VecDeque<u8>,
    /// The peer sends no more.
    ended: bool,
    /// The peer receives no more. What it has sent can still be read.
    deaf: bool,
}

/// Why a session cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum ChannelError {
    /// The connection failed.
    #[error("the connection failed: {0}")]
    Io(#[from] io::Error),
    /// The peer sends nonsense.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The connection ended before the session did.
    #[error("the connection has ended")]
    Ended,
    /// The peer does not keep to the protocol.
    #[error("the other side does not keep to the protocol: {0}")]
    Protocol(&'static str),
}

impl From<Errno> for ChannelError {
    fn from(errno: Errno) -> Self {
        Self::Io(errno.into())
    }
}

impl Channel {
    /// Uses a connected stream socket.
    ///
    /// # Errors
    /// The socket cannot be made non-blocking.
    pub fn new(socket: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&socket, true)?;
        Ok(Self {
            socket,
            decoder: Decoder::default(),
            outgoing: VecDeque::new(),
            ended: false,
            deaf: false,
        })
    }

    /// Events to wait for.
    pub fn wanted(&self) -> PollFlags {
        let mut wanted = PollFlags::empty();
        if !self.ended {
            wanted |= PollFlags::IN;
        }
        if !self.outgoing.is_empty() {
            wanted |= PollFlags::OUT;
        }
        wanted
    }

    /// Whether more should be sent now.
    pub fn has_room(&self) -> bool {
        self.outgoing.len() < BACKLOG_BYTES
    }

    /// Whether all was given to the kernel.
    pub fn is_flushed(&self) -> bool {
        self.outgoing.is_empty()
    }

    /// Queues a frame; see [`has_room`](Self::has_room).
    pub fn queue(&mut self, frame: &Frame) {
        frame.encode(&mut self.outgoing);
    }

    /// Queues a message.
    pub fn queue_control(&mut self, control: Control) {
        self.queue(&Frame::Control(control));
    }

    /// Sends as much as the kernel accepts; drops it if the peer receives no more, which may have
    /// sent its last message before.
    pub fn flush(&mut self) -> Result<(), ChannelError> {
        while !self.outgoing.is_empty() {
            let (bytes, _) = self.outgoing.as_slices();
            match rustix::net::send(&self.socket, bytes, SendFlags::NOSIGNAL) {
                Ok(sent) => drop(self.outgoing.drain(..sent)),
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(Errno::PIPE | Errno::CONNRESET) => {
                    self.deaf = true;
                    self.outgoing.clear();
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Receives what is there, up to some KiB; frames follow from [`next_frame`](Self::next_frame).
    pub fn receive(&mut self) -> Result<(), ChannelError> {
        let mut buffer = vec![0; DATA_BYTES];
        match rustix::io::read(&self.socket, &mut buffer) {
            Ok(0) | Err(Errno::CONNRESET) => self.ended = true,
            Ok(length) => self.decoder.push(&buffer[..length]),
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    /// The next frame that was received.
    ///
    /// # Errors
    /// [`ChannelError::Ended`] after the last one, and what the peer does wrong.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, ChannelError> {
        match self.decoder.next_frame()? {
            None if self.ended => Err(ChannelError::Ended),
            frame => Ok(frame),
        }
    }

    /// Sends a frame; blocks until the kernel has taken most of it.
    ///
    /// # Errors
    /// [`ChannelError::Ended`] if the peer receives no more.
    pub fn send(&mut self, frame: &Frame) -> Result<(), ChannelError> {
        self.queue(frame);
        self.flush()?;
        if self.deaf {
            return Err(ChannelError::Ended);
        }
        while !self.has_room() {
            self.wait(PollFlags::OUT)?;
            self.flush()?;
        }
        Ok(())
    }

    /// Blocks until all is sent.
    pub fn send_rest(&mut self) -> Result<(), ChannelError> {
        self.flush()?;
        while !self.is_flushed() {
            self.wait(PollFlags::OUT)?;
            self.flush()?;
        }
        Ok(())
    }

    /// The next frame; blocks, and sends what is queued meanwhile.
    pub fn read(&mut self) -> Result<Frame, ChannelError> {
        loop {
            if let Some(frame) = self.next_frame()? {
                return Ok(frame);
            }
            self.flush()?;
            self.wait(self.wanted())?;
            self.receive()?;
        }
    }

    fn wait(&self, wanted: PollFlags) -> Result<(), ChannelError> {
        match poll(&mut [PollFd::new(&self.socket, wanted)], None) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

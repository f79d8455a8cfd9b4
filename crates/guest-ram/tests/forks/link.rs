//! What the test and a process say to each other: lines of JSON over a socket.

use std::io::{self, BufRead, BufReader, ErrorKind, Write};
use std::ops::Range;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ebb_guest_ram::RamImage;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::memory::Span;
use crate::operations::{Advice, Look, SaveKind, Tenure};

/// What a process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Machine,
    /// It holds memory and is forked.
    Checkpoint,
}

impl Role {
    /// What a process becomes that one of these has forked.
    pub fn of_forked(self) -> Self {
        match self {
            Self::Machine => Self::Checkpoint,
            Self::Checkpoint => Self::Machine,
        }
    }
}

#[derive(Debug, Serialize, Deserialize)]
pub enum Command {
    Write(Span),
    Discard { pages: Vec<Range<u64>>, tenure: Tenure },
    Reclaim { pages: Range<u64> },
    DiscardZeros { pages: Range<u64> },
    Advise(Advice),
    Save { path: PathBuf, kind: SaveKind, writes: Vec<Span> },
    Fork,
    Hash(Look),
    Read { page: u64 },
}

#[derive(Debug, Serialize, Deserialize)]
pub enum Answer {
    /// The first one of each process.
    Born,
    Done,
    Saved {
        image: RamImage,
        kind: SaveKind,
    },
    /// Of each page.
    Hashes(Vec<u64>),
    Page(Vec<u8>),
    Failed(String),
}

pub struct Link(BufReader<UnixStream>);

impl Link {
    pub fn connect(socket: &Path) -> io::Result<Self> {
        Self::new(UnixStream::connect(socket)?, None)
    }

    /// With a limit of the time that something takes to arrive.
    pub fn new(stream: UnixStream, limit: Option<Duration>) -> io::Result<Self> {
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(limit)?;
        Ok(Self(BufReader::new(stream)))
    }

    pub fn descriptor(&self) -> RawFd {
        self.0.get_ref().as_raw_fd()
    }

    pub fn send(&self, message: &impl Serialize) -> io::Result<()> {
        let mut line = serde_json::to_vec(message)?;
        line.push(b'\n');
        self.0.get_ref().write_all(&line)
    }

    /// `None` if the other side has ended.
    pub fn receive<T: DeserializeOwned>(&mut self) -> io::Result<Option<T>> {
        let mut line = String::new();
        match self.0.read_line(&mut line) {
            // A killed process has left the last line incomplete.
            Ok(_) if !line.ends_with('\n') => Ok(None),
            Ok(_) => Ok(Some(serde_json::from_str(&line)?)),
            // It had not read everything.
            Err(error) if error.kind() == ErrorKind::ConnectionReset => Ok(None),
            Err(error) => Err(error),
        }
    }
}

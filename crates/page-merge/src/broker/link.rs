//! A client's connection to a broker, with a time limit on every wait.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::settings::Nodes;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::SocketAddrUnix;

use super::error::BrokerError;
use super::hello::{Hello, Role};
use super::message::{Reply, Request, split_frame};
use super::name::DomainName;
use super::socket::{self, receive, send, wait};

/// Maximum number of bytes read at a time.
const PIECE_BYTES: usize = 64 << 10;

/// Maximum time until a wait notices that it is to end.
const HURRY_WITHIN: Duration = Duration::from_millis(5);

/// A connection. Unsent data and unanswered requests are kept for later calls.
#[derive(Debug)]
pub(super) struct Link {
    socket: OwnedFd,
    limit: Duration,
    /// Deadline of the current exchange.
    deadline: Instant,
    /// Waits end at once while it is set.
    hurry: Arc<AtomicBool>,
    outgoing: Vec<u8>,
    /// Number of sent bytes of `outgoing`.
    gone: usize,
    incoming: Vec<u8>,
    descriptors: VecDeque<OwnedFd>,
}

impl Link {
    pub(super) fn connect(path: &Path, limit: Duration) -> Result<Self, BrokerError> {
        Ok(Self::over(connect_to(path, limit)?, limit))
    }

    pub(super) fn over(socket: OwnedFd, limit: Duration) -> Self {
        Self {
            socket,
            limit,
            deadline: Instant::now() + limit,
            hurry: Arc::default(),
            outgoing: Vec::new(),
            gone: 0,
            incoming: Vec::new(),
            descriptors: VecDeque::new(),
        }
    }

    /// Maximum time of an exchange.
    pub(super) fn limit(&self) -> Duration {
        self.limit
    }

    /// Makes calls return without waiting while `hurry` is set.
    pub(super) fn hurry_while(&mut self, hurry: Arc<AtomicBool>) {
        self.hurry = hurry;
    }

    /// Makes all further calls return without waiting.
    pub(super) fn stop_waiting(&mut self) {
        self.deadline = Instant::now();
    }

    /// Begins an exchange by sending a message.
    pub(super) fn begin(&mut self, bytes: &[u8]) -> Result<(), BrokerError> {
        self.deadline = Instant::now() + self.limit;
        self.outgoing.extend_from_slice(bytes);
        self.flush()
    }

    /// Sends the unsent bytes.
    pub(super) fn flush(&mut self) -> Result<(), BrokerError> {
        while let Some(rest) = self.outgoing.get(self.gone..).filter(|rest| !rest.is_empty()) {
            match send(&self.socket, rest, None) {
                Ok(count) => self.gone += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.wait(PollFlags::OUT)?;
                }
                Err(error) => return Err(self.last_words(&error)),
            }
        }
        self.outgoing.clear();
        self.gone = 0;
        Ok(())
    }

    /// Sends as much as possible without waiting, and reads no answer.
    pub(super) fn part_with(&mut self, bytes: &[u8]) {
        self.outgoing.extend_from_slice(bytes);
        self.stop_waiting();
        // At the end of the connection, the error does not matter.
        let _ = self.flush();
    }

    /// The next message of the broker.
    pub(super) fn reply(&mut self) -> Result<Reply, BrokerError> {
        let garbage = |error| BrokerError::Gone(format!("it sent {error}"));
        loop {
            if let Some((kind, body, length)) = split_frame(&self.incoming).map_err(garbage)? {
                let reply = Reply::decode(kind, body).map_err(garbage)?;
                self.incoming.drain(..length);
                return match reply {
                    Reply::Refused(reason) => Err(BrokerError::Refused { reason }),
                    reply => Ok(reply),
                };
            }
            let before = self.incoming.len();
            self.incoming.resize(before + PIECE_BYTES, 0);
            let received =
                receive(&self.socket, &mut self.incoming[before..], &mut self.descriptors);
            self.incoming.truncate(before + received.as_ref().unwrap_or(&0));
            match received {
                Ok(0) => return Err(BrokerError::Gone("it has ended the connection".to_owned())),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.wait(PollFlags::IN)?;
                }
                Err(error) => return Err(BrokerError::Gone(error.to_string())),
            }
        }
    }

    /// The descriptor of the announcement that was just read.
    pub(super) fn descriptor(&mut self) -> Result<OwnedFd, BrokerError> {
        self.descriptors.pop_front().ok_or_else(|| {
            BrokerError::Gone("it announced a segment without its descriptor".to_owned())
        })
    }

    fn wait(&self, for_what: PollFlags) -> Result<(), BrokerError> {
        let now = Instant::now();
        if now >= self.deadline || self.hurry.load(Ordering::Relaxed) {
            return Err(BrokerError::Late(self.limit));
        }
        // The caller tries again, and waits again.
        let until = self.deadline.min(now + HURRY_WITHIN);
        wait(&mut [PollFd::new(&self.socket, for_what)], Some(until))
            .map_err(|source| BrokerError::System { what: "wait for the broker", source })
    }

    /// A broker that ends a connection may have sent the reason.
    fn last_words(&mut self, error: &io::Error) -> BrokerError {
        self.stop_waiting();
        loop {
            match self.reply() {
                Err(refused @ BrokerError::Refused { .. }) => return refused,
                Ok(_) => {}
                Err(_) => return BrokerError::Gone(error.to_string()),
            }
        }
    }
}

/// Makes a connection for another process, which can join `domain` only, whatever it says: with
/// [`BrokerStore::over`](super::BrokerStore::over). It has the rights of this process, and the broker
/// watches for its end.
///
/// System calls: those of a connection (`socket`, `connect`, `getsockopt`, `geteuid`), and `sendmsg`.
///
/// # Errors
/// [`BrokerError::Connect`], [`BrokerError::ForeignUser`], or [`BrokerError::System`].
pub fn connect(path: &Path, domain: DomainName, limit: Duration) -> Result<OwnedFd, BrokerError> {
    let mut link = Link::connect(path, limit)?;
    let mut bytes = Role::Introduction.preamble().to_vec();
    // Where nodes are kept apart or not is the client's choice.
    bytes.extend(Request::Hello(Hello { domain, placement: Nodes::default() }).encode());
    link.begin(&bytes)?;
    Ok(link.socket)
}

/// Connects to the broker at `path`, which must belong to this user or to root. Waits for at most
/// `limit` while its queue of connections is full.
fn connect_to(path: &Path, limit: Duration) -> Result<OwnedFd, BrokerError> {
    let failed =
        |errno: Errno| BrokerError::Connect { path: path.to_owned(), source: errno.into() };
    let address = SocketAddrUnix::new(path).map_err(failed)?;
    let socket = socket::connect(&address, Instant::now() + limit).map_err(failed)?;
    let credentials = rustix::net::sockopt::socket_peercred(&socket)
        .map_err(BrokerError::system("identify the broker"))?;
    let ours = rustix::process::geteuid();
    if credentials.uid != ours && !credentials.uid.is_root() {
        let (theirs, ours) = (credentials.uid.as_raw(), ours.as_raw());
        return Err(BrokerError::ForeignUser { path: path.to_owned(), theirs, ours });
    }
    Ok(socket)
}

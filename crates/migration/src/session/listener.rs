//! The destination's listener: selects the source among all connections.

use std::io::Write;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use ebb_local_io::SocketFile;
use rustix::event::{PollFd, PollFlags};
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::SocketFlags;

use super::address::Address;
use super::cancel::CancelHandle;
use super::candidate::{Candidate, Step};
use super::connection::{Connection, Limit, poll_until};
use super::error::SessionError;
use super::intake::Arrival;
use super::limits::TimeLimits;
use super::message::Greeting;
use super::preamble::Role;
use super::refusals::Refusals;
use super::security::{Security, Transport};
use super::session_id::SessionId;
use super::tls::TlsServer;
use super::users;
use super::wire::{self, Wire};

/// Length of the accept queue.
const BACKLOG: i32 = 64;

/// Most connections that have not identified themselves. The oldest is dropped for a new one.
const MOST_CANDIDATES: usize = 32;

/// Pause of accepting after the system had no descriptor or memory for another connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Limit of waits that have no other.
const LONGEST_WAIT: Duration = Duration::from_secs(3600);

/// The listener of a destination.
///
/// Each connection has [`TimeLimits::greeting`] to present a certificate (with TLS) and to send a
/// hello. Many can try at the same time until one has: a connection that stalls, sends garbage or
/// has no accepted certificate is refused, logged at a limited rate and does not delay others.
#[derive(Debug)]
pub struct Listener {
    /// Removes the socket's file at the end; before the socket is closed, while no other process
    /// can have taken over the name.
    file: Option<SocketFile>,
    socket: OwnedFd,
    pub(super) address: Address,
    tls: Option<TlsServer>,
    candidates: Vec<Candidate>,
    pub(super) refusals: Refusals,
    accept_after: Option<Instant>,
    pub(super) greeting: Greeting,
    pub(super) limits: TimeLimits,
    pub(super) cancel: CancelHandle,
}

/// Why a wait ended without a connection.
pub(super) enum NoArrival {
    /// The time limit expired.
    Late,
    /// The watched connection is readable.
    Watched,
    Failed(SessionError),
}

impl Listener {
    /// Listens at `address`; port 0 means any free one.
    ///
    /// System calls: `socket`, `setsockopt`, `bind`, `listen`, `getsockname`; for a unix socket
    /// those of [`SocketFile::listen`]; for TLS those that read the files (`openat`, `fstat`,
    /// `statx`, `lseek`, `read`). All later steps: `ppoll`, `accept4`, `getsockopt`, `setsockopt`,
    /// `sendto`, `sendmsg`, `recvfrom`, `recvmsg` (descriptors only), `getrandom`, `shutdown`,
    /// `close`, and `lstat`, `unlink` when a unix socket is removed.
    pub fn bind(
        address: &Address,
        security: &Security,
        greeting: &Greeting,
        limits: &TimeLimits,
        cancel: &CancelHandle,
    ) -> Result<Self, SessionError> {
        let transport = security.transport(address)?;
        let (socket, address, file) = match address {
            Address::Unix { path } => {
                let owner = Mode::RUSR | Mode::WUSR;
                let (file, socket) = SocketFile::listen(path, owner, BACKLOG)?;
                (socket, address.clone(), Some(file))
            }
            Address::Tcp { host, port } => {
                let (socket, address) = listen_tcp(address, host, *port)?;
                (socket, address, None)
            }
        };
        let tls = match (transport, security) {
            (Transport::Tls, Security::Tls(files)) => Some(TlsServer::load(files)?),
            _ => None,
        };
        Ok(Self {
            socket,
            address,
            file,
            tls,
            candidates: Vec::new(),
            refusals: Refusals::default(),
            accept_after: None,
            greeting: greeting.clone(),
            limits: *limits,
            cancel: cancel.clone(),
        })
    }

    /// The address of this listener, with its actual port.
    pub const fn address(&self) -> &Address {
        &self.address
    }

    /// Leaves the removal of a unix socket's name to the caller.
    pub fn take_file(&mut self) -> Option<SocketFile> {
        self.file.take()
    }

    /// Connections refused so far.
    pub const fn refusals(&self) -> &Refusals {
        &self.refusals
    }

    /// Waits for another connection with the session's id. `missing` selects the streams that have
    /// not joined yet.
    pub(super) fn next_stream(
        &mut self,
        session: SessionId,
        missing: &[bool],
        deadline: Instant,
        watched: BorrowedFd<'_>,
    ) -> Result<(Connection, u16), NoArrival> {
        let wanted = |arrival: &Arrival| match arrival {
            Arrival::Control(_) => Err("another migration is under way here"),
            Arrival::Data { session: theirs, stream } => {
                let known = *theirs == session
                    && missing.get(usize::from(*stream)).is_some_and(|&missing| missing);
                known.then_some(()).ok_or("it is a data stream of another session")
            }
        };
        loop {
            let (wire, peer, arrival) = self.next(wanted, Some(deadline), Some(watched))?;
            let Arrival::Data { stream, .. } = arrival else { continue };
            let mut connection = self.connection(wire, &peer);
            let answer = Role::Data { session, stream }.preamble();
            match connection.write_all(&answer) {
                Ok(()) => return Ok((connection, stream)),
                Err(error) => self.refusals.note(&peer, &error.to_string()),
            }
        }
    }

    pub(super) fn connection(&self, wire: Wire, peer: &str) -> Connection {
        let limit = Limit::from_now(self.limits.greeting);
        Connection::new(wire, format!("the source {peer}"), limit, self.cancel.clone())
    }

    /// Steps all candidates until one identifies itself and `wanted` accepts it.
    pub(super) fn next(
        &mut self,
        wanted: impl Fn(&Arrival) -> Result<(), &'static str>,
        deadline: Option<Instant>,
        watched: Option<BorrowedFd<'_>>,
    ) -> Result<(Wire, String, Arrival), NoArrival> {
        loop {
            let now = Instant::now();
            if let Some(arrived) = self.step_candidates(&wanted, now) {
                return Ok(arrived);
            }
            if deadline.is_some_and(|deadline| now >= deadline) {
                return Err(NoArrival::Late);
            }
            self.wait(deadline, watched, now)?;
        }
    }

    /// Steps the candidates up to the first one that is wanted.
    fn step_candidates(
        &mut self,
        wanted: impl Fn(&Arrival) -> Result<(), &'static str>,
        now: Instant,
    ) -> Option<(Wire, String, Arrival)> {
        let mut index = 0;
        while index < self.candidates.len() {
            let candidate = self.candidates.remove(index);
            let peer = candidate.peer().to_owned();
            let step = match candidate.step(now) {
                Step::Arrived(wire, peer, arrival) => match wanted(&arrival) {
                    Ok(()) => return Some((wire, peer, arrival)),
                    Err(problem) => Candidate::unwanted(wire, peer, now + self.limits.greeting)
                        .refuse_with_reason(problem.to_owned()),
                },
                step => step,
            };
            let (kept, problem) = match step {
                Step::Wait(candidate) => (Some(candidate), None),
                Step::Refused(candidate, problem) => (Some(candidate), Some(problem)),
                Step::Gone(problem) => (None, problem),
                // Handled above.
                Step::Arrived(..) => (None, None),
            };
            if let Some(problem) = problem {
                self.refusals.note(&peer, &problem);
            }
            if let Some(candidate) = kept {
                self.candidates.insert(index, candidate);
                index += 1;
            }
        }
        None
    }

    /// Waits for activity or a deadline of a candidate, and accepts new connections.
    fn wait(
        &mut self,
        deadline: Option<Instant>,
        watched: Option<BorrowedFd<'_>>,
        now: Instant,
    ) -> Result<(), NoArrival> {
        self.accept_after = self.accept_after.filter(|after| now < *after);
        let times = [deadline, self.accept_after, Some(now + LONGEST_WAIT)];
        let until = times
            .into_iter()
            .flatten()
            .chain(self.candidates.iter().map(Candidate::deadline))
            .min();
        let accepts = if self.accept_after.is_some() { PollFlags::empty() } else { PollFlags::IN };
        let mut descriptors = vec![
            PollFd::new(&self.socket, accepts),
            PollFd::from_borrowed_fd(self.cancel.event(), PollFlags::IN),
        ];
        descriptors.extend(watched.map(|watched| PollFd::from_borrowed_fd(watched, PollFlags::IN)));
        descriptors.extend(
            self.candidates
                .iter()
                .map(|candidate| PollFd::new(candidate.wire(), candidate.interest())),
        );
        poll_until(&mut descriptors, until.unwrap_or(now)).map_err(|source| {
            NoArrival::Failed(SessionError::System { what: "wait for connections", source })
        })?;
        let happened = |index: usize| !descriptors[index].revents().is_empty();
        if happened(1) {
            return Err(NoArrival::Failed(SessionError::Cancelled));
        }
        if watched.is_some() && happened(2) {
            return Err(NoArrival::Watched);
        }
        if happened(0) {
            self.take_one();
        }
        Ok(())
    }

    /// Accepts one new connection.
    fn take_one(&mut self) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = match rustix::net::accept_with(&self.socket, flags) {
            Ok(socket) => socket,
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => return,
            Err(errno) => {
                self.refusals.note(
                    "an unknown peer",
                    &format!("the connection cannot be accepted: {errno}"),
                );
                self.accept_after = Some(Instant::now() + ACCEPT_PAUSE);
                return;
            }
        };
        if self.candidates.len() == MOST_CANDIDATES {
            let oldest = self.candidates.remove(0);
            self.refusals.note(oldest.peer(), "too many connections; the oldest was dropped");
        }
        let deadline = Instant::now() + self.limits.greeting;
        let step = match &self.address {
            Address::Unix { .. } => {
                let peer = self.address.to_string();
                let trusted = users::check(&socket, &peer);
                let candidate = Candidate::new(socket, None, peer, deadline);
                match trusted {
                    Ok(()) => Step::Wait(candidate),
                    Err(error) => candidate.refuse_with_reason(error.to_string()),
                }
            }
            Address::Tcp { .. } => match self.new_tcp(socket, deadline) {
                Ok(candidate) => Step::Wait(candidate),
                Err(problem) => Step::Gone(Some(problem)),
            },
        };
        match step {
            Step::Refused(candidate, problem) => {
                self.refusals.note(candidate.peer(), &problem);
                self.candidates.push(candidate);
            }
            Step::Gone(Some(problem)) => self.refusals.note("an unknown peer", &problem),
            Step::Wait(candidate) => self.candidates.push(candidate),
            Step::Gone(None) | Step::Arrived(..) => {}
        }
    }

    fn new_tcp(&self, socket: OwnedFd, deadline: Instant) -> Result<Candidate, String> {
        let prepared = wire::tune_tcp(&socket).and_then(|()| rustix::net::getpeername(&socket));
        let peer = prepared.map_err(|errno| errno.to_string())?;
        let peer = peer.and_then(|peer| std::net::SocketAddr::try_from(peer).ok());
        let peer =
            peer.map_or_else(|| "tcp".to_owned(), |peer| Address::of_socket(peer).to_string());
        let tls = self.tls.as_ref().map(TlsServer::connection).transpose();
        Ok(Candidate::new(socket, tls.map_err(|error| error.to_string())?, peer, deadline))
    }
}

fn listen_tcp(
    address: &Address,
    host: &str,
    port: u16,
) -> Result<(OwnedFd, Address), SessionError> {
    let failed = |what| {
        move |errno: Errno| SessionError::Listen {
            address: address.to_string(),
            what,
            source: errno.into(),
        }
    };
    let found = Address::resolve(host, port)
        .map_err(|source| SessionError::NotFound { address: address.to_string(), source })?;
    // A name can have several addresses; the first one of this host is used.
    let mut failure = None;
    for socket_address in found {
        let socket =
            wire::stream_socket(wire::family(socket_address)).map_err(failed("create a socket"))?;
        // Connections of an ended process must not block its port.
        rustix::net::sockopt::set_socket_reuseaddr(&socket, true)
            .map_err(failed("prepare the socket"))?;
        match rustix::net::bind(&socket, &socket_address) {
            Ok(()) => {
                rustix::net::listen(&socket, BACKLOG).map_err(failed("listen"))?;
                let bound = rustix::net::getsockname(&socket).map_err(failed("read the port"))?;
                let bound =
                    std::net::SocketAddr::try_from(bound).map_err(failed("read the port"))?;
                return Ok((socket, Address::of_socket(bound)));
            }
            Err(errno) => failure = Some(errno),
        }
    }
    Err(failed("bind the address")(failure.unwrap_or(Errno::ADDRNOTAVAIL)))
}

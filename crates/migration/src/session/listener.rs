//! The destination's listener: selects the source among all connections.

use std::io::Write;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use ebb_local_io::SocketFile;
use rustix::event::{PollFd, PollFlags};
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::SocketFlags;
use rustix::process::Uid;

use super::address::Address;
use super::cancel::CancelHandle;
use super::candidate::{Arrived, Candidate, Step};
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

/// Most connections that have not identified themselves.
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
///
/// A source's data connections arrive with its control connection and stay silent until the machine
/// is accepted, which may take longer. So this time passes only during waits for connections, and
/// the wait for data streams gives all that are still silent its own limit. The number of
/// connections stays bounded: a new one replaces the oldest. In the wait for data streams, those
/// that came before the control connection are replaced, and none that came after it, so that
/// strangers cannot displace the session's.
#[derive(Debug)]
pub struct Listener {
    /// Removes the socket's file at the end; before the socket is closed, while no other process
    /// can have taken over the name.
    file: Option<SocketFile>,
    socket: OwnedFd,
    pub(super) address: Address,
    /// User whose processes may connect to a unix socket: that of this process when it was bound.
    owner: Uid,
    tls: Option<TlsServer>,
    /// In the order of their numbers.
    candidates: Vec<Candidate>,
    /// Number of the next connection.
    next_number: u64,
    /// Number of the control connection of the session.
    control: u64,
    /// End of the last wait for connections.
    waited_until: Option<Instant>,
    pub(super) refusals: Refusals,
    accept_after: Option<Instant>,
    pub(super) greeting: Greeting,
    pub(super) limits: TimeLimits,
    pub(super) cancel: CancelHandle,
}

/// What a wait is for.
#[derive(Clone, Copy)]
pub(super) enum Awaited<'a> {
    /// A source, until this time.
    Source(Option<Instant>),
    /// Data streams, until this time or until the control connection is readable.
    Streams(Instant, BorrowedFd<'a>),
}

/// Why a wait ended without a connection.
pub(super) enum NoArrival {
    /// The time limit expired.
    Late,
    /// The control connection is readable.
    Control,
    Failed(SessionError),
}

impl Listener {
    /// Listens at `address`; port 0 means any free one.
    ///
    /// System calls: `socket`, `setsockopt`, `bind`, `listen`, `getsockname`, `geteuid`; for a unix
    /// socket those of [`SocketFile::listen`]; for TLS `fstat` and `pread64`. All later steps:
    /// `ppoll`, `accept4`, `getsockopt` (unix sockets), `sendmsg`, `recvmsg`, `getrandom`,
    /// `shutdown`, `close`, and `lstat`, `unlink` when a unix socket is removed.
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
            owner: rustix::process::geteuid(),
            tls,
            candidates: Vec::new(),
            next_number: 0,
            control: 0,
            waited_until: None,
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
        control: BorrowedFd<'_>,
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
            let (arrived, arrival) = self.next(wanted, Awaited::Streams(deadline, control))?;
            let Arrival::Data { stream, .. } = arrival else { continue };
            let peer = arrived.peer;
            let mut connection = self.connection(arrived.wire, &peer);
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

    /// Waits for the next source.
    pub(super) fn next_source(
        &mut self,
        wanted: impl Fn(&Arrival) -> Result<(), &'static str>,
        deadline: Option<Instant>,
    ) -> Result<(Wire, String, Arrival), NoArrival> {
        let (arrived, arrival) = self.next(wanted, Awaited::Source(deadline))?;
        self.control = arrived.number;
        Ok((arrived.wire, arrived.peer, arrival))
    }

    /// Steps all candidates until one identifies itself and `wanted` accepts it.
    fn next(
        &mut self,
        wanted: impl Fn(&Arrival) -> Result<(), &'static str>,
        awaited: Awaited<'_>,
    ) -> Result<(Arrived, Arrival), NoArrival> {
        if let Some(until) = self.waited_until.take() {
            let time = until.elapsed();
            self.candidates.iter_mut().for_each(|candidate| candidate.add_time(time));
        }
        let result = self.next_of_candidates(wanted, awaited);
        self.waited_until = Some(Instant::now());
        result
    }

    fn next_of_candidates(
        &mut self,
        wanted: impl Fn(&Arrival) -> Result<(), &'static str>,
        awaited: Awaited<'_>,
    ) -> Result<(Arrived, Arrival), NoArrival> {
        let deadline = match awaited {
            Awaited::Source(deadline) => deadline,
            Awaited::Streams(deadline, _) => Some(deadline),
        };
        loop {
            if let Awaited::Streams(deadline, _) = awaited {
                self.candidates.iter_mut().for_each(|candidate| candidate.wait_until(deadline));
            }
            let now = Instant::now();
            if let Some(arrived) = self.step_candidates(&wanted, now) {
                return Ok(arrived);
            }
            if deadline.is_some_and(|deadline| now >= deadline) {
                return Err(NoArrival::Late);
            }
            self.wait(deadline, awaited, now)?;
        }
    }

    /// Steps the candidates up to the first one that is wanted.
    fn step_candidates(
        &mut self,
        wanted: impl Fn(&Arrival) -> Result<(), &'static str>,
        now: Instant,
    ) -> Option<(Arrived, Arrival)> {
        let mut index = 0;
        while index < self.candidates.len() {
            let candidate = self.candidates.remove(index);
            let peer = candidate.peer().to_owned();
            let step = match candidate.step(now) {
                Step::Arrived(arrived, arrival) => match wanted(&arrival) {
                    Ok(()) => return Some((arrived, arrival)),
                    Err(problem) => Candidate::unwanted(arrived, now + self.limits.greeting)
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
        awaited: Awaited<'_>,
        now: Instant,
    ) -> Result<(), NoArrival> {
        let control = match awaited {
            Awaited::Source(_) => None,
            Awaited::Streams(_, control) => Some(control),
        };
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
        descriptors.extend(control.map(|control| PollFd::from_borrowed_fd(control, PollFlags::IN)));
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
        if control.is_some() && happened(2) {
            return Err(NoArrival::Control);
        }
        if happened(0) {
            self.take_one(awaited);
        }
        Ok(())
    }

    /// Accepts one new connection.
    fn take_one(&mut self, awaited: Awaited<'_>) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (socket, from) = match rustix::net::acceptfrom_with(&self.socket, flags) {
            Ok(accepted) => accepted,
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
        let number = self.next_number;
        self.next_number += 1;
        let peer = match &self.address {
            Address::Unix { .. } => self.address.to_string(),
            Address::Tcp { .. } => from
                .and_then(|from| std::net::SocketAddr::try_from(from).ok())
                .map_or_else(|| "tcp".to_owned(), |from| Address::of_socket(from).to_string()),
        };
        if self.candidates.len() == MOST_CANDIDATES && !self.make_room(awaited) {
            self.refusals.note(&peer, "too many connections");
            return;
        }
        let deadline = Instant::now() + self.limits.greeting;
        let step = match self.tls.as_ref().map(TlsServer::connection).transpose() {
            Ok(tls) => Step::Wait(Candidate::new(socket, tls, peer, number, deadline)),
            Err(error) => Step::Gone(Some(error.to_string())),
        };
        let step = match (step, &self.address) {
            (Step::Wait(candidate), Address::Unix { .. }) => {
                match users::check(candidate.wire(), candidate.peer(), self.owner) {
                    Ok(()) => Step::Wait(candidate),
                    Err(error) => candidate.refuse_with_reason(error.to_string()),
                }
            }
            (step, _) => step,
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

    /// Drops one of the connections for a new one, if one may be dropped.
    fn make_room(&mut self, awaited: Awaited<'_>) -> bool {
        let index = match awaited {
            Awaited::Source(_) => Some(0),
            Awaited::Streams(..) => self
                .candidates
                .iter()
                .position(|candidate| candidate.is_refused() || candidate.number() < self.control),
        };
        let Some(index) = index else { return false };
        let dropped = self.candidates.remove(index);
        if !dropped.is_refused() {
            self.refusals.note(dropped.peer(), "too many connections; the oldest was dropped");
        }
        true
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
        // Accepted connections inherit these options (Linux net/ipv4/tcp_minisocks.c,
        // tcp_create_openreq_child).
        wire::tune_tcp(&socket).map_err(failed("prepare the socket"))?;
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

//! The broker: one thread that listens, answers and watches the processes of its clients.

use std::collections::BTreeMap;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ebb_local_io::{LogLimit, SocketFile};
use rustix::event::{PollFd, PollFlags};
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::SocketFlags;

use super::connection::{Connection, Gone, Stage};
use super::domains::{Domains, Membership, Rest};
use super::error::{BrokerError, Refusal};
use super::hello::{Hello, Role};
use super::limits::Limits;
use super::message::{Reply, Request, split_frame};
use super::name::DomainRule;
use super::nodes::host_nodes;
use super::peer::Peer;
use super::socket::{send, wait};
use super::status::BrokerStatus;

/// Maximum number of connections that wait to be accepted.
const BACKLOG: i32 = 128;

/// Pause of accepting after the system had no descriptor or memory for another connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Configuration of a broker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BrokerConfig {
    /// Path of the socket.
    pub path: PathBuf,
    /// Domains to serve; if empty, all, for the broker's own user.
    pub domains: Vec<DomainRule>,
    /// Limits of the clients.
    pub limits: Limits,
}

/// A broker of stable pages.
///
/// It owns the stable pages of each domain and node in sealed memory files, passes on read-only
/// descriptors, and records the holders of each page. A client is bound to one domain by its hello;
/// nothing of another domain ever reaches it.
#[derive(Debug)]
pub struct Broker {
    /// Removes the socket's file at the end; dropped before the socket, while no other process can
    /// have taken over the name.
    file: SocketFile,
    listener: OwnedFd,
    limits: Limits,
    domains: Domains,
    connections: BTreeMap<u64, Connection>,
    next_connection: u64,
    lost: Vec<(Membership, Arc<Peer>)>,
    accept_after: Option<Instant>,
    refused: u64,
    log_limit: LogLimit,
}

/// The hello that has arrived; `None` if more bytes are needed.
fn take_hello(connection: &mut Connection) -> Result<Option<Hello>, Refusal> {
    let Some((kind, body, length)) = split_frame(connection.incoming())? else { return Ok(None) };
    let Request::Hello(hello) = Request::decode(kind, body)? else {
        return Err(Refusal::NoHello);
    };
    connection.take(length);
    Ok(Some(hello))
}

impl Broker {
    /// Listens. Only the broker's user and root can connect, unless a rule names another user: then
    /// the rules decide.
    ///
    /// System calls: those of [`SocketFile::listen`], `setsockopt`, `openat` of /sys, `geteuid`.
    /// Later ones: `ppoll`, `accept4`, `getsockopt`, `pidfd_open`, `recvmsg`, `sendmsg`, `close`,
    /// `getrandom`,
    /// and what stable memory takes: `memfd_create`, `ftruncate`, `mmap`, `munmap`, `madvise`,
    /// `fcntl` for seals, `mbind`, `openat` of /proc/self/fd for reading, `fstat`; at the end
    /// `lstat`, `unlink`.
    pub fn bind(config: BrokerConfig) -> Result<Self, BrokerError> {
        let BrokerConfig { path, domains: rules, limits } = config;
        let mode = if rules.iter().any(|rule| rule.user.is_some()) {
            Mode::RUSR | Mode::WUSR | Mode::RGRP | Mode::WGRP | Mode::ROTH | Mode::WOTH
        } else {
            Mode::RUSR | Mode::WUSR
        };
        let (file, listener) = SocketFile::listen(&path, mode, BACKLOG)?;
        // Connections inherit it (Linux net/unix/af_unix.c, `unix_accept`).
        rustix::net::sockopt::set_socket_passcred(&listener, true)
            .map_err(BrokerError::system("learn the processes of its clients"))?;
        let user = rustix::process::geteuid().as_raw();
        Ok(Self {
            listener,
            file,
            limits,
            domains: Domains::new(rules, limits, host_nodes(), user),
            connections: BTreeMap::new(),
            next_connection: 0,
            lost: Vec::new(),
            accept_after: None,
            refused: 0,
            log_limit: LogLimit::default(),
        })
    }

    /// Path of the socket.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// Serves until `stop` is readable. Clients keep their mappings.
    pub fn run(&mut self, stop: BorrowedFd<'_>) -> Result<(), BrokerError> {
        while self.round(Some(stop), None)? {}
        Ok(())
    }

    /// Serves until no connection has pending data.
    #[cfg(feature = "testing")]
    pub(super) fn serve_until_idle(&mut self) {
        // At least one round, to accept a connection.
        let mut connected = true;
        while connected {
            let until = Instant::now() + Duration::from_millis(1);
            connected = self.round(None, Some(until)).is_ok() && !self.connections.is_empty();
        }
    }

    /// Waits for events, at most until `until`, and processes them; returns false if `stop` is
    /// readable.
    fn round(
        &mut self,
        stop: Option<BorrowedFd<'_>>,
        until: Option<Instant>,
    ) -> Result<bool, BrokerError> {
        self.accept_after = self.accept_after.filter(|after| Instant::now() < *after);
        let accepts = if self.accept_after.is_some() { PollFlags::empty() } else { PollFlags::IN };
        let mut descriptors = vec![PollFd::new(&self.listener, accepts)];
        for connection in self.connections.values() {
            descriptors.push(PollFd::new(connection, connection.interest()));
            descriptors.push(PollFd::new(&*connection.peer, PollFlags::IN));
        }
        descriptors.extend(self.lost.iter().map(|(_, peer)| PollFd::new(&**peer, PollFlags::IN)));
        descriptors.extend(stop.map(|stop| PollFd::from_borrowed_fd(stop, PollFlags::IN)));
        let since =
            self.connections.values().filter_map(|connection| connection.waiting_since).min();
        let late = since.map(|since| since + self.limits.patience);
        let deadline = [late, self.accept_after, until].into_iter().flatten().min();
        wait(&mut descriptors, deadline)
            .map_err(|source| BrokerError::System { what: "wait for clients", source })?;
        let happened: Vec<bool> =
            descriptors.iter().map(|entry| !entry.revents().is_empty()).collect();
        drop(descriptors);
        let (others, stopped) = happened.split_at(happened.len() - usize::from(stop.is_some()));
        if stopped == [true] {
            return Ok(false);
        }
        self.serve(&others[1..]);
        if others[0] {
            self.accept();
        }
        Ok(true)
    }

    /// The broker's state.
    pub fn status(&self) -> BrokerStatus {
        BrokerStatus {
            clients: self.members(),
            lost_clients: self.lost.len(),
            refused: self.refused,
            domains: self.domains.status(),
        }
    }

    /// Processes the events of all peers: two entries for each connection, one for each lost
    /// client.
    fn serve(&mut self, happened: &[bool]) {
        let ids: Vec<u64> = self.connections.keys().copied().collect();
        let (of_connections, of_lost) = happened.split_at(ids.len() * 2);
        for index in (0..of_lost.len()).rev().filter(|&index| of_lost[index]) {
            let (membership, _) = self.lost.swap_remove(index);
            self.domains.reap(&membership);
        }
        let now = Instant::now();
        for (id, events) in ids.into_iter().zip(of_connections.chunks_exact(2)) {
            // Removed from the list while it is served, and reinserted if it stays.
            let Some(mut connection) = self.connections.remove(&id) else { continue };
            let mut result = if events[0] { self.advance(&mut connection) } else { Ok(()) };
            if result.is_ok() && events[1] {
                // The process has ended. Any other process that has its socket is not the one that
                // sent hello.
                result = Err(End::Gone);
            }
            connection.note_waiting(now);
            if result.is_ok() && connection.is_late(now, self.limits.patience) {
                let late =
                    Refusal::Late { what: connection.expected(), limit: self.limits.patience };
                // The peer does not read, or stopped in the middle of a message: the reason is only
                // logged.
                self.note(&connection.peer, &late);
                result = Err(End::Gone);
            }
            if let Err(End::Refused(refusal)) = result {
                result = self.refuse(&mut connection, &refusal);
            }
            if result.is_ok() {
                self.connections.insert(id, connection);
            } else {
                self.leave(&mut connection);
            }
        }
    }

    /// Processes received messages and answers them, as long as the peer reads the answers.
    fn advance(&mut self, connection: &mut Connection) -> Result<(), End> {
        connection.flush()?;
        if connection.is_flushed() {
            connection.read()?;
        }
        while connection.is_flushed() && self.take_one(connection)? {
            connection.flush()?;
        }
        let done = connection.has_ended() || matches!(connection.stage, Stage::Leaving);
        if done && connection.is_flushed() { Err(End::Gone) } else { Ok(()) }
    }

    /// Processes one message; returns false if none is complete.
    fn take_one(&mut self, connection: &mut Connection) -> Result<bool, End> {
        match &connection.stage {
            Stage::Leaving => Ok(false),
            Stage::Stranger => {
                let Some(role) = connection.take_role().map_err(Refusal::from)? else {
                    return Ok(false);
                };
                connection.stage = match role {
                    Role::Introduction if connection.introduced.is_none() => Stage::Introducing,
                    Role::Introduction => return Err(Refusal::SecondHello.into()),
                    Role::Member | Role::Status => Stage::Greeting,
                };
                if role == Role::Status {
                    self.tell_status(connection)?;
                }
                Ok(true)
            }
            Stage::Introducing => {
                let Some(hello) = take_hello(connection)? else { return Ok(false) };
                connection.introduced = Some(hello.domain);
                connection.stage = Stage::Stranger;
                Ok(true)
            }
            Stage::Greeting => {
                let Some(hello) = take_hello(connection)? else { return Ok(false) };
                let is_other = connection.meet_sender().map_err(Refusal::Unwatched)?;
                match &connection.introduced {
                    // It has the rights of the process that made the connection.
                    None if is_other => return Err(Refusal::NotIntroduced.into()),
                    Some(domain) if *domain != hello.domain => {
                        let (domain, wish) = (domain.clone(), hello.domain);
                        return Err(Refusal::Introduced { domain, wish }.into());
                    }
                    _ => {}
                }
                self.check_room(connection)?;
                let (membership, welcome) = self.domains.join(hello, connection.peer.user)?;
                connection.stage = Stage::Member(membership);
                connection.push([welcome]);
                Ok(true)
            }
            Stage::Member(membership) => {
                let Some((kind, body, length)) =
                    split_frame(connection.incoming()).map_err(Refusal::from)?
                else {
                    return Ok(false);
                };
                let request = Request::decode(kind, body).map_err(Refusal::from)?;
                let mut messages = Vec::new();
                self.domains.request(membership, request, &mut messages)?;
                connection.take(length);
                connection.push(messages);
                Ok(true)
            }
        }
    }

    fn tell_status(&self, connection: &mut Connection) -> Result<(), Refusal> {
        let user = connection.peer.user;
        if !self.domains.is_trusted(user) {
            return Err(Refusal::StatusUser(user));
        }
        // Known types; writing them into memory cannot fail.
        let document = serde_json::to_vec(&self.status()).unwrap_or_default();
        connection.push([(Reply::Status(document).encode(), None)]);
        connection.stage = Stage::Leaving;
        Ok(())
    }

    /// Checks the limits for a new client.
    fn check_room(&self, newcomer: &Connection) -> Result<(), Refusal> {
        if self.members() + self.lost.len() >= self.limits.clients {
            return Err(Refusal::Clients(self.limits.clients));
        }
        let peers =
            self.connections.values().filter(|connection| connection.membership().is_some());
        let peers =
            peers.map(|connection| &connection.peer).chain(self.lost.iter().map(|(_, peer)| peer));
        let same = peers.filter(|peer| peer.pid == newcomer.peer.pid).count();
        if same >= self.limits.clients_of_process {
            return Err(Refusal::Process(same));
        }
        Ok(())
    }

    fn members(&self) -> usize {
        self.connections.values().filter(|connection| connection.membership().is_some()).count()
    }

    /// Sends the reason, and lets the peer read it.
    fn refuse(&mut self, connection: &mut Connection, refusal: &Refusal) -> Result<(), End> {
        self.note(&connection.peer, refusal);
        self.leave(connection);
        connection.forget_incoming();
        connection.push([(Reply::Refused(refusal.to_string()).encode(), None)]);
        connection.flush()?;
        if connection.is_flushed() { Err(End::Gone) } else { Ok(()) }
    }

    /// Ends a connection's membership. Its shares end only with its process.
    fn leave(&mut self, connection: &mut Connection) {
        if let Stage::Member(membership) = std::mem::replace(&mut connection.stage, Stage::Leaving)
            && self.domains.disconnect(&membership) == Rest::Holds
        {
            self.lost.push((membership, Arc::clone(&connection.peer)));
        }
    }

    /// Accepts one new connection.
    fn accept(&mut self) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = match rustix::net::accept_with(&self.listener, flags) {
            Ok(socket) => socket,
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => return,
            Err(errno) => {
                self.log(&format!("a connection cannot be accepted: {errno}"));
                self.accept_after = Some(Instant::now() + ACCEPT_PAUSE);
                return;
            }
        };
        let peer = match Peer::of(&socket) {
            Ok(peer) => peer,
            Err(error) => {
                let refusal = match Errno::from_io_error(&error) {
                    Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM) => Refusal::Shortage(error),
                    _ => Refusal::Unwatched(error),
                };
                self.refused += 1;
                self.log(&refusal.to_string());
                // A new socket takes a few bytes immediately; failure does not matter.
                let _ = send(&socket, &Reply::Refused(refusal.to_string()).encode(), None);
                return;
            }
        };
        let is_stranger = |connection: &Connection| {
            matches!(connection.stage, Stage::Stranger | Stage::Introducing | Stage::Greeting)
        };
        let strangers = self.connections.iter().filter(|(_, connection)| is_stranger(connection));
        let strangers: Vec<(u64, u32)> =
            strangers.map(|(&id, connection)| (id, connection.peer.user)).collect();
        if strangers.len() >= self.limits.strangers
            && let Some(oldest) = oldest_of_crowd(&strangers)
            && let Some(oldest) = self.connections.remove(&oldest)
        {
            self.note(&oldest.peer, &Refusal::Crowded);
        }
        let connection = Connection::new(socket, Arc::new(peer), Instant::now());
        self.connections.insert(self.next_connection, connection);
        self.next_connection += 1;
    }

    fn note(&mut self, peer: &Peer, refusal: &Refusal) {
        self.refused += 1;
        self.log(&format!("process {} of user {} was refused: {refusal}", peer.pid, peer.user));
    }

    fn log(&mut self, line: &str) {
        if let Some(suppressed) = self.log_limit.permit(Instant::now()) {
            tracing::warn!(suppressed, "{line}");
        }
    }
}

/// The oldest of these connections (number in ascending order, user) of the user that has the most:
/// no user displaces connections of others.
fn oldest_of_crowd(strangers: &[(u64, u32)]) -> Option<u64> {
    let count = |user: u32| strangers.iter().filter(|(_, other)| *other == user).count();
    let crowd = strangers.iter().map(|(_, user)| *user).max_by_key(|user| count(*user))?;
    strangers.iter().find(|(_, user)| *user == crowd).map(|(id, _)| *id)
}

/// Reason for the end of a connection.
enum End {
    Gone,
    Refused(Refusal),
}

impl From<Gone> for End {
    fn from(Gone: Gone) -> Self {
        Self::Gone
    }
}

impl From<Refusal> for End {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crowd_of_one_user_displaces_its_own_connections() {
        assert_eq!(oldest_of_crowd(&[]), None);
        assert_eq!(oldest_of_crowd(&[(3, 7), (5, 8), (6, 8), (9, 8)]), Some(5));
        assert_eq!(oldest_of_crowd(&[(1, 9), (3, 7), (5, 7)]), Some(3));
    }
}

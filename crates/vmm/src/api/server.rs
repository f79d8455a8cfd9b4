//! The socket and its thread.
//!
//! System calls of the thread after `on_thread_start`, for its seccomp list: `ppoll`, `accept4`,
//! `recvmsg`, `sendmsg`, `shutdown`, `close` (preceded by `fcntl` with F_GETFD in debug builds),
//! `write` for logs, memory allocation, `futex`, the end of a thread, and the calls of the
//! [`Machine`]. The socket is bound and removed by the owner's thread.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ebb_local_io::{ListenError, SocketFile};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{SendFlags, SocketFlags};

pub use super::connection::Limits;
use super::connection::{Connection, Fate};
use super::control::Machine;
use super::descriptors;
use super::door::{Door, MachineDoor};
use super::reply::{BodyMode, Persistence, Problem, Status};
use crate::ending::join_until;

/// Most clients waiting to be accepted.
const BACKLOG: i32 = 16;

/// Interval of checks for the guest's answer while a client waits for it.
const GUEST_POLL_INTERVAL: Duration = Duration::from_millis(5);

/// How long new clients wait after accept failed for lack of file descriptors or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How long replies are still sent when the server ends.
const FINISH_TIME_LIMIT: Duration = Duration::from_millis(200);

/// How long the end of the server waits for its thread.
const END_TIME_LIMIT: Duration = Duration::from_millis(400);

/// Stack size in bytes. A small one suffices: requests and replies are on the heap.
const STACK_BYTES: usize = 256 << 10;

/// Why the API cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    /// The socket cannot be bound.
    #[error("no API: {0}")]
    Listen(#[from] ListenError),
    /// Another operation failed.
    #[error("no API: cannot {action}: {source}")]
    Io {
        /// The operation.
        action: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

/// A socket that is bound, but not served yet: clients wait. Dropping it removes the socket.
#[derive(Debug)]
pub struct ApiSocket {
    listener: OwnedFd,
    file: SocketFile,
}

impl ApiSocket {
    /// Binds the socket `path`, with mode 0600. A stale socket without a listener is replaced.
    pub fn bind(path: &Path) -> Result<Self, ApiError> {
        let (file, listener) = SocketFile::listen(path, Mode::RUSR | Mode::WUSR, BACKLOG)?;
        Ok(Self { listener, file })
    }

    /// The listening socket, and its name in the file system.
    #[must_use]
    pub fn into_parts(self) -> (OwnedFd, SocketFile) {
        (self.listener, self.file)
    }
}

/// The API of one machine: a thread behind a socket. Dropping it sends the remaining replies, ends
/// the thread and removes the socket.
pub struct ApiServer {
    /// What removes the socket's name when it is dropped.
    name: Option<Box<dyn Send + Sync>>,
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl ApiServer {
    /// Serves `vm` on the socket `path`.
    ///
    /// # Errors
    /// [`ApiError`], also if the path is in use.
    pub fn start(path: &Path, vm: Arc<dyn Machine>) -> Result<Self, ApiError> {
        let (listener, name) = ApiSocket::bind(path)?.into_parts();
        Self::start_with(listener, name, vm, Limits::default(), || ())
    }

    /// Serves `vm` on a listening socket, whose name in the file system is removed when `name` is
    /// dropped. `on_thread_start` runs on the new thread before it serves clients, for example to
    /// install a seccomp filter.
    ///
    /// # Errors
    /// [`ApiError::Io`].
    pub fn start_with(
        listener: OwnedFd,
        name: impl Send + Sync + 'static,
        vm: Arc<dyn Machine>,
        limits: Limits,
        on_thread_start: impl FnOnce() + Send + 'static,
    ) -> Result<Self, ApiError> {
        let clients = Clients::new(listener, limits);
        Self::start_clients(clients, name, Arc::new(MachineDoor(vm)), on_thread_start)
    }

    /// As [`start_with`](Self::start_with), for clients who may be connected already, and `door`.
    pub(crate) fn start_clients(
        mut clients: Clients,
        name: impl Send + Sync + 'static,
        door: Arc<dyn Door>,
        on_thread_start: impl FnOnce() + Send + 'static,
    ) -> Result<Self, ApiError> {
        let io_error = |action| move |source: io::Error| ApiError::Io { action, source };
        let stop = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| io_error("create an event")(errno.into()))?;
        let stop = Arc::new(stop);
        let stopped = Arc::clone(&stop);
        let thread = std::thread::Builder::new()
            .name("api".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(move || {
                on_thread_start();
                match clients.serve_until(&*door, stopped.as_fd(), &|| false) {
                    Ok(()) => clients.finish(&*door),
                    Err(errno) => tracing::error!("the API ends, because poll has failed: {errno}"),
                }
            })
            .map_err(io_error("start the thread"))?;
        Ok(Self { name: Some(Box::new(name)), stop, thread: Some(thread) })
    }
}

impl fmt::Debug for ApiServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ApiServer").finish_non_exhaustive()
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        // First, so that a client that connects from now on finds no socket rather than a closing
        // one.
        self.name = None;
        // Adding one to a counter of zero cannot fail.
        let _ = rustix::io::write(&*self.stop, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            // It keeps what it uses. A machine may be stuck in an operation.
            let _ = join_until(thread, Instant::now() + END_TIME_LIMIT);
        }
    }
}

/// A listening socket and its clients, who stay when another thread and another [`Door`] take over.
pub(crate) struct Clients {
    listener: OwnedFd,
    limits: Limits,
    connections: Vec<Connection>,
    /// No new clients are accepted before this time.
    accept_after: Option<Instant>,
}

/// The events reported by poll.
struct Ready {
    stop: PollFlags,
    listener: PollFlags,
    connections: Vec<PollFlags>,
}

impl Clients {
    /// The clients of a listening socket.
    pub(crate) fn new(listener: OwnedFd, limits: Limits) -> Self {
        Self { listener, limits, connections: Vec::new(), accept_after: None }
    }

    /// Serves `door` until `stop` has something to read, or `is_done` after an event.
    ///
    /// # Errors
    /// poll failed.
    pub(crate) fn serve_until(
        &mut self,
        door: &dyn Door,
        stop: BorrowedFd<'_>,
        is_done: &dyn Fn() -> bool,
    ) -> Result<(), Errno> {
        loop {
            let due = door.on_time(Instant::now());
            let ready = match self.wait(stop, due) {
                Ok(ready) => ready,
                Err(Errno::INTR | Errno::AGAIN) => continue,
                Err(errno) => return Err(errno),
            };
            if !ready.stop.is_empty() {
                return Ok(());
            }
            let now = Instant::now();
            let mut events = ready.connections.into_iter();
            self.connections.retain_mut(|connection| {
                let ready = events.next().unwrap_or(PollFlags::empty());
                // What is done ends this door: the others are served by the next one.
                if is_done() {
                    return true;
                }
                connection.on_ready(ready, door, now) == Fate::Keep
                    && connection.on_time(door, now) == Fate::Keep
            });
            if is_done() {
                return Ok(());
            }
            if !ready.listener.is_empty() {
                self.accept(door, now);
            }
        }
    }

    fn wait(&mut self, stop: BorrowedFd<'_>, due: Option<Instant>) -> Result<Ready, Errno> {
        let now = Instant::now();
        self.accept_after = self.accept_after.filter(|after| now < *after);
        let listen = if self.accept_after.is_some() { PollFlags::empty() } else { PollFlags::IN };
        let mut descriptors = Vec::with_capacity(2 + self.connections.len());
        descriptors.push(PollFd::from_borrowed_fd(stop, PollFlags::IN));
        descriptors.push(PollFd::new(&self.listener, listen));
        for connection in &self.connections {
            descriptors.push(PollFd::new(connection.socket(), connection.interest()));
        }
        let due = due.map(|due| due.saturating_duration_since(now));
        let timeout = self.timeout(now).into_iter().chain(due).min();
        rustix::event::poll(&mut descriptors, timeout.map(to_timespec).as_ref())?;
        Ok(Ready {
            stop: descriptors[0].revents(),
            listener: descriptors[1].revents(),
            connections: descriptors[2..].iter().map(PollFd::revents).collect(),
        })
    }

    /// Time until something must be done without an event; `None` for no limit.
    fn timeout(&self, now: Instant) -> Option<Duration> {
        let connections = self.connections.iter().map(|connection| {
            if connection.awaits_guest() {
                GUEST_POLL_INTERVAL
            } else {
                connection.deadline().saturating_duration_since(now)
            }
        });
        let accept = self.accept_after.map(|after| after.saturating_duration_since(now));
        connections.chain(accept).min()
    }

    fn accept(&mut self, door: &dyn Door, now: Instant) {
        match rustix::net::accept_with(&self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)
        {
            Ok(socket) => self.admit(door, socket, now),
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => {}
            Err(errno) => {
                tracing::warn!("cannot accept an API client: {errno}");
                self.accept_after = Some(now + ACCEPT_PAUSE);
            }
        }
    }

    fn admit(&mut self, door: &dyn Door, socket: OwnedFd, now: Instant) {
        if self.connections.len() >= self.limits.connections {
            // The idle connection with the earliest deadline has been idle longest.
            let idlest = (0..self.connections.len())
                .filter(|index| self.connections[*index].is_idle())
                .min_by_key(|index| self.connections[*index].deadline());
            let Some(idlest) = idlest else {
                let message = format!("all {} API connections are in use", self.limits.connections);
                let problem = Problem::new(Status::ServiceUnavailable, message)
                    .with_remedy("try again in a moment");
                let bytes = door.refuse(problem).encode(Persistence::Close, BodyMode::Full);
                // It fits into the empty buffer of a new socket. If the client is gone already,
                // nothing is lost.
                let _ = descriptors::send(&socket, &bytes, &[], SendFlags::DONTWAIT);
                return;
            };
            self.connections.swap_remove(idlest);
        }
        self.connections.push(Connection::new(socket, self.limits, now));
    }

    /// Sends the remaining replies, for a short while.
    pub(crate) fn finish(mut self, door: &dyn Door) {
        let end = Instant::now() + FINISH_TIME_LIMIT;
        loop {
            let now = Instant::now();
            self.connections.retain_mut(|connection| {
                connection.end(door, now)
                    && connection.send_some(now) == Fate::Keep
                    && connection.end(door, now)
            });
            if self.connections.is_empty() || now >= end {
                return;
            }
            let mut descriptors: Vec<_> = self
                .connections
                .iter()
                .map(|connection| PollFd::new(connection.socket(), PollFlags::OUT))
                .collect();
            // Whatever it returns, the loop continues until the time is up.
            let _ = rustix::event::poll(&mut descriptors, Some(&to_timespec(end - now)));
        }
    }
}

fn to_timespec(duration: Duration) -> Timespec {
    // Rounded up to a millisecond: waking up just before a deadline would cost another round.
    let rounded = duration + Duration::from_millis(1);
    Timespec {
        tv_sec: i64::try_from(rounded.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(rounded.subsec_nanos()),
    }
}

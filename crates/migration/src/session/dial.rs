//! Connecting to a destination, by the process whose rights decide what may be reached: sockets for
//! [`connect`](super::connect), perhaps in another process.

use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix};

use super::address::Address;
use super::cancel::CancelHandle;
use super::connection::{poll_until, wait};
use super::error::SessionError;
use super::limits::TimeLimits;
use super::users;
use super::wire;

/// Interval of attempts to connect to a unix socket with a full queue.
const RETRY: Duration = Duration::from_millis(20);

/// One address of a destination.
#[derive(Debug, Clone)]
enum Endpoint {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

/// Connects to a destination that listens at `address`: the control connection and one for each of
/// `streams` data streams, in this order. All addresses of a name are tried in turn, and all
/// connections are made to the first one that answers.
///
/// The process at the other end of a unix socket must belong to this process's user or root.
/// [`Security::check`](super::Security::check) says before whether the address may be used at all.
///
/// System calls: `socket`, `connect`, `ppoll`, `getsockopt`, `setsockopt`, `geteuid`, and those of
/// the resolver for a name other than `localhost`.
///
/// # Errors
/// [`SessionError::NotFound`], [`SessionError::Unreachable`], [`SessionError::ForeignUser`],
/// [`SessionError::Cancelled`].
pub fn dial(
    address: &Address,
    streams: u16,
    limits: &TimeLimits,
    cancel: &CancelHandle,
) -> Result<Vec<OwnedFd>, SessionError> {
    let endpoints = match address {
        Address::Unix { path } => vec![Endpoint::Unix(path.clone())],
        Address::Tcp { host, port } => {
            let found = Address::resolve(host, *port).map_err(|source| SessionError::NotFound {
                address: address.to_string(),
                source,
            })?;
            found.into_iter().map(Endpoint::Tcp).collect()
        }
    };
    let mut failure = None;
    for endpoint in endpoints {
        match endpoint.socket(limits.connect, cancel) {
            Ok(control) => {
                let mut sockets = vec![control];
                for _ in 0..streams {
                    sockets.push(endpoint.socket(limits.connect, cancel)?);
                }
                return Ok(sockets);
            }
            Err(error @ SessionError::Unreachable { .. }) => failure = Some(error),
            Err(error) => return Err(error),
        }
    }
    // A successful resolution has at least one address.
    Err(failure.unwrap_or(SessionError::Cancelled))
}

impl Endpoint {
    /// Opens and connects a socket.
    fn socket(&self, limit: Duration, cancel: &CancelHandle) -> Result<OwnedFd, SessionError> {
        let deadline = (Instant::now() + limit, limit);
        let (address, connected) = match self {
            Self::Tcp(tcp) => (Address::of_socket(*tcp), connect_tcp(*tcp, cancel, deadline)),
            Self::Unix(path) => {
                (Address::Unix { path: path.clone() }, connect_unix(path, cancel, deadline))
            }
        };
        let address = address.to_string();
        let socket = connected.map_err(|error| {
            if cancel.is_cancelled() {
                SessionError::Cancelled
            } else {
                SessionError::Unreachable { address: address.clone(), source: error }
            }
        })?;
        if matches!(self, Self::Unix(_)) {
            users::check(&socket, &address, rustix::process::geteuid())?;
        }
        Ok(socket)
    }
}

fn connect_tcp(
    address: SocketAddr,
    cancel: &CancelHandle,
    deadline: (Instant, Duration),
) -> std::io::Result<OwnedFd> {
    let socket = wire::stream_socket(wire::family(address))?;
    wire::tune_tcp(&socket)?;
    match rustix::net::connect(&socket, &address) {
        Ok(()) => return Ok(socket),
        Err(Errno::INPROGRESS | Errno::INTR) => {}
        Err(errno) => return Err(errno.into()),
    }
    let fd = socket.as_fd();
    loop {
        let mut ready = [PollFd::from_borrowed_fd(fd, PollFlags::OUT)];
        poll_until(&mut ready, Instant::now())?;
        if !ready[0].revents().is_empty() {
            break;
        }
        wait(fd, PollFlags::OUT, Some(cancel), deadline)?;
    }
    rustix::net::sockopt::socket_error(&socket)??;
    Ok(socket)
}

fn connect_unix(
    path: &Path,
    cancel: &CancelHandle,
    deadline: (Instant, Duration),
) -> std::io::Result<OwnedFd> {
    let address = SocketAddrUnix::new(path)?;
    loop {
        let socket = wire::stream_socket(AddressFamily::UNIX)?;
        match rustix::net::connect(&socket, &address) {
            Ok(()) => return Ok(socket),
            // Its queue is full (Linux net/unix/af_unix.c, unix_stream_connect).
            Err(Errno::AGAIN | Errno::INTR) if Instant::now() < deadline.0 => {}
            Err(errno) => return Err(errno.into()),
        }
        let mut cancelled = [PollFd::from_borrowed_fd(cancel.event(), PollFlags::IN)];
        poll_until(&mut cancelled, (Instant::now() + RETRY).min(deadline.0))?;
        if cancel.is_cancelled() {
            return Err(Errno::CANCELED.into());
        }
    }
}

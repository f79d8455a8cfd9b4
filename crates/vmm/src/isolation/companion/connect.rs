//! Connections that the companion makes for the monitor, each with an answer that it comes with.
//!
//! They have a socket and a thread of their own, so that neither side waits for a slow disk.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::thread::JoinHandle;

use rustix::net::Shutdown;

use super::ended;
use super::message::{Connect, Reply};
use crate::packet;
use crate::seccomp::ThreadFilter;

/// The monitor's side. No call waits.
#[derive(Debug)]
pub struct ConnectLink(OwnedFd);

impl ConnectLink {
    /// # Errors
    /// Those of ioctl(2).
    pub(crate) fn new(socket: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&socket, true)?;
        Ok(Self(socket))
    }

    /// The connection, for another process.
    pub(crate) fn into_fd(self) -> OwnedFd {
        self.0
    }

    /// Requests a connection to a port; returns whether there was room for the request.
    ///
    /// # Errors
    /// The companion has ended.
    pub(crate) fn request(&self, port: u32) -> io::Result<bool> {
        match packet::send(&self.0, &Connect { port }, &[]) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The next answer, in the order of the requests: a connected socket or the reason why there is
    /// none. `None` if it has not come yet.
    ///
    /// # Errors
    /// The companion has ended.
    pub(crate) fn answer(&self) -> io::Result<Option<Result<OwnedFd, String>>> {
        match packet::receive::<Reply>(&self.0) {
            Ok(Some((Reply { error: Some(problem) }, _))) => Ok(Some(Err(problem))),
            Ok(Some((_, descriptors))) => {
                let socket = descriptors.into_iter().next();
                Ok(Some(socket.ok_or_else(|| "no socket came".to_owned())))
            }
            Ok(None) => Err(ended()),
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock => Ok(None),
                // An answer, but without its descriptor: this process has too many.
                io::ErrorKind::InvalidData => Ok(Some(Err(error.to_string()))),
                _ => Err(error),
            },
        }
    }
}

impl AsFd for ConnectLink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Makes the connections that are requested on `socket` on a thread, which ends with the monitor.
pub(super) fn serve(
    name: &str,
    socket: &OwnedFd,
    filter: ThreadFilter,
    mut connect: impl FnMut(u32) -> io::Result<OwnedFd> + Send + 'static,
) -> io::Result<ConnectThread> {
    let (socket, requests) = (socket.try_clone()?, socket.try_clone()?);
    let name = name.to_owned();
    let thread = std::thread::Builder::new().name(name.clone()).spawn(move || {
        if let Err(error) = filter.apply() {
            tracing::warn!("{name}: {error}");
            return;
        }
        while let Ok(Some((Connect { port }, _))) = packet::receive(&requests) {
            let (error, stream) = match connect(port) {
                Ok(stream) => (None, Some(stream)),
                Err(error) => (Some(error.to_string()), None),
            };
            let streams: Vec<_> = stream.iter().map(AsFd::as_fd).collect();
            if packet::send(&requests, &Reply { error }, &streams).is_err() {
                return;
            }
        }
    })?;
    Ok(ConnectThread { socket, thread })
}

/// A thread that connects.
#[derive(Debug)]
pub(super) struct ConnectThread {
    socket: OwnedFd,
    thread: JoinHandle<()>,
}

impl ConnectThread {
    /// Ends the connection to the monitor, and with it the thread.
    pub(super) fn end(self) {
        let _ = rustix::net::shutdown(&self.socket, Shutdown::Both);
        let _ = self.thread.join();
    }
}

/// The companion's end of a link, in the hands of a test.
#[cfg(any(test, feature = "testing"))]
#[derive(Debug)]
pub(crate) struct TestCompanion(OwnedFd);

#[cfg(any(test, feature = "testing"))]
impl TestCompanion {
    /// A link and its other end.
    pub(crate) fn pair() -> io::Result<(ConnectLink, Self)> {
        let (ours, theirs) = super::pair()?;
        rustix::io::ioctl_fionbio(&theirs, true)?;
        Ok((ConnectLink::new(ours)?, Self(theirs)))
    }

    /// The port of the next request, if there is one.
    pub(crate) fn request(&self) -> Option<u32> {
        let (Connect { port }, _) = packet::receive(&self.0).ok().flatten()?;
        Some(port)
    }

    /// Answers a request with a socket or a refusal.
    pub(crate) fn answer(&self, socket: Option<BorrowedFd<'_>>) {
        let error = socket.is_none().then(|| "refused".to_owned());
        let _ = packet::send(&self.0, &Reply { error }, socket.as_slice());
    }
}

//! The host's side of a device under test: its listener, its companion, and clients.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::isolation::{ConnectLink, TestCompanion};

/// The host.
pub(super) struct Host {
    address: SocketAddrUnix,
    pub companion: TestCompanion,
}

impl Host {
    /// A host, and what the device needs of it. Its listener has no name in the file system.
    pub(super) fn new() -> io::Result<(Self, OwnedFd, ConnectLink)> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
        let listener = rustix::net::socket_with(family, kind, flags, None)?;
        rustix::net::bind(&listener, &SocketAddrUnix::new_unnamed())?;
        rustix::net::listen(&listener, 64)?;
        let address = rustix::net::getsockname(&listener)?.try_into()?;
        let (link, companion) = TestCompanion::pair()?;
        Ok((Self { address, companion }, listener, link))
    }

    /// A client that has written `text`.
    pub(super) fn client(&self, text: &[u8]) -> io::Result<UnixStream> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
        let socket = rustix::net::socket_with(family, kind, flags, None)?;
        rustix::net::connect(&socket, &self.address)?;
        rustix::io::write(&socket, text)?;
        Ok(socket.into())
    }

    /// Answers the companion's next request: the port, and the host's end of the connection.
    pub(super) fn serve(&self) -> Option<(u32, UnixStream)> {
        let port = self.companion.request()?;
        let (ours, theirs) = UnixStream::pair().ok()?;
        ours.set_nonblocking(true).ok()?;
        theirs.set_nonblocking(true).ok()?;
        self.companion.answer(Some(std::os::fd::AsFd::as_fd(&theirs)));
        Some((port, ours))
    }
}

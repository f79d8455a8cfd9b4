//! A socket that is never waited for, with TLS or without.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendFlags, SocketFlags,
    SocketType,
};

/// A dead host is noticed after about this time even if nothing is to be sent.
const KEEP_ALIVE: Duration = Duration::from_secs(5);
const KEEP_ALIVE_TRIES: u32 = 4;

/// How long sent bytes may stay unacknowledged.
const USER_TIMEOUT_MS: u32 = 25_000;

/// Plaintext that TLS takes at a time: some records, so that a call for each is saved.
const TLS_BUFFER_BYTES: usize = 256 << 10;

/// Buffers that the system takes at a time (`UIO_MAXIOV`, Linux include/uapi/linux/uio.h).
const MOST_BUFFERS: usize = 1024;

/// A socket from another process may be blocking, or become so at any time.
const SEND: SendFlags = SendFlags::NOSIGNAL.union(SendFlags::DONTWAIT);

/// What is read ahead for TLS, which by itself would ask the system for 4 KiB at a time.
const INBOX_BYTES: usize = 128 << 10;

/// A connected socket. `WouldBlock` means: wait for [`interest`](Self::interest) and call again.
#[derive(Debug)]
pub(super) struct Wire {
    socket: Arc<OwnedFd>,
    tls: Option<Box<Tls>>,
}

/// What TLS keeps of a connection.
#[derive(Debug)]
struct Tls {
    connection: rustls::Connection,
    inbox: Inbox,
    /// What is encrypted and has not gone never will.
    sealed: bool,
}

/// Encrypted bytes that the socket has given and TLS has not taken.
#[derive(Debug, Default)]
struct Inbox {
    bytes: Vec<u8>,
    taken: usize,
}

/// The socket itself, as the TLS library wants it.
struct Raw<'a>(&'a OwnedFd);

/// The same, for reading ahead.
struct Ahead<'a>(&'a OwnedFd, &'a mut Inbox);

impl Read for Raw<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let received = rustix::io::retry_on_intr(|| {
            let mut buffers = [IoSliceMut::new(buffer)];
            let mut nothing = RecvAncillaryBuffer::default();
            rustix::net::recvmsg(self.0, &mut buffers, &mut nothing, RecvFlags::DONTWAIT)
        })?;
        Ok(received.bytes)
    }
}

impl Read for Ahead<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let Self(socket, inbox) = self;
        if inbox.taken == inbox.bytes.len() {
            inbox.taken = 0;
            inbox.bytes.resize(INBOX_BYTES, 0);
            let received = Raw(socket).read(&mut inbox.bytes);
            inbox.bytes.truncate(*received.as_ref().unwrap_or(&0));
            received?;
        }
        let bytes = (&inbox.bytes[inbox.taken..]).read(buffer)?;
        inbox.taken += bytes;
        Ok(bytes)
    }
}

impl Write for Raw<'_> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(buffer)])
    }

    fn write_vectored(&mut self, buffers: &[IoSlice<'_>]) -> io::Result<usize> {
        let buffers = &buffers[..buffers.len().min(MOST_BUFFERS)];
        let send = || {
            let mut nothing = SendAncillaryBuffer::default();
            rustix::net::sendmsg(self.0, buffers, &mut nothing, SEND)
        };
        Ok(rustix::io::retry_on_intr(send)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Tls {
    fn new(mut connection: rustls::Connection) -> Self {
        match &mut connection {
            rustls::Connection::Client(client) => client.set_buffer_limit(Some(TLS_BUFFER_BYTES)),
            rustls::Connection::Server(server) => server.set_buffer_limit(Some(TLS_BUFFER_BYTES)),
        }
        Self { connection, inbox: Inbox::default(), sealed: false }
    }

    /// Gives the system what is encrypted and has not gone yet.
    fn flush(&mut self, socket: &OwnedFd) -> io::Result<()> {
        while self.wants_write() {
            self.connection.write_tls(&mut Raw(socket))?;
        }
        Ok(())
    }

    fn wants_write(&self) -> bool {
        self.connection.wants_write() && !self.sealed
    }

    /// Reads what the socket has and works on it. On failure the alert for the other side is sent
    /// at once.
    fn receive(&mut self, socket: &OwnedFd) -> io::Result<usize> {
        let bytes = self.connection.read_tls(&mut Ahead(socket, &mut self.inbox))?;
        if let Err(error) = self.connection.process_new_packets() {
            // If the alert does not go at once, the end of the connection has to be enough.
            let _ = self.flush(socket);
            return Err(io::Error::new(io::ErrorKind::InvalidData, error));
        }
        match self.flush(socket) {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
            _ => Ok(bytes),
        }
    }
}

/// An error of a write that would have no place for anything.
fn full_or(result: io::Result<usize>, asked: bool) -> io::Result<usize> {
    match result {
        Ok(0) if asked => Err(io::ErrorKind::WouldBlock.into()),
        result => result,
    }
}

impl Wire {
    pub(super) fn new(socket: OwnedFd, tls: Option<rustls::Connection>) -> Self {
        Self { socket: Arc::new(socket), tls: tls.map(|connection| Box::new(Tls::new(connection))) }
    }

    pub(super) fn socket(&self) -> &Arc<OwnedFd> {
        &self.socket
    }

    pub(super) const fn is_encrypted(&self) -> bool {
        self.tls.is_some()
    }

    /// What to wait for before the next try to read.
    pub(super) fn interest(&self) -> PollFlags {
        let pending = self.tls.as_ref().is_some_and(|tls| tls.wants_write());
        if pending { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN }
    }

    /// Some bytes; none at an orderly end.
    pub(super) fn try_read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let Some(tls) = &mut self.tls else { return Raw(&self.socket).read(buffer) };
        loop {
            match tls.connection.reader().read(buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                result => return result,
            }
            tls.receive(&self.socket)?;
        }
    }

    /// One step of a TLS handshake.
    pub(super) fn try_handshake(&mut self) -> io::Result<()> {
        while let Some(tls) = &mut self.tls
            && tls.connection.is_handshaking()
        {
            if tls.wants_write() {
                tls.flush(&self.socket)?;
            } else if tls.receive(&self.socket)? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        self.try_flush()
    }

    /// Takes some bytes; with TLS they are on their way only after [`try_flush`](Self::try_flush).
    pub(super) fn try_write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.tls {
            None => Raw(&self.socket).write(bytes),
            Some(tls) => full_or(tls.connection.writer().write(bytes), !bytes.is_empty()),
        }
    }

    /// Like [`try_write`](Self::try_write), from several buffers.
    pub(super) fn try_write_vectored(&mut self, buffers: &[IoSlice<'_>]) -> io::Result<usize> {
        match &mut self.tls {
            None => Raw(&self.socket).write_vectored(buffers),
            Some(tls) => {
                let asked = buffers.iter().any(|buffer| !buffer.is_empty());
                full_or(tls.connection.writer().write_vectored(buffers), asked)
            }
        }
    }

    /// Gives everything taken so far to the system.
    pub(super) fn try_flush(&mut self) -> io::Result<()> {
        self.tls.as_mut().map_or(Ok(()), |tls| tls.flush(&self.socket))
    }

    /// Sends nothing any more, whatever is asked: a write has failed, and what is left of it might
    /// complete a message that counts as unsent. Reading goes on, and TLS would send its rest at
    /// the next occasion.
    pub(super) fn seal(&mut self) {
        if let Some(tls) = &mut self.tls {
            tls.sealed = true;
        }
        // The system holds it as well. It fails only if the connection has ended.
        let _ = rustix::net::shutdown(&*self.socket, rustix::net::Shutdown::Write);
    }

    /// Announces the end of what this side sends.
    pub(super) fn end_of_output(&mut self) {
        if let Some(tls) = &mut self.tls {
            tls.connection.send_close_notify();
        }
        // The other side sees the end in any case.
        let _ = self.try_flush();
        let _ = rustix::net::shutdown(&*self.socket, rustix::net::Shutdown::Write);
    }

    /// Reads and forgets what has come; false at the end. A socket that is closed with unread bytes
    /// is reset, and the last words to the other side may be lost with it (RFC 2525 section 2.17).
    pub(super) fn drain(&mut self) -> bool {
        let mut scratch = [0; 16 << 10];
        for _ in 0..64 {
            match Raw(&self.socket).read(&mut scratch) {
                Ok(0) => return false,
                Ok(_) => {}
                Err(error) => return error.kind() == io::ErrorKind::WouldBlock,
            }
        }
        true
    }
}

impl AsFd for Wire {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// A new non-blocking stream socket.
pub(super) fn stream_socket(family: AddressFamily) -> Result<OwnedFd, Errno> {
    rustix::net::socket_with(
        family,
        SocketType::STREAM,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )
}

/// The family of a TCP address.
pub(super) const fn family(address: SocketAddr) -> AddressFamily {
    match address {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    }
}

/// Small messages go at once, and a host that has died is noticed.
pub(super) fn tune_tcp(socket: &OwnedFd) -> Result<(), Errno> {
    use rustix::net::sockopt;
    sockopt::set_tcp_nodelay(socket, true)?;
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, KEEP_ALIVE)?;
    sockopt::set_tcp_keepintvl(socket, KEEP_ALIVE)?;
    sockopt::set_tcp_keepcnt(socket, KEEP_ALIVE_TRIES)?;
    sockopt::set_tcp_user_timeout(socket, USER_TIMEOUT_MS)
}

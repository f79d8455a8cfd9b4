//! A non-blocking socket, with TLS or without.

use std::io::{self, IoSlice, Read, Write};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendAncillaryBuffer, SendFlags, SocketFlags, SocketType};

/// A dead host is noticed after about this time even if nothing is to be sent.
const KEEP_ALIVE: Duration = Duration::from_secs(5);
const KEEP_ALIVE_TRIES: u32 = 4;

/// How long sent bytes may stay unacknowledged.
const USER_TIMEOUT_MS: u32 = 25_000;

/// Plaintext that TLS takes at a time: some records, so that a call for each is saved.
const TLS_BUFFER_BYTES: usize = 256 << 10;

/// Buffers that the system takes at a time (`UIO_MAXIOV`, Linux include/uapi/linux/uio.h).
const MOST_BUFFERS: usize = 1024;

/// A connected socket. `WouldBlock` means: wait for [`interest`](Self::interest) and call again.
#[derive(Debug)]
pub(super) struct Wire {
    socket: Arc<OwnedFd>,
    tls: Option<Box<rustls::Connection>>,
}

/// The socket itself, as the TLS library wants it.
struct Raw<'a>(&'a OwnedFd);

impl Read for Raw<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let (bytes, _) =
            rustix::io::retry_on_intr(|| rustix::net::recv(self.0, &mut *buffer, RecvFlags::empty()))?;
        Ok(bytes)
    }
}

impl Write for Raw<'_> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        Ok(rustix::io::retry_on_intr(|| rustix::net::send(self.0, buffer, SendFlags::NOSIGNAL))?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Wire {
    pub(super) fn new(socket: OwnedFd, tls: Option<rustls::Connection>) -> Self {
        let tls = tls.map(|mut tls| {
            match &mut tls {
                rustls::Connection::Client(tls) => tls.set_buffer_limit(Some(TLS_BUFFER_BYTES)),
                rustls::Connection::Server(tls) => tls.set_buffer_limit(Some(TLS_BUFFER_BYTES)),
            }
            Box::new(tls)
        });
        Self { socket: Arc::new(socket), tls }
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
            match tls.reader().read(buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                result => return result,
            }
            receive(tls, &self.socket)?;
        }
    }

    /// One step of a TLS handshake.
    pub(super) fn try_handshake(&mut self) -> io::Result<()> {
        while let Some(tls) = &mut self.tls
            && tls.is_handshaking()
        {
            if tls.wants_write() {
                tls.write_tls(&mut Raw(&self.socket))?;
            } else if receive(tls, &self.socket)? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        self.try_flush()
    }

    /// Takes some bytes; with TLS they are on their way only after [`try_flush`](Self::try_flush).
    pub(super) fn try_write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.tls {
            None => Raw(&self.socket).write(bytes),
            Some(tls) => match tls.writer().write(bytes) {
                Ok(0) if !bytes.is_empty() => Err(io::ErrorKind::WouldBlock.into()),
                result => result,
            },
        }
    }

    /// Like [`try_write`](Self::try_write), from several buffers.
    pub(super) fn try_write_vectored(&mut self, buffers: &[IoSlice<'_>]) -> io::Result<usize> {
        let Some(tls) = &mut self.tls else {
            let buffers = &buffers[..buffers.len().min(MOST_BUFFERS)];
            let send = || {
                let mut nothing = SendAncillaryBuffer::default();
                rustix::net::sendmsg(&self.socket, buffers, &mut nothing, SendFlags::NOSIGNAL)
            };
            return Ok(rustix::io::retry_on_intr(send)?);
        };
        match tls.writer().write_vectored(buffers) {
            Ok(0) if buffers.iter().any(|buffer| !buffer.is_empty()) => Err(io::ErrorKind::WouldBlock.into()),
            result => result,
        }
    }

    /// Gives everything taken so far to the system.
    pub(super) fn try_flush(&mut self) -> io::Result<()> {
        if let Some(tls) = &mut self.tls {
            while tls.wants_write() {
                tls.write_tls(&mut Raw(&self.socket))?;
            }
        }
        Ok(())
    }

    /// Announces the end of what this side sends.
    pub(super) fn end_of_output(&mut self) {
        if let Some(tls) = &mut self.tls {
            tls.send_close_notify();
        }
        // The other side sees the end in any case.
        let _ = self.try_flush();
        let _ = rustix::net::shutdown(&*self.socket, rustix::net::Shutdown::Write);
    }

    /// Reads and forgets what has come; false at the end. A socket that is closed with unread bytes is reset, and the
    /// last words to the other side may be lost with it (RFC 2525 section 2.17).
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

/// Reads what the socket has and lets TLS work on it. On failure the alert for the other side is sent at once.
fn receive(tls: &mut rustls::Connection, socket: &OwnedFd) -> io::Result<usize> {
    let bytes = tls.read_tls(&mut Raw(socket))?;
    if let Err(error) = tls.process_new_packets() {
        while tls.wants_write() && tls.write_tls(&mut Raw(socket)).is_ok_and(|bytes| bytes > 0) {}
        return Err(io::Error::new(io::ErrorKind::InvalidData, error));
    }
    while tls.wants_write() {
        match tls.write_tls(&mut Raw(socket)) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
            Err(error) => return Err(error),
        }
    }
    Ok(bytes)
}

/// A new non-blocking stream socket.
pub(super) fn stream_socket(family: AddressFamily) -> Result<OwnedFd, Errno> {
    rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)
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

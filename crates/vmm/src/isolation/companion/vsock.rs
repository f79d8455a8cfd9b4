//! Connections of a guest to sockets of the host: the monitor names a port, its companion connects.
//!
//! They have a socket and a thread of their own, so that neither side waits for a slow disk.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

use ebb_local_io::stream_socket;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType};
use rustix::rand::{GetRandomFlags, getrandom};

use super::ended;
use super::message::{Connect, Reply};
use crate::packet;
use crate::seccomp::ThreadFilter;

/// The directory of a device's socket, and its name there.
pub(super) fn place(path: &Path) -> io::Result<(OwnedFd, OsString)> {
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = rustix::fs::open(parent.unwrap_or(Path::new(".")), flags, Mode::empty())?;
    Ok((directory, name.to_owned()))
}

/// The monitor's side. No call waits.
#[derive(Debug)]
pub struct VsockLink(OwnedFd);

impl VsockLink {
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

impl AsFd for VsockLink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A guest that connects to this port of the host receives random bytes and then nothing, until
/// a restore resets the connection: its agent then knows that there may be another machine with the
/// same random numbers. A server of the host on this port comes first.
pub const RANDOM_PORT: u32 = 3771;
/// Random bytes for a guest, whose pool makes no use of more.
const RANDOM_BYTES: usize = 32;

/// The companion's side.
#[derive(Debug)]
pub(super) struct VsockServer {
    /// The directory of the sockets.
    pub directory: OwnedFd,
    /// Beginning of their names.
    pub name: OsString,
    /// The connection to the monitor.
    pub socket: OwnedFd,
    /// The other end of the last connection to [`RANDOM_PORT`]: there is one at a time.
    pub random: Option<OwnedFd>,
}

impl VsockServer {
    /// Serves the requests on a thread, which ends with the monitor.
    pub(super) fn spawn(mut self, filter: ThreadFilter) -> io::Result<VsockThread> {
        let socket = self.socket.try_clone()?;
        let thread = std::thread::Builder::new().name("vsock".to_owned()).spawn(move || {
            if let Err(error) = filter.apply() {
                tracing::warn!("vsock: {error}");
                return;
            }
            while let Ok(Some((Connect { port }, _))) = packet::receive(&self.socket) {
                let (error, stream) = match self.connect(port) {
                    Ok(stream) => (None, Some(stream)),
                    Err(error) => (Some(error.to_string()), None),
                };
                let streams: Vec<_> = stream.iter().map(AsFd::as_fd).collect();
                if packet::send(&self.socket, &Reply { error }, &streams).is_err() {
                    return;
                }
            }
        })?;
        Ok(VsockThread { socket, thread })
    }

    /// Connects to the socket of a port; the result does not block. A full queue of its listener is
    /// a refusal: a guest must not wait for another one's server.
    fn connect(&mut self, port: u32) -> io::Result<OwnedFd> {
        let mut path = PathBuf::from(format!("/proc/self/fd/{}", self.directory.as_raw_fd()));
        let mut name = self.name.clone();
        name.push(format!("_{port}"));
        path.push(name);
        let stream = stream_socket()?;
        match rustix::net::connect(&stream, &SocketAddrUnix::new(&path)?) {
            Err(Errno::NOENT) if port == RANDOM_PORT => self.random_bytes(),
            connected => Ok(connected.map(|()| stream)?),
        }
    }

    fn random_bytes(&mut self) -> io::Result<OwnedFd> {
        let mut bytes = [0; RANDOM_BYTES];
        getrandom(&mut bytes, GetRandomFlags::empty())?;
        let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (ours, theirs) = rustix::net::socketpair(family, kind, flags, None)?;
        rustix::io::write(&ours, &bytes)?;
        self.random = Some(ours);
        Ok(theirs)
    }
}

/// The thread of a [`VsockServer`].
#[derive(Debug)]
pub(super) struct VsockThread {
    socket: OwnedFd,
    thread: JoinHandle<()>,
}

impl VsockThread {
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
    pub(crate) fn pair() -> io::Result<(VsockLink, Self)> {
        let (ours, theirs) = super::pair()?;
        rustix::io::ioctl_fionbio(&theirs, true)?;
        Ok((VsockLink::new(ours)?, Self(theirs)))
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

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    #[test]
    fn a_guest_gets_random_bytes_unless_a_server_listens() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("vsock");
        let (place, name) = place(&path).unwrap();
        let (socket, _) = crate::isolation::companion::pair().unwrap();
        let mut server = VsockServer { directory: place, name, socket, random: None };
        let mut connect = || server.connect(RANDOM_PORT).map(UnixStream::from);
        let read = |stream: &mut UnixStream| {
            let mut bytes = [0; RANDOM_BYTES];
            stream.read_exact(&mut bytes).unwrap();
            bytes
        };
        let waits = |stream: &mut UnixStream| {
            let end = stream.read(&mut [0]);
            end.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
        };
        let mut first = connect().unwrap();
        let bytes = read(&mut first);
        assert!(waits(&mut first), "it stays open");
        let mut second = connect().unwrap();
        assert_ne!(read(&mut second), bytes);
        assert!(waits(&mut second) && !waits(&mut first), "there is one at a time");

        let server_path = directory.path().join("vsock_3771");
        let _listener = UnixListener::bind(&server_path).unwrap();
        let mut third = connect().unwrap();
        assert!(waits(&mut third), "nothing is sent in its place");
        let other = server.connect(RANDOM_PORT + 1).map(drop).unwrap_err();
        assert_eq!(other.kind(), io::ErrorKind::NotFound);
    }
}

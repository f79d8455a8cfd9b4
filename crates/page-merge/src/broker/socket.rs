//! The unix socket between a broker and its clients.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, Timespec};
use rustix::fs::{FlockOperation, Mode};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use super::error::BrokerError;

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 128;

/// How long is waited for another one that starts at the same place.
const START_PATIENCE: Duration = Duration::from_secs(5);

/// How long is waited before something is tried again.
const PAUSE: Duration = Duration::from_millis(5);

/// The name of a socket that this process has bound; removed when dropped, unless it is another's by now.
#[derive(Debug)]
pub(super) struct SocketFile {
    path: PathBuf,
    /// Device and inode.
    identity: Option<(u64, u64)>,
}

impl SocketFile {
    /// Listens at `path`. The name of a broker that was killed is taken over, that of a living one is not.
    pub(super) fn listen(path: &Path, mode: Mode) -> Result<(Self, OwnedFd), BrokerError> {
        let failed = |what| {
            move |errno: Errno| BrokerError::Listen { path: path.to_owned(), what, source: errno.into() }
        };
        let address = SocketAddrUnix::new(path).map_err(failed("use the path"))?;
        // Two that start at the same time must not both take over; the lock ends with this function.
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let folder = File::open(folder).ok();
        if let Some(folder) = &folder {
            lock(folder).map_err(failed("lock its folder, which another process keeps locked"))?;
        }
        let socket = stream().map_err(failed("create a socket"))?;
        // The file takes the mode of the socket's own inode (Linux net/unix/af_unix.c, unix_bind_bsd).
        rustix::fs::fchmod(&socket, mode).map_err(failed("set the permissions"))?;
        match rustix::net::bind(&socket, &address) {
            Err(Errno::ADDRINUSE) => {
                let occupied = |problem| BrokerError::Occupied { path: path.to_owned(), problem };
                let probe = stream().map_err(failed("create a socket"))?;
                match rustix::net::connect(&probe, &address) {
                    Err(Errno::CONNREFUSED) if is_socket(path) => {
                        rustix::fs::unlink(path).map_err(failed("remove the old socket"))?;
                    }
                    Err(Errno::CONNREFUSED) => {
                        return Err(occupied(
                            "a file that is no socket has this name; remove it or choose another path",
                        ));
                    }
                    Err(Errno::NOENT) => {}
                    _ => {
                        return Err(occupied(
                            "another process listens there; end it first or choose another path",
                        ));
                    }
                }
                rustix::net::bind(&socket, &address)
            }
            result => result,
        }
        .map_err(failed("bind the socket"))?;
        let file = Self { path: path.to_owned(), identity: identity(path) };
        // What the mask for new files has taken away.
        rustix::fs::chmod(path, mode).map_err(failed("set the permissions"))?;
        rustix::net::listen(&socket, BACKLOG).map_err(failed("listen"))?;
        Ok((file, socket))
    }

    /// The name.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if self.identity.is_some()
            && identity(&self.path) == self.identity
            && let Err(errno) = rustix::fs::unlink(&self.path)
        {
            tracing::warn!("cannot remove the socket {:?}: {errno}", self.path);
        }
    }
}

/// Locks a folder until it is closed. Everybody who may read it can do so: nobody is waited for without end. A file system
/// without locks is none that two brokers start on.
fn lock(folder: &File) -> Result<(), Errno> {
    let deadline = Instant::now() + START_PATIENCE;
    loop {
        match rustix::fs::flock(folder, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) if Instant::now() < deadline => std::thread::sleep(PAUSE),
            Err(Errno::WOULDBLOCK) => return Err(Errno::WOULDBLOCK),
            _ => return Ok(()),
        }
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    rustix::fs::lstat(path).ok().map(|stat| (stat.st_dev, stat.st_ino))
}

fn is_socket(path: &Path) -> bool {
    let kind = |stat: rustix::fs::Stat| rustix::fs::FileType::from_raw_mode(stat.st_mode);
    rustix::fs::lstat(path).is_ok_and(|stat| kind(stat) == rustix::fs::FileType::Socket)
}

/// A new non-blocking socket.
pub(super) fn stream() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
}

/// Connects. While more wait to be accepted than can, it is tried again until `deadline`.
pub(super) fn connect(address: &SocketAddrUnix, deadline: Instant) -> Result<OwnedFd, Errno> {
    loop {
        let socket = stream()?;
        match rustix::net::connect(&socket, address) {
            Ok(()) => return Ok(socket),
            Err(Errno::AGAIN) if Instant::now() < deadline => std::thread::sleep(PAUSE),
            Err(errno) => return Err(errno),
        }
    }
}

/// Sends what the system takes at once, with a descriptor at its first byte if there is one.
pub(super) fn send(socket: impl AsFd, bytes: &[u8], descriptor: Option<BorrowedFd<'_>>) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let descriptors = descriptor.as_slice();
    rustix::io::retry_on_intr(|| {
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(descriptors)) {
            return Err(Errno::NOBUFS);
        }
        rustix::net::sendmsg(&socket, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL)
    })
    .map_err(io::Error::from)
}

/// Receives what is there, with the descriptors that came with it. No bytes mean the end.
pub(super) fn receive(
    socket: impl AsFd,
    buffer: &mut [u8],
    descriptors: &mut impl Extend<OwnedFd>,
) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    loop {
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut slices = [IoSliceMut::new(&mut *buffer)];
        match rustix::net::recvmsg(&socket, &mut slices, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
            Ok(received) => {
                for message in ancillary.drain() {
                    if let RecvAncillaryMessage::ScmRights(received) = message {
                        descriptors.extend(received);
                    }
                }
                return Ok(received.bytes);
            }
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Waits until something happens or `deadline` has come.
pub(super) fn wait(descriptors: &mut [PollFd<'_>], deadline: Option<Instant>) -> io::Result<()> {
    let timeout = deadline.map(|deadline| {
        // A part of a millisecond too much rather than a wait that ends before its time.
        let left = deadline.saturating_duration_since(Instant::now()) + Duration::from_micros(100);
        Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        }
    });
    match rustix::event::poll(descriptors, timeout.as_ref()) {
        Ok(_) => Ok(()),
        Err(Errno::INTR) => {
            descriptors.iter_mut().for_each(PollFd::clear_revents);
            Ok(())
        }
        Err(errno) => Err(errno.into()),
    }
}

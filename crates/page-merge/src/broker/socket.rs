//! The unix socket between a broker and its clients.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use ebb_local_io::stream_socket;
use rustix::event::{PollFd, Timespec};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix,
};
use rustix::process::Pid;

/// Pause between two attempts.
const PAUSE: Duration = Duration::from_millis(5);

/// Connects. While the queue of waiting connections is full, retries until `deadline`.
pub(super) fn connect(address: &SocketAddrUnix, deadline: Instant) -> Result<OwnedFd, Errno> {
    loop {
        let socket = stream_socket()?;
        match rustix::net::connect(&socket, address) {
            Ok(()) => return Ok(socket),
            Err(Errno::AGAIN) if Instant::now() < deadline => std::thread::sleep(PAUSE),
            Err(errno) => return Err(errno),
        }
    }
}

/// Sends as much as the kernel takes immediately, with an optional descriptor at the first byte.
pub(super) fn send(
    socket: impl AsFd,
    bytes: &[u8],
    descriptor: Option<BorrowedFd<'_>>,
) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let descriptors = descriptor.as_slice();
    // Another process may have made the socket, and lets it block.
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    rustix::io::retry_on_intr(|| {
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(descriptors))
        {
            return Err(Errno::NOBUFS);
        }
        rustix::net::sendmsg(&socket, &[IoSlice::new(bytes)], &mut ancillary, flags)
    })
    .map_err(io::Error::from)
}

/// Receives the available bytes, with the descriptors that accompany them. No bytes mean the end.
pub(super) fn receive(
    socket: impl AsFd,
    buffer: &mut [u8],
    descriptors: &mut impl Extend<OwnedFd>,
) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    loop {
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut slices = [IoSliceMut::new(&mut *buffer)];
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        match rustix::net::recvmsg(&socket, &mut slices, &mut ancillary, flags) {
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

/// Receives the available bytes of one sender, and its process, from a socket that passes it
/// (`SO_PASSCRED`, unix(7)). No bytes mean the end.
pub(super) fn receive_from(
    socket: impl AsFd,
    buffer: &mut [u8],
) -> Result<(usize, Option<Pid>), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmCredentials(1))];
    rustix::io::retry_on_intr(|| {
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut slices = [IoSliceMut::new(&mut *buffer)];
        let flags = RecvFlags::CMSG_CLOEXEC;
        let received = rustix::net::recvmsg(&socket, &mut slices, &mut ancillary, flags)?;
        let sender = ancillary.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmCredentials(credentials) => Some(credentials.pid),
            _ => None,
        });
        Ok((received.bytes, sender))
    })
}

/// Waits for an event or until `deadline`.
pub(super) fn wait(descriptors: &mut [PollFd<'_>], deadline: Option<Instant>) -> io::Result<()> {
    let timeout = deadline.map(|deadline| {
        // Rounded up by part of a millisecond, so that the wait does not end early.
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

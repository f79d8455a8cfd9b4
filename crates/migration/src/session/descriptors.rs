//! File descriptors through a unix socket (unix(7), `SCM_RIGHTS`).
//!
//! Each is sent with a byte of its own after the message that announces them: an ordinary read
//! would lose it.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use std::os::fd::AsFd;

use super::cancel::CancelHandle;
use super::connection::{Connection, wait};

/// The byte that carries a descriptor.
const MARK: u8 = b'F';

/// Sends one descriptor.
pub(super) fn send(
    connection: &Connection,
    descriptor: BorrowedFd<'_>,
    cancel: &CancelHandle,
    deadline: (std::time::Instant, std::time::Duration),
) -> std::io::Result<()> {
    let socket = connection.as_fd();
    loop {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let descriptors = [descriptor];
        if !ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)) {
            return Err(Errno::NOBUFS.into());
        }
        match rustix::net::sendmsg(
            socket,
            &[IoSlice::new(&[MARK])],
            &mut ancillary,
            SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
        ) {
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => wait(socket, PollFlags::OUT, Some(cancel), deadline)?,
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Receives one descriptor.
pub(super) fn receive(
    connection: &Connection,
    cancel: &CancelHandle,
    deadline: (std::time::Instant, std::time::Duration),
) -> std::io::Result<OwnedFd> {
    let socket = connection.as_fd();
    loop {
        let mut byte = [0];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut slices = [IoSliceMut::new(&mut byte)];
        let received = match rustix::net::recvmsg(
            socket,
            &mut slices,
            &mut ancillary,
            RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT,
        ) {
            Ok(received) => received,
            Err(Errno::INTR) => continue,
            Err(Errno::AGAIN) => {
                wait(socket, PollFlags::IN, Some(cancel), deadline)?;
                continue;
            }
            Err(errno) => return Err(errno.into()),
        };
        if received.bytes == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        let mut descriptors = ancillary.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
            _ => None,
        });
        let descriptor = descriptors.next().and_then(|mut descriptors| descriptors.next());
        return match descriptor {
            Some(descriptor) if byte == [MARK] => Ok(descriptor),
            _ => Err(std::io::Error::new(
                std::io::ErrorKind::InvalidData,
                "a file descriptor is missing",
            )),
        };
    }
}

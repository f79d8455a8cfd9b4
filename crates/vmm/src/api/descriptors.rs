//! File descriptors that accompany the bytes of a request (`SCM_RIGHTS`, unix(7)).

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

/// Most descriptors of a request.
pub const MAX_DESCRIPTORS: usize = 24;

/// What a call has received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Received {
    /// Bytes received; none at the end of the input.
    pub bytes: usize,
    /// Whether all descriptors that came with them were received.
    pub descriptors: Completeness,
}

/// Whether all descriptors of a message were received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Completeness {
    All,
    /// The kernel has closed some: they were too many for a request, or for this process.
    Truncated,
}

/// Receives available bytes without waiting, and adds the descriptors that came with them to
/// `descriptors`: at most one more than [`MAX_DESCRIPTORS`] in a call.
pub(super) fn receive(
    socket: impl AsFd,
    buffer: &mut [u8],
    descriptors: &mut Vec<OwnedFd>,
) -> Result<Received, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = rustix::net::recvmsg(
        socket,
        &mut [IoSliceMut::new(buffer)],
        &mut ancillary,
        RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC,
    )?;
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    let truncated = received.flags.contains(ReturnFlags::CTRUNC);
    Ok(Received {
        bytes: received.bytes,
        descriptors: if truncated { Completeness::Truncated } else { Completeness::All },
    })
}

/// Receives available bytes without waiting; descriptors that came with them are closed by the
/// kernel.
pub(super) fn receive_bytes(socket: impl AsFd, buffer: &mut [u8]) -> Result<usize, Errno> {
    let received = rustix::net::recvmsg(
        socket,
        &mut [IoSliceMut::new(buffer)],
        &mut RecvAncillaryBuffer::default(),
        RecvFlags::DONTWAIT,
    )?;
    Ok(received.bytes)
}

/// Sends as many `bytes` as the socket accepts. All descriptors accompany the first of them.
pub(super) fn send(
    socket: impl AsFd,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(Errno::NOBUFS);
    }
    rustix::net::sendmsg(
        socket,
        &[IoSlice::new(bytes)],
        &mut ancillary,
        SendFlags::NOSIGNAL | flags,
    )
}

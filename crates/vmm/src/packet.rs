//! Messages between processes of one user: JSON in one packet of a unix socket, with descriptors.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};
use rustix::process::Pid;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Longest message in bytes.
const MAX_BYTES: usize = 8192;
/// Most descriptors of a message.
const MAX_DESCRIPTORS: usize = 32;

/// Two connected sockets for packets.
///
/// # Errors
/// Those of socketpair(2).
pub(crate) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    Ok(rustix::net::socketpair(family, kind, SocketFlags::CLOEXEC, None)?)
}

/// A message, and what came with it.
pub(crate) struct Packet<T> {
    pub message: T,
    pub descriptors: Vec<OwnedFd>,
    /// Who sent it, as the kernel knows it; only from a socket that asks for it (unix(7),
    /// `SO_PASSCRED`).
    pub sender: Option<Pid>,
}

/// Sends a message in one packet.
pub(crate) fn send(
    socket: impl AsFd,
    message: &impl Serialize,
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let text = serde_json::to_vec(message)?;
    if text.len() > MAX_BYTES {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the message is too long"));
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many descriptors"));
    }
    let parts = [IoSlice::new(&text)];
    rustix::io::retry_on_intr(|| {
        rustix::net::sendmsg(&socket, &parts, &mut ancillary, SendFlags::NOSIGNAL)
    })?;
    Ok(())
}

/// Receives a message; `None` at the end of the connection.
pub(crate) fn receive<T: DeserializeOwned>(
    socket: impl AsFd,
) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    Ok(receive_packet(socket)?.map(|packet| (packet.message, packet.descriptors)))
}

/// As [`receive`], with its sender.
pub(crate) fn receive_packet<T: DeserializeOwned>(
    socket: impl AsFd,
) -> io::Result<Option<Packet<T>>> {
    let mut text = [0; MAX_BYTES];
    let mut space =
        [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS), ScmCredentials(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        let mut parts = [IoSliceMut::new(&mut text)];
        match rustix::net::recvmsg(&socket, &mut parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => {}
            result => break result?,
        }
    };
    let (mut descriptors, mut sender) = (Vec::new(), None);
    for message in ancillary.drain() {
        match message {
            RecvAncillaryMessage::ScmRights(rights) => descriptors.extend(rights),
            RecvAncillaryMessage::ScmCredentials(credentials) => sender = Some(credentials.pid),
            _ => {}
        }
    }
    if received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the message is too long"));
    }
    if received.bytes == 0 {
        return Ok(None);
    }
    let message = serde_json::from_slice(&text[..received.bytes])?;
    Ok(Some(Packet { message, descriptors, sender }))
}

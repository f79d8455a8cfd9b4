//! User check of the peer of a unix socket.

use std::os::fd::AsFd;

use rustix::process::Uid;

use super::error::SessionError;

/// Refuses processes of other users than `ours` and root.
pub(super) fn check(socket: impl AsFd, address: &str, ours: Uid) -> Result<(), SessionError> {
    let credentials = rustix::net::sockopt::socket_peercred(socket)
        .map_err(SessionError::system("read the peer's user id"))?;
    let theirs = credentials.uid;
    if theirs == ours || theirs.is_root() {
        return Ok(());
    }
    Err(SessionError::ForeignUser {
        address: address.to_owned(),
        theirs: theirs.as_raw(),
        ours: ours.as_raw(),
    })
}

//! User check of the peer of a unix socket.

use std::os::fd::AsFd;

use super::error::SessionError;

/// Refuses processes of other users than this one's and root.
pub(super) fn check(socket: impl AsFd, address: &str) -> Result<(), SessionError> {
    let credentials = rustix::net::sockopt::socket_peercred(socket)
        .map_err(SessionError::system("read the peer's user id"))?;
    let (theirs, ours) = (credentials.uid, rustix::process::geteuid());
    if theirs == ours || theirs.is_root() {
        return Ok(());
    }
    Err(SessionError::ForeignUser {
        address: address.to_owned(),
        theirs: theirs.as_raw(),
        ours: ours.as_raw(),
    })
}

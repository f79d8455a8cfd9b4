//! The file of a listening unix socket: created with mode 0600, a stale one replaced, a live one left alone, removed at
//! the end.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, FlockOperation, Mode};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix};

use super::error::SessionError;
use super::wire::stream_socket;

/// The name of a socket that this process has bound. Dropping it removes the file, unless it is another's by now.
#[derive(Debug)]
pub(super) struct SocketFile {
    path: PathBuf,
    /// Device and inode.
    identity: Option<(u64, u64)>,
}

impl SocketFile {
    /// Binds a socket to `path` and listens.
    pub(super) fn listen(path: &Path, backlog: i32) -> Result<(Self, OwnedFd), SessionError> {
        let failed = |what| {
            move |errno: Errno| SessionError::Listen { address: display(path), what, source: errno.into() }
        };
        let address = SocketAddrUnix::new(path).map_err(failed("use the path"))?;
        // Two processes that start at the same time must not both replace a stale socket. The lock on the folder ends
        // with this function; a folder that cannot be locked costs the protection against a rare race, no more.
        let _lock = lock_folder(path);
        let socket = stream_socket(AddressFamily::UNIX).map_err(failed("create a socket"))?;
        // The file takes the mode of the socket's own inode (Linux net/unix/af_unix.c, unix_bind_bsd).
        rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR).map_err(failed("set the permissions"))?;
        match rustix::net::bind(&socket, &address) {
            Err(Errno::ADDRINUSE) => {
                remove_stale(path, &address)?;
                rustix::net::bind(&socket, &address)
            }
            result => result,
        }
        .map_err(failed("bind the socket"))?;
        let file = Self { path: path.to_owned(), identity: identity(path) };
        rustix::net::listen(&socket, backlog).map_err(failed("listen"))?;
        Ok((file, socket))
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

fn display(path: &Path) -> String {
    format!("unix:{}", path.display())
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    rustix::fs::lstat(path).ok().map(|stat| (stat.st_dev, stat.st_ino))
}

fn lock_folder(path: &Path) -> Option<File> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let folder = File::open(folder).ok()?;
    rustix::fs::flock(&folder, FlockOperation::LockExclusive).ok()?;
    Some(folder)
}

/// Removes the socket at `path` if nobody listens on it.
fn remove_stale(path: &Path, address: &SocketAddrUnix) -> Result<(), SessionError> {
    let occupied = |problem| SessionError::Occupied { address: display(path), problem };
    let failed = |what| {
        move |errno: Errno| SessionError::Listen { address: display(path), what, source: errno.into() }
    };
    let stat = match rustix::fs::lstat(path) {
        Ok(stat) => stat,
        Err(Errno::NOENT) => return Ok(()),
        Err(errno) => return Err(failed("examine what is there")(errno)),
    };
    if FileType::from_raw_mode(stat.st_mode) != FileType::Socket {
        return Err(occupied("a file that is no socket has this name; choose another path or remove it"));
    }
    let probe = stream_socket(AddressFamily::UNIX).map_err(failed("create a socket"))?;
    match rustix::net::connect(&probe, address) {
        Err(Errno::CONNREFUSED) => {}
        Err(Errno::NOENT) => return Ok(()),
        // Connected, or the other's queue is full, or it is a datagram socket: somebody is there.
        Ok(()) | Err(Errno::AGAIN | Errno::PROTOTYPE) => {
            return Err(occupied("another process listens there; choose another path or end it first"));
        }
        Err(errno) => return Err(failed("find out whether somebody listens")(errno)),
    }
    match rustix::fs::unlink(path) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(errno) => Err(failed("remove the old socket")(errno)),
    }
}

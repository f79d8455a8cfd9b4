//! The socket's file: created with mode 0600, a stale one replaced, a live one left alone, removed at the end.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, FlockOperation, Mode};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::ApiError;

/// Clients that may wait to be accepted.
const BACKLOG: i32 = 16;

/// The name of a socket that this process has bound.
pub(super) struct BoundSocket {
    path: PathBuf,
    /// Device and inode, so that no other's file is removed. `None` once removed.
    identity: Option<(u64, u64)>,
}

impl BoundSocket {
    /// Binds a listening, non-blocking socket to `path`.
    pub(super) fn bind(path: &Path) -> Result<(Self, OwnedFd), ApiError> {
        let bad_path = |_| ApiError::BadPath { path: path.to_owned(), length: path.as_os_str().len() };
        if path.as_os_str().is_empty() {
            return Err(bad_path(Errno::INVAL));
        }
        let address = SocketAddrUnix::new(path).map_err(bad_path)?;
        // Two monitors that start at the same time must not both take a stale socket for theirs, and one that has
        // bound but does not listen yet looks stale. The lock on the folder ends with this function.
        let _lock = lock_folder(path);
        let listener = stream_socket().map_err(|errno| failed(path, "create a socket", errno))?;
        // The file gets the mode of the socket's own inode (Linux net/unix/af_unix.c, unix_bind_bsd): no moment with
        // wider permissions, as there would be with chmod afterwards.
        rustix::fs::fchmod(&listener, Mode::RUSR | Mode::WUSR)
            .map_err(|errno| failed(path, "set the permissions", errno))?;
        match rustix::net::bind(&listener, &address) {
            Err(Errno::ADDRINUSE) => {
                remove_stale(path, &address)?;
                rustix::net::bind(&listener, &address)
            }
            result => result,
        }
        .map_err(|errno| failed(path, "bind an address", errno))?;
        let mut bound = Self { path: path.to_owned(), identity: None };
        bound.identity = identity(path);
        // From here on dropping `bound` removes the file.
        rustix::net::listen(&listener, BACKLOG).map_err(|errno| failed(path, "listen", errno))?;
        Ok((bound, listener))
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the file, unless it is another's by now.
    pub(super) fn remove(&mut self) {
        let Some(own) = self.identity.take() else { return };
        if identity(&self.path) != Some(own) {
            return;
        }
        if let Err(errno) = rustix::fs::unlink(&self.path) {
            tracing::warn!("cannot remove the API socket {:?}: {errno}", self.path);
        }
    }
}

impl Drop for BoundSocket {
    fn drop(&mut self) {
        self.remove();
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    rustix::fs::lstat(path).ok().map(|stat| (stat.st_dev, stat.st_ino))
}

fn stream_socket() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
}

/// A folder that cannot be opened or locked costs the protection against a rare race, no more.
fn lock_folder(path: &Path) -> Option<File> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let folder = File::open(folder).ok()?;
    rustix::fs::flock(&folder, FlockOperation::LockExclusive).ok()?;
    Some(folder)
}

/// Removes the socket at `path` if nobody listens on it.
fn remove_stale(path: &Path, address: &SocketAddrUnix) -> Result<(), ApiError> {
    let stat = match rustix::fs::lstat(path) {
        Ok(stat) => stat,
        Err(Errno::NOENT) => return Ok(()),
        Err(errno) => return Err(failed(path, "examine the file", errno)),
    };
    if FileType::from_raw_mode(stat.st_mode) != FileType::Socket {
        return Err(ApiError::NotASocket { path: path.to_owned() });
    }
    let probe = stream_socket().map_err(|errno| failed(path, "create a socket", errno))?;
    match rustix::net::connect(&probe, address) {
        Err(Errno::CONNREFUSED) => {}
        Err(Errno::NOENT) => return Ok(()),
        // Connected, or the other's queue is full, or it is a datagram socket: somebody is there.
        Ok(()) | Err(Errno::AGAIN | Errno::PROTOTYPE) => {
            return Err(ApiError::InUse { path: path.to_owned() });
        }
        Err(errno) => return Err(failed(path, "find out whether another process listens", errno)),
    }
    tracing::info!("replacing the API socket {path:?}, which nobody listens on any more");
    match rustix::fs::unlink(path) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(errno) => Err(failed(path, "remove the old socket", errno)),
    }
}

fn failed(path: &Path, what: &'static str, errno: Errno) -> ApiError {
    let path = path.to_owned();
    match errno {
        Errno::NOENT | Errno::NOTDIR => ApiError::NoFolder { path },
        Errno::ACCESS | Errno::PERM | Errno::ROFS => ApiError::PermissionDenied { path },
        Errno::ADDRINUSE => ApiError::InUse { path },
        errno => ApiError::Io { what, path, source: io::Error::from(errno) },
    }
}

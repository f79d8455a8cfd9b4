//! A listening socket and its name in the file system.

use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use thiserror::Error;

use crate::lock::{LIMIT, NameLock};

/// Why a process cannot listen at a path.
#[derive(Debug, Error)]
pub enum ListenError {
    /// The path does not fit into a socket address (unix(7)), or has a zero byte.
    #[error(
        "the socket path {path:?} cannot be used: it has {length} bytes, and 1 to 107 without zeros \
         are possible; choose a shorter one"
    )]
    BadPath {
        /// What was asked.
        path: PathBuf,
        /// Its length in bytes.
        length: usize,
    },
    /// The directory does not exist.
    #[error(
        "the socket {path:?} cannot be created: its directory does not exist; create it or choose \
         another path"
    )]
    NoDirectory {
        /// What was asked.
        path: PathBuf,
    },
    /// The directory may not be written.
    #[error(
        "the socket {path:?} cannot be created: no permission; choose a directory that this user may \
         write"
    )]
    PermissionDenied {
        /// What was asked.
        path: PathBuf,
    },
    /// A live process listens there.
    #[error("another process listens at {path:?}; choose another path or end that process first")]
    InUse {
        /// What was asked.
        path: PathBuf,
    },
    /// A file of another kind has this name.
    #[error(
        "{path:?} exists and is not a socket; choose another path for the socket or remove that file"
    )]
    NotASocket {
        /// What was asked.
        path: PathBuf,
    },
    /// Another process or user has the lock on the name.
    #[error(
        "the socket {path:?} cannot be created: its lock {lock:?} belongs to another process or user; choose a directory \
         that only this user may write, or remove that file"
    )]
    Locked {
        /// What was asked.
        path: PathBuf,
        /// The file of the lock.
        lock: PathBuf,
    },
    /// Anything else.
    #[error("cannot {action} for the socket {path:?}: {source}")]
    Io {
        /// What was attempted.
        action: &'static str,
        /// What was asked.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
}

/// The name of a socket that this process has bound. Dropping it removes the name, unless it has
/// become another file's.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    /// Device and inode number; `None` once removed.
    identity: Option<(u64, u64)>,
}

impl SocketFile {
    /// A stream socket, non-blocking, that listens at `path`, a file with the permissions `mode`
    /// from its first moment on. The name of a process that has died is taken over. `backlog` is as
    /// in listen(2).
    ///
    /// Drop the name before the socket: after the socket, another process can have taken the name
    /// over.
    ///
    /// System calls: `openat`, `flock`, `fstat`, `lstat`, `socket`, `fchmod`, `bind`, `listen`,
    /// `connect`, `unlink`, and `chmod` for a mode wider than the owner's.
    ///
    /// In a directory that others may write to (`/tmp`), they can keep a name for themselves, as a
    /// socket, a file or a lock; no process waits for that longer than five seconds.
    ///
    /// # Errors
    /// [`ListenError`]; a live process and files that are not sockets are left alone.
    pub fn listen(path: &Path, mode: Mode, backlog: i32) -> Result<(Self, OwnedFd), ListenError> {
        let bad_path =
            |_| ListenError::BadPath { path: path.to_owned(), length: path.as_os_str().len() };
        if path.as_os_str().is_empty() {
            return Err(bad_path(Errno::INVAL));
        }
        let address = SocketAddrUnix::new(path).map_err(bad_path)?;
        // A process that has bound and does not listen yet looks like one that has died: of two
        // that start at the same time, both would take over.
        let lock = NameLock::take(path, LIMIT).map_err(|errno| match errno {
            Errno::WOULDBLOCK => locked(path),
            // Of another user, in a directory that all may write to, or no regular file.
            Errno::ACCESS | Errno::PERM | Errno::LOOP | Errno::ISDIR | Errno::NXIO
                if lock_exists(path) =>
            {
                locked(path)
            }
            errno => failed(path, "lock the name", errno),
        })?;
        let socket = stream_socket().map_err(|errno| failed(path, "create a socket", errno))?;
        // The file takes the mode of the socket's own inode (Linux net/unix/af_unix.c,
        // unix_bind_bsd): there is no moment with wider permissions.
        rustix::fs::fchmod(&socket, mode)
            .map_err(|errno| failed(path, "set the permissions", errno))?;
        match rustix::net::bind(&socket, &address) {
            Err(Errno::ADDRINUSE) => {
                remove_stale(path, &address)?;
                rustix::net::bind(&socket, &address)
            }
            result => result,
        }
        .map_err(|errno| failed(path, "bind the socket", errno))?;
        let file = Self { path: path.to_owned(), identity: identity(path) };
        if mode.intersects(Mode::RWXG | Mode::RWXO) {
            // The process's umask has been subtracted.
            file.set_mode(mode).map_err(|errno| failed(path, "set the permissions", errno))?;
        }
        rustix::net::listen(&socket, backlog).map_err(|errno| failed(path, "listen", errno))?;
        drop(lock);
        Ok((file, socket))
    }

    /// Changes the permissions of the socket, and of nothing that has taken its name.
    fn set_mode(&self, mode: Mode) -> Result<(), Errno> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let socket = rustix::fs::open(&self.path, flags, Mode::empty())?;
        let stat = rustix::fs::fstat(&socket)?;
        if Some((stat.st_dev, stat.st_ino)) != self.identity {
            return Err(Errno::NOENT);
        }
        // fchmod(2) takes no descriptor of O_PATH.
        rustix::fs::chmod(format!("/proc/self/fd/{}", socket.as_raw_fd()), mode)
    }

    /// The path that was asked for.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the name now. System calls: `lstat`, `unlink`.
    pub fn remove(&mut self) {
        let Some(own) = self.identity.take() else { return };
        if identity(&self.path) != Some(own) {
            return;
        }
        if let Err(errno) = rustix::fs::unlink(&self.path) {
            tracing::warn!("cannot remove the socket {:?}: {errno}", self.path);
        }
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        self.remove();
    }
}

/// A new non-blocking stream socket of the unix family.
///
/// # Errors
/// Those of socket(2).
pub fn stream_socket() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
}

fn locked(path: &Path) -> ListenError {
    ListenError::Locked { path: path.to_owned(), lock: NameLock::path(path) }
}

fn lock_exists(path: &Path) -> bool {
    rustix::fs::lstat(NameLock::path(path)).is_ok()
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    rustix::fs::lstat(path).ok().map(|stat| (stat.st_dev, stat.st_ino))
}

/// Removes the socket at `path` if no process listens on it.
fn remove_stale(path: &Path, address: &SocketAddrUnix) -> Result<(), ListenError> {
    let stat = match rustix::fs::lstat(path) {
        Ok(stat) => stat,
        Err(Errno::NOENT) => return Ok(()),
        Err(errno) => return Err(failed(path, "examine the file", errno)),
    };
    if FileType::from_raw_mode(stat.st_mode) != FileType::Socket {
        return Err(ListenError::NotASocket { path: path.to_owned() });
    }
    let probe = stream_socket().map_err(|errno| failed(path, "create a socket", errno))?;
    match rustix::net::connect(&probe, address) {
        Err(Errno::CONNREFUSED) => {}
        Err(Errno::NOENT) => return Ok(()),
        // Connected, or its queue is full, or it is a datagram socket: a process listens.
        Ok(()) | Err(Errno::AGAIN | Errno::PROTOTYPE) => {
            return Err(ListenError::InUse { path: path.to_owned() });
        }
        Err(errno) => return Err(failed(path, "find out whether another process listens", errno)),
    }
    tracing::info!("replacing the socket {path:?}, on which no process listens any more");
    match rustix::fs::unlink(path) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(errno) => Err(failed(path, "remove the old socket", errno)),
    }
}

fn failed(path: &Path, action: &'static str, errno: Errno) -> ListenError {
    let path = path.to_owned();
    match errno {
        Errno::NOENT | Errno::NOTDIR => ListenError::NoDirectory { path },
        Errno::ACCESS | Errno::PERM | Errno::ROFS => ListenError::PermissionDenied { path },
        Errno::ADDRINUSE => ListenError::InUse { path },
        errno => ListenError::Io { action, path, source: errno.into() },
    }
}

#[cfg(test)]
mod tests;

//! A listening socket and its name in the file system.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use thiserror::Error;

use crate::lock::{LIMIT, NameLock};

/// Reason why a process cannot listen at a path.
#[derive(Debug, Error)]
pub enum ListenError {
    /// The path does not fit into a socket address (unix(7)) or contains a zero byte.
    #[error(
        "the socket path {path:?} cannot be used: it has {length} bytes, but must have 1 to 107, \
         none of them zero; choose a shorter one"
    )]
    BadPath {
        /// The requested path.
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
        /// The requested path.
        path: PathBuf,
    },
    /// The directory may not be written.
    #[error(
        "the socket {path:?} cannot be created: permission denied; choose a directory that this \
         user may write"
    )]
    PermissionDenied {
        /// The requested path.
        path: PathBuf,
    },
    /// A live process listens there.
    #[error("another process listens at {path:?}; choose another path or end that process first")]
    InUse {
        /// The requested path.
        path: PathBuf,
    },
    /// A file of another kind has this name.
    #[error(
        "{path:?} exists and is not a socket; choose another path for the socket or remove that \
         file"
    )]
    NotASocket {
        /// The requested path.
        path: PathBuf,
    },
    /// Another process or user holds the lock on the name.
    #[error(
        "the socket {path:?} cannot be created: its lock {lock:?} belongs to another process or \
         user; choose a directory that only this user may write, or remove that file"
    )]
    Locked {
        /// The requested path.
        path: PathBuf,
        /// The lock file.
        lock: PathBuf,
    },
    /// Any other system error.
    #[error("cannot {action} for the socket {path:?}: {source}")]
    Io {
        /// The failed action.
        action: &'static str,
        /// The requested path.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

/// The name of a socket that this process has bound. Dropping it removes the name, unless another
/// file has taken it.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    /// `None` once removed.
    entry: Option<SocketEntry>,
}

/// A socket's entry in a directory. Any process that has it can remove the name, whatever its root
/// and its working directory are.
#[derive(Debug)]
pub struct SocketEntry {
    /// The directory, opened with `O_PATH`.
    pub directory: OwnedFd,
    /// The name in the directory.
    pub name: OsString,
    /// The socket's file, opened with `O_PATH`. A file system gives the inode number of a removed
    /// file to the next one, but not while it is open: without it, the socket of the next process
    /// with this name would look like this one.
    pub socket: OwnedFd,
    device: u64,
    inode: u64,
}

impl SocketEntry {
    /// The entry `name` of `directory`, which is `socket`; both are opened with `O_PATH`.
    ///
    /// # Errors
    /// Those of fstat(2).
    pub fn new(directory: OwnedFd, name: OsString, socket: OwnedFd) -> Result<Self, Errno> {
        let stat = rustix::fs::fstat(&socket)?;
        Ok(Self { directory, name, socket, device: stat.st_dev, inode: stat.st_ino })
    }

    fn of(path: &Path) -> Result<Self, Errno> {
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::open(parent.unwrap_or(Path::new(".")), flags, Mode::empty())?;
        let name = path.file_name().ok_or(Errno::INVAL)?.to_owned();
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let socket = rustix::fs::openat(&directory, &name, flags, Mode::empty())?;
        Self::new(directory, name, socket)
    }

    /// Removes the name, unless another file has taken it.
    pub fn remove(&self) {
        let stat = rustix::fs::statat(&self.directory, &self.name, AtFlags::SYMLINK_NOFOLLOW);
        if !stat.is_ok_and(|stat| (stat.st_dev, stat.st_ino) == (self.device, self.inode)) {
            return;
        }
        if let Err(errno) = rustix::fs::unlinkat(&self.directory, &self.name, AtFlags::empty()) {
            tracing::warn!("cannot remove the socket {:?}: {errno}", self.name);
        }
    }
}

impl SocketFile {
    /// Creates a non-blocking stream socket that listens at `path`, a file that is created with the
    /// permissions `mode`. The name of a process that has died is taken over. `backlog` is that of
    /// listen(2).
    ///
    /// Drop the name before the socket: once the socket is closed, another process may have taken
    /// over the name.
    ///
    /// System calls: `openat`, `flock`, `fstat`, `lstat`, `socket`, `fchmod`, `bind`, `listen`,
    /// `connect`, `unlink`, and `chmod` for a mode wider than the owner's.
    ///
    /// In a directory that other users may write to (`/tmp`), they can occupy a name by a socket, a
    /// file or a lock; no process waits for that longer than five seconds.
    ///
    /// # Errors
    /// [`ListenError`]. Sockets of live processes and files that are not sockets are kept.
    pub fn listen(path: &Path, mode: Mode, backlog: i32) -> Result<(Self, OwnedFd), ListenError> {
        let bad_path =
            |_| ListenError::BadPath { path: path.to_owned(), length: path.as_os_str().len() };
        if path.as_os_str().is_empty() {
            return Err(bad_path(Errno::INVAL));
        }
        let address = SocketAddrUnix::new(path).map_err(bad_path)?;
        // A process that has bound its socket but does not listen yet looks like one that has
        // died: of two processes that start at the same time, both would take over.
        let lock = NameLock::take(path, LIMIT).map_err(|errno| match errno {
            Errno::WOULDBLOCK => locked(path),
            // Another user's file in a directory that all may write to, or no regular file.
            Errno::ACCESS | Errno::PERM | Errno::LOOP | Errno::ISDIR | Errno::NXIO
                if lock_exists(path) =>
            {
                locked(path)
            }
            errno => failed(path, "lock the name", errno),
        })?;
        let socket = stream_socket().map_err(|errno| failed(path, "create a socket", errno))?;
        // The file inherits the mode of the socket's inode (Linux net/unix/af_unix.c,
        // unix_bind_bsd): at no time does it have wider permissions.
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
        let entry = SocketEntry::of(path).map_err(|errno| {
            // Just bound, so the name is ours.
            let _ = rustix::fs::unlink(path);
            failed(path, "examine the new socket", errno)
        })?;
        let file = Self { path: path.to_owned(), entry: Some(entry) };
        if mode.intersects(Mode::RWXG | Mode::RWXO) {
            // bind(2) has applied the process's umask.
            file.set_mode(mode).map_err(|errno| failed(path, "set the permissions", errno))?;
        }
        rustix::net::listen(&socket, backlog).map_err(|errno| failed(path, "listen", errno))?;
        drop(lock);
        Ok((file, socket))
    }

    /// Changes the permissions of the socket, but not of another file that has taken its name.
    fn set_mode(&self, mode: Mode) -> Result<(), Errno> {
        let entry = self.entry.as_ref().ok_or(Errno::NOENT)?;
        // fchmod(2) does not accept O_PATH descriptors.
        rustix::fs::chmod(format!("/proc/self/fd/{}", entry.socket.as_raw_fd()), mode)
    }

    /// The requested path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the name now. System calls: `newfstatat`, `unlinkat`.
    pub fn remove(&mut self) {
        if let Some(entry) = self.entry.take() {
            entry.remove();
        }
    }

    /// Leaves the removal of the name to the caller; `None` if it was removed.
    pub fn into_entry(mut self) -> Option<SocketEntry> {
        self.entry.take()
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        self.remove();
    }
}

/// Creates a non-blocking stream socket of the unix family.
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
        // Connected, the backlog is full, or it is a datagram socket: a process uses it.
        Ok(()) | Err(Errno::AGAIN | Errno::PROTOTYPE) => {
            return Err(ListenError::InUse { path: path.to_owned() });
        }
        Err(errno) => return Err(failed(path, "check for another listening process", errno)),
    }
    tracing::info!("replacing the stale socket {path:?}, on which no process listens");
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

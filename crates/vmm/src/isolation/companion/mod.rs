//! A process beside the monitor that keeps the rights which the monitor gives up.
//!
//! The monitor cannot open a path or connect once its machine runs. Its companion has no guest
//! memory and no API; it answers a handful of [requests](message::Request) with descriptors, and
//! only below the directories that the command line allows. It is started before the monitor gives
//! up its rights, ends with the monitor, however that ends, and then removes the monitor's sockets
//! and its cgroup.

mod broker;
mod connect;
#[cfg(any(test, feature = "testing"))]
mod fuzzing;
mod message;
mod serve;
mod vsock;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ebb_local_io::SocketFile;
use ebb_page_merge::broker::DomainName;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::net::sockopt::Timeout;
use thiserror::Error;

use crate::config::Switch;
use crate::packet;

use super::cgroup::NewCgroup;
use message::{Reply, Request};

pub use connect::ConnectLink;
#[cfg(any(test, feature = "testing"))]
pub(crate) use connect::TestCompanion;
#[cfg(any(test, feature = "testing"))]
pub(crate) use fuzzing::fuzz_allowed_directory;
#[cfg(any(test, feature = "testing"))]
pub use fuzzing::{fuzz_companion_replies, fuzz_companion_requests};
pub(crate) use serve::NO_DIRECTORY;
pub use serve::serve;
pub use vsock::RANDOM_PORT;

/// Command of the program that [`serve`]s; it is not for users.
pub const COMPANION_COMMAND: &str = "companion";

/// How long the monitor waits for an answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// The same at its end, which a companion that is stopped must not delay: it removes the names when
/// it continues.
const LAST_PATIENCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };

/// Why the companion could not help.
#[derive(Debug, Error)]
pub enum CompanionError {
    /// The monitor was started without one.
    #[error("the monitor has no companion process; this is a bug in the monitor")]
    None,
    /// It could not be started.
    #[error("cannot start the monitor's companion process: {0}")]
    Start(io::Error),
    /// It does not answer.
    #[error("the monitor's companion process does not answer: {0}")]
    Gone(io::Error),
    /// It refused.
    #[error("{0}")]
    Refused(String),
}

/// The monitor's side. Dropping the last one ends the process.
#[derive(Debug, Clone)]
pub struct Companion(Arc<Link>);

#[derive(Debug)]
struct Link {
    /// Requests and their answers take turns. `None` once it has ended.
    socket: Mutex<Option<OwnedFd>>,
    /// Number of names that it keeps.
    names: AtomicU32,
}

/// A name of a socket that the companion removes when this is dropped, or when the monitor ends.
#[derive(Debug)]
pub struct KeptName {
    companion: Companion,
    index: u32,
}

/// Two connected sockets; receiving from the first one has a time limit.
fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let (ours, theirs) = packet::pair()?;
    rustix::net::sockopt::set_socket_timeout(&ours, Timeout::Recv, Some(PATIENCE))?;
    Ok((ours, theirs))
}

/// A directory below which files may be created after the start.
#[derive(Debug)]
pub(super) struct AllowedDirectory {
    path: PathBuf,
    open: OwnedFd,
}

impl AllowedDirectory {
    /// Opens the directory.
    ///
    /// # Errors
    /// Those of openat(2).
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let open = rustix::fs::open(path, flags, Mode::empty())?;
        Ok(Self { path: std::path::absolute(path)?, open })
    }
}

/// A file that the companion has created. Dropped before it is published, it is removed.
#[derive(Debug)]
pub(crate) struct NewFile {
    companion: Companion,
    is_published: bool,
}

impl NewFile {
    /// Gives the file its name.
    pub(crate) fn publish(mut self) -> Result<(), CompanionError> {
        self.is_published = true;
        self.companion.call(&Request::Publish, &[]).map(drop)
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if self.is_published {
            return;
        }
        if let Err(error) = self.companion.call(&Request::Discard, &[]) {
            tracing::warn!("the companion removes an unfinished file when it ends: {error}");
        }
    }
}

impl KeptName {
    /// Its number at the companion.
    pub(crate) fn index(&self) -> u32 {
        self.index
    }

    /// Leaves it to the process that the companion is passed to.
    pub(crate) fn leave(self) {
        std::mem::forget(self);
    }
}

impl Drop for KeptName {
    fn drop(&mut self) {
        if let Err(error) = self.companion.remove(self.index) {
            tracing::debug!("the companion removes the socket when it ends: {error}");
        }
    }
}

impl Companion {
    /// Starts the process: this program with [`COMPANION_COMMAND`].
    pub(crate) fn start() -> Result<Self, CompanionError> {
        let (ours, theirs) = pair().map_err(CompanionError::Start)?;
        // Not waited for: the monitor can neither reap nor kill it once its system calls are
        // filtered. It ends when the monitor's socket is closed, and is then reaped by what follows
        // the monitor.
        Command::new("/proc/self/exe")
            .arg0("ebb")
            .arg(COMPANION_COMMAND)
            .env_clear()
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .stderr(Stdio::inherit())
            // Signals of the terminal are for the monitor.
            .process_group(0)
            .spawn()
            .map_err(CompanionError::Start)?;
        Ok(Self::over(ours))
    }

    /// A companion for another monitor, with this standard error: a fork of the process, with which
    /// it shares most of its memory. Only of one that was asked for nothing else.
    pub(crate) fn split(&self, error: BorrowedFd<'_>) -> Result<Self, CompanionError> {
        let (ours, theirs) = pair().map_err(CompanionError::Start)?;
        self.prepare(&Request::Split, &[theirs.as_fd(), error])?;
        Ok(Self::over(ours))
    }

    /// The companion at the other end of `socket`.
    pub(crate) fn over(socket: OwnedFd) -> Self {
        Self(Arc::new(Link { socket: Mutex::new(Some(socket)), names: AtomicU32::new(0) }))
    }

    /// The connection, which is passed to another process whose companion this is then; `None` if
    /// the process has ended.
    pub(crate) fn link(&self) -> Option<OwnedFd> {
        let socket = self.0.socket.lock().unwrap_or_else(PoisonError::into_inner);
        socket.as_ref()?.try_clone().ok()
    }

    /// The name of this number, which another process has given to the companion.
    pub(crate) fn kept(&self, index: u32) -> KeptName {
        KeptName { companion: self.clone(), index }
    }

    /// Makes the companion remove a socket's name at the end. Only before [`begin`](Self::begin).
    pub(crate) fn keep(&self, socket: SocketFile) -> Result<KeptName, CompanionError> {
        let removed = || CompanionError::Refused("the socket's name was removed".to_owned());
        let entry = socket.into_entry().ok_or_else(removed)?;
        let descriptors = [entry.directory.as_fd(), entry.socket.as_fd()];
        self.prepare(&Request::Keep { name: entry.name.clone() }, &descriptors)?;
        let index = self.0.names.fetch_add(1, Ordering::Relaxed);
        Ok(KeptName { companion: self.clone(), index })
    }

    /// As [`keep`](Self::keep), of the socket of a vsock device. The companion also connects to the
    /// sockets beside it whose names have a port appended.
    pub(crate) fn keep_vsock(
        &self,
        socket: SocketFile,
    ) -> Result<(KeptName, ConnectLink), CompanionError> {
        let (directory, name) = vsock::place(socket.path()).map_err(CompanionError::Start)?;
        let kept = self.keep(socket)?;
        let (ours, theirs) = pair().map_err(CompanionError::Start)?;
        self.prepare(&Request::Vsock { name }, &[directory.as_fd(), theirs.as_fd()])?;
        Ok((kept, ConnectLink::new(ours).map_err(CompanionError::Start)?))
    }

    /// Makes the companion connect to the merge broker at `path`, which must be absolute, whenever
    /// it is asked to, for a client of `domain`. Only before [`begin`](Self::begin).
    pub(crate) fn keep_broker(
        &self,
        path: &Path,
        domain: DomainName,
    ) -> Result<ConnectLink, CompanionError> {
        let (ours, theirs) = pair().map_err(CompanionError::Start)?;
        self.prepare(&Request::Broker { path: path.to_owned(), domain }, &[theirs.as_fd()])?;
        ConnectLink::new(ours).map_err(CompanionError::Start)
    }

    /// Makes the companion remove a cgroup at the end. Only before [`begin`](Self::begin).
    pub(super) fn keep_cgroup(&self, cgroup: NewCgroup) -> Result<(), CompanionError> {
        self.prepare(&Request::KeepCgroup { name: cgroup.name }, &[cgroup.parent.as_fd()])
    }

    /// Lets the companion create files below a directory. Only before [`begin`](Self::begin).
    pub(super) fn allow(&self, directory: &AllowedDirectory) -> Result<(), CompanionError> {
        self.prepare(&Request::Allow { path: directory.path.clone() }, &[directory.open.as_fd()])
    }

    /// Lets the companion open images below a directory. Only before [`begin`](Self::begin).
    pub(super) fn allow_images(&self, directory: &AllowedDirectory) -> Result<(), CompanionError> {
        let request = Request::AllowImages { path: directory.path.clone() };
        self.prepare(&request, &[directory.open.as_fd()])
    }

    /// Sends a request that has no answer: the machine is built while the companion starts.
    fn prepare(
        &self,
        request: &Request,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(), CompanionError> {
        let socket = self.0.socket.lock().unwrap_or_else(PoisonError::into_inner);
        let open = socket.as_ref().ok_or_else(|| CompanionError::Gone(ended()))?;
        packet::send(open, request, descriptors).map_err(CompanionError::Gone)
    }

    /// Creates the file of a snapshot below an allowed directory. It gets its name when it is
    /// [published](NewFile::publish).
    pub(crate) fn create(&self, path: &Path) -> Result<(OwnedFd, NewFile), CompanionError> {
        let (_, descriptors) = self.call(&Request::Create { path: path.to_owned() }, &[])?;
        let file = descriptors.into_iter().next().ok_or_else(|| {
            CompanionError::Gone(io::Error::new(io::ErrorKind::InvalidData, "no file came"))
        })?;
        Ok((file, NewFile { companion: self.clone(), is_published: false }))
    }

    /// Opens an image below a directory for images. One that is to be written comes twice: the
    /// second file is for reading only.
    pub(crate) fn open_image(
        &self,
        path: &Path,
        readonly: Switch,
    ) -> Result<Vec<OwnedFd>, CompanionError> {
        let request = Request::Open { path: path.to_owned(), readonly };
        self.call(&request, &[]).map(|(_, files)| files)
    }

    /// Makes the companion give up the rights that it does not need, and waits until it has.
    /// Refused if an earlier request was.
    pub(crate) fn begin(&self, seccomp: Switch) -> Result<(), CompanionError> {
        self.call(&Request::Begin { seccomp }, &[]).map(drop)
    }

    /// Asks for the removal of a name. At the end of a machine this must not wait: while the
    /// companion works for another thread, perhaps on a slow disk, it is left to the end of the
    /// connection.
    fn remove(&self, index: u32) -> Result<(), CompanionError> {
        let Ok(mut socket) = self.0.socket.try_lock() else { return Ok(()) };
        let request = Request::Remove { index };
        Self::exchange(&mut socket, &request, &[], Some(&LAST_PATIENCE)).map(drop)
    }

    fn call(
        &self,
        request: &Request,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(Reply, Vec<OwnedFd>), CompanionError> {
        let mut socket = self.0.socket.lock().unwrap_or_else(PoisonError::into_inner);
        Self::exchange(&mut socket, request, descriptors, None)
    }

    /// Waits for the answer until `patience` is over, or [`PATIENCE`].
    fn exchange(
        socket: &mut Option<OwnedFd>,
        request: &Request,
        descriptors: &[BorrowedFd<'_>],
        patience: Option<&Timespec>,
    ) -> Result<(Reply, Vec<OwnedFd>), CompanionError> {
        let open = socket.as_ref().ok_or_else(|| CompanionError::Gone(ended()))?;
        let answer = packet::send(open, request, descriptors).and_then(|()| match patience {
            Some(_) if poll(&mut [PollFd::new(open, PollFlags::IN)], patience)? == 0 => {
                Err(io::ErrorKind::TimedOut.into())
            }
            _ => packet::receive::<Reply>(open)?.ok_or_else(ended),
        });
        match answer {
            Ok((Reply { error: Some(problem), .. }, _)) => Err(CompanionError::Refused(problem)),
            Ok(answer) => Ok(answer),
            Err(error) => {
                // An answer that comes late would be taken for that to the next request.
                *socket = None;
                Err(CompanionError::Gone(error))
            }
        }
    }
}

fn ended() -> io::Error {
    io::ErrorKind::BrokenPipe.into()
}

#[cfg(test)]
mod tests;

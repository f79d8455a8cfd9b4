//! The companion process.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ebb_local_io::SocketEntry;
use landlock::{
    ABI, Access as _, AccessFs, AccessNet, PathBeneath, Ruleset, RulesetAttr as _,
    RulesetCreatedAttr as _, RulesetError,
};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use super::broker::BrokerServer;
use super::connect::{ConnectThread, serve as serve_connections};
use super::message::{Reply, Request};
use super::vsock::VsockServer;
use crate::config::Switch;
use crate::forked::{Side, fork, put_in_place};
use crate::packet;
use crate::seccomp::{ThreadFilter, ThreadKind};
use crate::snapshot::client::NewSnapshot;
use crate::vm::Signals;

/// Why a file is not created where no directory is allowed.
pub(crate) const NO_DIRECTORY: &str =
    "no file descriptor came with the request, and the monitor opens no paths";
/// How long a cgroup may be in use after the end of its monitor.
const CGROUP_PATIENCE: Duration = Duration::from_secs(10);
/// Interval of attempts to remove it.
const CGROUP_RETRY: Duration = Duration::from_millis(10);
/// Most names that a companion keeps.
const MAX_NAMES: usize = 8;

/// The state of a companion.
#[derive(Debug, Default)]
struct Server {
    /// Whether `Begin` has come.
    has_begun: bool,
    /// Why a request without an answer was refused.
    refused: Option<String>,
    names: Vec<Option<SocketEntry>>,
    cgroup: Option<(OwnedFd, OsString)>,
    /// Directories below which files are created.
    allowed: Vec<(PathBuf, OwnedFd)>,
    /// Directories below which images are opened.
    images: Vec<(PathBuf, OwnedFd)>,
    /// What connects for a vsock device, and the socket for requests, until it is served.
    vsock: Option<(VsockServer, OwnedFd)>,
    /// The same for merging.
    broker: Option<(BrokerServer, OwnedFd)>,
    /// The threads that connect.
    threads: Vec<ConnectThread>,
    /// A snapshot that is being written.
    snapshot: Option<NewSnapshot>,
}

/// Serves the monitor on standard input until it ends.
///
/// # Errors
/// Standard input is not such a connection, or the process could not give up its rights.
pub fn serve() -> io::Result<()> {
    // The end of the monitor is the only one: signals for its group or its service are for it.
    let _signals = Signals::block()?;
    let mut socket = io::stdin().as_fd().try_clone_to_owned()?;
    while let Some(of_another) = serve_on(&socket)? {
        if let Some(new) = split(of_another)? {
            socket = new;
        }
    }
    Ok(())
}

/// What comes with [`Request::Split`].
pub(super) struct Another {
    socket: OwnedFd,
    error: OwnedFd,
}

/// Goes on as two processes. Returns the socket of the other monitor in the new one.
fn split(another: Another) -> io::Result<Option<OwnedFd>> {
    // Companions leave nothing behind, and this one waits for none.
    // SAFETY: changes the disposition of a signal that no handler is installed for.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
    // SAFETY: this process has one thread until `Begin`.
    match unsafe { fork() } {
        Ok(Side::New) => {
            put_in_place(another.socket.as_fd(), libc::STDIN_FILENO)?;
            put_in_place(another.error.as_fd(), libc::STDERR_FILENO)?;
            Ok(Some(another.socket))
        }
        Ok(Side::Old { .. }) => Ok(None),
        Err(error) => {
            // The other monitor's client finds its socket closed.
            tracing::error!("cannot fork the companion: {error}; are there too many processes?");
            Ok(None)
        }
    }
}

/// Serves the monitor at the other end of `socket` until it ends, or asks for a companion for
/// another one, which it may do as long as nothing was asked for before.
pub(super) fn serve_on(socket: &OwnedFd) -> io::Result<Option<Another>> {
    let mut server = Server::default();
    let mut is_first = true;
    let served = loop {
        match packet::receive::<Request>(socket) {
            Ok(Some((Request::Split, descriptors))) if is_first => {
                let [socket, error] = two(descriptors).map_err(io::Error::other)?;
                return Ok(Some(Another { socket, error }));
            }
            Ok(Some((request, descriptors))) => {
                is_first = false;
                let is_answered = request.is_answered();
                let result = server.serve(request, descriptors);
                if is_answered {
                    let (error, files) = match result {
                        Ok(files) => (None, files),
                        Err(problem) => (Some(problem), Vec::new()),
                    };
                    let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
                    // Without a reader, the next read finds the end.
                    let _ = packet::send(socket, &Reply { error }, &files);
                } else if let Err(problem) = result {
                    server.refused.get_or_insert(problem);
                }
            }
            Ok(None) => break Ok(None),
            Err(error) => break Err(error),
        }
    };
    server.names.iter().flatten().for_each(SocketEntry::remove);
    if let Some((parent, name)) = &server.cgroup {
        remove_cgroup(parent, name);
    }
    server.threads.into_iter().for_each(ConnectThread::end);
    served
}

/// Removes a cgroup when its last process has gone. The monitor's is about to: its files are closed
/// first. Other processes may have moved there; then it stays.
fn remove_cgroup(parent: &OwnedFd, name: &OsStr) {
    let deadline = Instant::now() + CGROUP_PATIENCE;
    loop {
        match rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR) {
            Err(Errno::BUSY) if Instant::now() < deadline => {
                std::thread::park_timeout(CGROUP_RETRY);
            }
            Ok(()) | Err(Errno::BUSY | Errno::NOENT) => return,
            Err(errno) => {
                tracing::warn!("cannot remove the cgroup {name:?}: {errno}");
                return;
            }
        }
    }
}

impl Server {
    /// Does what is requested; returns the files that come with the answer.
    fn serve(
        &mut self,
        request: Request,
        descriptors: Vec<OwnedFd>,
    ) -> Result<Vec<OwnedFd>, String> {
        match request {
            Request::Keep { .. }
            | Request::KeepCgroup { .. }
            | Request::Allow { .. }
            | Request::AllowImages { .. }
            | Request::Vsock { .. }
            | Request::Broker { .. }
            | Request::Begin { .. }
                if self.has_begun =>
            {
                return Err("the machine has started".to_owned());
            }
            Request::Keep { name } => {
                let [directory, socket] = two(descriptors)?;
                if self.names.len() == MAX_NAMES {
                    return Err("too many names".to_owned());
                }
                let entry = SocketEntry::new(directory, name, socket);
                self.names.push(Some(entry.map_err(|errno| errno.to_string())?));
            }
            Request::KeepCgroup { name } => self.cgroup = Some((only(descriptors)?, name)),
            Request::Allow { path } => self.allowed.push((path, only(descriptors)?)),
            Request::Split => return Err("it has something to do already".to_owned()),
            Request::AllowImages { path } => self.images.push((path, only(descriptors)?)),
            Request::Vsock { name } => {
                let [directory, socket] = two(descriptors)?;
                self.vsock = Some((VsockServer { directory, name, random: None }, socket));
            }
            Request::Broker { path, domain } => {
                self.broker = Some((BrokerServer { path, domain }, only(descriptors)?));
            }
            Request::Begin { seccomp } => {
                self.has_begun = true;
                if let Some(problem) = self.refused.take() {
                    return Err(problem);
                }
                self.restrict(seccomp).map_err(|error| error.to_string())?;
            }
            Request::Remove { index } => {
                let name = self.names.get_mut(index as usize).and_then(Option::take);
                name.ok_or("there is no such name")?.remove();
            }
            Request::Create { path } => {
                // The next `Publish` must not give this name to a file that is not complete.
                if self.snapshot.is_some() {
                    return Err("another snapshot is being written; wait for its end".to_owned());
                }
                let new = self.create(&path)?;
                let file = new.file().try_clone().map_err(|error| error.to_string())?;
                self.snapshot = Some(new);
                return Ok(vec![file.into()]);
            }
            Request::Open { path, readonly } => return self.open(&path, readonly),
            Request::Publish => {
                let new = self.snapshot.take().ok_or("there is no file to publish")?;
                new.publish().map_err(|error| error.to_string())?;
            }
            Request::Discard => self.snapshot = None,
        }
        Ok(Vec::new())
    }

    /// Creates the file of a snapshot below one of the allowed directories.
    fn create(&self, path: &Path) -> Result<NewSnapshot, String> {
        let (name, top, inside) =
            below(&self.allowed, path).ok_or_else(|| not_allowed(&self.allowed, path))?;
        check_in_place(name, top)?;
        let parent = inside.parent().filter(|parent| !parent.as_os_str().is_empty());
        let directory =
            open_beneath(top, parent.unwrap_or(Path::new(".")), OFlags::RDONLY | OFlags::DIRECTORY);
        let directory = directory.map_err(|errno| match errno {
            Errno::XDEV => not_allowed(&self.allowed, path),
            errno => format!("cannot open the directory of {}: {errno}", path.display()),
        })?;
        NewSnapshot::create_in(directory, path).map_err(|error| error.to_string())
    }

    /// Opens an image below one of the directories for them.
    fn open(&self, path: &Path, readonly: Switch) -> Result<Vec<OwnedFd>, String> {
        let refused = || not_allowed(&self.images, path);
        let (_, top, inside) = below(&self.images, path).ok_or_else(refused)?;
        let open = |access: OFlags| {
            // The other end of a FIFO is not waited for.
            let flags = access | OFlags::NONBLOCK | OFlags::NOCTTY;
            let file = open_beneath(top, inside, flags).map_err(|errno| match errno {
                Errno::XDEV => refused(),
                errno => io::Error::from(errno).to_string(),
            })?;
            let stat = rustix::fs::fstat(&file).map_err(|errno| errno.to_string())?;
            match FileType::from_raw_mode(stat.st_mode) {
                FileType::RegularFile | FileType::BlockDevice => {
                    Ok((file, (stat.st_dev, stat.st_ino)))
                }
                FileType::Directory => Err(io::Error::from(Errno::ISDIR).to_string()),
                _ => Err("it is neither a file nor a block device".to_owned()),
            }
        };
        if readonly.is_on() {
            return Ok(vec![open(OFlags::RDONLY)?.0]);
        }
        let (writable, again) = (open(OFlags::RDWR)?, open(OFlags::RDONLY)?);
        if writable.1 != again.1 {
            return Err("it was replaced meanwhile".to_owned());
        }
        Ok(vec![writable.0, again.0])
    }

    /// Gives up capabilities, system calls, and all files but those of the directories. The user
    /// stays: the names belong to it.
    fn restrict(&mut self, seccomp: Switch) -> io::Result<()> {
        rustix::thread::set_no_new_privs(true)?;
        self.restrict_paths().map_err(io::Error::other)?;
        let filter =
            ThreadFilter::alone(ThreadKind::Companion, seccomp).map_err(io::Error::other)?;
        if let Some((mut vsock, socket)) = self.vsock.take() {
            let connect = move |port| vsock.connect(port);
            self.threads.push(serve_connections("vsock", &socket, filter.clone(), connect)?);
        }
        if let Some((broker, socket)) = self.broker.take() {
            let connect = move |_| broker.connect();
            self.threads.push(serve_connections("broker", &socket, filter.clone(), connect)?);
        }
        filter.apply().map_err(io::Error::other)
    }

    /// Restricts the process to its directories, where the kernel has Landlock.
    fn restrict_paths(&self) -> Result<(), RulesetError> {
        let names = self.names.iter().flatten().map(|name| &name.directory);
        let names = names.map(|directory| (directory, AccessFs::RemoveFile.into()));
        let writes = AccessFs::ReadFile
            | AccessFs::ReadDir
            | AccessFs::WriteFile
            | AccessFs::Truncate
            | AccessFs::MakeReg
            | AccessFs::RemoveFile
            | AccessFs::Refer;
        let images = self.images.iter().map(|(_, directory)| {
            (directory, AccessFs::ReadFile | AccessFs::ReadDir | AccessFs::WriteFile)
        });
        let files = self.allowed.iter().map(|(_, directory)| (directory, writes)).chain(images);
        let cgroup = self.cgroup.iter().map(|(parent, _)| (parent, AccessFs::RemoveDir.into()));
        let rules = names
            .chain(cgroup)
            .chain(files)
            .map(|(directory, access)| Ok(PathBeneath::new(directory, access)))
            .collect::<Vec<Result<_, RulesetError>>>();
        let ruleset = Ruleset::default()
            .handle_access(AccessFs::from_all(ABI::V5))?
            .handle_access(AccessNet::from_all(ABI::V5))?
            .create()?
            .add_rules(rules)?;
        ruleset.restrict_self().map(drop)
    }
}

/// The first of some directories, with its name, that a path is below, and the rest of the path.
fn below<'a>(
    directories: &'a [(PathBuf, OwnedFd)],
    path: &'a Path,
) -> Option<(&'a Path, &'a OwnedFd, &'a Path)> {
    directories.iter().find_map(|(name, top)| {
        let inside = path.strip_prefix(name).ok().filter(|inside| inside.file_name().is_some())?;
        Some((name.as_path(), top, inside))
    })
}

/// Opens what is below a directory. The kernel refuses whatever leads out of it: `..` and links.
fn open_beneath(top: &OwnedFd, inside: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    rustix::fs::openat2(top, inside, flags | OFlags::CLOEXEC, Mode::empty(), resolve)
}

fn not_allowed(directories: &[(PathBuf, OwnedFd)], path: &Path) -> String {
    let tops = directories.iter().map(|(top, _)| top.display().to_string());
    let tops: Vec<_> = tops.collect();
    if tops.is_empty() {
        return NO_DIRECTORY.to_owned();
    }
    format!("{} is not below {} (--allow-dir)", path.display(), tops.join(" or "))
}

/// Refuses a directory that no longer has its name: the client would not find the file there.
fn check_in_place(name: &Path, open: &OwnedFd) -> Result<(), String> {
    let problem = match (rustix::fs::stat(name), rustix::fs::fstat(open)) {
        (Ok(now), Ok(then)) if (now.st_dev, now.st_ino) == (then.st_dev, then.st_ino) => {
            return Ok(());
        }
        (Ok(_), Ok(_)) => "another directory has its name".to_owned(),
        (Err(errno), _) | (_, Err(errno)) => errno.to_string(),
    };
    Err(format!(
        "the directory {} (--allow-dir) was moved or removed after the start: {problem}; move it \
         back, or use `ebb ctl SOCKET snapshot FILE`",
        name.display()
    ))
}

fn two(descriptors: Vec<OwnedFd>) -> Result<[OwnedFd; 2], String> {
    descriptors.try_into().map_err(|_| "two descriptors are needed".to_owned())
}

fn only(descriptors: Vec<OwnedFd>) -> Result<OwnedFd, String> {
    let [descriptor] =
        <[OwnedFd; 1]>::try_from(descriptors).map_err(|_| "a descriptor is missing".to_owned())?;
    Ok(descriptor)
}

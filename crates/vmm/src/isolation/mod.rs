//! Isolation of the monitor from its host, for the case that a guest takes over one of its threads.
//!
//! Everything that a machine needs is opened with the rights of the user who started the monitor.
//! Then the monitor gives up these rights: `Isolation::begin` moves it into namespaces and a
//! cgroup of its own before the first thread starts, each thread drops its user, groups and
//! capabilities with its system call filter (`ThreadRights`), and `Isolation::complete` leaves
//! an empty file system. What needs a path or a connection later is done by a [`Companion`].

mod cgroup;
mod companion;
mod identity;
mod namespaces;

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use ebb_local_io::SocketFile;
use ebb_page_merge::broker::DomainName;
use landlock::{ABI, Access as _, AccessFs, AccessNet, Ruleset, RulesetAttr as _, RulesetStatus};
use rustix::process::{DumpableBehavior, Resource, Rlimit};
use rustix::thread::CoreSchedulingScope;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::config::Switch;

pub use cgroup::CgroupConfig;
pub use companion::{
    COMPANION_COMMAND, Companion, CompanionError, ConnectLink, KeptName, RANDOM_PORT,
    serve as serve_companion,
};
pub(crate) use companion::{NO_DIRECTORY, NewFile};
#[cfg(any(test, feature = "testing"))]
pub(crate) use companion::{TestCompanion, fuzz_allowed_directory};
#[cfg(any(test, feature = "testing"))]
pub use companion::{fuzz_companion_replies, fuzz_companion_requests};
pub use identity::UserChoice;
#[cfg(any(test, feature = "testing"))]
pub(crate) use identity::fuzz_user;

use companion::AllowedDirectory;
use identity::Identity;
use namespaces::Namespaces;

/// Wishes for the isolation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct IsolationConfig {
    /// Whether the monitor gives up rights.
    pub mode: IsolationMode,
    /// The user that it becomes, if root started it.
    pub user: UserChoice,
    /// The cgroup that it moves to.
    pub cgroup: Option<CgroupConfig>,
    /// Directories below which API clients may name files.
    pub allowed_directories: Vec<PathBuf>,
    /// Directories below which they may name images that take the place of others.
    pub image_directories: Vec<PathBuf>,
}

/// Whether the monitor gives up the rights of the user who started it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum IsolationMode {
    /// As far as this host permits.
    #[default]
    Auto,
    /// Only capabilities are dropped.
    Off,
}

/// Why a monitor could not be isolated as requested.
#[derive(Debug, Error)]
pub enum IsolationError {
    /// There is no such account.
    #[error(
        "there is no account {name:?} on this host; create it, give UID or UID:GID, or omit --user"
    )]
    NoAccount {
        /// The name.
        name: String,
    },
    /// Only root can change the user.
    #[error("--user works for root only; start the monitor as root, or as that user")]
    NotRoot,
    /// No user id is free.
    #[error("no user id from {first} to {last} is free; give one with --user")]
    NoFreeId {
        /// The first id tried.
        first: u32,
        /// The last one.
        last: u32,
    },
    /// The cgroup cannot be used.
    #[error("cannot use the cgroup {path}: {action}: {source}; {remedy}")]
    Cgroup {
        /// The folder.
        path: String,
        /// The failed action.
        action: String,
        /// The system's error.
        source: io::Error,
        /// What to do.
        remedy: &'static str,
    },
    /// A directory cannot be used.
    #[error("cannot use {} with --allow-dir: {source}; name an existing directory", path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The companion process does not work.
    #[error(transparent)]
    Companion(#[from] CompanionError),
    /// Another step failed.
    #[error("cannot {action}: {source}; --isolate off runs without isolation")]
    Step {
        /// The step.
        action: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

impl IsolationError {
    fn step<E: Into<io::Error>>(action: &'static str) -> impl FnOnce(E) -> Self {
        move |source| Self::Step { action, source: source.into() }
    }
}

/// Isolation that is in force, as far as the monitor knows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "Isolation")]
pub struct IsolationInfo {
    /// Whether the monitor has given up the rights of the user who started it.
    pub mode: IsolationMode,
    /// Its user id.
    pub uid: u32,
    /// Its group id; it has no other groups.
    pub gid: u32,
    /// Namespaces of its own, by their names in /proc/PID/ns.
    pub namespaces: Vec<String>,
    /// Whether its file system is empty and read-only.
    pub empty_root: bool,
    /// Whether Landlock refuses paths, and connections where the kernel supports that.
    pub landlock: bool,
    /// Whether its threads share a processor core only with each other.
    pub core_scheduling: bool,
    /// Whether system calls are filtered.
    pub seccomp: bool,
    /// The cgroup that was requested.
    pub cgroup: Option<String>,
    /// What this host does not permit, with the reasons.
    pub missing: Vec<String>,
}

/// Rights that a thread gives up when it starts, besides its capabilities.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ThreadRights {
    identity: Option<Identity>,
    landlock: bool,
}

impl ThreadRights {
    /// Gives them up, for the calling thread: Linux keeps users and Landlock's rules by thread.
    pub(crate) fn drop(self) -> io::Result<()> {
        if let Some(identity) = self.identity {
            identity.assume()?;
        }
        if self.landlock {
            // The kernel may support only part of it, or nothing, as `Isolation::begin` has found.
            restrict_paths()?;
        }
        Ok(())
    }
}

/// Refuses every access to a path, and TCP connections, to the calling thread. Returns whether the
/// kernel enforces at least a part.
fn restrict_paths() -> io::Result<bool> {
    let restricted = Ruleset::default()
        .handle_access(AccessFs::from_all(ABI::V5))
        .and_then(|ruleset| ruleset.handle_access(AccessNet::from_all(ABI::V5)))
        .and_then(Ruleset::create)
        .and_then(landlock::RulesetCreated::restrict_self);
    let status = restricted.map_err(io::Error::other)?;
    Ok(status.ruleset != RulesetStatus::NotEnforced)
}

/// Moves the process to a cgroup, which the companion removes at the end if it is new.
fn enter_cgroup(cgroup: &CgroupConfig, companion: &Companion) -> Result<(), IsolationError> {
    while_it_is_removed(|| cgroup.enter(|new| Ok(companion.keep_cgroup(new)?)))
}

impl CgroupConfig {
    /// Creates the cgroup for another process, which moves there by writing 0 to the file. The
    /// companion removes it at the end if it is new.
    pub(crate) fn open_for(&self, companion: &Companion) -> Result<OwnedFd, IsolationError> {
        while_it_is_removed(|| self.open(|new| Ok(companion.keep_cgroup(new)?)))
    }
}

fn while_it_is_removed<T>(
    enter: impl Fn() -> Result<T, IsolationError>,
) -> Result<T, IsolationError> {
    let mut attempts = 0..3;
    loop {
        match enter() {
            // The companion of a monitor that has just ended has removed it.
            Err(IsolationError::Cgroup { source, .. })
                if source.kind() == io::ErrorKind::NotFound && attempts.next().is_some() => {}
            entered => return entered,
        }
    }
}

/// A monitor on its way out of its user's rights.
#[derive(Debug)]
pub(crate) struct Isolation {
    rights: ThreadRights,
    companion: Option<Companion>,
    info: IsolationInfo,
}

/// Whether a monitor listens on sockets with names, which must be removed at its end, or connects to
/// some later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sockets {
    /// It does.
    Some,
    /// It does not.
    None,
}

/// Sizes that the resource limits follow from.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Needs {
    /// Largest file that the monitor may write, in bytes.
    pub file_bytes: u64,
    /// Most threads; `None` where forked machines have some, too.
    pub threads: Option<u64>,
    /// Most connections of devices.
    pub connections: u64,
}

impl Isolation {
    /// Starts a companion if there are `sockets` or a cgroup, and moves the process into namespaces
    /// and a cgroup of its own. The file system is still that of the host, and the rights are those
    /// of the user.
    ///
    /// Must be called before a second thread exists: threads that exist stay where they are.
    pub(crate) fn begin(
        config: &IsolationConfig,
        seccomp: Switch,
        sockets: Sockets,
    ) -> Result<Self, IsolationError> {
        let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
        let mut info = IsolationInfo {
            mode: config.mode,
            uid: uid.as_raw(),
            gid: gid.as_raw(),
            seccomp: seccomp.is_on(),
            ..IsolationInfo::default()
        };
        info.cgroup = config.cgroup.as_ref().map(|cgroup| cgroup.path.display().to_string());
        // Outside of the cgroup and the namespaces, in which it could not do its work.
        let open = |paths: &[PathBuf]| {
            let open = |path: &PathBuf| {
                AllowedDirectory::open(path)
                    .map_err(|source| IsolationError::Directory { path: path.clone(), source })
            };
            paths.iter().map(open).collect::<Result<Vec<_>, _>>()
        };
        let directories = open(&config.allowed_directories)?;
        let images = open(&config.image_directories)?;
        let is_needed = sockets == Sockets::Some || config.cgroup.is_some();
        let companion = is_needed.then(Companion::start).transpose()?;
        if let Some(companion) = &companion {
            directories.iter().try_for_each(|directory| companion.allow(directory))?;
            images.iter().try_for_each(|directory| companion.allow_images(directory))?;
            if let Some(cgroup) = &config.cgroup {
                enter_cgroup(cgroup, companion)?;
            }
        }
        let rights = ThreadRights::default();
        let mut isolation = Self { rights, companion, info };
        if config.mode == IsolationMode::Off {
            return Ok(isolation);
        }
        let identity = Identity::choose(&config.user)?;
        match Namespaces::enter() {
            Ok(namespaces) => {
                isolation.info.namespaces =
                    namespaces.names().iter().map(|name| (*name).to_owned()).collect();
            }
            Err(error) => isolation.misses(format!("namespaces: {error}")),
        }
        match rustix::thread::create_core_scheduling_cookie(
            rustix::process::getpid(),
            CoreSchedulingScope::ThreadGroup,
        ) {
            Ok(()) => isolation.info.core_scheduling = true,
            Err(error) => isolation.misses(format!("core scheduling: {error}")),
        }
        // On a thread of its own, to learn whether the kernel enforces it.
        let landlock = std::thread::scope(|scope| {
            scope
                .spawn(|| {
                    rustix::thread::set_no_new_privs(true)?;
                    restrict_paths()
                })
                .join()
                .unwrap_or(Ok(false))
        });
        match landlock {
            Ok(true) => isolation.info.landlock = true,
            Ok(false) => isolation.misses("Landlock: the kernel does not have it".to_owned()),
            Err(error) => isolation.misses(format!("Landlock: {error}")),
        }
        if let Some(identity) = &identity {
            (isolation.info.uid, isolation.info.gid) = identity.ids();
        }
        isolation.rights = ThreadRights { identity, landlock: isolation.info.landlock };
        Ok(isolation)
    }

    fn misses(&mut self, what: String) {
        tracing::debug!("isolation: {what}");
        self.info.missing.push(what);
    }

    /// What each thread gives up.
    pub(crate) fn rights(&self) -> ThreadRights {
        self.rights
    }

    /// Leaves the removal of a listening socket's name to the companion. Only before
    /// [`complete`](Self::complete).
    pub(crate) fn keep(
        &self,
        (listener, file): (OwnedFd, SocketFile),
    ) -> Result<(OwnedFd, KeptName), IsolationError> {
        Ok((listener, self.keep_name(file)?))
    }

    /// As [`keep`](Self::keep), of the name alone.
    pub(crate) fn keep_name(&self, file: SocketFile) -> Result<KeptName, IsolationError> {
        let companion = self.companion.as_ref().ok_or(CompanionError::None)?;
        Ok(companion.keep(file)?)
    }

    /// As [`keep`](Self::keep), of a vsock device's socket.
    pub(crate) fn keep_vsock(
        &self,
        file: SocketFile,
    ) -> Result<(KeptName, ConnectLink), IsolationError> {
        let companion = self.companion.as_ref().ok_or(CompanionError::None)?;
        Ok(companion.keep_vsock(file)?)
    }

    /// Leaves connections with the machine's merge broker to the companion, if there is one.
    pub(crate) fn keep_broker(
        &self,
        path: &Path,
        domain: DomainName,
    ) -> Result<Option<ConnectLink>, IsolationError> {
        let companion = self.companion.as_ref();
        Ok(companion.map(|companion| companion.keep_broker(path, domain)).transpose()?)
    }

    /// Leaves the host's file system and sets the resource limits. The main thread then drops its
    /// own rights.
    pub(crate) fn complete(&mut self, needs: Needs) -> Result<(), IsolationError> {
        if let Some(companion) = &self.companion {
            companion.begin(if self.info.seccomp { Switch::On } else { Switch::Off })?;
        }
        let open_files = OPEN_FILES + needs.connections;
        if self.info.mode == IsolationMode::Off {
            return raise_open_files(open_files);
        }
        if !self.info.namespaces.is_empty() {
            Namespaces::empty_root()
                .map_err(IsolationError::step("leave the host's file system"))?;
            self.info.empty_root = true;
        }
        let limit = |resource, most: u64| {
            let now = rustix::process::getrlimit(resource);
            let most = Some(now.maximum.map_or(most, |maximum| maximum.min(most)));
            rustix::process::setrlimit(resource, Rlimit { current: most, maximum: most })
                .map_err(IsolationError::step("set resource limits"))
        };
        limit(Resource::Core, 0)?;
        limit(Resource::Fsize, needs.file_bytes)?;
        limit(Resource::Nofile, open_files)?;
        // Counted by user: machines of one account would share it.
        if self.rights.identity.is_some_and(Identity::is_dynamic)
            && let Some(threads) = needs.threads
        {
            limit(Resource::Nproc, threads)?;
        }
        // Also after a change of the user, which resets it to what the host prefers.
        rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)
            .map_err(IsolationError::step("forbid core dumps"))
    }

    /// The companion, if there is one.
    pub(crate) fn companion(&self) -> Option<&Companion> {
        self.companion.as_ref()
    }

    /// What is in force.
    pub(crate) fn info(&self) -> &IsolationInfo {
        &self.info
    }
}

/// Allows at least this many open files, as far as the limit of the user does.
fn raise_open_files(wanted: u64) -> Result<(), IsolationError> {
    let mut limit = rustix::process::getrlimit(Resource::Nofile);
    let wanted = limit.maximum.map_or(wanted, |maximum| maximum.min(wanted));
    if limit.current.is_some_and(|current| current < wanted) {
        limit.current = Some(wanted);
        rustix::process::setrlimit(Resource::Nofile, limit)
            .map_err(IsolationError::step("set resource limits"))?;
    }
    Ok(())
}

/// Most open files: those of the machine, and of API clients and migrations.
const OPEN_FILES: u64 = 1024;

//! Why there is no checkpoint, or no machine from it.

use std::io;
use std::path::PathBuf;

use ebb_local_io::ListenError;
use ebb_page_merge::broker::BrokerError;
use rustix::event::Timespec;
use thiserror::Error;

use crate::api::{ApiError, ClientError};
use crate::devices::virtio::block::DiskError;
use crate::devices::virtio::net::NetError;
use crate::isolation::{CompanionError, IsolationError};

/// How long a checkpoint may take for an answer, and a new machine to say something.
pub(super) const PATIENCE: Timespec = Timespec { tv_sec: 30, tv_nsec: 0 };

/// Why there is no checkpoint, or no machine from it.
#[derive(Debug, Error)]
pub enum CheckpointError {
    /// The monitor has not made it.
    #[error(transparent)]
    Monitor(#[from] ClientError),
    /// Its socket cannot be created.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// There is none of this name.
    #[error("there is no checkpoint at {path:?}: {source}; `ebb checkpoints` lists them")]
    Connect {
        /// Path of its socket.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Its process does not answer.
    #[error("the checkpoint does not answer: {0}")]
    Gone(io::Error),
    /// Its process says nothing.
    #[error(
        "the checkpoint has not answered for {} s: it serves another client, or the host is short \
         of memory",
        PATIENCE.tv_sec
    )]
    Silent,
    /// It refused.
    #[error("{0}")]
    Refused(String),
    /// A disk cannot be used.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// A network interface cannot be used.
    #[error(transparent)]
    Net(#[from] NetError),
    /// The API's socket cannot be created.
    #[error(transparent)]
    Api(#[from] ApiError),
    /// There is no companion.
    #[error(transparent)]
    Companion(#[from] CompanionError),
    /// The cgroup cannot be used.
    #[error(transparent)]
    Isolation(#[from] IsolationError),
    /// The options are for another machine.
    #[error(
        "the machine has {expected} {what}, {option} was given {given} times; give one for each"
    )]
    Count {
        /// The devices.
        what: &'static str,
        /// How many the machine has.
        expected: usize,
        /// The option.
        option: &'static str,
        /// How often it was given.
        given: usize,
    },
    /// There is no place for copies of disks.
    #[error(
        "cannot create a file without a name in {} for a copy of a disk: {source}; choose another \
         directory",
        directory.display()
    )]
    Copy {
        /// The directory.
        directory: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// There is no such image, and nothing to make it of.
    #[error(
        "there is no disk {}, and the checkpoint has no copy to make it of: it was made without \
         --copy-disks DIR",
        path.display()
    )]
    NoCopy {
        /// The image.
        path: PathBuf,
    },
    /// The image has another format.
    #[error(
        "the disk {} is to be made of a copy in the format {found}; give it as {remedy}",
        path.display()
    )]
    CopyFormat {
        /// The image.
        path: PathBuf,
        /// Format of the copy.
        found: &'static str,
        /// How it is given.
        remedy: &'static str,
    },
    /// The kernel merges pages of the checkpoint.
    #[error(
        "--memory: the kernel merges the pages of this checkpoint, and those of its forks in the \
         same domain (merge=kernel); leave the option out"
    )]
    MergedByKernel,
    /// The kernel does not.
    #[error(
        "--memory merge=kernel: the kernel merges the pages of forks if it merges those of the \
         first machine; start that with merge=kernel"
    )]
    NotMergedByKernel,
    /// Pages cannot be merged by a new machine's monitor.
    #[error(
        "--memory merge=owner: cannot open /dev/userfaultfd: {0}; give this user access to it, or \
         leave the option out"
    )]
    Userfaultfd(io::Error),
    /// The broker of shared pages cannot be reached.
    #[error(transparent)]
    Broker(#[from] BrokerError),
    /// passt cannot be passed on.
    #[error("--net user cannot be used for forked machines yet; give tap= or fd=")]
    User,
    /// The host refused something.
    #[error("cannot {action}: {source}")]
    Host {
        /// The operation.
        action: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// The new machine could not be built or started.
    #[error("no machine was made: {0}")]
    Failed(String),
}

pub(super) fn host<E: Into<io::Error>>(action: &'static str) -> impl FnOnce(E) -> CheckpointError {
    move |source| CheckpointError::Host { action, source: source.into() }
}

//! Errors of the lab, with messages that name the remedy.
//!
//! Each message contains its cause, so that none is repeated as the source of another.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// An error of the lab.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// No experiment has this name.
    #[error("unknown experiment '{name}'; available: {known}")]
    UnknownExperiment {
        /// The requested name.
        name: String,
        /// The names there are.
        known: String,
    },
    /// The experiment has no such series.
    #[error("experiment '{experiment}' has no series '{name}'; available: {known}")]
    UnknownSeries {
        /// The experiment.
        experiment: String,
        /// The requested name.
        name: String,
        /// The names there are.
        known: String,
    },
    /// The list of series is empty.
    #[error("no series to run: name at least one of {known}, or omit --series")]
    NoSeries {
        /// The names there are.
        known: String,
    },
    /// The directory for the results is not usable.
    #[error("cannot write results to {directory}: {cause}; give another directory with --out")]
    Output {
        /// The directory.
        directory: PathBuf,
        /// What the system said.
        cause: io::Error,
    },
    /// A file is not a document of the laboratory.
    #[error("{path} is not a results.json: {cause}")]
    Document {
        /// The file.
        path: PathBuf,
        /// What the parser said.
        cause: serde_json::Error,
    },
    /// Less memory is available than the scale needs.
    #[error(
        "{what} needs {needed_mib} MiB of available memory, this machine has {available_mib} MiB: \
         free some, or take a smaller scale (--scale demo)"
    )]
    TooLittleMemory {
        /// The experiment and its scale.
        what: String,
        /// Memory that it needs.
        needed_mib: u64,
        /// `MemAvailable`.
        available_mib: u64,
    },
    /// A file of `/proc` or `/sys` could not be read or written.
    #[error("{path}: {cause}")]
    SystemFile {
        /// The file.
        path: PathBuf,
        /// What the system said.
        cause: io::Error,
    },
    /// A file of the system lacks a field of proc(5).
    #[error("{path} has no field {field}")]
    MissingField {
        /// The file.
        path: PathBuf,
        /// The field.
        field: &'static str,
    },
    /// A file that the guests need is missing.
    #[error("{what} is missing: {path}; {remedy}")]
    MissingFile {
        /// What the file is.
        what: &'static str,
        /// Expected path.
        path: PathBuf,
        /// The remedy.
        remedy: &'static str,
    },
    /// A series needs something that the host does not have.
    #[error("this series cannot run here: {0}")]
    Missing(#[from] Missing),
    /// A monitor could not be started.
    #[error("cannot start the monitor {program}: {cause}")]
    StartMonitor {
        /// The program.
        program: String,
        /// What the system said.
        cause: io::Error,
    },
    /// A guest did not carry out a command.
    #[error("guest {guest}: {problem}{diagnostics}")]
    Guest {
        /// Number of the guest in its series.
        guest: u32,
        /// What happened.
        problem: GuestProblem,
        /// The last lines of its console and of its monitor, ready to be shown.
        diagnostics: String,
    },
    /// Swap could not be emptied between two series.
    #[error("cannot empty swap on {path}: {cause}; the next series would not start fresh")]
    EmptySwap {
        /// The swap device.
        path: String,
        /// What the system said.
        cause: io::Error,
    },
    /// A network link could not be set up.
    #[error(
        "cannot set up a network link: {command}: {reason} (needs root and the kernel modules veth \
         and sch_tbf)"
    )]
    Network {
        /// The command of iproute2.
        command: String,
        /// Its error message.
        reason: String,
    },
    /// KVM refused an operation.
    #[error("KVM cannot {action}: {cause}")]
    Kvm {
        /// The operation.
        action: &'static str,
        /// The error.
        cause: kvm_ioctls::Error,
    },
    /// A small test guest of the lab misbehaved.
    #[error("the test guest {0}")]
    TestGuest(String),
    /// A series that changes the machine's clock, outside of the virtual host.
    #[error(
        "series '{0}' slews the clock of its host, which is allowed in the virtual host only: add \
         --where virtual-host"
    )]
    SlewsHost(String),
    /// The clock could not be slewed.
    #[error("cannot slew the clock: {0}")]
    Slew(String),
    /// KVM's clock failed its checks.
    #[error("checks of KVM's clock failed: {0}")]
    ChecksFailed(String),
    /// This machine does not meet the requirements of the series about it.
    #[error("this machine cannot be measured: {0}; --where virtual-host measures the virtual host")]
    MachineLacks(String),
    /// The virtual host's kernel is too old for an experiment on merging.
    #[error(
        "merging in the monitor needs Linux 6.8 on the host, and the virtual host has {release}; \
         scripts/install-deps.sh installs a newer kernel"
    )]
    OldKernel {
        /// Its kernel release.
        release: String,
    },
    /// Pages could not be merged or examined.
    #[error("merging pages: {0}")]
    Merging(String),
    /// KVM is not usable here, and the virtual host is excluded.
    #[error("guests cannot run directly on this machine: {0}; with --where virtual-host they can")]
    NoDirectKvm(String),
    /// The virtual host failed, or the creation of files for its guests.
    #[error(transparent)]
    VirtualHost(Box<ebb_virtual_host::HostError>),
    /// The run inside the virtual host ended without a result.
    #[error("the run inside the virtual host failed ({status}){output}")]
    InnerRun {
        /// How it ended.
        status: String,
        /// Its last lines.
        output: String,
    },
    /// A line of the run inside the virtual host is not an event.
    #[error("the run inside the virtual host wrote a line that is not an event ({cause}): {line}")]
    InnerProtocol {
        /// The line.
        line: String,
        /// What the parser said.
        cause: serde_json::Error,
    },
}

impl LabError {
    /// Whether this machine does not meet the requirements, so that nothing was tried.
    pub fn is_lack(&self) -> bool {
        use ebb_virtual_host::HostError;
        match self {
            Self::TooLittleMemory { .. }
            | Self::Missing(_)
            | Self::MachineLacks(_)
            | Self::NoDirectKvm(_)
            | Self::OldKernel { .. } => true,
            Self::VirtualHost(error) => {
                matches!(**error, HostError::QemuMissing { .. } | HostError::KernelMissing { .. })
            }
            _ => false,
        }
    }

    /// A guest did not carry out a command, and its console has no details.
    pub fn guest(guest: u32, problem: GuestProblem) -> Self {
        Self::Guest { guest, problem, diagnostics: String::new() }
    }

    /// A guest or its monitor sent an unexpected message.
    pub fn unexpected(guest: u32, what: impl std::fmt::Display) -> Self {
        Self::guest(guest, GuestProblem::Protocol(what.to_string()))
    }

    /// A file of the system could not be used; for `map_err`.
    pub(crate) fn of_file(path: impl AsRef<Path>) -> impl FnOnce(io::Error) -> Self {
        move |cause| Self::SystemFile { path: path.as_ref().to_owned(), cause }
    }
}

/// A requirement of a series that the host does not meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Missing {
    /// QEMU is missing.
    #[error("there is no qemu-system-x86_64 (Debian: apt-get install qemu-system-x86)")]
    Qemu,
    /// An uncompressed kernel is missing.
    #[error("there is no uncompressed kernel (ebb extract-vmlinux makes one)")]
    Elf,
    /// Kernel or root file system of a Debian guest were not made.
    #[error(
        "there is no Debian guest (`ebb-lab debian guest-root` and `ebb-lab debian guest-kernel` \
         make it, as root)"
    )]
    Debian,
    /// The root file system of a Debian guest that works was not made.
    #[error(
        "there is no Debian guest with a compiler (`ebb-lab debian work-root` makes it, as root)"
    )]
    Work,
    /// The module was not built.
    #[error("there is no module ebb_balloon for the guest's kernel (make module builds it)")]
    Module,
}

/// A guest's failure.
#[derive(Debug, thiserror::Error)]
pub enum GuestProblem {
    /// It ended by itself.
    #[error("the monitor ended ({0}) while the lab waited for {1}")]
    Ended(String, &'static str),
    /// It ended by itself while idle.
    #[error("the monitor of the idle guest ended ({0})")]
    EndedIdle(String),
    /// It did not answer in time.
    #[error("no {what} within {limit:?}")]
    TimeOut {
        /// What was waited for.
        what: &'static str,
        /// How long.
        limit: Duration,
    },
    /// The agent could not carry out the command.
    #[error("the command failed in the guest: {0}")]
    Failed(String),
    /// The agent sent an unexpected message.
    #[error("unexpected answer: {0}")]
    Protocol(String),
    /// It could not be moved to another monitor.
    #[error("it could not be moved: {0}")]
    Migration(String),
    /// Its memory does not have the content that was written to it.
    #[error("its memory is damaged: {0}")]
    Damaged(String),
    /// The command could not be sent.
    #[error("cannot write to the guest's console: {0}")]
    Console(io::Error),
}

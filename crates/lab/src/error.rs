//! What can go wrong in the lab, said so that the reader knows what to do.
//!
//! Each message has its cause in it, so none is told twice as the source of another.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// An error of the lab.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// No experiment has this name.
    #[error("unknown experiment '{name}'; there are: {known}")]
    UnknownExperiment {
        /// The name asked for.
        name: String,
        /// The names there are.
        known: String,
    },
    /// The experiment has no such series.
    #[error("experiment '{experiment}' has no series '{name}'; there are: {known}")]
    UnknownSeries {
        /// The experiment.
        experiment: String,
        /// The name asked for.
        name: String,
        /// The names there are.
        known: String,
    },
    /// The list of series names nothing.
    #[error("no series to run: name at least one of {known}, or leave --series out")]
    NoSeries {
        /// The names there are.
        known: String,
    },
    /// The directory for the results does not serve.
    #[error("cannot write results to {directory}: {cause}; give another directory with --out")]
    Output {
        /// The directory.
        directory: PathBuf,
        /// What the system said.
        cause: io::Error,
    },
    /// A file is no document of the laboratory.
    #[error("{path} is no results.json: {cause}")]
    Document {
        /// The file.
        path: PathBuf,
        /// What the parser said.
        cause: serde_json::Error,
    },
    /// Less memory than the scale takes.
    #[error(
        "{what} needs {needed_mib} MiB of available memory, this machine has {available_mib} MiB: free some, or \
         take a smaller scale (--scale demo)"
    )]
    TooLittleMemory {
        /// The experiment and its scale.
        what: String,
        /// What it needs.
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
    /// A file of the system has not what proc(5) says.
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
        /// Where it was looked for.
        path: PathBuf,
        /// What to do.
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
    /// A guest did not do what it was asked for.
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
    #[error("cannot empty swap on {path}: {cause}; the next series would start with a used host")]
    EmptySwap {
        /// The swap device.
        path: String,
        /// What the system said.
        cause: io::Error,
    },
    /// A network link could not be set up.
    #[error(
        "cannot set up a network link: {command}: {reason} (it takes root's rights and the kernel's modules veth and sch_tbf)"
    )]
    Network {
        /// What was asked of iproute2.
        command: String,
        /// What it said.
        reason: String,
    },
    /// KVM refused something.
    #[error("KVM cannot {action}: {cause}")]
    Kvm {
        /// What was asked.
        action: &'static str,
        /// What it said.
        cause: kvm_ioctls::Error,
    },
    /// A small guest of the lab itself did something else than it should.
    #[error("the test guest {0}")]
    TestGuest(String),
    /// A series that changes the machine's clock, outside of the virtual host.
    #[error(
        "series '{0}' slews the clock of its host, which is done in the virtual host only: add --where virtual-host"
    )]
    SlewsHost(String),
    /// The clock could not be slewed.
    #[error("cannot slew the clock: {0}")]
    Slew(String),
    /// KVM's clock is not what it should be.
    #[error("checks of KVM's clock failed: {0}")]
    ChecksFailed(String),
    /// This machine lacks what the series about it need.
    #[error("this machine cannot be measured: {0}; with --where virtual-host another one is")]
    MachineLacks(String),
    /// The virtual host's kernel cannot do what an experiment on merging needs.
    #[error(
        "merging in the monitor needs Linux 6.8 under it, and the virtual host has {release}; scripts/install-deps.sh gets a newer one"
    )]
    OldKernel {
        /// What it runs.
        release: String,
    },
    /// Pages could not be merged, or not looked at.
    #[error("merging pages: {0}")]
    Merging(String),
    /// KVM does not serve here, and the virtual host is not to be used.
    #[error("guests cannot run directly on this machine: {0}; with --where virtual-host they can")]
    NoDirectKvm(String),
    /// The virtual host, or what its guests are made from, failed.
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
    #[error("the run inside the virtual host wrote something that is no event ({cause}): {line}")]
    InnerProtocol {
        /// The line.
        line: String,
        /// What the parser said.
        cause: serde_json::Error,
    },
}

impl LabError {
    /// Whether this machine lacks what was asked for, so that nothing was tried.
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

    /// A guest did not do what it was asked for, and its console says no more of it.
    pub fn guest(guest: u32, problem: GuestProblem) -> Self {
        Self::Guest { guest, problem, diagnostics: String::new() }
    }

    /// A guest or its monitor said something else than it should.
    pub fn unexpected(guest: u32, what: impl std::fmt::Display) -> Self {
        Self::guest(guest, GuestProblem::Protocol(what.to_string()))
    }

    /// A file of the system could not be used; for `map_err`.
    pub(crate) fn of_file(path: impl AsRef<Path>) -> impl FnOnce(io::Error) -> Self {
        move |cause| Self::SystemFile { path: path.as_ref().to_owned(), cause }
    }
}

/// What a series needs and the host has not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Missing {
    /// There is no QEMU.
    #[error("there is no qemu-system-x86_64 (Debian: apt-get install qemu-system-x86)")]
    Qemu,
    /// There is no uncompressed kernel.
    #[error("there is no uncompressed kernel (ebb extract-vmlinux makes one)")]
    Elf,
    /// The module was not built.
    #[error("there is no module ebb_balloon for the guest's kernel (make module builds it)")]
    Module,
}

/// What a guest did not do.
#[derive(Debug, thiserror::Error)]
pub enum GuestProblem {
    /// It ended by itself.
    #[error("the monitor ended ({0}) while it was waited for {1}")]
    Ended(String, &'static str),
    /// It ended by itself while it had nothing to do.
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
    /// The agent could not do it.
    #[error("the command failed in the guest: {0}")]
    Failed(String),
    /// The agent said something else than it should.
    #[error("unexpected answer: {0}")]
    Protocol(String),
    /// It could not be moved to another monitor.
    #[error("it could not be moved: {0}")]
    Migration(String),
    /// Its memory does not hold what was written to it.
    #[error("its memory is damaged: {0}")]
    Damaged(String),
    /// The command could not be sent.
    #[error("cannot write to the guest's console: {0}")]
    Console(io::Error),
}

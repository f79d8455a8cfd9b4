//! Errors of virtual hosts, with their remedies.

use std::io;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::Duration;

/// Failure to build, start or use a virtual host.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// QEMU is not installed.
    #[error(
        "{program} was not found in PATH: the virtual host runs in QEMU; install it with \
         `apt-get install --no-install-recommends qemu-system-x86`"
    )]
    QemuMissing {
        /// The missing program.
        program: String,
    },
    /// No kernel for the virtual host and its guests.
    #[error(
        "no kernel image {looked_for} was found: install Debian's with `apt-get install \
         linux-image-cloud-amd64`, or name another bzImage in EBB_KERNEL"
    )]
    KernelMissing {
        /// The missing paths or patterns.
        looked_for: String,
    },
    /// The kernel image is unusable.
    #[error("kernel {path}: {reason}; use a bzImage such as Debian's /boot/vmlinuz-*-cloud-amd64")]
    KernelUnusable {
        /// The image.
        path: PathBuf,
        /// Why it is unusable.
        reason: String,
    },
    /// The kernel's modules are missing.
    #[error(
        "no modules for kernel {release} in {path}: install the package linux-image-{release}, or \
         name another directory in EBB_MODULES"
    )]
    ModulesMissing {
        /// Kernel release, as `uname -r` prints it.
        release: String,
        /// The missing directory.
        path: PathBuf,
    },
    /// A module is neither built in nor in the modules directory.
    #[error("kernel module {module} is neither built in nor listed in {path}")]
    ModuleUnknown {
        /// Name of the module.
        module: String,
        /// The `modules.dep` that was searched.
        path: PathBuf,
    },
    /// The balloon driver is not for the guests' kernel.
    #[error(
        "{path} cannot be the balloon driver of guests with kernel {release}: {reason}; build it \
         with `make module MODULE_KERNEL={release}`"
    )]
    BalloonModuleUnusable {
        /// The file.
        path: PathBuf,
        /// Why it is unusable.
        reason: String,
        /// Release of the guests' kernel.
        release: String,
    },
    /// The host's init is not a static executable.
    #[error(
        "{path} cannot be the init of the virtual host: {reason}; build it with \
         `-C target-feature=+crt-static` (the workspace's default)"
    )]
    InitUnusable {
        /// The executable.
        path: PathBuf,
        /// Why it is unusable.
        reason: String,
    },
    /// busybox is missing or not static.
    #[error(
        "no usable busybox ({reason}): install it with `apt-get install busybox-static`, or name a \
         static one in EBB_BUSYBOX"
    )]
    BusyboxUnusable {
        /// The reason.
        reason: String,
    },
    /// The libraries of a program could not be determined.
    #[error("cannot find the libraries of {path}: {reason}")]
    Libraries {
        /// The executable.
        path: PathBuf,
        /// Error of `ldd`.
        reason: String,
    },
    /// A tool that builds a root file system or a kernel is not installed.
    #[error(
        "{program} was not found: install it with `apt-get install {package}`, or all that Ebb \
         needs with scripts/install-deps.sh"
    )]
    DebianToolMissing {
        /// The missing program or file.
        program: String,
        /// Debian's package that has it.
        package: &'static str,
    },
    /// A root file system or a kernel could not be built.
    #[error("{what} failed ({status}):\n  {output}")]
    DebianBuild {
        /// The failed step.
        what: String,
        /// Exit status of its command.
        status: ExitStatus,
        /// The last lines of the command's output.
        output: String,
    },
    /// The configuration is invalid.
    #[error("virtual host configuration: {0}")]
    Configuration(String),
    /// This machine has less memory available than requested.
    #[error(
        "the virtual host needs {asked_mib} MiB of memory, but only {available_mib} MiB are \
         available on this machine; ask for less (`--memory`), or end other programs"
    )]
    TooLittleMemory {
        /// Memory of the virtual host plus QEMU's overhead.
        asked_mib: u64,
        /// `MemAvailable` of this machine.
        available_mib: u64,
    },
    /// Input or output failed.
    #[error("{what}: {error}")]
    Io {
        /// The failed action, with the path.
        what: String,
        /// The system's error.
        error: io::Error,
    },
    /// QEMU ended, or the host's kernel panicked, before the host was ready.
    #[error("the virtual host ended while it started ({status}){console}")]
    EndedAtStart {
        /// Exit status of QEMU.
        status: String,
        /// Last lines of its console and of QEMU's output.
        console: String,
    },
    /// The host was not ready in time after its start.
    #[error(
        "the virtual host was not ready after {} s: the machine may be overloaded{console}",
        .limit.as_secs()
    )]
    BootTimeout {
        /// The limit.
        limit: Duration,
        /// Last lines of its console and of QEMU's output.
        console: String,
    },
    /// The host ended while it was in use.
    #[error("the virtual host ended while it was in use ({status}){console}")]
    Ended {
        /// Exit status of QEMU.
        status: String,
        /// Last lines of its console and of QEMU's output.
        console: String,
    },
    /// The host reached its time limit.
    #[error(
        "the virtual host reached its time limit of {} s and was ended; raise it with \
         `--time-limit`",
        .limit.as_secs()
    )]
    HostTimeLimit {
        /// The limit.
        limit: Duration,
    },
    /// A command reached its time limit and was killed.
    #[error("`{command}` reached its time limit of {} s and was killed", .limit.as_secs_f64())]
    CommandTimeLimit {
        /// The command line.
        command: String,
        /// The limit.
        limit: Duration,
    },
    /// The host's init uses another version of the channel's protocol.
    #[error(
        "the init of the virtual host uses protocol version {found}, this program version \
         {expected}: use the same build of ebb for both"
    )]
    Version {
        /// Version of this program.
        expected: u32,
        /// Version of the host's init.
        found: u32,
    },
    /// The peer violated the channel's protocol.
    #[error("protocol error on the control channel: {0}")]
    Protocol(String),
    /// A request failed in the host.
    #[error("inside the virtual host: {0}")]
    Inside(String),
}

impl HostError {
    /// An `Io` error with a description of the failed action.
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |error| Self::Io { what, error }
    }
}

//! What can go wrong on the way to a running virtual host, each with its remedy.

use std::io;
use std::path::PathBuf;
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
        /// Program that was looked for.
        program: String,
    },
    /// No kernel for the virtual host and its guests.
    #[error(
        "no kernel image {looked_for} was found: install Debian's with `apt-get install linux-image-cloud-amd64`, \
         or name another bzImage in EBB_KERNEL"
    )]
    KernelMissing {
        /// Paths or patterns that were looked for.
        looked_for: String,
    },
    /// The kernel image is not usable.
    #[error("kernel {path}: {reason}; use a bzImage such as Debian's /boot/vmlinuz-*-cloud-amd64")]
    KernelUnusable {
        /// The image.
        path: PathBuf,
        /// Why it is not usable.
        reason: String,
    },
    /// The modules that belong to the kernel are not there.
    #[error(
        "no modules for kernel {release} in {path}: install the package linux-image-{release}, or name another \
         directory in EBB_MODULES"
    )]
    ModulesMissing {
        /// Kernel release, as `uname -r` prints it.
        release: String,
        /// Directory that was looked for.
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
    /// The guest's balloon driver is not one for the guest's kernel.
    #[error(
        "{path} cannot be the balloon driver of guests with kernel {release}: {reason}; build it with \
         `make module MODULE_KERNEL={release}`"
    )]
    BalloonModuleUnusable {
        /// The file.
        path: PathBuf,
        /// Why it is not usable.
        reason: String,
        /// Release of the guests' kernel.
        release: String,
    },
    /// The program to run as init inside is not a static executable.
    #[error(
        "{path} cannot be the init of the virtual host: {reason}; build it with `-C target-feature=+crt-static` \
         (the workspace's default)"
    )]
    InitUnusable {
        /// The executable.
        path: PathBuf,
        /// Why it is not usable.
        reason: String,
    },
    /// busybox is missing or not static.
    #[error(
        "no usable busybox ({reason}): install it with `apt-get install busybox-static`, or name a static one in \
         EBB_BUSYBOX"
    )]
    BusyboxUnusable {
        /// Why.
        reason: String,
    },
    /// The program's libraries could not be determined.
    #[error("cannot find the libraries of {path}: {reason}")]
    Libraries {
        /// The executable.
        path: PathBuf,
        /// What `ldd` said.
        reason: String,
    },
    /// The request contradicts itself.
    #[error("virtual host configuration: {0}")]
    Configuration(String),
    /// This machine has less memory than asked for.
    #[error(
        "the virtual host was asked to have {asked_mib} MiB of memory, but only {available_mib} MiB are available on \
         this machine; ask for less (`--memory`), or end other programs"
    )]
    TooLittleMemory {
        /// Memory of the virtual host plus QEMU's own.
        asked_mib: u64,
        /// MemAvailable of this machine.
        available_mib: u64,
    },
    /// Input or output failed.
    #[error("{what}: {error}")]
    Io {
        /// What was being done, with the path.
        what: String,
        /// The system's error.
        error: io::Error,
    },
    /// QEMU ended, or the kernel inside panicked, before the host was ready.
    #[error("the virtual host ended while it started ({status}){console}")]
    EndedAtStart {
        /// How QEMU ended.
        status: String,
        /// Last lines of its console and of QEMU's messages.
        console: String,
    },
    /// The host did not answer in time after its start.
    #[error("the virtual host was not ready after {} s: the machine may be overloaded{console}", .limit.as_secs())]
    BootTimeout {
        /// The limit.
        limit: Duration,
        /// Last lines of its console and of QEMU's messages.
        console: String,
    },
    /// The host ended while it was in use.
    #[error("the virtual host ended while it was in use ({status}){console}")]
    Ended {
        /// How QEMU ended.
        status: String,
        /// Last lines of its console and of QEMU's messages.
        console: String,
    },
    /// The host's own time limit passed.
    #[error("the virtual host reached its time limit of {} s and was ended; raise it with `--time-limit`", .limit.as_secs())]
    HostTimeLimit {
        /// The limit.
        limit: Duration,
    },
    /// A command's time limit passed; it was killed.
    #[error("`{command}` reached its time limit of {} s and was killed", .limit.as_secs_f64())]
    CommandTimeLimit {
        /// The command line.
        command: String,
        /// The limit.
        limit: Duration,
    },
    /// The init inside speaks another version of the channel's protocol.
    #[error(
        "the init inside the virtual host speaks protocol version {found}, this program version {expected}: use the \
         same build of ebb for both"
    )]
    Version {
        /// Version of this program.
        expected: u32,
        /// Version inside.
        found: u32,
    },
    /// The other side of the channel sent something that is not in the protocol.
    #[error("protocol error on the control channel: {0}")]
    Protocol(String),
    /// A request failed inside the host.
    #[error("inside the virtual host: {0}")]
    Inside(String),
}

impl HostError {
    /// An `Io` error with a description of what was being done.
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |error| Self::Io { what, error }
    }
}

//! Options shared by `ebb run`, `ebb restore` and `ebb receive`: the monitor's behaviour on this
//! host, independent of its machine.

use std::io::IsTerminal;
use std::path::PathBuf;

use clap::ValueEnum;
use ebb_vmm::config::options::{CGROUP_FORM, SERIAL_FORM};
use ebb_vmm::config::{SerialConfig, Switch};
use ebb_vmm::isolation::{CgroupConfig, IsolationConfig, IsolationMode, UserChoice};

use crate::flags::word;

/// Value name of a clock policy.
pub const CLOCK_FORM: &str = "continue|catch-up";

/// A monitor's behaviour on this host.
#[derive(Debug, clap::Args)]
pub struct HostArgs {
    /// The guest's first serial line [default: tty on a terminal, else stdio]. Output to a file goes
    /// to PATH and PATH.1 in turn, each up to SIZE [default: 16M]
    #[arg(long, value_name = SERIAL_FORM)]
    serial: Option<SerialConfig>,
    /// Socket for `ebb ctl` and `ebb migrate`
    #[arg(long, value_name = "PATH")]
    pub api: Option<PathBuf>,
    /// Allow checkpoints of the machine in memory, from which `ebb fork` makes others
    /// (docs/checkpoints.md). One thread of the monitor may then fork the process
    #[arg(long, requires = "api")]
    pub forkable: bool,
    /// System call filters
    #[arg(long, default_value = "on", value_parser = word::<Switch>())]
    pub seccomp: Switch,
    #[command(flatten)]
    pub isolation: IsolationArgs,
    #[command(flatten)]
    pub end: EndArgs,
}

/// The rights that a monitor gives up once everything is open.
#[derive(Debug, clap::Args)]
pub struct IsolationArgs {
    /// Whether the monitor gives up the rights of the user who starts it: its user and groups (as
    /// root), the host's files, network and other namespaces (docs/security.md); `ebb doctor --vm
    /// SOCKET` shows what this host permits
    #[arg(long, default_value = "auto", value_parser = word::<IsolationMode>())]
    isolate: IsolationMode,
    /// The user that a monitor started by root becomes: an account or UID:GID [default: an unused
    /// one]
    #[arg(long, value_name = "USER")]
    user: Option<String>,
    /// Move the monitor to a cgroup (version 2), which is created if necessary; a relative PATH is
    /// below /sys/fs/cgroup
    #[arg(long, value_name = CGROUP_FORM)]
    cgroup: Option<CgroupConfig>,
    /// A directory below which clients of the API may name files that do not exist yet (snapshots);
    /// otherwise they pass open files, as `ebb ctl` does. May be given several times
    #[arg(long = "allow-dir", value_name = "PATH", requires = "api")]
    allowed_directories: Vec<PathBuf>,
}

impl IsolationArgs {
    /// Converts the options for the monitor.
    pub fn into_config(self) -> IsolationConfig {
        let user = self.user.map_or(UserChoice::Dynamic, UserChoice::Named);
        IsolationConfig {
            mode: self.isolate,
            user,
            cgroup: self.cgroup,
            allowed_directories: self.allowed_directories,
            image_directories: Vec::new(),
        }
    }
}

/// Options for the run of a machine.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct EndArgs {
    /// Whether to refuse or use a KVM that emulates each instruction of its guests
    #[arg(long, value_enum, default_value_t = EmulatedKvm::Refuse)]
    pub emulated_kvm: EmulatedKvm,
    /// Print how the guest ended as one JSON line on standard error (standard output may be the
    /// guest's console)
    #[arg(long)]
    pub json: bool,
}

/// Handling of a KVM that emulates its guests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum EmulatedKvm {
    /// Refuse it.
    Refuse,
    /// Use it.
    Use,
}

impl HostArgs {
    /// Where the guest's first serial line goes.
    pub fn serial(&self) -> SerialConfig {
        self.serial.clone().unwrap_or_else(default_serial)
    }
}

/// The serial line of a machine whose user chooses none.
pub fn default_serial() -> SerialConfig {
    let interactive = std::io::stdin().is_terminal();
    if interactive { SerialConfig::Tty } else { SerialConfig::Stdio }
}

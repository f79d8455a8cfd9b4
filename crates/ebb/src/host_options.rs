//! Options shared by `ebb run`, `ebb restore` and `ebb receive`: the monitor's behaviour on this
//! host, independent of its machine.

use std::io::IsTerminal;
use std::path::PathBuf;

use clap::ValueEnum;
use ebb_vmm::config::options::SERIAL_FORM;
use ebb_vmm::config::{SerialConfig, Switch};

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
    /// System call filters
    #[arg(long, default_value = "on", value_parser = word::<Switch>())]
    pub seccomp: Switch,
    #[command(flatten)]
    pub end: EndArgs,
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
        let interactive = std::io::stdin().is_terminal();
        let usual = if interactive { SerialConfig::Tty } else { SerialConfig::Stdio };
        self.serial.clone().unwrap_or(usual)
    }
}

//! Options that `ebb restore` and `ebb receive` share: what is decided on this host for a machine
//! that was made elsewhere.

use std::io::IsTerminal;
use std::path::PathBuf;

use ebb_kvm_clock::ClockPolicy;
use ebb_vmm::config::merge::MERGE_FORM;
use ebb_vmm::config::options::{DISK_FORM, SERIAL_FORM};
use ebb_vmm::config::{BootFiles, DiskConfig, MergeOverrides, RebootAction, SerialConfig, Switch};
use ebb_vmm::snapshot::{DescribedPaths, Overrides};

use crate::run::{CLOCK_FORM, OnReboot, Toggle};

/// What this host decides, and neither the snapshot nor the other monitor.
#[derive(Debug, clap::Args)]
pub struct OverrideArgs {
    /// The guest's first serial line [default: tty on a terminal, else stdio]
    #[arg(long, value_name = SERIAL_FORM)]
    serial: Option<SerialConfig>,
    /// Socket for `ebb ctl` and `ebb migrate`
    #[arg(long, value_name = "PATH")]
    api: Option<PathBuf>,
    /// What the guest's clocks do over the time in between, and over later pauses [default: as
    /// before]
    #[arg(long, value_name = CLOCK_FORM)]
    clock: Option<ClockPolicy>,
    /// Kernel that a reboot of the guest starts, with the command line as before
    #[arg(long, value_name = "FILE")]
    kernel: Option<PathBuf>,
    /// Initial RAM file system for reboots
    #[arg(long, value_name = "FILE", requires = "kernel")]
    initrd: Option<PathBuf>,
    /// What a reboot of the guest does: start it again, or end the monitor [default: as before]
    #[arg(long, value_enum)]
    on_reboot: Option<OnReboot>,
    /// Image of a disk of the machine; give all of them, in their order. One that the guest could
    /// not write stays so
    #[arg(long, value_name = DISK_FORM)]
    disk: Vec<DiskConfig>,
    /// How equal pages of guest memory are merged from now on [default: not at all]
    #[arg(long, value_name = MERGE_FORM)]
    memory: Option<MergeOverrides>,
    /// Open the files that the machine's description names (kernel, initrd, disks) where no option
    /// names one, and merge its pages as described: its author can then read and change any file
    /// that this user can
    #[arg(long)]
    trust_paths: bool,
    /// System call filters
    #[arg(long, value_enum, default_value_t = Toggle::On)]
    seccomp: Toggle,
}

impl OverrideArgs {
    /// As the monitor takes it.
    pub fn into_overrides(self) -> Overrides {
        let interactive = std::io::stdin().is_terminal();
        let initrd = self.initrd;
        Overrides {
            serial: self.serial.unwrap_or(if interactive {
                SerialConfig::Tty
            } else {
                SerialConfig::Stdio
            }),
            api: self.api,
            seccomp: if matches!(self.seccomp, Toggle::On) { Switch::On } else { Switch::Off },
            clock: self.clock,
            on_reboot: self.on_reboot.map(|action| match action {
                OnReboot::Reset => RebootAction::Reset,
                OnReboot::Exit => RebootAction::Exit,
            }),
            boot: self.kernel.map(|kernel| BootFiles { kernel, initrd }),
            disks: self.disk,
            merge: self.memory.unwrap_or_default(),
            described_paths: if self.trust_paths {
                DescribedPaths::Trust
            } else {
                DescribedPaths::Ignore
            },
        }
    }
}

//! Options that `ebb restore` and `ebb receive` share: what is decided on this host for a machine
//! that was made elsewhere.

use std::path::PathBuf;

use ebb_kvm_clock::ClockPolicy;
use ebb_vmm::config::merge::MERGE_FORM;
use ebb_vmm::config::options::DISK_FORM;
use ebb_vmm::config::{BootFiles, DiskConfig, MergeOverrides, RebootAction};
use ebb_vmm::snapshot::{DescribedPaths, Overrides};

use crate::flags::word;
use crate::host_options::{CLOCK_FORM, HostArgs};

/// What this host decides, and neither the snapshot nor the other monitor.
#[derive(Debug, clap::Args)]
pub struct OverrideArgs {
    #[command(flatten)]
    pub host: HostArgs,
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
    #[arg(long, value_parser = word::<RebootAction>())]
    on_reboot: Option<RebootAction>,
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
}

impl OverrideArgs {
    /// As the monitor takes it.
    pub fn into_overrides(self) -> Overrides {
        let initrd = self.initrd;
        Overrides {
            serial: self.host.serial(),
            api: self.host.api,
            seccomp: self.host.seccomp,
            clock: self.clock,
            on_reboot: self.on_reboot,
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

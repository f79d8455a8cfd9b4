//! Options shared by `ebb restore` and `ebb receive`: decisions of this host about a machine that
//! was created elsewhere.

use std::path::PathBuf;

use ebb_kvm_clock::ClockPolicy;
use ebb_vmm::config::limits::LIMITS_FORM;
use ebb_vmm::config::merge::MERGE_FORM;
use ebb_vmm::config::net::NET_FORM;
use ebb_vmm::config::options::DISK_FORM;
use ebb_vmm::config::vsock::VSOCK_FORM;
use ebb_vmm::config::{
    BootFiles, DiskConfig, MergeOverrides, NetConfig, RateLimits, RebootAction, Switch, VsockOption,
};
use ebb_vmm::snapshot::{DescribedPaths, Overrides};

use crate::flags::word;
use crate::host_options::{CLOCK_FORM, HostArgs};

/// Decisions of this host, not of the snapshot or the other monitor.
#[derive(Debug, clap::Args)]
pub struct OverrideArgs {
    #[command(flatten)]
    pub host: HostArgs,
    /// Behaviour of the guest's clocks over the interruption and over later pauses [default: as
    /// before]
    #[arg(long, value_name = CLOCK_FORM)]
    clock: Option<ClockPolicy>,
    /// Kernel that a reboot of the guest starts, with the command line as before
    #[arg(long, value_name = "FILE")]
    kernel: Option<PathBuf>,
    /// Initial RAM file system for reboots
    #[arg(long, value_name = "FILE", requires = "kernel")]
    initrd: Option<PathBuf>,
    /// Action at a reboot of the guest: start it again, or end the monitor [default: as before]
    #[arg(long, value_parser = word::<RebootAction>())]
    on_reboot: Option<RebootAction>,
    /// Image of a disk of the machine, and its limits; give all of them in order. A read-only disk
    /// stays read-only
    #[arg(long, value_name = DISK_FORM)]
    disk: Vec<DiskConfig>,
    /// Limits of the machine's entropy device [default: none]
    #[arg(long, value_name = LIMITS_FORM, value_parser = RateLimits::parse_rng)]
    rng: Option<RateLimits>,
    /// Backend of a network device of the machine, its limits, and, with mac, a new address; give
    /// all of them in order
    #[arg(long, value_name = NET_FORM)]
    net: Vec<NetConfig>,
    /// The socket of the machine's socket device (vsock), and a new CID [default: as before]. All
    /// connections have ended
    #[arg(long, value_name = VSOCK_FORM)]
    vsock: Option<VsockOption>,
    /// How equal pages of guest memory are merged from now on [default: not at all]
    #[arg(long, value_name = MERGE_FORM)]
    memory: Option<MergeOverrides>,
    /// Open the files that the machine's description names (kernel, initrd, disks, tap
    /// interfaces) where no option
    /// names one, and merge its pages as described: its author can then read and change any file
    /// that this user can
    #[arg(long)]
    trust_paths: bool,
}

impl OverrideArgs {
    /// Converts the options for the monitor.
    pub fn into_overrides(self) -> Overrides {
        let initrd = self.initrd;
        Overrides {
            serial: self.host.serial(),
            api: self.host.api,
            seccomp: self.host.seccomp,
            isolation: self.host.isolation.into_config(),
            clock: self.clock,
            forkable: Switch::from_bool(self.host.forkable),
            on_reboot: self.on_reboot,
            boot: self.kernel.map(|kernel| BootFiles { kernel, initrd }),
            disks: self.disk,
            nets: self.net,
            rng_limits: self.rng.unwrap_or_default(),
            vsock: self.vsock,
            merge: self.memory.unwrap_or_default(),
            described_paths: if self.trust_paths {
                DescribedPaths::Trust
            } else {
                DescribedPaths::Ignore
            },
        }
    }
}

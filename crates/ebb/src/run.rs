//! `ebb run`: a virtual machine in the foreground.

use std::path::PathBuf;
use std::process::ExitCode;

use ebb_kvm_clock::ClockPolicy;
use ebb_vmm::boot::lean::with_lean_words;
use ebb_vmm::config::limits::LIMITS_FORM;
use ebb_vmm::config::net::NET_FORM;
use ebb_vmm::config::options::{self, BALLOON_FORM, DISK_FORM, MEMORY_FORM, NUMA_FORM};
use ebb_vmm::config::vsock::{FIRST_GUEST_CID, VSOCK_FORM};
use ebb_vmm::config::{
    BootFiles, ConfigError, DiskConfig, MemoryConfig, NetConfig, NumaNodeConfig, RateLimits,
    RebootAction, Switch, VmConfig, VsockOption,
};
use ebb_vmm::exit::GuestExit;
use ebb_vmm::log;
use ebb_vmm::probe::{self, KvmQuality};

use crate::admission::{NO_ROOM, Room, ViaArgs};
use crate::flags::word;
use crate::host_options::{CLOCK_FORM, EmulatedKvm, EndArgs, HostArgs};

const AFTER_HELP: &str = "\
Sizes take K, M, G and T for powers of 1024.

Exit codes: 0 the guest powered off, 1 it could not be started, 2 wrong usage, 3 it rebooted (with
--on-reboot exit), 4 it crashed (triple fault, or a kernel panic reported by the pvpanic driver),
5 KVM or the monitor failed, 6 ended by SIGTERM, SIGINT, SIGHUP or Ctrl-A x, 7 killed through the
API, 8 it has migrated to another monitor, 9 the host has no room for it (--via).

Example: ebb run --kernel /boot/vmlinuz-6.1.0-amd64 --initrd guest.cpio \\
             --cmdline 'console=ttyS0' --memory 1G --api /run/ebb.sock";

/// Runs a virtual machine until its guest ends.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER_HELP, next_line_help = true)]
pub struct Args {
    /// Kernel: a bzImage (/boot/vmlinuz-*) or an ELF vmlinux; the latter starts faster (see
    /// `ebb extract-vmlinux`)
    #[arg(long, value_name = "FILE")]
    kernel: PathBuf,
    /// Initial RAM file system
    #[arg(long, value_name = "FILE")]
    initrd: Option<PathBuf>,
    /// Kernel command line
    #[arg(long, value_name = "TEXT", default_value = "console=ttyS0")]
    cmdline: String,
    /// Add words to the kernel command line with which Linux boots faster and occupies less memory
    /// (docs/boot.md); those of --cmdline win
    #[arg(long)]
    lean: bool,
    /// Number of vCPUs
    #[arg(long, value_name = "N", default_value_t = 1)]
    cpus: u8,
    /// Guest memory
    ///
    /// merge=owner lets the monitor merge equal pages of this machine, and with merge_broker also
    /// with those of other machines of the same merge_domain; merge=kernel lets Linux's KSM do it,
    /// for machines of one trust domain only. Merging lets machines of a domain find out what
    /// others have in memory (docs/merging.md), so it is off by default.
    #[arg(long, value_name = MEMORY_FORM, default_value = "512M")]
    memory: MemoryConfig,
    /// A NUMA node of the guest; give one for each node
    #[arg(long, value_name = NUMA_FORM)]
    numa: Vec<NumaNodeConfig>,
    /// The balloon device
    ///
    /// page_bitmap, page_ranges and host_requests are features of Ebb's extension; Linux's own
    /// driver does not support them. init_reported and init_on_inflate are proposed features that
    /// no released kernel has: with them, the guest need not clear pages that the host has zeroed
    /// (docs/zeroed-pages.md). verify_reports=on is a slow check of guests under test: each
    /// page that the guest reports free or puts into the balloon is overwritten with a pattern
    /// before it is discarded, so that a guest that still uses it notices. It has no effect if the
    /// guest has negotiated page poison or one of the proposed features.
    #[arg(long, value_name = BALLOON_FORM, default_value = "reporting=on")]
    balloon: String,
    /// A disk; give one for each
    ///
    /// The format of its image is never guessed. With overlay=FILE, the guest's writes go to that
    /// qcow2 image, which is created if it does not exist, and the image at path= is only read.
    /// direct=on bypasses the host's page cache. See docs/disks.md.
    ///
    /// bandwidth (bytes) and ops (requests) limit what the guest transfers in a second, also at run
    /// time with `ebb ctl SOCKET limits`. The bursts, what may pass at once after an idle time, are
    /// a tenth of that by default.
    #[arg(long, value_name = DISK_FORM)]
    disk: Vec<DiskConfig>,
    /// An entropy device, with limits like those of a disk
    #[arg(long, value_name = LIMITS_FORM, num_args = 0..=1, default_missing_value = "")]
    #[arg(value_parser = RateLimits::parse_rng)]
    rng: Option<RateLimits>,
    /// A network device; give one for each (docs/network.md)
    ///
    /// tap is the name of a tap interface that this user may open; fd, a descriptor of one that the
    /// monitor inherits, or of a stream socket; user starts passt, which needs no rights, and
    /// forwards TCP ports of the host to the guest. The address is random by default. rx limits are
    /// for frames to the guest, tx limits for frames from it, like those of a disk.
    #[arg(long, value_name = NET_FORM)]
    net: Vec<NetConfig>,
    /// A socket device (vsock), whose guest has the CID N [default: 3]
    ///
    /// Clients of the host connect to PATH, write `CONNECT PORT` and a line feed, and read `OK`;
    /// connections of the guest to a port of the host (CID 2) arrive at PATH_PORT.
    #[arg(long, value_name = VSOCK_FORM)]
    vsock: Option<VsockOption>,
    /// Action at a reboot of the guest: start it again, or end the monitor
    #[arg(long, default_value = "reset", value_parser = word::<RebootAction>())]
    on_reboot: RebootAction,
    /// Behaviour of the guest's clocks over a pause: continue where they stopped, or catch up with
    /// real time
    #[arg(long, value_name = CLOCK_FORM, default_value_t)]
    clock: ClockPolicy,
    #[command(flatten)]
    via: ViaArgs,
    #[command(flatten)]
    host: HostArgs,
}

impl Args {
    fn into_config(self) -> Result<VmConfig, ConfigError> {
        let config = VmConfig {
            boot: Some(BootFiles { kernel: self.kernel, initrd: self.initrd }),
            cmdline: if self.lean { with_lean_words(&self.cmdline) } else { self.cmdline },
            cpus: self.cpus,
            memory: self.memory,
            numa: self.numa,
            balloon: options::parse_balloon(&self.balloon)?,
            disks: self.disk,
            rng: self.rng,
            nets: self.net,
            vsock: self.vsock.map(|vsock| vsock.with_default_cid(FIRST_GUEST_CID)),
            serial: self.host.serial(),
            api: self.host.api,
            seccomp: self.host.seccomp,
            isolation: self.host.isolation.into_config(),
            on_reboot: self.on_reboot,
            clock: self.clock,
            forkable: Switch::from_bool(self.host.forkable),
        };
        config.validate()?;
        Ok(config)
    }
}

/// Refuses a KVM on which Linux does not boot in reasonable time. A processor with hardware
/// virtualization is trusted; anything else is tested with a loop, which takes a millisecond on a
/// fast KVM.
fn check_kvm() -> anyhow::Result<()> {
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let virtualizes = |line: &str| {
        line.starts_with("flags")
            && line.split_ascii_whitespace().any(|flag| matches!(flag, "vmx" | "svm"))
    };
    if cpuinfo.lines().any(virtualizes) {
        return Ok(());
    }
    // Other problems are reported when KVM is opened.
    let KvmQuality::Emulated { ns_per_iteration, .. } = probe::probe().quality else {
        return Ok(());
    };
    anyhow::bail!(
        "/dev/kvm emulates its guests on this machine: {ns_per_iteration:.0} ns for an iteration \
         of a loop that takes about 1 ns on hardware, so that Linux would take many minutes to \
         boot; run the same command in Ebb's own virtual host, `ebb-lab virtual-host -- ebb run \
         …`, or give --emulated-kvm use"
    )
}

/// Runs the guest; the exit code reports how it ended.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let end = args.host.end;
    if args.via.ask(args.host.api.as_deref(), args.memory.size.bytes())? == Room::None {
        return Ok(ExitCode::from(NO_ROOM));
    }
    let config = match args.into_config() {
        Ok(config) => config,
        Err(error) => {
            eprintln!("ebb: {error}");
            return Ok(ExitCode::from(2));
        }
    };
    run_machine(end, || ebb_vmm::vm::run(config))
}

/// Runs a machine to its end and reports how it ended.
pub fn run_machine<E>(
    end: EndArgs,
    machine: impl FnOnce() -> Result<GuestExit, E>,
) -> anyhow::Result<ExitCode>
where
    anyhow::Error: From<E>,
{
    if end.emulated_kvm == EmulatedKvm::Refuse {
        check_kvm()?;
    }
    let exit = machine()?;
    if end.json {
        let (end, code, message) = (exit.kind(), exit.code(), exit.to_string());
        let document = serde_json::json!({ "end": end, "code": code, "message": message });
        log::line(&document.to_string());
    } else if exit.code() == 0 {
        tracing::info!("{exit}");
    } else {
        log::line(&format!("ebb: {}", ebb_program::printable(&exit.to_string())));
    }
    Ok(ExitCode::from(exit.code()))
}

//! From Firecracker's documents to the configuration of a machine of Ebb's.

use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ebb_guest_ram::{HugePages, Populate};
use ebb_kvm_clock::ClockPolicy;

use super::documents::{
    BalloonDeviceConfig, BlockDeviceConfig, CustomCpuTemplate, HugePageConfig,
    NetworkInterfaceConfig, RateLimiterConfig, TokenBucketConfig,
};
use super::fault::Fault;
use super::resources::Resources;
use crate::boot::BootImage;
use crate::config::{
    self, Backing, BootFiles, DiskConfig, DiskFormat, MEMORY_ALIGNMENT_BYTES, MIN_MEMORY_BYTES,
    MemoryConfig, MergeConfig, NetBackend, NetConfig, RateLimits, RebootAction, SerialConfig,
    Switch, VmConfig, VsockConfig,
};
use crate::isolation::IsolationConfig;
use crate::size::ByteSize;

/// The command line of a guest without `boot_args`, as Firecracker has it.
const DEFAULT_BOOT_ARGS: &str = "reboot=k panic=1 nomodule 8250.nr_uarts=0 i8042.noaux \
                                 i8042.nomux i8042.dumbkbd swiotlb=noforce";
/// Largest limit that a device takes, in bytes or requests a second.
const MOST_PER_SECOND: u64 = 1 << 50;
/// Size of each of the two files of the serial line.
const SERIAL_FILE_BYTES: u64 = 16 << 20;
const MIB: u64 = 1 << 20;

/// What does not come from the API.
#[derive(Debug, Clone)]
pub(super) struct Host {
    pub api: Option<PathBuf>,
    pub seccomp: Switch,
    pub isolation: IsolationConfig,
    /// The serial line, unless `PUT /serial` names a file.
    pub serial: SerialConfig,
    pub pci: Switch,
}

impl Host {
    /// Where the guest's serial line goes.
    pub(super) fn serial(&self, resources: &Resources) -> SerialConfig {
        match &resources.serial.serial_out_path {
            None => self.serial.clone(),
            Some(path) => SerialConfig::File {
                path: path.clone(),
                max: ByteSize::from_bytes(SERIAL_FILE_BYTES),
                limits: limits(&RateLimiterConfig {
                    bandwidth: resources.serial.rate_limiter,
                    ops: None,
                }),
            },
        }
    }

    /// The rights that the monitor gives up. Clients may name snapshots beside the API's socket and
    /// beside writable images, and other images there and beside those that are only read.
    pub(super) fn isolation(&self, resources: &Resources) -> IsolationConfig {
        let mut isolation = self.isolation.clone();
        let Some(api) = &self.api else { return isolation };
        let images = |readonly: bool| {
            let drives = resources.drives.iter();
            let drives = drives.filter(move |drive| (drive.is_read_only == Some(true)) == readonly);
            drives.filter_map(|drive| drive.path_on_host.as_deref().map(Path::new))
        };
        add_directories(&mut isolation.allowed_directories, images(false).chain([api.as_path()]));
        isolation.image_directories.clone_from(&isolation.allowed_directories);
        add_directories(&mut isolation.image_directories, images(true));
        isolation
    }
}

/// Adds the directories of files, except those of the system.
fn add_directories<'a>(known: &mut Vec<PathBuf>, files: impl Iterator<Item = &'a Path>) {
    for file in files {
        let Ok(file) = std::path::absolute(file) else { continue };
        if let Some(directory) = file.parent()
            && !is_shared(directory)
            && directory.is_dir()
            && !known.iter().any(|known| known == directory)
        {
            known.push(directory.to_owned());
        }
    }
}

/// Whether a directory belongs to the system, so that a file there may have a meaning for others.
fn is_shared(directory: &Path) -> bool {
    let system = ["/run", "/var/run", "/etc", "/usr", "/dev", "/boot", "/proc", "/sys"];
    directory == Path::new("/") || system.iter().any(|path| directory == Path::new(path))
}

/// The machine that `resources` describe, or why it cannot be started.
pub(super) fn build(resources: &Resources, host: &Host) -> Result<VmConfig, Fault> {
    let fault = |message: String| Fault::new(message).within("Start microvm error");
    let boot = resources
        .boot
        .as_ref()
        .ok_or_else(|| fault("Cannot start microvm without kernel configuration.".to_owned()))?;
    let nets = nets(resources)?;
    if resources.machine.cpu_template.is_some() || resources.cpu != CustomCpuTemplate::default() {
        return Err(fault("Ebb has no CPU templates: the guest gets this host's".to_owned()));
    }
    let cmdline = cmdline(resources, boot.boot_args.as_deref(), host.pci);
    let kernel = PathBuf::from(&boot.kernel_image_path);
    let initrd = boot.initrd_path.as_ref().map(PathBuf::from);
    let size = resources.machine.mem_size_mib as u64 * MIB;
    let config = VmConfig {
        cmdline,
        cpus: resources.machine.vcpu_count,
        memory: MemoryConfig {
            size: ByteSize::from_bytes(
                size.next_multiple_of(MEMORY_ALIGNMENT_BYTES).max(MIN_MEMORY_BYTES),
            ),
            backing: match resources.machine.huge_pages {
                HugePageConfig::None => Backing::Anonymous,
                HugePageConfig::Hugetlbfs2M => Backing::Hugetlb2M,
            },
            huge_pages: HugePages::Off,
            populate: Populate::Lazy,
            merge: MergeConfig::default(),
        },
        numa: Vec::new(),
        balloon: Some(balloon(resources.balloon.as_ref())),
        disks: disks(&resources.drives),
        rng: resources.entropy.as_ref().map(|entropy| optional(entropy.rate_limiter.as_ref())),
        nets,
        vsock: resources
            .vsock
            .as_ref()
            .map(|vsock| VsockConfig { cid: vsock.guest_cid, path: vsock.uds_path.clone().into() }),
        serial: host.serial(resources),
        api: host.api.clone(),
        seccomp: host.seccomp,
        isolation: host.isolation(resources),
        // A guest of Firecracker reboots to power off.
        on_reboot: RebootAction::Exit,
        clock: ClockPolicy::Continue,
        forkable: Switch::Off,
        boot: Some(BootFiles { kernel: kernel.clone(), initrd: initrd.clone() }),
    };
    config.validate().map_err(|error| fault(error.to_string()))?;
    // While the client can still correct it.
    BootImage::open(&kernel, initrd.as_deref(), &config.cmdline)
        .map_err(|error| fault(error.to_string()))?;
    if !is_kernel(&kernel) {
        return Err(fault(
            "System configuration error: Cannot load kernel due to invalid memory configuration or \
             invalid kernel image: Kernel Loader: failed to load ELF kernel image: Kernel Loader: \
             Invalid Elf magic number"
                .to_owned(),
        ));
    }
    Ok(config)
}

/// Whether a file begins like an ELF executable or a bzImage (Linux
/// Documentation/arch/x86/boot.rst, `HdrS`).
fn is_kernel(path: &Path) -> bool {
    let mut start = [0; 0x206];
    let read = std::fs::File::open(path).and_then(|file| file.read_exact_at(&mut start, 0));
    read.is_ok() && (start.starts_with(b"\x7fELF") || start.ends_with(b"HdrS"))
}

/// The words that Firecracker adds to the kernel's. Devices are announced by ACPI here.
fn cmdline(resources: &Resources, args: Option<&str>, pci: Switch) -> String {
    let mut words = args.unwrap_or(DEFAULT_BOOT_ARGS).trim_end().to_owned();
    let mut add = |word: &str| {
        if !words.is_empty() {
            words.push(' ');
        }
        words.push_str(word);
    };
    if !pci.is_on() {
        add("pci=off");
    }
    if let Some(root) = resources.drives.first().filter(|drive| drive.is_root_device) {
        match &root.partuuid {
            Some(partuuid) => add(&format!("root=PARTUUID={partuuid}")),
            None => add("root=/dev/vda"),
        }
        add(if root.is_read_only == Some(true) { "ro" } else { "rw" });
    }
    words
}

/// The balloon as configured. A machine without one gets a balloon that only reports free pages:
/// the reason to run it here.
fn balloon(configured: Option<&BalloonDeviceConfig>) -> config::BalloonDeviceConfig {
    let Some(balloon) = configured else { return config::BalloonDeviceConfig::default() };
    let interval = u64::from(balloon.stats_polling_interval_s);
    config::BalloonDeviceConfig {
        size: ByteSize::from_bytes(u64::from(balloon.amount_mib) * MIB),
        reporting: Switch::from_bool(balloon.free_page_reporting.unwrap_or(true)),
        hinting: Switch::from_bool(balloon.free_page_hinting),
        deflate_on_oom: Switch::from_bool(balloon.deflate_on_oom),
        statistics: Switch::from_bool(interval != 0),
        statistics_interval: (interval != 0).then(|| Duration::from_secs(interval)),
        ..config::BalloonDeviceConfig::default()
    }
}

/// The images in the order in which the guest sees them.
pub(super) fn disks(drives: &[BlockDeviceConfig]) -> Vec<DiskConfig> {
    let disk = |drive: &BlockDeviceConfig| DiskConfig {
        path: drive.path_on_host.clone().unwrap_or_default().into(),
        readonly: Switch::from_bool(drive.is_read_only == Some(true)),
        format: DiskFormat::Raw,
        overlay: None,
        direct: Switch::Off,
        limits: optional(drive.rate_limiter.as_ref()),
    };
    drives.iter().map(disk).collect()
}

/// The network devices.
pub(super) fn nets(resources: &Resources) -> Result<Vec<NetConfig>, Fault> {
    let with_metadata = |network: &NetworkInterfaceConfig| {
        Ok(NetConfig { metadata: resources.metadata_of(network), ..net(network)? })
    };
    resources.networks.iter().map(with_metadata).collect()
}

/// A network device: on a tap interface that exists.
fn net(network: &NetworkInterfaceConfig) -> Result<NetConfig, Fault> {
    let mac = network.guest_mac.as_ref().map(|mac| mac.0.parse()).transpose();
    let mac = mac.map_err(|problem: String| Fault::new(problem).within("Network config error"))?;
    Ok(NetConfig {
        backend: NetBackend::Tap(network.host_dev_name.clone()),
        mac,
        mtu: network.mtu,
        receive_limits: optional(network.rx_rate_limiter.as_ref()),
        transmit_limits: optional(network.tx_rate_limiter.as_ref()),
        metadata: None,
    })
}

fn optional(limiter: Option<&RateLimiterConfig>) -> RateLimits {
    limiter.map(limits).unwrap_or_default()
}

/// The limits that two token buckets are. A burst that passes only once is not served.
pub(super) fn limits(limiter: &RateLimiterConfig) -> RateLimits {
    let rate = |bucket: TokenBucketConfig| {
        if bucket.size == 0 || bucket.refill_time == 0 {
            return None;
        }
        let per_second = u128::from(bucket.size) * 1000 / u128::from(bucket.refill_time);
        let per_second = u64::try_from(per_second).unwrap_or(u64::MAX).clamp(1, MOST_PER_SECOND);
        Some((per_second, bucket.size.min(MOST_PER_SECOND)))
    };
    let (bandwidth, ops) = (limiter.bandwidth.and_then(rate), limiter.ops.and_then(rate));
    RateLimits {
        bandwidth: bandwidth.map(|(rate, _)| rate),
        bandwidth_burst: bandwidth.map(|(_, burst)| burst),
        ops: ops.map(|(rate, _)| rate),
        ops_burst: ops.map(|(_, burst)| burst),
    }
}

/// The change of a device's limits: a bucket that limits nothing removes its limit.
pub(super) fn changed_limits(limiter: &RateLimiterConfig) -> RateLimits {
    let limits = limits(limiter);
    let or_none =
        |bucket: Option<TokenBucketConfig>, limit: Option<u64>| bucket.map(|_| limit.unwrap_or(0));
    RateLimits {
        bandwidth: or_none(limiter.bandwidth, limits.bandwidth),
        bandwidth_burst: or_none(limiter.bandwidth, limits.bandwidth_burst),
        ops: or_none(limiter.ops, limits.ops),
        ops_burst: or_none(limiter.ops, limits.ops_burst),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[expect(clippy::unnecessary_wraps, reason = "documents have optional ones")]
    fn bucket(size: u64, refill_time: u64) -> Option<TokenBucketConfig> {
        Some(TokenBucketConfig { size, one_time_burst: None, refill_time })
    }

    #[test]
    fn buckets_become_rates_with_their_burst() {
        let limiter = RateLimiterConfig { bandwidth: bucket(1000, 100), ops: bucket(5, 10_000) };
        let limits = limits(&limiter);
        assert_eq!((limits.bandwidth, limits.bandwidth_burst), (Some(10_000), Some(1000)));
        assert_eq!((limits.ops, limits.ops_burst), (Some(1), Some(5)));
        let none = RateLimiterConfig { bandwidth: bucket(0, 100), ops: None };
        assert_eq!(super::limits(&none), RateLimits::default());
        assert_eq!(changed_limits(&none).bandwidth, Some(0));
        assert_eq!(changed_limits(&none).ops, None);
        let huge = RateLimiterConfig { bandwidth: bucket(u64::MAX, 1), ops: None };
        assert_eq!(super::limits(&huge).bandwidth, Some(MOST_PER_SECOND));
    }

    #[test]
    fn the_kernel_gets_firecrackers_words() {
        let mut resources = Resources::new(100);
        assert_eq!(cmdline(&resources, Some("quiet "), Switch::On), "quiet");
        assert_eq!(cmdline(&resources, Some(""), Switch::Off), "pci=off");
        let drive = r#"{"drive_id": "a", "is_root_device": true, "path_on_host": "x"}"#;
        resources.drives.push(serde_json::from_str(drive).unwrap());
        assert_eq!(cmdline(&resources, Some("a"), Switch::On), "a root=/dev/vda rw");
        resources.drives[0].is_read_only = Some(true);
        resources.drives[0].partuuid = Some("0e-01".to_owned());
        assert_eq!(cmdline(&resources, Some("a"), Switch::On), "a root=PARTUUID=0e-01 ro");
        assert!(cmdline(&resources, None, Switch::Off).starts_with("reboot=k panic=1 nomodule"));
    }
}

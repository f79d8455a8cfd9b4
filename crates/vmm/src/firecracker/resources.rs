//! What a client has configured: checks of each document, before the start.

use std::fmt::Display;
use std::fs::{File, OpenOptions};
use std::io;
use std::net::Ipv4Addr;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use serde_json::Value;

use super::documents::{
    BalloonDeviceConfig, BlockDeviceConfig, BootSourceConfig, CpuTemplate, CustomCpuTemplate,
    EntropyDeviceConfig, FileEngineType, HugePageConfig, MachineConfig, MachineConfigUpdate,
    MmdsConfig, MmdsVersion, NetworkInterfaceConfig, RateLimiterConfig, SerialConfig,
    TokenBucketConfig, VmmConfig, VsockDeviceConfig,
};
use super::fault::Fault;
use crate::mmds::{DEFAULT_ADDRESS, Form, Metadata, Served, Sessions};

/// Most vCPUs that Firecracker gives a guest.
const MOST_VCPUS: u8 = 32;
/// Longest kernel command line in bytes, with the NUL at its end.
const CMDLINE_BYTES: usize = 2048;
/// Longest name of a network interface, without the NUL at its end (Linux `IFNAMSIZ`).
const INTERFACE_NAME_BYTES: usize = 15;
/// Most drives, and most network interfaces: more than a machine has interrupt lines for.
const MOST_DEVICES: usize = 64;

/// The configuration of a machine in Firecracker's terms.
#[derive(Debug)]
pub(super) struct Resources {
    pub machine: MachineConfig,
    pub boot: Option<BootSourceConfig>,
    /// A root device is the first one.
    pub drives: Vec<BlockDeviceConfig>,
    pub networks: Vec<NetworkInterfaceConfig>,
    pub vsock: Option<VsockDeviceConfig>,
    pub balloon: Option<BalloonDeviceConfig>,
    pub entropy: Option<EntropyDeviceConfig>,
    pub serial: SerialConfig,
    pub cpu: CustomCpuTemplate,
    pub mmds_config: Option<MmdsConfig>,
    pub mmds: Metadata,
    /// Whether anything was configured that a snapshot would bring.
    pub is_configured: bool,
}

impl Resources {
    /// Nothing; the metadata may have `mmds_bytes`.
    pub(super) fn new(mmds_bytes: usize) -> Self {
        Self {
            machine: MachineConfig::default(),
            boot: None,
            drives: Vec::new(),
            networks: Vec::new(),
            vsock: None,
            balloon: None,
            entropy: None,
            serial: SerialConfig::default(),
            cpu: CustomCpuTemplate::default(),
            mmds_config: None,
            mmds: Metadata::new(mmds_bytes),
            is_configured: false,
        }
    }

    /// Takes what a configuration file has, except its log and metrics.
    pub(super) fn configure(&mut self, config: VmmConfig) -> Result<(), Fault> {
        if !config.pmem.is_empty() || config.memory_hotplug.is_some() {
            return Err(Fault::not_served("pmem and memory hotplug"));
        }
        if let Some(machine) = config.machine_config {
            self.update_machine(&machine.into())?;
        }
        if let Some(cpu) = config.cpu_config {
            self.cpu = serde_json::from_value(cpu).map_err(|error| Fault::json(&error))?;
        }
        self.set_boot(config.boot_source)?;
        config.drives.into_iter().try_for_each(|drive| self.set_drive(drive))?;
        config.network_interfaces.into_iter().try_for_each(|net| self.set_network(net))?;
        config.vsock.into_iter().try_for_each(|vsock| self.set_vsock(vsock))?;
        config.balloon.into_iter().try_for_each(|balloon| self.set_balloon(balloon))?;
        config.mmds_config.into_iter().try_for_each(|mmds| self.set_mmds_config(mmds))?;
        if let Some(entropy) = config.entropy {
            self.set_entropy(entropy);
        }
        Ok(())
    }

    /// `GET /vm/config`.
    pub(super) fn full_config(&self) -> VmmConfig {
        VmmConfig {
            balloon: self.balloon.clone(),
            drives: self.drives.clone(),
            boot_source: self.boot.clone().unwrap_or_default(),
            machine_config: Some(self.machine.clone()),
            mmds_config: self.mmds_config.clone(),
            network_interfaces: self.networks.clone(),
            vsock: self.vsock.clone(),
            entropy: self.entropy.clone(),
            ..VmmConfig::default()
        }
    }

    /// Takes the documents of a snapshot, which were checked when they were set.
    pub(super) fn restore(&mut self, config: VmmConfig) {
        self.balloon = config.balloon;
        self.drives = config.drives;
        self.drives.truncate(MOST_DEVICES);
        self.boot = Some(config.boot_source);
        self.machine = config.machine_config.unwrap_or_default();
        self.use_mmds_config(config.mmds_config);
        self.networks = config.network_interfaces;
        self.vsock = config.vsock;
        self.entropy = config.entropy;
    }

    pub(super) fn update_machine(&mut self, update: &MachineConfigUpdate) -> Result<(), Fault> {
        self.is_configured = true;
        let fault = |message: &'static str| Err(Fault::new(message).within("Machine config error"));
        let old = &self.machine;
        let machine = MachineConfig {
            vcpu_count: update.vcpu_count.unwrap_or(old.vcpu_count),
            mem_size_mib: update.mem_size_mib.unwrap_or(old.mem_size_mib),
            smt: update.smt.unwrap_or(old.smt),
            cpu_template: update
                .cpu_template
                .or(old.cpu_template)
                .filter(|template| *template != CpuTemplate::None),
            track_dirty_pages: update.track_dirty_pages.unwrap_or(old.track_dirty_pages),
            huge_pages: update.huge_pages.unwrap_or(old.huge_pages),
        };
        let cpus = machine.vcpu_count;
        if cpus == 0 || cpus > MOST_VCPUS || (machine.smt && cpus > 1 && cpus % 2 == 1) {
            return fault(
                "The number of vCPUs must be greater than 0, less than 32 and must be 1 or an \
                 even number if SMT is enabled.",
            );
        }
        let page_mib = match machine.huge_pages {
            HugePageConfig::None => 1,
            HugePageConfig::Hugetlbfs2M => 2,
        };
        if machine.mem_size_mib == 0 || !machine.mem_size_mib.is_multiple_of(page_mib) {
            return fault(
                "The memory size (MiB) is either 0, or not a multiple of the configured page size.",
            );
        }
        let balloon_mib = self.balloon.as_ref().map_or(0, |balloon| balloon.amount_mib as usize);
        if machine.mem_size_mib < balloon_mib {
            return fault(
                "The memory size (MiB) is smaller than the previously set balloon device target \
                 size.",
            );
        }
        self.machine = machine;
        Ok(())
    }

    pub(super) fn set_boot(&mut self, boot: BootSourceConfig) -> Result<(), Fault> {
        self.is_configured = true;
        let fault = |message: String| Fault::new(message).within("Boot source error");
        File::open(&boot.kernel_image_path)
            .map_err(|error| fault(format!("The kernel file cannot be opened: {error}")))?;
        if let Some(initrd) = &boot.initrd_path {
            File::open(initrd).map_err(|error| {
                fault(format!(
                    "The initrd file cannot be opened due to invalid path or invalid permissions. \
                     {error}"
                ))
            })?;
        }
        if boot.boot_args.as_ref().is_some_and(|args| args.len() >= CMDLINE_BYTES) {
            return Err(fault(
                "The kernel command line is invalid: Invalid cmdline capacity provided.".to_owned(),
            ));
        }
        self.boot = Some(boot);
        Ok(())
    }

    pub(super) fn set_drive(&mut self, mut drive: BlockDeviceConfig) -> Result<(), Fault> {
        self.is_configured = true;
        let fault = |message: String| Fault::new(message).within("Drive config error");
        let position = self.drives.iter().position(|known| known.drive_id == drive.drive_id);
        let has_root = self.drives.first().is_some_and(|first| first.is_root_device);
        if drive.is_root_device && has_root && position != Some(0) {
            return Err(fault("A root block device already exists!".to_owned()));
        }
        let create =
            |problem: String| fault(format!("Unable to create the virtio block device: {problem}"));
        let path = match (&drive.path_on_host, &drive.socket) {
            (Some(path), None) => path,
            (None, Some(_)) => {
                return Err(create("Ebb has no vhost-user backends".to_owned()));
            }
            _ => return Err(create("Invalid block config.".to_owned())),
        };
        let is_read_only = *drive.is_read_only.get_or_insert(false);
        if let Err(error) = open_image(path, is_read_only) {
            return Err(create(backing_file(&error, path)));
        }
        if position.is_none() && self.drives.len() == MOST_DEVICES {
            return Err(create("too many drives".to_owned()));
        }
        drive.io_engine.get_or_insert(FileEngineType::Sync);
        drive.rate_limiter = drive.rate_limiter.and_then(in_use);
        let is_root = drive.is_root_device;
        match position {
            Some(index) => {
                self.drives[index] = drive;
                if is_root {
                    self.drives.swap(0, index);
                }
            }
            None if is_root => self.drives.insert(0, drive),
            None => self.drives.push(drive),
        }
        Ok(())
    }

    pub(super) fn set_network(&mut self, mut network: NetworkInterfaceConfig) -> Result<(), Fault> {
        self.is_configured = true;
        let fault = |message: String| Fault::new(message).within("Network config error");
        let is_same = |known: &NetworkInterfaceConfig| known.iface_id == network.iface_id;
        let others = self.networks.iter().filter(|known| !is_same(known));
        if let Some(mac) = &network.guest_mac
            && others.clone().any(|known| known.guest_mac.as_ref() == Some(mac))
        {
            return Err(fault(format!("The MAC address is already in use: {}", mac.0)));
        }
        if network.host_dev_name.len() > INTERFACE_NAME_BYTES || others.count() >= MOST_DEVICES {
            return Err(fault(
                "Could not create the network device: Open tap device failed: Invalid interface \
                 name"
                    .to_owned(),
            ));
        }
        network.rx_rate_limiter = network.rx_rate_limiter.and_then(in_use);
        network.tx_rate_limiter = network.tx_rate_limiter.and_then(in_use);
        if let Some(index) = self.networks.iter().position(is_same) {
            self.networks.swap_remove(index);
        }
        self.networks.push(network);
        Ok(())
    }

    pub(super) fn set_vsock(&mut self, mut vsock: VsockDeviceConfig) -> Result<(), Fault> {
        self.is_configured = true;
        let cannot = |error: io::Error| {
            Fault::new(format!(
                "Vsock config error: Cannot create backend for vsock device: Error binding to the \
                 host-side Unix socket: {error}"
            ))
        };
        let path = Path::new(&vsock.uds_path);
        // The socket is bound when the machine starts.
        if path.symlink_metadata().is_ok() {
            return Err(cannot(io::Error::from_raw_os_error(libc::EADDRINUSE)));
        }
        let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        directory.unwrap_or(Path::new(".")).metadata().map_err(cannot)?;
        vsock.vsock_id = None;
        self.vsock = Some(vsock);
        Ok(())
    }

    pub(super) fn set_balloon(&mut self, balloon: BalloonDeviceConfig) -> Result<(), Fault> {
        self.is_configured = true;
        if balloon.amount_mib as usize > self.machine.mem_size_mib {
            return Err(Fault::new(
                "Balloon config error: Amount of pages requested is too large.",
            ));
        }
        self.balloon = Some(balloon);
        Ok(())
    }

    pub(super) fn set_entropy(&mut self, mut entropy: EntropyDeviceConfig) {
        self.is_configured = true;
        entropy.rate_limiter = entropy.rate_limiter.and_then(in_use);
        self.entropy = Some(entropy);
    }

    pub(super) fn set_mmds_config(&mut self, mut config: MmdsConfig) -> Result<(), Fault> {
        self.is_configured = true;
        // The prefix is Firecracker's.
        let fault = |message: &'static str| Err(Fault::new(message).within("MMMDS config error"));
        if config.ipv4_address.is_some_and(|address| !is_link_local(address)) {
            return fault("The MMDS IPv4 address is not link local.");
        }
        if config.network_interfaces.is_empty() {
            return fault(
                "The list of network interface IDs that allow forwarding MMDS requests is empty.",
            );
        }
        let is_known = |id: &String| self.networks.iter().any(|known| known.iface_id == *id);
        if !config.network_interfaces.iter().all(is_known) {
            return fault(
                "The list of network interface IDs provided contains at least one ID that does \
                 not correspond to any existing network interface.",
            );
        }
        config.ipv4_address.get_or_insert(DEFAULT_ADDRESS);
        self.use_mmds_config(Some(config));
        Ok(())
    }

    /// Serves the metadata as a document says that was checked.
    fn use_mmds_config(&mut self, config: Option<MmdsConfig>) {
        if let Some(config) = &config {
            let mut service = self.mmds.lock();
            service.sessions = match config.version {
                MmdsVersion::V1 => Sessions::Optional,
                MmdsVersion::V2 => Sessions::Required,
            };
            service.form = if config.imds_compat { Form::Text } else { Form::Accepted };
        }
        self.mmds_config = config;
    }

    /// The metadata as a network interface reaches them.
    pub(super) fn metadata_of(&self, network: &NetworkInterfaceConfig) -> Option<Served> {
        let config = self.mmds_config.as_ref()?;
        config.network_interfaces.contains(&network.iface_id).then(|| Served {
            service: self.mmds.clone(),
            address: config.ipv4_address.unwrap_or(DEFAULT_ADDRESS),
        })
    }

    /// Takes the content of `--metadata`.
    pub(super) fn set_metadata(&mut self, text: &str) -> Result<(), Fault> {
        let value: Value = serde_json::from_str(text).map_err(|error| Fault::json(&error))?;
        self.mmds.lock().store.put(value).map_err(Fault::of_store)
    }
}

/// Opens an image as the device will, without waiting for the other end of a pipe.
fn open_image(path: &str, is_read_only: bool) -> io::Result<File> {
    OpenOptions::new().read(true).write(!is_read_only).custom_flags(libc::O_NONBLOCK).open(path)
}

/// Firecracker's message about an image.
pub(super) fn backing_file(error: &dyn Display, path: &str) -> String {
    format!("Virtio backend error: Error manipulating the backing file: {error} {path}")
}

/// The buckets that limit something: a size or a time of zero is no limit.
pub(super) fn in_use(limiter: RateLimiterConfig) -> Option<RateLimiterConfig> {
    let limits = |bucket: &TokenBucketConfig| bucket.size != 0 && bucket.refill_time != 0;
    let shown = |bucket: TokenBucketConfig| TokenBucketConfig {
        one_time_burst: bucket.one_time_burst.filter(|burst| *burst != 0),
        ..bucket
    };
    let bandwidth = limiter.bandwidth.filter(limits).map(shown);
    let ops = limiter.ops.filter(limits).map(shown);
    (bandwidth.is_some() || ops.is_some()).then_some(RateLimiterConfig { bandwidth, ops })
}

/// RFC 3927 section 2.1: the first and the last 256 addresses are reserved.
fn is_link_local(address: Ipv4Addr) -> bool {
    matches!(address.octets(), [169, 254, third, _] if third != 0 && third != 255)
}

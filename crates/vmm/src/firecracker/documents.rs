//! Documents of Firecracker's API, as its published description (swagger) has them.
//!
//! Names and order of the fields, and names of the types, are part of its messages about invalid
//! JSON, which serde writes.

use std::net::Ipv4Addr;
use std::path::PathBuf;

use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

use super::fault::Fault;

/// Parses a body.
pub(super) fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, Fault> {
    serde_json::from_slice(body).map_err(|error| Fault::json(&error))
}

/// `PUT /actions`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ActionBody {
    pub action_type: ActionType,
}

#[derive(Debug, Deserialize)]
pub(super) enum ActionType {
    FlushMetrics,
    InstanceStart,
    SendCtrlAltDel,
}

/// `PUT /boot-source`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct BootSourceConfig {
    pub kernel_image_path: String,
    pub initrd_path: Option<String>,
    pub boot_args: Option<String>,
}

/// `PUT /machine-config`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct MachineConfig {
    pub vcpu_count: u8,
    pub mem_size_mib: usize,
    #[serde(default)]
    pub smt: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_template: Option<CpuTemplate>,
    #[serde(default)]
    pub track_dirty_pages: bool,
    #[serde(default)]
    pub huge_pages: HugePageConfig,
}

impl Default for MachineConfig {
    fn default() -> Self {
        Self {
            vcpu_count: 1,
            mem_size_mib: 128,
            smt: false,
            cpu_template: None,
            track_dirty_pages: false,
            huge_pages: HugePageConfig::None,
        }
    }
}

/// `PATCH /machine-config`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct MachineConfigUpdate {
    pub vcpu_count: Option<u8>,
    pub mem_size_mib: Option<usize>,
    pub smt: Option<bool>,
    pub cpu_template: Option<CpuTemplate>,
    pub track_dirty_pages: Option<bool>,
    pub huge_pages: Option<HugePageConfig>,
}

impl From<MachineConfig> for MachineConfigUpdate {
    fn from(config: MachineConfig) -> Self {
        Self {
            vcpu_count: Some(config.vcpu_count),
            mem_size_mib: Some(config.mem_size_mib),
            smt: Some(config.smt),
            cpu_template: config.cpu_template,
            track_dirty_pages: Some(config.track_dirty_pages),
            huge_pages: Some(config.huge_pages),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum CpuTemplate {
    C3,
    T2,
    T2S,
    None,
    T2CL,
    T2A,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum HugePageConfig {
    #[default]
    None,
    #[serde(rename = "2M")]
    Hugetlbfs2M,
}

/// A token bucket; times in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct TokenBucketConfig {
    pub size: u64,
    pub one_time_burst: Option<u64>,
    pub refill_time: u64,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RateLimiterConfig {
    pub bandwidth: Option<TokenBucketConfig>,
    pub ops: Option<TokenBucketConfig>,
}

/// `PUT /drives/{id}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct BlockDeviceConfig {
    pub drive_id: String,
    pub partuuid: Option<String>,
    pub is_root_device: bool,
    #[serde(default)]
    pub cache_type: CacheType,
    pub is_read_only: Option<bool>,
    pub path_on_host: Option<String>,
    pub rate_limiter: Option<RateLimiterConfig>,
    pub io_engine: Option<FileEngineType>,
    pub socket: Option<String>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum CacheType {
    #[default]
    Unsafe,
    Writeback,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum FileEngineType {
    Async,
    #[default]
    Sync,
}

/// `PATCH /drives/{id}`.
#[derive(Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct BlockDeviceUpdateConfig {
    pub drive_id: String,
    pub path_on_host: Option<String>,
    pub rate_limiter: Option<RateLimiterConfig>,
}

/// `PUT /network-interfaces/{id}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NetworkInterfaceConfig {
    pub iface_id: String,
    pub host_dev_name: String,
    pub guest_mac: Option<MacAddress>,
    pub mtu: Option<u16>,
    pub rx_rate_limiter: Option<RateLimiterConfig>,
    pub tx_rate_limiter: Option<RateLimiterConfig>,
}

/// Six octets in hexadecimal digits, separated by colons.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct MacAddress(pub String);

impl<'de> Deserialize<'de> for MacAddress {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let octets: Vec<_> = text.split(':').collect();
        let is_octet = |octet: &&str| octet.len() == 2 && u8::from_str_radix(octet, 16).is_ok();
        if octets.len() == 6 && octets.iter().all(is_octet) {
            return Ok(Self(text.to_ascii_lowercase()));
        }
        Err(D::Error::custom("The provided MAC address is invalid."))
    }
}

/// `PATCH /network-interfaces/{id}`.
#[derive(Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NetworkInterfaceUpdateConfig {
    pub iface_id: String,
    pub rx_rate_limiter: Option<RateLimiterConfig>,
    pub tx_rate_limiter: Option<RateLimiterConfig>,
}

/// `PUT /vsock`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct VsockDeviceConfig {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vsock_id: Option<String>,
    pub guest_cid: u32,
    pub uds_path: String,
}

/// `PUT /balloon`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct BalloonDeviceConfig {
    pub amount_mib: u32,
    pub deflate_on_oom: bool,
    #[serde(default)]
    pub stats_polling_interval_s: u16,
    #[serde(default)]
    pub free_page_hinting: bool,
    /// A client that does not name it gets reporting, and reads what Firecracker would show.
    #[serde(default, serialize_with = "false_if_absent")]
    pub free_page_reporting: Option<bool>,
}

#[expect(clippy::ref_option, clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn false_if_absent<S: Serializer>(value: &Option<bool>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_bool(value.unwrap_or(false))
}

/// `PATCH /balloon`.
#[derive(Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct BalloonUpdateConfig {
    pub amount_mib: u32,
}

/// `PATCH /balloon/statistics`.
#[derive(Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct BalloonUpdateStatsConfig {
    pub stats_polling_interval_s: u16,
}

/// `PATCH /balloon/hinting/start`.
#[derive(Debug, PartialEq, Eq, Deserialize)]
pub(super) struct StartHintingCmd {
    #[serde(default = "yes")]
    pub acknowledge_on_stop: bool,
}

impl Default for StartHintingCmd {
    fn default() -> Self {
        Self { acknowledge_on_stop: yes() }
    }
}

fn yes() -> bool {
    true
}

/// `PUT /entropy`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct EntropyDeviceConfig {
    pub rate_limiter: Option<RateLimiterConfig>,
}

/// `PUT /serial`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SerialConfig {
    pub serial_out_path: Option<PathBuf>,
    pub rate_limiter: Option<TokenBucketConfig>,
}

/// `PUT /logger`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LoggerConfig {
    pub log_path: Option<PathBuf>,
    pub level: Option<LogLevel>,
    pub show_level: Option<bool>,
    pub show_log_origin: Option<bool>,
    pub module: Option<String>,
}

/// The level of the log, in any case of letters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LogLevel(pub &'static str);

impl<'de> Deserialize<'de> for LogLevel {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let word = String::deserialize(deserializer)?.to_lowercase();
        match super::log_level(&word) {
            Some(level) => Ok(Self(level)),
            None => Err(D::Error::custom("Invalid LevelFilter")),
        }
    }
}

/// `PUT /metrics`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(super) struct MetricsConfig {
    pub metrics_path: PathBuf,
}

/// `PUT /mmds/config`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct MmdsConfig {
    #[serde(default)]
    pub version: MmdsVersion,
    pub network_interfaces: Vec<String>,
    pub ipv4_address: Option<Ipv4Addr>,
    #[serde(default)]
    pub imds_compat: bool,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum MmdsVersion {
    #[default]
    V1,
    V2,
}

/// `PUT /cpu-config`: only an empty one changes nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct CustomCpuTemplate {
    #[serde(default)]
    pub kvm_capabilities: Vec<Value>,
    #[serde(default)]
    pub cpuid_modifiers: Vec<Value>,
    #[serde(default)]
    pub msr_modifiers: Vec<Value>,
}

/// `PATCH /vm`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Vm {
    pub state: VmState,
}

#[derive(Debug, Deserialize)]
pub(super) enum VmState {
    Paused,
    Resumed,
}

/// `PUT /snapshot/create`.
#[derive(Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct CreateSnapshotParams {
    #[serde(default)]
    pub snapshot_type: SnapshotType,
    pub snapshot_path: PathBuf,
    pub mem_file_path: PathBuf,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
pub(super) enum SnapshotType {
    Diff,
    #[default]
    Full,
}

/// `PUT /snapshot/load`.
#[derive(Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LoadSnapshotConfig {
    pub snapshot_path: PathBuf,
    pub mem_file_path: Option<PathBuf>,
    pub mem_backend: Option<MemBackendConfig>,
    #[serde(default)]
    pub enable_diff_snapshots: bool,
    #[serde(default)]
    pub track_dirty_pages: bool,
    #[serde(default)]
    pub resume_vm: bool,
    #[serde(default)]
    pub network_overrides: Vec<NetworkOverride>,
    pub vsock_override: Option<VsockOverride>,
    #[serde(default)]
    pub clock_realtime: bool,
}

#[derive(Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct MemBackendConfig {
    pub backend_path: PathBuf,
    pub backend_type: MemBackendType,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub(super) enum MemBackendType {
    File,
    Uffd,
}

#[derive(Debug, PartialEq, Eq, Deserialize)]
pub(super) struct NetworkOverride {
    pub iface_id: String,
    pub host_dev_name: String,
}

#[derive(Debug, PartialEq, Eq, Deserialize)]
pub(super) struct VsockOverride {
    pub uds_path: String,
}

/// `PUT /pmem/{id}`, which is not served.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "only their types are checked")]
pub(super) struct PmemConfig {
    pub id: String,
    path_on_host: String,
    #[serde(default)]
    root_device: bool,
    #[serde(default)]
    read_only: bool,
    rate_limiter: Option<RateLimiterConfig>,
}

/// `PATCH /pmem/{id}`, which is not served.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "only their types are checked")]
pub(super) struct PmemDeviceUpdateConfig {
    pub id: String,
    rate_limiter: Option<RateLimiterConfig>,
}

/// `PUT /hotplug/memory`, which is not served.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "only their types are checked")]
#[expect(clippy::struct_field_names, reason = "Firecracker's names")]
pub(super) struct MemoryHotplugConfig {
    total_size_mib: usize,
    #[serde(default)]
    block_size_mib: usize,
    #[serde(default)]
    slot_size_mib: usize,
}

/// `PATCH /hotplug/memory`, which is not served.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "only its type is checked")]
pub(super) struct MemoryHotplugSizeUpdate {
    requested_size_mib: usize,
}

/// `GET /vm/config`, and what `--config-file` has.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct VmmConfig {
    pub balloon: Option<BalloonDeviceConfig>,
    pub drives: Vec<BlockDeviceConfig>,
    pub boot_source: BootSourceConfig,
    pub cpu_config: Option<Value>,
    #[serde(serialize_with = "null")]
    pub logger: Option<LoggerConfig>,
    pub machine_config: Option<MachineConfig>,
    #[serde(serialize_with = "null")]
    pub metrics: Option<MetricsConfig>,
    pub mmds_config: Option<MmdsConfig>,
    #[serde(default)]
    pub network_interfaces: Vec<NetworkInterfaceConfig>,
    pub vsock: Option<VsockDeviceConfig>,
    pub entropy: Option<EntropyDeviceConfig>,
    #[serde(default)]
    pub pmem: Vec<Value>,
    pub memory_hotplug: Option<Value>,
}

/// Firecracker reports neither its log nor its metrics.
#[expect(clippy::ref_option, reason = "serde passes references")]
fn null<T, S: Serializer>(_: &Option<T>, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_none()
}

//! Parses `key=value,key=value` options in the style of Cloud Hypervisor.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use ebb_guest_ram::{Backing, HugePages, Populate};
use serde::de::DeserializeOwned;

use super::{
    BalloonDeviceConfig, ConfigError, DiskConfig, DiskFormat, MemoryConfig, MergeConfig,
    MergeOverrides, NumaNodeConfig, RateLimits, SerialConfig, Switch,
};
use crate::isolation::CgroupConfig;
use crate::size::ByteSize;
use crate::words::{from_word, words};

/// The pairs of one option. Every key must be taken exactly once; a remaining key is an error.
pub(super) struct Pairs<'a> {
    option: &'static str,
    valid: &'static str,
    entries: Vec<(&'a str, &'a str)>,
}

impl<'a> Pairs<'a> {
    pub(super) fn parse(
        option: &'static str,
        valid: &'static str,
        text: &'a str,
    ) -> Result<Self, ConfigError> {
        let mut entries: Vec<(&str, &str)> = Vec::new();
        for part in text.split(',').filter(|part| !part.is_empty()) {
            let Some((key, value)) = part.split_once('=') else {
                return Err(ConfigError::new(
                    option,
                    format!("`{part}` is not of the form key=value"),
                    format!("use {valid}"),
                ));
            };
            if entries.iter().any(|(known, _)| *known == key) {
                return Err(ConfigError::new(
                    option,
                    format!("`{key}` is given twice"),
                    "give it once",
                ));
            }
            entries.push((key, value));
        }
        Ok(Self { option, valid, entries })
    }

    pub(super) fn take(&mut self, key: &str) -> Option<&'a str> {
        let index = self.entries.iter().position(|(known, _)| *known == key)?;
        Some(self.entries.swap_remove(index).1)
    }

    pub(super) fn error(&self, key: &str, value: &str, expected: &str) -> ConfigError {
        ConfigError::new(
            self.option,
            format!("`{key}={value}` is invalid"),
            format!("give {expected}"),
        )
    }

    pub(super) fn take_parsed<T: FromStr>(
        &mut self,
        key: &str,
        expected: &str,
    ) -> Result<Option<T>, ConfigError> {
        match self.take(key) {
            None => Ok(None),
            Some(value) => value.parse().map(Some).map_err(|_| self.error(key, value, expected)),
        }
    }

    pub(super) fn take_size(&mut self, key: &str) -> Result<Option<ByteSize>, ConfigError> {
        self.take_parsed(key, "a number of bytes, with K, M, G or T for powers of 1024")
    }

    fn take_required_size(&mut self, key: &str) -> Result<ByteSize, ConfigError> {
        self.take_size(key)?.ok_or_else(|| {
            ConfigError::new(
                self.option,
                format!("`{key}` is missing"),
                format!("use {}", self.valid),
            )
        })
    }

    pub(super) fn take_word<T: DeserializeOwned>(
        &mut self,
        key: &str,
    ) -> Result<Option<T>, ConfigError> {
        let Some(value) = self.take(key) else { return Ok(None) };
        let names = words::<T>().join(", ");
        from_word(value).map(Some).ok_or_else(|| self.error(key, value, &format!("one of {names}")))
    }

    fn take_switch(&mut self, key: &str, default: Switch) -> Result<Switch, ConfigError> {
        Ok(self.take_word(key)?.unwrap_or(default))
    }

    /// `value`, if it is at most `most`.
    pub(super) fn within(&self, key: &str, value: u64, most: u64) -> Result<u64, ConfigError> {
        if value <= most {
            return Ok(value);
        }
        Err(self.error(key, &value.to_string(), &format!("at most {most}")))
    }

    /// The error for a burst without its limit.
    pub(super) fn without_limit(&self, key: &str) -> ConfigError {
        ConfigError::new(
            self.option,
            format!("`{key}` has no limit to belong to"),
            format!("give {} as well", key.trim_end_matches("_burst")),
        )
    }

    pub(super) fn finish(self) -> Result<(), ConfigError> {
        match self.entries.first() {
            None => Ok(()),
            Some((key, _)) => Err(ConfigError::new(
                self.option,
                format!("`{key}` is unknown"),
                format!("use {}", self.valid),
            )),
        }
    }
}

/// Form of `--memory`.
pub const MEMORY_FORM: &str = "size=4G[,backing=anon|memfd|hugetlb][,thp=on|off][,prealloc=on|off]\
    [,merge=off|owner|kernel][,merge_domain=NAME][,merge_broker=PATH][,merge_across_nodes=on|off]";
/// Form of `--numa`.
pub const NUMA_FORM: &str = "size=2G,cpus=0-1:4[,host_node=0][,distances=10:20]";
/// Form of `--balloon`.
pub const BALLOON_FORM: &str = "off, or [size=0][,reporting=on|off][,hinting=on|off]\
    [,deflate_on_oom=on|off][,poison=on|off][,statistics=on|off|SECONDS][,page_bitmap=on|off]\
    [,page_ranges=on|off][,host_requests=on|off][,init_reported=on|off]\
    [,init_on_inflate=on|off][,verify_reports=on|off]";
/// Form of `--disk`.
pub const DISK_FORM: &str = "path=FILE[,readonly=on|off][,format=raw|qcow2][,overlay=FILE]\
    [,direct=on|off][,bandwidth=SIZE][,bandwidth_burst=SIZE][,ops=N][,ops_burst=N]";
/// Form of `--serial`.
pub const SERIAL_FORM: &str =
    "tty, stdio, null or file=PATH[,max=SIZE][,bandwidth=SIZE][,bandwidth_burst=SIZE]";
/// Form of `--cgroup`.
pub const CGROUP_FORM: &str =
    "path=PATH[,memory_high=SIZE][,memory_max=SIZE][,cpu_weight=1..10000][,pids_max=N]";
/// Default size of each of the two files of a console.
const SERIAL_FILE_BYTES: u64 = 16 << 20;
/// Smallest one.
const LEAST_SERIAL_FILE_BYTES: u64 = 4 << 10;

impl FromStr for MemoryConfig {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        // Users type a bare size first.
        let is_size = |first: &str| first.parse::<ByteSize>().is_ok();
        let named = text.split(',').next().is_some_and(is_size).then(|| format!("size={text}"));
        let text = named.as_deref().unwrap_or(text);
        let mut pairs = Pairs::parse("--memory", MEMORY_FORM, text)?;
        let config = Self {
            size: pairs.take_required_size("size")?,
            backing: pairs.take_word("backing")?.unwrap_or(Backing::Anonymous),
            huge_pages: match pairs.take_switch("thp", Switch::On)? {
                Switch::On => HugePages::On,
                Switch::Off => HugePages::Off,
            },
            populate: match pairs.take_switch("prealloc", Switch::Off)? {
                Switch::On => Populate::Prealloc,
                Switch::Off => Populate::Lazy,
            },
            merge: MergeOverrides::take(&mut pairs)?.apply(MergeConfig::default())?,
        };
        pairs.finish()?;
        Ok(config)
    }
}

impl FromStr for NumaNodeConfig {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let mut pairs = Pairs::parse("--numa", NUMA_FORM, text)?;
        let size = pairs.take_required_size("size")?;
        let cpus = match pairs.take("cpus") {
            None => Vec::new(),
            Some(list) => parse_cpu_list(list).ok_or_else(|| {
                pairs.error("cpus", list, "vCPU numbers and ranges with `:` between, 0-1:4")
            })?,
        };
        let host_node = pairs.take_parsed("host_node", "the number of a host NUMA node")?;
        let distances = match pairs.take("distances") {
            None => None,
            Some(list) => {
                let parsed: Result<Vec<u8>, _> = list.split(':').map(str::parse).collect();
                Some(parsed.map_err(|_| {
                    pairs.error(
                        "distances",
                        list,
                        "a distance for each node with `:` between, 10:20",
                    )
                })?)
            }
        };
        pairs.finish()?;
        Ok(Self { size, cpus, host_node, distances })
    }
}

/// Parses `0-1:4` to `[0, 1, 4]`; `None` if the text is not such a list.
fn parse_cpu_list(text: &str) -> Option<Vec<u8>> {
    let mut cpus = Vec::new();
    for part in text.split(':') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.parse::<u8>().ok()?, last.parse::<u8>().ok()?);
        if first > last {
            return None;
        }
        cpus.extend(first..=last);
    }
    Some(cpus)
}

/// Parses the text of `--balloon`; `off` omits the device.
pub fn parse_balloon(text: &str) -> Result<Option<BalloonDeviceConfig>, ConfigError> {
    if text == "off" {
        return Ok(None);
    }
    let mut pairs = Pairs::parse("--balloon", BALLOON_FORM, text)?;
    let default = BalloonDeviceConfig::default();
    let (statistics, statistics_interval) = match pairs.take("statistics") {
        None | Some("on") => (Switch::On, None),
        Some("off") => (Switch::Off, None),
        Some(seconds) => {
            let interval = seconds.strip_suffix('s').unwrap_or(seconds).parse::<u32>();
            match interval {
                Ok(seconds) if seconds > 0 => {
                    (Switch::On, Some(Duration::from_secs(u64::from(seconds))))
                }
                _ => {
                    return Err(pairs.error(
                        "statistics",
                        seconds,
                        "on, off or a number of seconds",
                    ));
                }
            }
        }
    };
    let config = BalloonDeviceConfig {
        size: pairs.take_size("size")?.unwrap_or(default.size),
        reporting: pairs.take_switch("reporting", default.reporting)?,
        hinting: pairs.take_switch("hinting", default.hinting)?,
        deflate_on_oom: pairs.take_switch("deflate_on_oom", default.deflate_on_oom)?,
        poison: pairs.take_switch("poison", default.poison)?,
        statistics,
        page_bitmap: pairs.take_switch("page_bitmap", default.page_bitmap)?,
        page_ranges: pairs.take_switch("page_ranges", default.page_ranges)?,
        host_requests: pairs.take_switch("host_requests", default.host_requests)?,
        init_reported: pairs.take_switch("init_reported", default.init_reported)?,
        init_on_inflate: pairs.take_switch("init_on_inflate", default.init_on_inflate)?,
        verify_reports: pairs.take_switch("verify_reports", default.verify_reports)?,
        statistics_interval,
    };
    pairs.finish()?;
    Ok(Some(config))
}

impl FromStr for DiskConfig {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let mut pairs = Pairs::parse("--disk", DISK_FORM, text)?;
        let path = pairs.take("path").map(PathBuf::from).ok_or_else(|| {
            ConfigError::new("--disk", "`path` is missing", format!("use {DISK_FORM}"))
        })?;
        let readonly = pairs.take_switch("readonly", Switch::Off)?;
        let format: DiskFormat = pairs.take_word("format")?.unwrap_or_default();
        let overlay = pairs.take("overlay").map(PathBuf::from);
        let direct = pairs.take_switch("direct", Switch::Off)?;
        let limits = RateLimits::take(&mut pairs)?;
        pairs.finish()?;
        if direct.is_on() && (format != DiskFormat::Raw || overlay.is_some()) {
            return Err(ConfigError::new(
                "--disk",
                "`direct=on` is for raw images",
                "leave it out for the format qcow2 and for overlays",
            ));
        }
        Ok(Self { path, readonly, format, overlay, direct, limits })
    }
}

impl FromStr for CgroupConfig {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let mut pairs = Pairs::parse("--cgroup", CGROUP_FORM, text)?;
        let path = pairs.take("path").map(PathBuf::from).ok_or_else(|| {
            ConfigError::new("--cgroup", "`path` is missing", format!("use {CGROUP_FORM}"))
        })?;
        let config = Self {
            path,
            memory_high: pairs.take_size("memory_high")?,
            memory_max: pairs.take_size("memory_max")?,
            cpu_weight: pairs.take_parsed("cpu_weight", "a number from 1 to 10000")?,
            pids_max: pairs.take_parsed("pids_max", "a number of threads")?,
        };
        pairs.finish()?;
        Ok(config)
    }
}

impl FromStr for SerialConfig {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        match text {
            "tty" => Ok(Self::Tty),
            "stdio" => Ok(Self::Stdio),
            "null" => Ok(Self::Null),
            _ if text.starts_with("file=") => serial_file(text),
            _ => Err(ConfigError::new(
                "--serial",
                format!("`{text}` is not a console"),
                format!("use {SERIAL_FORM}"),
            )),
        }
    }
}

fn serial_file(text: &str) -> Result<SerialConfig, ConfigError> {
    let mut pairs = Pairs::parse("--serial", SERIAL_FORM, text)?;
    let path = pairs.take("file").filter(|path| !path.is_empty());
    let path = path.ok_or_else(|| pairs.error("file", "", "the path of a file"))?.into();
    let max = pairs.take_size("max")?.unwrap_or(ByteSize::from_bytes(SERIAL_FILE_BYTES));
    if max.bytes() < LEAST_SERIAL_FILE_BYTES {
        let least = ByteSize::from_bytes(LEAST_SERIAL_FILE_BYTES);
        return Err(pairs.error("max", &max.to_string(), &format!("a size of at least {least}")));
    }
    let limits = RateLimits::take(&mut pairs)?;
    pairs.finish()?;
    Ok(SerialConfig::File { path, max, limits })
}

//! Configuration of a virtual host: memory, processors, NUMA nodes, swap and files.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use crate::error::HostError;
use crate::kernel::HostKernel;

/// Minimum memory with which a host boots with all files in its root file system, in MiB.
pub const MINIMUM_MEMORY_MIB: u64 = 768;
/// Maximum number of processors of a host; QEMU's own limit for q35 is higher, but each is a thread
/// of this machine.
pub const MAXIMUM_CPUS: u32 = 64;

/// One NUMA node of the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeConfig {
    /// Memory of the node in MiB.
    pub memory_mib: u64,
    /// Processors of the node; `None` for a node with memory only.
    pub cpus: Option<RangeInclusive<u32>>,
}

impl NodeConfig {
    /// `nodes` nodes that evenly share `memory_mib` and `cpus` processors; the first ones get the
    /// remainder. Nodes beyond the number of processors have memory only.
    pub fn even(nodes: u32, memory_mib: u64, cpus: u32) -> Vec<Self> {
        let (mut first_cpu, mut list) = (0, Vec::new());
        for node in 0..nodes {
            let share = cpus / nodes + u32::from(node < cpus % nodes);
            let memory_mib = memory_mib / u64::from(nodes)
                + u64::from(u64::from(node) < memory_mib % u64::from(nodes));
            let cpus = (share > 0).then(|| first_cpu..=first_cpu + share - 1);
            list.push(Self { memory_mib, cpus });
            first_cpu += share;
        }
        list
    }
}

impl FromStr for NodeConfig {
    type Err = HostError;

    /// Parses `size=1G,cpus=0-1`; `cpus` is optional.
    fn from_str(text: &str) -> Result<Self, HostError> {
        let bad = |reason: &str| {
            HostError::Configuration(format!("node `{text}`: {reason}; expected size=1G,cpus=0-1"))
        };
        let (mut memory_mib, mut cpus) = (None, None);
        for part in text.split(',') {
            match part.split_once('=') {
                Some(("size", value)) => memory_mib = Some(parse_size_mib(value)?),
                Some(("cpus", value)) => {
                    let (first, last) = value.split_once('-').unwrap_or((value, value));
                    let number = |digits: &str| {
                        digits.parse::<u32>().map_err(|_| bad("cpus is not a range of numbers"))
                    };
                    cpus = Some(number(first)?..=number(last)?);
                }
                _ => return Err(bad(&format!("`{part}` is unknown"))),
            }
        }
        Ok(Self { memory_mib: memory_mib.ok_or_else(|| bad("size is missing"))?, cpus })
    }
}

/// A file of this machine to copy into the host's root file system.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostFile {
    /// Path on this machine.
    pub source: PathBuf,
    /// Absolute path in the host.
    pub target: PathBuf,
    /// Permission bits in the host; `None` keeps those of the source.
    pub mode: Option<u32>,
}

impl FromStr for HostFile {
    type Err = HostError;

    /// Parses `SOURCE:TARGET`.
    fn from_str(text: &str) -> Result<Self, HostError> {
        match text.split_once(':') {
            Some((source, target)) if !source.is_empty() && target.starts_with('/') => {
                Ok(Self { source: source.into(), target: target.into(), mode: None })
            }
            _ => Err(HostError::Configuration(format!(
                "file `{text}`: expected SOURCE:TARGET with an absolute TARGET"
            ))),
        }
    }
}

/// The host's policy for transparent huge pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TransparentHugePages {
    /// For all anonymous memory, Debian's default.
    #[default]
    Always,
    /// Only on request with `madvise(MADV_HUGEPAGE)`.
    Madvise,
    /// Never.
    Never,
}

impl TransparentHugePages {
    /// The value for `/sys/kernel/mm/transparent_hugepage/enabled`.
    pub fn word(self) -> &'static str {
        match self {
            Self::Always => "always",
            Self::Madvise => "madvise",
            Self::Never => "never",
        }
    }
}

/// Configuration of a virtual host.
#[derive(Debug, Clone)]
pub struct HostConfig {
    /// Memory in MiB. Ignored with `nodes`, whose sum counts.
    pub memory_mib: u64,
    /// Number of processors for programs and guests. If it is not 1, the kernel has one more,
    /// number 0, which stays idle; processor 0 of `nodes` is then the kernel's number `cpus`.
    pub cpus: u32,
    /// NUMA nodes; if empty, there is one node with all memory and processors.
    pub nodes: Vec<NodeConfig>,
    /// Swap disk in MiB, 0 for none. The disk is a sparse unnamed file that is freed with the host.
    pub swap_mib: u64,
    /// Number of huge pages of 2 MiB to reserve at boot.
    pub huge_pages: u64,
    /// Policy for transparent huge pages.
    pub transparent_huge_pages: TransparentHugePages,
    /// Image of an ext4 file system that becomes the root, such as
    /// [`debian::Root::HOST`](crate::debian::Root::HOST). The root in memory is then visible as
    /// `/initramfs`. `None` keeps that one.
    pub root: Option<PathBuf>,
    /// Raw images of further disks, after those of swap and root. Whatever the host writes to any
    /// disk is discarded with it.
    pub disks: Vec<PathBuf>,
    /// Files for the root file system in addition to the standard ones.
    pub files: Vec<HostFile>,
    /// Executables for the root file system, with their libraries, at their own paths.
    pub programs: Vec<PathBuf>,
    /// Modules that the host loads in addition to the standard ones: each a name, optionally
    /// followed by a space and its parameters.
    pub modules: Vec<String>,
    /// The same for test guests.
    pub guest_modules: Vec<String>,
    /// Executables for the initramfs of test guests, with their libraries, at their own paths.
    pub guest_programs: Vec<PathBuf>,
    /// Maximum lifetime of the host.
    pub time_limit: Duration,
    /// Time limit for the start.
    pub boot_limit: Duration,
    /// Kernel image for guests; `None` selects `EBB_KERNEL` or the newest cloud kernel in `/boot`.
    pub kernel: Option<PathBuf>,
    /// Kernel of the host itself.
    pub host_kernel: HostKernel,
    /// Static executable that becomes `/init` and calls [`init_main`](crate::inside::init_main)
    /// there; `None` selects the running program.
    pub init: Option<PathBuf>,
    /// The monitor, a static executable that becomes `/bin/ebb`; `None` selects `EBB_MONITOR` or
    /// `ebb` in the running program's directory.
    pub monitor: Option<PathBuf>,
    /// Guest agent for the test guests' initramfs; `None` selects `EBB_AGENT` or `ebb-agent` in the
    /// running program's directory.
    pub agent: Option<PathBuf>,
    /// Number by which the host's clock runs slower than this machine's. To the host all processors
    /// are faster by that number, and its ticks take less of their time; what waits, waits longer.
    pub clock_divisor: u32,
    /// Additional kernel command line arguments.
    pub kernel_arguments: String,
    /// Whether the host and the test guests' initramfs include the real `memhog`.
    pub memhog: Inclusion,
    /// Whether the host includes QEMU with its firmware, as a peer for comparison.
    pub qemu: Inclusion,
}

/// Whether an image includes an optional program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Inclusion {
    /// Not included.
    #[default]
    Excluded,
    /// Included.
    Included,
}

impl Default for HostConfig {
    fn default() -> Self {
        Self {
            memory_mib: 2048,
            cpus: 2,
            nodes: Vec::new(),
            swap_mib: 0,
            huge_pages: 0,
            transparent_huge_pages: TransparentHugePages::default(),
            root: None,
            disks: Vec::new(),
            files: Vec::new(),
            programs: Vec::new(),
            modules: Vec::new(),
            guest_modules: Vec::new(),
            guest_programs: Vec::new(),
            time_limit: Duration::from_secs(600),
            boot_limit: Duration::from_secs(90),
            kernel: None,
            host_kernel: HostKernel::default(),
            init: None,
            monitor: None,
            agent: None,
            clock_divisor: 1,
            kernel_arguments: String::new(),
            memhog: Inclusion::Excluded,
            qemu: Inclusion::Excluded,
        }
    }
}

impl HostConfig {
    /// Memory of the host in MiB: the sum of its nodes, or `memory_mib` without nodes.
    pub fn total_memory_mib(&self) -> u64 {
        if self.nodes.is_empty() {
            self.memory_mib
        } else {
            self.nodes.iter().fold(0, |sum, node| sum.saturating_add(node.memory_mib))
        }
    }

    /// Checks the configuration for consistency.
    pub fn validate(&self) -> Result<(), HostError> {
        let bad = |text: String| Err(HostError::Configuration(text));
        if self.cpus == 0 || self.cpus > MAXIMUM_CPUS {
            return bad(format!(
                "{} processors were requested; 1 to {MAXIMUM_CPUS} are possible",
                self.cpus
            ));
        }
        let total_mib = self.total_memory_mib();
        if total_mib < MINIMUM_MEMORY_MIB {
            return bad(format!(
                "{total_mib} MiB of memory are too little; at least {MINIMUM_MEMORY_MIB} are needed"
            ));
        }
        if let Some(file) = self.files.iter().find(|file| !file.target.is_absolute()) {
            return bad(format!("file target {} is not absolute", file.target.display()));
        }
        self.validate_nodes()
    }

    fn validate_nodes(&self) -> Result<(), HostError> {
        let bad = |text: String| Err(HostError::Configuration(text));
        if self.nodes.is_empty() {
            return Ok(());
        }
        let mut owner = vec![None; self.cpus as usize];
        for (index, node) in self.nodes.iter().enumerate() {
            if node.memory_mib == 0 {
                return bad(format!("node {index} has no memory"));
            }
            for cpu in node.cpus.clone().into_iter().flatten() {
                match owner.get_mut(cpu as usize) {
                    None => {
                        return bad(format!(
                            "node {index} names processor {cpu}, but there are only {}",
                            self.cpus
                        ));
                    }
                    Some(Some(other)) => {
                        return bad(format!(
                            "processor {cpu} is in node {other} and in node {index}"
                        ));
                    }
                    Some(slot) => *slot = Some(index),
                }
            }
        }
        match owner.iter().position(Option::is_none) {
            Some(cpu) => bad(format!("processor {cpu} is in no node")),
            None => Ok(()),
        }
    }
}

/// Parses a size such as `512M`, `4G` or `1T` (powers of 1024; a plain number is bytes) into whole
/// MiB.
pub fn parse_size_mib(text: &str) -> Result<u64, HostError> {
    let bad = |reason: &str| {
        HostError::Configuration(format!(
            "size `{text}`: {reason}; expected a number with K, M, G or T, such as 4G"
        ))
    };
    let (digits, shift) = match text.trim().char_indices().last() {
        Some((at, 'K' | 'k')) => (&text.trim()[..at], 10),
        Some((at, 'M' | 'm')) => (&text.trim()[..at], 20),
        Some((at, 'G' | 'g')) => (&text.trim()[..at], 30),
        Some((at, 'T' | 't')) => (&text.trim()[..at], 40),
        _ => (text.trim(), 0),
    };
    let number: u64 = digits.parse().map_err(|_| bad("not a number"))?;
    let bytes = number.checked_mul(1_u64 << shift).ok_or_else(|| bad("too large"))?;
    if bytes % (1 << 20) != 0 { Err(bad("not a whole number of MiB")) } else { Ok(bytes >> 20) }
}

/// Parses a time such as `90s`, `10m` or `2h`; a plain number is seconds.
pub fn parse_duration(text: &str) -> Result<Duration, HostError> {
    let bad = || {
        HostError::Configuration(format!(
            "time `{text}`: expected a number with s, m or h, such as 10m"
        ))
    };
    let trimmed = text.trim();
    let (digits, unit_s) = match trimmed.char_indices().last() {
        Some((at, 's')) => (&trimmed[..at], 1),
        Some((at, 'm')) => (&trimmed[..at], 60),
        Some((at, 'h')) => (&trimmed[..at], 3600),
        _ => (trimmed, 1),
    };
    let number: u64 = digits.parse().map_err(|_| bad())?;
    match number.checked_mul(unit_s) {
        Some(seconds) if seconds > 0 && seconds <= 30 * 86_400 => Ok(Duration::from_secs(seconds)),
        _ => Err(bad()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_with_and_without_unit() {
        assert_eq!(parse_size_mib("4G").ok(), Some(4096));
        assert_eq!(parse_size_mib("512m").ok(), Some(512));
        assert_eq!(parse_size_mib("1T").ok(), Some(1 << 20));
        assert_eq!(parse_size_mib("2048K").ok(), Some(2));
        assert_eq!(parse_size_mib("1048576").ok(), Some(1));
        for bad in ["", "G", "1.5G", "-1G", "1000K", "99999999999T", "4GB", "4Ä"] {
            assert!(parse_size_mib(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn durations_with_and_without_unit() {
        assert_eq!(parse_duration("90").ok(), Some(Duration::from_secs(90)));
        assert_eq!(parse_duration("10m").ok(), Some(Duration::from_secs(600)));
        assert_eq!(parse_duration("2h").ok(), Some(Duration::from_secs(7200)));
        for bad in ["", "m", "0", "-1s", "1d", "99999999999999999999h"] {
            assert!(parse_duration(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn even_nodes_share_memory_and_processors() {
        for (nodes, memory_mib, cpus) in
            [(1, 1024, 2), (2, 1024, 2), (4, 1027, 2), (8, 2048, 3), (4, 1024, 16)]
        {
            let list = NodeConfig::even(nodes, memory_mib, cpus);
            let config = HostConfig { cpus, nodes: list.clone(), ..HostConfig::default() };
            config.validate().unwrap();
            assert_eq!((list.len(), config.total_memory_mib()), (nodes as usize, memory_mib));
            let (least, most) = list.iter().fold((u64::MAX, 0), |(least, most), node| {
                (least.min(node.memory_mib), most.max(node.memory_mib))
            });
            assert!(most - least <= 1, "{list:?}");
        }
        assert_eq!(NodeConfig::even(4, 1024, 2)[3].cpus, None);
    }

    #[test]
    fn nodes_parse() {
        let node: NodeConfig = "size=1G,cpus=0-1".parse().unwrap();
        assert_eq!(node, NodeConfig { memory_mib: 1024, cpus: Some(0..=1) });
        let node: NodeConfig = "cpus=3,size=512M".parse().unwrap();
        assert_eq!(node, NodeConfig { memory_mib: 512, cpus: Some(3..=3) });
        for bad in ["", "cpus=1", "size=1G,cpu=0", "size=1G,cpus=a-b"] {
            assert!(bad.parse::<NodeConfig>().is_err(), "{bad}");
        }
    }

    #[test]
    fn files_parse() {
        let file: HostFile = "a/b:/c".parse().unwrap();
        assert_eq!((file.source, file.target), ("a/b".into(), "/c".into()));
        for bad in ["", "a", "a:", "a:b", ":/c"] {
            assert!(bad.parse::<HostFile>().is_err(), "{bad}");
        }
    }

    fn with_nodes(cpus: u32, nodes: &[&str]) -> Result<(), HostError> {
        let nodes = nodes.iter().map(|text| text.parse().unwrap()).collect();
        HostConfig { cpus, nodes, ..HostConfig::default() }.validate()
    }

    #[test]
    fn nodes_cover_each_processor_once() {
        assert!(with_nodes(2, &["size=1G,cpus=0", "size=1G,cpus=1"]).is_ok());
        assert!(with_nodes(2, &["size=1G,cpus=0-1", "size=1G"]).is_ok());
        for (nodes, word) in [
            (["size=1G,cpus=0", "size=1G,cpus=0-1"], "is in node 0 and in node 1"),
            (["size=1G,cpus=0", "size=1G"], "is in no node"),
            (["size=1G,cpus=0-1", "size=1G,cpus=2"], "only 2"),
            (["size=1G,cpus=0-1", "size=0M"], "no memory"),
        ] {
            let error = with_nodes(2, &nodes).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
    }

    #[test]
    fn limits_are_checked() {
        let small = HostConfig { memory_mib: 64, ..HostConfig::default() };
        assert!(small.validate().unwrap_err().to_string().contains("too little"));
        let none = HostConfig { cpus: 0, ..HostConfig::default() };
        assert!(none.validate().unwrap_err().to_string().contains("processors"));
    }
}

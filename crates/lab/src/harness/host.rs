//! Measuring and resetting the host that the guests run on.

use std::fs;
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use crate::LabError;
use crate::harness::proc::{self, ProcessMemory};
use crate::report::results::{Host, Machine, MemoryLimit, Place};

const MEMINFO: &str = "/proc/meminfo";
const VMSTAT: &str = "/proc/vmstat";
const PAGE_BYTES: u64 = 4096;
const ZONEINFO: &str = "/proc/zoneinfo";
const KIB_PER_MIB: u64 = 1024;
/// Memory that a warm-up does not touch, so that it neither swaps nor triggers the OOM killer.
const WARM_UP_MARGIN_MIB: u64 = 128;
/// Allocation step of a warm-up.
const WARM_UP_CHUNK_MIB: u64 = 32;

/// KiB as MiB with its fraction.
pub fn mib(kib: u64) -> f64 {
    kib as f64 / KIB_PER_MIB as f64
}

fn read(path: impl AsRef<Path>) -> Result<String, LabError> {
    fs::read_to_string(&path).map_err(LabError::of_file(path))
}

fn write(path: impl AsRef<Path>, text: &str) -> Result<(), LabError> {
    fs::write(&path, text).map_err(LabError::of_file(path))
}

/// A machine's memory, in KiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryState {
    /// `MemTotal`.
    pub total_kib: u64,
    /// `MemAvailable`, and free pages in the lists of processors. Linux does not count those, which
    /// are up to 45 MiB a processor of a small host with huge pages, and takes them before it
    /// reclaims (`drain_all_pages`, mm/page_alloc.c).
    pub available_kib: u64,
    /// `SwapTotal`.
    pub swap_total_kib: u64,
    /// `SwapFree`.
    pub swap_free_kib: u64,
}

impl MemoryState {
    /// Reads the current state.
    pub fn read() -> Result<Self, LabError> {
        Self::parse(&read(MEMINFO)?, &read(ZONEINFO)?)
    }

    fn parse(meminfo: &str, zoneinfo: &str) -> Result<Self, LabError> {
        let fields = proc::meminfo(meminfo);
        let field = |name: &'static str| {
            fields
                .get(name)
                .copied()
                .ok_or_else(|| LabError::MissingField { path: PathBuf::from(MEMINFO), field: name })
        };
        Ok(Self {
            total_kib: field("MemTotal")?,
            available_kib: field("MemAvailable")? + proc::free_in_lists_kib(zoneinfo),
            swap_total_kib: field("SwapTotal")?,
            swap_free_kib: field("SwapFree")?,
        })
    }

    /// Memory in use that the kernel could not reclaim without swapping.
    pub fn used_kib(self) -> u64 {
        self.total_kib.saturating_sub(self.available_kib)
    }

    /// Swap in use.
    pub fn swap_used_kib(self) -> u64 {
        self.swap_total_kib.saturating_sub(self.swap_free_kib)
    }
}

/// The host's memory in use, in MiB.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Usage {
    /// Memory.
    pub used_mib: f64,
    /// Swap, or what would be swap on a host of the experiment's size.
    pub swap_used_mib: f64,
    /// Memory that is left for guests.
    pub available_mib: f64,
}

/// Measures the use of a host, also if its size differs from the experiment's.
#[derive(Debug, Clone, Copy)]
pub struct Gauge {
    limit: MemoryLimit,
    budget_mib: f64,
    /// Use when the gauge was made; a budget counts from there.
    idle_used_mib: f64,
}

impl Gauge {
    /// A gauge for an experiment whose host has `shape_mib` of RAM and `swap_mib` of swap.
    ///
    /// A host whose RAM is within a tenth of that, and which has swap if the experiment's has, is
    /// the experiment's host. Any other host gets a budget: the guests may use as much as the
    /// experiment's host would have.
    pub fn new(shape_mib: u64, swap_mib: u64) -> Result<Self, LabError> {
        let state = MemoryState::read()?;
        Ok(Self::from_state(state, shape_mib, swap_mib))
    }

    fn from_state(state: MemoryState, shape_mib: u64, swap_mib: u64) -> Self {
        let total_mib = state.total_kib / KIB_PER_MIB;
        let same_size = total_mib.abs_diff(shape_mib) <= shape_mib / 10;
        let swap_as_asked = swap_mib == 0 || state.swap_total_kib > 0;
        let limit =
            if same_size && swap_as_asked { MemoryLimit::HostMemory } else { MemoryLimit::Budget };
        Self { limit, budget_mib: shape_mib as f64, idle_used_mib: mib(state.used_kib()) }
    }

    /// The limit of the guests' memory.
    pub fn limit(&self) -> MemoryLimit {
        self.limit
    }

    /// The current use.
    pub fn read(&self) -> Result<Usage, LabError> {
        Ok(self.usage(MemoryState::read()?))
    }

    fn usage(&self, state: MemoryState) -> Usage {
        let used_mib = mib(state.used_kib());
        let (swap_used_mib, available_mib) = match self.limit {
            MemoryLimit::HostMemory => {
                (mib(state.swap_used_kib()), mib(state.total_kib) - used_mib)
            }
            MemoryLimit::Budget => {
                let available_mib = self.budget_mib + self.idle_used_mib - used_mib;
                ((-available_mib).max(0.0), available_mib.max(0.0))
            }
        };
        Usage { used_mib, swap_used_mib, available_mib }
    }
}

/// Written to swap since the host's start, in bytes (`pswpout` of /proc/vmstat).
pub fn swap_out_bytes() -> Result<u64, LabError> {
    let text = read(VMSTAT)?;
    let pages = text.lines().find_map(|line| line.strip_prefix("pswpout ")?.trim().parse().ok());
    let pages: u64 =
        pages.ok_or_else(|| LabError::MissingField { path: VMSTAT.into(), field: "pswpout" })?;
    Ok(pages * PAGE_BYTES)
}

/// Memory of a process; `None` when it has ended.
pub fn process_memory(pid: u32) -> Option<ProcessMemory> {
    proc::status(&fs::read_to_string(format!("/proc/{pid}/status")).ok()?)
}

/// Resident memory of a monitor without its guest's RAM, MiB; `None` when it has ended.
pub fn monitor_rss_mib(pid: u32, guest_mib: u64) -> Option<f64> {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps")).ok()?;
    Some(mib(proc::monitor_resident_kib(&proc::smaps(&text), guest_mib)))
}

/// The part of a guest's resident RAM in huge pages, in percent; `None` when it has ended.
pub fn huge_percent(pid: u32, guest_mib: u64) -> Option<f64> {
    proc::huge_percent(&fs::read_to_string(format!("/proc/{pid}/smaps")).ok()?, guest_mib)
}

/// Memory of a process that others map, too (`Shared_Clean` and `Shared_Dirty` of
/// `/proc/PID/smaps_rollup`), MiB; `None` when it has ended.
pub fn shared_mib(pid: u32) -> Option<f64> {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
    let fields = proc::meminfo(&text);
    Some(mib(fields.get("Shared_Clean")? + fields.get("Shared_Dirty")?))
}

/// Memory of the host by kind, MiB.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MemoryKinds {
    /// Memory of programs that is no file's, each page once (`AnonPages`).
    pub anonymous_mib: f64,
    /// Page tables of programs and of guests (`PageTables`, `SecPageTables`).
    pub page_tables_mib: f64,
    /// Counted memory of the kernel itself that it cannot reclaim (`SUnreclaim`, `KernelStack`,
    /// `Percpu`).
    pub kernel_mib: f64,
}

impl MemoryKinds {
    /// Reads the current amounts.
    pub fn read() -> Result<Self, LabError> {
        Ok(Self::parse(&read(MEMINFO)?))
    }

    fn parse(meminfo: &str) -> Self {
        let fields = proc::meminfo(meminfo);
        let sum = |names: &[&str]| mib(names.iter().filter_map(|name| fields.get(name)).sum());
        Self {
            anonymous_mib: sum(&["AnonPages"]),
            page_tables_mib: sum(&["PageTables", "SecPageTables"]),
            kernel_mib: sum(&["SUnreclaim", "KernelStack", "Percpu"]),
        }
    }
}

/// Memory of a process, resident and swapped, with each shared page divided by the number of its
/// mappings, MiB; `None` when it has ended.
pub fn proportional_mib(pid: u32) -> Option<f64> {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
    let fields = proc::meminfo(&text);
    Some(mib(fields.get("Pss")? + fields.get("SwapPss").unwrap_or(&0)))
}

/// Processor time of a monitor without its vCPUs, ms; `None` when it has ended.
pub fn monitor_cpu_ms(pid: u32) -> Option<f64> {
    let total_ms = proc::process_cpu_ms(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)?;
    Some((total_ms - vcpu_times_ms(pid)?[0]).max(0.0))
}

/// How long vCPUs of a monitor have waited for a processor, ms; `None` when it has ended.
pub fn vcpus_waited_ms(pid: u32) -> Option<f64> {
    Some(vcpu_times_ms(pid)?[1])
}

/// How long vCPUs of a monitor have run and waited for a processor, ms.
///
/// Their threads are identified by their names: `vcpu0` under Ebb, `CPU 0/KVM` under QEMU with
/// `debug-threads=on`.
fn vcpu_times_ms(pid: u32) -> Option<[f64; 2]> {
    let mut sums = [0.0, 0.0];
    for thread in fs::read_dir(format!("/proc/{pid}/task")).ok()?.flatten() {
        // A thread may end meanwhile.
        let name = fs::read_to_string(thread.path().join("comm")).unwrap_or_default();
        if !name.starts_with("vcpu") && !name.starts_with("CPU ") {
            continue;
        }
        let times = fs::read_to_string(thread.path().join("schedstat")).unwrap_or_default();
        for (sum, ns) in sums.iter_mut().zip(times.split_ascii_whitespace()) {
            *sum += ns.parse::<f64>().unwrap_or(0.0) / 1e6;
        }
    }
    Some(sums)
}

/// Page faults of a process without I/O so far; `None` when it has ended.
pub fn minor_faults(pid: u32) -> Option<u64> {
    proc::minor_faults(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// Whether a socket in the network namespace of a process listens on a TCP port.
pub fn listens(pid: u32, port: u16) -> bool {
    fs::read_to_string(format!("/proc/{pid}/net/tcp")).is_ok_and(|text| proc::listens(&text, port))
}

fn cpus() -> u32 {
    thread::available_parallelism().map_or(1, |count| count.get() as u32)
}

fn kernel_release() -> Result<String, LabError> {
    Ok(read("/proc/sys/kernel/osrelease")?.trim().to_owned())
}

/// Describes the machine that this process runs on.
pub fn machine() -> Result<Machine, LabError> {
    let cpuinfo = read("/proc/cpuinfo")?;
    Ok(Machine {
        cpu: proc::cpu_name(&cpuinfo).unwrap_or("unknown").to_owned(),
        cpus: cpus(),
        memory_mib: MemoryState::read()?.total_kib / KIB_PER_MIB,
        kernel: kernel_release()?,
    })
}

/// Describes the host of the guests, which is the one that this process runs on.
pub fn describe(place: Place, gauge: &Gauge) -> Result<Host, LabError> {
    let state = MemoryState::read()?;
    // Kernels without NUMA lack this file and have one node.
    let nodes = fs::read_to_string("/sys/devices/system/node/has_memory").unwrap_or_default();
    Ok(Host {
        place,
        limit: gauge.limit(),
        cpus: cpus(),
        memory_mib: state.total_kib / KIB_PER_MIB,
        swap_mib: state.swap_total_kib / KIB_PER_MIB,
        nodes: proc::list_length(&nodes).max(1),
        kernel: kernel_release()?,
    })
}

/// Resets a host for the next series: empties swap, drops caches and compacts free memory.
///
/// Only for a host of the experiment's own size, which has no other users: all guests of the last
/// series have ended, so that everything swapped out fits into memory. On other machines it does
/// nothing.
pub fn reset(gauge: &Gauge) -> Result<(), LabError> {
    if gauge.limit() == MemoryLimit::Budget {
        return Ok(());
    }
    for device in proc::swaps(&read("/proc/swaps")?) {
        for program in ["swapoff", "swapon"] {
            run(program, &device)?;
        }
    }
    drop_caches(gauge)?;
    write("/proc/sys/vm/compact_memory", "1")
}

/// Drops the host's clean page cache, dentries and inodes; on a machine that is not the
/// experiment's host it does nothing.
pub fn drop_caches(gauge: &Gauge) -> Result<(), LabError> {
    if gauge.limit() == MemoryLimit::Budget {
        return Ok(());
    }
    write("/proc/sys/vm/drop_caches", "3")
}

fn run(program: &str, device: &str) -> Result<(), LabError> {
    let failed = |cause| LabError::EmptySwap { path: device.to_owned(), cause };
    let status = Command::new(program).arg(device).status().map_err(failed)?;
    if status.success() {
        Ok(())
    } else {
        Err(failed(std::io::Error::other(format!("{program}: {status}"))))
    }
}

/// Touches all free memory of the host once and frees it.
///
/// In a virtual host the first touch of each page costs several times a later one, because the
/// machine below has to back it; without this the first series would be slower than the others.
pub fn warm_up(gauge: &Gauge) -> Result<(), LabError> {
    if gauge.limit() == MemoryLimit::Budget {
        return Ok(());
    }
    let mut chunks: Vec<Vec<u8>> = Vec::new();
    while MemoryState::read()?.available_kib / KIB_PER_MIB > WARM_UP_MARGIN_MIB + WARM_UP_CHUNK_MIB
    {
        let mut chunk = vec![0_u8; (WARM_UP_CHUNK_MIB << 20) as usize];
        for page in chunk.chunks_mut(4096) {
            page[0] = 1;
        }
        chunks.push(chunk);
    }
    black_box(&chunks);
    Ok(())
}

/// How often the threads of a process have waited: voluntary context switches; `None` when it has
/// ended.
pub fn waits(pid: u32) -> Option<u64> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).ok()?;
    let of_task = |path: PathBuf| {
        let text = fs::read_to_string(path.join("status")).ok()?;
        let line = text.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?;
        line.trim().parse::<u64>().ok()
    };
    // A thread may end meanwhile.
    Some(tasks.flatten().filter_map(|task| of_task(task.path())).sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB_KIB: u64 = 1 << 20;

    fn state(total_gib: u64, used_gib: u64, swap_gib: u64, swap_used_gib: u64) -> MemoryState {
        MemoryState {
            total_kib: total_gib * GIB_KIB,
            available_kib: (total_gib - used_gib) * GIB_KIB,
            swap_total_kib: swap_gib * GIB_KIB,
            swap_free_kib: (swap_gib - swap_used_gib) * GIB_KIB,
        }
    }

    fn used(used_gib: u64, swap_used_gib: u64, available_gib: u64) -> Usage {
        let [used_mib, swap_used_mib, available_mib] =
            [used_gib, swap_used_gib, available_gib].map(|gib| gib as f64 * 1024.0);
        Usage { used_mib, swap_used_mib, available_mib }
    }

    #[test]
    fn a_host_of_the_right_size_is_full_when_it_swaps() {
        let gauge = Gauge::from_state(state(15, 1, 4, 0), 15 * 1024, 4096);
        assert_eq!(gauge.limit(), MemoryLimit::HostMemory);
        let usage = gauge.usage(state(15, 14, 4, 1));
        assert_eq!(usage, used(14, 1, 1));
    }

    #[test]
    fn another_host_is_full_when_the_budget_is_spent() {
        for idle in [state(256, 10, 4, 0), state(15, 10, 0, 0)] {
            let gauge = Gauge::from_state(idle, 15 * 1024, 4096);
            assert_eq!(gauge.limit(), MemoryLimit::Budget);
        }
        let gauge = Gauge::from_state(state(256, 10, 0, 0), 15 * 1024, 4096);
        let within = gauge.usage(state(256, 25, 0, 0));
        assert_eq!(within, used(25, 0, 0));
        let beyond = gauge.usage(state(256, 27, 0, 0));
        assert_eq!(beyond, used(27, 2, 0));
        assert_eq!(gauge.usage(state(256, 12, 0, 0)), used(12, 0, 13));
    }

    #[test]
    fn a_missing_field_is_named() {
        let message = MemoryState::parse("MemTotal: 1 kB\n", "").unwrap_err().to_string();
        assert_eq!(message, "/proc/meminfo has no field MemAvailable");
    }

    #[test]
    fn pages_in_lists_of_processors_are_available() {
        let meminfo = "MemTotal: 9 kB\nMemAvailable: 40 kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n";
        let zoneinfo = "Node 0, zone    DMA32\n  pagesets\n    cpu: 0\n              count: 7\n\
                        \x20             high:  378\n    cpu: 1\n              count: 3\n";
        assert_eq!(MemoryState::parse(meminfo, zoneinfo).unwrap().available_kib, 80);
    }

    #[test]
    fn memory_is_told_apart_by_kind() {
        let kinds = MemoryKinds::parse(
            "AnonPages: 2048 kB\nSUnreclaim: 512 kB\nKernelStack: 256 kB\nPageTables: 1024 kB\n\
             SecPageTables: 1024 kB\nPercpu: 256 kB\nMapped: 9 kB\n",
        );
        let expected = MemoryKinds { anonymous_mib: 2.0, page_tables_mib: 2.0, kernel_mib: 1.0 };
        assert_eq!(kinds, expected);
    }

    #[test]
    fn this_machine_and_this_process_can_be_described() {
        let gauge = Gauge::new(1, 0).unwrap();
        let host = describe(Place::Direct, &gauge).unwrap();
        assert!(host.cpus >= 1 && host.nodes >= 1 && host.memory_mib > 0);
        assert_eq!(machine().unwrap().kernel, host.kernel);
        assert!(process_memory(std::process::id()).unwrap().resident_kib > 0);
        assert!(monitor_rss_mib(std::process::id(), 1 << 20).unwrap() > 0.0);
        assert!(process_memory(u32::MAX).is_none());
        assert!(proportional_mib(std::process::id()).is_some_and(|mib| mib > 0.0));
        assert!(proportional_mib(u32::MAX).is_none());
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        assert!(listens(std::process::id(), port));
        drop(listener);
        assert!(!listens(u32::MAX, port));
        // A program that another test starts has a copy of the socket until its exec.
        let started = std::time::Instant::now();
        while listens(std::process::id(), port) {
            assert!(started.elapsed() < std::time::Duration::from_secs(60));
            thread::sleep(std::time::Duration::from_millis(1));
        }
        assert!(monitor_cpu_ms(std::process::id()).is_some() && monitor_cpu_ms(u32::MAX).is_none());
    }
}

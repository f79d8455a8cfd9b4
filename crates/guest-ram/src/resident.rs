//! Resident memory of a guest.
//!
//! For file backings the file reports it: it counts the pages allocated to it, mapped or not. For
//! anonymous memory there are three sources:
//!
//! - `anon=` in /proc/self/numa_maps (kernels with CONFIG_NUMA) is exact.
//! - `Anonymous` in /proc/self/smaps omits huge pages that automatic NUMA balancing has made
//!   inaccessible to find out which processors use them (Linux mm/huge_memory.c,
//!   `follow_trans_huge_pmd`): up to all of them, on hosts with several nodes. It is used for
//!   kernels without numa_maps, which have no such balancing.
//! - mincore(2) also counts the shared zero page, which a read maps, and is used only without
//!   /proc.
//!
//! Restored memory also has pages of its file. Until they are written to they belong to the page
//! cache: shared by all machines restored from the same file, and reclaimed by the host when it
//! needs memory. They are counted separately (numa_maps: mapped and not `anon`; smaps: `Rss`
//! without `Anonymous`); mincore would count all cached pages of the file.
//!
//! Merged memory has stable pages, mapped from files with a name of their own; they are counted
//! separately too. The kernel's KSM leaves its pages among the anonymous ones. `KSM` in
//! /proc/self/smaps (Linux 6.7) is their number; /proc/self/ksm_merging_pages (Linux 5.19), for the
//! process as a whole, also counts those that were written to since the kernel's last pass.

use std::fs::File;
use std::io::{self, Read, Seek};
use std::ops::AddAssign;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use ebb_abi::PAGE_SIZE_BYTES;

use crate::mapping::Mapping;
use crate::pagemap::{is_in_memory, mincore};

/// Name of the memory files of stable pages, by which /proc distinguishes their mappings.
pub const STABLE_FILE_NAME: &str = "ebb-stable";

/// Unit of `st_blocks`, in bytes (stat(2)).
const BLOCK_BYTES: u64 = 512;

/// Pages per mincore(2) call: a result of 64 KiB.
const MINCORE_PAGES: usize = 64 << 10;

/// Guest memory that the host holds in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Residency {
    /// Bytes of pages that belong to this memory alone.
    pub private_bytes: u64,
    /// Bytes of pages of the file that the memory was restored from, mapped and not written to.
    /// They belong to the page cache, and several machines may share them.
    pub file_bytes: u64,
    /// Bytes of stable pages that are mapped for this memory, and of pages that the kernel has
    /// merged (in the whole process): each page counts once per mapping, although it exists only
    /// once.
    pub merged_bytes: u64,
}

impl Residency {
    /// Of a mapping, of whose resident bytes some are in anonymous pages.
    fn of(resident_bytes: u64, private_bytes: u64, is_stable: bool) -> Self {
        let shared_bytes = resident_bytes.saturating_sub(private_bytes);
        if is_stable {
            Self { private_bytes, file_bytes: 0, merged_bytes: shared_bytes }
        } else {
            Self { private_bytes, file_bytes: shared_bytes, merged_bytes: 0 }
        }
    }

    fn sum_bytes(self) -> u64 {
        self.private_bytes + self.file_bytes + self.merged_bytes
    }
}

impl AddAssign for Residency {
    fn add_assign(&mut self, other: Self) {
        self.private_bytes += other.private_bytes;
        self.file_bytes += other.file_bytes;
        self.merged_bytes += other.merged_bytes;
    }
}

/// Memory that the host holds for a process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessResidency {
    /// Guest memory.
    pub guest: Residency,
    /// Bytes of all other mappings: program, heap, stacks. Shared pages of files count in full.
    /// `None` without /proc. Counted in the page tables, unlike `statm` and `VmRSS`: these add up
    /// counters of threads or processors and are off by some MiB (Linux mm/memory.c,
    /// `sync_mm_rss`, until 6.1; include/linux/mm.h, `get_mm_counter`, since).
    pub other_bytes: Option<u64>,
}

/// Measures resident memory.
#[derive(Debug)]
pub(crate) struct Meter {
    /// Kept open: a monitor may have no access to /proc later on.
    accounting: Option<(Accounting, Mutex<File>)>,
    /// Source of the number of pages merged by the kernel, once it is needed.
    kernel_merged: OnceLock<KernelMerged>,
}

/// A file in which the kernel accounts for each mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Accounting {
    NumaMaps,
    Smaps,
}

impl Accounting {
    /// Adds up all mappings of `text`; `None` if it has another form.
    fn add_up(self, text: &str, sums: &mut Sums<'_>) -> Option<()> {
        match self {
            Self::NumaMaps => add_up_numa_maps(text, sums),
            Self::Smaps => add_up_smaps(text, sums),
        }
    }
}

/// Resident memory of mappings, guest memory apart.
#[derive(Debug, Default)]
struct Sums<'a> {
    /// Guest memory without a file (address, size in bytes).
    anonymous: &'a [(u64, u64)],
    /// Guest memory in files, which are asked instead.
    in_files: &'a [(u64, u64)],
    /// Guest memory without a file; `None` if no mapping of it was listed.
    guest: Option<Residency>,
    /// All other mappings.
    other_bytes: u64,
}

impl Sums<'_> {
    /// Adds the mapping that begins at `start`. Guest memory has guard pages at either end, so no
    /// mapping begins before it and extends into it.
    fn add(&mut self, start: u64, residency: Residency) {
        let is_in = |ranges: &[(u64, u64)]| {
            ranges.iter().any(|(address, size)| (*address..address + size).contains(&start))
        };
        if is_in(self.anonymous) {
            *self.guest.get_or_insert_default() += residency;
        } else if !is_in(self.in_files) {
            self.other_bytes += residency.sum_bytes();
        }
    }
}

impl Meter {
    pub(crate) fn new() -> Self {
        let open = |accounting, path| Some((accounting, Mutex::new(File::open(path).ok()?)));
        let numa_maps = open(Accounting::NumaMaps, "/proc/self/numa_maps");
        Self {
            accounting: numa_maps.or_else(|| open(Accounting::Smaps, "/proc/self/smaps")),
            kernel_merged: OnceLock::new(),
        }
    }

    /// From now on pages merged by the kernel are counted.
    pub(crate) fn count_kernel_merged(&self) {
        let open = |path: &str| {
            let file = File::open(path).inspect_err(|error| tracing::debug!("{path}: {error}"));
            file.ok().map(Mutex::new)
        };
        self.kernel_merged.get_or_init(|| KernelMerged {
            smaps: open("/proc/self/smaps"),
            of_process: open(&format!("/proc/self/{OF_PROCESS}")),
        });
    }

    /// The files of /proc/self that it reads, with their names there.
    pub(crate) fn process_files(&self) -> Vec<(&'static str, MutexGuard<'_, File>)> {
        let accounting = self.accounting.as_ref().map(|(accounting, file)| match accounting {
            Accounting::NumaMaps => ("numa_maps", file),
            Accounting::Smaps => ("smaps", file),
        });
        let merged = self.kernel_merged.get().into_iter().flat_map(|merged| {
            let smaps = merged.smaps.as_ref().map(|file| ("smaps", file));
            smaps.into_iter().chain(merged.of_process.as_ref().map(|file| (OF_PROCESS, file)))
        });
        let files = accounting.into_iter().chain(merged);
        files
            .map(|(name, file)| (name, file.lock().unwrap_or_else(PoisonError::into_inner)))
            .collect()
    }

    /// Resident memory of the mappings.
    pub(crate) fn residency(&self, mappings: &[Mapping]) -> io::Result<Residency> {
        if mappings.iter().all(|mapping| mapping.file().is_some()) {
            return in_files(mappings);
        }
        Ok(self.process_residency(mappings)?.guest)
    }

    /// Resident memory of the mappings and of the rest of the process.
    pub(crate) fn process_residency(&self, mappings: &[Mapping]) -> io::Result<ProcessResidency> {
        let ranges = |is_file: bool| {
            mappings
                .iter()
                .filter(|mapping| mapping.file().is_some() == is_file)
                .map(|mapping| (mapping.address() as u64, mapping.size_bytes() as u64))
                .collect::<Vec<_>>()
        };
        let (anonymous, of_files) = (ranges(false), ranges(true));
        let mut sums = Sums { anonymous: &anonymous, in_files: &of_files, ..Sums::default() };
        let accounted = self
            .accounting
            .as_ref()
            .and_then(|(accounting, file)| accounting.add_up(&read_text(file)?, &mut sums));
        let mut guest = in_files(mappings)?;
        match sums.guest.filter(|_| accounted.is_some()) {
            Some(mut accounted) => {
                let merged_bytes = self
                    .kernel_merged
                    .get()
                    .map_or(0, |merged| merged.bytes_in(&anonymous).min(accounted.private_bytes));
                accounted.private_bytes -= merged_bytes;
                accounted.merged_bytes += merged_bytes;
                guest += accounted;
            }
            None => {
                for mapping in mappings.iter().filter(|mapping| mapping.file().is_none()) {
                    guest.private_bytes += mincore_bytes(mapping)?;
                }
            }
        }
        Ok(ProcessResidency { guest, other_bytes: accounted.map(|()| sums.other_bytes) })
    }
}

/// Pages allocated to the files of those mappings that have one.
fn in_files(mappings: &[Mapping]) -> io::Result<Residency> {
    let mut sum = Residency::default();
    for file in mappings.iter().filter_map(Mapping::file) {
        sum.private_bytes += rustix::fs::fstat(file)?.st_blocks as u64 * BLOCK_BYTES;
    }
    Ok(sum)
}

/// Reads a file of /proc from its beginning: through `take`, which does not ask for the file's size
/// as [`File`] does, by a statx(2) that filters of a monitor's threads refuse.
fn read_text(file: &Mutex<File>) -> Option<String> {
    let mut file = file.lock().unwrap_or_else(PoisonError::into_inner);
    let mut text = String::new();
    file.rewind().ok()?;
    (&mut *file).take(u64::MAX).read_to_string(&mut text).ok()?;
    Some(text)
}

/// File of /proc/self with the number of the process's merged pages (Linux 6.0).
const OF_PROCESS: &str = "ksm_merging_pages";

/// Source of the number of pages merged by the kernel.
#[derive(Debug)]
struct KernelMerged {
    smaps: Option<Mutex<File>>,
    of_process: Option<Mutex<File>>,
}

impl KernelMerged {
    /// Bytes of merged pages in `ranges` (address, size in bytes), or, with older kernels, in the
    /// process.
    fn bytes_in(&self, ranges: &[(u64, u64)]) -> u64 {
        let read = |file: &Option<Mutex<File>>| read_text(file.as_ref()?);
        let in_ranges = || ksm_bytes(&read(&self.smaps)?, ranges);
        let of_process =
            || Some(read(&self.of_process)?.trim().parse::<u64>().ok()? * PAGE_SIZE_BYTES);
        in_ranges().or_else(of_process).unwrap_or(0)
    }
}

/// Sums up the pages merged by the kernel in those mappings of an smaps text that overlap one of
/// `ranges` (address, size in bytes). `None` if the text does not report them.
fn ksm_bytes(smaps: &str, ranges: &[(u64, u64)]) -> Option<u64> {
    let mut sum = None;
    let mut counts = false;
    for line in smaps.lines() {
        if let Some((start, end)) = mapping_line(line) {
            counts = ranges.iter().any(|(address, size)| start < address + size && *address < end);
        } else if let Some(kib) = line.strip_prefix("KSM:").filter(|_| counts) {
            let kib: u64 = kib.trim().strip_suffix("kB")?.trim_end().parse().ok()?;
            *sum.get_or_insert(0) += kib * 1024;
        }
    }
    sum
}

/// Adds up the mappings in an smaps text.
fn add_up_smaps(smaps: &str, sums: &mut Sums<'_>) -> Option<()> {
    let (mut start, mut is_stable, mut resident) = (0, false, 0);
    for line in smaps.lines() {
        if let Some((first, _)) = mapping_line(line) {
            start = first;
            is_stable = line.split_ascii_whitespace().nth(5).is_some_and(is_stable_file);
            continue;
        }
        let Some((name @ ("Rss" | "Anonymous"), kib)) = line.split_once(':') else { continue };
        let kib: u64 = kib.trim().strip_suffix("kB")?.trim_end().parse().ok()?;
        // The kernel writes `Rss` first.
        match name {
            "Rss" => resident = kib * 1024,
            _ => sums.add(start, Residency::of(resident, kib * 1024, is_stable)),
        }
    }
    Some(())
}

/// Adds up the mappings in a numa_maps text. A mapping without pages has no numbers.
fn add_up_numa_maps(numa_maps: &str, sums: &mut Sums<'_>) -> Option<()> {
    for line in numa_maps.lines() {
        let mut words = line.split_ascii_whitespace();
        let Some(start) = words.next().and_then(|word| u64::from_str_radix(word, 16).ok()) else {
            continue;
        };
        let (mut anonymous, mut dirty, mut mapped, mut is_stable) = (0, 0, None, false);
        for (name, number) in words.filter_map(|word| word.split_once('=')) {
            match name {
                "file" => is_stable = is_stable_file(number),
                "anon" => anonymous = number.parse::<u64>().ok()?,
                "dirty" => dirty = number.parse::<u64>().ok()?,
                "mapped" => mapped = Some(number.parse::<u64>().ok()?),
                _ => {}
            }
        }
        // Omitted where it equals one of the others (Linux fs/proc/task_mmu.c, `show_numa_map`).
        let mapped: u64 = mapped.unwrap_or(anonymous.max(dirty));
        let (resident, anonymous) = (mapped * PAGE_SIZE_BYTES, anonymous * PAGE_SIZE_BYTES);
        sums.add(start, Residency::of(resident, anonymous, is_stable));
    }
    Some(())
}

/// Whether the path of a mapping is that of a memory file of stable pages.
fn is_stable_file(path: &str) -> bool {
    path.strip_prefix("/memfd:").is_some_and(|name| name.starts_with(STABLE_FILE_NAME))
}

/// Start and end address of a mapping's first line, for example `7f00-8f00 rw-p 00000000 00:00 0`.
fn mapping_line(line: &str) -> Option<(u64, u64)> {
    let (start, end) = line.split_ascii_whitespace().next()?.split_once('-')?;
    Some((u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?))
}

fn mincore_bytes(mapping: &Mapping) -> io::Result<u64> {
    let pages = mapping.size_bytes() / PAGE_SIZE_BYTES as usize;
    let mut states = vec![0_u8; MINCORE_PAGES.min(pages)];
    let mut resident = 0;
    for first in (0..pages).step_by(MINCORE_PAGES) {
        let count = MINCORE_PAGES.min(pages - first);
        let address = mapping.address() + first * PAGE_SIZE_BYTES as usize;
        mincore(address, &mut states[..count])?;
        resident += states[..count].iter().filter(|state| is_in_memory(**state)).count() as u64;
    }
    Ok(resident * PAGE_SIZE_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Backing, HugePages, RegionSpec};
    use rustix::mm::{Advice, madvise};
    use vm_memory::GuestAddress;

    const SMAPS: &str = "\
10000-20000 rw-p 00000000 00:00 0
Size:                 64 kB
Rss:                  16 kB
Pss:                  16 kB
Anonymous:            16 kB
AnonHugePages:         0 kB
20000-30000 r--p 00000000 fe:00 7   /usr/lib/a-b.so
Rss:                   8 kB
Anonymous:             0 kB
30000-50000 rw-p 00000000 fe:00 9   /snapshot
Rss:                  20 kB
Anonymous:            12 kB
";

    fn kib(private: u64, file: u64) -> Residency {
        Residency { private_bytes: private << 10, file_bytes: file << 10, merged_bytes: 0 }
    }

    /// What the text says of guest memory in `anonymous`, and of the rest.
    fn accounted(
        accounting: Accounting,
        text: &str,
        anonymous: &[(u64, u64)],
    ) -> (Option<Residency>, u64) {
        let mut sums = Sums { anonymous, ..Sums::default() };
        accounting.add_up(text, &mut sums).unwrap();
        (sums.guest, sums.other_bytes >> 10)
    }

    #[test]
    fn smaps_count_guest_memory_and_the_rest() {
        let of = |ranges| accounted(Accounting::Smaps, SMAPS, ranges);
        assert_eq!(of(&[(0x10000, 0x10000)]), (Some(kib(16, 0)), 28));
        assert_eq!(of(&[(0x10000, 0x10000), (0x30000, 0x20000)]), (Some(kib(28, 8)), 8));
        assert_eq!(of(&[(0x50000, 0x1000)]), (None, 44));
    }

    #[test]
    fn numa_maps_count_guest_memory_and_the_rest() {
        let text = "10000 default anon=4 dirty=4 active=0 N0=1 N1=3 kernelpagesize_kB=4\n\
            14000 bind:1 anon=2 dirty=2 N1=2 kernelpagesize_kB=4\n\
            20000 default file=/usr/lib/a mapped=4 N0=4 kernelpagesize_kB=4\n30000 default\n\
            50000 default file=/snapshot anon=3 dirty=3 mapped=9 N0=9 kernelpagesize_kB=4\n\
            60000 default file=/snapshot anon=3 dirty=5 N0=5 kernelpagesize_kB=4\n";
        let of = |ranges| accounted(Accounting::NumaMaps, text, ranges);
        assert_eq!(of(&[(0x10000, 0x10000)]), (Some(kib(24, 0)), 72));
        assert_eq!(of(&[(0x30000, 0x1000)]), (Some(kib(0, 0)), 96));
        assert_eq!(of(&[(0x20000, 0x11000), (0x14000, 0x1000)]), (Some(kib(8, 16)), 72));
        assert_eq!(of(&[(0x40000, 0x1000)]), (None, 96));
        assert_eq!(of(&[(0x50000, 0x1000)]), (Some(kib(12, 24)), 60));
        assert_eq!(of(&[(0x60000, 0x1000)]), (Some(kib(12, 8)), 76));
    }

    #[test]
    fn guest_memory_in_files_is_not_counted_here() {
        let mut sums = Sums { in_files: &[(0x30000, 0x20000)], ..Sums::default() };
        Accounting::Smaps.add_up(SMAPS, &mut sums).unwrap();
        assert_eq!((sums.guest, sums.other_bytes), (None, 24 << 10));
    }

    #[test]
    fn stable_pages_are_distinguished_from_those_of_other_files() {
        let merged = |private: u64, file: u64, merged: u64| Residency {
            merged_bytes: merged << 10,
            ..kib(private, file)
        };
        let smaps = SMAPS.replace("fe:00 9   /snapshot", "00:01 9   /memfd:ebb-stable (deleted)");
        let of_smaps = accounted(Accounting::Smaps, &smaps, &[(0x10000, 0x40000)]);
        assert_eq!(of_smaps, (Some(merged(28, 8, 8)), 0));
        let numa_maps = "10000 default file=/memfd:ebb-stable\\040(deleted) anon=3 dirty=3 \
                         mapped=9 N0=9\n\
                         20000 default file=/memfd:stable mapped=2 N0=2\n30000 default anon=1\n";
        let of_numa_maps = accounted(Accounting::NumaMaps, numa_maps, &[(0x10000, 0x30000)]);
        assert_eq!(of_numa_maps, (Some(merged(16, 8, 24)), 0));
    }

    #[test]
    fn pages_merged_by_the_kernel_are_summed_where_reported() {
        assert_eq!(ksm_bytes(SMAPS, &[(0x10000, 0x40000)]), None);
        let smaps = SMAPS.replace("AnonHugePages:         0 kB", "KSM:                   8 kB");
        assert_eq!(ksm_bytes(&smaps, &[(0x10000, 0x40000)]), Some(8 << 10));
        assert_eq!(ksm_bytes(&smaps, &[(0x30000, 0x1000)]), None);
    }

    #[test]
    fn mincore_agrees_with_the_accounting_for_written_memory() {
        let spec = RegionSpec { start: GuestAddress(0), size_bytes: 4 << 20, host_node: None };
        let mapping = Mapping::new(&spec, Backing::Anonymous, HugePages::Off).unwrap();
        let address = (mapping.address() + (1 << 20)) as *mut _;
        // SAFETY: the range lies within the mapping; populating changes no content.
        unsafe { madvise(address, 64 << 10, Advice::LinuxPopulateWrite) }.unwrap();
        assert_eq!(mincore_bytes(&mapping).unwrap(), 64 << 10);
        let residency = Residency { private_bytes: 64 << 10, ..Residency::default() };
        assert_eq!(Meter::new().residency(&[mapping]).unwrap(), residency);
    }

    /// The kernel's sum of all mappings is what they add up to here.
    #[test]
    fn all_mappings_are_those_of_the_guest_and_others() {
        let populated = |backing| {
            let spec = RegionSpec { start: GuestAddress(0), size_bytes: 8 << 20, host_node: None };
            let mapping = Mapping::new(&spec, backing, HugePages::Off).unwrap();
            // SAFETY: the mapping is that of the test; populating changes no content.
            unsafe {
                madvise(mapping.address() as *mut _, 8 << 20, Advice::LinuxPopulateWrite).unwrap();
            }
            mapping
        };
        let mappings = [populated(Backing::Anonymous), populated(Backing::Memfd)];
        let counted = Meter::new().process_residency(&mappings).unwrap();
        assert_eq!(counted.guest, kib(16 << 10, 0));
        let rollup = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap();
        let resident = rollup.lines().find_map(|line| line.strip_prefix("Rss:")).unwrap();
        let resident_kib: u64 = resident.trim().strip_suffix("kB").unwrap().trim().parse().unwrap();
        let sum_kib = (counted.guest.sum_bytes() + counted.other_bytes.unwrap()) >> 10;
        // Other tests of this process run meanwhile.
        assert!(sum_kib.abs_diff(resident_kib) < 64 << 10, "{sum_kib} and {resident_kib} KiB");
    }
}

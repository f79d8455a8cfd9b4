//! Tests with the kernel's own thread. There is one for the whole machine, so users of it hold a
//! lock.

use std::fs;
use std::time::{Duration, Instant};

use ebb_abi::Pfn;
use rustix::fs::{FlockOperation, flock};
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::{GuestRange, HugePages, Populate, RegionSpec};

const PAGE: u64 = 4096;
const PAGES: u64 = 512;
const KNOBS: &str = "/sys/kernel/mm/ksm";

fn ram(backing: Backing) -> Result<GuestRam, RamError> {
    let region = RegionSpec { start: GuestAddress(0), size_bytes: 1024 * PAGE, host_node: None };
    GuestRam::new(&[region], backing, HugePages::Off, Populate::Lazy)
}

fn range(start: u64, pages: u64) -> GuestRange {
    GuestRange::new(Pfn(start), pages)
}

/// Exclusive use of the kernel's thread; its settings are restored at the end.
struct Ksm {
    _lock: fs::File,
    before: Vec<(&'static str, String)>,
}

impl Ksm {
    /// `None` where it is missing or must not be used.
    fn take() -> Option<Self> {
        let lock = fs::File::open(format!("{KNOBS}/run")).ok()?;
        flock(&lock, FlockOperation::LockExclusive).ok()?;
        let knobs = ["run", "pages_to_scan", "sleep_millisecs", "use_zero_pages"];
        let before: Vec<_> = knobs
            .into_iter()
            .map(|knob| Some((knob, fs::read_to_string(format!("{KNOBS}/{knob}")).ok()?)))
            .collect::<Option<_>>()?;
        let ksm = Self { _lock: lock, before };
        for (knob, value) in
            [("sleep_millisecs", "1"), ("pages_to_scan", "2000"), ("use_zero_pages", "1")]
        {
            Self::set(knob, value).ok()?;
        }
        Self::set("run", "1").ok()?;
        Some(ksm)
    }

    fn set(knob: &str, value: &str) -> io::Result<()> {
        fs::write(format!("{KNOBS}/{knob}"), value)
    }
}

impl Drop for Ksm {
    fn drop(&mut self) {
        for (knob, value) in self.before.iter().rev() {
            // At the end of the test, a refusal cannot be handled.
            let _ = Self::set(knob, value.trim());
        }
    }
}

/// Waits until this many bytes are merged; the kernel needs at least two passes.
fn wait_for_merged(ram: &GuestRam, bytes: u64) {
    let start = Instant::now();
    while ram.residency().unwrap().merged_bytes < bytes {
        assert!(start.elapsed() < Duration::from_mins(1), "{:?}", ram.residency());
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn pages_merged_by_the_kernel_are_populated_counted_separately_and_discarded() {
    let Some(_ksm) = Ksm::take() else {
        println!("no KSM here, or not allowed");
        return;
    };
    let ram = ram(Backing::Anonymous).unwrap();
    ram.advise_mergeable(KernelMerging::Allow).unwrap();
    // Each content twice, and zeros written by the guest.
    for page in 0..PAGES {
        let content = [(page / 2 % 250) as u8 + 1; 2000];
        ram.memory().write_slice(&content, GuestAddress(page * PAGE)).unwrap();
        ram.memory().write_obj((page / 2) as u32, GuestAddress(page * PAGE + 3000)).unwrap();
    }
    ram.memory().write_slice(&vec![0; 64 * PAGE as usize], GuestAddress(PAGES * PAGE)).unwrap();
    let file = tempfile::tempfile().unwrap();
    let image = ram.save(&file, 0, &mut |_| {}).unwrap();
    wait_for_merged(&ram, PAGES * PAGE);

    let residency = ram.residency().unwrap();
    // The pages of zeros may already be the shared one, or not.
    assert!(residency.private_bytes <= 64 * PAGE, "{residency:?}");
    assert_eq!((residency.merged_bytes, residency.file_bytes), (PAGES * PAGE, 0));
    let mut held = Vec::new();
    ram.populated_ranges(range(0, PAGES), &mut held).unwrap();
    assert_eq!(held, [range(0, PAGES)]);
    let again = tempfile::tempfile().unwrap();
    assert_eq!(ram.save(&again, 0, &mut |_| {}).unwrap(), image);
    // Zero pages are discarded, merged ones stay.
    assert_eq!(ram.discard_zeros(range(0, 1024)).unwrap().returned_bytes, 64 * PAGE);
    assert_eq!(ram.residency().unwrap().merged_bytes, PAGES * PAGE);

    assert_eq!(ram.discard(&[range(0, 100)]).unwrap().bytes, 100 * PAGE);
    let word = |page: u64| ram.memory().read_obj::<u32>(GuestAddress(page * PAGE + 3000)).unwrap();
    assert!((0..100).all(|page| word(page) == 0));
    assert!((100..PAGES).all(|page| u64::from(word(page)) == page / 2));
    ram.memory().write_obj(77_u32, GuestAddress(200 * PAGE + 3000)).unwrap();
    assert_eq!((word(200), word(201)), (77, 100));

    ram.advise_mergeable(KernelMerging::Forbid).unwrap();
    let residency = ram.residency().unwrap();
    assert_eq!(residency.merged_bytes, 0);
    assert!((102..PAGES).all(|page| page == 200 || u64::from(word(page)) == page / 2));
}

#[test]
fn memory_of_files_is_refused() {
    let ram = ram(Backing::Memfd).unwrap();
    for merging in [KernelMerging::Allow, KernelMerging::Forbid] {
        let error = ram.advise_mergeable(merging).unwrap_err();
        assert!(matches!(error, RamError::NotMergeable { backing: Backing::Memfd }), "{error}");
        assert!(error.to_string().contains("use anonymous memory"), "{error}");
    }
}

#[test]
fn memory_that_replaces_pages_of_a_file_is_mergeable_too() {
    if !fs::exists(KNOBS).unwrap() {
        let ram = ram(Backing::Anonymous).unwrap();
        let error = ram.advise_mergeable(KernelMerging::Allow).unwrap_err();
        assert!(matches!(error, RamError::NoKernelMerging), "{error}");
        return;
    }
    let origin = ram(Backing::Anonymous).unwrap();
    origin.memory().write_slice(&vec![7; 100 * PAGE as usize], GuestAddress(0)).unwrap();
    let file = tempfile::tempfile().unwrap();
    let image = origin.save(&file, 0, &mut |_| {}).unwrap();
    let region = RegionSpec { start: GuestAddress(0), size_bytes: 1024 * PAGE, host_node: None };
    let ram = GuestRam::restore(&[region], HugePages::Off, file, 0, &image).unwrap();
    ram.advise_mergeable(KernelMerging::Allow).unwrap();
    ram.discard(&[range(20, 80)]).unwrap();
    let maps = fs::read_to_string("/proc/self/smaps").unwrap();
    let address = ram.regions()[0].host_address;
    // The file's 20 pages, and one mapping of all others.
    for (page, expected) in [(0, "r"), (20, "")] {
        let start = format!("{:x}-", address + page * PAGE);
        let mut lines = maps.lines().skip_while(|line| !line.starts_with(&start));
        assert!(lines.next().unwrap().contains(expected));
        let flags = lines.find_map(|line| line.strip_prefix("VmFlags:")).unwrap();
        assert!(flags.split_ascii_whitespace().any(|flag| flag == "mg"), "{flags}");
    }
    let end = format!("{:x}-{:x} ", address + 20 * PAGE, address + 1024 * PAGE);
    assert!(maps.lines().any(|line| line.starts_with(&end)), "{maps}");
}

use super::*;
use vm_memory::{Bytes, GuestAddress};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// Two regions with a hole between them, as below and above the MMIO area of a PC.
fn regions(size_bytes: u64) -> [RegionSpec; 2] {
    let region = |start| RegionSpec { start: GuestAddress(start), size_bytes, host_node: None };
    [region(0), region(4 * GIB)]
}

/// Guest memory of two regions of 8 MiB; `None` for hugetlb on a machine without a pool of huge
/// pages, where the error is checked instead.
fn ram(backing: Backing) -> Option<GuestRam> {
    match GuestRam::new(&regions(8 * MIB), backing, HugePages::Off, Populate::Lazy) {
        Ok(ram) => Some(ram),
        Err(error @ RamError::TooFewHugePages { .. }) => {
            assert_eq!(backing, Backing::Hugetlb2M);
            let text = error.to_string();
            assert!(
                text.contains("needs 4 huge pages") && text.contains("/proc/sys/vm/nr_hugepages"),
                "{text}"
            );
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn pages(address: u64, size_bytes: u64) -> GuestRange {
    GuestRange::inside_bytes(address, size_bytes).unwrap()
}

/// Writes a byte into each page of a range.
fn fill(ram: &GuestRam, address: u64, size_bytes: u64) {
    for page in (address..address + size_bytes).step_by(4096) {
        ram.memory().write_obj(0xa5_u8, GuestAddress(page)).unwrap();
    }
}

/// Number of pages in a range that still contain the mark of [`fill`].
fn filled_pages(ram: &GuestRam, address: u64, size_bytes: u64) -> usize {
    let content = |page| ram.memory().read_obj::<u8>(GuestAddress(page)).unwrap();
    (address..address + size_bytes).step_by(4096).filter(|page| content(*page) == 0xa5).count()
}

#[test]
fn discarded_pages_read_as_zeros_and_leave_the_host() {
    for backing in [Backing::Anonymous, Backing::Memfd] {
        let ram = ram(backing).unwrap();
        fill(&ram, 0, 8 * MIB);
        fill(&ram, 4 * GIB, 8 * MIB);
        assert_eq!(ram.resident_bytes().unwrap(), 16 * MIB, "{backing}");

        let ranges = [pages(MIB, MIB), pages(4 * GIB, 4096), pages(4 * GIB + 8 * MIB - 8192, 8192)];
        let outcome = ram.discard(&ranges).unwrap();
        assert_eq!(outcome.bytes, MIB + 3 * 4096);
        assert_eq!(outcome.ranges, 3);
        let syscalls = if ram.discard_method() == DiscardMethod::Vectored { 1 } else { 3 };
        assert_eq!(outcome.syscalls, syscalls);

        assert_eq!(ram.resident_bytes().unwrap(), 15 * MIB - 3 * 4096, "{backing}");
        assert_eq!(filled_pages(&ram, 0, 8 * MIB), 7 * 256);
        assert_eq!(filled_pages(&ram, MIB, MIB), 0);
        assert_eq!(filled_pages(&ram, 4 * GIB, 8 * MIB), 2048 - 3);
    }
}

#[test]
fn vectored_and_single_discards_do_the_same() {
    let ranges: Vec<_> = (0..1500).map(|index| GuestRange::new(Pfn(index * 4 / 3), 1)).collect();
    let outcomes = [false, true].map(|single| {
        let mut ram = ram(Backing::Anonymous).unwrap();
        if single {
            ram = ram.with_single_discards();
            assert_eq!(ram.discard_method(), DiscardMethod::Single);
        }
        fill(&ram, 0, 8 * MIB);
        let outcome = ram.discard(&ranges).unwrap();
        let expected = if ram.discard_method() == DiscardMethod::Vectored { 2 } else { 1500 };
        assert_eq!(outcome.syscalls, expected);
        (outcome.bytes, outcome.ranges, filled_pages(&ram, 0, 8 * MIB))
    });
    assert_eq!(outcomes, [(1500 * 4096, 1500, 548); 2]);
}

#[test]
fn hugetlb_pages_are_discarded_once_they_are_ballooned_as_a_whole() {
    let Some(ram) = ram(Backing::Hugetlb2M) else { return };
    fill(&ram, 0, 4 * MIB);
    assert_eq!(ram.resident_bytes().unwrap(), 4 * MIB);

    let outcome = ram.discard_ballooned(&[pages(0, MIB)]).unwrap();
    assert_eq!((outcome.bytes, outcome.deferred_bytes, outcome.syscalls), (0, MIB, 0));
    assert_eq!(filled_pages(&ram, 0, 4 * MIB), 1024);

    let outcome = ram.discard_ballooned(&[pages(MIB, 2 * MIB)]).unwrap();
    assert_eq!((outcome.bytes, outcome.deferred_bytes), (2 * MIB, MIB));
    assert_eq!(ram.resident_bytes().unwrap(), 2 * MIB);
    assert_eq!(filled_pages(&ram, 0, 4 * MIB), 512);

    // A page that was deflated keeps its huge page.
    ram.reclaim(&[pages(2 * MIB, 4096)]);
    assert_eq!(ram.discard_ballooned(&[pages(3 * MIB, MIB)]).unwrap().bytes, 0);
    assert_eq!(ram.discard_ballooned(&[pages(2 * MIB, 4096)]).unwrap().bytes, 2 * MIB);
}

#[test]
fn ranges_outside_memory_are_refused_before_anything_happens() {
    let ram = ram(Backing::Anonymous).unwrap();
    fill(&ram, 0, 8 * MIB);
    for outside in
        [pages(8 * MIB - 4096, 8192), pages(2 * GIB, 4096), GuestRange::new(Pfn(5), u64::MAX)]
    {
        let error = ram.discard(&[pages(0, MIB), outside]).unwrap_err();
        assert!(matches!(error, RamError::OutsideRam { range } if range == outside));
    }
    assert_eq!(filled_pages(&ram, 0, 8 * MIB), 2048);
}

#[test]
fn clipping_leaves_guest_memory() {
    let ram = ram(Backing::Anonymous).unwrap();
    let everything: Vec<_> = ram.clip(GuestRange::new(Pfn(0), u64::MAX)).collect();
    assert_eq!(everything, [pages(0, 8 * MIB), pages(4 * GIB, 8 * MIB)]);
    assert_eq!(ram.clip(pages(8 * MIB, GIB)).count(), 0);
    assert_eq!(ram.clip(pages(7 * MIB, GIB)).collect::<Vec<_>>(), [pages(7 * MIB, MIB)]);
    assert_eq!(ram.clip(pages(u64::MAX - 8191, 4096)).count(), 0);
}

#[test]
fn nothing_is_discarded_while_inhibited() {
    let ram = ram(Backing::Anonymous).unwrap();
    fill(&ram, 0, MIB);
    let guard = ram.inhibit_discard(InhibitReason::PinnedMemory);
    let outcome = ram.discard(&[pages(0, MIB)]).unwrap();
    assert_eq!(outcome, DiscardOutcome { inhibited_bytes: MIB, ..DiscardOutcome::default() });
    assert_eq!(filled_pages(&ram, 0, MIB), 256);
    assert_eq!(ram.inhibit_reasons(), [InhibitReason::PinnedMemory]);
    drop(guard);
    assert_eq!(ram.discard(&[pages(0, MIB)]).unwrap().bytes, MIB);
}

#[test]
fn host_and_guest_addresses_are_congruent_for_huge_mappings() {
    let specs = [(MIB, 5 * MIB), (GIB + 4096, MIB)].map(|(start, size_bytes)| RegionSpec {
        start: GuestAddress(start),
        size_bytes,
        host_node: None,
    });
    let ram = GuestRam::new(&specs, Backing::Memfd, HugePages::On, Populate::Lazy).unwrap();
    for region in ram.regions() {
        assert_eq!(region.host_address % (2 * MIB), region.start.0 % (2 * MIB));
    }
}

#[test]
fn preallocated_memory_is_resident() {
    for backing in [Backing::Anonymous, Backing::Memfd] {
        // More than one chunk, so that several threads share the work.
        let spec = RegionSpec { start: GuestAddress(0), size_bytes: 160 * MIB, host_node: None };
        let lazy = GuestRam::new(&[spec], backing, HugePages::On, Populate::Lazy).unwrap();
        let error = lazy.populate(&|| true).unwrap_err();
        assert!(matches!(error, RamError::PopulateCancelled), "{error}");
        assert_eq!(lazy.resident_bytes().unwrap(), 0);
        lazy.populate(&|| false).unwrap();
        assert_eq!(lazy.resident_bytes().unwrap(), 160 * MIB);
        drop(lazy);
        let ram = GuestRam::new(&[spec], backing, HugePages::On, Populate::Prealloc).unwrap();
        assert_eq!(ram.resident_bytes().unwrap(), 160 * MIB);
        // Returned to the host although it was allocated in advance.
        ram.discard(&[pages(0, 160 * MIB)]).unwrap();
        assert_eq!(ram.resident_bytes().unwrap(), 0);
    }
}

#[test]
fn memory_comes_from_the_requested_node_or_not_at_all() {
    let spec = |node| RegionSpec { start: GuestAddress(0), size_bytes: MIB, host_node: Some(node) };
    let ram =
        GuestRam::new(&[spec(0)], Backing::Anonymous, HugePages::Off, Populate::Prealloc).unwrap();
    let smaps = std::fs::read_to_string("/proc/self/numa_maps").unwrap_or_default();
    let line = smaps
        .lines()
        .find(|line| line.starts_with(&format!("{:x} ", ram.regions()[0].host_address)));
    assert!(smaps.is_empty() || line.is_some_and(|line| line.contains("bind:0")), "{line:?}");
    for node in [1000, 1 << 20] {
        let error =
            GuestRam::new(&[spec(node)], Backing::Anonymous, HugePages::Off, Populate::Lazy)
                .unwrap_err();
        assert!(error.to_string().contains(&format!("host node {node}")), "{error}");
    }
}

#[test]
fn bad_regions_are_refused_with_a_reason() {
    let refuse = |regions: &[(u64, u64)], backing| {
        let regions: Vec<_> = regions
            .iter()
            .map(|(start, size_bytes)| RegionSpec {
                start: GuestAddress(*start),
                size_bytes: *size_bytes,
                host_node: None,
            })
            .collect();
        GuestRam::new(&regions, backing, HugePages::Off, Populate::Lazy).unwrap_err()
    };
    assert!(matches!(refuse(&[], Backing::Anonymous), RamError::NoRegions));
    for region in [(0, 0), (0, 4095), (1, 4096)] {
        assert!(matches!(refuse(&[region], Backing::Anonymous), RamError::UnalignedRegion { .. }));
    }
    let error = refuse(&[(0, 3 * MIB)], Backing::Hugetlb2M);
    assert!(matches!(error, RamError::UnalignedRegion { unit_bytes: 0x20_0000, .. }));
    for regions in [[(0, 8192), (4096, 8192)], [(8192, 4096), (0, 4096)]] {
        assert!(matches!(refuse(&regions, Backing::Memfd), RamError::OverlappingRegion { .. }));
    }
    let wrapping = refuse(&[(0xffff_ffff_ffff_f000, 8192)], Backing::Memfd);
    assert!(matches!(wrapping, RamError::OverlappingRegion { .. }));
    assert!(matches!(refuse(&[(0, 1 << 60)], Backing::Anonymous), RamError::Map { .. }));
}

#[test]
fn a_handle_to_the_memory_outlives_it_safely() {
    let ram = ram(Backing::Anonymous).unwrap();
    fill(&ram, 0, MIB);
    let handle = ram.memory().clone();
    drop(ram);
    assert_eq!(handle.read_obj::<u8>(GuestAddress(0)).unwrap(), 0xa5);
}

#[test]
fn memory_without_handles_is_unmapped() {
    let ram = ram(Backing::Memfd).unwrap();
    let inode = rustix::fs::fstat(ram.mappings[1].file().unwrap()).unwrap().st_ino.to_string();
    let is_mapped = || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines()
            .any(|line| line.contains("ebb-guest-ram") && line.split(' ').any(|word| word == inode))
    };
    assert!(is_mapped());
    drop(ram);
    assert!(!is_mapped());
}

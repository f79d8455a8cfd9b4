use super::*;
use std::sync::MutexGuard;

use rustix::fs::{Advice as FileAdvice, fadvise};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::overlay::FileExtents;
use crate::pagemap::{is_in_memory, mincore};
use crate::{ImageError, Populate, Residency};
use vm_memory::{Bytes, GuestAddress};

const PAGE: u64 = PAGE_SIZE_BYTES;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const FILE_OFFSET: u64 = PAGE;

fn specs(size_bytes: u64, host_node: Option<u32>) -> [RegionSpec; 2] {
    [0, 4 * GIB].map(|start| RegionSpec { start: GuestAddress(start), size_bytes, host_node })
}

/// First byte of the page at `address`.
fn value(address: u64) -> u8 {
    (address / PAGE % 250) as u8 + 1
}

fn fill(ram: &GuestRam, addresses: impl Iterator<Item = u64>) {
    for address in addresses {
        ram.memory().write_obj(value(address), GuestAddress(address)).unwrap();
    }
}

fn read(ram: &GuestRam, address: u64) -> u8 {
    ram.memory().read_obj(GuestAddress(address)).unwrap()
}

fn all(ram: &GuestRam) -> Vec<GuestRange> {
    ram.regions().iter().map(crate::Region::pages).collect()
}

fn pages(address: u64, size_bytes: u64) -> GuestRange {
    GuestRange::inside_bytes(address, size_bytes).unwrap()
}

/// A file with the memory of two regions of `size_bytes`, whose pages at `addresses` contain data.
fn saved(size_bytes: u64, addresses: impl Iterator<Item = u64>) -> (File, RamImage) {
    let specs = specs(size_bytes, None);
    let ram = GuestRam::new(&specs, Backing::Anonymous, HugePages::Off, Populate::Lazy).unwrap();
    fill(&ram, addresses);
    let file = tempfile::tempfile().unwrap();
    let image = ram.save(&file, FILE_OFFSET, &mut |_| {}).unwrap();
    (file, image)
}

fn restore(file: &File, image: &RamImage) -> GuestRam {
    let specs = specs(image.regions()[0].size_bytes, None);
    GuestRam::restore(&specs, HugePages::Off, file.try_clone().unwrap(), FILE_OFFSET, image)
        .unwrap()
}

/// Memory of 2 x 8 MiB; all pages of the first region contain data.
fn first_region_full() -> (File, RamImage) {
    saved(8 * MIB, (0..8 * MIB).step_by(4096))
}

fn extents(ram: &GuestRam) -> MutexGuard<'_, FileExtents> {
    ram.lock_overlay().unwrap()
}

/// Lines of a file in /proc/self that are about guest memory: those that begin with a start address
/// in it.
fn lines_in_memory(ram: &GuestRam, path: &str) -> Vec<String> {
    let text = std::fs::read_to_string(path).unwrap();
    let is_inside = |line: &str| {
        let start =
            line.split(['-', ' ']).next().and_then(|word| u64::from_str_radix(word, 16).ok());
        ram.regions().iter().any(|region| {
            start.is_some_and(|start| {
                (region.host_address..region.host_address + region.size_bytes).contains(&start)
            })
        })
    };
    text.lines().filter(|line| is_inside(line)).map(str::to_owned).collect()
}

fn mappings(ram: &GuestRam) -> usize {
    lines_in_memory(ram, "/proc/self/maps").len()
}

#[test]
fn nothing_is_in_memory_before_it_is_touched() {
    let (file, image) = first_region_full();
    let ram = restore(&file, &image);
    assert!(ram.is_restored());
    assert_eq!(ram.backing(), Backing::Anonymous);
    assert_eq!(ram.file_backed_bytes(), 8 * MIB);
    assert_eq!(ram.residency().unwrap(), Residency::default());
    // Reading maps pages of the page cache, with their neighbours.
    assert_eq!(read(&ram, MIB), value(MIB));
    let Residency { private_bytes, file_bytes, .. } = ram.residency().unwrap();
    assert!(private_bytes == 0 && file_bytes >= PAGE, "{private_bytes} {file_bytes}");
    // Writing makes copies.
    fill(&ram, (2 * MIB..3 * MIB).step_by(4096));
    fill(&ram, [4 * GIB].into_iter());
    assert_eq!(ram.resident_bytes().unwrap(), MIB + PAGE);
    assert_eq!(ram.file_backed_bytes(), 8 * MIB);

    let new = GuestRam::new(&specs(MIB, None), Backing::Anonymous, HugePages::Off, Populate::Lazy)
        .unwrap();
    assert_eq!((new.is_restored(), new.file_backed_bytes()), (false, 0));
}

#[test]
fn the_working_set_is_what_was_accessed_and_not_discarded() {
    let (file, image) = first_region_full();
    let ram = restore(&file, &image);
    let blocks = |ram: &GuestRam| -> Vec<_> {
        let set = ram.working_set().unwrap();
        set.iter().map(|it| (it.offset_bytes / 65536, it.size_bytes / 65536)).collect()
    };
    assert_eq!(blocks(&ram), []);
    // Copies; and ordinary memory, which does not come from the file.
    fill(&ram, [MIB, MIB + 65536 + PAGE, 7 * MIB, 8 * MIB - PAGE, 4 * GIB].into_iter());
    assert_eq!(blocks(&ram), [(16, 2), (112, 1), (127, 1)]);
    ram.discard(&[pages(7 * MIB, PAGE)]).unwrap();
    assert_eq!(blocks(&ram), [(16, 2), (127, 1)]);
    // A page that is only read, with neighbours.
    assert_eq!(read(&ram, 3 * MIB), value(3 * MIB));
    let [(16, 2), (first, count), (127, 1)] = blocks(&ram)[..] else {
        panic!("{:?}", blocks(&ram));
    };
    assert!((first..first + count).contains(&48) && first >= 32 && first + count <= 64);
    // In the second region.
    let (file, image) = saved(8 * MIB, std::iter::once(4 * GIB + MIB));
    let ram = restore(&file, &image);
    assert_eq!(read(&ram, 4 * GIB + MIB), value(4 * GIB + MIB));
    assert_eq!(blocks(&ram), [(144, 1)]);

    let new = GuestRam::new(&specs(MIB, None), Backing::Anonymous, HugePages::Off, Populate::Lazy)
        .unwrap();
    assert!(matches!(new.working_set(), Err(WorkingSetError::NotRestored)));
}

/// Pages of a file in the page cache.
fn cached_pages(file: &File) -> usize {
    let size_bytes = file.metadata().unwrap().len() as usize;
    let address = std::ptr::null_mut();
    // SAFETY: a new mapping, which nothing refers to.
    let address = unsafe { mmap(address, size_bytes, ProtFlags::READ, MapFlags::SHARED, file, 0) };
    let address = address.unwrap();
    let mut states = vec![0; size_bytes / PAGE as usize];
    mincore(address as usize, &mut states).unwrap();
    // SAFETY: the mapping made above.
    unsafe { munmap(address, size_bytes) }.unwrap();
    states.into_iter().filter(|state| is_in_memory(*state)).count()
}

#[test]
fn what_is_read_ahead_is_in_the_page_cache_and_nothing_else() {
    // Not in /tmp, which may be in memory.
    let file = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &vec![1; 16 << 20], 0).unwrap();
    file.sync_all().unwrap();
    let drop_cache = || fadvise(&file, 0, None, FileAdvice::DontNeed).unwrap();
    drop_cache();
    assert_eq!(cached_pages(&file), 0, "this file system has no page cache");
    let part = |offset_bytes, size_bytes| Extent { offset_bytes, size_bytes };
    let extents = [part(12 * MIB, 3 * MIB), part(5 * MIB, 65536), part(6 * MIB, 0)];
    read_ahead(&file, MIB, &extents).unwrap();
    let pages = (3 * MIB + 65536) / PAGE;
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(30);
    while cached_pages(&file) < pages as usize && std::time::Instant::now() < deadline {
        std::thread::yield_now();
    }
    assert_eq!(cached_pages(&file), pages as usize);
    // Beyond the end of the file there is nothing to read.
    read_ahead(&file, MIB, &[part(64 * MIB, MIB)]).unwrap();
    assert_eq!(cached_pages(&file), pages as usize);
}

#[test]
fn machines_from_the_same_file_are_independent() {
    let (file, image) = first_region_full();
    let rams: Vec<_> = (0..4).map(|_| restore(&file, &image)).collect();
    for (index, ram) in rams.iter().enumerate() {
        ram.memory().write_obj(index as u8 + 251, GuestAddress(MIB)).unwrap();
        ram.discard(&[pages(2 * MIB + index as u64 * PAGE, PAGE)]).unwrap();
    }
    for (index, ram) in rams.iter().enumerate() {
        assert_eq!(read(ram, MIB), index as u8 + 251);
        for page in 0..4 {
            let address = 2 * MIB + page * PAGE;
            let expected = if page == index as u64 { 0 } else { value(address) };
            assert_eq!(read(ram, address), expected);
        }
    }
    image.verify(&file, FILE_OFFSET, &mut |_| {}).unwrap();
}

#[test]
fn a_discarded_page_never_shows_the_file_again() {
    let (file, image) = first_region_full();
    let ram = restore(&file, &image);
    fill(&ram, [MIB, MIB + PAGE].into_iter());
    // Clean pages, copies, both, and anonymous ones of the other region.
    let range = pages(MIB, 4 * PAGE);
    let outcome = ram.discard(&[range, pages(4 * GIB, PAGE)]).unwrap();
    assert_eq!((outcome.bytes, outcome.ranges, outcome.syscalls), (5 * PAGE, 2, 2));
    assert_eq!(outcome.deferred_bytes, 0);
    assert_eq!(ram.file_backed_bytes(), 8 * MIB - 4 * PAGE);
    assert_eq!(ram.resident_bytes().unwrap(), 0);
    for round in 0..2 {
        for page in 0..4 {
            assert_eq!(read(&ram, MIB + page * PAGE), 0, "round {round}");
        }
        fill(&ram, (MIB..MIB + 4 * PAGE).step_by(4096));
        // The second time it is an ordinary discard.
        assert_eq!(ram.discard(&[range]).unwrap().bytes, 4 * PAGE);
    }
    assert_eq!(read(&ram, MIB - PAGE), value(MIB - PAGE));
    assert_eq!(read(&ram, MIB + 4 * PAGE), value(MIB + 4 * PAGE));
}

#[test]
fn after_a_reboot_nothing_is_left_of_the_file() {
    let (file, image) = first_region_full();
    let ram = restore(&file, &image);
    ram.discard(&(0..100).map(|page| pages(page * 3 * PAGE, PAGE)).collect::<Vec<_>>()).unwrap();
    fill(&ram, (0..8 * MIB).step_by(8192));
    let outcome = ram.discard(&all(&ram)).unwrap();
    assert_eq!((outcome.bytes, outcome.deferred_bytes), (16 * MIB, 0));
    assert_eq!(ram.file_backed_bytes(), 0);
    assert_eq!(ram.residency().unwrap(), Residency::default());
    assert!((0..8 * MIB).step_by(4096).all(|address| read(&ram, address) == 0));
    assert_eq!(mappings(&ram), 2);
}

#[test]
fn pages_that_replace_those_of_the_file_have_the_policies_of_all_others() {
    let (file, image) = first_region_full();
    let specs = specs(8 * MIB, Some(0));
    let ram = GuestRam::restore(&specs, HugePages::On, file, FILE_OFFSET, &image).unwrap();
    let new = GuestRam::new(&specs, Backing::Anonymous, HugePages::On, Populate::Lazy).unwrap();
    ram.discard(&[pages(MIB, 2 * MIB)]).unwrap();
    let flags = |ram: &GuestRam, address: u64| -> Vec<String> {
        let text = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let address = ram.regions()[0].host_address + address;
        let start = format!("{address:x}-");
        let flags = text
            .lines()
            .skip_while(|line| !line.starts_with(&start))
            .find_map(|line| line.strip_prefix("VmFlags:"));
        flags.unwrap().split_ascii_whitespace().map(str::to_owned).collect()
    };
    assert_eq!(flags(&ram, MIB), flags(&new, 0));
    let of_file = flags(&ram, 3 * MIB);
    assert!(
        of_file.contains(&"dd".to_owned()) && of_file.contains(&"nr".to_owned()),
        "{of_file:?}"
    );
    assert!(!of_file.contains(&"hg".to_owned()), "{of_file:?}");
    let policies = lines_in_memory(&ram, "/proc/self/numa_maps");
    assert_eq!(policies.len(), 4, "{policies:?}");
    assert!(
        policies.iter().all(|line| line.split(' ').any(|word| word == "bind:0")),
        "{policies:?}"
    );
}

#[test]
fn every_other_page_does_not_exhaust_the_mappings() {
    let (file, image) = first_region_full();
    let ram = restore(&file, &image);
    extents(&ram).vmas.set_own_bound(114);
    let ranges: Vec<_> = (0..8 * MIB).step_by(8192).map(|address| pages(address, PAGE)).collect();
    let outcome = ram.discard(&ranges).unwrap();
    assert_eq!(outcome.bytes + outcome.deferred_bytes, 4 * MIB);
    assert!(outcome.bytes > 40 * PAGE && outcome.deferred_bytes > 3 * MIB, "{outcome:?}");
    assert!(mappings(&ram) <= 100);
    // Deferred pages are unchanged, the rest is zero.
    let zeros = (0..8 * MIB).step_by(4096).filter(|address| match read(&ram, *address) {
        0 => true,
        other => {
            assert_eq!(other, value(*address));
            false
        }
    });
    assert_eq!(zeros.count() as u64 * PAGE, outcome.bytes);
    // Whole huge pages are still discarded, and so is the whole memory at once.
    assert_eq!(ram.discard(&[pages(4 * MIB, 2 * MIB)]).unwrap().deferred_bytes, 0);
    assert_eq!(ram.discard(&all(&ram)).unwrap().bytes, 16 * MIB);
    assert_eq!(ram.file_backed_bytes(), 0);
}

#[test]
fn the_real_number_of_mappings_stays_within_the_count() {
    // Alternating extents, so that anonymous parts between them have private pages before they
    // meet.
    let (file, image) =
        saved(8 * MIB, (0..8 * MIB).step_by(4096).filter(|address| address / 65536 % 2 == 0));
    let ram = restore(&file, &image);
    assert_eq!(mappings(&ram) as u64, extents(&ram).vmas.count());
    fill(&ram, (0..8 * MIB).step_by(4096));
    // A fixed sequence of unordered places.
    let mut place = 1_u64;
    for _ in 0..300 {
        place = place * 48_271 % 0x7fff_ffff;
        let address = place % (8 * MIB) / PAGE * PAGE;
        let size_bytes = (place % 37 + 1) * PAGE;
        let range = pages(address, size_bytes.min(8 * MIB - address));
        ram.discard(&[range]).unwrap();
        fill(&ram, (address..range.end().address()).step_by(4096));
        let (real, counted) = (mappings(&ram) as u64, extents(&ram).vmas.count());
        assert!(real <= counted, "{real} mappings, {counted} counted");
    }
}

#[test]
fn a_search_for_zeros_skips_clean_pages_of_the_file() {
    let (file, image) = first_region_full();
    let ram = restore(&file, &image);
    let before = mappings(&ram);
    // In the page cache and mapped, but not private to this memory.
    assert!((0..8 * MIB).step_by(4096).all(|address| read(&ram, address) == value(address)));
    let scan = ram.discard_zeros(all(&ram)[0]).unwrap();
    assert_eq!((scan.scanned_bytes, scan.returned_bytes), (0, 0));
    assert_eq!(mappings(&ram), before);

    // Copies that are zero: a long run, a short one, and one with data at its end.
    let zero = |first: u64, count: u64| {
        ram.memory()
            .write_slice(&vec![0; (count * PAGE) as usize], GuestAddress(first * PAGE))
            .unwrap();
    };
    zero(10, 100);
    zero(200, 15);
    fill(&ram, [110 * PAGE].into_iter());
    let scan = ram.discard_zeros(all(&ram)[0]).unwrap();
    assert_eq!((scan.scanned_bytes, scan.returned_bytes), (116 * PAGE, 100 * PAGE));
    assert_eq!(ram.resident_bytes().unwrap(), 16 * PAGE);
    assert_eq!(mappings(&ram), before + 2);
    assert!((10..110).chain(200..215).all(|page| read(&ram, page * PAGE) == 0));
    assert_eq!(read(&ram, 110 * PAGE), value(110 * PAGE));
}

#[test]
fn restored_memory_is_not_saved_onto_its_source() {
    let (file, image) = first_region_full();
    let ram = restore(&file, &image);
    let error = ram.save(&file, FILE_OFFSET, &mut |_| {}).unwrap_err();
    assert!(matches!(error, RamError::SaveOntoSource), "{error}");
    image.verify(&file, FILE_OFFSET, &mut |_| {}).unwrap();
}

#[test]
fn a_source_that_was_cut_short_is_not_saved_as_zeros() {
    let (file, image) = first_region_full();
    let ram = restore(&file, &image);
    file.set_len(FILE_OFFSET + 4 * MIB).unwrap();
    let again = tempfile::tempfile().unwrap();
    let error = ram.save(&again, FILE_OFFSET, &mut |_| {}).unwrap_err();
    assert!(matches!(error, RamError::Image(ImageError::FileTooShort { .. })), "{error}");
    // Without pages of the file its length does not matter.
    ram.discard(&all(&ram)).unwrap();
    assert_eq!(ram.save(&again, FILE_OFFSET, &mut |_| {}).unwrap().data_bytes(), 0);
}

#[test]
fn saving_again_reads_the_file_and_maps_nothing() {
    let (file, image) = first_region_full();
    let ram = restore(&file, &image);
    let again = tempfile::tempfile().unwrap();
    assert_eq!(ram.save(&again, FILE_OFFSET, &mut |_| {}).unwrap(), image);
    assert_eq!(ram.residency().unwrap(), Residency::default());
}

#[test]
fn a_file_without_a_name_is_enough_and_no_mapping_of_it_outlives_the_memory() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ram-without-a-name");
    let (mut source, image) = first_region_full();
    std::io::Seek::rewind(&mut source).unwrap();
    std::io::copy(&mut source, &mut File::create(&path).unwrap()).unwrap();
    let ram = restore(&File::open(&path).unwrap(), &image);
    std::fs::remove_file(&path).unwrap();
    assert_eq!(read(&ram, 5 * PAGE), value(5 * PAGE));
    let is_mapped =
        || std::fs::read_to_string("/proc/self/maps").unwrap().contains("ram-without-a-name");
    assert!(is_mapped());
    drop(ram);
    assert!(!is_mapped());
}

#[test]
fn threads_discard_while_others_write() {
    let (file, image) = first_region_full();
    let ram = restore(&file, &image);
    std::thread::scope(|scope| {
        // Two that discard even blocks of 16 pages, in different sizes and from different ends,
        // each page twice.
        for backwards in [false, true] {
            let ram = &ram;
            scope.spawn(move || {
                for step in 0..64 {
                    let block = if backwards { 63 - step } else { step } * 2;
                    let block = pages(block * 16 * PAGE, 16 * PAGE);
                    let halves = [
                        GuestRange::new(block.start, 8),
                        GuestRange::new(Pfn(block.start.0 + 8), 8),
                    ];
                    ram.discard(if backwards { &halves } else { std::slice::from_ref(&block) })
                        .unwrap();
                }
            });
        }
        // One that writes to odd blocks, like a vCPU.
        scope.spawn(|| {
            for round in 0..4_u8 {
                for page in (0..2048).filter(|page| page / 16 % 2 == 1) {
                    ram.memory().write_obj(round, GuestAddress(page * PAGE + 8)).unwrap();
                }
            }
        });
    });
    for page in 0..2048 {
        let address = page * PAGE;
        let (expected, written) = if page / 16 % 2 == 1 { (value(address), 3) } else { (0, 0) };
        assert_eq!(read(&ram, address), expected);
        assert_eq!(read(&ram, address + 8), written);
    }
    assert_eq!(ram.file_backed_bytes(), 4 * MIB);
}

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use proptest::prelude::*;
use vm_memory::Bytes;

use super::*;
use crate::Populate;

const PAGE: u64 = PAGE_SIZE_BYTES;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const OFFSET: u64 = 2 * PAGE;

/// Memory of two regions, neither of which begins or ends at a multiple of 2 MiB.
fn ram_of(huge_pages: HugePages, sizes_bytes: [u64; 2]) -> GuestRam {
    let spec = |(start, size_bytes)| RegionSpec {
        start: GuestAddress(start),
        size_bytes,
        host_node: None,
    };
    let starts = [MIB + 4 * PAGE, 4 * GIB + 7 * PAGE];
    let specs: Vec<_> = starts.into_iter().zip(sizes_bytes).map(spec).collect();
    let ram = GuestRam::new(&specs, Backing::Anonymous, huge_pages, Populate::Lazy).unwrap();
    ram.enable_background_saves().unwrap();
    ram
}

fn ram(huge_pages: HugePages) -> GuestRam {
    ram_of(huge_pages, [9 * MIB + PAGE, 8 * MIB - 3 * PAGE])
}

/// Addresses of all pages.
fn pages(ram: &GuestRam) -> Vec<u64> {
    ram.page_ranges()
        .iter()
        .flat_map(|range| range.start.0..range.end().0)
        .map(|pfn| pfn * PAGE)
        .collect()
}

fn put(ram: &GuestRam, address: u64, value: u64) {
    ram.memory().write_obj(value, GuestAddress(address)).unwrap();
}

fn get(ram: &GuestRam, address: u64) -> u64 {
    ram.memory().read_obj(GuestAddress(address)).unwrap()
}

/// The memory part of a file.
fn content_of(file: &File, ram: &GuestRam) -> Vec<u8> {
    let mut content = vec![0; ram.size_bytes() as usize];
    file.read_exact_at(&mut content, OFFSET).unwrap();
    content
}

/// The first word of each page in a file.
fn words_of(file: &File, ram: &GuestRam) -> Vec<u64> {
    let content = content_of(file, ram);
    let pages = content.chunks_exact(PAGE as usize);
    pages.map(|page| u64::from_ne_bytes(page[..8].try_into().unwrap())).collect()
}

fn protect(ram: &GuestRam) -> BackgroundSave<'_> {
    ram.prepare_background_save().unwrap().protect().unwrap()
}

/// All pages can be written to, and discards work.
fn assert_released(ram: &GuestRam) {
    for address in pages(ram) {
        put(ram, address, 1);
    }
    assert!(ram.inhibit_reasons().is_empty());
    let all = ram.page_ranges();
    assert!(ram.discard(&all).unwrap().is_complete());
}

#[test]
fn idle_memory_gives_the_same_image_as_a_plain_save() {
    for huge_pages in [HugePages::Off, HugePages::On] {
        // The second region begins in the middle of a chunk, and in that of a block.
        let ram = ram_of(huge_pages, [63 * MIB + PAGE, 70 * MIB]);
        for (index, address) in pages(&ram).into_iter().enumerate() {
            match index % 7 {
                0..4 => put(&ram, address, index as u64 + 1),
                4 => put(&ram, address, 0),
                _ => {}
            }
        }
        let files = [tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap()];
        let plain = ram.save(&files[0], OFFSET, &mut |_| {}).unwrap();
        let mut done = Vec::new();
        let image =
            protect(&ram).write(&files[1], OFFSET, &mut |it| done.push(it), &|| false).unwrap();
        assert_eq!(image, plain, "{huge_pages:?}");
        assert!(content_of(&files[0], &ram) == content_of(&files[1], &ram));
        image.verify(&files[1], OFFSET, &mut |_| {}).unwrap();
        assert!(done.len() == 3 && done.is_sorted(), "{done:?}");
        assert_eq!(done.last(), Some(&ram.size_bytes()));
        assert_released(&ram);
    }
}

/// What a thread does to memory that is being saved.
#[derive(Clone, Copy, Debug)]
struct Scribbler {
    /// Whose turn each page is.
    first: usize,
    step: usize,
    /// A multiplier that makes the order of pages look random.
    stride: usize,
}

/// Saves memory to which `scribblers` write meanwhile. Returns the number of their writes.
fn save_under(ram: &GuestRam, file: &File, scribblers: &[Scribbler]) -> (RamImage, u64) {
    let addresses = pages(ram);
    let (stop, writes) = (AtomicBool::new(false), AtomicU64::new(0));
    let save = protect(ram);
    std::thread::scope(|scope| {
        for scribbler in scribblers {
            let (addresses, stop, writes) = (&addresses, &stop, &writes);
            scope.spawn(move || {
                let own: Vec<u64> = addresses
                    .iter()
                    .skip(scribbler.first)
                    .step_by(scribbler.step)
                    .copied()
                    .collect();
                for round in 1.. {
                    for index in 0..own.len() {
                        if stop.load(Ordering::Relaxed) {
                            return;
                        }
                        let address = own[index * scribbler.stride % own.len()];
                        let before = get(ram, address);
                        put(ram, address, before.wrapping_add(1_000_003 * round));
                        assert_eq!(get(ram, address), before.wrapping_add(1_000_003 * round));
                        writes.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
        let image = save.write(file, OFFSET, &mut |_| {}, &|| false);
        stop.store(true, Ordering::Relaxed);
        (image.unwrap(), writes.load(Ordering::Relaxed))
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn the_file_has_the_memory_of_the_moment(
        is_huge in prop::bool::ANY,
        density in 1..5_u64,
        stride in prop::sample::select(vec![1_usize, 613, 1009, 2003]),
        threads in 1..4_usize,
    ) {
        let ram = ram(if is_huge { HugePages::On } else { HugePages::Off });
        let addresses = pages(&ram);
        let mut expected = vec![0; addresses.len()];
        // With huge pages most are allocated because of their neighbours.
        for (index, address) in addresses.iter().enumerate() {
            if ((index as u64 * 2_654_435_761) >> 7).is_multiple_of(density) {
                expected[index] = index as u64 + 1;
                put(&ram, *address, expected[index]);
            }
        }
        let scribblers: Vec<_> =
            (0..threads).map(|first| Scribbler { first, step: threads, stride }).collect();
        let file = tempfile::tempfile().unwrap();
        let (image, _) = save_under(&ram, &file, &scribblers);
        prop_assert!(words_of(&file, &ram) == expected);
        image.verify(&file, OFFSET, &mut |_| {}).unwrap();
        let data_pages = expected.iter().filter(|word| **word != 0).count() as u64;
        prop_assert_eq!(image.data_bytes(), data_pages * PAGE);
        assert_released(&ram);
    }
}

#[test]
fn the_kernels_writes_wait_as_well() {
    for huge_pages in [HugePages::Off, HugePages::On] {
        let ram = ram(huge_pages);
        for address in pages(&ram) {
            put(&ram, address, address);
        }
        let zeros = File::open("/dev/zero").unwrap();
        let save = protect(&ram);
        let file = tempfile::tempfile().unwrap();
        let image = std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                for region in ram.regions() {
                    let mut done = 0;
                    while done < region.size_bytes {
                        // SAFETY: the range is a part of the region, to which no Rust reference
                        // exists.
                        let length = unsafe {
                            libc::read(
                                zeros.as_raw_fd(),
                                (region.host_address + done) as *mut _,
                                (region.size_bytes - done) as usize,
                            )
                        };
                        done += u64::try_from(length).unwrap();
                    }
                }
            });
            let image = save.write(&file, OFFSET, &mut |_| {}, &|| false).unwrap();
            reader.join().unwrap();
            image
        });
        assert!(words_of(&file, &ram) == pages(&ram));
        assert_eq!(image.data_bytes(), ram.size_bytes());
        assert!(pages(&ram).iter().all(|address| get(&ram, *address) == 0));
    }
}

#[test]
fn pages_that_arrive_later_are_zeros_in_the_file() {
    for huge_pages in [HugePages::Off, HugePages::On] {
        let ram = ram(huge_pages);
        let save = protect(&ram);
        // Nothing is populated, so no write waits.
        for address in pages(&ram) {
            put(&ram, address, 7);
        }
        let file = tempfile::tempfile().unwrap();
        let image = save.write(&file, OFFSET, &mut |_| {}, &|| false).unwrap();
        assert_eq!((image.data_bytes(), image.extents()), (0, &[][..]));
        assert!(pages(&ram).iter().all(|address| get(&ram, *address) == 7));
    }
}

#[test]
fn pages_of_zeros_that_were_read_wait_for_their_turn() {
    for huge_pages in [HugePages::Off, HugePages::On] {
        let ram = ram(huge_pages);
        assert!(pages(&ram).iter().all(|address| get(&ram, *address) == 0));
        let file = tempfile::tempfile().unwrap();
        let all = Scribbler { first: 0, step: 1, stride: 1 };
        let (image, _) = save_under(&ram, &file, &[all]);
        assert_eq!(image.data_bytes(), 0);
        assert_released(&ram);
    }
}

#[test]
fn pages_in_swap_space_are_saved() {
    let ram = ram(HugePages::Off);
    for address in pages(&ram) {
        put(&ram, address, address);
    }
    let page_out = || {
        for region in ram.regions() {
            let address = region.host_address as *mut _;
            // SAFETY: the range is the region's; paging out changes no content.
            unsafe {
                rustix::mm::madvise(
                    address,
                    region.size_bytes as usize,
                    rustix::mm::Advice::LinuxPageOut,
                )
            }
            .unwrap();
        }
    };
    page_out();
    let save = protect(&ram);
    page_out();
    let file = tempfile::tempfile().unwrap();
    let image = save.write(&file, OFFSET, &mut |_| {}, &|| false).unwrap();
    assert_eq!(image.data_bytes(), ram.size_bytes());
    assert!(words_of(&file, &ram) == pages(&ram));
}

#[test]
fn nothing_is_discarded_meanwhile() {
    let ram = ram(HugePages::On);
    for address in pages(&ram) {
        put(&ram, address, address);
    }
    let (all, stop) = (ram.page_ranges(), AtomicBool::new(false));
    let prepared = ram.prepare_background_save().unwrap();
    assert_eq!(ram.inhibit_reasons(), [InhibitReason::BackgroundSnapshot]);
    let save = prepared.protect().unwrap();
    let file = tempfile::tempfile().unwrap();
    std::thread::scope(|scope| {
        let discards = scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                let outcome = ram.discard_ballooned(&all).unwrap();
                assert_eq!((outcome.bytes, outcome.inhibited_bytes), (0, ram.size_bytes()));
                assert_eq!(ram.discard_zeros(all[0]).unwrap().returned_bytes, 0);
                std::thread::yield_now();
            }
        });
        // They must end before they are allowed again.
        let mut progress = |done| {
            if done == ram.size_bytes() {
                stop.store(true, Ordering::Relaxed);
                while !discards.is_finished() {
                    std::thread::yield_now();
                }
            }
        };
        save.write(&file, OFFSET, &mut progress, &|| false).unwrap();
        assert!(stop.load(Ordering::Relaxed));
    });
    assert!(words_of(&file, &ram) == pages(&ram));
    assert_released(&ram);
}

#[test]
fn a_cancelled_save_releases_everything() {
    let ram = ram(HugePages::On);
    for patience in 0..12_u32 {
        for address in pages(&ram) {
            put(&ram, address, address);
        }
        let save = protect(&ram);
        let file = tempfile::tempfile().unwrap();
        std::thread::scope(|scope| {
            let writers: Vec<_> = (0..3)
                .map(|first| {
                    let ram = &ram;
                    scope.spawn(move || {
                        for address in pages(ram).into_iter().rev().skip(first).step_by(3) {
                            put(ram, address, 5);
                        }
                    })
                })
                .collect();
            let asked = std::cell::Cell::new(0);
            let is_cancelled = || {
                asked.set(asked.get() + 1);
                asked.get() > patience
            };
            let result = save.write(&file, OFFSET, &mut |_| {}, &is_cancelled);
            assert!(matches!(result, Err(RamError::SaveCancelled)), "{patience}: {result:?}");
            assert_eq!(asked.get(), patience + 1, "nothing is done after the cancellation");
            for writer in writers {
                writer.join().unwrap();
            }
        });
        assert!(pages(&ram).iter().all(|address| get(&ram, *address) == 5));
        assert_released(&ram);
    }
}

#[test]
fn a_save_that_is_given_up_releases_everything() {
    let ram = ram(HugePages::Off);
    for address in pages(&ram) {
        put(&ram, address, 1);
    }
    drop(ram.prepare_background_save().unwrap());
    assert_released(&ram);
    for address in pages(&ram) {
        put(&ram, address, 1);
    }
    let save = protect(&ram);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| put(&ram, pages(&ram)[9], 2));
        // It waits by now, or will not have to.
        std::thread::sleep(std::time::Duration::from_millis(20));
        drop(save);
        writer.join().unwrap();
    });
    assert_eq!(get(&ram, pages(&ram)[9]), 2);
    assert_released(&ram);
}

#[test]
fn a_full_disk_releases_everything() {
    let ram = ram(HugePages::Off);
    for address in pages(&ram) {
        put(&ram, address, 1);
    }
    let save = protect(&ram);
    let file = File::options().read(true).write(true).open("/dev/full").unwrap();
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            for address in pages(&ram) {
                put(&ram, address, 2);
            }
        });
        let error = save.write(&file, OFFSET, &mut |_| {}, &|| false).unwrap_err();
        let RamError::DiskFull { written_bytes, needed_bytes, .. } = error else {
            panic!("{error:?}")
        };
        assert_eq!((written_bytes, needed_bytes), (0, ram.size_bytes()));
        writer.join().unwrap();
    });
    assert_released(&ram);
}

#[test]
fn a_file_that_cannot_be_read_is_reported_and_releases_everything() {
    let ram = ram(HugePages::Off);
    for address in pages(&ram) {
        put(&ram, address, 1);
    }
    let path = tempfile::NamedTempFile::new().unwrap();
    let write_only = File::options().write(true).open(path.path()).unwrap();
    let save = protect(&ram);
    std::thread::scope(|scope| {
        let last = *pages(&ram).last().unwrap();
        let writer = scope.spawn({
            let ram = &ram;
            move || put(ram, last, 2)
        });
        // The page is written early, whose content must be read back.
        let deadline = Instant::now() + std::time::Duration::from_millis(100);
        let wait = || {
            while Instant::now() < deadline {
                std::thread::yield_now();
            }
            false
        };
        let result = save.write(&write_only, OFFSET, &mut |_| {}, &wait);
        assert!(matches!(result, Err(RamError::ReadImage { .. })), "{result:?}");
        writer.join().unwrap();
    });
    assert_released(&ram);
}

#[test]
fn only_one_at_a_time() {
    let ram = ram(HugePages::Off);
    let first = ram.prepare_background_save().unwrap();
    let second = ram.prepare_background_save().err().unwrap();
    assert!(matches!(second, BackgroundUnavailable::InUse), "{second}");
    drop(first);
    drop(ram.prepare_background_save().unwrap());
}

#[test]
fn memory_that_cannot_be_protected_is_refused() {
    let spec = RegionSpec { start: GuestAddress(0), size_bytes: MIB, host_node: None };
    let new = |backing| GuestRam::new(&[spec], backing, HugePages::Off, Populate::Lazy).unwrap();
    let ram = new(Backing::Memfd);
    let refused = ram.enable_background_saves().unwrap_err();
    assert!(matches!(refused, BackgroundUnavailable::Backing { .. }), "{refused}");
    let refused = ram.prepare_background_save().err().unwrap();
    assert!(matches!(refused, BackgroundUnavailable::NotEnabled), "{refused}");

    let ram = new(Backing::Anonymous);
    put(&ram, 0, 1);
    let file = tempfile::tempfile().unwrap();
    let image = ram.save(&file, 0, &mut |_| {}).unwrap();
    let restored = GuestRam::restore(&[spec], HugePages::Off, file, 0, &image).unwrap();
    let refused = restored.enable_background_saves().unwrap_err();
    assert!(matches!(refused, BackgroundUnavailable::Overlay), "{refused}");
}

#[test]
fn blocks_are_aligned_pieces_of_a_region() {
    let block = Block { guest_address: 5, host_address: 105, offset_bytes: 50, size_bytes: 20 };
    let pieces: Vec<_> =
        block.pieces(8).map(|it| (it.guest_address, it.host_address, it.size_bytes)).collect();
    assert_eq!(pieces, [(5, 105, 3), (8, 108, 8), (16, 116, 8), (24, 124, 1)]);
    assert_eq!(block.pieces(8).last().unwrap().end_bytes(), 70);
}

/// As in a forked process: the device comes from elsewhere, and what there was before is replaced.
#[test]
fn a_device_that_another_process_has_opened_serves_as_well() {
    let ram = ram(HugePages::Off);
    for address in pages(&ram) {
        put(&ram, address, address);
    }
    for wrong in [File::open("/dev/null").unwrap(), tempfile::tempfile().unwrap()] {
        let error = ram.enable_background_saves_by(&wrong).unwrap_err();
        let BackgroundUnavailable::Userfaultfd(UffdUnavailable::Refused { .. }) = error else {
            panic!("{error}");
        };
    }
    let before = ram.protection_descriptor().unwrap();
    let device = File::options().read(true).write(true).open("/dev/userfaultfd").unwrap();
    ram.enable_background_saves_by(&device).unwrap();
    assert_ne!(ram.protection_descriptor().unwrap(), before);
    drop(device);
    let prepared = ram.prepare_background_save().unwrap();
    let in_use = ram.enable_background_saves().unwrap_err();
    assert!(matches!(in_use, BackgroundUnavailable::InUse), "{in_use}");
    let file = tempfile::tempfile().unwrap();
    let save = prepared.protect().unwrap();
    save.write(&file, OFFSET, &mut |_| {}, &|| false).unwrap();
    assert_eq!(words_of(&file, &ram), pages(&ram));
    assert_released(&ram);
}

//! The device over memory whose pages are merged.

use ebb_abi::Pfn;
use ebb_abi::balloon::QueueKind;
use ebb_balloon::testing::{Buffer, Guest, Setup};
use ebb_guest_ram::testing::TestMerger;
use ebb_guest_ram::{Backing, GuestRange, HugePages};
use vm_memory::{Bytes, GuestAddress};

const PAGE: u64 = 4096;
const MIB: u64 = 1 << 20;
/// First page of the part of memory that tests use, and the number of pages.
const FIRST: u32 = 512;
const PAGES: u64 = 2048;

fn all() -> GuestRange {
    GuestRange::new(Pfn::from(FIRST), PAGES)
}

fn value(page: u64) -> u8 {
    (page / 2 % 200) as u8 + 1
}

fn fill(guest: &Guest) {
    for page in all().start.0..all().end().0 {
        guest.write(page * PAGE, &[value(page); PAGE as usize]);
    }
}

/// A guest all of whose pages are merged, each with at least one other; `None` where merging is not
/// possible.
fn merged() -> Option<(Guest, TestMerger)> {
    let setup =
        Setup { backing: Backing::Anonymous, huge_pages: HugePages::Off, ..Setup::default() };
    let guest = Guest::new(setup);
    let mut merger = match TestMerger::new(&guest.ram) {
        Ok(merger) => merger,
        Err(error) => {
            println!("nothing is merged here: {error}");
            return None;
        }
    };
    fill(&guest);
    assert_eq!(merger.merge(all()).unwrap(), PAGES);
    Some((guest, merger))
}

/// Checks that exactly the pages of `gone` are zero.
fn check(guest: &Guest, gone: &[GuestRange]) {
    let mut content = [0; PAGE as usize];
    for page in all().start.0..all().end().0 {
        guest.ram.memory().read_slice(&mut content, GuestAddress(page * PAGE)).unwrap();
        let is_gone = gone.iter().any(|range| range.contains(Pfn(page)));
        let expected = if is_gone { 0 } else { value(page) };
        assert!(content.iter().all(|byte| *byte == expected), "page {page}");
    }
}

#[test]
fn inflated_pages_release_their_stable_pages_and_read_as_zeros() {
    let Some((mut guest, mut merger)) = merged() else { return };
    // Two of them have been written to since, with their former content.
    for page in [600, 601] {
        guest.write(page * PAGE, &[value(page); PAGE as usize]);
    }
    let _ = guest.inflate(FIRST..FIRST + 256);
    let _ = guest.inflate(FIRST + 1024..FIRST + 1040);
    guest.balloon.flush();
    let gone =
        [GuestRange::new(Pfn::from(FIRST), 256), GuestRange::new(Pfn::from(FIRST + 1024), 16)];
    check(&guest, &gone);
    let counters = guest.balloon.counters();
    assert_eq!((counters.discard.bytes, counters.discard.deferred_bytes), (272 * PAGE, 0));
    assert_eq!(merger.release(), PAGES - 272);
    assert_eq!(guest.ram.merged_bytes(), (PAGES - 272) * PAGE);

    // Used again, merged again, and inflated again.
    let _ = guest.deflate(FIRST..FIRST + 256);
    fill(&guest);
    merger.merge(all()).unwrap();
    check(&guest, &[]);
    let _ = guest.inflate(FIRST..FIRST + 256);
    guest.balloon.flush();
    check(&guest, &gone[..1]);
}

#[test]
fn reported_pages_read_as_zeros_before_the_buffer_is_given_back() {
    let Some((mut guest, mut merger)) = merged() else { return };
    let report =
        |address, size_bytes: u64| Buffer { address, length: size_bytes as u32, writable: true };
    // A huge page, and part of another one.
    let _ =
        guest.send(QueueKind::Reporting, &[report(4 * MIB, 2 * MIB), report(7 * MIB, 64 * PAGE)]);
    assert_eq!(guest.used(QueueKind::Reporting).len(), 1);
    check(&guest, &[GuestRange::new(Pfn(1024), 512), GuestRange::new(Pfn(1792), 64)]);
    assert_eq!(guest.balloon.counters().discard.bytes, (512 + 64) * PAGE);
    assert_eq!(merger.release(), PAGES - 512 - 64);
}

#[test]
fn the_device_continues_while_pages_are_merged() {
    let Some((mut guest, mut merger)) = merged() else { return };
    let over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let merging = scope.spawn(|| {
            // All of memory, so that buffers and rings of the driver are merged too.
            let everything = GuestRange::new(Pfn(0), FIRST.into());
            let mut merged = 0;
            while !over.load(std::sync::atomic::Ordering::Relaxed) {
                merged += merger.merge(all()).unwrap() + merger.merge(everything).unwrap();
            }
            merged
        });
        for round in 0..100_u32 {
            let first = FIRST + round * 37 % 1500;
            let _ = guest.inflate(first..first + 200);
            guest.balloon.flush();
            check(&guest, &[GuestRange::new(Pfn::from(first), 200)]);
            let _ = guest.deflate(first..first + 200);
            for page in u64::from(first)..u64::from(first) + 200 {
                guest.write(page * PAGE, &[value(page); PAGE as usize]);
            }
            // A failure of the other thread surfaces when it is joined.
            if merging.is_finished() {
                break;
            }
        }
        over.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(merging.join().unwrap() > 0);
    });
    check(&guest, &[]);
    assert_eq!(guest.balloon.counters().discard.bytes, 100 * 200 * PAGE);
}

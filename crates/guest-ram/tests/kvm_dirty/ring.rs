use ebb_guest_ram::kvm_dirty::{DirtyLogError, DirtyRing};

use crate::guest::{Guest, Stop, kvm, numbers};

/// More entries than a kernel reserves for pages that a processor logs by itself (64, and 512 with
/// page modification logging).
const ENTRIES: u32 = 1024;

/// Pages written to at a time, fewer than the minimum that the kernel reserves. Some KVMs emulate
/// several instructions before they check the ring again.
pub const AT_ONCE: u64 = 50;

/// A guest with rings; `None`, with a message, where they are missing.
pub fn guest() -> Option<(Guest, DirtyRing)> {
    let kvm = kvm()?;
    let mut ring = None;
    let guest = Guest::new(&kvm, |vm| match DirtyRing::enable(vm, ENTRIES) {
        Ok(found) => ring = Some(found),
        Err(error @ DirtyLogError::Missing { .. }) => eprintln!("skipped: {error}"),
        Err(error) => panic!("{error}"),
    });
    let ring = ring?;
    ring.add_vcpu(&guest.vcpu.borrow()).unwrap();
    Some((guest, ring))
}

pub fn start(guest: &Guest, ring: &DirtyRing) {
    // SAFETY: the guest has its memory in slots numbered by the regions' indexes, and drops its
    // machine before its memory.
    unsafe { ring.start(&guest.vm, &guest.ram) }.unwrap();
}

fn stop(guest: &Guest, ring: &DirtyRing) {
    // SAFETY: as above.
    unsafe { ring.stop(&guest.vm, &guest.ram) }.unwrap();
}

fn taken(guest: &Guest, ring: &DirtyRing) -> Vec<u64> {
    let mut pages = guest.no_pages();
    ring.take(&guest.vm, &mut pages).unwrap();
    numbers(&pages)
}

#[test]
fn writes_of_the_guest_while_the_log_is_on_are_found_once() {
    let Some((guest, ring)) = guest() else { return };
    assert_eq!(guest.write(10, 1, 5), Stop::Done);
    start(&guest, &ring);
    assert!(taken(&guest, &ring).is_empty());
    for (first, step, count) in [(12, 1, 3), (68, 1, 4), (4100, 64, 3), (6095, 1, 1)] {
        assert_eq!(guest.write(first, step, count), Stop::Done);
    }
    assert_eq!(taken(&guest, &ring), [12, 13, 14, 68, 69, 70, 71, 4100, 4164, 4228, 6095]);
    assert!(taken(&guest, &ring).is_empty());
    // The next write to a page is found again.
    assert_eq!(guest.write(13, 1, 1), Stop::Done);
    assert_eq!(taken(&guest, &ring), [13]);
    stop(&guest, &ring);
    assert_eq!(guest.write(12, 1, 5), Stop::Done);
    start(&guest, &ring);
    assert!(taken(&guest, &ring).is_empty());
    assert_eq!(guest.write(14, 1, 2), Stop::Done);
    assert_eq!(taken(&guest, &ring), [14, 15]);
}

#[test]
fn a_vcpu_whose_ring_is_full_continues_after_a_harvest() {
    let Some((guest, ring)) = guest() else { return };
    start(&guest, &ring);
    let mut stops = 0;
    for first in (4096..6096).step_by(AT_ONCE as usize) {
        let mut stop = guest.write(first, 1, AT_ONCE);
        while stop == Stop::RingFull {
            assert!(ring.harvest(&guest.vm).unwrap() > 0, "the ring is full of nothing");
            stops += 1;
            stop = guest.resume();
        }
    }
    // There are more pages than entries.
    assert!(stops >= 1);
    assert_eq!(taken(&guest, &ring), (4096..6096).collect::<Vec<u64>>());
}

#[test]
fn many_more_pages_than_entries_pass_through_a_ring() {
    let Some((guest, ring)) = guest() else { return };
    start(&guest, &ring);
    for round in 0..40 {
        let first = 4096 + round * 37;
        assert_eq!(guest.write(first, 2, 100), Stop::Done);
        let expected: Vec<u64> = (0..100).map(|index| first + 2 * index).collect();
        assert_eq!(taken(&guest, &ring), expected, "round {round}");
    }
}

#[test]
fn invalid_sizes_are_refused() {
    let Some(kvm) = kvm() else { return };
    let vm = kvm.create_vm().unwrap();
    for entries in [0, 128, 1000, 1 << 30] {
        match DirtyRing::enable(&vm, entries) {
            Err(DirtyLogError::RingSize { entries: asked, min_entries, max_entries }) => {
                assert!(asked == entries && min_entries <= max_entries);
            }
            Err(error @ DirtyLogError::Missing { .. }) => return eprintln!("skipped: {error}"),
            other => panic!("{other:?}"),
        }
    }
}

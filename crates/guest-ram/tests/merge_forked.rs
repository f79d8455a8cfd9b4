//! Merging in a process that shares pages with one that was forked. In a program of its own: the
//! other process would share the pages of all other tests, too.

#![allow(clippy::unwrap_used, reason = "a test")]

use std::sync::Arc;

use ebb_abi::{PAGE_SIZE_BYTES, Pfn};
use ebb_guest_ram::merge::{MergeFiles, MergeOutcome, MergeTarget, PageLook};
use ebb_guest_ram::{
    Backing, GuestRam, GuestRange, HugePages, MergeSession, MergeUnavailable, Populate, RegionSpec,
    StableMemory, StableSegments,
};
use vm_memory::{Bytes, GuestAddress};

const PAGES: u64 = 512;

fn fill(ram: &GuestRam, page: u64, byte: u8) {
    let content = [byte; PAGE_SIZE_BYTES as usize];
    ram.memory().write_slice(&content, GuestAddress(page * PAGE_SIZE_BYTES)).unwrap();
}

#[test]
fn only_pages_of_its_own_are_merged() {
    let spec =
        RegionSpec { start: GuestAddress(0), size_bytes: PAGES * PAGE_SIZE_BYTES, host_node: None };
    let ram = GuestRam::new(&[spec], Backing::Anonymous, HugePages::Off, Populate::Lazy).unwrap();
    (0..PAGES - 1).for_each(|page| fill(&ram, page, 3));
    // SAFETY: the new process only waits for its end.
    let other = unsafe { libc::fork() };
    if other == 0 {
        // SAFETY: it ends with this one.
        unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
        loop {
            // SAFETY: waits.
            unsafe { libc::pause() };
        }
    }
    (0..10).for_each(|page| fill(&ram, page, 7));
    let segments = StableSegments::new();
    let enabled = ram.enable_merging_in_fork(Arc::clone(&segments), MergeFiles::open());
    let end = || {
        // SAFETY: ends the process that was made above.
        unsafe { libc::kill(other, libc::SIGKILL) };
        // SAFETY: waits for it; its status is not asked for.
        unsafe { libc::waitpid(other, std::ptr::null_mut(), 0) };
    };
    if let Err(error @ MergeUnavailable::OldKernel { .. }) = &enabled {
        eprintln!("not tested: {error}");
        return end();
    }
    enabled.unwrap();
    let ram = Arc::new(ram);
    let mut session = MergeSession::new(Arc::clone(&ram)).unwrap();
    let mut look = || {
        let mut looks = Vec::new();
        session.look(GuestRange::new(Pfn(0), PAGES), &mut looks).unwrap();
        looks
    };
    let count = |looks: &[PageLook], kind| looks.iter().filter(|look| **look == kind).count();
    let looks = look();
    assert_eq!(count(&looks[..10], PageLook::Written), 10, "{looks:?}");
    assert_eq!(count(&looks[10..], PageLook::Excluded), 501, "{looks:?}");
    assert_eq!(looks[511], PageLook::Absent);
    assert_eq!(count(&look()[..10], PageLook::Clean), 10);
    end();
    // Now they are its own.
    let looks = look();
    assert_eq!(count(&looks[10..511], PageLook::Excluded), 0, "{looks:?}");

    let mut stable = StableMemory::own(segments);
    let mut slots = Vec::new();
    stable.allocate(None, 1, &mut slots).unwrap();
    stable.write(slots[0], &[7; PAGE_SIZE_BYTES as usize]).unwrap();
    let pages: Vec<_> = (0..10).map(|page| (Pfn(page), MergeTarget::Slot(slots[0]))).collect();
    let mut outcomes = Vec::new();
    session.replace(&pages, &mut outcomes).unwrap();
    assert_eq!(outcomes, [MergeOutcome::Done; 10]);
}

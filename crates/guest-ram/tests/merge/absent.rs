//! Memory that the host does not have need not be looked at.

use ebb_abi::{PAGE_SIZE_BYTES, Pfn};
use ebb_guest_ram::merge::{MergeOutcome, PageLook};
use ebb_guest_ram::{
    Backing, GuestRam, GuestRange, HugePages, MergeSession, Populate, RegionSpec, StableSegments,
};
use vm_memory::{Bytes, GuestAddress};

use crate::common::{PAGE, Setup, is_old_kernel, setup};

/// The first page with content from `start` on.
fn first(setup: &mut Setup, start: u64) -> Option<u64> {
    let range = GuestRange::new(Pfn(start), setup.ram.size_bytes() / PAGE_SIZE_BYTES - start);
    setup.session.first_with_content(range).unwrap().map(|page| page.0)
}

#[test]
fn the_first_page_with_content_is_found() {
    let Some(mut setup) = setup(4096, HugePages::Off) else { return };
    assert_eq!(first(&mut setup, 0), None);
    setup.fill(3000, 3);
    assert_eq!(first(&mut setup, 0), Some(3000));
    assert_eq!((first(&mut setup, 3000), first(&mut setup, 3001)), (Some(3000), None));
    // Pages that were only read are the page of zeros.
    assert!(setup.is_full_of(100, 0));
    assert_eq!(first(&mut setup, 0), Some(3000));
    // They can be written to afterwards.
    setup.fill(100, 1);
    assert_eq!(first(&mut setup, 0), Some(100));
}

#[test]
fn merged_pages_are_found_also_if_nothing_maps_them_at_present() {
    let Some(mut setup) = setup(4096, HugePages::Off) else { return };
    setup.fill(2000, 7);
    let slot = setup.publish(&[7])[0];
    setup.look(1536, 512);
    assert_eq!(setup.replace(&[(2000, slot)]), [MergeOutcome::Done]);
    let address = setup.address(2000) as *mut libc::c_void;
    // SAFETY: the page keeps its content, which is that of a file.
    assert_eq!(unsafe { libc::madvise(address, PAGE, libc::MADV_DONTNEED) }, 0);
    assert_eq!(first(&mut setup, 0), Some(2000));
    // Also as the first one of the range.
    assert_eq!(first(&mut setup, 2000), Some(2000));
    assert_eq!(setup.look(2000, 1), [PageLook::Merged]);
    setup.fill(2000, 8);
    assert_eq!(first(&mut setup, 0), Some(2000));
    assert_eq!(setup.look(2000, 1), [PageLook::Broken(slot)]);
}

#[test]
fn the_range_may_span_regions() {
    let spec = |start: u64| RegionSpec {
        start: GuestAddress(start * PAGE_SIZE_BYTES),
        size_bytes: 512 * PAGE_SIZE_BYTES,
        host_node: None,
    };
    let regions = [spec(0), spec(512), spec(4096)];
    let ram = GuestRam::new(&regions, Backing::Anonymous, HugePages::Off, Populate::Lazy).unwrap();
    let ram = std::sync::Arc::new(ram);
    match ram.enable_merging(StableSegments::new()) {
        Err(error) if is_old_kernel(&error) => return,
        result => result.unwrap(),
    }
    let mut session = MergeSession::new(std::sync::Arc::clone(&ram)).unwrap();
    let all = GuestRange::new(Pfn(0), 8192);
    assert_eq!(session.first_with_content(all).unwrap(), None);
    ram.memory().write_obj(1_u8, GuestAddress(4100 * PAGE_SIZE_BYTES)).unwrap();
    assert_eq!(session.first_with_content(all).unwrap(), Some(Pfn(4100)));
    ram.memory().write_obj(1_u8, GuestAddress(512 * PAGE_SIZE_BYTES)).unwrap();
    assert_eq!(session.first_with_content(all).unwrap(), Some(Pfn(512)));
}

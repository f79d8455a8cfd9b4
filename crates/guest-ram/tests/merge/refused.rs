//! Memory that cannot be merged, and processes without permission.

use std::process::Command;
use std::sync::Arc;

use ebb_guest_ram::{
    Backing, GuestRam, HugePages, MergeSession, MergeUnavailable, Populate, RegionSpec,
    StableSegments,
};
use vm_memory::{Bytes, GuestAddress};

use crate::common::{is_old_kernel, ram, setup};
use ebb_guest_ram::merge::PageLook;

#[test]
fn shared_and_hugetlb_memory_is_refused() {
    let spec = RegionSpec { start: GuestAddress(0), size_bytes: 2 << 20, host_node: None };
    let ram = GuestRam::new(&[spec], Backing::Memfd, HugePages::Off, Populate::Lazy).unwrap();
    let error = ram.enable_merging(StableSegments::new()).unwrap_err();
    assert!(matches!(error, MergeUnavailable::Backing { backing: Backing::Memfd }), "{error}");
    assert!(error.to_string().contains("shared with other processes"));
    // If the pool has pages.
    if let Ok(ram) = GuestRam::new(&[spec], Backing::Hugetlb2M, HugePages::Off, Populate::Lazy) {
        let error = ram.enable_merging(StableSegments::new()).unwrap_err();
        assert!(
            matches!(error, MergeUnavailable::Backing { backing: Backing::Hugetlb2M }),
            "{error}"
        );
    }
}

#[test]
fn locked_memory_is_refused() {
    let ram = ram(512, HugePages::Off);
    let address = ram.regions()[0].host_address as *mut std::ffi::c_void;
    // SAFETY: the page belongs to the memory; locking it changes no content.
    let locked = unsafe { rustix::mm::mlock(address, 4096) };
    if locked.is_err() {
        eprintln!("not tested: this process may not lock memory");
        return;
    }
    let error = ram.enable_merging(StableSegments::new()).unwrap_err();
    assert!(matches!(error, MergeUnavailable::Locked), "{error}");
}

#[test]
fn memory_that_is_locked_later_stays_unmerged() {
    let Some(mut setup) = setup(512, HugePages::Off) else { return };
    (0..4).for_each(|page| setup.fill(page, 7));
    let slot = setup.publish(&[7])[0];
    // SAFETY: as above.
    if unsafe { rustix::mm::mlock(setup.address(1) as *mut _, 4096) }.is_err() {
        return;
    }
    let pages: Vec<_> = (0..4).map(|page| (page, slot)).collect();
    let outcomes = setup.replace(&pages);
    assert_eq!(outcomes[1], ebb_guest_ram::merge::MergeOutcome::Gone);
    assert!(
        [0, 2, 3].iter().all(|page| outcomes[*page] == ebb_guest_ram::merge::MergeOutcome::Done)
    );
    assert!((0..4).all(|page| setup.is_full_of(page, 7)));
}

#[test]
fn restored_pages_are_excluded_until_they_are_replaced() {
    let first = ram(512, HugePages::Off);
    first.memory().write_slice(&[7; 4 * 4096], GuestAddress(0)).unwrap();
    let file = tempfile::tempfile().unwrap();
    let image = first.save(&file, 0, &mut |_| {}).unwrap();
    let spec = RegionSpec { start: GuestAddress(0), size_bytes: 512 * 4096, host_node: None };
    let ram = Arc::new(GuestRam::restore(&[spec], HugePages::Off, file, 0, &image).unwrap());
    let segments = StableSegments::new();
    match ram.enable_merging(Arc::clone(&segments)) {
        Err(error) if is_old_kernel(&error) => return,
        result => result.unwrap(),
    }
    let mut session = MergeSession::new(Arc::clone(&ram)).unwrap();
    ram.memory().write_slice(&[8; 4096], GuestAddress(4096)).unwrap();
    ram.memory().write_slice(&[8; 4096], GuestAddress(8 * 4096)).unwrap();
    let mut looks = Vec::new();
    let range = ebb_guest_ram::GuestRange::new(ebb_abi::Pfn(0), 9);
    session.look(range, &mut looks).unwrap();
    assert_eq!(looks[..4], [PageLook::Excluded; 4]);
    assert_eq!(looks[4..], [[PageLook::Absent; 4].as_slice(), &[PageLook::Written]].concat());
    // A discarded page is ordinary memory.
    ram.discard(&[ebb_guest_ram::GuestRange::new(ebb_abi::Pfn(1), 1)]).unwrap();
    ram.memory().write_slice(&[9; 4096], GuestAddress(4096)).unwrap();
    session.look(range, &mut looks).unwrap();
    assert_eq!(looks[..3], [PageLook::Excluded, PageLook::Written, PageLook::Excluded]);
}

#[test]
fn without_permission_the_error_says_what_is_missing() {
    let me = std::env::current_exe().unwrap();
    // A fork of this process would share all pages of concurrent tests with the child until they
    // are written to, and shared pages are not moved. Starting another program directly has no such
    // effect.
    let out = Command::new("setpriv")
        .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
        .arg(me)
        .args(["--exact", "refused::as_nobody", "--ignored", "--nocapture"])
        .output();
    let out = match out {
        Ok(out) => out,
        Err(error) => {
            eprintln!("not tested: setpriv: {error}");
            return;
        }
    };
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(
        out.status.success() && text.contains("answer: "),
        "{text}{}",
        String::from_utf8_lossy(&out.stderr)
    );
    assert!(
        text.contains("no permission for userfaultfd") || text.contains("needs Linux"),
        "{text}"
    );
}

/// Run as nobody by the previous test.
#[test]
#[ignore = "for without_permission_the_error_says_what_is_missing"]
fn as_nobody() {
    println!(
        "answer: {}",
        ram(512, HugePages::Off).enable_merging(StableSegments::new()).unwrap_err()
    );
}

#[test]
fn merging_is_enabled_once() {
    let Some(setup) = setup(512, HugePages::Off) else { return };
    let again = setup.ram.enable_merging(StableSegments::new());
    assert!(matches!(again, Err(MergeUnavailable::Enabled)));
    assert!(matches!(
        MergeSession::new(Arc::new(ram(512, HugePages::Off))),
        Err(MergeUnavailable::NotEnabled)
    ));
}

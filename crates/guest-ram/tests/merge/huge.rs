//! Transparent huge pages.

use ebb_abi::Pfn;
use ebb_guest_ram::merge::{MergeOutcome, PageLook};
use ebb_guest_ram::{GuestRange, HugePages};

use crate::common::{Setup, mappings_of, setup};

/// Memory of four blocks whose second one is a huge page full of sevens.
fn with_huge_page() -> Option<Setup> {
    let setup = setup(2048, HugePages::On)?;
    (512..1024).for_each(|page| setup.fill(page, 7));
    if huge_kib(&setup) == 0 {
        eprintln!("not tested: the host gives no huge pages");
        return None;
    }
    Some(setup)
}

/// Huge pages of guest memory, as listed in smaps.
fn huge_kib(setup: &Setup) -> u64 {
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let (start, end) = (setup.address(0), setup.address(0) + setup.ram.size_bytes() as usize);
    let mut inside = false;
    let mut sum = 0;
    for line in smaps.lines() {
        let bounds = line.split_once(' ').and_then(|(bounds, _)| bounds.split_once('-'));
        if let Some((from, _)) = bounds {
            let from = usize::from_str_radix(from, 16).unwrap_or(0);
            inside = (start..end).contains(&from);
        } else if let Some(kib) = line.strip_prefix("AnonHugePages:").filter(|_| inside) {
            sum += kib.trim().trim_end_matches(" kB").parse::<u64>().unwrap();
        }
    }
    sum
}

#[test]
fn scanning_does_not_split_a_huge_page_even_if_it_is_written_to() {
    let Some(mut setup) = with_huge_page() else { return };
    for round in 0..40_u8 {
        assert_eq!(setup.look(512, 512), [PageLook::Huge; 512]);
        // Sometimes it is cold for long, and sometimes not.
        if !(10..30).contains(&round) {
            setup.fill(600, round);
        }
    }
    assert_eq!(huge_kib(&setup), 2048);
}

#[test]
fn a_huge_page_is_split_on_request() {
    let Some(mut setup) = with_huge_page() else { return };
    let slot = setup.publish(&[7])[0];
    setup.look(512, 512);
    let pages: Vec<_> = (512..640).map(|page| (page, slot)).collect();
    assert_eq!(setup.replace(&pages), [MergeOutcome::Done; 128]);
    assert_eq!(huge_kib(&setup), 0);
    assert_eq!(setup.ram.resident_bytes().unwrap(), (512 - 128) * 4096);
    assert!((512..1024).all(|page| setup.is_full_of(page, 7)));
    // The whole page, with another content in one small page.
    let Some(mut setup) = with_huge_page() else { return };
    let slot = setup.publish(&[7])[0];
    setup.fill(700, 9);
    let pages: Vec<_> = (512..1024).map(|page| (page, slot)).collect();
    let outcomes = setup.replace(&pages);
    assert!((0..512).all(|page| (outcomes[page] == MergeOutcome::Done) == (page != 700 - 512)));
    assert!(setup.is_full_of(700, 9) && setup.is_full_of(701, 7));
    assert_eq!(setup.ram.resident_bytes().unwrap(), 4096);
}

#[test]
fn a_different_huge_page_is_moved_back_whole() {
    let Some(mut setup) = with_huge_page() else { return };
    let slot = setup.publish(&[8])[0];
    let pages: Vec<_> = (512..1024).map(|page| (page, slot)).collect();
    assert_eq!(setup.replace(&pages), [MergeOutcome::Different; 512]);
    assert!((512..1024).all(|page| setup.is_full_of(page, 7)));
}

/// Merges and unmerges pages of the huge page, so that it is split into several mappings.
fn split(setup: &mut Setup) {
    let slots = setup.publish(&[7, 7, 7]);
    setup.look(512, 512);
    let pages: Vec<_> = [600, 700, 800].into_iter().zip(slots).collect();
    assert_eq!(setup.replace(&pages), [MergeOutcome::Done; 3]);
    setup.session.unmerge(GuestRange::new(Pfn(512), 512), &mut Vec::new()).unwrap();
    assert_eq!(huge_kib(setup), 0);
    assert!(mappings_of(setup) > 3);
}

fn collapse(setup: &mut Setup) -> bool {
    setup.session.collapse(GuestRange::new(Pfn(512), 512)).unwrap()
}

/// Retries: another test may have created a child process, which shares the pages until it ends.
fn collapse_soon(setup: &mut Setup) -> bool {
    (0..200).any(|_| {
        std::thread::sleep(std::time::Duration::from_millis(5));
        collapse(setup)
    })
}

#[test]
fn what_was_split_becomes_huge_again() {
    let Some(mut setup) = with_huge_page() else { return };
    split(&mut setup);
    // Tracked, which the kernel alone would respect.
    setup.look(512, 512);
    // One of the looks may put the mappings together, after which their pages count as written to.
    assert!((0..2).any(|_| setup.look(512, 512) == [PageLook::Clean; 512]));
    assert!(collapse_soon(&mut setup));
    assert_eq!(huge_kib(&setup), 2048);
    assert!(mappings_of(&setup) <= 3, "the block is one mapping, between two others");
    assert!((512..1024).all(|page| setup.is_full_of(page, 7)));
    setup.fill(600, 8);
    assert_eq!(setup.look(512, 512), [PageLook::Huge; 512]);
    assert!(setup.is_full_of(600, 8) && huge_kib(&setup) == 2048);
}

#[test]
fn what_is_merged_or_to_be_small_does_not_become_huge() {
    let Some(mut setup) = with_huge_page() else { return };
    let slots = setup.publish(&[7]);
    assert_eq!(setup.replace(&[(600, slots[0])]), [MergeOutcome::Done]);
    assert!(!collapse(&mut setup));
    assert_eq!(setup.look(600, 1), [PageLook::Merged]);
    // Only a whole block can be huge.
    assert!(!setup.session.collapse(GuestRange::new(Pfn(0), 100)).unwrap());
    let Some(mut small) = setup_of_small_pages() else { return };
    assert!(!collapse(&mut small));
}

fn setup_of_small_pages() -> Option<Setup> {
    let setup = setup(1024, HugePages::Off)?;
    (512..1024).for_each(|page| setup.fill(page, 7));
    Some(setup)
}

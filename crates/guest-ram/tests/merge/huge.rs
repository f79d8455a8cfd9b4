//! Transparent huge pages.

use ebb_guest_ram::HugePages;
use ebb_guest_ram::merge::{MergeOutcome, PageLook};

use crate::common::{Setup, setup};

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
    for round in 0..8_u8 {
        assert_eq!(setup.look(512, 512), [PageLook::HugeWritten; 512]);
        setup.fill(600, round);
        // All of it, or the sample may miss the change.
        (512..520).for_each(|page| setup.fill(page, round));
    }
    assert_eq!(huge_kib(&setup), 2048);
}

#[test]
fn a_cold_huge_page_is_clean_and_stays_whole() {
    let Some(mut setup) = with_huge_page() else { return };
    let looks: Vec<PageLook> = (0..5).map(|_| setup.look(512, 512)[17]).collect();
    assert_eq!(looks.last(), Some(&PageLook::HugeClean), "{looks:?}");
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

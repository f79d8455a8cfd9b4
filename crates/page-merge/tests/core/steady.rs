//! Cost of merging: hashes, index, memory.

use ebb_abi::{PageRange, Pfn};
use ebb_page_merge::{Merger, Run, Secret, Settings, StablePages, testing::World};

use crate::support::{Host, eager};

/// Pages without writes are hashed once.
#[test]
fn clean_pages_are_hashed_once() {
    let mut host = Host::new(eager());
    let guest = host.guest(2000);
    // Unique pages, duplicates, zeros.
    (0..1000).for_each(|pfn| guest.write(pfn, 10_000 + pfn));
    (1000..1900).for_each(|pfn| guest.write(pfn, 1 + pfn % 30));
    (1900..2000).for_each(|pfn| guest.write(pfn, 0));
    host.passes(1);
    assert_eq!(host.world.hashed_pages(), 0, "hashed before it was found unchanged");
    host.passes(1);
    assert_eq!(host.world.hashed_pages(), 2000);
    let before = host.merger.statistics();
    assert_eq!((before.pages_shared, before.pages_sharing, before.pages_unshared), (30, 870, 1000));
    host.passes(50);
    assert_eq!(host.world.hashed_pages(), 2000);
    let after = host.merger.statistics();
    assert_eq!(after.hashed_pages, 2000);
    assert_eq!(after.clean_pages - before.clean_pages, 50 * 1900);
    assert_eq!(after.replaced_done, before.replaced_done);
}

/// By default a page must be found unchanged twice.
#[test]
fn clean_passes_are_waited_for() {
    for clean_passes in 1..5 {
        let mut host = Host::new(Settings { clean_passes, ..eager() });
        let guest = host.guest(10);
        (0..10).for_each(|pfn| guest.write(pfn, 1));
        host.passes(u64::from(clean_passes));
        assert_eq!(host.world.hashed_pages(), 0);
        host.passes(1);
        assert_eq!((host.world.hashed_pages(), host.merger.statistics().merged_pages), (10, 10));
        assert_eq!(host.merger.statistics().pages_skipped, 0);
    }
}

/// A page that is written to each time after it has been merged is merged less and less often.
#[test]
fn pages_that_break_repeatedly_are_merged_less_often() {
    // Also if its owner needs some scans to make it mergeable again.
    for copied_looks in [0, 1, 5] {
        check_pauses(copied_looks);
    }
}

fn check_pauses(copied_looks: u8) {
    let mut host = Host::new(Settings { smart_scan: true, ..eager() });
    let guest = host.guest(2);
    guest.keep_copies(copied_looks);
    let (mut merges, mut merged) = (Vec::new(), false);
    for pass in 0..400 {
        if merged {
            (0..2).for_each(|pfn| guest.write(pfn, pass));
        } else if pass == 0 {
            (0..2).for_each(|pfn| guest.write(pfn, 1000));
        }
        host.passes(1);
        let now = guest.slot(0).is_some();
        if now && !merged {
            merges.push(pass);
        }
        merged = now;
        if merged {
            (0..2).for_each(|pfn| guest.write(pfn, 2000 + pass));
        }
    }
    let pauses: Vec<u64> = merges.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(pauses.len() > 5 && pauses[0] < 10 + u64::from(copied_looks), "{pauses:?}");
    assert!(pauses[4..].iter().all(|&pause| pause >= 32), "{pauses:?}");
}

/// A page that is written to in every pass is never hashed.
#[test]
fn busy_pages_are_never_hashed() {
    let mut host = Host::new(eager());
    let guest = host.guest(100);
    for round in 0..20 {
        (0..100).for_each(|pfn| guest.write(pfn, round));
        host.passes(1);
    }
    assert_eq!(host.world.hashed_pages(), 0);
    assert_eq!(host.counts(), (0, 0, 100, 0));
}

/// Memory without content costs next to nothing.
#[test]
fn absent_memory_has_no_records() {
    let mut host = Host::new(eager());
    let guest = host.guest(100_000);
    host.passes(3);
    assert!(host.merger.statistics().metadata_bytes < 100_000 / 5);
    guest.write(70_000, 1);
    host.passes(3);
    assert!(host.merger.statistics().metadata_bytes < 100_000 / 5 + 5000);
}

/// Metadata of a million pages, with `copies` pages of each content, in bytes per page.
fn metadata_of(copies: u64) -> f64 {
    const PAGES: u64 = 1 << 20;
    let world = World::new();
    let guest = world.guest(&[PageRange::new(Pfn(0), PAGES)]);
    (0..PAGES).for_each(|pfn| guest.write(pfn, 1 + pfn / copies));
    let settings = Settings { run: Run::Merge, most_copies: 1, ..Settings::default() };
    let store = StablePages::new(world.slots(0));
    let mut merger = Merger::new(guest.memory(), store, Secret([1; 32]), settings).unwrap();
    for _ in 0..3 {
        while !merger.scan(1 << 18).finished_pass {
            let statistics = merger.statistics();
            assert!(statistics.metadata_bytes <= 16 * PAGES, "{statistics:?}");
        }
    }
    let statistics = merger.statistics();
    assert_eq!(statistics.pages_unshared + statistics.merged_pages, PAGES);
    assert_eq!(statistics.pages_shared, if copies > 1 { PAGES / copies } else { 0 });
    statistics.metadata_bytes as f64 / PAGES as f64
}

#[test]
fn unique_pages_take_at_most_16_bytes_each() {
    let bytes = metadata_of(1);
    assert!((12.0..=16.0).contains(&bytes), "{bytes}");
}

/// Pairs are the worst: a stable page for every two.
#[test]
fn pairs_take_at_most_16_bytes_per_page() {
    let bytes = metadata_of(2);
    assert!((12.0..=16.0).contains(&bytes), "{bytes}");
}

#[test]
fn many_copies_take_less() {
    let bytes = metadata_of(64);
    assert!((8.0..=9.5).contains(&bytes), "{bytes}");
}

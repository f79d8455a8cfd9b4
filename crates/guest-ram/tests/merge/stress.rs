//! No write is lost while pages are merged.

use ebb_guest_ram::HugePages;
use ebb_guest_ram::merge::stress::{Freeze, Report, Stress, StressError, run};

use crate::common::is_old_kernel;

fn report(stress: &Stress) -> Option<Report> {
    match run(stress) {
        Err(StressError::Unavailable(error)) if is_old_kernel(&error) => None,
        result => Some(result.unwrap()),
    }
}

const STRESS: Stress = Stress {
    pages: 4096,
    writers: 2,
    writes: 1_000_000,
    freeze: Freeze::Yes,
    huge_pages: HugePages::Off,
};

#[test]
fn no_write_to_continuously_merged_pages_is_lost() {
    let Some(report) = report(&STRESS) else { return };
    println!("{report:?}");
    assert_eq!(report.lost, 0, "{report:?}");
    assert!(report.merged > 1000 && report.zeros > 100 && report.different > 100, "{report:?}");
    assert!(
        report.brought_back > 1000 && report.remerged > 100 && report.joined > 100,
        "{report:?}"
    );
}

#[test]
fn the_same_with_huge_pages() {
    let Some(report) = report(&Stress { huge_pages: HugePages::On, ..STRESS }) else { return };
    println!("{report:?}");
    assert_eq!(report.lost, 0, "{report:?}");
    assert!(report.merged > 1000 && report.zeros > 100, "{report:?}");
}

#[test]
fn without_a_freeze_writes_are_lost() {
    // Repeated until it happens, which it does thousands of times a minute.
    for _ in 0..20 {
        let Some(report) = report(&Stress { freeze: Freeze::No, ..STRESS }) else { return };
        println!("{report:?}");
        if report.lost > 0 {
            return;
        }
    }
    panic!("a merge without a freeze has lost no write, so this test would not detect one");
}

#[test]
fn without_protection_writes_to_reanonymized_pages_are_lost() {
    for _ in 0..20 {
        let Some(report) = report(&Stress { freeze: Freeze::NotWhenBroughtBack, ..STRESS }) else {
            return;
        };
        println!("{report:?}");
        if report.lost > 0 {
            return;
        }
    }
    panic!(
        "pages were reanonymized without protection, and no write was lost: this test would not \
         detect one"
    );
}

//! Migrations that succeed.

use ebb_migration::testing::Activity;
use ebb_migration::{AutoConverge, Config, HintRounds, Holes, PageCounters, Phase, ZeroPages};
use proptest::prelude::*;

use crate::move_it::{Hints, REGIONS, Trial};

fn config() -> impl Strategy<Value = Config> {
    let chunk_pages = prop_oneof![1..9_u64, Just(64), Just(512)];
    let probe_pages = prop_oneof![Just(0), 1..80_u64];
    (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>(), chunk_pages, probe_pages).prop_map(
        |(zeros, holes, every, converge, chunk_pages, probe_pages)| Config {
            probe_pages,
            zero_pages: if zeros { ZeroPages::Detect } else { ZeroPages::Send },
            holes: if holes { Holes::Skip } else { Holes::Read },
            hint_rounds: if every { HintRounds::Every } else { HintRounds::First },
            auto_converge: if converge { AutoConverge::On } else { AutoConverge::Off },
            chunk_pages,
            ..Trial::default().config
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn every_page_in_use_arrives(
        seed: u64,
        config in config(),
        streams in 1..4_usize,
        steps in 0..3000_u64,
        burst in 1..6_u64,
        asked: bool,
    ) {
        let activity = Activity { steps, burst, cancel_after: None };
        let hints = if asked { Hints::Asked } else { Hints::Off };
        let outcome = Trial { seed, config, activity, streams, hints, cut: None }.run();
        let report = outcome.sent.as_ref().unwrap();
        let received = outcome.received.as_ref().unwrap();
        outcome.check_moved();
        prop_assert_eq!(report.bytes_sent, received.bytes_received);
        prop_assert_eq!(report.rounds, received.rounds);
        prop_assert_eq!(report.rounds as usize, report.rounds_detail.len());
        for round in &report.rounds_detail {
            let pages = round.pages;
            let sent_or_skipped = pages.data + pages.zero + pages.discarded + pages.skipped;
            // The first round may only have measured the link.
            let probed = asked && config.probe_pages > 0 && round.round == 0;
            prop_assert!(sent_or_skipped == round.pages_to_send || probed, "round {}", round.round);
            let most = config.probe_pages + config.chunk_pages;
            prop_assert!(!probed || pages.skipped == 0 && sent_or_skipped < most);
            prop_assert!(asked || pages.skipped == 0);
        }
        let sent_or_received = |pages: PageCounters| (pages.data, pages.zero, pages.discarded);
        prop_assert_eq!(sent_or_received(report.pages), sent_or_received(received.pages));
    }
}

#[test]
fn an_idle_guest_is_sent_once() {
    let trial =
        Trial { activity: Activity { steps: 0, burst: 1, cancel_after: None }, ..Trial::default() };
    let outcome = trial.run();
    let report = outcome.sent.as_ref().unwrap();
    let pages: u64 = REGIONS.iter().map(|region| region.pages).sum();
    assert_eq!(report.rounds, 2);
    assert_eq!(report.rounds_detail[0].pages_to_send, pages);
    assert_eq!(report.rounds_detail[1].pages_to_send, 0);
    assert_eq!(report.memory_bytes, pages * 4096);
    assert_eq!(outcome.target.held_pages(), report.pages.data);
    let phases: Vec<_> = outcome.progress.iter().map(|step| step.phase).collect();
    for phase in [
        Phase::Arming,
        Phase::Hints,
        Phase::Sending,
        Phase::Acknowledging,
        Phase::Final,
        Phase::Sent,
    ] {
        assert!(phases.contains(&phase), "{phase:?} in {phases:?}");
    }
}

/// A page that is discarded at the source after it was sent uses no memory at the destination.
#[test]
fn pages_discarded_at_the_source_are_discarded_at_the_destination() {
    let mut discarded_later = 0;
    for seed in 0..20 {
        let activity = Activity { steps: 2000, burst: 6, cancel_after: None };
        let outcome = Trial { seed, activity, hints: Hints::Off, ..Trial::default() }.run();
        let report = outcome.sent.as_ref().unwrap();
        outcome.check_moved();
        discarded_later +=
            report.rounds_detail[1..].iter().map(|round| round.pages.discarded).sum::<u64>();
        assert!(outcome.target.held_pages() <= outcome.hooks.world().held_pages());
    }
    assert!(discarded_later > 0);
}

/// The link is measured with a part of memory, and hints are requested afterwards.
#[test]
fn hints_are_requested_after_the_link_is_measured() {
    let config = Config { probe_pages: 32, ..Trial::default().config };
    let activity = Activity { steps: 2000, burst: 6, cancel_after: None };
    let outcome = Trial { config, activity, ..Trial::default() }.run();
    let rounds = &outcome.sent.as_ref().unwrap().rounds_detail;
    let sent = |pages: PageCounters| pages.data + pages.zero + pages.discarded;
    assert_eq!((sent(rounds[0].pages), rounds[0].pages.skipped), (32, 0));
    assert!(rounds[1].pages.skipped > 0);
    outcome.check_moved();
}

/// Hints save pages, and some of those pages are used again and sent anyway.
#[test]
fn hinted_pages_are_skipped() {
    let mut skipped = 0;
    for seed in 0..20 {
        let activity = Activity { steps: 2000, burst: 6, cancel_after: None };
        let outcome = Trial { seed, activity, ..Trial::default() }.run();
        skipped += outcome.sent.as_ref().unwrap().pages.skipped;
        outcome.check_moved();
    }
    assert!(skipped > 20, "{skipped}");
}

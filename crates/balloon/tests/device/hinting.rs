//! Free page hinting.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use ebb_abi::PageRange;
use ebb_abi::balloon::{Config, Feature, Features, HintCommand, QueueKind};
use ebb_balloon::testing::{Buffer, Guest};
use ebb_balloon::{BalloonError, GuestError, HintEnd, HintPhase, HintSink};

const MIB: u64 = 1 << 20;

/// Calls received by a sink.
#[derive(Clone, Debug, Default)]
pub(crate) struct Log(Arc<Mutex<(Vec<PageRange>, Vec<HintEnd>)>>);

impl HintSink for Log {
    fn hint(&mut self, ranges: &[PageRange]) {
        self.0.lock().unwrap().0.extend(ranges);
    }

    fn ended(&mut self, end: HintEnd) {
        self.0.lock().unwrap().1.push(end);
    }
}

impl Log {
    pub(crate) fn hinted_pages(&self) -> u64 {
        self.0.lock().unwrap().0.iter().map(|range| range.pages).sum()
    }

    pub(crate) fn hinted(&self) -> BTreeSet<u64> {
        let ranges = &self.0.lock().unwrap().0;
        ranges.iter().flat_map(|range| range.start.0..range.end().0).collect()
    }

    pub(crate) fn ends(&self) -> Vec<HintEnd> {
        self.0.lock().unwrap().1.clone()
    }
}

fn command(guest: &Guest) -> u32 {
    let mut bytes = [0; Config::SIZE_BYTES];
    guest.balloon.read_config(0, &mut bytes);
    Config::from_bytes(bytes).free_page_hint_command_id.get()
}

fn start(guest: &mut Guest) -> Log {
    let log = Log::default();
    guest.balloon.start_hinting(Box::new(log.clone())).unwrap();
    log
}

fn send_id(guest: &mut Guest, id: u32) {
    let buffer = guest.buffer(&id.to_le_bytes());
    let _ = guest.send(QueueKind::FreePageHint, &[buffer]);
}

fn send_hint(guest: &mut Guest, address: u64, size_bytes: u64) {
    let hint = Buffer { address, length: size_bytes as u32, writable: true };
    let _ = guest.send(QueueKind::FreePageHint, &[hint]);
}

#[test]
fn a_whole_round() {
    let mut guest = Guest::with_all_features();
    guest.mark(guest.low_pages());
    assert_eq!(command(&guest), 0);
    let log = start(&mut guest);
    let id = command(&guest);
    assert!(id >= HintCommand::FIRST_START_ID);
    assert_eq!(guest.balloon.hint_phase(), HintPhase::Requested);

    send_id(&mut guest, id);
    assert_eq!(guest.balloon.hint_phase(), HintPhase::Running);
    send_hint(&mut guest, 4 * MIB, 4 * MIB);
    send_hint(&mut guest, 15 * MIB, 4 * MIB);
    send_id(&mut guest, HintCommand::STOP_ID);
    assert_eq!(guest.balloon.hint_phase(), HintPhase::Stopped);
    assert_eq!((log.hinted_pages(), log.ends()), (1024 + 256, vec![HintEnd::Complete]));
    assert_eq!(guest.used(QueueKind::FreePageHint).len(), 4);

    assert!(guest.balloon.finish_hinting());
    assert_eq!(
        (command(&guest), guest.balloon.hint_phase()),
        (HintCommand::DONE_ID, HintPhase::Idle)
    );
    assert!(!guest.balloon.finish_hinting());
    assert_eq!(log.ends().len(), 1);
    // A hint is not a permission to discard.
    assert!(guest.unmarked(guest.low_pages()).is_empty());
    assert_eq!(guest.balloon.counters().discard.bytes, 0);
}

#[test]
fn hints_of_another_command_are_ignored() {
    let mut guest = Guest::with_all_features();
    send_hint(&mut guest, 4 * MIB, MIB);
    let first = start(&mut guest);
    let first_id = command(&guest);
    send_hint(&mut guest, 4 * MIB, MIB);
    guest.balloon.finish_hinting();
    let second = start(&mut guest);
    assert_ne!(command(&guest), first_id);
    // The driver has only just seen the first command.
    send_id(&mut guest, first_id);
    send_hint(&mut guest, 4 * MIB, MIB);
    send_id(&mut guest, HintCommand::STOP_ID);
    assert_eq!(guest.balloon.hint_phase(), HintPhase::Requested);
    let id = command(&guest);
    send_id(&mut guest, id);
    send_hint(&mut guest, 4 * MIB, MIB);
    assert_eq!((first.hinted_pages(), second.hinted_pages()), (0, 256));
    assert_eq!(first.ends(), [HintEnd::Cancelled]);
    assert_eq!(guest.balloon.counters().errors.get(GuestError::StaleHint), 4);
    assert_eq!(guest.used(QueueKind::FreePageHint).len(), 7);
}

#[test]
fn stopping_ends_hints_and_keeps_the_pages_aside() {
    let mut guest = Guest::with_all_features();
    let log = start(&mut guest);
    let id = command(&guest);
    send_id(&mut guest, id);
    assert!(guest.balloon.stop_hinting());
    assert_eq!(
        (command(&guest), guest.balloon.hint_phase()),
        (HintCommand::STOP_ID, HintPhase::Stopped)
    );
    assert!(!guest.balloon.stop_hinting());
    send_hint(&mut guest, 4 * MIB, MIB);
    assert_eq!((log.hinted_pages(), log.ends()), (0, vec![HintEnd::Cancelled]));
    assert!(guest.balloon.finish_hinting());
    assert_eq!(command(&guest), HintCommand::DONE_ID);
}

#[test]
fn numbers_are_not_reused() {
    let mut guest = Guest::with_all_features();
    let ids: Vec<u32> = (0..5)
        .map(|_| {
            start(&mut guest);
            guest.balloon.finish_hinting();
            start(&mut guest);
            let id = command(&guest);
            guest.balloon.finish_hinting();
            id
        })
        .collect();
    assert!(ids.is_sorted_by(|first, second| first < second));
    guest.balloon.reset();
    guest.activate();
    start(&mut guest);
    assert!(!ids.contains(&command(&guest)));
}

#[test]
fn hinting_needs_the_feature_and_one_user() {
    let mut guest = Guest::with_features(Features::ALL_BALLOON.without(Feature::FreePageHint));
    let refused = guest.balloon.start_hinting(Box::new(Log::default()));
    assert_eq!(refused, Err(BalloonError::NotNegotiated { feature: "FREE_PAGE_HINT" }));
    let mut guest = Guest::with_all_features();
    start(&mut guest);
    assert_eq!(
        guest.balloon.start_hinting(Box::new(Log::default())),
        Err(BalloonError::HintingActive)
    );
}

#[test]
fn a_reset_is_reported_to_the_sink() {
    let mut guest = Guest::with_all_features();
    let log = start(&mut guest);
    let id = command(&guest);
    send_id(&mut guest, id);
    guest.balloon.reset();
    assert_eq!(log.ends(), [HintEnd::Reset]);
    assert_eq!((command(&guest), guest.balloon.hint_phase()), (0, HintPhase::Idle));
}

#[test]
fn a_broken_command_number_is_ignored() {
    let mut guest = Guest::with_all_features();
    start(&mut guest);
    let short = guest.buffer(&[2, 0]);
    let _ = guest.send(QueueKind::FreePageHint, &[short]);
    assert_eq!(guest.balloon.counters().errors.get(GuestError::PartialEntry), 1);
    assert_eq!(guest.balloon.hint_phase(), HintPhase::Requested);
    assert_eq!(guest.used(QueueKind::FreePageHint).len(), 1);
}

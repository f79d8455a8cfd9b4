//! Statistics.

use std::time::{Duration, Instant};

use ebb_abi::balloon::{Feature, Features, QueueKind, StatisticsEntry, StatisticsTag};
use ebb_balloon::testing::Guest;
use ebb_balloon::{GuestError, StatisticsBuffer};

/// The driver sends entries; returns the head of its chain.
fn send(guest: &mut Guest, entries: &[(u16, u64)]) {
    let bytes: Vec<u8> = entries
        .iter()
        .flat_map(|(tag, value)| StatisticsEntry { tag: *tag, value: *value }.to_bytes())
        .collect();
    let buffer = guest.buffer(&bytes);
    let _ = guest.send(QueueKind::Statistics, &[buffer]);
}

#[test]
fn the_buffer_is_held_until_newer_values_are_requested() {
    let mut guest = Guest::with_all_features();
    assert_eq!(guest.balloon.statistics_buffer(), StatisticsBuffer::WithDriver);
    assert!(!guest.balloon.request_statistics());

    send(&mut guest, &[(4, 400), (5, 500)]);
    assert_eq!(guest.balloon.statistics_buffer(), StatisticsBuffer::WithDevice);
    assert!(guest.used(QueueKind::Statistics).is_empty());
    let statistics = guest.balloon.statistics();
    assert_eq!(
        (statistics.values.free_memory_bytes, statistics.values.total_memory_bytes),
        (Some(400), Some(500))
    );
    assert_eq!((statistics.values.swap_in_bytes, statistics.updates), (None, 1));
    assert!(statistics.age_ms.is_some());

    assert!(guest.balloon.request_statistics());
    assert_eq!(guest.used(QueueKind::Statistics).len(), 1);
    // A guest that does not answer is not asked twice.
    assert!(!guest.balloon.request_statistics());
    assert_eq!(guest.balloon.statistics_buffer(), StatisticsBuffer::WithDriver);

    // Values that the driver omits this time are unknown, and not the former ones.
    send(&mut guest, &[(5, 501)]);
    let statistics = guest.balloon.statistics();
    assert_eq!(
        (
            statistics.values.free_memory_bytes,
            statistics.values.total_memory_bytes,
            statistics.updates
        ),
        (None, Some(501), 2)
    );
}

#[test]
fn every_tag_has_its_field_and_unknown_ones_are_skipped() {
    let mut guest = Guest::with_all_features();
    let mut entries: Vec<(u16, u64)> = StatisticsTag::ALL
        .iter()
        .rev()
        .map(|tag| (tag.number(), 1000 + u64::from(tag.number())))
        .collect();
    entries.insert(3, (16, 1));
    entries.insert(9, (u16::MAX, 2));
    send(&mut guest, &entries);
    let json = serde_json::to_value(guest.balloon.statistics()).unwrap();
    for tag in StatisticsTag::ALL {
        assert_eq!(json[tag.name()], 1000 + u64::from(tag.number()), "{}", tag.name());
    }
    assert_eq!(guest.balloon.counters().errors.total(), 0);
}

#[test]
fn absent_values_are_null() {
    let guest = Guest::with_all_features();
    let json = serde_json::to_value(guest.balloon.statistics()).unwrap();
    assert!(json["age_ms"].is_null() && json["oom_kills"].is_null());
}

#[test]
fn an_incomplete_entry_is_ignored() {
    let mut guest = Guest::with_all_features();
    let mut bytes = StatisticsEntry { tag: 4, value: 7 }.to_bytes().to_vec();
    bytes.extend([5, 0, 1]);
    let buffer = guest.buffer(&bytes);
    let _ = guest.send(QueueKind::Statistics, &[buffer]);
    let statistics = guest.balloon.statistics();
    assert_eq!(
        (statistics.values.free_memory_bytes, statistics.values.total_memory_bytes),
        (Some(7), None)
    );
    assert_eq!(guest.balloon.counters().errors.get(GuestError::PartialEntry), 1);
}

#[test]
fn a_second_buffer_returns_the_first_one() {
    let mut guest = Guest::with_all_features();
    send(&mut guest, &[(4, 1)]);
    send(&mut guest, &[(4, 2)]);
    assert_eq!(guest.used(QueueKind::Statistics), [0]);
    assert_eq!(guest.balloon.statistics().values.free_memory_bytes, Some(2));
    assert_eq!(guest.balloon.counters().errors.get(GuestError::ExtraStatistics), 1);
    assert!(guest.balloon.request_statistics());
    assert_eq!(guest.used(QueueKind::Statistics), [1]);
}

#[test]
fn the_interval_asks_again_when_it_has_passed() {
    let mut guest = Guest::with_all_features();
    let start = Instant::now();
    let second = Duration::from_secs(1);
    assert_eq!(guest.balloon.poll_statistics(start).next, None);
    guest.balloon.set_statistics_interval(Some(second));
    send(&mut guest, &[(4, 1)]);

    let poll = guest.balloon.poll_statistics(start);
    assert!(poll.interrupt && poll.next == Some(start + second));
    send(&mut guest, &[(4, 2)]);
    let poll = guest.balloon.poll_statistics(start + second / 2);
    assert!(!poll.interrupt && poll.next == Some(start + second));
    assert!(guest.balloon.poll_statistics(start + second).interrupt);
    // The guest is busy: the device does not have the buffer.
    assert!(!guest.balloon.poll_statistics(start + 2 * second).interrupt);

    guest.balloon.set_statistics_interval(Some(Duration::ZERO));
    assert_eq!(guest.balloon.statistics_interval(), None);
    assert_eq!(guest.balloon.poll_statistics(start + 9 * second).next, None);
}

#[test]
fn without_the_feature_there_is_no_buffer() {
    let mut guest = Guest::with_features(Features::ALL_BALLOON.without(Feature::StatisticsQueue));
    assert_eq!(guest.balloon.statistics_buffer(), StatisticsBuffer::Absent);
    assert!(!guest.balloon.request_statistics());
}

#[test]
fn a_reset_drops_the_buffer_and_the_values() {
    let mut guest = Guest::with_all_features();
    send(&mut guest, &[(4, 1)]);
    guest.balloon.reset();
    assert_eq!(guest.balloon.statistics_buffer(), StatisticsBuffer::Absent);
    assert_eq!(guest.balloon.statistics().values.free_memory_bytes, None);
    assert!(!guest.balloon.request_statistics());
    guest.activate();
    assert!(!guest.balloon.request_statistics());
    assert!(guest.used(QueueKind::Statistics).is_empty());
    send(&mut guest, &[(4, 3)]);
    assert_eq!(guest.balloon.statistics().values.free_memory_bytes, Some(3));
}

//! Migrations that fail: the guest continues at the source, and both ends report why.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use ebb_abi::PAGE_SIZE_BYTES;
use ebb_abi::migration::{HEADER_BYTES, Record, RoundKind};
use ebb_migration::testing::{Activity, Cut, TestTarget};
use ebb_migration::{Cancel, MigrationError, ReceiveError, Receiver};
use proptest::prelude::*;

use crate::move_it::{REGIONS, Trial};

/// A deterministic migration.
fn trial() -> Trial {
    Trial {
        seed: 7,
        activity: Activity { steps: 400, burst: 1, cancel_after: None },
        ..Trial::default()
    }
}

/// All bytes that the trial sends, recorded by a receiver without memory.
fn stream() -> Vec<u8> {
    use ebb_migration::testing::{Hooks, Link, SimDirty, SimGuest, SimHints, SimMemory, link};
    let (trial, cancel) = (trial(), Cancel::new());
    let hooks = Hooks::new(&REGIONS, trial.seed, trial.activity, &cancel);
    let Link { send, mut receive, mut rounds, mut confirm } =
        link(1, None, &cancel, &cancel).unwrap();
    std::thread::scope(|scope| {
        let listener = scope.spawn(move || {
            let mut bytes = Vec::new();
            let mut parsed = 0;
            for round in 0_u32.. {
                let kind = record_round(&mut receive[0], &mut bytes, &mut parsed);
                confirm.write_all(&round.to_le_bytes()).unwrap();
                if kind == RoundKind::Last {
                    break;
                }
            }
            bytes
        });
        let precopy = ebb_migration::Precopy {
            config: trial.config,
            memory: &SimMemory(hooks.clone()),
            dirty: &mut SimDirty(hooks.clone()),
            guest: &mut SimGuest(hooks.clone()),
            free_pages: Some(&mut SimHints(hooks.clone())),
            streams: send.into_iter().map(|wire| Box::new(wire) as Box<dyn Write + Send>).collect(),
            round_sync: &mut rounds,
            observer: &mut |_| {},
            cancel,
        };
        precopy.run().unwrap().complete();
        listener.join().unwrap()
    })
}

/// Appends the bytes up to the end of a round.
fn record_round(stream: &mut UnixStream, bytes: &mut Vec<u8>, parsed: &mut usize) -> RoundKind {
    loop {
        let more = |stream: &mut UnixStream, bytes: &mut Vec<u8>, count: usize| {
            let start = bytes.len();
            bytes.resize(start + count, 0);
            stream.read_exact(&mut bytes[start..]).unwrap();
        };
        more(stream, bytes, HEADER_BYTES);
        let record = record_at(bytes, *parsed);
        let rest = rest_bytes(record);
        more(stream, bytes, rest);
        *parsed += HEADER_BYTES + rest;
        if let Record::EndOfRound { kind, .. } = record {
            return kind;
        }
    }
}

fn record_at(bytes: &[u8], at: usize) -> Record {
    Record::from_bytes(bytes[at..at + HEADER_BYTES].try_into().unwrap()).unwrap()
}

/// Size of the data after a record's header.
fn rest_bytes(record: Record) -> usize {
    match record {
        Record::Data(range) => range.size_bytes() as usize,
        Record::EndOfRound { .. } => 16,
        _ => 0,
    }
}

/// Positions at which a stream can be cut, the first few of each kind of record.
fn cuts(bytes: &[u8]) -> Vec<u64> {
    let mut cuts = Vec::new();
    let mut seen = [0; 5];
    let mut at = 0;
    while at < bytes.len() {
        let record = record_at(bytes, at);
        let kind = bytes[at] as usize - 1;
        seen[kind] += 1;
        let rest = rest_bytes(record);
        if seen[kind] <= 2 {
            // Each byte of the header and of an end; the edges and the middle of content.
            cuts.extend((0..=HEADER_BYTES).map(|byte| (at + byte) as u64));
            let content = at + HEADER_BYTES;
            let page = PAGE_SIZE_BYTES as usize;
            let inside = [1, 7, 8, 9, 15, page / 2, page - 1, page, page + 1];
            cuts.extend(
                inside
                    .into_iter()
                    .filter(|inside| *inside < rest)
                    .map(|inside| (content + inside) as u64),
            );
        }
        at += HEADER_BYTES + rest;
    }
    assert!(seen.iter().all(|count| *count > 0), "a kind of record is missing: {seen:?}");
    cuts.sort_unstable();
    cuts.dedup();
    cuts.retain(|cut| *cut < bytes.len() as u64);
    cuts
}

#[test]
fn a_cut_anywhere_is_an_error_at_both_ends() {
    let bytes = stream();
    for after_bytes in cuts(&bytes) {
        let cut = Some(Cut { stream: 0, after_bytes });
        let outcome = Trial { cut, ..trial() }.run();
        let failure = outcome.sent.as_ref().unwrap_err();
        assert!(
            matches!(
                failure.error,
                MigrationError::Stream { .. } | MigrationError::NotConfirmed { .. }
            ),
            "cut at {after_bytes}: {failure}"
        );
        let error = outcome.received.as_ref().unwrap_err();
        assert!(
            matches!(error, ReceiveError::CutShort { .. } | ReceiveError::Stream { .. }),
            "cut at {after_bytes}: {error}"
        );
        outcome.check_whole();
    }
}

#[test]
fn a_cut_of_one_of_several_streams_ends_all() {
    for stream in 0..3 {
        for after_bytes in [0, 1, 5000, 40_000] {
            let cut = Some(Cut { stream, after_bytes });
            let outcome = Trial { cut, streams: 3, ..trial() }.run();
            // A stream that never reached that position is not cut.
            assert_eq!(outcome.sent.is_ok(), outcome.received.is_ok());
            assert!(outcome.sent.is_err() || after_bytes >= 5000);
            outcome.check_whole();
        }
    }
}

/// Feeds bytes to a receiver.
fn receive(bytes: &[u8]) -> Result<(), ReceiveError> {
    let target = TestTarget::new(&REGIONS);
    let receiver = Receiver {
        memory: &target,
        streams: vec![Box::new(bytes)],
        round_done: &mut |_| Ok(()),
        cancel: Cancel::new(),
    };
    receiver.run().map(|_| ())
}

#[test]
fn a_changed_byte_anywhere_is_refused() {
    let bytes = stream();
    receive(&bytes).unwrap();
    let mut places = cuts(&bytes);
    // And at regular positions.
    places.extend((0..bytes.len() as u64).step_by(1009));
    for place in places {
        let mut changed = bytes.clone();
        changed[place as usize] ^= 0x10;
        let error = receive(&changed).unwrap_err();
        assert!(
            matches!(error, ReceiveError::Malformed { .. } | ReceiveError::CutShort { .. }),
            "byte {place}: {error}"
        );
    }
}

#[test]
fn garbage_is_refused_with_its_description() {
    let error = receive(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap_err();
    assert_eq!(
        error.to_string(),
        "stream 0 of the source is damaged or hostile: a record of unknown kind 542393671"
    );
    assert!(matches!(receive(&[]), Err(ReceiveError::CutShort { stream: 0, round: 0 })));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn a_failed_migration_leaves_the_guest_unharmed(
        seed: u64,
        steps in 0..1500_u64,
        cancel_after in 0..1500_u64,
        streams in 1..4_usize,
    ) {
        let activity = Activity { steps, burst: 3, cancel_after: Some(cancel_after) };
        let outcome = Trial { seed, activity, streams, ..Trial::default() }.run();
        if let Err(failure) = &outcome.sent {
            prop_assert!(matches!(failure.error, MigrationError::Cancelled), "{}", failure);
            prop_assert!(cancel_after < steps);
        }
        outcome.check_whole();
    }
}

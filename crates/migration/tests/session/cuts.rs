//! Failures of the control connection at every message, in every manner: the side that runs the
//! guest always follows the rule.

use std::time::Duration;

use ebb_migration::session::{Security, SessionError, TimeLimits};

use crate::certificates::{Authority, Validity, tls};
use crate::drive::{self, DestinationEnd, SourceEnd};
use crate::proxy::{Direction, Fault, Manner, Place, Proxy};

/// The control messages of a session, in their order: direction, and number in that direction.
const MESSAGES: [(Direction, usize, &str); 9] = [
    (Direction::ToDestination, 0, "hello"),
    (Direction::ToSource, 0, "hello"),
    (Direction::ToDestination, 1, "setup"),
    (Direction::ToSource, 1, "accept"),
    (Direction::ToSource, 2, "round done"),
    (Direction::ToDestination, 2, "state"),
    (Direction::ToSource, 3, "ready"),
    (Direction::ToDestination, 3, "commit"),
    (Direction::ToSource, 4, "running"),
];
const READY: usize = 6;
const COMMIT: usize = 7;
const RUNNING: usize = 8;

/// Short where a wait must end at its time limit, long where it must not.
fn limits(manner: Manner) -> TimeLimits {
    match manner {
        // A destination without a decision gives up well before its source stops waiting.
        Manner::Stall => TimeLimits {
            running: Duration::from_secs(5),
            farewell: Duration::from_millis(500),
            ..TimeLimits::all(Duration::from_millis(1500))
        },
        Manner::End | Manner::Reset => TimeLimits::all(Duration::from_secs(20)),
    }
}

fn migrate(
    fault: Fault,
    security: &Security,
    at_destination: &Security,
) -> (SourceEnd, DestinationEnd, usize) {
    let limits = limits(fault.manner);
    // A source that never connects is waited for less long than one that does.
    let connects = match fault.place {
        Place::Before(0) | Place::Inside(0) => fault.direction == Direction::ToSource,
        Place::Byte(byte) => byte > 1000,
        _ => true,
    };
    let limit = if connects { Duration::from_secs(20) } else { Duration::from_millis(500) };
    let listener = drive::listen(&drive::loopback(), at_destination, &limits);
    let proxy = Proxy::new(listener.address(), fault);
    let destination = std::thread::spawn(move || drive::destination_within(listener, limit));
    let source = drive::source(&proxy.address, security, &limits);
    (source, destination.join().unwrap(), proxy.bytes_of_source())
}

fn name(end: &SourceEnd) -> &'static str {
    match end {
        SourceEnd::Moved => "moved",
        SourceEnd::RunsOn(_) => "continues",
        SourceEnd::Unknown(_) => "unknown",
    }
}

/// Possible ends of a source, and whether the guest runs at the destination, if the message with
/// this index in [`MESSAGES`] is the last that is delivered, or the first that is not.
fn expected(message: usize, delivered: bool, manner: Manner) -> (&'static [&'static str], bool) {
    let runs = message > COMMIT || (message == COMMIT && delivered);
    let source: &[_] = match (message, delivered, manner) {
        (RUNNING, true, _) => &["moved"],
        // The decision is stuck; the destination reports its failure in time.
        (COMMIT, false, Manner::Stall) => &["continues"],
        // The reset may happen before or after the decision is written.
        (READY, true, Manner::Reset) => &["continues", "unknown"],
        (READY, true, _) | (COMMIT | RUNNING, ..) => &["unknown"],
        _ => &["continues"],
    };
    (source, runs)
}

fn check(message: usize, place: Place, delivered: bool, manner: Manner) {
    let (direction, _, what) = MESSAGES[message];
    let fault = Fault { direction, place, manner };
    let (source, destination, _) = migrate(fault, &Security::Insecure, &Security::Insecure);
    let (allowed, runs) = expected(message, delivered, manner);
    let seen = format!("{what}, {fault:?}: source {source:?}, destination {destination:?}");
    assert!(allowed.contains(&name(&source)), "{seen}; expected {allowed:?}");
    assert_eq!(matches!(destination, DestinationEnd::Runs), runs, "{seen}");
    // Both errors name the other side.
    for error in [
        match &source {
            SourceEnd::RunsOn(error) | SourceEnd::Unknown(error) => Some(error),
            SourceEnd::Moved => None,
        },
        match &destination {
            DestinationEnd::Ends(error) => Some(error),
            DestinationEnd::Runs => None,
        },
    ]
    .into_iter()
    .flatten()
    {
        let text = error.to_string();
        let system = matches!(error, SessionError::System { .. } | SessionError::NobodyCame { .. });
        assert!(system || text.contains("tcp:127.0.0.1:"), "{text}");
    }
}

/// Place of a fault for a message's index, and whether that message is delivered.
type Cut = fn(usize) -> (Place, bool);

/// Runs all at once: most of the time is spent waiting.
fn check_all(manner: Manner, places: &[Cut]) {
    std::thread::scope(|scope| {
        for (message, &(_, number, _)) in MESSAGES.iter().enumerate() {
            for place in places {
                let (place, delivered) = place(number);
                scope.spawn(move || check(message, place, delivered, manner));
            }
        }
    });
}

#[test]
fn the_connection_ends_at_every_message() {
    check_all(
        Manner::End,
        &[
            |n| (Place::Before(n), false),
            |n| (Place::Inside(n), false),
            |n| (Place::After(n), true),
        ],
    );
}

#[test]
fn the_connection_is_reset_at_every_message() {
    check_all(Manner::Reset, &[|n| (Place::Before(n), false), |n| (Place::Inside(n), false)]);
}

#[test]
fn the_connection_stalls_at_every_message() {
    check_all(Manner::Stall, &[|n| (Place::Before(n), false), |n| (Place::Inside(n), false)]);
}

/// Cuts at a byte without knowledge of frames, as behind TLS, and checks the rule.
fn check_byte(byte: usize, source: &Security, destination: &Security) {
    let fault = Fault {
        direction: Direction::ToDestination,
        place: Place::Byte(byte),
        manner: Manner::End,
    };
    let (source, destination, _) = migrate(fault, source, destination);
    let seen = format!("cut after {byte} bytes: source {source:?}, destination {destination:?}");
    match (&source, &destination) {
        (SourceEnd::Moved, DestinationEnd::Runs)
        | (SourceEnd::RunsOn(_), DestinationEnd::Ends(_))
        | (SourceEnd::Unknown(_), _) => {}
        _ => panic!("{seen}"),
    }
}

fn cut_at_many_bytes(source: &Security, destination: &Security) {
    let whole =
        Fault { direction: Direction::ToDestination, place: Place::Nowhere, manner: Manner::End };
    let (end, _, bytes) = migrate(whole, source, destination);
    assert!(matches!(end, SourceEnd::Moved) && bytes > 80_000, "{end:?} after {bytes} bytes");
    // The decision is among the last bytes; hello and setup are among the first.
    let last = bytes - 60..bytes;
    let places: Vec<_> = (0..3000).step_by(157).chain(last.step_by(3)).collect();
    for places in places.chunks(10) {
        std::thread::scope(|scope| {
            for &byte in places {
                scope.spawn(move || check_byte(byte, source, destination));
            }
        });
    }
}

#[test]
fn plain_connections_are_cut_anywhere() {
    cut_at_many_bytes(&Security::Insecure, &Security::Insecure);
}

#[test]
fn encrypted_connections_are_cut_anywhere() {
    let authority = Authority::new("authority");
    let source = tls(&authority.files("a.example", &Validity::Now));
    let destination = tls(&authority.files("127.0.0.1", &Validity::Now));
    cut_at_many_bytes(&source, &destination);
}

//! Errors on each side when the other one fails, is cancelled, or is late.

use std::io::{Read, Write};
use std::time::Duration;

use ebb_migration::session::{
    Address, CancelHandle, Cancellation, DestinationAccepted, Listener, Outcome, Security,
    SessionError, SourceAccepted, TimeLimits,
};

use crate::drive::{self, Machine, connect, greeting, handle, listen, machine, state};

/// Both sides up to the acceptance of the machine.
fn accepted(
    limits: &TimeLimits,
    at_source: &CancelHandle,
    at_destination: &CancelHandle,
) -> (SourceAccepted, DestinationAccepted, Listener) {
    let mut listener = Listener::bind(
        &drive::loopback(),
        &Security::Insecure,
        &greeting("destination 1"),
        limits,
        at_destination,
    )
    .unwrap();
    let address = listener.address().clone();
    let (limits, cancel) = (*limits, at_source.clone());
    let source = std::thread::spawn(move || {
        let session =
            connect(&address, &Security::Insecure, &greeting("source 1"), &limits, &cancel)
                .unwrap();
        session.setup(&machine(), 1).unwrap()
    });
    let (setup, _) = listener.accept(None).unwrap().setup::<Machine>().unwrap();
    let accepted = setup.accept(1).unwrap();
    (source.join().unwrap(), accepted, listener)
}

fn reason(error: &SessionError) -> String {
    match error {
        SessionError::Aborted { reason, .. } | SessionError::Failed { reason, .. } => {
            reason.to_string()
        }
        other => panic!("no reason of the other side: {other:?}"),
    }
}

#[test]
fn a_full_destination_explains_a_broken_data_stream() {
    let limits = TimeLimits::default();
    let (source, destination, mut listener) = accepted(&limits, &handle(), &handle());
    let source = std::thread::spawn(move || {
        let (streaming, mut streams) = source.open_streams().unwrap();
        let piece = vec![7; 1 << 20];
        let error = loop {
            if let Err(error) = streams[0].write_all(&piece) {
                break error;
            }
        };
        // Once a write has failed, no later one may add bytes behind the gap.
        assert_eq!(streams[0].write(b"more").unwrap_err().kind(), std::io::ErrorKind::BrokenPipe);
        streaming.abort(error.to_string())
    });
    let (streaming, mut streams) = destination.join(&mut listener).unwrap();
    streams[0].read_exact(&mut [0; 1000]).unwrap();
    drop(streams);
    // The source reports that its stream broke; both are correct.
    streaming.abort("no memory left here");
    let word = source.join().unwrap().expect("the destination has sent its reason");
    assert_eq!(reason(&word), "no memory left here");
}

#[test]
fn a_cancelled_source_stops_waiting_and_the_destination_is_notified() {
    let limits = TimeLimits::default();
    let cancel = handle();
    let (source, destination, mut listener) = accepted(&limits, &cancel, &handle());
    let (streams_stand, streams_do_stand) = std::sync::mpsc::channel();
    let source = std::thread::spawn(move || {
        let (mut streaming, streams) = source.open_streams().unwrap();
        streams_stand.send(()).unwrap();
        let error = streaming.wait_round_done(0).unwrap_err();
        assert!(matches!(error, SessionError::Cancelled), "{error:?}");
        drop(streams);
        streaming.abort(error.to_string())
    });
    let (streaming, mut streams) = destination.join(&mut listener).unwrap();
    streams_do_stand.recv().unwrap();
    assert_eq!(cancel.cancel(), Cancellation::Cancelled);
    let mut rest = Vec::new();
    streams[0].read_to_end(&mut rest).unwrap();
    let word = streaming.abort("a data stream has ended").expect("the source has sent its reason");
    assert!(reason(&word).contains("cancelled"), "{word}");
    assert!(source.join().unwrap().is_none_or(|word| reason(&word) == "a data stream has ended"));
}

#[test]
fn a_stuck_write_ends_when_it_is_cancelled_or_shut_down() {
    let limits = TimeLimits::default();
    for shut_down in [false, true] {
        let cancel = handle();
        let (source, destination, mut listener) = accepted(&limits, &cancel, &handle());
        let (handles, shutdown_handle) = std::sync::mpsc::channel();
        let source = std::thread::spawn(move || {
            let (streaming, mut streams) = source.open_streams().unwrap();
            handles.send(streams[0].shutdown_handle()).unwrap();
            let piece = vec![7; 1 << 20];
            // The destination reads nothing, so that this gets stuck.
            while streams[0].write_all(&piece).is_ok() {}
            streaming.abort("ended")
        });
        let (streaming, _streams) = destination.join(&mut listener).unwrap();
        let handle = shutdown_handle.recv().unwrap();
        if shut_down {
            handle.shut_down();
        } else {
            cancel.cancel();
        }
        let error = streaming.receive_state().unwrap_err();
        assert_eq!(reason(&error), "ended");
        source.join().unwrap();
    }
}

#[test]
fn a_cancelled_destination_stops_waiting_for_a_source() {
    let cancel = handle();
    let mut listener = Listener::bind(
        &drive::loopback(),
        &Security::Insecure,
        &greeting("destination 1"),
        &TimeLimits::default(),
        &cancel,
    )
    .unwrap();
    let destination = std::thread::spawn(move || listener.accept(None).unwrap_err());
    cancel.cancel();
    let error = destination.join().unwrap();
    assert!(matches!(error, SessionError::Cancelled), "{error:?}");
}

#[test]
fn a_source_without_data_streams_times_out() {
    let limits = TimeLimits { streams: Duration::from_millis(50), ..TimeLimits::default() };
    let (source, destination, mut listener) = accepted(&limits, &handle(), &handle());
    let error = std::thread::scope(|scope| {
        let destination = scope.spawn(|| destination.join(&mut listener).unwrap_err());
        let error = destination.join().unwrap();
        assert!(matches!(
            &error,
            SessionError::TimedOut { waiting_for, .. } if waiting_for.contains("data streams")
        ));
        source.abort("late").expect("the destination has sent its reason")
    });
    assert!(reason(&error).contains("data streams"), "{error}");
}

/// Both sides up to the source's decision.
fn prepared(
    limits: &TimeLimits,
    at_source: &CancelHandle,
    at_destination: &CancelHandle,
    commit: impl FnOnce(ebb_migration::session::SourcePrepared) -> Outcome + Send + 'static,
    ready: impl FnOnce(ebb_migration::session::DestinationRestoring),
) -> Outcome {
    let (source, destination, mut listener) = accepted(limits, at_source, at_destination);
    let source = std::thread::spawn(move || {
        let (streaming, _streams) = source.open_streams().unwrap();
        match streaming.send_state(state()) {
            Ok(prepared) => commit(prepared),
            Err(error) => Outcome::RunsOn(error),
        }
    });
    let (streaming, _streams) = destination.join(&mut listener).unwrap();
    let (restoring, received) = streaming.receive_state().unwrap();
    assert_eq!(received, state());
    ready(restoring);
    source.join().unwrap()
}

#[test]
fn a_failure_to_restore_reaches_the_source() {
    let outcome = prepared(
        &TimeLimits::default(),
        &handle(),
        &handle(),
        |_| panic!("the destination is not ready"),
        |restoring| drop(restoring.fail("the disk /d.img is missing here")),
    );
    let Outcome::RunsOn(error) = outcome else { panic!("{outcome:?}") };
    assert!(error.to_string().contains("/d.img is missing"), "{error}");
}

#[test]
fn a_guest_that_does_not_start_there_is_resumed_here() {
    let outcome = prepared(
        &TimeLimits::default(),
        &handle(),
        &handle(),
        ebb_migration::session::SourcePrepared::commit,
        |restoring| restoring.ready().unwrap().failed("KVM_RUN is refused"),
    );
    let Outcome::RunsOn(error) = outcome else { panic!("{outcome:?}") };
    assert!(matches!(error, SessionError::Failed { .. }), "{error:?}");
    assert!(error.to_string().contains("KVM_RUN is refused"), "{error}");
}

#[test]
fn a_destination_that_vanishes_after_the_decision_leaves_it_unknown() {
    let outcome = prepared(
        &TimeLimits::default(),
        &handle(),
        &handle(),
        ebb_migration::session::SourcePrepared::commit,
        |restoring| drop(restoring.ready().unwrap()),
    );
    let Outcome::Unknown(error) = outcome else { panic!("{outcome:?}") };
    assert!(error.to_string().contains("had decided"), "{error}");
}

#[test]
fn a_source_that_gives_up_at_the_last_moment_ends_the_destination() {
    let outcome = prepared(
        &TimeLimits::default(),
        &handle(),
        &handle(),
        |prepared| {
            assert!(prepared.abort("the operator has reconsidered").is_none());
            Outcome::RunsOn(SessionError::Cancelled)
        },
        |restoring| {
            let error = restoring.ready().unwrap_err();
            assert!(reason(&error).contains("reconsidered"), "{error}");
        },
    );
    assert!(matches!(outcome, Outcome::RunsOn(SessionError::Cancelled)), "{outcome:?}");
}

#[test]
fn a_decision_is_not_cancelled_and_a_cancelled_session_is_not_decided() {
    let (at_source, at_destination) = (handle(), handle());
    let (cancel_source, cancel_destination) = (at_source.clone(), at_destination.clone());
    let outcome = prepared(
        &TimeLimits::default(),
        &at_source,
        &at_destination,
        ebb_migration::session::SourcePrepared::commit,
        |restoring| {
            let committed = restoring.ready().unwrap();
            assert_eq!(cancel_source.cancel(), Cancellation::TooLate);
            assert_eq!(cancel_destination.cancel(), Cancellation::TooLate);
            committed.running();
        },
    );
    assert!(matches!(outcome, Outcome::Moved), "{outcome:?}");

    let cancel = handle();
    let cancelled = cancel.clone();
    let outcome = prepared(
        &TimeLimits::default(),
        &cancel,
        &handle(),
        move |prepared| {
            cancelled.cancel();
            prepared.commit()
        },
        |restoring| {
            let error = restoring.ready().unwrap_err();
            assert!(reason(&error).contains("cancelled"), "{error}");
        },
    );
    assert!(matches!(outcome, Outcome::RunsOn(SessionError::Cancelled)), "{outcome:?}");
}

#[test]
fn a_destination_cancelled_before_the_decision_reports_a_failure() {
    let cancel = handle();
    let cancelled = cancel.clone();
    let (waits, decides) = std::sync::mpsc::channel::<()>();
    let outcome = prepared(
        &TimeLimits::default(),
        &handle(),
        &cancel,
        move |prepared| {
            cancelled.cancel();
            // Decided only after the destination has given up.
            let _ = decides.recv();
            prepared.commit()
        },
        move |restoring| {
            let error = restoring.ready().unwrap_err();
            assert!(matches!(error, SessionError::Cancelled), "{error:?}");
            drop(waits);
        },
    );
    let Outcome::RunsOn(error) = outcome else { panic!("{outcome:?}") };
    assert!(reason(&error).contains("cancelled"), "{error}");
}

#[test]
fn rounds_are_acknowledged_in_order() {
    let (source, destination, mut listener) =
        accepted(&TimeLimits::default(), &handle(), &handle());
    let source = std::thread::spawn(move || {
        let (mut streaming, _streams) = source.open_streams().unwrap();
        (0..3).for_each(|round| streaming.wait_round_done(round).unwrap());
        let error = streaming.wait_round_done(3).unwrap_err();
        streaming.abort(error.to_string());
        error
    });
    let (mut streaming, _streams) = destination.join(&mut listener).unwrap();
    for round in [0, 1, 2, 7] {
        streaming.round_done(round).unwrap();
    }
    let error = source.join().unwrap();
    assert!(error.to_string().contains("round 7 was confirmed instead of 3"), "{error}");
    assert!(reason(&streaming.receive_state().unwrap_err()).contains("round 7"));
}

#[test]
fn messages_that_are_too_long_are_not_sent() {
    let mut listener = listen(&drive::loopback(), &Security::Insecure, &TimeLimits::default());
    let address: Address = listener.address().clone();
    let source = std::thread::spawn(move || {
        let limits = TimeLimits::default();
        let session =
            connect(&address, &Security::Insecure, &greeting("source 1"), &limits, &handle())
                .unwrap();
        session.setup(&"x".repeat(65 << 20), 1).unwrap_err()
    });
    let error = listener.accept(None).unwrap().setup::<Machine>().unwrap_err();
    assert!(reason(&error).contains("longer than"), "{error}");
    let error = source.join().unwrap();
    assert!(matches!(error, SessionError::TooLong { .. }), "{error:?}");
}

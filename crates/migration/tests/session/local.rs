//! Sessions without TLS: TCP on loopback, unix sockets, descriptors.

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use ebb_migration::session::{Address, Security, SessionError, TimeLimits};

use crate::drive::{
    self, DestinationEnd, Machine, SourceEnd, both, connect, greeting, handle, listen, machine,
};

#[test]
fn a_machine_moves_over_tcp() {
    let ends = both(&drive::loopback(), &Security::Insecure);
    assert!(matches!(ends, (SourceEnd::Moved, DestinationEnd::Runs)), "{ends:?}");
}

#[test]
fn a_machine_moves_over_a_unix_socket() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("migration.sock");
    let ends = both(&drive::unix(path.clone()), &Security::Local);
    assert!(matches!(ends, (SourceEnd::Moved, DestinationEnd::Runs)), "{ends:?}");
    assert!(!path.exists(), "the socket is removed");
}

#[test]
fn the_name_localhost_needs_no_resolver_and_ipv6_takes_brackets() {
    let listener =
        listen(&"tcp:localhost:0".parse().unwrap(), &Security::Insecure, &TimeLimits::default());
    assert!(matches!(
        listener.address(),
        Address::Tcp { host, port } if host == "127.0.0.1" && *port != 0
    ));
    let ends = both(&"tcp:[::1]:0".parse().unwrap(), &Security::Insecure);
    assert!(matches!(ends, (SourceEnd::Moved, DestinationEnd::Runs)), "{ends:?}");
}

#[test]
fn only_the_owner_may_connect_to_the_socket() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("migration.sock");
    let _listener = listen(&drive::unix(path.clone()), &Security::Local, &TimeLimits::default());
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
}

#[test]
fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let address = drive::unix(folder.path().join("migration.sock"));
    let bind = || {
        let limits = TimeLimits::default();
        ebb_migration::session::Listener::bind(
            &address,
            &Security::Local,
            &greeting("d"),
            &limits,
            &handle(),
        )
    };
    let first = bind().unwrap();
    let error = bind().unwrap_err();
    assert!(error.to_string().contains("another process listens at"), "{error}");
    drop(first);
    // Like after a killed process: the standard library leaves the file, with no listener.
    drop(std::os::unix::net::UnixListener::bind(folder.path().join("migration.sock")).unwrap());
    bind().unwrap();
    std::fs::write(folder.path().join("migration.sock"), "a file").unwrap();
    let error = bind().unwrap_err();
    assert!(error.to_string().contains("not a socket"), "{error}");
}

#[test]
fn file_descriptors_are_sent_over_a_unix_socket() {
    let folder = tempfile::tempdir().unwrap();
    let limits = TimeLimits::default();
    let mut listener = listen(&drive::unix(folder.path().join("s")), &Security::Local, &limits);
    let address = listener.address().clone();
    let source = std::thread::spawn(move || {
        let session =
            connect(&address, &Security::Local, &greeting("source 1"), &limits, &handle()).unwrap();
        let mut accepted = session.setup(&machine(), 1).unwrap();
        let files: Vec<File> = (0..3_u8)
            .map(|number| {
                let mut file = tempfile::tempfile().unwrap();
                file.write_all(&[number; 10]).unwrap();
                file
            })
            .collect();
        let descriptors: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        accepted.send_descriptors(&descriptors).unwrap();
        let (streaming, _streams) = accepted.open_streams().unwrap();
        streaming.abort("enough")
    });
    let (setup, _) = listener.accept(None).unwrap().setup::<Machine>().unwrap();
    let mut accepted = setup.accept(1).unwrap();
    let descriptors = accepted.receive_descriptors().unwrap();
    assert_eq!(descriptors.len(), 3);
    for (number, descriptor) in (0..3_u8).zip(descriptors) {
        let mut content = Vec::new();
        let mut file = File::from(descriptor);
        file.rewind().unwrap();
        file.read_to_end(&mut content).unwrap();
        assert_eq!(content, [number; 10]);
    }
    let (streaming, _streams) = accepted.join(&mut listener).unwrap();
    let error = streaming.receive_state().unwrap_err();
    assert!(
        matches!(&error, SessionError::Aborted { reason, .. } if reason.to_string() == "enough"),
        "{error}"
    );
    assert!(source.join().unwrap().is_none());
}

#[test]
fn file_descriptors_cannot_be_sent_over_tcp() {
    let limits = TimeLimits::default();
    let mut listener = listen(&drive::loopback(), &Security::Insecure, &limits);
    let address = listener.address().clone();
    let source = std::thread::spawn(move || {
        let session =
            connect(&address, &Security::Insecure, &greeting("source 1"), &limits, &handle())
                .unwrap();
        let mut accepted = session.setup(&machine(), 1).unwrap();
        let file = tempfile::tempfile().unwrap();
        let error = accepted.send_descriptors(&[file.as_fd()]).unwrap_err();
        accepted.abort(error.to_string());
        error
    });
    let (setup, _) = listener.accept(None).unwrap().setup::<Machine>().unwrap();
    let error = setup.accept(1).unwrap().join(&mut listener).unwrap_err();
    assert!(matches!(error, SessionError::Aborted { .. }), "{error}");
    let error = source.join().unwrap();
    assert!(matches!(error, SessionError::NoDescriptors { .. }), "{error}");
}

#[test]
fn a_refusal_reaches_the_source_with_its_reason() {
    let limits = TimeLimits::default();
    let mut listener = listen(&drive::loopback(), &Security::Insecure, &limits);
    let address = listener.address().clone();
    let source = std::thread::spawn(move || drive::source(&address, &Security::Insecure, &limits));
    let (setup, _) = listener.accept(None).unwrap().setup::<Machine>().unwrap();
    assert_eq!(setup.streams(), drive::STREAMS);
    setup.refuse("the processor here has no \x1b[31mavx512f");
    let end = source.join().unwrap();
    let SourceEnd::RunsOn(error) = end else { panic!("{end:?}") };
    assert!(matches!(&error, SessionError::Refused { .. }), "{error:?}");
    let text = error.to_string();
    assert!(
        text.contains("refuses the machine") && text.contains("avx512f") && !text.contains('\x1b'),
        "{text}"
    );
}

#[test]
fn plain_tcp_needs_an_explicit_request() {
    let limits = TimeLimits::default();
    // Loopback, where any user of the host reaches the port, or can take it before the destination
    // does; and TEST-NET-1 (RFC 5737). Both are refused before anything is sent.
    for elsewhere in
        ["tcp:127.0.0.1:4444", "tcp:[::1]:4444", "tcp:localhost:4444", "tcp:192.0.2.1:4444"]
    {
        let elsewhere = elsewhere.parse().unwrap();
        let error =
            connect(&elsewhere, &Security::Local, &greeting("s"), &limits, &handle()).unwrap_err();
        assert!(matches!(error, SessionError::Unencrypted { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains("--insecure") && text.contains("--tls-cert"), "{text}");
    }
    let bind = |address: &str, security| {
        let address = address.parse().unwrap();
        ebb_migration::session::Listener::bind(
            &address,
            &security,
            &greeting("destination 1"),
            &limits,
            &handle(),
        )
    };
    for here in ["tcp:127.0.0.1:0", "tcp:localhost:0", "tcp:0.0.0.0:0"] {
        let error = bind(here, Security::Local).unwrap_err();
        assert!(matches!(error, SessionError::Unencrypted { .. }), "{error}");
    }
    let listener = bind("tcp:0.0.0.0:0", Security::Insecure).unwrap();
    let Address::Tcp { port, .. } = listener.address().clone() else { panic!("not TCP") };
    let destination = drive::spawn(listener);
    let address = Address::Tcp { host: "127.0.0.1".to_owned(), port };
    let end = drive::source(&address, &Security::Insecure, &limits);
    assert!(matches!(end, SourceEnd::Moved), "{end:?}");
    assert!(matches!(destination.join().unwrap(), DestinationEnd::Runs));
}

#[test]
fn a_missing_listener_is_reported() {
    let limits = TimeLimits::default();
    let listener = listen(&drive::loopback(), &Security::Insecure, &limits);
    let address = listener.address().clone();
    drop(listener);
    let try_connect = |address: &Address| {
        connect(address, &Security::Insecure, &greeting("s"), &limits, &handle()).unwrap_err()
    };
    let error = try_connect(&address);
    assert!(matches!(error, SessionError::Unreachable { .. }), "{error:?}");
    assert!(
        error.to_string().contains("refused") && error.to_string().contains("ebb receive"),
        "{error}"
    );
    let error = try_connect(&drive::unix("/nowhere/at/all".into()));
    assert!(matches!(error, SessionError::Unreachable { .. }), "{error:?}");
    let error = try_connect(&"tcp:no-such-host.invalid:1".parse().unwrap());
    assert!(matches!(error, SessionError::NotFound { .. }), "{error:?}");
}

#[test]
fn a_wait_without_a_source_times_out() {
    let mut listener = listen(&drive::loopback(), &Security::Insecure, &TimeLimits::default());
    let error = listener.accept(Some(Duration::from_millis(20))).unwrap_err();
    assert!(matches!(error, SessionError::NobodyCame { .. }), "{error}");
}

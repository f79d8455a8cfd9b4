//! Connections from outside of the session: strangers, other programs, other versions, other users.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use ebb_migration::session::{Address, Listener, Security, SessionError, TimeLimits};

use crate::certificates::{Authority, Validity, tls};
use crate::drive::{
    self, DestinationEnd, Machine, SourceEnd, connect, greeting, handle, listen, machine,
};

fn dial(address: &Address) -> TcpStream {
    let Address::Tcp { port, .. } = *address else { panic!("not TCP") };
    TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap()
}

/// First bytes of a connection for `role` (1: control, 2: data stream).
fn preamble(version: u16, role: u8, stream: u32, session: [u8; 16]) -> Vec<u8> {
    let mut bytes = b"EBB-MIG\n".to_vec();
    bytes.extend(version.to_le_bytes());
    bytes.extend([role, 0]);
    bytes.extend(stream.to_le_bytes());
    bytes.extend(session);
    bytes
}

/// Reads everything up to the end.
fn read_all(mut stream: TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    // A reset is an end as well.
    let _ = stream.read_to_end(&mut bytes);
    bytes
}

/// Opens strangers' connections of all kinds, before the source connects and until the end.
fn strangers(address: &Address) -> Vec<TcpStream> {
    let speak = |bytes: &[u8]| {
        let mut stream = dial(address);
        // The other side may have closed already.
        let _ = stream.write_all(bytes);
        stream
    };
    let hello = |length: u32, kind: u8, body: &[u8]| {
        let mut bytes = preamble(ebb_migration::session::PROTOCOL_VERSION, 1, 0, [0; 16]);
        bytes.extend(length.to_le_bytes());
        bytes.push(kind);
        bytes.extend(body);
        bytes
    };
    let mut all = vec![
        speak(b"GET / HTTP/1.1\r\nHost: ebb\r\n\r\n"),
        speak(b"SSH-2.0-OpenSSH_9.2\r\n"),
        speak(&[0x16, 3, 1, 0, 5, 1, 2, 3, 4, 5]),
        speak(&[0xff; 100_000]),
        speak(&preamble(ebb_migration::session::PROTOCOL_VERSION, 3, 0, [0; 16])),
        speak(&preamble(ebb_migration::session::PROTOCOL_VERSION, 2, 0, [7; 16])),
        speak(&preamble(9, 1, 0, [0; 16])),
        speak(&hello(u32::MAX, 1, b"")),
        speak(&hello(10, 99, b"")),
        speak(&hello(4, 1, b"{{{{")),
        speak(&hello(0, 9, b"")),
        // These stall.
        speak(b""),
        speak(b"EBB-"),
        speak(&preamble(ebb_migration::session::PROTOCOL_VERSION, 1, 0, [0; 16])),
        speak(&hello(60_000, 1, b"{")),
    ];
    drop(speak(b"EBB"));
    all.extend((0..40).map(|_| dial(address)));
    all
}

#[test]
fn strangers_do_not_delay_a_source() {
    // No connection times out with these limits: a stalled one stalls all the time.
    let limits = TimeLimits { greeting: Duration::from_secs(600), ..TimeLimits::default() };
    let authority = Authority::new("authority");
    let encrypted = tls(&authority.files("127.0.0.1", &Validity::Now));
    for security in [Security::Insecure, encrypted] {
        let listener = listen(&drive::loopback(), &security, &limits);
        let address = listener.address().clone();
        let strangers = strangers(&address);
        let destination = drive::spawn(listener);
        let end = drive::source(&address, &security, &TimeLimits::default());
        assert!(matches!(end, SourceEnd::Moved), "{end:?}");
        assert!(matches!(destination.join().unwrap(), DestinationEnd::Runs));
        drop(strangers);
    }
}

#[test]
fn stalled_connections_time_out() {
    let limits = TimeLimits { greeting: Duration::from_millis(50), ..TimeLimits::default() };
    let mut listener = listen(&drive::loopback(), &Security::Insecure, &limits);
    let stranger = dial(listener.address());
    while listener.refusals().count() == 0 {
        listener.accept(Some(Duration::from_millis(20))).unwrap_err();
    }
    assert!(listener.refusals().last().unwrap().contains("in time"), "{:?}", listener.refusals());
    assert_eq!(read_all(stranger), b"");
}

#[test]
fn data_streams_join_with_the_id_and_only_once() {
    let limits = TimeLimits::default();
    let mut listener = listen(&drive::loopback(), &Security::Insecure, &limits);
    let address = listener.address().clone();
    let source = {
        let address = address.clone();
        std::thread::spawn(move || {
            let session =
                connect(&address, &Security::Insecure, &greeting("source 1"), &limits, &handle())
                    .unwrap();
            let accepted = session.setup(&machine(), 2).unwrap();
            // The session waits for its streams now. Guesses at its id, impossible numbers, and
            // another source:
            let guesses: Vec<_> = [([0; 16], 0), ([1; 16], 0), ([0xff; 16], 1), ([0; 16], 63)]
                .into_iter()
                .map(|(id, stream)| {
                    let mut guess = dial(&address);
                    guess
                        .write_all(&preamble(
                            ebb_migration::session::PROTOCOL_VERSION,
                            2,
                            stream,
                            id,
                        ))
                        .unwrap();
                    guess
                })
                .collect();
            for guess in guesses {
                let answer = read_all(guess);
                // Not the answer to a stream that has joined.
                assert!(answer.get(10) != Some(&2), "{answer:?}");
            }
            let error =
                connect(&address, &Security::Insecure, &greeting("source 2"), &limits, &handle())
                    .unwrap_err();
            assert!(matches!(error, SessionError::Aborted { .. }), "{error:?}");
            assert!(error.to_string().contains("another migration is under way"), "{error}");
            let (streaming, mut streams) = accepted.open_streams().unwrap();
            streams[1].write_all(b"second").unwrap();
            streams[0].write_all(b"first").unwrap();
            (streaming, streams)
        })
    };
    let (setup, _) = listener.accept(None).unwrap().setup::<Machine>().unwrap();
    let (_streaming, mut streams) = setup.accept(2).unwrap().join(&mut listener).unwrap();
    assert_eq!(listener.refusals().count(), 5, "{:?}", listener.refusals());
    let (mut first, mut second) = ([0; 5], [0; 6]);
    streams[0].read_exact(&mut first).unwrap();
    streams[1].read_exact(&mut second).unwrap();
    assert_eq!((&first, &second), (b"first", b"second"));
    drop(source.join().unwrap());
}

#[test]
fn a_source_that_fails_before_its_acceptance_does_not_end_the_listener() {
    let limits = TimeLimits::default();
    let mut listener = listen(&drive::loopback(), &Security::Insecure, &limits);
    let address = listener.address().clone();
    let first = connect_in_thread(&address, drop);
    let error = listener.accept(None).unwrap().setup::<Machine>().unwrap_err();
    assert!(matches!(error, SessionError::Cut { .. }), "{error}");
    first.join().unwrap();
    let second = connect_in_thread(&address, |session| {
        // Not the destination's format.
        session.setup(&"a machine in other words", 1).unwrap_err().to_string()
    });
    let error = listener.accept(None).unwrap().setup::<Machine>().unwrap_err();
    assert!(matches!(error, SessionError::Malformed { .. }), "{error}");
    let text = second.join().unwrap();
    assert!(text.contains("cannot be parsed") && text.contains("same release"), "{text}");
    let destination = drive::spawn(listener);
    assert!(matches!(drive::source(&address, &Security::Insecure, &limits), SourceEnd::Moved));
    assert!(matches!(destination.join().unwrap(), DestinationEnd::Runs));
}

#[test]
fn failing_sources_are_skipped_until_one_describes_its_machine() {
    let limits = TimeLimits { setup: Duration::from_millis(100), ..TimeLimits::default() };
    let mut listener = listen(&drive::loopback(), &Security::Insecure, &limits);
    let address = listener.address().clone();
    let sources = std::thread::spawn(move || {
        connect_in_thread(&address, drop).join().unwrap();
        // This one sends nothing more, and times out.
        let stalls = connect_in_thread(&address, |session| {
            std::thread::sleep(Duration::from_secs(1));
            session.setup(&machine(), 1).unwrap_err()
        });
        assert!(stalls.join().unwrap().to_string().contains("waiting for its setup"));
        let other =
            connect_in_thread(&address, |session| session.setup(&"other words", 1).unwrap_err());
        assert!(matches!(other.join().unwrap(), SessionError::Aborted { .. }));
        connect_in_thread(&address, |session| session.setup(&machine(), 1).unwrap_err())
            .join()
            .unwrap()
    });
    let (setup, described) =
        listener.receive_setup::<Machine>(Some(Duration::from_secs(60))).unwrap();
    assert_eq!((setup.streams(), described), (1, machine()));
    assert_eq!(listener.refusals().count(), 3, "{:?}", listener.refusals());
    setup.refuse("enough");
    assert!(matches!(sources.join().unwrap(), SessionError::Refused { .. }));
    let error = listener.receive_setup::<Machine>(Some(Duration::from_millis(20))).unwrap_err();
    assert!(matches!(&error, SessionError::NobodyCame { .. }), "{error}");
}

fn connect_in_thread<T: Send + 'static>(
    address: &Address,
    then: impl FnOnce(ebb_migration::session::SourceSession) -> T + Send + 'static,
) -> std::thread::JoinHandle<T> {
    let address = address.clone();
    std::thread::spawn(move || {
        let limits = TimeLimits::default();
        then(
            connect(&address, &Security::Insecure, &greeting("source 1"), &limits, &handle())
                .unwrap(),
        )
    })
}

/// Returns a source's error at a program that sends `answer` to each connection.
fn meet(answer: &'static [u8], limits: &TimeLimits) -> SessionError {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address =
        Address::Tcp { host: "127.0.0.1".into(), port: listener.local_addr().unwrap().port() };
    let program = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(answer).unwrap();
        // Until the source is gone.
        let _ = std::io::copy(&mut stream, &mut std::io::sink());
    });
    let error = connect(&address, &Security::Insecure, &greeting("source 1"), limits, &handle())
        .unwrap_err();
    program.join().unwrap();
    error
}

#[test]
fn other_programs_are_detected() {
    let limits = TimeLimits::default();
    let error = meet(b"SSH-2.0-OpenSSH_9.2\r\n", &limits);
    assert!(matches!(error, SessionError::NotEbb { .. }), "{error:?}");
    assert!(error.to_string().contains("SSH-2.0-OpenSSH_9.2"), "{error}");
    let error = meet(b"\x15\x03\x03\x00\x02\x02\x28", &limits);
    assert!(error.to_string().contains("it speaks TLS"), "{error}");
    let error = meet(b"", &TimeLimits { greeting: Duration::from_millis(50), ..limits });
    assert!(matches!(error, SessionError::TimedOut { .. }), "{error:?}");
}

#[test]
fn another_version_is_reported_on_both_sides() {
    // The previous version was 3. A destination of it.
    let mut answer = preamble(3, 1, 0, [0; 16]);
    answer.extend([0; 100]);
    let error = meet(answer.leak(), &TimeLimits::default());
    assert!(matches!(error, SessionError::Version { theirs: 3, ours: 4, .. }), "{error:?}");
    assert!(error.to_string().contains("same release"), "{error}");

    // A source of it.
    let mut listener = listen(&drive::loopback(), &Security::Insecure, &TimeLimits::default());
    let mut source = dial(listener.address());
    source.write_all(&preamble(3, 1, 0, [0; 16])).unwrap();
    while listener.refusals().count() == 0 {
        listener.accept(Some(Duration::from_millis(20))).unwrap_err();
    }
    let logged = listener.refusals().last().unwrap();
    assert!(logged.contains("version 4") && logged.contains("version 3"), "{logged}");
    assert_eq!(
        read_all(source),
        preamble(4, 1, 0, [0; 16]),
        "it receives the version of this side"
    );
}

#[test]
fn a_unix_socket_is_for_one_user() {
    if !rustix::process::geteuid().is_root() {
        println!("only root can act as another user: not tested");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let address = drive::unix(path.clone());
    let mut listener = listen(&address, &Security::Local, &TimeLimits::default());
    // The file's mode would already exclude the other user; the test is about the check itself.
    for (path, mode) in [(folder.path(), 0o711), (&path, 0o666)] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }
    let stranger = std::thread::spawn(move || {
        let nobody = rustix::thread::Uid::from_raw(65534);
        // Only for this thread: the raw system call, not the library's function, which changes all
        // threads.
        rustix::thread::set_thread_uid(nobody).unwrap();
        let mut stream = UnixStream::connect(path).unwrap();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        String::from_utf8_lossy(&answer).into_owned()
    });
    while listener.refusals().count() == 0 {
        listener.accept(Some(Duration::from_millis(20))).unwrap_err();
    }
    let logged = listener.refusals().last().unwrap();
    assert!(logged.contains("belongs to user 65534"), "{logged}");
    drop(listener);
    let answer = stranger.join().unwrap();
    assert!(answer.contains("belongs to user 65534"), "{answer}");
}

#[test]
fn a_destination_of_another_user_is_not_trusted() {
    if !rustix::process::geteuid().is_root() {
        println!("only root can act as another user: not tested");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    let address = drive::unix(folder.path().join("s"));
    let (ready, is_ready) = std::sync::mpsc::channel();
    let (done, is_done) = std::sync::mpsc::channel::<()>();
    let destination = {
        let address = address.clone();
        std::thread::spawn(move || {
            rustix::thread::set_thread_uid(rustix::thread::Uid::from_raw(65534)).unwrap();
            let listener: Listener = listen(&address, &Security::Local, &TimeLimits::default());
            ready.send(()).unwrap();
            let _ = is_done.recv();
            drop(listener);
        })
    };
    is_ready.recv().unwrap();
    let error =
        connect(&address, &Security::Local, &greeting("s"), &TimeLimits::default(), &handle())
            .unwrap_err();
    assert!(matches!(error, SessionError::ForeignUser { theirs: 65534, ours: 0, .. }), "{error:?}");
    drop(done);
    destination.join().unwrap();
}

#[test]
fn a_body_that_trickles_does_not_occupy_the_destination() {
    const SETUP_BYTES: usize = 1000;
    let limit = Duration::from_millis(200);
    let limits = TimeLimits { setup: limit, progress: limit, ..TimeLimits::default() };
    let mut listener = listen(&drive::loopback(), &Security::Insecure, &limits);
    let mut source = dial(listener.address());
    let source = std::thread::spawn(move || {
        let frame = |kind: u8, length: usize| {
            let mut bytes = u32::try_from(length).unwrap().to_le_bytes().to_vec();
            bytes.push(kind);
            bytes
        };
        let hello = serde_json::to_vec(&greeting("source 1")).unwrap();
        source
            .write_all(&preamble(ebb_migration::session::PROTOCOL_VERSION, 1, 0, [0; 16]))
            .unwrap();
        source.write_all(&frame(1, hello.len())).unwrap();
        source.write_all(&hello).unwrap();
        source.write_all(&frame(2, SETUP_BYTES)).unwrap();
        // A byte at a time, each long before the limit.
        let sent = (0..SETUP_BYTES).take_while(|_| {
            std::thread::sleep(limit / 10);
            source.write_all(b" ").is_ok()
        });
        (sent.count(), SETUP_BYTES)
    });
    let error = listener.accept(None).unwrap().setup::<Machine>().unwrap_err();
    assert!(matches!(error, SessionError::TimedOut { .. }), "{error}");
    let (sent, all) = source.join().unwrap();
    assert!(sent < all, "the source sent all of its {all} bytes");
}

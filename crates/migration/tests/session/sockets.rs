//! Sockets that are connected before a session begins, perhaps by another process: what arrives
//! early and speaks late, what is not needed, and floods in between.

use std::io::Read;
use std::net::{Ipv4Addr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use ebb_migration::session::{
    Address, Security, SessionError, SourceSession, TimeLimits, connect, dial,
};
use rustix::net::sockopt;

use crate::certificates::{Authority, Validity, tls};
use crate::drive::{self, Machine, greeting, handle, listen, machine};

/// Turns a wait for ever into a failure.
const LIMIT: Duration = Duration::from_secs(20);

fn stranger(address: &Address) -> TcpStream {
    let Address::Tcp { port, .. } = *address else { panic!("not TCP") };
    TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap()
}

fn dialed(address: &Address, streams: u16) -> Vec<OwnedFd> {
    dial(address, streams, &TimeLimits::default(), &handle()).unwrap()
}

fn begin(sockets: Vec<OwnedFd>, address: &Address, security: &Security) -> SourceSession {
    let limits = TimeLimits::default();
    connect(sockets, address, security, &greeting("source 1"), &limits, &handle()).unwrap()
}

#[test]
fn connections_may_be_silent_for_as_long_as_the_destination_is_busy() {
    const GREETING: Duration = Duration::from_millis(200);
    let limits = TimeLimits { greeting: GREETING, ..TimeLimits::default() };
    let authority = Authority::new("authority");
    let encrypted = tls(&authority.files("127.0.0.1", &Validity::Now));
    for security in [Security::Insecure, encrypted] {
        let mut listener = listen(&drive::loopback(), &security, &limits);
        let address = listener.address().clone();
        let sockets = dialed(&address, 3);
        // The listener has accepted all of them, and none has sent anything.
        let error = listener.accept(Some(GREETING / 4)).unwrap_err();
        assert!(matches!(error, SessionError::NobodyCame { .. }), "{error}");
        // As with a source that stalls, or while a machine is built.
        std::thread::sleep(GREETING * 2);
        let source = std::thread::spawn(move || {
            let accepted = begin(sockets, &address, &security).setup(&machine(), 3).unwrap();
            // Late, while the destination already waits for the streams.
            std::thread::sleep(GREETING * 4);
            accepted.open_streams().unwrap()
        });
        let (setup, _) = listener.accept(Some(LIMIT)).unwrap().setup::<Machine>().unwrap();
        std::thread::sleep(GREETING * 2);
        let (_streaming, streams) = setup.accept(3).unwrap().join(&mut listener).unwrap();
        assert_eq!((streams.len(), listener.refusals().count()), (3, 0));
        drop(source.join().unwrap());
    }
}

#[test]
fn a_flood_does_not_displace_data_connections() {
    // No connection times out: a flood occupies its places all the time.
    let limits = TimeLimits { greeting: Duration::from_secs(600), ..TimeLimits::default() };
    let mut listener = listen(&drive::loopback(), &Security::Insecure, &limits);
    let address = listener.address().clone();
    let before: Vec<_> = (0..40).map(|_| stranger(&address)).collect();
    let source = std::thread::spawn(move || {
        let session = begin(dialed(&address, 3), &address, &Security::Insecure);
        let accepted = session.setup(&machine(), 3).unwrap();
        let flood: Vec<_> = (0..200).map(|_| stranger(&address)).collect();
        // The last of them is refused because there is no room, after all others were accepted.
        for mut last in flood.iter().rev().take(100) {
            assert_eq!(last.read(&mut [0]).unwrap_or(0), 0);
        }
        (accepted.open_streams().unwrap(), flood)
    });
    let (setup, _) = listener.accept(Some(LIMIT)).unwrap().setup::<Machine>().unwrap();
    let (_streaming, streams) = setup.accept(3).unwrap().join(&mut listener).unwrap();
    assert_eq!(streams.len(), 3);
    let last = listener.refusals().last().unwrap();
    assert!(last.contains("too many connections"), "{last}");
    drop((source.join().unwrap(), before));
}

#[test]
fn only_the_sockets_that_are_needed_stay_open() {
    let mut listener = listen(&drive::loopback(), &Security::Insecure, &TimeLimits::default());
    let address = listener.address().clone();
    let mut sockets = dialed(&address, 3);
    let spare = TcpStream::from(sockets[3].try_clone().unwrap());
    let source = std::thread::spawn(move || {
        let error = connect(
            vec![sockets.pop().unwrap()],
            &address,
            &Security::Insecure,
            &greeting("source 1"),
            &TimeLimits::default(),
            &handle(),
        )
        .unwrap_err();
        assert!(matches!(error, SessionError::TooFewSockets), "{error}");
        // Two are left for data.
        let accepted = begin(sockets, &address, &Security::Insecure).setup(&machine(), 16).unwrap();
        assert_eq!(accepted.streams(), 1);
        accepted.open_streams().unwrap()
    });
    let (setup, _) = listener.accept(Some(LIMIT)).unwrap().setup::<Machine>().unwrap();
    assert_eq!(setup.streams(), 2);
    let (_streaming, streams) = setup.accept(1).unwrap().join(&mut listener).unwrap();
    assert_eq!(streams.len(), 1);
    let opened = source.join().unwrap();
    // A connection that ends without a byte is not a refusal.
    spare.shutdown(std::net::Shutdown::Both).unwrap();
    listener.accept(Some(Duration::from_millis(20))).unwrap_err();
    assert_eq!(listener.refusals().count(), 0, "{:?}", listener.refusals());
    drop(opened);
}

#[test]
fn accepted_connections_inherit_the_options_of_the_listener() {
    let limits = TimeLimits::default();
    let mut listener = listen(&drive::loopback(), &Security::Insecure, &limits);
    let address = listener.address().clone();
    let source = std::thread::spawn(move || {
        let session = begin(dialed(&address, 1), &address, &Security::Insecure);
        session.setup(&machine(), 1).unwrap().open_streams().unwrap()
    });
    let (setup, _) = listener.accept(Some(LIMIT)).unwrap().setup::<Machine>().unwrap();
    let (_streaming, here) = setup.accept(1).unwrap().join(&mut listener).unwrap();
    let (_there_streaming, there) = source.join().unwrap();
    for stream in [&here[0], &there[0]] {
        assert!(
            sockopt::tcp_nodelay(stream).unwrap() && sockopt::socket_keepalive(stream).unwrap()
        );
        assert_eq!(sockopt::tcp_keepidle(stream).unwrap(), Duration::from_secs(5));
        assert_eq!(sockopt::tcp_keepcnt(stream).unwrap(), 4);
        assert_eq!(sockopt::tcp_user_timeout(stream).unwrap(), 25_000);
    }
}

/// Sockets of a client of the monitor, which may be of any kind.
#[test]
fn a_blocking_or_unconnected_socket_fails_in_time() {
    let address: Address = "unix:/there".parse().unwrap();
    let limits = TimeLimits { greeting: Duration::from_millis(50), ..TimeLimits::default() };
    let try_connect = |socket: OwnedFd| {
        let data = UnixStream::pair().unwrap().0.into();
        let sockets = vec![socket, data];
        connect(sockets, &address, &Security::Local, &greeting("s"), &limits, &handle())
            .unwrap_err()
    };
    let (blocking, _peer) = UnixStream::pair().unwrap();
    let error = try_connect(blocking.into());
    assert!(matches!(error, SessionError::TimedOut { .. }), "{error}");
    let folder = tempfile::tempdir().unwrap();
    let listener = std::os::unix::net::UnixListener::bind(folder.path().join("s")).unwrap();
    let datagrams = std::os::unix::net::UnixDatagram::unbound().unwrap();
    for socket in [OwnedFd::from(listener), datagrams.into()] {
        let error = try_connect(socket);
        assert!(matches!(error, SessionError::Cut { .. }), "{error}");
        assert!(error.to_string().contains("unix:/there"), "{error}");
    }
}

/// The name of a destination is the client's; descriptors do not pass through TCP.
#[test]
fn a_false_name_only_fails() {
    let mut listener = listen(&drive::loopback(), &Security::Insecure, &TimeLimits::default());
    let address = listener.address().clone();
    let source = std::thread::spawn(move || {
        let named = "unix:/there".parse().unwrap();
        let session = begin(dialed(&address, 1), &named, &Security::Local);
        let mut accepted = session.setup(&machine(), 1).unwrap();
        let file = tempfile::tempfile().unwrap();
        // Linux ignores them.
        let _ = accepted.send_descriptors(&[file.as_fd()]);
        accepted.open_streams().unwrap_err()
    });
    let (setup, _) = listener.accept(Some(LIMIT)).unwrap().setup::<Machine>().unwrap();
    let mut accepted = setup.accept(1).unwrap();
    let error = accepted.receive_descriptors().unwrap_err();
    assert!(error.to_string().contains("descriptor is missing"), "{error}");
    accepted.abort(error.to_string());
    drop(listener);
    let error = source.join().unwrap();
    assert!(error.to_string().contains("descriptor is missing"), "{error}");
}

/// A monitor that was started by one user and has changed to another one.
#[test]
fn the_user_who_has_bound_the_socket_stays_trusted() {
    use rustix::thread::{Uid, set_thread_res_uid, set_thread_uid};
    if !rustix::process::geteuid().is_root() {
        println!("only root can act as another user: not tested");
        return;
    }
    let (owner, later) = (Uid::from_raw(65534), Uid::from_raw(65533));
    let folder = tempfile::tempdir().unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o777);
    std::fs::set_permissions(folder.path(), mode).unwrap();
    let address = drive::unix(folder.path().join("s"));
    let (ready, is_ready) = std::sync::mpsc::channel();
    let destination = {
        let address = address.clone();
        // Raw system calls: they change only their thread.
        std::thread::spawn(move || {
            set_thread_res_uid(Uid::ROOT, owner, Uid::ROOT).unwrap();
            let mut listener = listen(&address, &Security::Local, &TimeLimits::default());
            set_thread_res_uid(Uid::ROOT, Uid::ROOT, Uid::ROOT).unwrap();
            set_thread_res_uid(later, later, later).unwrap();
            ready.send(()).unwrap();
            listener.accept(Some(LIMIT)).map(drop)
        })
    };
    is_ready.recv().unwrap();
    let source = std::thread::spawn(move || {
        set_thread_uid(owner).unwrap();
        drop(begin(dialed(&address, 1), &address, &Security::Local));
    });
    destination.join().unwrap().unwrap();
    source.join().unwrap();
}

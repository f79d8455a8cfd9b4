use std::os::unix::net::UnixListener;
use std::thread::JoinHandle;

use super::*;

/// A companion that is a thread of the test.
fn companion() -> (Companion, JoinHandle<io::Result<()>>) {
    let (ours, theirs) = pair().unwrap();
    let thread = std::thread::spawn(move || serve::serve_on(&theirs));
    (Companion::over(ours), thread)
}

#[test]
fn sockets_are_removed_on_request_and_at_the_end() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let listen = |name: &str| {
        SocketFile::listen(&path(name), rustix::fs::Mode::RUSR, 1).map(|(file, _)| file).unwrap()
    };
    let (companion, thread) = companion();
    let (early, late) =
        (companion.keep(listen("early")).unwrap(), companion.keep(listen("late")).unwrap());
    let taken = companion.keep(listen("taken")).unwrap();
    companion.begin(Switch::On).unwrap();
    assert!(path("early").exists() && path("late").exists());
    drop(early);
    assert!(!path("early").exists() && path("late").exists());
    // Another process has taken the name meanwhile.
    std::fs::remove_file(path("taken")).unwrap();
    let _other = UnixListener::bind(path("taken")).unwrap();
    // The monitor is killed: nothing of it is dropped.
    companion.0.socket.lock().unwrap().take();
    thread.join().unwrap().unwrap();
    assert!(!path("late").exists() && path("taken").exists());
    // Now there is no companion any more.
    drop((late, taken));
}

#[test]
fn nothing_is_kept_after_the_start() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let (companion, _thread) = companion();
    companion.begin(Switch::Off).unwrap();
    let (file, _socket) = SocketFile::listen(&path, rustix::fs::Mode::RUSR, 1).unwrap();
    let error = companion.keep(file).unwrap_err();
    assert!(matches!(error, CompanionError::Refused(_)), "{error}");
    assert!(companion.begin(Switch::Off).is_err());
}

#[test]
fn a_monitor_that_speaks_nonsense_loses_its_companion() {
    for nonsense in [&b"{"[..], b"null", b"{\"open\":\"/etc/shadow\"}", &[0; 9000]] {
        let (ours, theirs) = pair().unwrap();
        let thread = std::thread::spawn(move || serve::serve_on(&theirs));
        // A message that is longer than the socket's buffer is refused here already.
        let _ = rustix::net::send(&ours, nonsense, rustix::net::SendFlags::NOSIGNAL);
        drop(ours);
        assert!(thread.join().unwrap().is_err(), "{nonsense:?}");
    }
}

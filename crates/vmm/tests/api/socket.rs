//! The file of the socket, and the end of the server.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ebb_vmm::api::{ApiError, ApiServer, Client, ClientError, VmInfo};

use crate::double::{Mood, TestVm};
use crate::wire::{PATIENCE, read_answers, request, serve, start_with};

fn get(path: &Path) -> Result<VmInfo, ClientError> {
    Client::new(path, PATIENCE).get("/vm")
}

#[test]
fn only_its_owner_may_use_it_and_it_is_removed_with_the_server() {
    let mut served = serve(Mood::Willing);
    let metadata = fs::symlink_metadata(&served.path).unwrap();
    assert!(metadata.file_type().is_socket());
    assert_eq!(metadata.permissions().mode() & 0o777, 0o600);
    drop(served.server.take());
    assert!(!served.path.exists());
}

#[test]
fn unusable_paths_are_named() {
    let served = serve(Mood::Willing);
    let error = ApiServer::start(&served.path, Arc::new(TestVm::new(Mood::Willing))).unwrap_err();
    assert!(matches!(error, ApiError::Listen(_)), "{error:?}");
    assert!(error.to_string().contains(&format!("{:?}", served.path)), "{error}");
    get(&served.path).unwrap();
}

#[test]
fn the_end_answers_waiting_clients_and_drops_idle_ones() {
    let mut served = serve(Mood::Silent);
    let mut idle = served.connect();
    let mut waiting = served.connect();
    waiting.write_all(request("GET", "/balloon/statistics", "").as_bytes()).unwrap();
    served.vm.wait_for_requests(1);
    drop(served.server.take());
    let answers = read_answers(&mut waiting);
    assert_eq!(answers.len(), 1);
    assert_eq!(answers[0].status, 503);
    assert!(read_answers(&mut idle).is_empty());
}

#[test]
fn the_thread_can_be_prepared_before_it_serves() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("api.sock");
    let (sender, receiver) = std::sync::mpsc::channel();
    let prepare = move || sender.send(std::thread::current().name().map(str::to_owned)).unwrap();
    let vm = Arc::new(TestVm::new(Mood::Willing));
    let _server = start_with(&path, vm, ebb_vmm::api::server::Limits::default(), prepare);
    assert_eq!(receiver.recv_timeout(PATIENCE).unwrap().as_deref(), Some("api"));
}

#[test]
fn the_client_reports_what_is_wrong_with_a_socket() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let missing = path("missing");
    let error = get(&missing).unwrap_err();
    assert!(matches!(&error, ClientError::NoSocket { path } if *path == missing), "{error:?}");
    assert!(error.to_string().contains("--api"), "{error}");
    fs::write(path("file"), "").unwrap();
    assert!(matches!(get(&path("file")), Err(ClientError::NotASocket { .. })));
    assert!(matches!(get(folder.path()), Err(ClientError::NotASocket { .. })));
    drop(UnixListener::bind(path("stale")).unwrap());
    assert!(matches!(get(&path("stale")), Err(ClientError::NotListening { .. })));
    assert!(matches!(get(&path(&"a".repeat(200))), Err(ClientError::PathTooLong { .. })));
}

/// Answers one client with `reply` in place of a monitor.
fn impostor(reply: &'static [u8]) -> ClientError {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("impostor");
    let listener = UnixListener::bind(&path).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut stream, _): (UnixStream, _) = listener.accept().unwrap();
            let _ = std::io::Read::read(&mut stream, &mut [0; 4096]);
            let _ = stream.write_all(reply);
        });
        get(&path).unwrap_err()
    })
}

#[test]
fn the_client_detects_an_impostor() {
    for reply in [
        &b""[..],
        b"SSH-2.0-OpenSSH_9.2p1\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nServer: nginx\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nServer: ebb/9\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nServer: ebb/9\r\nContent-Length: 99999999999\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nServer: ebb/9\r\nContent-Length: 20\r\n\r\n{}",
    ] {
        let error = impostor(reply);
        assert!(matches!(error, ClientError::NotEbb { .. }), "{}: {error:?}", reply.escape_ascii());
    }
    let other_version =
        impostor(b"HTTP/1.1 200 OK\r\nServer: ebb/9\r\nContent-Length: 2\r\n\r\n{}");
    assert!(matches!(other_version, ClientError::Unexpected { .. }), "{other_version:?}");
}

#[test]
fn the_client_gives_up_on_a_monitor_that_does_not_answer() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("stopped");
    let _listener = UnixListener::bind(&path).unwrap();
    let error = Client::new(&path, Duration::from_millis(50)).get::<VmInfo>("/vm").unwrap_err();
    assert!(matches!(error, ClientError::TimedOut { .. }), "{error:?}");
    assert!(error.to_string().contains("50 ms"), "{error}");
}

//! The socket device: streams in both directions, and their ends.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use ebb_agent::protocol::Command;
use ebb_agent::vsock::{self, ClientReport, Service, Sum};
use rustix::process::{Resource, getrlimit, setrlimit};

use crate::guest::{Guest, MIB};
use crate::harness::{Scene, Test, counts, eventually, when};
use crate::moved::{Receive, Route, move_to};
use crate::saved::Restore;
use crate::setup::Setup;

/// The tests.
pub const TESTS: &[Test] = &[
    Test::new("vsock::streams", 240, streams),
    Test::new("vsock::many_and_stuck", 300, many_and_stuck),
    Test::new("vsock::restored", 300, restored),
    Test::new("vsock::migrated", 300, migrated),
];

/// Limit of a read or write in these tests, so that a test fails instead of waiting forever.
const PATIENCE: Duration = Duration::from_secs(60);
/// Port of the echo server in a guest.
const ECHO: u32 = 52;
const SUM: u32 = 53;
const HOLD: u32 = 54;
const SOURCE: u32 = 55;

/// Connects to a port of the guest; an error is the monitor's refusal.
pub fn connect(path: &Path, port: u32) -> Result<UnixStream, String> {
    let mut stream = UnixStream::connect(path).map_err(|error| error.to_string())?;
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    writeln!(stream, "CONNECT {port}").map_err(|error| error.to_string())?;
    let mut line = Vec::new();
    let mut byte = [0];
    while byte != *b"\n" {
        match stream.read(&mut byte) {
            Ok(1) => line.push(byte[0]),
            Ok(_) => return Err("refused".to_owned()),
            Err(error) => return Err(error.to_string()),
        }
    }
    let text = String::from_utf8_lossy(&line).into_owned();
    let port = text.strip_prefix("OK ").and_then(|text| text.trim().parse::<u32>().ok());
    port.map(|_| stream).ok_or(text)
}

/// Starts a server in the guest and waits until it listens.
fn serve(guest: &Guest, path: &Path, port: u32, service: Service) -> u64 {
    let job = guest.send(Command::VsockServe { port, service });
    guest.wait_started(job);
    eventually("the guest's server listens", 30, || connect(path, port).map(drop));
    job
}

/// Serves a port of the host: sends everything back.
fn echo_on_host(path: &Path, port: u32) {
    let listener = UnixListener::bind(of_port(path, port)).unwrap();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            thread::spawn(move || {
                let mut block = vec![0; 16 << 10];
                while let Ok(count) = stream.read(&mut block) {
                    if count == 0 || stream.write_all(&block[..count]).is_err() {
                        break;
                    }
                }
            });
        }
    });
}

fn of_port(path: &Path, port: u32) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!("_{port}"));
    name.into()
}

fn exchange(guest: &Guest, port: u32, connections: u32, bytes: u64) -> ClientReport {
    let result = guest.run(Command::VsockExchange { port, connections, bytes });
    serde_json::from_value(result).unwrap()
}

fn option(path: &Path) -> [String; 2] {
    ["--vsock".to_owned(), format!("path={},cid=7", path.display())]
}

/// Sends the content of a seed and reads what comes back.
fn send_and_receive(mut stream: UnixStream, seed: u64, bytes: u64) -> Sum {
    let mut writer = stream.try_clone().unwrap();
    let sender = thread::spawn(move || {
        vsock::send(&mut writer, seed, bytes).unwrap();
        writer.shutdown(Shutdown::Write).unwrap();
    });
    let sum = vsock::receive(&mut stream).unwrap();
    sender.join().unwrap();
    sum
}

fn streams(scene: &Scene) {
    let path = scene.path("vsock");
    let guest = Setup::new(scene).args(option(&path)).start();
    serve(&guest, &path, ECHO, Service::Echo);
    // A port without a server.
    assert_eq!(connect(&path, 99).unwrap_err(), "refused");
    let bytes = counts(8 * MIB, 64 * MIB);
    let started = Instant::now();
    let stream = connect(&path, ECHO).unwrap();
    assert_eq!(send_and_receive(stream, 1, bytes), Sum::of(1, bytes));
    println!("echo from the host: {bytes} bytes in {} ms", started.elapsed().as_millis());

    // Half of a connection remains open when the other one has ended.
    serve(&guest, &path, SUM, Service::Sum);
    let started = Instant::now();
    let mut stream = connect(&path, SUM).unwrap();
    vsock::send(&mut stream, 2, bytes).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let mut line = String::new();
    BufReader::new(&mut stream).read_line(&mut line).unwrap();
    let sum = Sum::of(2, bytes);
    assert_eq!(line, format!("{} {}\n", sum.bytes, sum.sum));
    println!("to the guest: {bytes} bytes in {} ms", started.elapsed().as_millis());
    serve(&guest, &path, SOURCE, Service::Source);
    let started = Instant::now();
    let mut stream = connect(&path, SOURCE).unwrap();
    writeln!(stream, "{bytes}").unwrap();
    assert_eq!(vsock::receive(&mut stream).unwrap(), Sum::of(bytes, bytes));
    println!("from the guest: {bytes} bytes in {} ms", started.elapsed().as_millis());

    // Connections of the guest.
    echo_on_host(&path, 80);
    let report = exchange(&guest, 80, 2, bytes / 4);
    assert_eq!((report.opened, report.different), (2, 0), "{report:?}");
    assert_eq!((report.received_bytes, report.errors.len()), (bytes / 2, 0), "{report:?}");
    let report = exchange(&guest, 81, 1, 1);
    assert_eq!(report.opened, 0, "{report:?}");
    eventually("all connections have ended", 30, || {
        let open = guest.metric("ebb_vsock_connections");
        when(open == 0, || format!("{open} are open"))
    });
    assert_eq!(guest.metric("ebb_vsock_resets_total"), 0);
    guest.end();
    assert!(!path.exists(), "the socket is left behind");
}

/// Allows this process as many open files as it may have.
fn raise_open_files() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit).unwrap();
}

/// Checks that connections work in both directions.
fn check_both_ways(guest: &Guest, path: &Path) {
    let stream = connect(path, ECHO).unwrap();
    assert_eq!(send_and_receive(stream, 3, 100_000), Sum::of(3, 100_000));
    let report = exchange(guest, 80, 1, 100_000);
    assert_eq!((report.received_bytes, report.different), (100_000, 0), "{report:?}");
}

fn many_and_stuck(scene: &Scene) {
    let many: u32 = counts(300, 1000);
    raise_open_files();
    let path = scene.path("vsock");
    let guest = Setup::new(scene).args(option(&path)).start();
    serve(&guest, &path, ECHO, Service::Echo);
    echo_on_host(&path, 80);
    let mut streams: Vec<_> = (0..many).map(|_| connect(&path, ECHO).unwrap()).collect();
    assert_eq!(guest.vm().vsock.unwrap().connections, u64::from(many));
    for (number, stream) in streams.iter_mut().enumerate() {
        vsock::send(stream, number as u64, 1000).unwrap();
    }
    for (number, stream) in streams.iter_mut().enumerate() {
        stream.shutdown(Shutdown::Write).unwrap();
        assert_eq!(vsock::receive(stream).unwrap(), Sum::of(number as u64, 1000));
    }
    drop(streams);
    let report = exchange(&guest, 80, many, 1000);
    assert_eq!((report.opened, report.different), (many, 0), "{report:?}");
    assert_eq!(report.received_bytes, u64::from(many) * 1000);

    // Readers that never read: in the guest, and at the host. The others go on.
    serve(&guest, &path, HOLD, Service::Hold);
    let mut stuck = connect(&path, HOLD).unwrap();
    stuck.set_nonblocking(true).unwrap();
    let mut written = 0;
    eventually("the guest's buffer is full", 30, || {
        let before = written;
        while let Ok(count) = stuck.write(&[0; 4096]) {
            written += count;
        }
        when(written > 0 && written == before, || format!("{written} bytes"))
    });
    assert!(written < 4 << 20, "{written} bytes were taken without a reader");
    let silent = UnixListener::bind(of_port(&path, 81)).unwrap();
    let job = guest.send(Command::VsockExchange { port: 81, connections: 1, bytes: 4 * MIB });
    let (mut unread, _) = silent.accept().unwrap();
    check_both_ways(&guest, &path);
    let before = guest.process_bytes();
    check_both_ways(&guest, &path);
    assert!(guest.process_bytes() < before + MIB, "the monitor grows");
    assert!(guest.poll(job).is_none(), "the guest sent more than there is room for");
    // All of it arrives when it is read at last.
    assert_eq!(vsock::receive(&mut unread).unwrap(), Sum::of(0, 4 * MIB));
    drop(unread);
    let report: ClientReport = serde_json::from_value(guest.outcome(job).unwrap()).unwrap();
    assert_eq!((report.sent_bytes, report.received_bytes), (4 * MIB, 0), "{report:?}");
    guest.end();
}

fn restored(scene: &Scene) {
    let (path, file) = (scene.path("vsock"), scene.path("vm.snapshot"));
    let guest = Setup::new(scene).args(option(&path)).start();
    serve(&guest, &path, ECHO, Service::Echo);
    // A connection in each direction that is open when the machine is saved.
    let mut open = connect(&path, ECHO).unwrap();
    let silent = UnixListener::bind(of_port(&path, 81)).unwrap();
    let job = guest.send(Command::VsockExchange { port: 81, connections: 1, bytes: 1000 });
    let (_accepted, _) = silent.accept().unwrap();
    // A snapshot alone has no effect on them.
    guest.save(&file);
    open.write_all(b"still").unwrap();
    let mut answer = [0; 5];
    open.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"still");
    std::fs::remove_file(&file).unwrap();
    guest.save_and_end(&file);
    assert_eq!(open.read(&mut answer).unwrap_or(0), 0);
    assert!(!path.exists(), "the socket is left behind");

    let (code, log) = Restore::new(scene, &file).refused();
    assert_eq!(code, Some(1), "{log}");
    assert!(log.contains("--vsock path=PATH"), "{log}");
    // Elsewhere, and with another CID.
    let path = scene.path("other");
    let vsock = format!("path={},cid=9", path.display());
    let guest = Restore::new(scene, &file).args(["--vsock", &vsock]).start();
    let report: ClientReport = serde_json::from_value(guest.outcome(job).unwrap()).unwrap();
    assert!(report.errors[0].contains("reset"), "{report:?}");
    echo_on_host(&path, 80);
    check_both_ways(&guest, &path);
    assert_eq!(guest.vm().vsock.unwrap().cid, 9);
    guest.end();
}

fn migrated(scene: &Scene) {
    let path = scene.path("vsock");
    let guest = Setup::new(scene).args(option(&path)).start();
    serve(&guest, &path, ECHO, Service::Echo);
    let mut open = connect(&path, ECHO).unwrap();
    let silent = UnixListener::bind(of_port(&path, 81)).unwrap();
    let job = guest.send(Command::VsockExchange { port: 81, connections: 1, bytes: 1000 });
    let (_accepted, _) = silent.accept().unwrap();
    let other = scene.path("other");
    let vsock = format!("path={}", other.display());
    let receive = Receive::new(scene, "receiver", Route::Unix).args(["--vsock", &vsock]);
    let (guest, _) = move_to(receive, guest, [] as [&str; 0]);
    assert_eq!(open.read(&mut [0; 5]).unwrap_or(0), 0);
    let report: ClientReport = serde_json::from_value(guest.outcome(job).unwrap()).unwrap();
    assert!(report.errors[0].contains("reset"), "{report:?}");
    echo_on_host(&other, 80);
    check_both_ways(&guest, &other);
    assert_eq!(guest.vm().vsock.unwrap().cid, 7);
    guest.end();
}

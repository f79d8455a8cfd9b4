//! The socket device: streams in both directions, and their ends.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use ebb_agent::protocol::Command;
use ebb_agent::vsock::{self, ClientReport, Service, Sum};

use crate::guest::{Guest, MIB};
use crate::harness::{Scene, Test, counts, eventually, when};
use crate::setup::Setup;

/// The tests.
pub const TESTS: &[Test] = &[Test::new("vsock::streams", 240, streams)];

/// Limit of a read or write in these tests, so that a test fails instead of waiting forever.
const PATIENCE: Duration = Duration::from_secs(60);
/// Port of the echo server in a guest.
const ECHO: u32 = 52;
const SUM: u32 = 53;
const HOLD: u32 = 54;
const SOURCE: u32 = 55;

/// Connects to a port of the guest; an error is the monitor's refusal.
fn connect(path: &Path, port: u32) -> Result<UnixStream, String> {
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
                let mut block = vec![0; 64 << 10];
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
    let _ = (HOLD, PathBuf::new());
    guest.end();
    assert!(!path.exists(), "the socket is left behind");
}

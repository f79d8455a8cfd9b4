//! Clients of the daemon's own socket: hostile ones cost themselves only, and users have rights.

#![allow(clippy::unwrap_used)]

use std::fs::{self, Permissions};
use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Child, Command};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// Time limit for everything.
const LIMIT: Duration = Duration::from_secs(60);
/// Another user than root and the one that runs this test.
const OTHER: u32 = 65_534;

/// Whether a client can still send.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Open,
    Closed,
}

/// A daemon with a machine `m` whose monitor says nothing.
struct Daemon {
    directory: tempfile::TempDir,
    _monitor: UnixListener,
    process: Child,
}

impl Daemon {
    fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        fs::create_dir(path("machines")).unwrap();
        let monitor = UnixListener::bind(path("machines/m.sock")).unwrap();
        let text = format!("machines = [\"{}\"]\n", path("machines").display());
        fs::write(path("ebbd.toml"), text).unwrap();
        let process = Command::new(env!("CARGO_BIN_EXE_ebbd"))
            .args(["--log", "error", "--config"])
            .arg(path("ebbd.toml"))
            .arg("--state")
            .arg(path("state"))
            .arg("--socket")
            .arg(path("ebbd.sock"))
            .spawn()
            .unwrap();
        let daemon = Self { directory, _monitor: monitor, process };
        let started = Instant::now();
        while !daemon.is_well() {
            assert!(started.elapsed() < LIMIT, "the daemon does not answer");
            sleep(Duration::from_millis(50));
        }
        // All users may connect.
        fs::set_permissions(daemon.directory.path(), Permissions::from_mode(0o755)).unwrap();
        fs::set_permissions(daemon.path("ebbd.sock"), Permissions::from_mode(0o666)).unwrap();
        daemon
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn connect(&self) -> Option<UnixStream> {
        let stream = UnixStream::connect(self.path("ebbd.sock")).ok()?;
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        Some(stream)
    }

    /// All that is answered to these bytes; `end` says whether more may follow them.
    fn send(&self, bytes: &[u8], end: End) -> String {
        let mut stream = self.connect().unwrap();
        // The daemon may hang up in the middle.
        let _ = stream.write_all(bytes);
        if end == End::Closed {
            let _ = stream.shutdown(Shutdown::Write);
        }
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        String::from_utf8_lossy(&answer).into_owned()
    }

    /// The status and the document.
    fn ask(&self, method: &str, target: &str, body: &Value) -> (u16, Value) {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let answer = self.send(request(method, target, &body).as_bytes(), End::Open);
        let status = answer.split(' ').nth(1).and_then(|word| word.parse().ok());
        let document = answer.split_once("\r\n\r\n").map_or("", |(_, text)| text);
        (status.unwrap_or(0), serde_json::from_str(document).unwrap_or_default())
    }

    fn is_well(&self) -> bool {
        self.connect().is_some() && self.ask("GET", "/status", &Value::Null).0 == 200
    }

    fn resident_kib(&self) -> u64 {
        let text = fs::read_to_string(format!("/proc/{}/status", self.process.id())).unwrap();
        let line = text.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
        line.split_ascii_whitespace().nth(1).unwrap().parse().unwrap()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn request(method: &str, target: &str, body: &str) -> String {
    format!(
        "{method} {target} HTTP/1.1\r\nHost: ebbd\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    )
}

/// Does something as another user; only root can.
fn as_another_user<T: Send>(work: impl FnOnce() -> T + Send) -> Option<T> {
    if !rustix::process::geteuid().is_root() {
        return None;
    }
    std::thread::scope(|scope| {
        let as_other = scope.spawn(|| {
            // Of this thread only (setuid(2), "C library/kernel differences").
            rustix::thread::set_thread_uid(rustix::thread::Uid::from_raw(OTHER)).unwrap();
            work()
        });
        Some(as_other.join().unwrap())
    })
}

#[test]
fn what_a_client_sends_costs_itself() {
    let daemon = Daemon::start();
    let before_kib = daemon.resident_kib();
    let deep = "[".repeat(50_000);
    let long = format!("\"{}\"", "a".repeat(1 << 20));
    let named = |text: &str| format!("{{\"machine\": {text}}}");
    let arrival = |text: &str| format!("{{\"machine\": \"a\", \"memory_bytes\": {text}}}");
    let refused = [
        request("PUT", "/hold", &deep),
        request("PUT", "/hold", &long),
        request("PUT", "/hold", "{"),
        request("PUT", "/hold", &named("5")),
        request("PUT", "/hold", &named("\"missing\"")),
        request("PUT", "/hold", "{\"machine\": \"m\", \"x\": 1}"),
        request("PUT", "/release", &named("\"missing\"")),
        request("PUT", "/admit", &arrival("0")),
        request("PUT", "/admit", &arrival("-1")),
        request("PUT", "/admit", &arrival("1e99")),
        request("PUT", "/admit", "{\"machine\": \"\", \"memory_bytes\": 1}"),
        request("PUT", "/admit", &arrival("1").replace("\"a\"", &long[(1 << 20) - 300..])),
        request("GET", "/fit?memory_bytes=99999999999999999999", ""),
        request("GET", "/fit?memory_bytes=5&profile=none", ""),
        request("GET", "/fit?memory_bytes=5&memory_bytes=5", ""),
        request("GET", "/status/../../etc/passwd", ""),
        request("DELETE", "/status", ""),
        request("PUT", "/status", ""),
    ];
    for request in refused {
        let answer = daemon.send(request.as_bytes(), End::Open);
        let shown = request.get(..120).unwrap_or(&request);
        assert!(answer.starts_with("HTTP/1.1 4"), "{shown}: {answer}");
    }
    let broken = [
        format!("GET /status HTTP/1.1\r\nx: {}\r\n\r\n", "a".repeat(1 << 20)),
        format!("GET /{} HTTP/1.1\r\n\r\n", "a".repeat(1 << 20)),
        "GET /status HTTP/9.9\r\n\r\n".to_owned(),
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_owned(),
        "PUT /hold HTTP/1.1\r\nContent-Length: 18446744073709551615\r\n\r\nx".to_owned(),
        "PUT /hold HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nx".to_owned(),
        "PUT /hold HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffffff\r\n".to_owned(),
        "\0\0\0\0".to_owned(),
    ];
    for request in broken {
        let answer = daemon.send(request.as_bytes(), End::Closed);
        let shown = request.get(..120).unwrap_or(&request);
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 4"), "{shown}: {answer}");
    }
    assert!(daemon.ask("GET", "/fit?memory_bytes=18446744073709551615", &Value::Null).0 == 200);
    let (status, admission) =
        daemon.ask("PUT", "/admit", &json!({ "machine": "a", "memory_bytes": u64::MAX }));
    assert_eq!((status, &admission["is_admitted"]), (200, &json!(false)));
    assert!(daemon.is_well());
    let grown_kib = daemon.resident_kib().saturating_sub(before_kib);
    assert!(grown_kib < 32 << 10, "it has grown by {grown_kib} KiB");
}

#[test]
fn clients_that_stay_keep_operators_not_out() {
    let daemon = Daemon::start();
    let (_, status) = daemon.ask("GET", "/status", &Value::Null);
    // More than is left of it.
    let whole = status["host"]["total_bytes"].as_u64().unwrap();
    let stay = || {
        let mut clients = Vec::new();
        for number in 0..1_000 {
            let Some(mut client) = daemon.connect() else { break };
            let text = match number % 3 {
                0 => "GET /status HTTP/1.1\r\nHost:".to_owned(),
                1 => String::new(),
                _ => {
                    let arrival = json!({ "machine": format!("w{number}"),
                        "memory_bytes": whole, "wait_ms": 600_000 });
                    request("PUT", "/admit", &arrival.to_string())
                }
            };
            let _ = client.write_all(text.as_bytes());
            clients.push(client);
        }
        clients
    };
    let Some(clients) = as_another_user(stay) else { return };
    assert_eq!(clients.len(), 1_000);
    assert!(daemon.is_well());
    // They wait in the queue, which has room for more; and no user waits for another one's
    // machines.
    let waits = json!({ "machine": "x", "memory_bytes": whole });
    let waiting = || {
        let text = daemon.send(request("GET", "/metrics", "").as_bytes(), End::Open);
        let mut lines = text.lines();
        lines.find_map(|line| line.strip_prefix("ebbd_admissions_waiting ")?.parse::<u64>().ok())
    };
    assert!(waiting() > Some(100), "{:?}", waiting());
    let (status, admission) = daemon.ask("PUT", "/admit", &waits);
    assert_eq!((status, &admission["before"]), (200, &json!(0)), "{admission}");
    // All leave, and their places with them.
    drop(clients);
    let started = Instant::now();
    while waiting() != Some(0) {
        assert!(started.elapsed() < LIMIT, "the queue is not left");
        sleep(Duration::from_millis(50));
    }
}

#[test]
fn what_is_larger_than_the_host_does_not_wait() {
    let daemon = Daemon::start();
    let arrival = json!({ "machine": "x", "memory_bytes": u64::MAX, "wait_ms": 600_000 });
    let (status, admission) = daemon.ask("PUT", "/admit", &arrival);
    assert_eq!((status, &admission["is_admitted"]), (200, &json!(false)), "{admission}");
}

#[test]
fn users_have_rights() {
    let daemon = Daemon::start();
    let machine = json!({ "machine": "m" });
    let arrival = json!({ "machine": "x", "memory_bytes": 4096 });
    assert_eq!(daemon.ask("PUT", "/hold", &machine).0, 200);
    assert_eq!(daemon.ask("PUT", "/config/reload", &Value::Null).0, 200);
    let as_other = || {
        for target in ["/status", "/plan", "/config", "/fit?memory_bytes=5"] {
            assert_eq!(daemon.ask("GET", target, &Value::Null).0, 200, "{target}");
        }
        assert_eq!(daemon.ask("PUT", "/admit", &arrival).0, 200);
        assert_eq!(daemon.ask("PUT", "/config/reload", &Value::Null).0, 403);
        let (status, answer) = daemon.ask("PUT", "/release", &machine);
        assert_eq!(status, 403);
        let remedy = answer["error"]["remedy"].as_str().unwrap();
        assert!(remedy.contains("owner of the machine's socket"), "{answer}");
        // Whether there is such a machine is the same to this user.
        assert_eq!(daemon.ask("PUT", "/hold", &json!({ "machine": "missing" })).0, 403);
    };
    if as_another_user(as_other).is_none() {
        return;
    }
    chown(daemon.path("machines/m.sock"), Some(OTHER), None).unwrap();
    let released = as_another_user(|| daemon.ask("PUT", "/release", &machine)).unwrap();
    assert_eq!((released.0, &released.1["is_held"]), (200, &json!(false)));
}

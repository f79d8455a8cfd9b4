//! The page in a real browser: what machines are called, and what monitors say, stays text.

#![allow(clippy::unwrap_used)]

mod fake;

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use fake::monitor;

const LIMIT: Duration = Duration::from_secs(90);
const MIB: u64 = 1 << 20;
/// Names that would be markup, and would run, if the page took them for that. A slash cannot be in
/// a file's name.
const EVIL: &str = "<img src=x onerror=document.title='evil'>";
const BOLD: &str = "<b id=evil>&amp;\u{202e}";

/// A guest that says impossible numbers.
fn answer(request: &str) -> (u16, Value) {
    let most = u64::MAX;
    let document = match request {
        "GET /vm" => json!({ "state": "running", "memory_bytes": 512 * MIB }),
        "GET /balloon" => json!({ "target_bytes": 0, "actual_bytes": most, "state": "active",
            "negotiated_features": [] }),
        "GET /balloon/statistics" => json!({ "age_ms": 0, "statistics": {
            "total_memory_bytes": most, "available_memory_bytes": most,
            "free_memory_bytes": most, "disk_caches_bytes": most, "major_faults": most,
            "swap_out_bytes": most, "oom_kills": most } }),
        _ => json!({}),
    };
    (200, document)
}

struct Daemon(Child);

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The answer to a request with this header `Host`.
fn ask(port: u16, request: &str, host: &str) -> Option<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    let text = format!("{request} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
    stream.write_all(text.as_bytes()).ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    Some(answer)
}

fn machines(port: u16) -> Vec<Value> {
    let answer = ask(port, "GET /status", "localhost").unwrap_or_default();
    let document = answer.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    let document: Value = serde_json::from_str(document).unwrap_or_default();
    document["machines"].as_array().cloned().unwrap_or_default()
}

/// What a browser has made of the page after a while.
fn browse(directory: &Path, port: u16) -> String {
    let output = Command::new("chromium")
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"])
        .args(["--disable-background-networking", "--disable-component-update", "--disable-sync"])
        .arg(format!("--user-data-dir={}", directory.join("browser").display()))
        .args(["--virtual-time-budget=4000", "--dump-dom"])
        .arg(format!("http://127.0.0.1:{port}/"))
        .output()
        .unwrap_or_else(|error| panic!("chromium: {error}; scripts/install-deps.sh installs it"));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {errors}", output.status);
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn hostile_names_and_numbers_in_a_browser() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    fs::create_dir(path("machines")).unwrap();
    for name in [EVIL, BOLD, "web-1"] {
        monitor(&path("machines").join(format!("{name}.sock")), |request: &str| {
            Some(answer(request))
        });
    }
    let text = format!("machines = [\"{}\"]\ninterval_ms = 200\n", path("machines").display());
    fs::write(path("ebbd.toml"), text).unwrap();
    // A port that is free now. Another program could take it, and the daemon would say so.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let _daemon = Daemon(
        Command::new(env!("CARGO_BIN_EXE_ebbd"))
            .args(["--log", "error", "--listen", &format!("127.0.0.1:{port}"), "--config"])
            .arg(path("ebbd.toml"))
            .arg("--state")
            .arg(path("state"))
            .arg("--socket")
            .arg(path("ebbd.sock"))
            .spawn()
            .unwrap(),
    );
    let started = Instant::now();
    while machines(port).iter().filter(|machine| machine["machine"].is_object()).count() < 3 {
        assert!(started.elapsed() < LIMIT, "{:?}", machines(port));
        thread::sleep(Duration::from_millis(100));
    }
    let page = browse(directory.path(), port);
    for name in ["web-1", &EVIL.replace('<', "&lt;"), &BOLD.replace('&', "&amp;")] {
        let name = name.replace('<', "&lt;").replace('>', "&gt;");
        assert!(page.contains(&name), "no {name} in {page}");
    }
    assert!(page.contains("<title>ebbd</title>"), "a name ran: {page}");
    assert!(!page.contains("<img") && !page.contains("id=\"evil\""), "{page}");
    // The machine has 512 MiB, whatever its guest says.
    assert!(page.contains("512 MiB"), "{page}");
    assert!(page.contains("available"), "{page}");
    // A whole balloon, and nothing beside it.
    assert!(page.contains("returned 0 B, balloon 512 MiB"), "{page}");
    assert!(page.contains("Dashed: tight below"), "{page}");
    assert!(!page.contains("does not answer;"), "{page}");
    only_reading_for_this_host(port);
}

fn only_reading_for_this_host(port: u16) {
    let is = |answer: Option<String>, status: &str| {
        let answer = answer.unwrap();
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{status}: {answer}");
        answer
    };
    let metrics = is(ask(port, "GET /metrics", "localhost"), "200");
    assert!(metrics.contains("ebbd_machine_up{machine=\"web-1\",monitor=\"ebb\""), "{metrics}");
    let page = is(ask(port, "GET /", &format!("127.0.0.1:{port}")), "200").to_lowercase();
    for header in ["content-security-policy: default-src 'none'", "nosniff", "no-store"] {
        assert!(page.contains(header), "{header}: {page}");
    }
    for request in ["PUT /hold", "PUT /admit", "PUT /config/reload", "GET /config", "GET /fit"] {
        is(ask(port, request, "localhost"), "404");
    }
    is(ask(port, "PUT /status", "localhost"), "405");
    for host in ["evil.example", "localhost.evil.example", ""] {
        is(ask(port, "GET /status", host), "421");
    }
}

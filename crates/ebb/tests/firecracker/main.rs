//! Requests recorded from a real Firecracker, sent to `ebb firecracker`: the answers are the same.
//!
//! README.md says how the recording was made.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// Far longer than any answer takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// A monitor, killed when it is dropped.
struct Monitor {
    child: Child,
    socket: PathBuf,
}

impl Drop for Monitor {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Monitor {
    fn start(directory: &Path, options: &[String]) -> Self {
        let socket = directory.join("api.sock");
        let log = fs::File::create(directory.join("output")).unwrap();
        let child = Command::new(env!("CARGO_BIN_EXE_ebb"))
            .arg("firecracker")
            .arg("--api-sock")
            .arg(&socket)
            .args(options)
            .args(["--emulated-kvm", "use"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        Self { child, socket }
    }

    fn connect(&mut self) -> UnixStream {
        let end = Instant::now() + PATIENCE;
        loop {
            match UnixStream::connect(&self.socket) {
                Ok(stream) => {
                    stream.set_read_timeout(Some(PATIENCE)).unwrap();
                    return stream;
                }
                Err(error) => {
                    assert!(self.child.try_wait().unwrap().is_none(), "the monitor has ended");
                    assert!(Instant::now() < end, "no API: {error}");
                    sleep(Duration::from_millis(10));
                }
            }
        }
    }
}

/// The files that requests name; those of `record.py`.
fn prepare(directory: &Path) {
    let mut kernel = b"\x7fELF\x02\x01\x01".to_vec();
    kernel.resize(16, 0);
    let entry = 0x0100_0000_u64;
    kernel.extend([2, 0, 62, 0, 1, 0, 0, 0]);
    for number in [entry, 64, 0] {
        kernel.extend(number.to_le_bytes());
    }
    kernel.extend([0, 0, 0, 0, 64, 0, 56, 0, 1, 0, 64, 0, 0, 0, 0, 0]);
    kernel.extend([1, 0, 0, 0, 5, 0, 0, 0]);
    for number in [4096, entry, entry, 4, 4, 4096] {
        kernel.extend(number.to_le_bytes());
    }
    kernel.resize(4096, 0);
    kernel.extend([0xfa, 0xf4, 0xeb, 0xfd]);
    let text = "neither ELF nor bzImage\n".repeat(200).into_bytes();
    for (name, content) in [
        ("kernel", kernel),
        ("not-a-kernel", text),
        ("initrd", vec![b'0'; 4096]),
        ("disk", vec![0; 1 << 20]),
        ("disk2", vec![0; 2 << 20]),
        ("garbage", b"garbage".to_vec()),
    ] {
        fs::write(directory.join(name), content).unwrap();
    }
    fs::create_dir(directory.join("folder")).unwrap();
    let path = |name: &str| directory.join(name).display().to_string();
    let config = json!({
        "boot-source": { "kernel_image_path": path("kernel"), "boot_args": "quiet" },
        "drives": [{
            "drive_id": "rootfs",
            "path_on_host": path("disk"),
            "is_root_device": true,
            "is_read_only": false,
        }],
        "machine-config": { "vcpu_count": 1, "mem_size_mib": 128 },
    });
    fs::write(directory.join("config.json"), config.to_string()).unwrap();
    let metadata = json!({ "latest": { "meta-data": { "ami-id": "ami-12345678" } } });
    fs::write(directory.join("metadata.json"), metadata.to_string()).unwrap();
}

/// JSON as Python writes it, since messages about invalid JSON count its columns.
fn as_python(value: &Value) -> String {
    let list = |parts: Vec<String>| parts.join(", ");
    match value {
        Value::Object(members) => {
            let members = members.iter();
            let member = |(name, value): (&String, &Value)| {
                format!("{}: {}", ascii(&json!(name)), as_python(value))
            };
            format!("{{{}}}", list(members.map(member).collect()))
        }
        Value::Array(elements) => format!("[{}]", list(elements.iter().map(as_python).collect())),
        other => ascii(other),
    }
}

fn ascii(value: &Value) -> String {
    let escape = |letter: char| match letter {
        letter if letter.is_ascii() => letter.to_string(),
        letter => format!("\\u{:04x}", u32::from(letter)),
    };
    value.to_string().chars().map(escape).collect()
}

/// The answer to a request: status, body, and whether it is marked as deprecated.
fn ask(client: &mut UnixStream, request: &Value, directory: &str) -> Value {
    let body = match &request[2] {
        Value::Null => None,
        Value::String(text) => Some(text.clone()),
        value => Some(as_python(value)),
    };
    let body = body.map(|body| body.replace("$DIR", directory));
    let (method, path) = (request[0].as_str().unwrap(), request[1].as_str().unwrap());
    let mut text = format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\n");
    if let Some(body) = &body {
        write!(text, "Content-Length: {}\r\n", body.len()).unwrap();
    }
    text += "\r\n";
    text += body.as_deref().unwrap_or_default();
    client.write_all(text.as_bytes()).unwrap();
    let mut answer = Vec::new();
    let (head, mut rest) = loop {
        let mut chunk = [0; 4096];
        let length = client.read(&mut chunk).expect("an answer");
        assert!(length > 0, "{method} {path}: no answer");
        answer.extend_from_slice(&chunk[..length]);
        let text = String::from_utf8_lossy(&answer).into_owned();
        if let Some((head, rest)) = text.split_once("\r\n\r\n") {
            break (head.to_ascii_lowercase(), rest.to_owned());
        }
    };
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
    let length: usize = length.map_or(0, |length| length.parse().unwrap());
    while rest.len() < length {
        let mut chunk = [0; 4096];
        let more = client.read(&mut chunk).expect("the rest of an answer");
        rest += std::str::from_utf8(&chunk[..more]).unwrap();
    }
    let status: u16 = head.split(' ').nth(1).unwrap().parse().unwrap();
    let rest = rest.replace(directory, "$DIR");
    let body = serde_json::from_str(&rest).unwrap_or(if rest.is_empty() {
        Value::Null
    } else {
        Value::String(rest)
    });
    let mut recorded = json!({ "request": request, "status": status, "body": body });
    if head.contains("deprecation: true") {
        recorded["deprecated"] = json!(true);
    }
    recorded
}

/// Sends the requests of a session; returns the differences by index.
fn replay(session: &Value) -> BTreeMap<u64, String> {
    // As long as the one of the recording: messages name columns behind it.
    let directory = tempfile::Builder::new().prefix("tmp").rand_bytes(8).tempdir_in("/tmp");
    let directory = directory.unwrap();
    prepare(directory.path());
    let here = directory.path().to_str().unwrap().to_owned();
    let options = session["options"].as_array().cloned().unwrap_or_default();
    let options: Vec<String> =
        options.iter().map(|option| option.as_str().unwrap().replace("$DIR", &here)).collect();
    let mut monitor = Monitor::start(directory.path(), &options);
    let mut client = monitor.connect();
    let mut differences = BTreeMap::new();
    for (index, recorded) in (0..).zip(session["requests"].as_array().unwrap()) {
        if recorded["restart"] == true {
            drop((client, monitor));
            monitor = Monitor::start(directory.path(), &options);
            client = monitor.connect();
            continue;
        }
        let answer = ask(&mut client, &recorded["request"], &here);
        if answer != *recorded {
            differences.insert(index, format!("recorded {recorded}\n  answered {answer}"));
        }
    }
    differences
}

fn read(name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/firecracker").join(name);
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn answers_are_those_of_a_real_firecracker() {
    let (fixtures, exceptions) = (read("fixtures/v1.16.1.json"), read("exceptions.json"));
    let mut total = 0;
    let mut problems = Vec::new();
    let mut excepted = 0;
    for session in fixtures["sessions"].as_array().unwrap() {
        let name = &session["name"];
        if session["kvm"] == true && !Path::new("/dev/kvm").exists() {
            println!("{name}: not sent, there is no /dev/kvm");
            continue;
        }
        let requests = session["requests"].as_array().unwrap();
        total += requests.iter().filter(|recorded| recorded["restart"] != true).count();
        let mut differences = replay(session);
        for exception in exceptions.as_array().unwrap() {
            if exception["session"] == *name {
                excepted += 1;
                let index = exception["request"].as_u64().unwrap();
                if differences.remove(&index).is_none() {
                    problems.push(format!("{name} {index}: an exception that does not differ"));
                }
            }
        }
        let shown = differences.iter().map(|(index, text)| format!("{name} {index}: {text}"));
        problems.extend(shown);
    }
    println!("{} of {total} answers are the same, {excepted} exceptions", total - excepted);
    assert!(total >= 200);
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

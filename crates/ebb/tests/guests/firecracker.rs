//! A guest behind Firecracker's API: configured, started, paused, saved and continued as its
//! clients do it.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command as Program;
use std::time::Duration;

use ebb_agent::protocol::Command;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::guest::{Guest, MIB};
use crate::harness::{Scene, Test, eventually, when};
use crate::net::{Tap, run};
use crate::setup::CMDLINE;

/// The tests.
pub const TESTS: &[Test] = &[
    Test::new("firecracker::life", 300, life),
    Test::new("firecracker::config_file", 120, config_file),
];

const PATIENCE: Duration = Duration::from_secs(60);

/// Kernel arguments of the guests.
pub fn boot_args() -> String {
    format!("{CMDLINE} tsc=reliable")
}

/// A request with its status and document.
fn ask(socket: &Path, method: &str, path: &str, body: &Value) -> (u16, Value) {
    let mut stream = UnixStream::connect(socket).expect("the API's socket");
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let body = if body.is_null() { String::new() } else { body.to_string() };
    let length = body.len();
    let head = format!("{method} {path} HTTP/1.1\r\nConnection: close\r\nContent-Length: {length}");
    stream.write_all(format!("{head}\r\n\r\n{body}").as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    let (head, body) = answer.split_once("\r\n\r\n").expect("an HTTP answer");
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, serde_json::from_str(body).unwrap_or_default())
}

/// Makes a request that succeeds without a document.
#[track_caller]
pub fn done(socket: &Path, method: &str, path: &str, body: &Value) {
    assert_eq!(ask(socket, method, path, body), (204, Value::Null), "{method} {path}");
}

/// The document that a request is answered with.
pub fn document(socket: &Path, path: &str) -> Value {
    let (status, document) = ask(socket, "GET", path, &Value::Null);
    assert_eq!(status, 200, "{document}");
    document
}

/// Starts the program without a machine, and waits for its API.
pub fn serve(scene: &Scene, name: &str, options: &[&str]) -> Guest {
    let socket = scene.path(name);
    let mut program = Program::new(&scene.world.ebb);
    program.arg("firecracker").arg("--api-sock").arg(&socket).args(options);
    let guest = Guest::spawn(program, socket.clone(), &scene.guests());
    eventually("Firecracker's API", 30, || {
        UnixStream::connect(&socket).map(drop).map_err(|error| error.to_string())
    });
    guest
}

fn life(scene: &Scene) {
    let mut guest = serve(scene, "api", &["--id", "life"]);
    let api = guest.socket().clone();
    let disk = scene.path("disk");
    std::fs::write(&disk, vec![7; MIB as usize]).unwrap();
    let world = &scene.world;
    done(&api, "PUT", "/machine-config", &json!({ "vcpu_count": 1, "mem_size_mib": 256 }));
    let boot = json!({
        "kernel_image_path": world.vmlinux, "initrd_path": world.initrd,
        "boot_args": boot_args(),
    });
    done(&api, "PUT", "/boot-source", &boot);
    let drive = json!({
        "drive_id": "data", "path_on_host": disk, "is_root_device": false, "is_read_only": false,
    });
    done(&api, "PUT", "/drives/data", &drive);
    let balloon = json!({
        "amount_mib": 0, "deflate_on_oom": true, "stats_polling_interval_s": 1,
        "free_page_reporting": true, "free_page_hinting": true,
    });
    done(&api, "PUT", "/balloon", &balloon);
    let tap = Tap::new(scene, 3);
    let network = json!({ "iface_id": "eth0", "host_dev_name": tap.name });
    done(&api, "PUT", "/network-interfaces/eth0", &network);
    let metadata = json!({ "version": "V2", "network_interfaces": ["eth0"] });
    done(&api, "PUT", "/mmds/config", &metadata);
    done(&api, "PUT", "/mmds", &json!({ "latest": { "name": "life" } }));
    done(&api, "PUT", "/metrics", &json!({ "metrics_path": scene.path("metrics") }));
    assert_eq!(document(&api, "/")["state"], "Not started");
    done(&api, "PUT", "/actions", &json!({ "action_type": "InstanceStart" }));
    guest.wait_ready(1);
    assert!(guest.read_file("/proc/cmdline").trim_end().ends_with("tsc=reliable pci=off"));

    eventually("the driver takes a target", 60, || {
        let (status, fault) = ask(&api, "PATCH", "/balloon", &json!({ "amount_mib": 64 }));
        when(status == 204, || fault.to_string())
    });
    eventually("the balloon is inflated", 60, || {
        let statistics = document(&api, "/balloon/statistics");
        let is_full = statistics["actual_mib"] == 64 && statistics["free_memory"].is_u64();
        when(is_full, || statistics.to_string())
    });

    done(&api, "PATCH", "/balloon/hinting/start", &Value::Null);
    eventually("the guest has named its free pages", 60, || {
        let status = document(&api, "/balloon/hinting/status");
        // Done, and stopped (virtio 1.3 section 5.5.6.5).
        when(status == json!({ "host_cmd": 1, "guest_cmd": 0 }), || status.to_string())
    });

    assert_eq!(run(&guest, "od -An -tu1 -N1 /dev/vda").trim(), "7");
    let other = scene.path("other-disk");
    std::fs::write(&other, vec![9; 2 * MIB as usize]).unwrap();
    done(&api, "PATCH", "/drives/data", &json!({ "drive_id": "data", "path_on_host": other }));
    eventually("the guest sees the other image", 30, || {
        let sectors = guest.read_file("/sys/block/vda/size");
        when(sectors.trim() == "4096", || sectors)
    });
    run(&guest, "blockdev --flushbufs /dev/vda");
    assert_eq!(run(&guest, "od -An -tu1 -N1 /dev/vda").trim(), "9");

    run(&guest, "ifconfig eth0 10.77.0.2 netmask 255.255.255.0 up");
    run(&guest, "ip route add 169.254.169.254 dev eth0");
    let token = get_token(&guest);
    let with_token = format!("X-metadata-token: {token}\\r\\n");
    assert!(http(&guest, "GET /latest/name", "").contains(" 401 "));
    assert!(http(&guest, "GET /latest/name", &with_token).ends_with("\r\n\r\nlife"));
    // Longer than a packet.
    let long = "x".repeat(5000);
    done(&api, "PATCH", "/mmds", &json!({ "latest": { "long": long } }));
    assert!(http(&guest, "GET /latest/long", &with_token).ends_with(&long));

    done(&api, "PATCH", "/vm", &json!({ "state": "Paused" }));
    assert_eq!(document(&api, "/")["state"], "Paused");
    let files = json!({
        "snapshot_path": scene.path("vm.state"), "mem_file_path": scene.path("vm.memory"),
    });
    done(&api, "PUT", "/snapshot/create", &files);
    done(&api, "PUT", "/actions", &json!({ "action_type": "FlushMetrics" }));
    let metrics = std::fs::read_to_string(scene.path("metrics")).unwrap();
    let line: Value = serde_json::from_str(metrics.lines().next().unwrap()).unwrap();
    assert!(line["patch_api_requests"]["balloon_fails"].is_u64(), "{line}");
    guest.signal(Signal::TERM);
    guest.wait_end();

    let second = serve(scene, "api2", &[]);
    let api = second.socket().clone();
    let load = json!({
        "snapshot_path": scene.path("vm.state"),
        "mem_backend": { "backend_path": scene.path("vm.memory"), "backend_type": "File" },
        "enable_diff_snapshots": true,
        "resume_vm": true,
    });
    done(&api, "PUT", "/snapshot/load", &load);
    assert_eq!(document(&api, "/")["state"], "Running");
    assert_eq!(document(&api, "/vm/config")["drives"][0]["drive_id"], "data");
    second.run(Command::MemInfo);
    assert_eq!(document(&api, "/balloon/statistics")["actual_mib"], 64);
    assert_eq!(document(&api, "/vm/config")["drives"][0]["path_on_host"], json!(other));
    // Tokens and metadata are not part of a snapshot.
    assert!(http(&second, "GET /latest/name", &with_token).contains(" 401 "));
    let with_token = format!("X-metadata-token: {}\\r\\n", get_token(&second));
    assert!(http(&second, "GET /latest/name", &with_token).contains(" 404 "));
    done(&api, "PUT", "/mmds", &json!({ "latest": { "name": "second life" } }));
    assert!(http(&second, "GET /latest/name", &with_token).ends_with("second life"));
}

/// Asks the metadata service in the guest. `fields` are as printf(1) takes them.
fn http(guest: &Guest, request: &str, fields: &str) -> String {
    let text = format!("{request} HTTP/1.1\\r\\n{fields}\\r\\n");
    run(guest, &format!("printf '{text}' | nc -w 30 169.254.169.254 80"))
}

fn get_token(guest: &Guest) -> String {
    let lifetime = "X-metadata-token-ttl-seconds: 600\\r\\n";
    let answer = http(guest, "PUT /latest/api/token", lifetime);
    answer.rsplit_once("\r\n\r\n").expect("a token").1.to_owned()
}

fn config_file(scene: &Scene) {
    let world = &scene.world;
    let config = json!({
        "boot-source": {
            "kernel_image_path": world.vmlinux, "initrd_path": world.initrd,
            "boot_args": boot_args(),
        },
        "drives": [],
        "machine-config": { "vcpu_count": 1, "mem_size_mib": 128 },
    });
    let path = scene.path("config.json");
    std::fs::write(&path, config.to_string()).unwrap();
    let mut program = Program::new(&world.ebb);
    program.arg("firecracker").arg("--no-api").arg("--config-file").arg(&path);
    let mut guest = Guest::spawn(program, scene.path("none"), &scene.guests());
    guest.wait_ready(1);
    guest.send(Command::Reboot);
    assert_eq!(guest.wait_end().0, Some(0));
}

//! Requests that the API refuses on a real machine, without side effects.

use ebb_vmm::api::{BalloonFeature, VmInfo};

use crate::guest::MIB;
use crate::harness::{Scene, Test};
use crate::setup::Setup;

/// The tests.
pub const TESTS: &[Test] = &[
    Test::new("api::refusals", 180, refusals),
    Test::new("api::machine_without_balloon", 180, machine_without_balloon),
    Test::new("api::ctl", 180, ctl),
];

fn refusals(scene: &Scene) {
    // The proposed features change nothing for Linux's driver.
    let options = "reporting=on,init_reported=on,init_on_inflate=on";
    let guest = Setup::new(scene).balloon(options).start();
    guest.inflate_to(32 * MIB);
    let too_large = format!("{{\"target_bytes\":{}}}", 513 * MIB);
    for (method, target, body, status, word) in [
        ("PUT", "/balloon", "{\"target_bytes\":\"1G\"}", 422, "target_bytes"),
        ("PUT", "/balloon", "{\"target_bytes\":-1}", 422, "target_bytes"),
        ("PUT", "/balloon", "{\"target_bytes\":1.5}", 422, "target_bytes"),
        ("PUT", "/balloon", &too_large, 422, "memory"),
        ("PUT", "/balloon", "{\"target_bytes\":4097}", 422, "4096"),
        ("PUT", "/balloon", "{\"target\":4096}", 422, "target_bytes"),
        ("PUT", "/balloon", "{\"target_bytes\":4096,\"more\":1}", 422, "more"),
        ("PUT", "/balloon", "{", 400, "JSON"),
        ("PUT", "/balloon", "", 400, "target_bytes"),
        (
            "PUT",
            "/balloon/statistics-interval",
            "{\"interval_seconds\":null}",
            422,
            "interval_seconds",
        ),
        ("PUT", "/vm/pause", "{\"now\":true}", 422, "now"),
        ("GET", "/balloon/statistics?age=1", "", 400, "age"),
        ("GET", "/nothing", "", 404, "/nothing"),
        ("DELETE", "/vm", "", 405, "GET"),
        ("GET", "/vm/pause", "", 405, "PUT"),
    ] {
        let (found, message) = guest.refused(method, target, body);
        assert_eq!(found, status, "{method} {target} {body}: {message}");
        assert!(message.contains(word), "{method} {target} {body}: {message}");
    }
    for (body, status, word) in [
        ("{\"min_order\":19}", 422, "min_order"),
        ("{\"timeout_ms\":0}", 422, "timeout_ms"),
        ("{\"order\":9}", 422, "order"),
        // Linux's driver does not support the request.
        ("", 409, "host requests"),
        ("{\"min_order\":9,\"timeout_ms\":100}", 409, "host requests"),
    ] {
        let (found, message) = guest.refused("PUT", "/balloon/free-pages", body);
        assert_eq!(found, status, "{body}: {message}");
        assert!(message.contains(word), "{body}: {message}");
    }
    let info = guest.balloon();
    assert_eq!((info.target_bytes, info.actual_bytes), (32 * MIB, 32 * MIB));
    assert!(info.offered_features.contains(&BalloonFeature::HostRequest), "{info:?}");
    assert!(!info.negotiated_features.contains(&BalloonFeature::HostRequest), "{info:?}");
    for proposed in [BalloonFeature::DeviceInitReported, BalloonFeature::DeviceInitOnInflate] {
        assert!(info.offered_features.contains(&proposed), "{info:?}");
        assert!(!info.negotiated_features.contains(&proposed), "{info:?}");
    }
    assert_eq!(guest.metric("ebb_balloon_initialized_bytes_total"), 0);

    guest.put("/vm/pause");
    for target in ["/vm/power-button", "/balloon/free-pages"] {
        let (status, message) = guest.refused("PUT", target, "");
        assert_eq!(status, 409, "{message}");
    }
    guest.put("/vm/resume");
}

fn machine_without_balloon(scene: &Scene) {
    let guest = Setup::new(scene).balloon("off").start();
    assert_eq!(guest.vm().balloon, None);
    for (method, target, body) in [
        ("GET", "/balloon", ""),
        ("PUT", "/balloon", "{\"target_bytes\":4096}"),
        ("GET", "/balloon/statistics", ""),
        ("PUT", "/balloon/statistics-interval", "{\"interval_seconds\":1}"),
        ("PUT", "/balloon/free-pages", ""),
    ] {
        let (status, message) = guest.refused(method, target, body);
        assert_eq!(status, 404, "{method} {target}: {message}");
        assert!(message.contains("no balloon"), "{message}");
    }
    assert!(
        guest
            .client()
            .request("GET", "/metrics", "")
            .unwrap()
            .body
            .contains("ebb_guest_resident_bytes")
    );
}

fn ctl(scene: &Scene) {
    let guest = Setup::new(scene).start();
    let ctl = |arguments: &[&str]| {
        let mut program = std::process::Command::new(&scene.world.ebb);
        let output = program.arg("ctl").arg(guest.socket()).args(arguments).output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    };
    let (code, stdout, stderr) = ctl(&["--json", "vm"]);
    assert_eq!(code, Some(0), "{stderr}");
    let vm: VmInfo = serde_json::from_str(&stdout).unwrap();
    assert_eq!((vm.pid, vm.memory_bytes), (guest.pid(), 512 * MIB));
    assert_eq!(ctl(&["balloon", "set", "64M"]).0, Some(0));
    guest.inflate_to(64 * MIB);
    let (code, _, stderr) = ctl(&["balloon", "set", "1G"]);
    assert_eq!(code, Some(1));
    assert!(stderr.contains("1073741824") || stderr.contains("1G"), "{stderr}");
    assert_eq!(ctl(&["balloon", "set", "much"]).0, Some(2));
    let (code, _, stderr) = ctl(&["free-pages", "--min-order", "9"]);
    assert_eq!(code, Some(1));
    assert!(stderr.contains("ebb_balloon"), "the remedy is missing: {stderr}");
    assert_eq!(ctl(&["free-pages", "--min-order", "19"]).0, Some(2));
}

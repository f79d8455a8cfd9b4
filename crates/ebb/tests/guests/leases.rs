//! Leases: what a client has asked for is undone when it no longer renews it, and not before.

use std::thread;
use std::time::Duration;

use ebb_vmm::api::{BalloonInfo, VmInfo, VmState};
use serde_json::json;

use crate::guest::{Guest, MIB};
use crate::harness::{Scene, Test, eventually, when};
use crate::saved::Restore;
use crate::setup::Setup;

/// The tests.
pub const TESTS: &[Test] = &[
    Test::new("leases::of_a_balloon", 240, of_a_balloon),
    Test::new("leases::of_a_pause", 240, of_a_pause),
    Test::new("leases::end_before_a_snapshot", 240, end_before_a_snapshot),
];

#[track_caller]
fn lease_balloon(guest: &Guest, target_bytes: u64, lease_ms: Option<u64>) -> BalloonInfo {
    let body = json!({ "target_bytes": target_bytes, "lease_ms": lease_ms });
    guest.client().put_json("/balloon", &body).unwrap_or_else(|error| panic!("{error}"))
}

#[track_caller]
fn lease_pause(guest: &Guest, lease_ms: Option<u64>) -> VmInfo {
    let body = json!({ "lease_ms": lease_ms });
    guest.client().put_json("/vm/pause", &body).unwrap_or_else(|error| panic!("{error}"))
}

fn of_a_balloon(scene: &Scene) {
    let guest = Setup::new(scene).start();
    // Renewed, it stays for longer than its lease.
    for _ in 0..8 {
        let info = lease_balloon(&guest, 128 * MIB, Some(3000));
        assert!(info.lease_ms.is_some_and(|left| left > 1000 && left <= 3000), "{info:?}");
        thread::sleep(Duration::from_millis(500));
        assert_eq!(guest.balloon().target_bytes, 128 * MIB);
    }
    eventually("the balloon reaches its target", 60, || {
        lease_balloon(&guest, 128 * MIB, Some(3000));
        let info = guest.balloon();
        when(info.actual_bytes == 128 * MIB, || format!("{info:?}"))
    });
    // Not renewed, it is given back.
    eventually("the balloon is released", 60, || {
        let info = guest.balloon();
        when(info.target_bytes == 0 && info.actual_bytes == 0, || format!("{info:?}"))
    });
    assert_eq!(guest.balloon().lease_ms, None);
    // A target without a lease stays, also one that follows a leased one.
    lease_balloon(&guest, 64 * MIB, Some(100));
    assert_eq!(lease_balloon(&guest, 32 * MIB, None).lease_ms, None);
    thread::sleep(Duration::from_millis(400));
    assert_eq!(guest.balloon().target_bytes, 32 * MIB);
    for body in [r#"{"target_bytes": 0, "lease_ms": 99}"#, r#"{"lease_ms": 1000}"#] {
        assert_eq!(guest.refused("PUT", "/balloon", body).0, 422, "{body}");
    }
    assert_eq!(guest.balloon().target_bytes, 32 * MIB);
}

fn of_a_pause(scene: &Scene) {
    let guest = Setup::new(scene).start();
    for _ in 0..6 {
        let info = lease_pause(&guest, Some(2000));
        assert!(info.pause_lease_ms.is_some_and(|left| left > 0 && left <= 2000), "{info:?}");
        thread::sleep(Duration::from_millis(400));
        assert_eq!(guest.vm().state, VmState::Paused);
    }
    eventually("the guest is resumed", 20, || {
        when(guest.vm().state == VmState::Running, || "it is paused".to_owned())
    });
    assert_eq!(guest.wrong_pages(), 0);
    // A pause without a lease stays, before a leased one and after it.
    lease_pause(&guest, None);
    assert_eq!(lease_pause(&guest, Some(100)).pause_lease_ms, None);
    thread::sleep(Duration::from_millis(400));
    assert_eq!(guest.vm().state, VmState::Paused);
    guest.put("/vm/resume");
    lease_pause(&guest, Some(1000));
    guest.put("/vm/pause");
    thread::sleep(Duration::from_millis(1400));
    assert_eq!(guest.vm().state, VmState::Paused);
    // A machine that was resumed is not resumed again.
    guest.put("/vm/resume");
    lease_pause(&guest, Some(300));
    guest.put("/vm/resume");
    guest.put("/vm/pause");
    thread::sleep(Duration::from_millis(600));
    assert_eq!(guest.vm().state, VmState::Paused);
}

fn end_before_a_snapshot(scene: &Scene) {
    let file = scene.path("vm.snapshot");
    let guest = Setup::new(scene).start();
    lease_balloon(&guest, 64 * MIB, Some(600_000));
    lease_pause(&guest, Some(600_000));
    guest.save(&file);
    let info = guest.vm();
    assert_eq!((info.state, info.pause_lease_ms), (VmState::Running, None));
    assert_eq!(guest.balloon().target_bytes, 0);
    guest.end();
    let guest = Restore::new(scene, &file).start();
    eventually("the balloon is released", 60, || {
        let info = guest.balloon();
        when(info.target_bytes == 0 && info.actual_bytes == 0, || format!("{info:?}"))
    });
    // Nor is anything leased in the new machine.
    lease_pause(&guest, None);
    thread::sleep(Duration::from_millis(200));
    assert_eq!(guest.vm().state, VmState::Paused);
}

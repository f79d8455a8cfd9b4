//! A hostile guest over the real transport: the monitor keeps running, answers, counts errors, and
//! limits its memory and log.

use std::thread;
use std::time::{Duration, Instant};

use ebb_agent::protocol::Command;
use ebb_vmm::api::{BalloonState, ClientError, FreePagesReport, VmState};
use serde_json::json;

use crate::backing;
use crate::guest::{Guest, MIB};
use crate::harness::{Scene, Test, counts};
use crate::hostile_driver;
use crate::place::PROGRAM_IN_GUEST;
use crate::setup::Setup;

/// The tests.
pub const TESTS: &[Test] = &[
    Test::new("hostile::every_mistake_and_then_anything", 300, every_mistake_and_then_anything),
    Test::new("hostile::with_hugetlb", 300, with_hugetlb),
];

/// Errors that the device distinguishes (`ebb_balloon::GuestError`).
const KINDS: [&str; 21] = [
    "broken_queue",
    "bad_head",
    "indirect_table",
    "empty_chain",
    "oversized_chain",
    "wrong_direction",
    "bad_address",
    "partial_entry",
    "outside_ram",
    "double_page",
    "unaligned_range",
    "extra_statistics",
    "stale_hint",
    "read_only_config",
    "bad_message",
    "message_length",
    "forbidden_encoding",
    "bad_range",
    "stale_answer",
    "extra_request_buffer",
    "short_request_buffer",
];
/// Linux's name of the device (ACPI identifier and instance).
const DEVICE: &str = "LNRO0005:00";
/// Maximum memory of a monitor without guest RAM.
const OVERHEAD_LIMIT: u64 = 16 * MIB;
/// Maximum log output caused by a guest, in bytes: a few lines for each message.
const LOG_LIMIT: u64 = 16 << 10;
/// Time limit for the hostile driver.
const LIMIT: Duration = Duration::from_secs(240);

fn bind(guest: &Guest, how: &str) {
    guest.write_file(&format!("/sys/bus/platform/drivers/virtio-mmio/{how}"), DEVICE);
}

fn errors(guest: &Guest, kind: &str) -> u64 {
    guest.metric(&format!("ebb_balloon_errors_total{{kind=\"{kind}\"}}"))
}

/// Runs the hostile driver on the device, with concurrent API requests.
fn attack(guest: &Guest, seed: u32, rounds: u32) {
    let argv = [PROGRAM_IN_GUEST, hostile_driver::ARGUMENT, &seed.to_string(), &rounds.to_string()];
    let id = guest.send(Command::Exec { argv: argv.map(str::to_owned).to_vec() });
    let started = Instant::now();
    let mut target = 0;
    let result = loop {
        if let Some(result) = guest.poll(id) {
            break result.unwrap();
        }
        assert!(started.elapsed() < LIMIT, "the hostile driver does not end");
        assert_eq!(guest.vm().state, VmState::Running);
        guest.balloon();
        guest.metric("ebb_balloon_target_bytes");
        // Statistics of such a driver may be an error, but the API must answer.
        let _ = guest.client().request("GET", "/balloon/statistics?max_age_ms=60000", "");
        // One request at a time, with any result.
        match guest
            .client()
            .put_json::<FreePagesReport>("/balloon/free-pages", &json!({ "timeout_ms": 30 }))
        {
            Ok(report) => assert!(report.bytes <= report.memory_bytes, "{report:?}"),
            Err(ClientError::Refused { status: 409, .. }) => {}
            Err(error) => panic!("{error}"),
        }
        target = 8 * MIB - target;
        guest.set_target(target);
        thread::sleep(Duration::from_millis(50));
    };
    assert_eq!(result["code"], 0, "{result}");
    guest.set_target(0);
}

fn check(guest: &Guest, seed: u32, rounds: u32) {
    guest.run(Command::Hold { bytes: 96 * MIB, pattern: 77 });
    let overhead = guest.metric("ebb_overhead_resident_bytes");
    assert_eq!(guest.log_bytes(), 0);
    bind(guest, "unbind");
    attack(guest, seed, rounds);

    let none: Vec<_> = KINDS.into_iter().filter(|kind| errors(guest, kind) == 0).collect();
    assert_eq!(none, [] as [&str; 0], "errors that were not detected");
    assert_eq!(errors(guest, "discard_failed"), 0);
    assert!(
        guest.log_bytes() > 0 && guest.log_bytes() < LOG_LIMIT,
        "{} bytes of log",
        guest.log_bytes()
    );
    let after = guest.metric("ebb_overhead_resident_bytes");
    assert!(after < OVERHEAD_LIMIT, "the monitor grew from {overhead} to {after} bytes");
    assert_eq!(guest.wrong_pages(), 0, "memory outside of the balloon is unchanged");
    assert_eq!(guest.balloon().state, BalloonState::DriverAbsent);

    // The kernel's driver can use the device again.
    bind(guest, "bind");
    guest.inflate_to(64 * MIB);
    assert!(guest.statistics().is_ok() || guest.statistics().is_ok());
    guest.inflate_to(0);
    guest.run(Command::AllocTouchExit { bytes: 128 * MIB });
    assert_eq!(guest.wrong_pages(), 0);
}

fn setup<'a>(scene: &'a Scene, memory: &str) -> Setup<'a> {
    Setup::new(scene)
        .initrd(&scene.world.hostile_initrd)
        .words("iomem=relaxed")
        .memory(memory)
        .balloon("reporting=on")
        .args(["--cpus", "2"])
}

fn every_mistake_and_then_anything(scene: &Scene) {
    check(&setup(scene, "size=512M").start(), 20_260_801, counts(120, 250));
}

fn with_hugetlb(scene: &Scene) {
    let _pool = backing::use_pool();
    if backing::pool_free() < 256 {
        // `backing::hugetlb` tests the monitor on such a machine.
        return;
    }
    check(&setup(scene, "size=512M,backing=hugetlb").start(), 42, counts(60, 100));
}

//! Ebb's own driver in a guest that hibernates: its memory goes to a swap disk, and another kernel
//! continues with it, on the same device or on another one.
//!
//! Linux stops devices before it takes the image of memory, restarts them to write it, and stops and
//! restarts them again where it continues (Documentation/power/swsusp.rst).

use std::fs::File;

use ebb_agent::command_line::BalloonDriver;
use ebb_agent::protocol::{Command, Event};
use ebb_vmm::api::{BalloonFeature, BalloonState, ReclaimReport, RequestStatus};
use serde_json::json;

use crate::guest::{Guest, MIB, REQUEST_MS};
use crate::harness::{Scene, Test, eventually, when};
use crate::module_support::Module;
use crate::setup::Setup;

/// The tests.
pub const TESTS: &[Test] = &[
    Test::new("module::hibernated_and_rebooted", 600, hibernated_and_rebooted),
    Test::new("module::hibernated_to_another_device", 600, hibernated_to_another_device),
    Test::new("module::hibernation_that_fails", 300, hibernation_that_fails),
    Test::new("module::restore_that_fails", 600, restore_that_fails),
];

/// Size of the balloon.
const SIZE: u64 = 128 * MIB;
/// Options of the device.
const DEVICE: &str = "reporting=on,deflate_on_oom=off,verify_reports=on";

/// A guest of two processors with a disk for its memory, and a device with these options.
fn setup<'a>(scene: &'a Scene, device: &str) -> Setup<'a> {
    let path = scene.path("swap");
    if !path.exists() {
        File::create(&path).and_then(|file| file.set_len(512 * MIB)).unwrap();
    }
    let disk = format!("path={}", path.display());
    Setup::new(scene).args(["--cpus", "2", "--disk", &disk]).balloon(device)
}

fn enable_swap(guest: &Guest) {
    let line = "mkswap /dev/vda && swapon /dev/vda";
    let argv = ["/bin/busybox", "sh", "-c", line].map(str::to_owned).to_vec();
    let result = guest.run(Command::Exec { argv });
    assert_eq!(result["code"], 0, "{result}");
}

/// Fills the balloon, and leaves memory behind that a program has freed.
fn use_memory(guest: &Guest) {
    guest.run(Command::Hold { bytes: 48 * MIB, pattern: 31 });
    guest.inflate_to(SIZE);
    guest.run(Command::AllocTouchExit { bytes: 160 * MIB });
}

/// Begins to hibernate in a mode of `/sys/power/disk`. The command ends where the guest continues.
fn hibernate(guest: &Guest, mode: &str) -> u64 {
    guest.write_file("/sys/power/disk", mode);
    guest.send(Command::WriteFile { path: "/sys/power/state".into(), text: "disk".into() })
}

/// Hibernates and waits until the machine has ended. Returns the number of the command.
fn power_off(guest: &mut Guest) -> u64 {
    let asleep = hibernate(guest, "shutdown");
    eventually("the image is on the disk", 180, || {
        when(!guest.is_running(), || "the machine runs".to_owned())
    });
    assert_eq!(guest.wait_end().0, Some(0));
    asleep
}

/// Replaces the guest's kernel by the one on the disk, which ends the command `asleep`.
fn resume(guest: &Guest, asleep: u64) {
    let device = guest.read_file("/sys/class/block/vda/dev");
    let text = device.trim().to_owned();
    guest.send(Command::WriteFile { path: "/sys/power/resume".into(), text });
    eventually("the guest continues", 120, || {
        when(guest.poll(asleep).is_some(), || "the other kernel runs".to_owned())
    });
    guest.outcome(asleep).unwrap_or_else(|error| panic!("it hibernates: {error}"));
}

/// The balloon follows its target, freed memory is reported, and the guest has its memory.
fn check_at_work(module: &Module, total: u64) {
    let guest = &module.guest;
    assert_eq!(guest.wrong_pages(), 0);
    for size in [SIZE, 0, 96 * MIB, 0] {
        guest.inflate_to(size);
        assert_eq!(guest.meminfo("MemTotal"), total - size);
    }
    let reported = guest.metric("ebb_balloon_reported_bytes_total");
    guest.run(Command::AllocTouchExit { bytes: 160 * MIB });
    eventually("freed memory is reported", 60, || {
        let now = guest.metric("ebb_balloon_reported_bytes_total");
        when(now >= reported + 96 * MIB, || format!("{reported} -> {now} bytes"))
    });
    eventually("everything is reported on request", 30, || {
        let body = json!({ "timeout_ms": REQUEST_MS });
        let report = guest.client().put_json::<ReclaimReport>("/balloon/reclaim", &body);
        let done = report.as_ref().is_ok_and(|report| report.status == RequestStatus::Done);
        when(done, || format!("{report:?}"))
    });
    module.await_none_isolated();
    module.check_well();
}

/// The machine restarts, and the driver of the kernel that loads the image has a balloon of its own
/// by then. A program is at work meanwhile.
fn hibernated_and_rebooted(scene: &Scene) {
    let setup = setup(scene, DEVICE).args(["--on-reboot", "reset"]);
    let module = Module::start(setup, &["tracker=reporting"]);
    let guest = &module.guest;
    let total = guest.meminfo("MemTotal");
    enable_swap(guest);
    use_memory(guest);
    let work = guest.send(Command::Churn {
        bytes: 64 * MIB,
        tasks: 2,
        seed: 8,
        operations: Some(400),
        seconds: None,
    });
    guest.wait_started(work);

    let asleep = hibernate(guest, "reboot");
    eventually("the image is on the disk, and the machine starts again", 180, || {
        when(guest.starts() == 2, || "the first kernel runs".to_owned())
    });
    let Event::Ready { balloon_driver, warnings, .. } = guest.wait_ready(2) else { unreachable!() };
    assert_eq!((balloon_driver, warnings), (BalloonDriver::EbbBalloon, Vec::new()));
    eventually("the balloon of the other kernel", 60, || {
        let info = guest.balloon();
        when(info.actual_bytes == SIZE, || format!("{info:?}"))
    });
    assert!(guest.poll(asleep).is_none());
    resume(guest, asleep);
    module.churned(work);
    check_at_work(&module, total);
}

/// The machine ends, and continues in another monitor, whose device has no target and whose kernel
/// had no driver.
fn hibernated_to_another_device(scene: &Scene) {
    let parameters = ["tracker=bitmap", "bitmap_threshold=1", "bitmap_delay_ms=50"];
    let mut module = Module::start_with_trackers(setup(scene, DEVICE), &parameters);
    let total = module.guest.meminfo("MemTotal");
    enable_swap(&module.guest);
    use_memory(&module.guest);
    let asleep = power_off(&mut module.guest);

    let module = module.continued_by(setup(scene, DEVICE).socket("second"));
    resume(&module.guest, asleep);
    assert_eq!(module.get("tracker"), "bitmap");
    check_at_work(&module, total);
}

/// Without a swap disk the guest continues where it was, after its devices were stopped and
/// restarted.
fn hibernation_that_fails(scene: &Scene) {
    let module = Module::start(setup(scene, DEVICE), &["tracker=reporting"]);
    let guest = &module.guest;
    let total = guest.meminfo("MemTotal");
    use_memory(guest);
    let asleep = hibernate(guest, "shutdown");
    guest.outcome(asleep).expect_err("there is no swap");
    check_at_work(&module, total);
}

/// The guest continues on a device that lacks features which its driver uses: the device is
/// refused, until the driver is loaded again.
fn restore_that_fails(scene: &Scene) {
    let device = "reporting=on,deflate_on_oom=off";
    let mut module = Module::start(setup(scene, device), &["tracker=reporting"]);
    let total = module.guest.meminfo("MemTotal");
    enable_swap(&module.guest);
    use_memory(&module.guest);
    let asleep = power_off(&mut module.guest);

    let less = format!("{device},page_ranges=off");
    let module = module.continued_by(setup(scene, &less).socket("second"));
    let guest = &module.guest;
    resume(guest, asleep);
    assert_eq!(module.kernel_log(&["failed to restore"]).lines().count(), 1);
    assert_eq!(guest.balloon().state, BalloonState::DriverAbsent);
    assert_eq!(guest.wrong_pages(), 0);
    assert_eq!(guest.meminfo("MemTotal"), total, "the balloon was freed");
    assert_eq!(module.counter("balloon_pages"), 0);
    // All of this would need the device.
    guest.set_target(SIZE);
    for tracker in ["none", "reporting"] {
        module.set("tracker", tracker);
    }
    guest.run(Command::AllocTouchExit { bytes: 160 * MIB });
    guest.run(Command::Compact);
    module.unload();
    assert_eq!(guest.meminfo("MemTotal"), total);

    module.load("tracker=reporting");
    eventually("the driver works with the other device", 30, || {
        let features = guest.balloon().negotiated_features;
        when(features.contains(&BalloonFeature::PageBitmap), || format!("{features:?}"))
    });
    check_at_work(&module, total);
}

//! The balloon inflates and deflates, and the content of the guest's memory is preserved.

use ebb_agent::protocol::Command;
use ebb_vmm::api::BalloonState;

use crate::guest::{GIB, MIB};
use crate::harness::{Scene, Test, counts, eventually, when};
use crate::setup::Setup;

/// The tests.
pub const TESTS: &[Test] = &[
    Test::new("inflate::to_a_target_and_back", 300, to_a_target_and_back),
    Test::new("inflate::content_survives", 300, content_survives),
    Test::new("inflate::deflates_on_oom", 300, deflates_on_oom),
    Test::new("inflate::initial_size", 180, initial_size),
];

fn to_a_target_and_back(scene: &Scene) {
    // Without deflate on OOM the driver subtracts the balloon from the guest's total (Linux
    // virtio_balloon.c, adjust_managed_page_count).
    let (ram, touched, size) =
        counts((384 * MIB, 250 * MIB, 200 * MIB), (GIB, 800 * MIB, 640 * MIB));
    let memory = format!("size={ram}");
    let guest =
        Setup::new(scene).memory(&memory).balloon("reporting=off,deflate_on_oom=off").start();
    guest.run(Command::AllocTouchExit { bytes: touched });
    let (resident_before, process_before) = (guest.resident(), guest.process_bytes());
    assert!(resident_before > touched, "{resident_before}");
    let total_before = guest.meminfo("MemTotal");

    guest.inflate_to(size);
    assert_eq!(guest.balloon().state, BalloonState::Idle);
    assert_eq!(guest.meminfo("MemTotal"), total_before - size);
    // At least this many of the touched bytes must be in the balloon, whichever pages the driver
    // selects.
    let must_fall = size - (ram - resident_before);
    eventually("the balloon's pages are returned to the host", 20, || {
        let (resident, process) = (guest.resident(), guest.process_bytes());
        when(
            resident + must_fall <= resident_before
                && process + must_fall <= process_before + 4 * MIB,
            || {
                format!(
                    "{resident_before} -> {resident}, process {process_before} -> {process}, \
                     must fall by {must_fall}"
                )
            },
        )
    });
    assert!(guest.resident() <= ram - size + 4 * MIB);

    guest.inflate_to(0);
    assert_eq!(guest.meminfo("MemTotal"), total_before);
    let bytes = |name: &str| guest.metric(&format!("ebb_balloon_{name}_bytes_total"));
    assert!(bytes("inflated") >= size && bytes("deflated") >= size);
    assert!(bytes("discarded") >= size && bytes("discarded") <= size / 10 * 11);
    // All of it can be used again.
    guest.run(Command::AllocTouchExit { bytes: touched });
    assert!(guest.resident() > touched);
    for kind in ["outside_ram", "double_page", "broken_queue", "discard_failed", "bad_address"] {
        assert_eq!(
            guest.metric(&format!("ebb_balloon_errors_total{{kind=\"{kind}\"}}")),
            0,
            "{kind}"
        );
    }
}

fn content_survives(scene: &Scene) {
    // 512 MiB of guest memory, or a GiB in a long run.
    let unit = counts(MIB, 2 * MIB);
    let memory = format!("size={}", 512 * unit);
    let guest = Setup::new(scene).memory(&memory).balloon("reporting=on").start();
    for pattern in 1..=4 {
        // Memory is freed in between, so that held and free pages are interleaved.
        guest.run(Command::Hold { bytes: 24 * unit, pattern });
        guest.run(Command::AllocTouchExit { bytes: 32 * unit });
    }
    for target in [250 * unit, 50 * unit, 300 * unit, 0] {
        guest.inflate_to(target);
        assert_eq!(guest.wrong_pages(), 0, "with a balloon of {target} bytes");
        guest.run(Command::AllocTouchExit { bytes: 50 * unit });
        assert_eq!(guest.wrong_pages(), 0, "after work with a balloon of {target} bytes");
    }
    let reported = guest.metric("ebb_balloon_reported_bytes_total");
    guest.run(Command::AllocTouchExit { bytes: 200 * unit });
    eventually("free memory is reported", 60, || {
        let now = guest.metric("ebb_balloon_reported_bytes_total");
        when(now > reported + 100 * unit, || format!("{reported} -> {now} bytes"))
    });
    assert_eq!(guest.wrong_pages(), 0, "after reports");
}

fn deflates_on_oom(scene: &Scene) {
    let guest = Setup::new(scene).balloon("reporting=off,deflate_on_oom=on").start();
    let target = guest.meminfo("MemAvailable") - 24 * MIB;
    guest.inflate_to(target / (4 * MIB) * (4 * MIB));
    let full = guest.balloon().actual_bytes;
    // Four times the available memory, so that the balloon must deflate.
    guest.run(Command::AllocTouchExit { bytes: 160 * MIB });
    assert!(guest.metric("ebb_balloon_deflated_bytes_total") >= 100 * MIB);
    eventually("the guest reports a smaller balloon", 20, || {
        let info = guest.balloon();
        when(info.actual_bytes + 100 * MIB <= full, || format!("{full} -> {info:?}"))
    });
    assert_eq!(guest.value("/proc/vmstat", "oom_kill"), 0, "no process was killed");
    // A new target makes the driver inflate again.
    guest.inflate_to(16 * MIB);
    assert!(guest.meminfo("MemAvailable") > 300 * MIB);
}

fn initial_size(scene: &Scene) {
    let guest = Setup::new(scene).balloon("size=128M,reporting=off,deflate_on_oom=off").start();
    eventually("the balloon has its initial size", 30, || {
        let info = guest.balloon();
        when(info.actual_bytes == 128 * MIB && info.state == BalloonState::Idle, || {
            format!("{info:?}")
        })
    });
    assert!(guest.resident() <= (512 - 128 + 4) * MIB);
}

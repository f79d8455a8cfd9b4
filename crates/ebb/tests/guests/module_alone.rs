//! Ebb's driver with only a part of what it can have: without the module of its trackers, and
//! without the kernel's functions that are not exported.

use ebb_agent::command_line::{BalloonDriver, TRACKERS_MODULE};
use ebb_agent::protocol::Command;
use ebb_vmm::api::{BalloonState, ReclaimReport, RequestStatus};

use crate::guest::MIB;
use crate::harness::{Scene, Test, eventually, when};
use crate::module_support::Module;
use crate::setup::Setup;

/// The tests.
pub const TESTS: &[Test] = &[
    Test::new("module::trackers_need_their_module", 240, trackers_need_their_module),
    Test::new("module::blocks_from_alloc_pages", 240, blocks_from_alloc_pages),
];

/// Words of the line that refuses a tracker whose module is not loaded.
const REFUSAL: &str = "load the module ebb_trackers first";

fn lines(module: &Module, words: &str) -> usize {
    module.kernel_log(&[words]).lines().count()
}

fn trackers_need_their_module(scene: &Scene) {
    // Programs have huge pages only in guests of more than 512 MiB. Newer kernels keep thousands of
    // single pages on a processor's list, which percpu does not wait for.
    let setup = Setup::new(scene)
        .args(["--cpus", "2"])
        .memory("size=1G")
        .balloon("reporting=on,deflate_on_oom=on,verify_reports=on");
    let module = Module::start(setup, &["tracker=percpu"]);
    let guest = &module.guest;
    let load_trackers = || {
        // So short that an array is handed over while a program ends, several times.
        let parameters = "percpu_flush_ms=20 bitmap_threshold=1 bitmap_delay_ms=50";
        module.try_load_trackers(parameters).unwrap_or_else(|error| panic!("{error}"));
    };
    let is_reporting = |tracker: &str| {
        let before = guest.metric("ebb_balloon_reported_bytes_total");
        guest.run(Command::Hold { bytes: 192 * MIB, pattern: 9 });
        guest.run(Command::Release);
        guest.run(Command::Hold { bytes: 32 * MIB, pattern: 8 });
        eventually(&format!("{tracker} reports"), 60, || {
            let now = guest.metric("ebb_balloon_reported_bytes_total");
            when(now > before, || format!("{before} -> {now} bytes"))
        });
    };

    // At the start the tracker is remembered; later it is refused.
    assert_eq!(module.get("tracker"), "none");
    assert_eq!(lines(&module, "none runs until the module ebb_trackers is loaded"), 1);
    assert_eq!(lines(&module, REFUSAL), 0);
    module.set_refused("tracker", "bitmap");
    assert_eq!((module.get("tracker").as_str(), lines(&module, REFUSAL)), ("none", 1));
    load_trackers();
    assert_eq!(module.get("tracker"), "percpu");
    is_reporting("percpu");
    // What is freed while a thread waits for the host has room in the next array.
    for _ in 0..8 {
        guest.run(Command::Hold { bytes: 192 * MIB, pattern: 9 });
        guest.run(Command::Release);
    }
    assert_eq!(module.counter("lost"), 0, "no array was full");

    // The driver cannot go before the trackers, which go while one of them runs.
    for tracker in ["percpu", "bitmap"] {
        module.set("tracker", tracker);
        module.try_unload(BalloonDriver::EbbBalloon.name()).expect_err("it is in use");
        is_reporting(tracker);
        let work = guest.send(Command::Churn {
            bytes: 160 * MIB,
            tasks: 2,
            seed: 5,
            operations: Some(150),
            seconds: None,
        });
        guest.wait_started(work);
        module.try_unload(TRACKERS_MODULE).unwrap_or_else(|error| panic!("{tracker}: {error}"));
        assert_eq!(module.get("tracker"), "none");
        assert_eq!(module.counter("isolated_now"), 0);
        module.churned(work);
        module.set_refused("tracker", tracker);
        load_trackers();
        assert_eq!(module.get("tracker"), "none", "the choice ended with the module");
    }
    assert_eq!(lines(&module, REFUSAL), 3);

    // Any order but driver first.
    module.set("tracker", "reporting");
    module.try_unload(TRACKERS_MODULE).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(module.get("tracker"), "reporting");
    is_reporting("reporting");
    module.unload();
    assert_eq!(guest.balloon().state, BalloonState::DriverAbsent);
    module.load("tracker=none");
    module.check_well();
}

fn blocks_from_alloc_pages(scene: &Scene) {
    let setup = Setup::new(scene).args(["--cpus", "2"]).balloon("reporting=on,deflate_on_oom=off");
    let module = Module::start(setup, &["direct=0", "tracker=none"]);
    let guest = &module.guest;
    assert_eq!(module.counter("direct"), 0);
    assert_eq!(lines(&module, "blocks come from alloc_pages(): parameter direct=0"), 1);
    let total = guest.meminfo("MemTotal");
    guest.run(Command::Hold { bytes: 64 * MIB, pattern: 5 });
    // Deflation by less than a block splits one.
    let sizes = [256 * MIB, 101 * MIB, 255 * MIB + 4096, 0, 200 * MIB, 0];
    for size in sizes {
        guest.inflate_to(size);
        assert_eq!(guest.meminfo("MemTotal"), total - size);
        assert_eq!(guest.wrong_pages(), 0);
        let bytes = 32 * MIB;
        guest.run(Command::AllocTouchExit { bytes });
    }
    assert!(module.counter("order_10") > 0 && module.counter("split_blocks") > 0);
    // Reporting needs none of these functions; the trackers that isolate blocks do.
    module.try_load_trackers("").unwrap_or_else(|error| panic!("{error}"));
    for tracker in ["percpu", "bitmap"] {
        module.set_refused("tracker", tracker);
        assert_eq!(module.get("tracker"), "none");
    }
    // Nor are free blocks reported on request.
    let report: ReclaimReport = guest.put_for("/balloon/reclaim");
    assert_eq!((report.status, report.reported_bytes), (RequestStatus::Aborted, 0), "{report:?}");
    module.set("tracker", "reporting");
    module.try_unload(TRACKERS_MODULE).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(lines(&module, "blocks come from alloc_pages()"), 1);
    module.check_well();
}

//! Reports on request of the host: `PUT /balloon/reclaim` with Ebb's own driver.

use std::time::Duration;

use ebb_agent::protocol::Command;
use ebb_vmm::api::{BalloonFeature, ReclaimReport, RequestStatus};
use serde_json::json;

use crate::guest::{Guest, MIB, REQUEST_MS};
use crate::harness::{Scene, Test, counts, eventually, when};
use crate::module_support::{Module, TRACKERS};
use crate::setup::Setup;

/// The tests.
pub const TESTS: &[Test] = &[
    Test::new("module::reclaim", 240, reclaim),
    Test::new("module::reclaim_under_each_tracker", 400, reclaim_under_each_tracker),
    Test::new(
        "module::reclaim_beside_the_kernels_reports",
        240,
        reclaim_beside_the_kernels_reports,
    ),
    Test::new("module::reclaim_without_the_driver", 60, reclaim_without_the_driver),
    Test::new("module::early_reports", 240, early_reports),
];

/// Memory of the program whose pages are reclaimed.
const FREED: u64 = 160 * MIB;

fn request(guest: &Guest, min_order: u8) -> ReclaimReport {
    let body = json!({ "min_order": min_order, "timeout_ms": REQUEST_MS });
    guest.client().put_json("/balloon/reclaim", &body).unwrap_or_else(|error| panic!("{error}"))
}

/// Everything that a program has freed is at the host when the answer arrives, although nothing
/// else reports, and nothing of what the guest still uses.
fn reclaim(scene: &Scene) {
    let setup = Setup::new(scene)
        .args(["--cpus", "2"])
        .memory("size=320M")
        .balloon("reporting=on,deflate_on_oom=off,verify_reports=on");
    let module = Module::start(setup, &["tracker=none"]);
    let guest = &module.guest;
    assert!(guest.balloon().negotiated_features.contains(&BalloonFeature::ReportRequest));
    guest.run(Command::Hold { bytes: 48 * MIB, pattern: 21 });
    guest.run(Command::AllocTouchExit { bytes: FREED });
    let resident = guest.resident();
    assert!(resident > FREED, "{resident} bytes");

    let report = request(guest, 9);
    let least = FREED * 9 / 10;
    assert_eq!((report.status, report.min_order), (RequestStatus::Done, 9), "{report:?}");
    assert!(report.reported_bytes >= least, "{report:?}");
    assert!(report.resident_bytes + least <= report.resident_before_bytes, "{report:?}");
    assert_eq!(module.counter("isolated_now"), 0);
    assert!((1..=32).contains(&module.counter("isolated_most")));
    assert_eq!(guest.wrong_pages(), 0);
    // Smaller blocks as well: nearly all that is free, apart from lists of the processors.
    let free = guest.meminfo("MemFree");
    let all = request(guest, 0);
    assert_eq!(all.status, RequestStatus::Done, "{all:?}");
    assert!(all.reported_bytes + 24 * MIB >= free, "{free} bytes were free: {all:?}");
    assert!(all.request_id > report.request_id);

    // The allocator uses the memory again.
    guest.run(Command::Hold { bytes: 160 * MIB, pattern: 22 });
    assert_eq!(guest.wrong_pages(), 0);
    guest.run(Command::Release);

    // A guest that cannot answer.
    guest.put("/vm/pause");
    let body = json!({ "timeout_ms": 300 });
    let silent = guest.client().put_json::<ReclaimReport>("/balloon/reclaim", &body);
    assert!(silent.is_err(), "a paused guest was asked: {silent:?}");
    guest.put("/vm/resume");
    // The driver is unloaded during a request.
    for _ in 0..counts(2, 10) {
        guest.run(Command::AllocTouchExit { bytes: FREED });
        std::thread::scope(|threads| {
            let asking = threads
                .spawn(|| guest.client().put_json::<ReclaimReport>("/balloon/reclaim", &json!({})));
            module.unload();
            // The request has ended, with any result.
            drop(asking.join());
        });
        module.load("tracker=none");
        eventually("the new driver reports", 40, || {
            let body = json!({ "timeout_ms": REQUEST_MS });
            let answer = guest.client().put_json::<ReclaimReport>("/balloon/reclaim", &body);
            let done = answer.as_ref().is_ok_and(|report| report.status == RequestStatus::Done);
            when(done, || format!("{answer:?}"))
        });
    }
    module.check_well();
}

/// While programs allocate and free, and a tracker reports on its own. What was reported on request
/// is not reported again by the kernel.
fn reclaim_under_each_tracker(scene: &Scene) {
    let setup = Setup::new(scene)
        .args(["--cpus", "2"])
        .memory("size=320M")
        .balloon("reporting=on,deflate_on_oom=on,verify_reports=on");
    let module = Module::start_with_trackers(
        setup,
        &["tracker=reporting", "bitmap_threshold=1", "bitmap_delay_ms=50"],
    );
    let guest = &module.guest;
    guest.run(Command::Hold { bytes: 48 * MIB, pattern: 23 });
    guest.run(Command::AllocTouchExit { bytes: FREED });
    let report = request(guest, 9);
    assert_eq!(report.status, RequestStatus::Done, "{report:?}");
    // The kernel's own reporting looks at free memory two seconds after a block became free.
    let reported = || guest.metric("ebb_balloon_reported_bytes_total");
    let before = reported();
    std::thread::sleep(Duration::from_secs(5));
    let again = reported() - before;
    assert!(again < FREED / 8, "{again} bytes were reported after {report:?}");

    for (seed, tracker) in TRACKERS.into_iter().enumerate() {
        module.set("tracker", tracker);
        let work = guest.send(Command::Churn {
            bytes: 128 * MIB,
            tasks: 2,
            seed: seed as u64,
            operations: Some(counts(150, 3000)),
            seconds: None,
        });
        let mut answers = 0;
        while guest.poll(work).is_none() || answers < 3 {
            let report = request(guest, [9, 0, 10][answers % 3]);
            assert_eq!(report.status, RequestStatus::Done, "{tracker}: {report:?}");
            answers += 1;
        }
        module.churned(work);
    }
    module.set("tracker", "none");
    assert_eq!(module.counter("isolated_now"), 0);
    module.check_well();
}

/// A pass of the kernel's own reporting that begins during a request takes blocks that the driver
/// then does not find. The answer waits until the host has these, too.
fn reclaim_beside_the_kernels_reports(scene: &Scene) {
    let setup = Setup::new(scene)
        .memory("size=320M")
        .balloon("reporting=on,deflate_on_oom=on,verify_reports=on");
    let module = Module::start(setup, &["tracker=reporting", "report_delay_ms=0"]);
    let guest = &module.guest;
    let reported = || guest.metric("ebb_balloon_reported_bytes_total");
    let mut passes = 0;
    // A pass begins two seconds after the first block became free.
    for delay_ms in [1500, 1650, 1750, 1850] {
        guest.run(Command::AllocTouchExit { bytes: FREED });
        std::thread::sleep(Duration::from_millis(delay_ms));
        let passes_before = module.counter("passes");
        let report = request(guest, 9);
        let before = reported();
        assert_eq!(report.status, RequestStatus::Done, "{report:?}");
        passes += module.counter("passes") - passes_before;
        std::thread::sleep(Duration::from_secs(1));
        let late = reported() - before;
        assert!(late < FREED / 8, "{delay_ms} ms: {late} bytes were reported after {report:?}");
    }
    println!("    {passes} reports of the kernel's own beside four requests");
    module.check_well();
}

/// Linux's own driver cannot; the message says what to do.
fn reclaim_without_the_driver(scene: &Scene) {
    let guest = Setup::new(scene).start();
    let (status, message) = guest.refused("PUT", "/balloon/reclaim", "");
    assert_eq!(status, 409, "{message}");
    assert!(message.contains("on request") && message.contains("ebb_balloon"), "{message}");
    let (status, message) = guest.refused("PUT", "/balloon/reclaim", r#"{"min_order": 19}"#);
    assert!(status == 422 && message.contains("min_order"), "{status} {message}");
    guest.end();
}

/// Memory that a program leaves behind is reported before the kernel's own reporting gets to it, and
/// memory that is in use again at once makes the driver wait longer.
fn early_reports(scene: &Scene) {
    let setup = Setup::new(scene)
        .args(["--cpus", "2"])
        .memory("size=384M")
        .balloon("reporting=on,deflate_on_oom=on,verify_reports=on");
    let module = Module::start(setup, &["tracker=reporting"]);
    let guest = &module.guest;
    guest.run(Command::Hold { bytes: 48 * MIB, pattern: 25 });
    let early = || module.counter("early_reports");
    let passes = || module.counter("passes");
    eventually("most of a program's memory is reported early", 120, || {
        // Until the kernel's own reporting has nothing to do, and an early report is no mistake.
        eventually("the guest is quiet", 60, || {
            let before = passes();
            std::thread::sleep(Duration::from_secs(5));
            when(passes() == before, || format!("{before} passes"))
        });
        let pages = module.counter("early_pages");
        let reported = guest.metric("ebb_balloon_reported_bytes_total");
        guest.run(Command::AllocTouchExit { bytes: FREED });
        eventually("the program's memory is reported", 30, || {
            let now = guest.metric("ebb_balloon_reported_bytes_total");
            when(now >= reported + FREED * 3 / 4, || format!("{reported} -> {now}"))
        });
        let pages = module.counter("early_pages") - pages;
        when(pages * 4096 >= FREED / 2, || format!("{pages} pages early"))
    });

    // The same memory again and again: reports are mistakes, and their number is bounded.
    let delay = module.counter("early_delay_ms");
    for _ in 0..counts(6, 20) {
        guest.run(Command::AllocTouchExit { bytes: FREED });
        let before = early();
        eventually("it is reported, early or not", 30, || {
            let resident = guest.resident();
            when(early() > before || resident < FREED, || format!("{resident}"))
        });
    }
    assert!(module.counter("early_regrets") > 0, "{} reports", early());
    assert!(module.counter("early_delay_ms") > delay, "{delay} ms");
    // Without them the kernel's own reporting is left.
    guest.write_file("/sys/module/ebb_balloon/parameters/report_delay_ms", "0");
    let reports = early();
    let reported = guest.metric("ebb_balloon_reported_bytes_total");
    guest.run(Command::AllocTouchExit { bytes: FREED });
    eventually("the kernel reports", 60, || {
        let now = guest.metric("ebb_balloon_reported_bytes_total");
        when(now >= reported + FREED / 2, || format!("{reported} -> {now}"))
    });
    assert_eq!(early(), reports);
    module.check_well();
}

//! Ebb's balloon driver: the stock driver's functions, and the extension.

use ebb_agent::command_line::BalloonDriver;
use ebb_agent::protocol::{Command, Event};
use ebb_vmm::api::{BalloonFeature, BalloonState, FreeBlocks, FreePagesReport, RequestStatus};
use serde_json::json;

use crate::guest::{Guest, MIB};
use crate::harness::{Scene, Test, counts, eventually, when};
use crate::module_support::Module;
use crate::setup::Setup;

/// The tests.
pub const TESTS: &[Test] = &[
    Test::new("module::encodings", 300, encodings),
    Test::new("module::free_pages", 240, free_pages),
    Test::new("module::saved_and_rebooted", 300, saved_and_rebooted),
    Test::new("module::plain_device_and_wrong_parameters", 300, plain_device_and_wrong_parameters),
];

/// The extension's features.
const EXTENSION: [BalloonFeature; 3] =
    [BalloonFeature::PageBitmap, BalloonFeature::PageRanges, BalloonFeature::HostRequest];
/// Target of the balloon.
const SIZE: u64 = 320 * MIB;

/// Number of messages that the device has received in an encoding.
fn messages(guest: &Guest, encoding: &str) -> u64 {
    guest.metric(&format!("ebb_balloon_messages_total{{kind=\"{encoding}\"}}"))
}

/// Encodings: parameter, name at the host, counter of the driver.
const ENCODINGS: [(&str, &str, &str); 3] = [
    ("pfns", "pfns", "messages_pfns"),
    ("bitmap", "bitmaps", "messages_bitmap"),
    ("ranges", "ranges", "messages_ranges"),
];

fn encodings(scene: &Scene) {
    let setup = Setup::new(scene).args(["--cpus", "2"]).balloon("reporting=on,deflate_on_oom=off");
    let module = Module::start(setup, &["tracker=none"]);
    let guest = &module.guest;
    let negotiated = guest.balloon().negotiated_features;
    for feature in EXTENSION {
        assert!(negotiated.contains(&feature), "{negotiated:?}");
    }
    guest.run(Command::Hold { bytes: 48 * MIB, pattern: 5 });
    let total = guest.meminfo("MemTotal");

    for (encoding, _, counter) in ENCODINGS {
        module.set("encoding", encoding);
        let counts = || {
            let of = |(_, at_host, counter): &(&str, &str, &str)| {
                (messages(guest, at_host), module.counter(counter))
            };
            ENCODINGS.each_ref().map(of)
        };
        let (before, bytes) = (counts(), guest.metric("ebb_balloon_discarded_bytes_total"));
        guest.inflate_to(SIZE);
        assert_eq!(guest.meminfo("MemTotal"), total - SIZE, "{encoding}");
        assert_eq!(guest.wrong_pages(), 0, "{encoding}");
        assert!(guest.metric("ebb_balloon_discarded_bytes_total") >= bytes + SIZE, "{encoding}");
        guest.inflate_to(0);
        assert_eq!(guest.meminfo("MemTotal"), total, "{encoding}");
        for ((before, after), (_, _, of)) in before.into_iter().zip(counts()).zip(ENCODINGS) {
            let (at_host, in_guest) = (after.0 - before.0, after.1 - before.1);
            assert_eq!(
                at_host, in_guest,
                "{of} with encoding={encoding}: the counts of host and guest agree"
            );
            assert_eq!(at_host > 0, of == counter, "{of} with encoding={encoding}");
        }
        assert_eq!(guest.wrong_pages(), 0, "{encoding}");
    }
    module.set_refused("encoding", "morse");
    module.set("encoding", "auto");

    // Replacing the driver by the other one and back, during an inflation.
    guest.set_target(SIZE);
    module.unload();
    assert_eq!(guest.balloon().state, BalloonState::DriverAbsent);
    assert_eq!(guest.meminfo("MemTotal"), total);
    let stock = |command: fn(String) -> Command, text: &str| guest.run(command(text.to_owned()));
    stock(
        |path| Command::LoadModule { path, parameters: String::new() },
        "/modules/virtio_balloon.ko",
    );
    guest.inflate_to(SIZE / 2);
    assert!(EXTENSION.iter().all(|feature| !guest.balloon().negotiated_features.contains(feature)));
    stock(|name| Command::UnloadModule { name }, "virtio_balloon");
    module.load("tracker=none max_order=0");
    guest.inflate_to(SIZE);
    assert_eq!(guest.meminfo("MemTotal"), total - SIZE);
    assert!(module.counter("inflated_pages") >= SIZE / 4096);
    guest.inflate_to(0);
    assert_eq!(guest.meminfo("MemTotal"), total);
    module.check_well();
}

/// Requests the guest's free pages.
fn request_free_pages(guest: &Guest, min_order: u8) -> FreePagesReport {
    let body = json!({ "min_order": min_order, "timeout_ms": 8000 });
    guest.client().put_json("/balloon/free-pages", &body).unwrap_or_else(|error| panic!("{error}"))
}

fn free_pages(scene: &Scene) {
    let setup = Setup::new(scene).args(["--cpus", "2"]).balloon("reporting=on,deflate_on_oom=off");
    let module = Module::start(setup, &["tracker=none"]);
    let guest = &module.guest;
    guest.run(Command::Hold { bytes: 32 * MIB, pattern: 7 });
    let check = |what: &str| {
        let free = guest.meminfo("MemFree");
        let report = request_free_pages(guest, 0);
        assert_eq!(report.status, RequestStatus::Done, "{what}: {report:?}");
        // The kernel allocates and frees some memory between the two readings, and single pages on
        // a processor's list are not on the allocator's lists.
        assert!(report.bytes <= free + 8 * MIB, "{what}: {free} bytes are free; {report:?}");
        assert!(report.bytes + 16 * MIB >= free, "{what}: {free} bytes are free; {report:?}");
        let sum = |value: fn(&FreeBlocks) -> u64| report.by_order.iter().map(value).sum::<u64>();
        assert_eq!(
            (sum(|of| of.blocks), sum(|of| of.bytes)),
            (report.blocks, report.bytes),
            "{what}: {report:?}"
        );
        report
    };
    let idle = check("idle");
    assert!(idle.messages > 0 && idle.message_bytes < idle.bytes / 4096, "{idle:?}");
    let large = request_free_pages(guest, 9);
    assert!(large.bytes > 0 && large.bytes <= idle.bytes + 8 * MIB, "{large:?}");
    assert!(large.by_order.iter().all(|of| of.order >= 9), "{large:?}");

    guest.run(Command::Hold { bytes: 128 * MIB, pattern: 8 });
    check("with a program");
    guest.inflate_to(128 * MIB);
    let with_balloon = check("with a balloon");
    assert!(with_balloon.bytes + 256 * MIB <= idle.bytes + 24 * MIB, "{idle:?} {with_balloon:?}");
    let numbers = [idle.request_id, large.request_id, with_balloon.request_id];
    assert!(numbers.is_sorted_by(|a, b| a < b), "{numbers:?}");

    // During a workload; the pages of an answer are not discarded.
    let discarded = guest.metric("ebb_balloon_discarded_bytes_total");
    let work = guest.send(Command::Churn {
        bytes: 96 * MIB,
        tasks: 2,
        seed: 4,
        operations: Some(150),
        seconds: None,
    });
    let mut answers = 0;
    while guest.poll(work).is_none() || answers < 5 {
        assert_eq!(request_free_pages(guest, answers % 3 * 3).status, RequestStatus::Done);
        answers += 1;
    }
    module.churned(work);
    assert_eq!(guest.metric("ebb_balloon_discarded_bytes_total"), discarded);

    // A guest that does not answer, and one whose driver is unloaded during a request.
    guest.put("/vm/pause");
    let silent: Result<FreePagesReport, _> =
        guest.client().put_json("/balloon/free-pages", &json!({ "timeout_ms": 300 }));
    assert!(
        !silent.as_ref().is_ok_and(|report| report.status == RequestStatus::Done),
        "a paused guest has answered: {silent:?}"
    );
    guest.put("/vm/resume");
    for _ in 0..4 {
        std::thread::scope(|threads| {
            let asking = threads.spawn(|| {
                let body = json!({ "timeout_ms": 5000 });
                guest.client().put_json::<FreePagesReport>("/balloon/free-pages", &body)
            });
            module.unload();
            // The request has ended, with any result.
            drop(asking.join());
        });
        module.load("tracker=none");
        eventually("the new driver answers", 20, || {
            let body = json!({ "timeout_ms": 5000 });
            let answer = guest.client().put_json::<FreePagesReport>("/balloon/free-pages", &body);
            let done = answer.as_ref().is_ok_and(|report| report.status == RequestStatus::Done);
            when(done, || format!("{answer:?}"))
        });
    }
    guest.inflate_to(0);
    module.check_well();
}

fn saved_and_rebooted(scene: &Scene) {
    let setup = Setup::new(scene)
        .args(["--cpus", "2", "--on-reboot", "reset"])
        .balloon("reporting=on,deflate_on_oom=off,verify_reports=on");
    let module = Module::start_with_trackers(setup, &["tracker=bitmap", "bitmap_threshold=1"]);
    module.guest.run(Command::Hold { bytes: 48 * MIB, pattern: 11 });
    let total = module.guest.meminfo("MemTotal");
    let last_number = request_free_pages(&module.guest, 0).request_id;
    let churn =
        Command::Churn { bytes: 96 * MIB, tasks: 2, seed: 6, operations: Some(400), seconds: None };
    let work = module.guest.send(churn);
    module.guest.wait_started(work);
    module.guest.set_target(128 * MIB);

    // During an inflation, reports and a workload.
    let module = module.save_and_restore(scene);
    let guest = &module.guest;
    module.churned(work);
    guest.inflate_to(128 * MIB);
    assert_eq!(guest.meminfo("MemTotal"), total - 128 * MIB);
    let answer = request_free_pages(guest, 0);
    assert_eq!(answer.status, RequestStatus::Done, "{answer:?}");
    assert!(answer.request_id > last_number, "{last_number}, then {answer:?}");
    // Twice the memory that the workload has used: fragments smaller than a block are reused first
    // and never reported.
    let reported = guest.metric("ebb_balloon_reported_bytes_total");
    let program = 192 * MIB;
    let least = program / counts(3, 2);
    guest.run(Command::AllocTouchExit { bytes: program });
    eventually("the tracker continues to report", 30, || {
        let now = guest.metric("ebb_balloon_reported_bytes_total");
        when(now >= reported + least, || format!("{reported} -> {now} bytes"))
    });
    module.check_well();

    // After a reboot the new kernel's driver finds the old target.
    guest.send(Command::Reboot);
    let Event::Ready { balloon_driver, warnings, .. } = guest.wait_ready(1) else { unreachable!() };
    assert_eq!((balloon_driver, warnings), (BalloonDriver::EbbBalloon, Vec::new()));
    guest.run(Command::Hold { bytes: 48 * MIB, pattern: 12 });
    guest.inflate_to(128 * MIB);
    assert!(request_free_pages(guest, 0).request_id > answer.request_id);
    guest.inflate_to(0);
    assert_eq!(guest.meminfo("MemTotal"), total);
    module.check_well();
}

/// Invalid parameters of the driver, and words of the kernel log message about their valid values.
const WRONG_PARAMETERS: [(&str, &str); 3] = [
    ("tracker=sonar", "none, percpu, bitmap and reporting"),
    ("encoding=morse", "pfns"),
    ("max_order=99", "0 to"),
];
/// The same of `ebb_trackers`.
const WRONG_TRACKER_PARAMETERS: [(&str, &str); 4] = [
    ("percpu_entries=63", "64 to 4096"),
    ("percpu_entries=4097", "64 to 4096"),
    ("bitmap_threshold=0", "1 to 4096"),
    ("bitmap_threshold=4097", "1 to 4096"),
];

/// Checks that loading with wrong parameters is refused and that the log has the valid values.
fn check_refused(
    module: &Module,
    wrong: &[(&str, &str)],
    load: fn(&Module, &str) -> Result<(), String>,
) {
    for (parameters, words) in wrong {
        let error = load(module, parameters).expect_err(parameters);
        assert!(error.contains("nvalid argument"), "{parameters}: {error}");
        let name = parameters.split('=').next().unwrap_or_default();
        let log = module.kernel_log(&[parameters]);
        assert!(
            log.contains(words),
            "{parameters}: the log should contain the valid values of {name}: {log:?}"
        );
    }
}

fn plain_device_and_wrong_parameters(scene: &Scene) {
    let setup = Setup::new(scene).balloon(
        "reporting=on,deflate_on_oom=on,page_bitmap=off,page_ranges=off,host_requests=off",
    );
    let module = Module::start_without(setup);
    let guest = &module.guest;
    assert_eq!(guest.balloon().state, BalloonState::DriverAbsent);
    check_refused(&module, &WRONG_PARAMETERS, Module::try_load);
    assert_eq!(guest.balloon().state, BalloonState::DriverAbsent);

    // A device without the extension, on which the driver behaves like the stock one.
    module.load("tracker=reporting");
    eventually("the driver is loaded", 20, || {
        let info = guest.balloon();
        when(info.negotiated_features.contains(&BalloonFeature::PageReporting), || {
            format!("{info:?}")
        })
    });
    let info = guest.balloon();
    assert!(EXTENSION.iter().all(|feature| !info.offered_features.contains(feature)), "{info:?}");
    check_refused(&module, &WRONG_TRACKER_PARAMETERS, Module::try_load_trackers);
    guest.run(Command::Hold { bytes: 32 * MIB, pattern: 6 });
    guest.inflate_to(128 * MIB);
    assert!(messages(guest, "arrays") > 0 && module.counter("messages_bare") > 0);
    let statistics =
        eventually("statistics", 30, || guest.statistics().map_err(|error| error.to_string()));
    let values = statistics.statistics;
    assert_eq!(values.total_memory_bytes, Some(guest.meminfo("MemTotal")));
    assert!(
        [
            values.free_memory_bytes,
            values.available_memory_bytes,
            values.minor_faults,
            values.disk_caches_bytes
        ]
        .iter()
        .all(Option::is_some)
    );

    deflates_on_oom(&module);
    assert_eq!(
        ["pfns", "bitmaps", "ranges"].map(|encoding| messages(guest, encoding)),
        [0, 0, 0],
        "no messages to a device without the extension"
    );
    module.check_well();
}

/// The balloon deflates for a program instead of the program being killed.
fn deflates_on_oom(module: &Module) {
    let guest = &module.guest;
    // Blocks that are being reported are not available.
    module.set("tracker", "none");
    guest.inflate_to(0);
    let target = guest.meminfo("MemAvailable") - 24 * MIB;
    guest.inflate_to(target / (4 * MIB) * (4 * MIB));
    let full = guest.balloon().actual_bytes;
    // Pages in the lists of single processors are not counted as available.
    guest.run(Command::AllocTouchExit { bytes: 200 * MIB });
    eventually("the guest reports a smaller balloon", 20, || {
        let info = guest.balloon();
        when(info.actual_bytes + 100 * MIB <= full, || format!("{full} -> {info:?}"))
    });
    assert_eq!(guest.value("/proc/vmstat", "oom_kill"), 0, "no process was killed");
    assert!(module.counter("oom_pages") >= 100 * MIB / 4096);
    guest.inflate_to(16 * MIB);
}

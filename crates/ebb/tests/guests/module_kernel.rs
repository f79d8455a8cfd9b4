//! Ebb's own driver and what the kernel does around it: hotplug of memory and processors, many
//! processors, compaction during a deflation, content of free pages that the device cannot know,
//! flags of pages, parameters.

use std::fs;
use std::path::Path;
use std::time::Duration;

use ebb_agent::command_line::BalloonDriver;
use ebb_agent::meminfo::lines;
use ebb_agent::protocol::{Command, Event};
use ebb_vmm::api::{BalloonFeature, ReclaimReport};
use serde_json::json;

use crate::guest::{MIB, REQUEST_MS};
use crate::harness::{Scene, Test, additional_mib, counts, eventually, when};
use crate::module_support::{Module, TRACKERS};
use crate::setup::Setup;

/// The tests.
pub const TESTS: &[Test] = &[
    Test::new("module::hotplug_under_each_tracker", 400, hotplug_under_each_tracker),
    Test::new("module::isolation_does_not_grow_with_cpus", 300, isolation_does_not_grow_with_cpus),
    Test::new("module::compaction_during_deflation", 300, compaction_during_deflation),
    Test::new("module::unknown_content_of_free_pages", 120, unknown_content_of_free_pages),
    Test::new("module::left_out_of_dumps", 120, left_out_of_dumps),
    Test::new("module::reporting_order", 400, reporting_order),
    Test::new("module::kexec_with_a_full_balloon", 240, kexec_with_a_full_balloon),
];

/// Most blocks that are out of the allocator at a time, whatever the number of processors: one
/// report.
const MOST_ISOLATED: u64 = 32;

/// Writes a file of the guest's sysfs; whether the kernel accepted it.
fn try_write(module: &Module, path: &str, text: &str) -> bool {
    let command = Command::WriteFile { path: path.to_owned(), text: text.to_owned() };
    let id = module.guest.send(command);
    module.guest.outcome(id).is_ok()
}

/// Memory and a processor go and come while a program allocates and frees and blocks are reported.
fn hotplug_under_each_tracker(scene: &Scene) {
    let setup = Setup::new(scene)
        .args(["--cpus", "2"])
        .memory("size=1G")
        .words("movablecore=512M")
        .balloon("reporting=on,deflate_on_oom=on,verify_reports=on");
    let module = Module::start_with_trackers(
        setup,
        &["tracker=none", "bitmap_threshold=1", "bitmap_delay_ms=50"],
    );
    let guest = &module.guest;
    guest.run(Command::Hold { bytes: 64 * MIB, pattern: 3 });
    let total = guest.meminfo("MemTotal");

    for (seed, tracker) in TRACKERS.into_iter().enumerate() {
        module.set("tracker", tracker);
        let work = guest.send(Command::Churn {
            bytes: 192 * MIB,
            tasks: 2,
            seed: seed as u64,
            operations: Some(counts(300, 3000)),
            seconds: None,
        });
        // The last blocks of memory; those before them if the kernel has its own tables there
        // (KASAN's shadow of memory).
        let movable = if additional_mib() > 0 { [4, 5] } else { [6, 7] };
        let mut gone = 0;
        let mut rounds = 0;
        while guest.poll(work).is_none() || (gone == 0 && rounds < 20) {
            for block in movable {
                let state = format!("/sys/devices/system/memory/memory{block}/state");
                if try_write(&module, &state, "offline") {
                    gone += 1;
                    guest.write_file("/sys/devices/system/cpu/cpu1/online", "0");
                    guest.write_file(&state, "online_movable");
                    guest.write_file("/sys/devices/system/cpu/cpu1/online", "1");
                }
            }
            rounds += 1;
        }
        module.churned(work);
        assert!(gone > 0, "{tracker}: no memory could be taken offline in {rounds} rounds");
    }
    assert_eq!(guest.meminfo("MemTotal"), total);
    module.set("tracker", "none");
    assert_eq!(module.counter("isolated_now"), 0);
    module.check_well();
}

/// A processor waits for its turn before it takes blocks out of the allocator, not after.
fn isolation_does_not_grow_with_cpus(scene: &Scene) {
    let setup = Setup::new(scene)
        .args(["--cpus", "16"])
        .memory("size=1G")
        .balloon("reporting=on,deflate_on_oom=on");
    let parameters =
        ["tracker=percpu", "percpu_entries=64", "percpu_order=0", "percpu_flush_ms=10"];
    let module = Module::start_with_trackers(setup, &parameters);
    let work = module.guest.send(Command::Churn {
        bytes: 512 * MIB,
        tasks: 16,
        seed: 1,
        operations: Some(counts(1500, 30_000)),
        seconds: None,
    });
    module.churned(work);
    let most = module.counter("isolated_most");
    assert!((1..=MOST_ISOLATED).contains(&most), "{most} blocks were isolated at a time");
    module.check_well();
}

/// A balloon of single pages is deflated with bitmaps, whose window not all pages fit into, while
/// compaction takes and returns pages.
fn compaction_during_deflation(scene: &Scene) {
    let setup = Setup::new(scene)
        .args(["--cpus", "2"])
        .memory("size=512M")
        .balloon("reporting=off,deflate_on_oom=off");
    let module = Module::start(setup, &["encoding=bitmap", "max_order=0"]);
    let guest = &module.guest;
    let total = guest.meminfo("MemTotal");
    let work = guest.send(Command::Churn {
        bytes: 96 * MIB,
        tasks: 2,
        seed: 4,
        operations: Some(counts(300, 6000)),
        seconds: None,
    });
    let mut turn = 0;
    while guest.poll(work).is_none() {
        guest.set_target([200 * MIB, 40 * MIB, 160 * MIB, 8 * MIB][turn % 4]);
        guest.run(Command::Compact);
        turn += 1;
    }
    module.churned(work);
    assert!(module.counter("moved_pages") > 0, "compaction has moved no page of the balloon");
    guest.inflate_to(100 * MIB);
    assert_eq!(guest.meminfo("MemTotal"), total - 100 * MIB);
    guest.inflate_to(0);
    assert_eq!(guest.meminfo("MemTotal"), total);
    module.check_well();
}

/// A kernel that clears or poisons pages when they are freed, on a device that is not told so:
/// nothing may let the host lose the content of free pages. Where the kernel knows `page_poison`, it
/// takes precedence.
fn unknown_content_of_free_pages(scene: &Scene) {
    let setup = Setup::new(scene)
        .words("init_on_free=1 page_poison=1")
        .balloon("reporting=on,poison=off,deflate_on_oom=off");
    let module = Module::start(setup, &[]);
    let guest = &module.guest;
    let features = guest.balloon().negotiated_features;
    for feature in [BalloonFeature::PageReporting, BalloonFeature::HostRequest] {
        assert!(!features.contains(&feature), "{features:?}");
    }
    assert_eq!(module.counter("direct"), 0);
    let total = guest.meminfo("MemTotal");
    guest.run(Command::Hold { bytes: 32 * MIB, pattern: 6 });
    guest.inflate_to(128 * MIB);
    assert_eq!(guest.meminfo("MemTotal"), total - 128 * MIB);
    for (request, words) in [("reclaim", "on request"), ("free-pages", "host requests")] {
        let (status, message) = guest.refused("PUT", &format!("/balloon/{request}"), "");
        assert_eq!(status, 409, "{message}");
        assert!(message.contains(words) && message.contains("ebb_balloon"), "{message}");
    }
    guest.inflate_to(0);
    assert_eq!(guest.meminfo("MemTotal"), total);
    // The kernel would report two seconds after memory became free.
    guest.run(Command::AllocTouchExit { bytes: 160 * MIB });
    std::thread::sleep(Duration::from_secs(5));
    assert_eq!(guest.metric("ebb_balloon_reported_bytes_total"), 0);
    assert!(guest.resident() >= 160 * MIB);
    module.check_well();
}

/// Number of pages that dumps and readers of the kernel's memory leave out: those with the flag
/// KPF_OFFLINE, bit 23 (Documentation/admin-guide/mm/pagemap.rst).
fn offline_pages(module: &Module) -> u64 {
    let line = r#"hexdump -v -e '2/4 "%08x " "\n"' /proc/kpageflags | grep -c '^..[89a-f]'"#;
    let argv = ["/bin/busybox", "sh", "-c", line].map(str::to_owned).to_vec();
    let result = module.guest.run(Command::Exec { argv });
    let text = result["stdout"].as_str().expect("text").trim();
    text.parse().unwrap_or_else(|error| panic!("{error}: {result}"))
}

/// Each page of the balloon is marked, those of whole blocks, too.
fn left_out_of_dumps(scene: &Scene) {
    let setup = Setup::new(scene).balloon("reporting=off,deflate_on_oom=off");
    let module = Module::start(setup, &["tracker=none"]);
    let before = offline_pages(&module);
    // The second size splits a block.
    for size in [128 * MIB, 101 * MIB + 4096, 0] {
        module.guest.inflate_to(size);
        assert_eq!(offline_pages(&module), before + size / 4096, "{size} bytes");
    }
    assert!(module.counter("order_10") > 0 && module.counter("split_blocks") > 0);
    module.check_well();
}

/// The kernel's parameter decides which blocks are reported, also after Linux's own driver, which
/// sets it, was there first.
fn reporting_order(scene: &Scene) {
    const ORDER: &str = "/sys/module/page_reporting/parameters/page_reporting_order";
    let setup = Setup::new(scene).balloon("reporting=on,deflate_on_oom=off,verify_reports=on");
    let module = Module::start_without(setup);
    let guest = &module.guest;
    let path = "/modules/virtio_balloon.ko".to_owned();
    guest.run(Command::LoadModule { path, parameters: String::new() });
    guest.run(Command::UnloadModule { name: "virtio_balloon".to_owned() });
    module.load("tracker=reporting report_delay_ms=0");
    assert_eq!(guest.read_file(ORDER).trim(), "9");
    guest.run(Command::Hold { bytes: 32 * MIB, pattern: 15 });
    // Both in one reading: reports may go on.
    let counts = || {
        let text = guest.read_lines("/sys/kernel/debug/ebb_balloon/counters", &["reported"]);
        let of = |name| lines(&text).find_map(|(found, value)| (found == name).then_some(value));
        (of("reported_pages").expect("a counter"), of("reported").expect("a counter"))
    };
    let freed = 160 * MIB;
    guest.run(Command::AllocTouchExit { bytes: freed });
    eventually("freed memory is reported", 60, || {
        let (pages, blocks) = counts();
        assert!(pages >= blocks << 9, "{blocks} blocks, {pages} pages");
        when(pages * 4096 >= freed / 2, || format!("{pages} pages"))
    });
    // What is left of the large blocks comes first.
    let body = json!({ "timeout_ms": REQUEST_MS });
    guest.client().put_json::<ReclaimReport>("/balloon/reclaim", &body).unwrap();
    guest.write_file(ORDER, "4");
    let before = counts();
    eventually("smaller blocks are reported", 60, || {
        // Something must become free, or the kernel does not look.
        guest.run(Command::AllocTouchExit { bytes: 8 * MIB });
        let now = counts();
        let (pages, blocks) = (now.0 - before.0, now.1 - before.1);
        assert!(pages >= blocks << 4, "{blocks} blocks, {pages} pages");
        when(pages < blocks << 9, || format!("{blocks} blocks, {pages} pages"))
    });
    module.check_well();
}

/// Another kernel is started while a balloon is full and grows: it finds a device that has forgotten
/// the balloon, and nothing is discarded under it.
fn kexec_with_a_full_balloon(scene: &Scene) {
    // A disk consists of whole sectors.
    let disk = |name: &str, file: &Path| {
        let mut content = fs::read(file).unwrap();
        content.resize(content.len().next_multiple_of(512), 0);
        let path = scene.path(name);
        fs::write(&path, content).unwrap();
        format!("path={},readonly=on", path.display())
    };
    let kernel = disk("kernel", &scene.world.bzimage);
    let initrd = disk("initrd", &scene.world.initrd);
    let setup = Setup::new(scene)
        .args(["--cpus", "2", "--disk", &kernel, "--disk", &initrd])
        .memory("size=1G")
        .balloon("reporting=on,deflate_on_oom=off");
    let module = Module::start(setup, &["tracker=reporting"]);
    let guest = &module.guest;
    let total = guest.meminfo("MemTotal");
    for (from, to) in [("/dev/vda", "/tmp/kernel"), ("/dev/vdb", "/tmp/initrd")] {
        let line = format!("dd if={from} of={to} bs=1M");
        let argv = ["/bin/busybox", "sh", "-c", &line].map(str::to_owned).to_vec();
        assert_eq!(guest.run(Command::Exec { argv })["code"], 0, "{line}");
    }
    guest.inflate_to(256 * MIB);
    guest.set_target(512 * MIB);
    guest.send(Command::Kexec { kernel: "/tmp/kernel".into(), initrd: "/tmp/initrd".into() });
    let Event::Ready { balloon_driver, warnings, .. } = guest.wait_ready(2) else { unreachable!() };
    assert_eq!((balloon_driver, warnings), (BalloonDriver::EbbBalloon, Vec::new()));
    guest.run(Command::Hold { bytes: 64 * MIB, pattern: 27 });
    guest.inflate_to(512 * MIB);
    guest.inflate_to(0);
    assert!(guest.meminfo("MemTotal").abs_diff(total) < 16 * MIB);
    module.check_well();
}

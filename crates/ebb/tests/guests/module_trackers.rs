//! The trackers of Ebb's own driver: free memory, and only free memory, is returned to the host
//! without a request.

use ebb_agent::churn::ChurnReport;
use ebb_agent::protocol::Command;
use ebb_vmm::api::BalloonState;

use crate::guest::MIB;
use crate::harness::{Scene, Test, counts, eventually, when};
use crate::module_support::{Module, TRACKERS};
use crate::setup::Setup;

/// The tests.
pub const TESTS: &[Test] = &[
    Test::new("module::trackers_return_memory", 300, trackers_return_memory),
    Test::new("module::switched_and_reloaded_under_churn", 400, switched_and_reloaded_under_churn),
    Test::new("module::soak", 600, soak),
];

/// Memory that the program writes to, in bytes.
const PROGRAM_BYTES: u64 = 400 * MIB;

fn trackers_return_memory(scene: &Scene) {
    let setup = Setup::new(scene)
        .args(["--cpus", "2"])
        .memory("size=1G")
        .balloon("reporting=on,verify_reports=on");
    let module = Module::start_with_trackers(setup, &["tracker=none"]);
    let guest = &module.guest;
    guest.run(Command::Hold { bytes: 32 * MIB, pattern: 8 });
    // The tracker `none` reports nothing.
    guest.run(Command::AllocTouchExit { bytes: PROGRAM_BYTES });
    assert_eq!(guest.metric("ebb_balloon_reported_bytes_total"), 0);

    for (tracker, part) in [("bitmap", 90), ("percpu", 80), ("reporting", 80)] {
        module.set("tracker", tracker);
        let reported = guest.metric("ebb_balloon_reported_bytes_total");
        guest.run(Command::Hold { bytes: PROGRAM_BYTES, pattern: 9 });
        let peak = guest.resident();
        // After the program's end its memory is returned, but not memory that was in use before.
        guest.run(Command::Release);
        guest.run(Command::Hold { bytes: 32 * MIB, pattern: 8 });
        let must_fall = (PROGRAM_BYTES - 32 * MIB) / 100 * part;
        eventually(&format!("{tracker} returns {part} % of the memory"), 90, || {
            let resident = guest.resident();
            when(resident + must_fall <= peak, || format!("{peak} -> {resident} bytes"))
        });
        assert!(
            guest.metric("ebb_balloon_reported_bytes_total") >= reported + must_fall,
            "{tracker}"
        );
        assert!(module.counter("reported_pages") >= must_fall / 4096, "{tracker}");
        assert_eq!(guest.wrong_pages(), 0, "{tracker}");
        guest.run(Command::Release);
        guest.run(Command::Hold { bytes: 32 * MIB, pattern: 8 });
    }
    // A tracker that is stopped in the middle of an early report has nothing left to put back.
    guest.run(Command::Hold { bytes: PROGRAM_BYTES, pattern: 9 });
    let early = module.counter("early_pages");
    guest.run(Command::Release);
    eventually("an early report", 30, || {
        when(module.counter("early_pages") > early, || format!("{early} pages before"))
    });
    module.set("tracker", "none");
    assert_eq!(module.counter("isolated_now"), 0);
    let reported = module.counter("reported_pages");
    guest.run(Command::AllocTouchExit { bytes: 32 * MIB });
    assert_eq!(module.counter("reported_pages"), reported);
    module.check_well();
}

/// A guest with little memory, whose device overwrites reported pages.
fn churned_guest(scene: &Scene) -> Module {
    let setup = Setup::new(scene)
        .args(["--cpus", "2"])
        .memory("size=512M")
        .balloon("reporting=on,deflate_on_oom=on,verify_reports=on");
    let module = Module::start_with_trackers(setup, &["tracker=none"]);
    module.guest.run(Command::Hold { bytes: 64 * MIB, pattern: 3 });
    module
}

fn churn(module: &Module, seed: u64, operations: u64) -> u64 {
    module.guest.send(Command::Churn {
        bytes: 224 * MIB,
        tasks: 2,
        seed,
        operations: Some(operations),
        seconds: None,
    })
}

/// Whether a churn is still running.
fn at_work(module: &Module, id: u64) -> bool {
    module.guest.poll(id).is_none()
}

fn switched_and_reloaded_under_churn(scene: &Scene) {
    let module = churned_guest(scene);
    let guest = &module.guest;
    let total = guest.meminfo("MemTotal");
    let free = guest.meminfo("MemFree");

    let work = churn(&module, 1, 700);
    let mut switches = 0;
    while at_work(&module, work) || switches < 2 * TRACKERS.len() {
        module.set("tracker", TRACKERS[switches % TRACKERS.len()]);
        switches += 1;
        match switches % 4 {
            0 => drop(guest.run(Command::Compact)),
            1 => guest.set_target(64 * MIB),
            3 => guest.set_target(0),
            _ => {}
        }
    }
    module.churned(work);
    module.set("tracker", "none");
    assert_eq!(module.counter("isolated_now"), 0);
    guest.inflate_to(0);

    let work = churn(&module, 2, 700);
    let mut loads = 0;
    while at_work(&module, work) || loads < TRACKERS.len() {
        module.unload();
        assert_eq!(guest.balloon().state, BalloonState::DriverAbsent);
        module.load(&format!("tracker={} bitmap_threshold=1", TRACKERS[loads % TRACKERS.len()]));
        // The next unload interrupts this.
        guest.set_target([96 * MIB, 0][loads % 2]);
        if loads % 3 == 0 {
            guest.run(Command::Compact);
        }
        loads += 1;
    }
    module.churned(work);
    module.unload();
    assert_eq!(guest.meminfo("MemTotal"), total, "the driver keeps no memory");
    // Caches of the kernel have grown by a few MiB at most.
    module.wait_free(free - 24 * MIB);
    module.load("tracker=none");
    guest.set_target(0);
    module.check_well();
}

/// All trackers in turn, with memory pressure and compaction, until enough work is done: no page
/// may be wrong.
fn soak(scene: &Scene) {
    let module = churned_guest(scene);
    let guest = &module.guest;
    // The long soak takes about a quarter of an hour in an emulated host.
    let operations = counts(1500, 150_000);
    let mut sum = ChurnReport::default();
    let mut verified = 0;
    for round in 0.. {
        if sum.operations >= operations {
            break;
        }
        // The tracker `none` reports nothing that could be wrong.
        let tracker = TRACKERS[round % 3];
        if round % 6 == 5 {
            module.unload();
            module.load(&format!("tracker={tracker}"));
        } else {
            module.set("tracker", tracker);
        }
        let work = churn(&module, round as u64, 250.min(operations - sum.operations));
        // At times the remaining memory is used for page cache and programs.
        let mut turn = 0;
        while at_work(&module, work) {
            match turn % 3 {
                0 => drop(guest.run(Command::Compact)),
                1 => drop(guest.run(Command::FillUntilOom { leave_bytes: 24 * MIB })),
                _ => guest.set_target([0, 48 * MIB][turn / 3 % 2]),
            }
            turn += 1;
        }
        sum.add(module.churned(work));
        verified = guest.metric("ebb_balloon_verified_pages_total");
        module.check_well();
    }
    assert!(verified > 0, "pages were reported and overwritten at the host");
    eprintln!("module::soak: {verified} pages overwritten at the host; {sum:?}");
}

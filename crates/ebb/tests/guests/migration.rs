//! Live migration of working guests: the result, its cost, and the pages that are not sent.

use ebb_agent::clock_watch::WatchReport;
use ebb_agent::protocol::Command;
use ebb_vmm::api::VmState;
use serde_json::Value;

use crate::clocks::{complaints, watch, watched, watched_since};
use crate::guest::{Guest, MIB};
use crate::harness::{Scene, Test, WRONG_CONTENT, counts, eventually, when};
use crate::module_support::Module;
use crate::moved::{MIGRATED, Migrate, Receive, Route, move_to, number, wait_sending};
use crate::setup::Setup;

/// The tests.
pub const TESTS: &[Test] = &[
    Test::new("migration::everything_goes_on", 300, everything_goes_on),
    Test::new("migration::back_and_forth", 600, back_and_forth),
    Test::new(
        "migration::back_and_forth_with_two_processors",
        600,
        back_and_forth_with_two_processors,
    ),
    Test::new("migration::free_pages_are_not_sent", 400, free_pages_are_not_sent),
    Test::new("migration::hints_of_a_guest_that_clears", 300, hints_of_a_guest_that_clears),
    Test::new("migration::paused_stays_paused", 240, paused_stays_paused),
    Test::new("migration::memory_is_handed_over", 240, memory_is_handed_over),
    Test::new("migration::more_writing_than_sending", 300, more_writing_than_sending),
];

/// Empty list of options.
const NONE: [&str; 0] = [];
/// Number of migrations of a guest; each takes some seconds in an emulated host.
fn moves() -> usize {
    counts(4, 20)
}

/// Checks the content of all held memory.
#[track_caller]
fn check_memory(guest: &Guest) {
    let wrong = guest.wrong_pages();
    assert_eq!(wrong, 0, "{WRONG_CONTENT}");
}

fn everything_goes_on(scene: &Scene) {
    let disk = scene.path("disk");
    std::fs::write(&disk, vec![0x5a; 8 << 20]).unwrap();
    let guest = Setup::new(scene)
        .memory("size=320M")
        .balloon("reporting=on,hinting=on,statistics=1s")
        .args(["--cpus", "2", "--disk", &format!("path={}", disk.display())])
        .start();
    guest.run(Command::Hold { bytes: 64 * MIB, pattern: 41 });
    guest.write_file("/tmp/note", "written before");
    guest.inflate_to(64 * MIB);
    // A program that runs during all migrations.
    let argv =
        ["/bin/busybox", "sh", "-c", "until [ -e /tmp/go ]; do sleep 0.2; done; echo still here"]
            .map(str::to_owned)
            .to_vec();
    let program = guest.send(Command::Exec { argv });
    guest.wait_started(program);
    let memory_bytes = guest.vm().memory_bytes;
    let events = guest.acpi_events();

    let image = format!("path={}", disk.display());
    let second = Receive::new(scene, "second", Route::Unix).args(["--disk", &image]);
    let (guest, report) = move_to(second, guest, NONE);
    assert_eq!(number(&report, "memory_bytes"), memory_bytes, "{report}");
    // All held memory and little more: the balloon's 64 MiB and untouched memory are not sent.
    let sent = number(&report, "bytes_sent");
    assert!((64 * MIB..256 * MIB).contains(&sent), "{report}");
    assert_eq!(guest.poll(program), None);
    guest.write_file("/tmp/go", "");
    assert_eq!(guest.outcome(program).unwrap()["stdout"], "still here\n");
    assert_eq!(guest.read_file("/tmp/note"), "written before");
    assert_eq!(guest.acpi_events(), events, "a machine that moves remains the same one");
    assert_eq!(guest.read_file("/sys/devices/system/cpu/online"), "0-1\n");
    check_memory(&guest);
    let moved = guest.vm();
    assert_eq!((moved.memory_bytes, moved.state), (memory_bytes, VmState::Running));
    let balloon = guest.balloon();
    assert_eq!((balloon.target_bytes, balloon.actual_bytes), (64 * MIB, 64 * MIB));
    eventually("statistics", 30, || guest.statistics().map_err(|error| error.to_string()));
    guest.inflate_to(96 * MIB);
    guest.inflate_to(0);
    let script = "dd if=/dev/vda bs=1M count=1 | md5sum && \
                  dd if=/dev/urandom of=/dev/vda bs=1M count=1 conv=fsync";
    let argv = ["/bin/busybox", "sh", "-c", script].map(str::to_owned).to_vec();
    assert_eq!(guest.run(Command::Exec { argv })["code"], 0);

    // Again, over another transport, with several streams, while the guest prints.
    let script = "n=0; until [ -e /tmp/quiet ]; do echo line $((n += 1)); sleep 0.1; done";
    let argv = ["/bin/busybox", "sh", "-c", &format!("({script}) >/dev/console")];
    let printing = guest.send(Command::Exec { argv: argv.map(str::to_owned).to_vec() });
    let third = Receive::new(scene, "third", Route::Tcp).args(["--disk", &image]);
    let (mut guest, _) = move_to(third, guest, ["--streams", "3"]);
    guest.write_file("/tmp/quiet", "");
    assert_eq!(guest.outcome(printing).unwrap()["code"], 0);
    // None is lost, and none comes twice.
    let lines = guest.console_lines();
    let numbers = lines.iter().filter_map(|line| line.strip_prefix("line ")?.parse::<u32>().ok());
    let numbers: Vec<_> = numbers.collect();
    assert!(numbers.len() > 3 && numbers.windows(2).all(|two| two[1] == two[0] + 1), "{lines:?}");
    check_memory(&guest);
    let reported = guest.metric("ebb_balloon_reported_bytes_total");
    guest.run(Command::AllocTouchExit { bytes: 150 * MIB });
    eventually("memory is reported", 60, || {
        let now = guest.metric("ebb_balloon_reported_bytes_total");
        when(now > reported + 64 * MIB, || format!("{reported} -> {now}"))
    });
    check_memory(&guest);
    guest.send(Command::PowerOff);
    let (code, log) = guest.wait_end();
    assert_eq!(code, Some(0), "{log}");
}

/// Repeatedly migrates a guest whose programs check their memory and whose clocks are watched.
fn move_often(scene: &Scene, cpus: &str) {
    let mut guest = Setup::new(scene)
        .memory("size=256M")
        .balloon("reporting=on,hinting=on")
        .args(["--cpus", cpus])
        .start();
    guest.run(Command::Hold { bytes: 32 * MIB, pattern: 43 });
    watch(&guest);
    let mut seen: WatchReport = watched(&guest);
    let churn =
        Command::Churn { bytes: 64 * MIB, tasks: 2, seed: 44, operations: None, seconds: Some(20) };
    let mut work = guest.send(churn.clone());
    let (mut checked, mut moves_at_work) = (0, 0);
    for round in 0..moves() {
        let route = [Route::Unix, Route::Tcp][round % 2];
        let options: &[&str] = match round % 4 {
            0 => &["--free-pages", "hints"],
            1 => &["--free-pages", "off", "--streams", "2"],
            2 => &["--free-pages", "auto", "--zero-pages", "off"],
            _ => &["--free-pages", "hints", "--holes", "off"],
        };
        // The balloon changes, too.
        guest.set_target([0, 48 * MIB, 16 * MIB][round % 3]);
        let name = format!("monitor{round}");
        let (moved, report) = move_to(Receive::new(scene, &name, route), guest, options);
        guest = moved;
        assert!(number(&report, "rounds") >= 2, "{report}");
        seen = watched_since(&guest, &seen);
        check_memory(&guest);
        match guest.poll(work) {
            None => moves_at_work += 1,
            Some(outcome) => {
                checked += checked_pages(&outcome.unwrap());
                work = guest.send(churn.clone());
            }
        }
    }
    if checked == 0 {
        // The workload is still running.
        checked += checked_pages(&guest.outcome(work).unwrap());
    } else {
        // It may have just ended.
        let _ = guest.outcome(guest.send(Command::Cancel { id: work }));
    }
    assert!(moves_at_work * 2 >= moves(), "{moves_at_work} migrations while the workload ran");
    assert!(checked > 0, "the workload has not checked any page");
    assert_eq!(complaints(&guest), "");
}

/// Number of pages that a workload has checked; fails if any was wrong.
#[track_caller]
fn checked_pages(report: &Value) -> u64 {
    assert_eq!(report["wrong_pages"], 0, "{WRONG_CONTENT}: {report}");
    number(report, "pages_verified")
}

fn back_and_forth(scene: &Scene) {
    move_often(scene, "1");
}

fn back_and_forth_with_two_processors(scene: &Scene) {
    move_often(scene, "2");
}

fn free_pages_are_not_sent(scene: &Scene) {
    const FREED: u64 = 256 * MIB;
    // Reporting is off, so that all touched memory is resident. The driver allocates the pages that
    // it hints; a kernel that clears allocated pages takes longer for this in an emulated host than
    // the migration waits.
    let setup = || Setup::new(scene).memory("size=448M").words("init_on_alloc=0");
    let touched_and_freed = |guest: &Guest| {
        guest.run(Command::Hold { bytes: 32 * MIB, pattern: 45 });
        guest.run(Command::Memhog { bytes: FREED });
    };

    let guest = setup().balloon("reporting=off,hinting=on").start();
    touched_and_freed(&guest);
    let (guest, all) =
        move_to(Receive::new(scene, "all", Route::Unix), guest, ["--free-pages", "off"]);
    assert!(number(&all, "bytes_sent") > FREED, "{all}");
    assert_eq!(number(&all, "pages_skipped"), 0, "{all}");
    check_memory(&guest);
    // Skipped pages are not resident at the destination, so the memory has to be touched again.
    guest.run(Command::Memhog { bytes: FREED });
    let (guest, hints) =
        move_to(Receive::new(scene, "hints", Route::Unix), guest, ["--free-pages", "hints"]);
    check_memory(&guest);
    assert!(number(&hints, "pages_skipped") * 4096 > FREED / 2, "{hints}");
    assert!(number(&hints, "bytes_sent") * 2 < number(&all, "bytes_sent"), "{hints} {all}");
    // The driver has its pages again.
    guest.run(Command::AllocTouchExit { bytes: FREED });
    check_memory(&guest);
    guest.end();

    let module =
        Module::start(setup().balloon("reporting=off").socket("module"), &["tracker=none"]);
    let guest = module.guest;
    touched_and_freed(&guest);
    let (guest, query) =
        move_to(Receive::new(scene, "query", Route::Unix), guest, ["--free-pages", "query"]);
    check_memory(&guest);
    assert!(number(&query, "pages_skipped") * 4096 > FREED / 2, "{query}");
    assert!(number(&query, "bytes_sent") * 2 < number(&all, "bytes_sent"), "{query} {all}");
    guest.run(Command::AllocTouchExit { bytes: FREED });
    check_memory(&guest);
}

/// A guest with Debian's defaults: its kernel clears pages that the hinting driver allocates, so
/// that hints take long. Over a link that is even slower the migration waits for them.
fn hints_of_a_guest_that_clears(scene: &Scene) {
    const FREED: u64 = 128 * MIB;
    let guest = Setup::new(scene)
        .memory("size=320M")
        .words("init_on_alloc=1")
        .balloon("reporting=off,hinting=on")
        .start();
    guest.run(Command::Hold { bytes: 32 * MIB, pattern: 49 });
    guest.run(Command::Memhog { bytes: FREED });
    let options = ["--free-pages", "hints", "--bandwidth", "16M"];
    let (guest, hints) = move_to(Receive::new(scene, "second", Route::Unix), guest, options);
    check_memory(&guest);
    assert!(number(&hints, "pages_skipped") * 4096 > FREED / 2, "{hints}");
    // The driver has its pages again, and pages given to programs are cleared.
    guest.run(Command::AllocTouchExit { bytes: FREED });
    check_memory(&guest);
}

fn paused_stays_paused(scene: &Scene) {
    let guest = Setup::new(scene).memory("size=256M").start();
    guest.run(Command::Hold { bytes: 32 * MIB, pattern: 46 });
    guest.put("/vm/pause");
    let (mut guest, _) = move_to(Receive::new(scene, "second", Route::Unix), guest, NONE);
    assert_eq!(guest.vm().state, VmState::Paused);
    // The state at the end of the migration counts, not that at its beginning.
    for (name, change, state) in
        [("third", "/vm/resume", VmState::Running), ("fourth", "/vm/pause", VmState::Paused)]
    {
        let (there, address) = Receive::new(scene, name, Route::Unix).start();
        let slow = ["--bandwidth", "10M"];
        let mut client = Migrate::new(scene, &guest, &address).args(slow).spawn();
        wait_sending(&guest, MIB);
        guest.put(change);
        assert_eq!(client.wait().unwrap().code(), Some(0), "{name}");
        assert_eq!(there.vm().state, state, "{name}");
        assert_eq!(guest.wait_end().0, Some(MIGRATED), "{name}");
        guest = there;
    }
    guest.put("/vm/resume");
    check_memory(&guest);
}

fn memory_is_handed_over(scene: &Scene) {
    let guest = Setup::new(scene).memory("size=256M,backing=memfd").args(["--cpus", "2"]).start();
    guest.run(Command::Hold { bytes: 64 * MIB, pattern: 47 });
    watch(&guest);
    let seen = watched(&guest);
    let (guest, report) =
        move_to(Receive::new(scene, "second", Route::Unix), guest, ["--share-memory"]);
    assert!(number(&report, "bytes_sent") < MIB, "{report}");
    watched_since(&guest, &seen);
    check_memory(&guest);
    guest.run(Command::AllocTouchExit { bytes: 64 * MIB });
    check_memory(&guest);
    assert_eq!(complaints(&guest), "");
}

fn more_writing_than_sending(scene: &Scene) {
    let guest = Setup::new(scene).memory("size=256M").start();
    let (bytes, seconds) = counts((32 * MIB, 20), (128 * MIB, 50));
    let churn =
        Command::Churn { bytes, tasks: 1, seed: 48, operations: None, seconds: Some(seconds) };
    let work = guest.send(churn);
    guest.wait_started(work);
    // Much less bandwidth than the guest writes: only the time limit ends the migration.
    let options =
        ["--bandwidth", "4M", "--timeout", "5", "--on-timeout", "force", "--downtime", "20"];
    let (guest, report) = move_to(Receive::new(scene, "second", Route::Tcp), guest, options);
    assert!(number(&report, "rounds") >= 2, "{report}");
    checked_pages(&guest.outcome(work).unwrap());
}

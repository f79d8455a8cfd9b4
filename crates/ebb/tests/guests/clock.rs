//! The guest's clocks over pauses, snapshots and restores: the checks of kvm-unit-tests'
//! kvmclock_test, Linux's kvm_clock_test and Firecracker's snapshot tests, in a real guest.
//!
//! Emulated guests are slow, so the tests check the order of all readings, which must always be
//! right, but compare times with wide margins. They print the differences.

use std::thread;
use std::time::Duration;

use ebb_agent::protocol::Command;

use crate::clocks::{
    Advance, ClockSample, Distribution, complaints, watch, watched, watched_since,
};
use crate::guest::Guest;
use crate::harness::{Scene, Test, counts};
use crate::saved::Restore;
use crate::setup::{Clocksource, Setup};

/// The tests.
pub const TESTS: &[Test] = &[
    Test::new("clock::readers_over_pauses", 240, readers_over_pauses),
    Test::new("clock::pauses_with_kvm_clock", 240, |scene| pauses(scene, Clocksource::KvmClock)),
    Test::new("clock::pauses_with_tsc", 240, |scene| pauses(scene, Clocksource::Tsc)),
    Test::new("clock::long_pause", 300, long_pause),
    Test::new("clock::readers_over_restores", 600, readers_over_restores),
    Test::new("clock::restores_catch_up", 400, restores_catch_up),
    Test::new("clock::old_snapshot", 400, old_snapshot),
];

/// Number of pauses that no reader may notice.
const PAUSES: usize = 100;
/// Number of snapshots that no reader may notice.
fn restores() -> usize {
    counts(6, 20)
}
/// Number of snapshots with clocks that catch up, in which the readers see gaps.
fn restores_that_catch_up() -> usize {
    counts(2, 5)
}
/// A pause that is long compared with the time that the emulated host loses by itself.
const PAUSE: Duration = Duration::from_secs(2);
/// Longer than the watchdog timeouts of a guest's kernel: 20 s for a soft lockup, 21 s for a stall.
fn long_pause_time() -> Duration {
    counts(Duration::from_secs(25), Duration::from_secs(60))
}
/// Age of an old snapshot, whose guest has watchdog timeouts of a few seconds.
const AGE: Duration = Duration::from_secs(20);
/// Margin for delays of the host and gains of the guest in these tests: half a pause.
const MARGIN_NS: i64 = 1_000_000_000;

/// Both policies, as values of `--clock`.
const POLICIES: [&str; 2] = ["continue", "catch-up"];

/// A small guest with two vCPUs and a policy, and its kernel's complaints at boot.
fn guest(scene: &Scene, clocksource: Clocksource, policy: &str) -> (Guest, String) {
    let guest = Setup::new(scene)
        .clocksource(clocksource)
        .memory("size=256M")
        .args(["--cpus", "2", "--clock", policy])
        .socket(policy)
        .start();
    assert_eq!(ClockSample::take(&guest).guest.clocksource, clocksource.name());
    let complaints = complaints(&guest);
    (guest, complaints)
}

fn readers_over_pauses(scene: &Scene) {
    let (guest, before) = guest(scene, Clocksource::KvmClock, "continue");
    watch(&guest);
    let mut last = watched(&guest);
    for cycle in 0..PAUSES {
        guest.put("/vm/pause");
        guest.put("/vm/resume");
        if cycle % 10 == 9 {
            last = watched_since(&guest, &last);
        }
    }
    println!("    {} readings over {PAUSES} pauses, none of them backward", last.readings());
    assert_eq!(complaints(&guest), before);
}

/// Nanoseconds of a short time.
fn ns(time: Duration) -> i64 {
    i64::try_from(time.as_nanos()).unwrap()
}

/// Checks that the guest's time has advanced according to the policy, over a time in which the
/// guest was paused for at least `stopped`.
#[track_caller]
fn assert_policy(
    policy: &str,
    before: &ClockSample,
    after: &ClockSample,
    stopped: Duration,
) -> Advance {
    let advance = after.since(before);
    let what = format!("{policy}: {advance:?}");
    assert!(advance.guest_ns > 0, "{what}");
    assert!(advance.lag_most_ns() > -MARGIN_NS / 10, "faster than the host's: {what}");
    match policy {
        "continue" => assert!(advance.lag_most_ns() > ns(stopped) - MARGIN_NS / 10, "{what}"),
        _ => assert!(advance.lag_least_ns() < MARGIN_NS, "{what}"),
    }
    advance
}

/// Prints the lag of guests behind the host's time, over one pause or restore each.
fn print_lags(what: &str, advances: &[Advance]) {
    println!("    {what}: behind the host's time");
    println!("        at least {}", Distribution::of(advances.iter().map(Advance::lag_least_ns)));
    println!("        at most  {}", Distribution::of(advances.iter().map(Advance::lag_most_ns)));
}

/// Prints the error of the guests' real time over successive restores.
fn print_real_time(what: &str, errors_ns: &[i64]) {
    let (first, last) = (errors_ns.first().unwrap_or(&0), errors_ns.last().unwrap_or(&0));
    println!(
        "    {what}: real time {} ms off at first, {} ms at last",
        first / 1_000_000,
        last / 1_000_000
    );
}

/// Checks the clocks of guests with both policies over pauses.
fn pauses(scene: &Scene, clocksource: Clocksource) {
    let guests = POLICIES.map(|policy| (policy, guest(scene, clocksource, policy)));
    for (policy, (guest, silence)) in &guests {
        watch(guest);
        let (readers, before) = (watched(guest), ClockSample::take(guest));
        guest.put("/vm/pause");
        thread::sleep(PAUSE);
        guest.put("/vm/resume");
        let after = ClockSample::take(guest);
        let advance = assert_policy(policy, &before, &after, PAUSE);
        let readers = watched_since(guest, &readers);
        let what = format!("{policy}, {}, paused for {} ms", clocksource.name(), PAUSE.as_millis());
        print_lags(&what, &[advance]);
        print_real_time(&what, &[before.real_time_error_ns, after.real_time_error_ns]);
        // A pause with `catch-up` is a gap for each reader; one with `continue` is not.
        let gaps_ns = readers.cpus.iter().map(|cpu| cpu.largest_gap_ns.cast_signed());
        println!("    {what}: the readers' largest gaps {}", Distribution::of(gaps_ns));
        assert_eq!(complaints(guest), *silence);
        guest.run(Command::ClockWatchStop);
    }
}

fn long_pause(scene: &Scene) {
    let guests = POLICIES.map(|policy| guest(scene, Clocksource::KvmClock, policy));
    let before = guests.each_ref().map(|(guest, _)| {
        watch(guest);
        (watched(guest), ClockSample::take(guest))
    });
    for (guest, _) in &guests {
        guest.put("/vm/pause");
    }
    let stopped = long_pause_time();
    thread::sleep(stopped);
    for ((guest, _), (policy, (readers, sample))) in guests.iter().zip(POLICIES.iter().zip(&before))
    {
        guest.put("/vm/resume");
        assert_policy(policy, sample, &ClockSample::take(guest), stopped);
        watched_since(guest, readers);
    }
    // The watchdogs of both kernels run once more before their logs are read.
    for (guest, silence) in &guests {
        guest.run(Command::Sleep { ms: 5000 });
        assert_eq!(complaints(guest), *silence);
    }
}

fn readers_over_restores(scene: &Scene) {
    let file = scene.path("vm.snapshot");
    let (mut guest, silence) = guest(scene, Clocksource::KvmClock, "continue");
    watch(&guest);
    let mut readers = watched(&guest);
    let (mut advances, mut real_time) = (Vec::new(), Vec::new());
    for _ in 0..restores() {
        let before = ClockSample::take(&guest);
        guest.save_and_end(&file);
        guest = Restore::new(scene, &file).start();
        let after = ClockSample::take(&guest);
        advances.push(assert_policy("continue", &before, &after, Duration::ZERO));
        real_time.push(after.real_time_error_ns);
        readers = watched_since(&guest, &readers);
    }
    println!(
        "    {} readings over {} restores with policy continue",
        readers.readings(),
        restores()
    );
    print_lags("restores with policy continue", &advances);
    print_real_time("restores with policy continue", &real_time);
    assert_eq!(complaints(&guest), silence);
}

fn restores_catch_up(scene: &Scene) {
    for clocksource in [Clocksource::KvmClock, Clocksource::Tsc] {
        let file = scene.path("vm.snapshot");
        let (mut guest, silence) = guest(scene, clocksource, "catch-up");
        watch(&guest);
        let mut readers = watched(&guest);
        let (mut advances, mut real_time) = (Vec::new(), Vec::new());
        for _ in 0..restores_that_catch_up() {
            let before = ClockSample::take(&guest);
            guest.save_and_end(&file);
            thread::sleep(PAUSE);
            guest = Restore::new(scene, &file).start();
            let after = ClockSample::take(&guest);
            advances.push(assert_policy("catch-up", &before, &after, PAUSE));
            real_time.push(after.real_time_error_ns);
            readers = watched_since(&guest, &readers);
        }
        print_lags(&format!("catch-up, {}", clocksource.name()), &advances);
        print_real_time(&format!("catch-up, {}", clocksource.name()), &real_time);
        assert_eq!(complaints(&guest), silence);
        guest.end();
    }
}

/// A guest with short watchdog timeouts is restored from a snapshot that is older than them: its
/// kernel must be notified of the pause (KVMCLOCK_CTRL), or it reports lockups of its programs.
fn old_snapshot(scene: &Scene) {
    let file = scene.path("vm.snapshot");
    let (guest, silence) = guest(scene, Clocksource::KvmClock, "catch-up");
    guest.write_file("/proc/sys/kernel/watchdog_thresh", "1");
    guest.write_file("/sys/module/rcupdate/parameters/rcu_cpu_stall_timeout", "3");
    watch(&guest);
    let (readers, before) = (watched(&guest), ClockSample::take(&guest));
    guest.save_and_end(&file);
    thread::sleep(AGE);
    // The policy may differ from the saved one, each time.
    for policy in POLICIES {
        let guest = Restore::new(scene, &file).args(["--clock", policy]).start();
        let after = ClockSample::take(&guest);
        assert_policy(policy, &before, &after, AGE);
        watched_since(&guest, &readers);
        guest.run(Command::Sleep { ms: 3000 });
        assert_eq!(complaints(&guest), silence);
        assert_eq!(guest.read_file("/proc/sys/kernel/watchdog_thresh").trim(), "1");
        guest.end();
    }
}

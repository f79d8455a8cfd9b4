//! The thread: pace, settings and pauses requested by other threads.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use ebb_abi::{PageRange, Pfn};
use ebb_page_merge::{
    Clock, Merger, Nodes, Run, Secret, Settings, SettingsError, StablePages, SystemClock, Worker,
    testing::{Guest, SimClock, SimMemory, SimSlots, World},
};

fn worker(
    settings: Settings,
    pages: u64,
) -> (Worker<SimMemory, StablePages<SimSlots>>, Guest, std::sync::Arc<ebb_page_merge::Control>) {
    let world = World::new();
    let guest = world.guest(&[PageRange::new(Pfn(0), pages)]);
    let store = StablePages::new(world.slots(0));
    let merger = Merger::new(guest.memory(), store, Secret([3; 32]), settings).unwrap();
    let (worker, control) = Worker::new(merger);
    (worker, guest, control)
}

/// Settings without sleeps.
fn restless(run: Run) -> Settings {
    Settings {
        run,
        sleep_millisecs: 0,
        min_pass_millisecs: 0,
        max_cpu_percent: 100,
        max_written_per_second: 1 << 40,
        max_page_sharing: 1000,
        ..Settings::default()
    }
}

/// Ends the thread also when a test fails, which would otherwise wait for it forever.
struct Stop<'a>(&'a ebb_page_merge::Control);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.stop();
    }
}

fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    for _ in 0..100_000 {
        if done() {
            return;
        }
        thread::sleep(Duration::from_millis(1));
    }
    panic!("timeout while waiting for {what}");
}

#[test]
fn other_threads_read_change_and_stop() {
    let (mut worker, guest, control) = worker(restless(Run::Stop), 1000);
    (0..1000).for_each(|pfn| guest.write(pfn, 1 + pfn % 10));
    thread::scope(|scope| {
        let _stop = Stop(&control);
        scope.spawn(|| worker.run(&SystemClock));
        wait_for("the begin", || control.is_running());
        control.change(|settings| settings.run = Run::Merge).unwrap();
        wait_for("merging", || control.statistics().merged_pages == 1000);
        assert_eq!(control.statistics().pages_sharing, 990);

        let error =
            control.change(|settings| settings.merge_across_nodes = Nodes::Apart).unwrap_err();
        assert!(matches!(error, SettingsError::Merged { merged_pages: 1000, .. }));
        assert_eq!(control.settings().merge_across_nodes, Nodes::Across);
        let error = control.change(|settings| settings.pages_to_scan = 0).unwrap_err();
        assert!(matches!(error, SettingsError::OutOfRange { setting: "pages_to_scan", .. }));

        control.change(|settings| settings.run = Run::Unmerge).unwrap();
        wait_for("unmerging", || control.statistics().merged_pages == 0);
        control
            .change(|settings| {
                settings.merge_across_nodes = Nodes::Apart;
                settings.run = Run::Merge;
            })
            .unwrap();
        wait_for("merging again", || control.statistics().merged_pages == 1000);
        control.stop();
    });
    assert!(!control.is_running());
    assert_eq!(control.change(|settings| settings.run = Run::Stop), Err(SettingsError::NoAnswer));
    assert!(guest.slot(5).is_some(), "pages stay merged at the end");
    guest.check();
}

#[test]
fn nothing_is_scanned_during_a_pause() {
    let (mut worker, guest, control) = worker(restless(Run::Merge), 5000);
    let paused = AtomicBool::new(false);
    thread::scope(|scope| {
        let _stop = Stop(&control);
        scope.spawn(|| worker.run(&SystemClock));
        // Another thread pauses as well.
        scope.spawn(|| {
            for _ in 0..50 {
                drop(control.pause());
                thread::yield_now();
            }
            paused.store(true, Ordering::Release);
        });
        for round in 0..50 {
            let guard = control.pause();
            let before = control.statistics();
            (0..100).for_each(|pfn| guest.write(pfn, round));
            thread::sleep(Duration::from_millis(2));
            assert_eq!(control.statistics(), before);
            // Settings can still be changed.
            control.change(|settings| settings.smart_scan = round % 2 == 0).unwrap();
            drop(guard);
        }
        wait_for("a pass after the pauses", || control.statistics().full_scans > 2);
        wait_for("the other's pauses", || paused.load(Ordering::Acquire));
        control.stop();
    });
}

#[test]
fn a_pause_before_the_start_prevents_the_first_step() {
    let (mut worker, _guest, control) = worker(restless(Run::Merge), 512);
    let guard = control.pause();
    thread::scope(|scope| {
        let _stop = Stop(&control);
        scope.spawn(|| worker.run(&SystemClock));
        wait_for("the begin", || control.is_running());
        thread::sleep(Duration::from_millis(20));
        assert_eq!(control.statistics().pages_scanned, 0);
        drop(guard);
        wait_for("the first pass", || control.statistics().full_scans > 0);
        control.stop();
    });
}

/// Writes one page of every block in so many.
fn write_blocks(guest: &Guest, pages: u64, every: usize) {
    (0..pages).step_by(512 * every).for_each(|pfn| guest.write(pfn, 1 + pfn));
}

/// Runs turns on a simulated clock, for a while; returns the share of the processor.
fn pace(
    worker: &mut Worker<SimMemory, StablePages<SimSlots>>,
    clock: &SimClock,
    time: Duration,
) -> f64 {
    let (begin, used) = (clock.now(), clock.used());
    while clock.now() < begin + time {
        clock.sleep(worker.turn(clock).unwrap());
    }
    clock.used().saturating_sub(used).as_secs_f64()
        / clock.now().saturating_sub(begin).as_secs_f64()
}

#[test]
fn the_requested_pace_is_kept() {
    let settings = Settings {
        run: Run::Merge,
        pages_to_scan: 10_240,
        sleep_millisecs: 100,
        min_pass_millisecs: 0,
        max_cpu_percent: 100,
        ..Settings::default()
    };
    let (mut worker, guest, control) = worker(settings, 1 << 16);
    write_blocks(&guest, 1 << 16, 1);
    let clock = SimClock::new(Duration::from_micros(100));
    pace(&mut worker, &clock, Duration::from_secs(100));
    let scanned = control.statistics().pages_scanned as f64;
    // 10,240 pages in 100 ms, less at the end of each pass of 65,536.
    assert!((9.0e6..=10.3e6).contains(&scanned), "{scanned}");

    worker
        .merger_mut()
        .change(Settings { pages_per_second: Some(10_000), ..control.settings() })
        .unwrap();
    pace(&mut worker, &clock, Duration::from_secs(300));
    let slower = control.statistics().pages_scanned as f64 - scanned;
    assert!((0.27e7..=0.304e7).contains(&slower), "{slower}");

    let settings = Settings { sleep_millisecs: 0, max_cpu_percent: 5, ..control.settings() };
    worker.merger_mut().change(settings).unwrap();
    let share = pace(&mut worker, &clock, Duration::from_secs(10));
    assert!((0.045..=0.0505).contains(&share), "{share}");
}

#[test]
fn a_pass_takes_the_requested_time() {
    for every in [1, 32] {
        let settings =
            Settings { run: Run::Merge, target_scan_seconds: Some(20), ..Settings::default() };
        let (mut worker, guest, control) = worker(settings, 1 << 19);
        write_blocks(&guest, 1 << 19, every);
        let clock = SimClock::new(Duration::from_micros(20));
        pace(&mut worker, &clock, Duration::from_secs(200));
        let passes = control.statistics().full_scans;
        // The first one does not know how much memory exists.
        assert!((9..=11).contains(&passes), "{passes} passes in 200 s");
    }
}

/// At the same pace, a pass over all of it would take 80 s.
#[test]
fn memory_that_does_not_exist_takes_no_time() {
    let settings = Settings { run: Run::Merge, ..Settings::default() };
    let (mut worker, guest, control) = worker(settings, 1 << 22);
    write_blocks(&guest, 1 << 22, 512);
    let clock = SimClock::new(Duration::from_micros(20));
    pace(&mut worker, &clock, Duration::from_secs(11));
    // They begin after 0, 2, …, 10 s.
    assert_eq!(control.statistics().full_scans, 6);
}

#[test]
fn a_pass_begins_no_earlier_than_requested() {
    let settings = Settings { run: Run::Merge, min_pass_millisecs: 2000, ..Settings::default() };
    let (mut worker, guest, control) = worker(settings, 4096);
    let clock = SimClock::new(Duration::from_micros(100));
    pace(&mut worker, &clock, Duration::from_secs(100));
    // Nine, then after 4, 8, 16 and 32 seconds, and every 32.
    assert_eq!(control.statistics().full_scans, 13);
    pace(&mut worker, &clock, Duration::from_secs(320));
    assert_eq!(control.statistics().full_scans, 23);
    // Until the guest uses memory.
    (0..1024).for_each(|pfn| guest.write(pfn, 1));
    pace(&mut worker, &clock, Duration::from_secs(46));
    // One finds that, the third after it merges, then eight more, and after 4 and 8 seconds.
    let statistics = control.statistics();
    assert_eq!((statistics.full_scans, statistics.merged_pages), (37, 1024));

    // Passes over more memory take longer, and the next one follows immediately; pages written to
    // are scanned more slowly.
    let settings =
        Settings { min_pass_millisecs: 10, max_written_per_second: 2048, ..control.settings() };
    worker.merger_mut().change(settings).unwrap();
    let before = control.statistics();
    let begin = clock.now();
    for round in 0..10 {
        (0..4096).for_each(|pfn| guest.write(pfn, round));
        pace(&mut worker, &clock, Duration::from_millis(1));
        let end = control.statistics().full_scans + 1;
        while control.statistics().full_scans < end {
            clock.sleep(worker.turn(&clock).unwrap());
        }
    }
    let rate = (control.statistics().written_pages - before.written_pages) as f64
        / clock.now().saturating_sub(begin).as_secs_f64();
    assert!((1000.0..=2060.0).contains(&rate), "{rate}");
}

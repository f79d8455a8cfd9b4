//! Recordings that can have happened, and such that cannot.

#![allow(clippy::unwrap_used)]

use ebb_tracker_model::recording::{LineProblem, PageEvent, ReadError, Recording};
use ebb_tracker_model::replay::{PageUse, Problem, replay, replay_without_one};
use ebb_tracker_model::tracker::Kind;
use ebb_tracker_model::units::{Block, Order, Pfn};

/// Lines of `name zone order page`, on CPU 0 or what follows.
fn recording(lines: &[&str]) -> Recording {
    let mut text = heading(lines.len());
    for line in lines {
        let cpu = if line.split(' ').count() == 4 { " 0" } else { "" };
        text.extend(["\n", line, cpu, " 0"]);
    }
    Recording::read(&text).unwrap()
}

fn heading(events: usize) -> String {
    format!("ebb_balloon recording 1 events {events} lost 0 percpu_entries 64")
}

fn block(order: u8, first: u32) -> Block {
    Block { first: Pfn(first), order: Order(order) }
}

/// A block of order 10 is free, and the kernel's own reporting runs.
const REPORTING: [&str; 3] = ["block 1 10 1024", "start 0 0 3", "started 0 0 3"];
/// The same with tracker `bitmap`, which has found the block.
const BITMAP: [&str; 5] =
    ["block 1 10 1024", "start 0 0 2", "mark 1 9 1024", "mark 1 9 1536", "started 0 0 2"];
/// The same with tracker `percpu`, and a page in use.
const PERCPU: [&str; 4] = ["block 1 10 1024", "alloc 1 0 4096", "start 0 0 1", "started 0 0 1"];

/// Replays lines behind others. The problem and the number of its line among them.
fn problem(before: &[&str], lines: &[&str]) -> Option<(usize, Problem)> {
    let mismatch = replay(&recording(&[before, lines].concat())).err()?;
    Some((mismatch.number - before.len(), mismatch.problem))
}

const HANDLED: [&str; 4] =
    ["isolate 1 10 1024", "report 1 10 1024", "answer 1 10 1024", "putback 1 10 1024"];

#[test]
fn a_block_is_isolated_reported_and_put_back() {
    assert_eq!(problem(&REPORTING, &HANDLED), None);
    let replayed = replay(&recording(&[&REPORTING[..], &HANDLED].concat())).unwrap();
    assert_eq!(replayed.events[&PageEvent::Putback], 1);
}

#[test]
fn each_step_is_needed() {
    let whole = block(10, 1024);
    let problems = [
        (0, Problem::NotHeld(whole)),
        (1, Problem::NotReported(whole)),
        (2, Problem::PutBackUnanswered(whole)),
        (3, Problem::StillHeld(whole)),
    ];
    for (missing, expected) in problems {
        let mut lines = HANDLED.to_vec();
        lines.remove(missing);
        assert_eq!(problem(&REPORTING, &lines), Some((missing, expected)));
    }
}

#[test]
fn a_block_in_hand_is_not_touched() {
    let held = |page| Problem::WrongUse { page: Pfn(page), found: PageUse::Held };
    for line in ["remove 1 0 1030", "alloc 1 0 1030", "free 1 0 1030", "drain 1 0 1030"] {
        let lines = ["isolate 1 10 1024", line];
        assert_eq!(problem(&REPORTING, &lines), Some((1, held(1030))), "{line}");
    }
    for line in ["isolate 1 9 1536", "take 1 9 1536"] {
        let lines = ["isolate 1 10 1024", line];
        assert_eq!(problem(&REPORTING, &lines), Some((1, held(1536))), "{line}");
    }
}

#[test]
fn only_a_free_block_of_that_order_and_zone_is_isolated() {
    let used = Problem::WrongUse { page: Pfn(1024), found: PageUse::Removed };
    let lines = ["remove 1 0 1024", "isolate 1 10 1024"];
    assert_eq!(problem(&REPORTING, &lines), Some((1, used)));
    let small = Problem::OtherOrder { block: block(3, 1024), whole: block(10, 1024) };
    assert_eq!(problem(&REPORTING, &["isolate 1 3 1024"]), Some((0, small)));
    let elsewhere = ["isolate 1 10 1024", "report 2 10 1024"];
    assert_eq!(problem(&REPORTING, &elsewhere), Some((1, Problem::NotHeld(block(10, 1024)))));
    assert_eq!(
        problem(&["block 1 10 1024"], &["isolate 1 10 1024"]),
        Some((0, Problem::NoTracker))
    );
}

#[test]
fn a_block_goes_back_once() {
    let twice = [&HANDLED[..], &["putback 1 10 1024"]].concat();
    let free = Problem::WrongUse { page: Pfn(1024), found: PageUse::Free };
    assert_eq!(problem(&REPORTING, &twice), Some((4, free)));
    let half = [&HANDLED[..3], &["putback 1 9 1024"]].concat();
    assert_eq!(problem(&REPORTING, &half), Some((3, Problem::NotHeld(block(9, 1024)))));
    assert_eq!(
        problem(&REPORTING, &["isolate 1 10 1024", "stop 0 0 3", "stopped 0 0 3"]),
        Some((2, Problem::StillHeld(block(10, 1024))))
    );
}

#[test]
fn what_the_host_knows_is_left_alone_until_it_was_used() {
    let again = [&HANDLED[..], &HANDLED].concat();
    let whole = block(10, 1024);
    assert_eq!(problem(&REPORTING, &again), Some((4, Problem::KnownToHost(whole))));
    let used = ["remove 1 0 1024", "alloc 1 0 1024", "free 1 0 1024", "drain 1 0 1024"];
    assert_eq!(problem(&REPORTING, &[&HANDLED[..], &used, &HANDLED].concat()), None);
    // After a report that failed it has no flag.
    let failed = ["isolate 1 10 1024", "report 1 10 1024", "failed 1 10 1024", "putback 1 10 1024"];
    assert_eq!(problem(&REPORTING, &[&failed[..], &HANDLED].concat()), None);
    let known = ["known 1 10 1024", "start 0 0 3"];
    assert_eq!(problem(&known, &HANDLED), Some((0, Problem::KnownToHost(whole))));
}

#[test]
fn pages_are_not_freed_twice() {
    let page = |found| Problem::WrongUse { page: Pfn(1024), found };
    let lines = ["free 1 0 1024"];
    assert_eq!(problem(&REPORTING, &lines), Some((0, page(PageUse::Free))));
    let lines = ["remove 1 0 1024", "alloc 1 0 1024", "alloc 1 0 1024"];
    assert_eq!(problem(&REPORTING, &lines), Some((2, page(PageUse::Allocated))));
    let lines = ["remove 1 0 1024", "alloc 1 0 1024", "drain 1 0 1024"];
    assert_eq!(problem(&REPORTING, &lines), Some((2, page(PageUse::Allocated))));
}

/// Pages that are freed directly get to the free lists unseen.
#[test]
fn pages_on_their_way_arrive_when_they_are_needed() {
    let lines = ["remove 1 4 1024", "alloc 1 4 1024", "free 1 4 1024"];
    assert_eq!(problem(&REPORTING, &[&lines[..], &HANDLED].concat()), None);
    let lines = ["take 1 10 1024", "free 1 9 1024", "free 1 9 1536"];
    assert_eq!(problem(&REPORTING, &[&lines[..], &HANDLED].concat()), None);
}

#[test]
fn bitmap_reports_what_is_marked() {
    let handled = [
        "isolate 1 10 1024",
        "clear 1 9 1024",
        "clear 1 9 1536",
        "report 1 10 1024",
        "answer 1 10 1024",
        "putback 1 10 1024",
    ];
    let whole = block(10, 1024);
    assert_eq!(problem(&BITMAP, &handled), None);
    let again = [&handled[..], &handled].concat();
    assert_eq!(problem(&BITMAP, &again), Some((6, Problem::NotMarked(whole))));
    let mut lines = handled.to_vec();
    lines.remove(1);
    assert_eq!(problem(&BITMAP, &lines), Some((2, Problem::NotNamed(whole))));
    let part = ["isolate 1 10 1024", "clear 1 9 1024", "clear 1 9 1536", "report 1 9 1024"];
    assert_eq!(problem(&BITMAP, &part), Some((3, Problem::NotNamed(block(9, 1024)))));
    let cleared = ["clear 1 9 1024", "clear 1 9 1024"];
    assert_eq!(problem(&BITMAP, &cleared), Some((1, Problem::ClearedUnset(block(9, 1024)))));

    // A page comes back and only its half of the block is to be reported.
    let used = ["remove 1 0 1600", "alloc 1 0 1600", "free 1 0 1600", "drain 1 0 1600"];
    let half = [
        "mark 1 9 1536",
        "isolate 1 10 1024",
        "clear 1 9 1536",
        "report 1 9 1536",
        "answer 1 9 1536",
        "putback 1 10 1024",
    ];
    assert_eq!(problem(&BITMAP, &[&handled[..], &used, &half].concat()), None);
    assert_eq!(
        problem(&BITMAP, &[&handled[..], &used, &half[1..]].concat()),
        Some((10, Problem::NotMarked(block(0, 1600)))),
        "the hook has to mark what has been merged"
    );
    assert_eq!(
        problem(&BITMAP, &[&handled[..], &["mark 1 9 1024"]].concat()),
        Some((6, Problem::MarkedUnfounded(block(9, 1024))))
    );
}

#[test]
fn percpu_isolates_what_its_cpu_has_captured() {
    let freed = ["free 1 0 4096", "capture 1 0 4096"];
    let used = ["remove 1 0 1024", "alloc 1 0 1024", "free 1 0 1024", "capture 1 0 1024"];
    let turn = ["drain 1 0 1024", "flush 0 0 2", "turn 0 0 2"];
    let whole = block(10, 1024);
    assert_eq!(problem(&PERCPU, &[&freed[..], &used, &turn, &HANDLED].concat()), None);
    assert_eq!(problem(&PERCPU, &HANDLED), Some((0, Problem::NotCaptured(whole))));
    let other = [&freed[..], &used, &turn, &["isolate 1 10 1024 1"]].concat();
    assert_eq!(problem(&PERCPU, &other), Some((9, Problem::NotCaptured(whole))));

    let missed = [&freed[..1], &used, &["drain 1 0 1024", "flush 0 0 1", "turn 0 0 1"]].concat();
    assert_eq!(problem(&PERCPU, &missed), Some((7, Problem::FreeMissed(block(0, 4096)))));
    let invented = ["capture 1 0 4096"];
    assert_eq!(problem(&PERCPU, &invented), Some((0, Problem::NotFreed(block(0, 4096)))));
    let fewer = [&freed[..], &["flush 0 0 2"]].concat();
    let entries = Problem::Entries { expected: 1, recorded: 2 };
    assert_eq!(problem(&PERCPU, &fewer), Some((2, entries)));
    let lost = ["free 1 0 4096", "lost 1 0 4096"];
    assert_eq!(problem(&PERCPU, &lost), Some((1, Problem::ArrayNotFull)));
    let unscanned = [&freed[..], &["full 0 0 1"]].concat();
    assert_eq!(problem(&PERCPU, &unscanned), Some((2, Problem::ArrayNotFull)));
}

#[test]
fn an_array_of_percpu_has_room_until_a_scan_leaves_it_full() {
    let used: Vec<String> = (4096..4160).map(|page| format!("alloc 1 0 {page}")).collect();
    let freed: Vec<String> = (4096..4160)
        .flat_map(|page| [format!("free 1 0 {page}"), format!("capture 1 0 {page}")])
        .collect();
    let used: Vec<&str> = used.iter().map(String::as_str).collect();
    let freed: Vec<&str> = freed.iter().map(String::as_str).collect();
    let before = [&["block 1 10 1024"], &used[..], &["start 0 0 1", "started 0 0 1"]].concat();
    let problem = |lines: &[&str]| problem(&before, lines);

    let (lost, next) = (["lost 1 0 4160"], ["free 1 0 4160"]);
    let full = [&freed[..], &["scan 0 0 57", "full 0 0 57"]].concat();
    let before_it_was_used = ["alloc 1 0 4160"];
    let full_and_lost = [&before_it_was_used[..], &full, &next, &lost].concat();
    assert_eq!(problem(&full_and_lost), None);
    let written = [&before_it_was_used[..], &full, &next, &["capture 1 0 4160"]].concat();
    assert_eq!(problem(&written), Some((132, Problem::ArrayFull)));
    let room = [&before_it_was_used[..], &freed, &["scan 0 0 56"], &next, &lost].concat();
    assert_eq!(problem(&room), Some((131, Problem::ArrayNotFull)));

    // Handed over, it is written on until its turn; there is one turn for both reasons.
    let flushed = [&freed[..2], &["flush 0 0 1"], &freed[2..]].concat();
    assert_eq!(problem(&[&flushed[..], &["scan 0 0 1", "turn 0 0 1"]].concat()), None);
    let both = [&flushed[..], &["scan 0 0 57", "full 0 0 57", "turn 0 0 57"]].concat();
    assert_eq!(problem(&both), None);
    let again = [&both[..], &["turn 0 0 0"]].concat();
    assert_eq!(problem(&again), Some((132, Problem::ArrayNotDue)));
    let lost = [&flushed[..3], &["free 1 0 4097", "lost 1 0 4097"]].concat();
    assert_eq!(problem(&lost), Some((4, Problem::ArrayNotFull)));
    let twice = [&flushed[..3], &["flush 0 0 1"]].concat();
    assert_eq!(problem(&twice), Some((3, Problem::NothingToFlush)));
    assert_eq!(problem(&["flush 0 0 0"]), Some((0, Problem::NothingToFlush)));
}

#[test]
fn the_last_entry_of_percpu_stands_for_its_block_until_it_may_be_gone() {
    let again = ["free 1 0 4097", "again 1 0 4097"];
    let not_captured = Problem::NotCaptured(block(0, 4097));
    let captured = ["free 1 0 4096", "capture 1 0 4096"];
    assert_eq!(problem(&PERCPU, &[&captured[..], &again].concat()), None);
    assert_eq!(problem(&PERCPU, &again), Some((1, not_captured)));
    let flushed = [&captured[..], &["flush 0 0 1"]].concat();
    assert_eq!(problem(&PERCPU, &[&flushed[..], &again].concat()), None);
    let taken = [&flushed[..], &["turn 0 0 1"], &again].concat();
    assert_eq!(problem(&PERCPU, &taken), Some((5, not_captured)));
    let used = ["remove 1 0 1024", "alloc 1 0 1024", "free 1 0 1024", "again 1 0 1024"];
    let elsewhere = [&captured[..], &used].concat();
    assert_eq!(problem(&PERCPU, &elsewhere), Some((5, Problem::NotCaptured(block(0, 1024)))));
}

#[test]
fn what_is_no_recording_is_refused_with_its_line() {
    let line = |line, problem| Err(ReadError::Line { line, problem });
    let read = |events: usize, lines: &str| Recording::read(&format!("{}{lines}", heading(events)));
    assert_eq!(Recording::read(""), Err(ReadError::Heading));
    assert_eq!(Recording::read("ebb_balloon recording 1 events 0"), Err(ReadError::Heading));
    assert_eq!(Recording::read("ebb_balloon recording 2 anything"), Err(ReadError::Format(2)));
    let lost = "ebb_balloon recording 1 events 0 lost 7 percpu_entries 64";
    assert_eq!(Recording::read(lost), Err(ReadError::Lost(7)));
    assert_eq!(read(2_000_000, ""), Err(ReadError::TooLong(2_000_000)));
    assert_eq!(read(2, "\nfree 1 0 7 0 0"), Err(ReadError::Truncated { said: 2, found: 1 }));
    assert_eq!(read(0, "\nfree 1 0 7 0 0"), Err(ReadError::Truncated { said: 0, found: 1 }));
    assert_eq!(read(1, "\nfree 1 0 7 0"), line(2, LineProblem::Words));
    assert_eq!(read(1, "\nfree 1 0 7 0 0 0"), line(2, LineProblem::Words));
    assert_eq!(read(1, "\nfreed 1 0 7 0 0"), line(2, LineProblem::Name));
    assert_eq!(read(1, "\nfree 1 11 0 0 0"), line(2, LineProblem::Number(3)));
    assert_eq!(read(1, "\nstart 0 0 0 0 0"), line(2, LineProblem::Number(4)));
    let second = "\nfree 1 0 7 0 0\nfree 1 0 7 -1 0";
    assert_eq!(read(2, second), line(3, LineProblem::Number(5)));
    assert_eq!(read(1, "\nfree 1 9 256 0 0"), line(2, LineProblem::Alignment));
}

/// Of a guest of 256 MiB and two CPUs with Linux 6.1 in which a small program ran.
const OF_GUESTS: [(Kind, &str); 2] = [
    (Kind::Bitmap, include_str!("recordings/bitmap.txt")),
    (Kind::Reporting, include_str!("recordings/reporting.txt")),
];

#[test]
fn recordings_of_guests_replay() {
    for (kind, text) in OF_GUESTS {
        let replayed = replay(&Recording::read(text).unwrap()).unwrap();
        assert_eq!(replayed.trackers, [kind]);
        assert_eq!(replayed.events[&PageEvent::Isolate], 41);
        assert_eq!(replayed.events[&PageEvent::Putback], 41);
    }
}

/// Each event of a tracker is missed. Of those of the allocator, only such are whose pages have
/// another event afterwards that contradicts: in short recordings, few of the frees.
#[test]
fn recordings_of_guests_do_not_replay_without_one_event() {
    let handling = [PageEvent::Isolate, PageEvent::Report, PageEvent::Answer, PageEvent::Putback];
    for (kind, text) in OF_GUESTS {
        let recording = Recording::read(text).unwrap();
        let bits = [PageEvent::Mark, PageEvent::Clear];
        let bits = bits.iter().filter(|_| kind == Kind::Bitmap);
        for &event in handling.iter().chain(bits) {
            let removals = replay_without_one(&recording, event, usize::MAX).unwrap();
            assert!(removals.tried >= 41, "{kind:?}: {event:?}: {removals:?}");
            assert_eq!(removals.unnoticed, [0_usize; 0], "{kind:?}: {event:?}");
        }
    }
    let recording = Recording::read(OF_GUESTS[1].1).unwrap();
    let removals = replay_without_one(&recording, PageEvent::Remove, usize::MAX).unwrap();
    assert_eq!((removals.tried, removals.unnoticed.len()), (60, 9));
}

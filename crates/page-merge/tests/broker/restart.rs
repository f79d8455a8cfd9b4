//! Brokers that are killed.

use ebb_page_merge::Nodes;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ebb_page_merge::broker::{BrokerError, BrokerStore, MemberConfig, ask_status};
use ebb_page_merge::{Answer, Node, StableStore, StoreError};

use crate::child::Process;
use crate::support::{LONG, Member, Segments, page, wait_until};

#[test]
fn pages_stay_right_when_the_broker_is_killed_and_the_next_one_starts_empty() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("broker");
    let mut broker = Process::start("broker", &path);
    broker.wait_for("listening");
    let mut a = Member::join(&path, "web", Nodes::Across).unwrap();
    let mut b = Member::join(&path, "web", Nodes::Across).unwrap();
    let pages: Vec<u64> = (0..500).collect();
    let slots = a.make(&pages);
    assert_eq!(b.share(499), slots[499]);
    // One thread reads all the time.
    let reader = std::thread::spawn({
        let (segments, slots) = (a.segments.clone(), slots.clone());
        move || {
            for _ in 0..200 {
                for (number, slot) in (0..).zip(&slots) {
                    let mut content = vec![0; 4096];
                    let slot =
                        ebb_guest_ram::StableSlot { segment: slot.segment, index: slot.index };
                    segments.mapped.read(slot, &mut content).unwrap();
                    assert_eq!(content, page(number));
                }
            }
        }
    });
    broker.kill();
    reader.join().unwrap();
    // Each call reports the loss, and none waits for the broker.
    let mut answers = Vec::new();
    let hash = a.hash(0);
    for _ in 0..3 {
        let gone = a.store.query(Node::ANY, &[hash], &mut answers).unwrap_err();
        assert!(matches!(gone, StoreError::Gone(_)), "{gone}");
    }
    assert!(answers.is_empty());
    let mut no_slots = Vec::new();
    let gone = a.store.publish(Node::ANY, &[hash], &page(0), &mut no_slots).unwrap_err();
    assert!(matches!(gone, StoreError::Gone(_)), "{gone}");
    assert!(a.take_notifications().is_empty());
    assert!(a.store.why_gone().is_some());
    // Segments that it no longer needs are dropped.
    assert_eq!(a.segments.numbers(), [slots[0].segment]);
    for &slot in &slots {
        a.store.release(slot);
    }
    assert!(a.segments.numbers().is_empty());
    assert_eq!(b.read(slots[499]), page(499));

    // The next broker takes over the name.
    let mut next = Process::start("broker", &path);
    next.wait_for("listening");
    let mut c = Member::join(&path, "web", Nodes::Across).unwrap();
    assert_ne!(c.store.secret(), a.store.secret());
    assert_eq!(c.query(0), Answer::Unknown);
    let mine = c.make(&[7]);
    assert_eq!(c.read(mine[0]), page(7));
    assert!(b.query_fails(), "a client does not switch to another broker");
    assert_eq!(b.read(slots[499]), page(499));
}

impl Member {
    fn query_fails(&mut self) -> bool {
        let hash = self.hash(0);
        self.store.query(Node::ANY, &[hash], &mut Vec::new()).is_err()
    }
}

/// A client that does not wait for long.
fn impatient(path: &Path, limit: Duration) -> Member {
    let mut config = MemberConfig::new(path.to_owned(), "web".parse().unwrap(), Nodes::Across);
    config.time_limit = limit;
    Member::with_config(&config).unwrap()
}

#[test]
fn a_late_broker_is_used_again_and_its_late_answers_are_returned() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("broker");
    let mut broker = Process::start("broker", &path);
    broker.wait_for("listening");
    let mut other = Member::join(&path, "web", Nodes::Across).unwrap();
    let seven = other.make(&[7])[0];
    let mut member = impatient(&path, Duration::from_millis(100));
    let (hash, mut answers) = (member.hash(7), Vec::new());

    for late in ["a query", "a publication"] {
        broker.stop();
        let begin = Instant::now();
        let error = if late == "a query" {
            member.store.query(Node::ANY, &[hash], &mut answers).unwrap_err()
        } else {
            let hash = member.hash(9);
            member.store.publish(Node::ANY, &[hash], &page(9), &mut Vec::new()).unwrap_err()
        };
        assert!(matches!(error, StoreError::Late(_)), "{late}: {error}");
        assert!(begin.elapsed() < LONG / 2);
        // Other calls do not wait, and pending updates are kept.
        let error = member.store.query(Node::ANY, &[hash], &mut answers).unwrap_err();
        assert!(matches!(error, StoreError::Late(_)), "{error}");
        assert!(
            answers.is_empty()
                && member.take_notifications().is_empty()
                && member.store.why_gone().is_none()
        );

        broker.resume();
        wait_until("an answer", || member.store.query(Node::ANY, &[hash], &mut answers).is_ok());
        assert_eq!(std::mem::take(&mut answers), [Answer::Stable(seven)], "{late}");
        assert_eq!(member.read(seven), page(7));
        member.store.unused(seven);
        member.store.flush();
        // Neither the late answer's reservation nor the late publication's page is left.
        wait_until("the release of all holds", || {
            let status = ask_status(&path, LONG).unwrap();
            let node = &status.domains[0].nodes[0];
            (node.stable_pages, node.sharers, node.reservations) == (1, 1, 0)
        });
    }
}

/// The thread that merges is to pause, while it waits for a broker.
#[test]
fn a_wait_for_the_broker_is_cut_short() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("broker");
    let mut broker = Process::start("broker", &path);
    broker.wait_for("listening");
    let mut member = impatient(&path, LONG);
    let hurry = Arc::new(AtomicBool::new(false));
    member.store.hurry_while(Arc::clone(&hurry));
    let hash = member.hash(7);
    broker.stop();
    let begin = Instant::now();
    let error = std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(50));
            hurry.store(true, Ordering::Relaxed);
        });
        member.store.query(Node::ANY, &[hash], &mut Vec::new()).unwrap_err()
    });
    assert!(matches!(error, StoreError::Late(_)), "{error}");
    assert!(begin.elapsed() < LONG / 2);
    // The broker is used as before afterwards.
    hurry.store(false, Ordering::Relaxed);
    broker.resume();
    wait_until("an answer", || member.store.query(Node::ANY, &[hash], &mut Vec::new()).is_ok());
}

#[test]
fn a_broker_that_does_not_answer_for_very_long_counts_as_gone() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("broker");
    let mut broker = Process::start("broker", &path);
    broker.wait_for("listening");
    let mut member = impatient(&path, Duration::from_millis(20));
    let hash = member.hash(1);
    broker.stop();
    let mut last = None;
    wait_until("the loss of the broker", || {
        last = member.store.query(Node::ANY, &[hash], &mut Vec::new()).err();
        matches!(last, Some(StoreError::Gone(_)))
    });
    assert!(last.unwrap().to_string().contains("1.2s"));
    // Permanently, even if it comes back.
    broker.resume();
    assert!(ask_status(&path, LONG).is_ok());
    assert!(member.store.query(Node::ANY, &[], &mut Vec::new()).is_ok(), "nothing is asked");
    assert!(member.query_fails());
    assert!(member.store.why_gone().is_some());
}

#[test]
fn without_a_broker_the_error_says_how_to_start_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("nobody");
    let config = MemberConfig::new(path.clone(), "web".parse().unwrap(), Nodes::Across);
    let error = BrokerStore::connect(&config, Segments::new()).unwrap_err();
    assert!(matches!(error, BrokerError::Connect { .. }));
    let text = error.to_string();
    assert!(text.contains(path.to_str().unwrap()) && text.contains("ebb merge-broker"), "{text}");
}

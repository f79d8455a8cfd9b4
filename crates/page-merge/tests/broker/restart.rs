//! Brokers that are killed.

use std::time::Duration;

use ebb_page_merge::broker::{BrokerError, BrokerStore, MemberConfig, Placement, ask_status};
use ebb_page_merge::{Answer, Node, StableStore, StoreError};

use crate::child::Process;
use crate::support::{LONG, Member, Segments, page, wait_until};

#[test]
fn pages_stay_right_when_the_broker_is_killed_and_the_next_one_begins_anew() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("broker");
    let mut broker = Process::start("broker", &path);
    broker.wait_for("listening");
    let mut a = Member::join(&path, "web", Placement::Across).unwrap();
    let mut b = Member::join(&path, "web", Placement::Across).unwrap();
    let pages: Vec<u64> = (0..500).collect();
    let slots = a.make(&pages);
    assert_eq!(b.share(499), slots[499]);
    // One reads all the time.
    let reader = std::thread::spawn({
        let (segments, slots) = (a.segments.clone(), slots.clone());
        move || {
            for _ in 0..200 {
                for (number, slot) in (0..).zip(&slots) {
                    let mut content = vec![0; 4096];
                    let slot = ebb_guest_ram::StableSlot { segment: slot.segment, index: slot.index };
                    segments.mapped.read(slot, &mut content).unwrap();
                    assert_eq!(content, page(number));
                }
            }
        }
    });
    broker.kill();
    reader.join().unwrap();
    // Each call says that it is gone, and none waits for it.
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
    assert!(a.news().is_empty());
    assert!(a.store.why_gone().is_some());
    // What it does not need any more is not kept for it.
    assert_eq!(a.segments.numbers(), [slots[0].segment]);
    for &slot in &slots {
        a.store.release(slot);
    }
    assert!(a.segments.numbers().is_empty());
    assert_eq!(b.read(slots[499]), page(499));

    // The name of the killed one is taken over.
    let mut next = Process::start("broker", &path);
    next.wait_for("listening");
    let mut c = Member::join(&path, "web", Placement::Across).unwrap();
    assert_ne!(c.store.secret(), a.store.secret());
    assert_eq!(c.query(0), Answer::Unknown);
    let mine = c.make(&[7]);
    assert_eq!(c.read(mine[0]), page(7));
    assert!(b.query_fails(), "a client does not go over to another broker");
    assert_eq!(b.read(slots[499]), page(499));
}

impl Member {
    fn query_fails(&mut self) -> bool {
        let hash = self.hash(0);
        self.store.query(Node::ANY, &[hash], &mut Vec::new()).is_err()
    }
}

#[test]
fn a_broker_that_does_not_answer_is_given_up_after_the_time_limit() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("broker");
    let mut broker = Process::start("broker", &path);
    broker.wait_for("listening");
    let mut config = MemberConfig::new(path.clone(), "web".parse().unwrap(), Placement::Across);
    config.time_limit = Duration::from_millis(200);
    let mut store = BrokerStore::connect(&config, Segments::new()).unwrap();
    let pid = rustix::process::Pid::from_raw(broker.id() as i32).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
    wait_until("the standstill", || {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", broker.id())).unwrap();
        stat.contains(") T ")
    });
    let gone = store.query(Node::ANY, &[ebb_page_merge::PageHash::new(1)], &mut Vec::new()).unwrap_err();
    assert!(gone.to_string().contains("200ms"), "{gone}");
    // For good, even if it comes back.
    rustix::process::kill_process(pid, rustix::process::Signal::CONT).unwrap();
    assert!(ask_status(&path, LONG).is_ok());
    assert!(store.query(Node::ANY, &[], &mut Vec::new()).is_ok(), "nothing is asked");
    let gone = store.query(Node::ANY, &[ebb_page_merge::PageHash::new(1)], &mut Vec::new());
    assert!(matches!(gone, Err(StoreError::Gone(_))));
}

#[test]
fn where_nobody_listens_a_client_says_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("nobody");
    let config = MemberConfig::new(path.clone(), "web".parse().unwrap(), Placement::Across);
    let error = BrokerStore::connect(&config, Segments::new()).unwrap_err();
    assert!(matches!(error, BrokerError::Connect { .. }));
    let text = error.to_string();
    assert!(text.contains(path.to_str().unwrap()) && text.contains("ebb merge-broker"), "{text}");
}

//! Clients that break the protocol.

use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::time::Duration;

use ebb_page_merge::broker::{Limits, NodeStatus};
use ebb_page_merge::{Answer, Node, PageHash, StableStore};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use crate::child::Process;
use crate::raw::{self, ANY, PREAMBLE, Raw};
use crate::support::{Member, NOTHING, PAGE, Running, page, wait_until};

/// The broker still serves clients.
fn assert_serves(broker: &Running, domain: &str) {
    let (mut a, mut b) = (broker.member(domain), broker.member(domain));
    let slot = a.make(&[9_999_999])[0];
    assert_eq!(b.share(9_999_999), slot);
    b.store.release(slot);
    b.take_notifications();
    a.store.release(slot);
    a.take_notifications();
}

#[test]
fn an_introduction_is_one_hello_and_decides_the_domain() {
    let broker = Running::new(Limits::default());
    let (begin, web) = (raw::INTRODUCTION.to_vec(), raw::hello("web"));
    for (messages, reason) in [
        (vec![&begin, &raw::query(ANY, &[])], "first message was not hello"),
        (vec![&begin, &web, &begin], "hello twice"),
        (vec![&begin, &web, &PREAMBLE.to_vec(), &raw::hello("mail")], "and wants to join mail"),
        (vec![&begin, &web, &PREAMBLE.to_vec(), &raw::ask_notifications()], "was not hello"),
    ] {
        let mut raw = Raw::connect(&broker.path());
        raw.send(&messages.into_iter().flatten().copied().collect::<Vec<u8>>());
        let refusal = raw.refusal();
        assert!(refusal.contains(reason), "{refusal}");
    }
    let mut raw = Raw::connect(&broker.path());
    raw.send(&[begin, web.clone(), PREAMBLE.to_vec(), web].concat());
    assert_eq!(raw.answer().unwrap().0, raw::WELCOME);
}

#[test]
fn garbage_is_refused_with_a_reason() {
    let broker = Running::new(Limits::default());
    let joined = [PREAMBLE.to_vec(), raw::hello("web")].concat();
    let hash = PageHash::new(1);
    let version_2 = b"EBB-SPM\n\x02\0\x01\0\0\0\0\0".to_vec();
    let cases: Vec<(Vec<u8>, &str)> = vec![
        (b"GET / HTTP/1.1\r\n\r\n".to_vec(), "protocol"),
        (b"EBB-MIG\n\x01\0\x01\0".to_vec(), "protocol"),
        (version_2, "version 2"),
        ([PREAMBLE.to_vec(), raw::query(ANY, &[hash])].concat(), "hello"),
        ([PREAMBLE.to_vec(), raw::hello("a/b")].concat(), "Hello"),
        ([PREAMBLE.to_vec(), raw::hello(&"x".repeat(65))].concat(), "Hello"),
        ([PREAMBLE.to_vec(), raw::frame(1, b"{")].concat(), "Hello"),
        ([joined.clone(), raw::hello("web")].concat(), "twice"),
        ([joined.clone(), raw::hello("other")].concat(), "twice"),
        ([joined.clone(), raw::frame(0, b"")].concat(), "kind 0"),
        ([joined.clone(), raw::frame(65, b"{}")].concat(), "other side"),
        ([joined.clone(), vec![0xff, 0xff, 0xff, 0xff, 3]].concat(), "at most"),
        ([joined.clone(), vec![0xff, 0xff, 0xff, 0xff, 4]].concat(), "at most"),
        ([joined.clone(), raw::query(ANY, &[hash; 1025])].concat(), "at most"),
        ([joined.clone(), raw::publish(ANY, &vec![1; 65 * PAGE])].concat(), "at most"),
        ([joined.clone(), raw::frame(3, &[0; 4 + PAGE - 1])].concat(), "part of a page"),
        ([joined.clone(), raw::frame(2, &[0xff; 12])].concat(), "48 bits"),
        ([joined.clone(), raw::query(7, &[hash])].concat(), "node 7"),
        ([joined.clone(), raw::publish(999, &page(1))].concat(), "node 999"),
    ];
    let count = cases.len() as u64;
    for (bytes, reason) in cases {
        let mut raw = Raw::connect(&broker.path());
        // The broker may have ended the connection before it has received everything.
        let _ = raw.0.write_all(&bytes);
        let joins = bytes.starts_with(&joined);
        if joins {
            assert_eq!(raw.answer().unwrap().0, raw::WELCOME, "{reason}");
        }
        let refusal = raw.refusal();
        assert!(refusal.contains(reason), "{refusal} instead of {reason}");
    }
    assert_eq!(broker.status().refused, count);
    assert_serves(&broker, "web");
}

#[test]
fn clients_cannot_release_holds_of_others() {
    let broker = Running::new(Limits::default());
    let mut owner = broker.member("web");
    let slots = owner.make(&[1, 2]);
    for change in 1..=4 {
        let mut hostile = Raw::join(&broker.path(), "web");
        hostile.send(&raw::change(change, slots[0]));
        let reason = hostile.refusal();
        assert!(reason.contains("does not hold"), "{reason}");
    }
    // Nor more than one's own holds: one reservation, returned twice.
    let mut hostile = Raw::join(&broker.path(), "web");
    hostile.send(&raw::query(ANY, &[owner.hash(1)]));
    assert_eq!(hostile.answer().unwrap().0, raw::ANSWERS);
    hostile.send(&[raw::change(3, slots[0]), raw::change(3, slots[0])].concat());
    hostile.refusal();
    // In another domain the slot's number has no meaning.
    let mut stranger = Raw::join(&broker.path(), "other");
    stranger.send(&raw::change(2, slots[0]));
    stranger.refusal();
    assert_eq!(broker.pages_of("web"), NodeStatus { stable_pages: 2, sharers: 2, ..NOTHING });
    assert_eq!(owner.read(slots[0]), page(1));
}

#[test]
fn a_false_hash_affects_no_other_client() {
    let broker = Running::new(Limits::default());
    let mut honest = broker.member("web");
    assert_eq!(honest.query(1), Answer::Unknown);
    let mut liar = Raw::join(&broker.path(), "web");
    liar.send(&raw::query(ANY, &[honest.hash(1)]));
    assert_eq!(liar.answer().unwrap().0, raw::ANSWERS);
    // The client claims the hash of page 1 and publishes page 2.
    liar.send(&raw::publish(ANY, &page(2)));
    assert_eq!(liar.slots().len(), 1);
    assert!(honest.take_notifications().is_empty());
    assert_ne!(honest.query(1), Answer::Stable(ebb_guest_ram::StableSlot { segment: 0, index: 0 }));
    honest.share(2);
}

#[test]
fn a_client_that_does_not_read_is_dropped_and_delays_no_other() {
    let limits = Limits { patience: Duration::from_millis(300), ..Limits::default() };
    let broker = Running::new(limits);
    let mut member = broker.member("web");
    let slots = member.make(&[1]);
    let mut deaf = Raw::join(&broker.path(), "web");
    let flood = raw::query(ANY, &[member.hash(2); 1000]);
    // Until the broker has ended the connection.
    let mut sent = 0_u64;
    while deaf.0.write_all(&flood).is_ok() {
        sent += flood.len() as u64;
        assert!(sent < 1 << 30, "the broker accepts everything");
        assert_eq!(member.share(1), slots[0]);
        member.store.release(slots[0]);
    }
    wait_until("the end of the client", || broker.status().clients == 1);
    assert!(broker.status().refused > 0);
    assert_serves(&broker, "web");
}

#[test]
fn an_incomplete_message_times_out() {
    let limits = Limits { patience: Duration::from_millis(200), ..Limits::default() };
    let broker = Running::new(limits);
    let mut connections = Vec::new();
    for bytes in [
        vec![],
        PREAMBLE[..5].to_vec(),
        PREAMBLE.to_vec(),
        [PREAMBLE.to_vec(), raw::hello("web")[..9].to_vec()].concat(),
    ] {
        let mut raw = Raw::connect(&broker.path());
        raw.send(&bytes);
        connections.push(raw);
    }
    let mut half = Raw::join(&broker.path(), "web");
    half.send(&raw::publish(ANY, &page(1))[..2000]);
    connections.push(half);
    // A client without requests may be silent indefinitely.
    let mut silent = broker.member("web");
    for mut raw in connections {
        assert_eq!(raw.0.read(&mut [0; 100]).unwrap_or(0), 0, "the connection continues");
    }
    assert_eq!(broker.status().clients, 1);
    assert_eq!(silent.query(5), Answer::Unknown);
}

#[test]
fn many_unidentified_connections_keep_no_client_out() {
    let broker = Running::new(Limits::default());
    let crowd: Vec<Raw> = (0..200).map(|_| Raw::connect(&broker.path())).collect();
    assert_serves(&broker, "web");
    drop(crowd);
}

#[test]
fn the_number_of_clients_is_limited() {
    let broker = Running::new(Limits { clients: 5, clients_of_process: 3, ..Limits::default() });
    let members: Vec<Member> = (0..3).map(|_| broker.member("web")).collect();
    let mut more = Raw::connect(&broker.path());
    more.send(&[PREAMBLE.to_vec(), raw::hello("web")].concat());
    let reason = more.refusal();
    assert!(reason.contains("its process has 3"), "{reason}");
    let mut others: Vec<Process> =
        (0..2).map(|_| Process::start("sharer", &broker.path())).collect();
    for other in &mut others {
        other.wait_for("sharing");
    }
    drop(members);
    wait_until("the end of clients", || broker.status().clients == 2);
    let _members: Vec<Member> = (0..3).map(|_| broker.member("web")).collect();
    let mut more = Raw::connect(&broker.path());
    more.send(&[PREAMBLE.to_vec(), raw::hello("web")].concat());
    let reason = more.refusal();
    assert!(reason.contains("5 clients"), "{reason}");
}

#[test]
fn the_clients_of_one_domain_keep_no_other_domain_out() {
    let rules = ["web", "db"].map(|name| name.parse().unwrap()).to_vec();
    let limits = Limits { clients: 5, ..Limits::default() };
    let broker = Running::with_rules(limits, rules);
    let _web: Vec<Member> = (0..2).map(|_| broker.member("web")).collect();
    let mut more = Raw::connect(&broker.path());
    more.send(&[PREAMBLE.to_vec(), raw::hello("web")].concat());
    let reason = more.refusal();
    assert!(reason.contains("2 clients of domain web"), "{reason}");
    let _db: Vec<Member> = (0..2).map(|_| broker.member("db")).collect();
}

/// Pages that are kept because their neighbours are shared count against the quota: it bounds the
/// memory, and is of use to the domain all the same.
#[test]
fn memory_that_is_kept_is_within_the_quota() {
    const SEGMENT: u64 = 1 << 13;
    let broker = Running::new(Limits {
        domain_pages: 2 * SEGMENT,
        published_pages: 2 * SEGMENT,
        ..Limits::default()
    });
    let mut member = broker.member("web");
    for round in 0..6 {
        // All pages but every tenth are released again.
        let numbers: Vec<u64> = (0..SEGMENT).map(|number| round * SEGMENT + number).collect();
        let slots: Vec<_> = numbers.chunks(64).flat_map(|part| member.make(part)).collect();
        for (place, slot) in slots.into_iter().enumerate() {
            if place % 10 != 0 {
                member.store.release(slot);
            }
        }
        member.take_notifications();
        let domain = broker.domain("web").unwrap();
        assert!(domain.segment_pages <= 2 * SEGMENT, "{domain:?}");
    }
    // What is kept was reused: two files would be full after two rounds.
    assert_eq!(broker.pages_of("web").stable_pages, 6 * SEGMENT.div_ceil(10));
}

/// One file for all domains.
#[test]
fn all_domains_have_one_bound() {
    let broker = Running::new(Limits { all_pages: 1, ..Limits::default() });
    let (mut web, mut db) = (broker.member("web"), broker.member("db"));
    let slots = web.make(&[1]);
    let (hash, mut made) = (db.hash(2), Vec::new());
    let error = db.store.publish(Node::ANY, &[hash], &page(2), &mut made).unwrap_err();
    assert!(error.to_string().contains("in use") && made.is_empty(), "{error}");
    // What the one gives back is the other's.
    web.store.release(slots[0]);
    web.take_notifications();
    db.make(&[2]);
}

#[test]
fn one_client_cannot_exhaust_the_quota() {
    let broker =
        Running::new(Limits { domain_pages: 1000, published_pages: 500, ..Limits::default() });
    let mut honest = broker.member("web");
    let mut greedy = Raw::join(&broker.path(), "web");
    let mut published = 0;
    for number in 0_u64.. {
        let pages: Vec<u8> =
            (0..64).flat_map(|index| page((1 << 32) | (number * 64 + index))).collect();
        greedy.send(&raw::publish(ANY, &pages));
        let (kind, _) = greedy.answer().unwrap();
        if kind != raw::SLOTS {
            break;
        }
        published += 64;
    }
    assert!(published <= 500, "{published}");
    honest.make(&(0..400).collect::<Vec<u64>>());
    // Hashes without pages.
    let before = broker.pages_of("web");
    assert_eq!((before.stable_pages, before.sharers), (published + 400, 400));
}

#[test]
fn the_number_of_remembered_hashes_is_limited() {
    let broker =
        Running::new(Limits { remembered_hashes: 10_000, notifications: 10, ..Limits::default() });
    let mut honest = broker.member("web");
    assert_eq!(honest.query(1), Answer::Unknown);
    let mut flooding = Raw::join(&broker.path(), "web");
    for batch in 0..100 {
        let hashes: Vec<PageHash> =
            (0..1000).map(|hash| PageHash::new(batch * 1000 + hash)).collect();
        flooding.send(&raw::query(ANY, &hashes));
        assert_eq!(flooding.answer().unwrap().0, raw::ANSWERS);
        assert!(broker.pages_of("web").remembered_hashes <= 10_001);
    }
    // The other client's hashes are remembered.
    let mut partner = broker.member("web");
    assert_eq!(partner.query(1), Answer::Wanted);
}

#[test]
fn descriptors_sent_to_the_broker_are_closed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("broker");
    let mut broker = Process::start("broker", &path);
    broker.wait_for("listening");
    let open = || std::fs::read_dir(format!("/proc/{}/fd", broker.id())).unwrap().count();
    let mut hostile = Raw::join(&path, "web");
    let before = open();
    let file = std::fs::File::open("/dev/null").unwrap();
    for _ in 0..100 {
        let descriptors = [file.as_fd(); 20];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(20))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)));
        let bytes = raw::ask_notifications();
        let slices = [IoSlice::new(&bytes)];
        rustix::net::sendmsg(&hostile.0, &slices, &mut ancillary, SendFlags::NOSIGNAL).unwrap();
        assert_eq!(hostile.answer().unwrap().0, raw::NOTIFICATIONS);
    }
    assert_eq!(open(), before);
}

#[test]
fn the_state_is_reported_to_the_brokers_user() {
    let broker = Running::new(Limits::default());
    let mut member = broker.member("web");
    member.make(&[1]);
    let mut raw = Raw::connect(&broker.path());
    raw.send(b"EBB-SPM\n\x01\0\x02\0\0\0\0\0");
    let (_, document) = raw.reply().unwrap();
    let text = String::from_utf8(document).unwrap();
    assert!(text.contains("\"web\""), "{text}");
    // No secrets, no hashes.
    let hash = member.hash(1).get().to_string();
    assert!(!text.contains(&hash) && !text.contains("secret"), "{text}");
    assert!(raw.reply().is_none());
}

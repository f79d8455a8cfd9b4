//! Clients that are killed.

use std::process::Stdio;

use ebb_page_merge::broker::{Limits, NodeStatus, connect};
use ebb_page_merge::{Answer, StableStore};

use crate::child::Process;
use crate::raw::Raw;
use crate::support::{LONG, NOTHING, Running, page, wait_until};

#[test]
fn a_killed_client_releases_its_own_holds_only() {
    let broker = Running::new(Limits::default());
    let mut killed = Process::start("sharer", &broker.path());
    killed.wait_for("sharing");
    let mut member = broker.member("web");
    let slot = member.share(3);
    let shared = NodeStatus { stable_pages: 10, sharers: 11, ..NOTHING };
    assert_eq!(broker.pages_of("web"), shared);
    killed.kill();
    let left = NodeStatus { stable_pages: 1, sharers: 1, ..NOTHING };
    wait_until("the end of the client", || broker.pages_of("web") == left);
    assert_eq!(member.read(slot), page(3));
    // Its slots are reused, and those in use are not.
    let fresh: Vec<u64> = (100..109).collect();
    for made in member.make(&fresh) {
        assert_ne!(made, slot);
    }
    assert_eq!(member.read(slot), page(3));
    assert_eq!(broker.status().lost_clients, 0);
}

#[test]
fn a_client_that_lost_its_connection_keeps_its_pages_until_its_process_ends() {
    let broker = Running::new(Limits::default());
    let mut process = Process::start("sharer", &broker.path());
    process.wait_for("sharing");
    process.send_line("drop");
    process.wait_for("dropped");
    wait_until("the end of the connection", || broker.status().lost_clients == 1);
    let kept = NodeStatus { stable_pages: 10, sharers: 10, ..NOTHING };
    assert_eq!(broker.pages_of("web"), kept);
    // Others find them, and they are not overwritten.
    let mut member = broker.member("web");
    let slot = member.share(9);
    member.make(&(200..264).collect::<Vec<u64>>());
    member.store.release(slot);
    member.take_notifications();
    assert_eq!(member.share(9), slot);
    process.kill();
    wait_until("the end of the process", || broker.pages_of("web").stable_pages == 65);
    assert_eq!(member.read(slot), page(9));
}

/// A monitor that cannot connect gets a connection from another process.
#[test]
fn a_client_is_the_process_that_sent_hello() {
    let broker = Running::new(Limits::default());
    let connection = connect(&broker.path(), "web".parse().unwrap(), LONG).unwrap();
    let input = Stdio::from(connection.try_clone().unwrap());
    let mut heir = Process::start_with("heir", &broker.path(), input);
    heir.wait_for("sharing");
    let shared = NodeStatus { stable_pages: 10, sharers: 10, ..NOTHING };
    assert_eq!(broker.pages_of("web"), shared);
    heir.kill();
    // The connection lasts.
    wait_until("the end of the process", || broker.pages_of("web") == NOTHING);
    drop(connection);
}

/// It would have the rights of the process that made the connection.
#[test]
fn a_client_joins_only_the_domain_that_it_was_introduced_to() {
    let broker = Running::new(Limits::default());
    let other = connect(&broker.path(), "mail".parse().unwrap(), LONG).unwrap();
    let unknown = Raw::connect(&broker.path()).0.into();
    for (connection, reason) in [
        (other, "introduced as a client of domain mail, and wants to join web"),
        (unknown, "did not introduce this one"),
    ] {
        let mut heir = Process::start_with("heir", &broker.path(), Stdio::from(connection));
        let said = heir.wait_for("refused");
        assert!(said.contains(reason), "{said}");
    }
    assert_eq!(broker.status().clients, 0);
}

#[test]
fn clients_killed_at_any_time_leave_nothing_and_disturb_no_other() {
    let broker = Running::new(Limits { max_page_sharing: 3, ..Limits::default() });
    let mut member = broker.member("web");
    let pages: Vec<u64> = (0..120).collect();
    let slots = member.make(&pages);
    for round in 0..12 {
        let mut churner = Process::start("churner", &broker.path());
        churner.wait_for("churning");
        // Different amounts of its work.
        for step in 0..round * 3 {
            assert_ne!(member.query(10_000 + step), Answer::Wanted);
        }
        churner.kill();
        let alone =
            |status: &NodeStatus| (status.stable_pages, status.sharers, status.reservations);
        wait_until("the end of the client", || alone(&broker.pages_of("web")) == (120, 120, 0));
        for (&slot, &number) in slots.iter().zip(&pages) {
            assert_eq!(member.read(slot), page(number), "after round {round}");
        }
    }
    for slot in slots {
        member.store.release(slot);
    }
    member.take_notifications();
    assert_eq!(broker.pages_of("web").stable_pages, 0);
    assert_eq!(broker.domain("web").unwrap().segments, 0);
}

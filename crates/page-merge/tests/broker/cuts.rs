//! Connections that end anywhere.

use std::net::Shutdown;

use ebb_guest_ram::StableSlot;
use ebb_page_merge::broker::Limits;

use crate::child::Process;
use crate::raw::{self, ANY, PREAMBLE, Raw};
use crate::support::{NOTHING, Running, page, wait_until};

/// All messages of a client, without waiting for answers, and the positions of their ends. It
/// publishes two pages into an empty domain, so that their slots are known.
pub fn script(domain: &str) -> (Vec<u8>, Vec<usize>) {
    let slot = |index| StableSlot { segment: 0, index };
    let hash = ebb_page_merge::PageHash::new(77);
    let messages = [
        PREAMBLE.to_vec(),
        raw::hello(domain),
        raw::query(ANY, &[hash]),
        raw::publish(ANY, &[page(1), page(2)].concat()),
        raw::change(1, slot(0)),
        raw::ask_notifications(),
        raw::change(3, slot(1)),
        raw::change(2, slot(0)),
    ];
    let mut bytes = Vec::new();
    let ends = messages.iter().map(|message| {
        bytes.extend(message);
        bytes.len()
    });
    let ends = ends.collect();
    (bytes, ends)
}

#[test]
fn a_connection_that_ends_anywhere_has_executed_its_complete_messages() {
    let limits = Limits { clients: 100_000, clients_of_process: 100_000, ..Limits::default() };
    let broker = Running::new(limits);
    let (bytes, ends) = script("cut0");
    let places = (0..=bytes.len())
        .filter(|&cut| ends.iter().any(|end| cut.abs_diff(*end) <= 24) || cut % 511 == 0);
    for (number, cut) in places.enumerate() {
        // A separate domain, since this process continues and keeps its holds.
        let domain = format!("cut{number}");
        let (bytes, ends) = script(&domain);
        let cut = (cut + domain.len() - 4).min(bytes.len());
        let mut raw = Raw::connect(&broker.path());
        raw.send(&bytes[..cut]);
        raw.0.shutdown(Shutdown::Write).unwrap();
        while raw.reply().is_some() {}
        let whole = ends.iter().filter(|&&end| end <= cut).count();
        let expected = match whole {
            // No holds, so nothing is kept.
            0..=3 | 8 => NOTHING,
            4 => ebb_page_merge::broker::NodeStatus { stable_pages: 2, reservations: 2, ..NOTHING },
            5 | 6 => ebb_page_merge::broker::NodeStatus {
                stable_pages: 2,
                sharers: 1,
                reservations: 1,
                ..NOTHING
            },
            _ => ebb_page_merge::broker::NodeStatus { stable_pages: 1, sharers: 1, ..NOTHING },
        };
        wait_until("the end of the connection", || {
            broker.domain(&domain).is_none_or(|domain| domain.clients == 0)
        });
        assert_eq!(broker.pages_of(&domain), expected, "cut at {cut}, {whole} whole messages");
    }
}

#[test]
fn nothing_is_left_of_interrupted_connections_once_their_process_has_ended() {
    let limits = Limits { clients: 100_000, clients_of_process: 100_000, ..Limits::default() };
    let broker = Running::new(limits);
    let mut other = broker.member("web");
    let slot = other.make(&[500])[0];
    let mut cutter = Process::start("cutter", &broker.path());
    cutter.wait_for("cut");
    wait_until("the end of all connections", || broker.status().clients == 1);
    assert!(broker.status().lost_clients > 0, "{:?}", broker.status());
    assert_eq!(other.read(slot), page(500));
    cutter.kill();
    wait_until("the end of the process", || broker.status().lost_clients == 0);
    let left = broker.pages_of("web");
    assert_eq!((left.stable_pages, left.sharers, left.reservations), (1, 1, 0));
    assert_eq!(other.read(slot), page(500));
}

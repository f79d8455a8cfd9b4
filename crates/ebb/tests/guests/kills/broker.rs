//! Kills of a broker of shared pages, and of its clients.

use std::time::Duration;

use ebb_agent::protocol::Command;
use ebb_agent::random::Random;
use ebb_vmm::api::MergeState;
use rustix::process::Signal;

use super::{BROKER, a_part_of, check_nothing_left, kills, moments};
use crate::guest::{Guest, MIB};
use crate::harness::{Scene, eventually, when};
use crate::merge_support::{Broker, merged};

/// Longest time of merging before a kill.
const MERGING: Duration = Duration::from_millis(2500);
/// Memory that each machine writes, in bytes; no page of it occurs twice in one machine.
const WRITTEN: u64 = 16 * MIB;

/// Waits until the broker counts `clients`, and neither lost ones nor shares in preparation; with
/// no clients, no shared pages either.
#[track_caller]
fn wait_clients(scene: &Scene, broker: &Broker, clients: usize) {
    eventually("the broker's accounts are in order", 30, || {
        let status = broker.status(scene);
        let nodes = || status.domains.iter().flat_map(|domain| &domain.nodes);
        let reserved: u64 = nodes().map(|node| node.reservations).sum();
        let shared: u64 = nodes().map(|node| node.sharers + node.stable_pages).sum();
        let as_before = (status.clients, status.lost_clients) == (clients, 0)
            && (clients > 0 || (reserved, shared) == (0, 0));
        when(as_before, || format!("{status:?}"))
    });
}

/// Starts a machine of the domain beside others.
fn member(scene: &Scene, broker: &Broker, name: &str, others: &[&Guest]) -> Guest {
    let setup = merged(scene, "160M", &broker.member("red")).socket(name);
    let guest = setup.start_and_merge_beside(others);
    guest.run(Command::Hold { bytes: WRITTEN, pattern: 92 });
    guest
}

/// Lets the machines merge for a random time, in half of the rounds from when they share pages;
/// true if the first one shares a part of its memory.
fn merge_for_a_while(random: &mut Random, guest: &Guest) -> bool {
    if random.chance(1, 2) {
        guest.wait_merged(WRITTEN / 4);
    }
    a_part_of(random, MERGING);
    guest.merge_statistics().merged_bytes >= Some(WRITTEN / 4)
}

pub(super) fn of_broker_and_clients(scene: &Scene) {
    let mut random = moments(scene);
    let mut broker = Broker::start(scene, BROKER);
    let survivor = member(scene, &broker, "survivor", &[]);
    let (mut while_merged, all) = (0, kills(2));
    for round in 0..all {
        let mut other = member(scene, &broker, &format!("other{round}"), &[&survivor]);
        while_merged += u32::from(merge_for_a_while(&mut random, &survivor));
        if round % 2 == 0 {
            other.signal(Signal::KILL);
            other.wait_end();
            survivor.check_held();
            wait_clients(scene, &broker, 1);
            check_nothing_left(scene, &[&survivor]);
            assert_eq!(survivor.merge().state, MergeState::Merging);
            continue;
        }
        broker.kill();
        for guest in [&survivor, &other] {
            guest.check_held();
            eventually("the monitor reports the loss of its broker", 30, || {
                let info = guest.merge();
                when(info.state == MergeState::Degraded, || format!("{info:?}"))
            });
            guest.check_held();
        }
        // In place of the socket that the killed one has left.
        broker = Broker::start(scene, BROKER);
        // They find it, and share through it what they shared through the killed one.
        wait_clients(scene, &broker, 2);
        merge_for_a_while(&mut random, &survivor);
        for guest in [&survivor, &other] {
            guest.check_held();
        }
        other.end();
        wait_clients(scene, &broker, 1);
        assert_eq!(survivor.merge().state, MergeState::Merging);
    }
    println!("    broker: {all} kills, {while_merged} with merged pages");
    survivor.end();
    wait_clients(scene, &broker, 0);
    check_nothing_left(scene, &[]);
}

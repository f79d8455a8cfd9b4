//! Machines that share pages through a broker: only within a trust domain, and also when a machine
//! or the broker is killed.

use std::thread::sleep;
use std::time::Duration;

use ebb_agent::count::CountReport;
use ebb_agent::protocol::Command;
use ebb_agent::random::Random;
use ebb_vmm::api::MergeState;
use rustix::process::Signal;

use crate::guest::{Guest, MIB};
use crate::harness::{Scene, Test, WRONG_CONTENT, eventually, when};
use crate::merge_support::{Broker, PAGE_BYTES, merged};

/// The tests.
pub const TESTS: &[Test] = &[
    Test::new("merge_domains::within_and_never_beyond", 240, within_and_never_beyond).merging(),
    Test::new("merge_domains::whatever_is_killed", 240, whatever_is_killed).merging(),
];

/// Memory held by each guest, in bytes; no page occurs twice in one guest.
const HELD: u64 = 8 * MIB;

fn start(scene: &Scene, name: &str, broker: &Broker, domain: &str, others: &[&Guest]) -> Guest {
    let setup = merged(scene, "160M", &broker.member(domain)).socket(name);
    let guest = setup.start_and_merge_beside(others);
    guest.run(Command::Hold { bytes: HELD, pattern: 61 });
    guest
}

fn within_and_never_beyond(scene: &Scene) {
    let broker = Broker::start(scene, "broker");
    let first = start(scene, "first", &broker, "red", &[]);
    let second = start(scene, "second", &broker, "red", &[&first]);
    let stranger = start(scene, "stranger", &broker, "blue", &[&first, &second]);
    // The stranger shares the same content with itself.
    stranger.run(Command::Hold { bytes: HELD, pattern: 61 });
    eventually("each domain has shared pages", 90, || {
        // Reading maps them.
        for guest in [&first, &second, &stranger] {
            guest.check_held();
        }
        let common = first.stable_frames().intersection(&second.stable_frames()).count() as u64;
        let own = stranger.stable_frames().len() as u64;
        when(common.min(own) >= HELD / 2 / PAGE_BYTES, || format!("{common} and {own} pages"))
    });
    let frames = [&first, &second, &stranger].map(Guest::stable_frames);
    for (name, other) in [("first", &frames[0]), ("second", &frames[1])] {
        let common = frames[2].intersection(other).count();
        assert_eq!(common, 0, "pages of the stranger and of the {name}");
    }
    // One guest's writes are not seen by the other.
    first.run(Command::Release);
    first.run(Command::Hold { bytes: HELD, pattern: 62 });
    for guest in [&first, &second, &stranger] {
        guest.check_held();
    }
}

/// Sleeps for a random time of up to `limit_ms`.
fn a_moment(random: &mut Random, limit_ms: usize) {
    sleep(Duration::from_millis(random.below(limit_ms) as u64));
}

fn whatever_is_killed(scene: &Scene) {
    let seed = u64::from(std::process::id()) ^ 0x6d65_7267;
    scene.guests().report(&format!("\nseed of the moments: {seed}"));
    let mut random = Random::new(seed);
    let mut broker = Broker::start(scene, "broker");
    let survivor = start(scene, "survivor", &broker, "red", &[]);
    let count = |seconds| Command::Count {
        bytes: 16 * MIB,
        tasks: 1,
        kinds: 64,
        burst_pages: 128,
        pause_us: 10_000,
        seconds,
    };
    let work = survivor.send(count(10));
    // A machine that shares with the survivor ends at a random moment of merging.
    for round in 0..2 {
        let mut victim = start(scene, &format!("victim{round}"), &broker, "red", &[&survivor]);
        if round == 0 {
            victim.wait_merged(HELD / 4);
            survivor.wait_merged(HELD / 4);
        }
        a_moment(&mut random, 1500);
        victim.signal(Signal::KILL);
        victim.wait_end();
        survivor.check_held();
    }
    assert!(broker.is_running());
    // The broker is killed last.
    a_moment(&mut random, 1500);
    broker.kill();
    survivor.check_held();
    let report: CountReport = serde_json::from_value(survivor.outcome(work).unwrap()).unwrap();
    assert_eq!(report.wrong_pages, 0, "{WRONG_CONTENT}: {report:?}");
    eventually("the monitor reports the loss of its broker", 30, || {
        let info = survivor.merge();
        when(info.state == MergeState::Degraded && info.reason.is_some(), || format!("{info:?}"))
    });
    // It shares what it has merged through the next one.
    let broker = Broker::start(scene, "broker");
    eventually("the next broker has its shares", 60, || {
        let status = broker.status(scene);
        let nodes = status.domains.iter().flat_map(|domain| &domain.nodes);
        let shares: u64 = nodes.map(|node| node.sharers).sum();
        when(shares * PAGE_BYTES >= HELD / 4, || {
            format!("{status:?}; the machine: {:?}", survivor.merge())
        })
    });
    survivor.check_held();
    assert_eq!(survivor.merge().state, MergeState::Merging);
    // All shared memory can still be written, discarded and read.
    survivor.run(Command::Release);
    survivor.run(Command::Hold { bytes: HELD, pattern: 63 });
    survivor.run(count(1));
    survivor.check_held();
}

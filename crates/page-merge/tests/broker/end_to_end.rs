//! Machines in processes of their own that share memory through a broker.

use std::path::Path;

use ebb_page_merge::broker::{Limits, NodeStatus, ask_status};

use crate::child::Process;
use crate::machine::{COMMON, OWN};
use crate::support::{LONG, NOTHING, Running, wait_until};

impl Process {
    fn machine(path: &Path) -> Self {
        let mut machine = Self::start("machine", path);
        machine.wait_for("ready");
        machine
    }

    /// Runs passes over all memory; returns the number of merged pages.
    fn scan(&mut self, passes: u32) -> u64 {
        let (merged, errors) = self.rescan(passes);
        assert_eq!(errors, 0, "errors of the store");
        merged
    }

    /// Runs passes over all memory; returns the number of merged pages, and of errors of stores
    /// so far.
    fn rescan(&mut self, passes: u32) -> (u64, u64) {
        self.send_line(&format!("scan {passes}"));
        let said = self.wait_for("scanned");
        let (merged, errors) = said.split_once(' ').unwrap();
        (merged.parse().unwrap(), errors.parse().unwrap())
    }

    fn write(&mut self, from: u64, to: u64, content: u64) {
        self.send_line(&format!("write {from} {to} {content}"));
        self.wait_for("written");
    }

    fn assert_right(&mut self, when: &str) {
        self.send_line("check");
        assert_eq!(self.wait_for("checked"), "true", "{when}");
    }

    /// Private memory, as the kernel counts it.
    fn anonymous_pages(&self) -> u64 {
        self.kibibytes("smaps_rollup", "Anonymous:") / 4
    }

    /// Stable pages mapped, each divided by the number of processes that have it mapped.
    fn stable_share_pages(&self) -> u64 {
        // No other memory files exist here.
        self.kibibytes("smaps_rollup", "Pss_Shmem:") / 4
    }

    fn kibibytes(&self, file: &str, field: &str) -> u64 {
        let text = std::fs::read_to_string(format!("/proc/{}/{file}", self.id())).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix(field)).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }
}

/// Scans with both until all common pages are shared, or no further progress is made.
fn share_all(broker: &Running, machines: &mut [Process]) -> NodeStatus {
    let wanted = COMMON * machines.len() as u64;
    for _ in 0..20 {
        let merged: u64 = machines.iter_mut().map(|machine| machine.scan(1)).sum();
        if merged == wanted {
            break;
        }
    }
    let status = broker.pages_of("web");
    NodeStatus { remembered_hashes: 0, ..status }
}

#[test]
fn two_machines_share_their_common_pages_and_both_keep_writing() {
    let broker = Running::new(Limits::default());
    let mut machines = [Process::machine(&broker.path()), Process::machine(&broker.path())];
    let before: Vec<u64> = machines.iter().map(Process::anonymous_pages).collect();
    let shared = share_all(&broker, &mut machines);
    let expected = NodeStatus { stable_pages: COMMON, sharers: 2 * COMMON, ..NOTHING };
    assert_eq!(shared, expected);
    assert_eq!(shared.saved_pages(), COMMON);
    // As counted by the kernel: the private pages are gone from both, and their replacements count
    // half for each.
    for (machine, before) in machines.iter().zip(before) {
        let after = machine.anonymous_pages();
        // The merger's tables and buffers are private memory, too.
        assert!(after + COMMON <= before + COMMON / 4, "{before} private pages became {after}");
        let share = machine.stable_share_pages();
        assert!(share <= COMMON / 2 + COMMON / 8, "{share} pages of {COMMON} are its own share");
    }
    for machine in &mut machines {
        machine.assert_right("merged");
    }

    // Each writes to shared pages, the other does not see it, and the stable page lives as long as
    // one of them needs it.
    let [a, b] = &mut machines;
    a.write(0, 500, 1 << 50);
    b.write(300, 700, 1 << 51);
    for machine in [&mut *a, &mut *b] {
        machine.assert_right("written");
        machine.scan(2);
        machine.assert_right("scanned again");
    }
    let left = broker.pages_of("web");
    // Pages 300 to 500 were written by both: they are no longer shared.
    assert_eq!((left.stable_pages, left.sharers), (COMMON - 200, 2 * COMMON - 900));

    // One is killed.
    a.kill();
    wait_until("the end of the machine", || broker.pages_of("web").sharers == COMMON - 400);
    assert_eq!(broker.pages_of("web").stable_pages, COMMON - 400);
    b.assert_right("alone");
    b.send_line("unmerge");
    b.wait_for("unmerged");
    b.assert_right("unmerged");
    wait_until("the release of everything", || broker.pages_of("web").stable_pages == 0);
    assert_eq!(broker.domain("web").unwrap().segments, 0);
}

/// Two machines that share their common pages, and whose broker is gone.
fn machines_of_a_killed_broker(path: &Path) -> [Process; 2] {
    let mut broker = Process::start("broker", path);
    broker.wait_for("listening");
    let mut machines = [Process::machine(path), Process::machine(path)];
    for _ in 0..4 {
        for machine in &mut machines {
            machine.scan(1);
        }
    }
    broker.kill();
    machines
}

#[test]
fn machines_continue_when_their_broker_is_killed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("broker");
    let mut machines = machines_of_a_killed_broker(&path);
    for (number, machine) in (0..).zip(&mut machines) {
        machine.assert_right("without a broker");
        machine.write(number, COMMON + OWN / 2, 1 << 52);
        machine.assert_right("written without a broker");
        machine.rescan(2);
        machine.assert_right("scanned without a broker");
        machine.send_line("unmerge");
        machine.wait_for("unmerged");
        machine.assert_right("unmerged without a broker");
        assert_eq!(machine.stable_share_pages(), 0);
    }
}

/// The next broker gets the shares of all machines, and none becomes larger meanwhile than it is by
/// what is copied at a time.
#[test]
fn a_broker_that_was_started_again_gets_the_shares_of_its_machines() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("broker");
    let mut machines = machines_of_a_killed_broker(&path);
    let mut next = Process::start("broker", &path);
    next.wait_for("listening");
    for machine in &mut machines {
        machine.rescan(1);
        machine.send_line("renew");
        machine.wait_for("renewed");
    }
    let private: Vec<u64> = machines.iter().map(Process::anonymous_pages).collect();
    for round in 0..17 {
        for (machine, private) in machines.iter_mut().zip(&private) {
            machine.rescan(1);
            let now = machine.anonymous_pages();
            assert!(now <= private + COMMON / 16, "{private} private pages became {now}");
        }
        for machine in &mut machines {
            machine.assert_right("while shares are moved");
        }
        // Some of what is about to be moved, and some of what was.
        let [a, b] = &mut machines;
        a.write(round * 10, round * 10 + 5, (1 << 50) + round * 100);
        b.write(COMMON - 10 - round * 10, COMMON - round * 10, (1 << 51) + round * 100);
    }
    for machine in &mut machines {
        machine.rescan(2);
        machine.assert_right("when shares were moved");
    }
    let status = ask_status(&path, LONG).unwrap();
    let node = &status.domains[0].nodes[0];
    // Pages that one machine has written to are the other's alone.
    let (of_a, of_b) = (17 * 5, 17 * 10);
    assert_eq!((node.stable_pages, node.sharers), (COMMON, 2 * COMMON - of_a - of_b));
    // Half of a page that both have, and all of one that the other has left.
    let share: u64 = machines.iter().map(Process::stable_share_pages).sum();
    assert!(share <= COMMON + COMMON / 8, "{share} stable pages: those of the first are kept");
    for machine in &mut machines {
        machine.send_line("unmerge");
        machine.wait_for("unmerged");
        machine.assert_right("unmerged");
    }
    wait_until("the release of everything", || {
        ask_status(&path, LONG).unwrap().domains[0].nodes[0].stable_pages == 0
    });
}

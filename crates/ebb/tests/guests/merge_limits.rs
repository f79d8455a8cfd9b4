//! Merging in cgroups: where that of a machine or of the broker is at its limit of memory, and where
//! a node is taken from them.

use std::fs;
use std::path::{Path, PathBuf};

use ebb_agent::protocol::Command;
use ebb_vmm::api::MergeState;
use serde_json::json;

use crate::forked::unique;
use crate::guest::{Guest, MIB};
use crate::harness::{Scene, Test, eventually, when};
use crate::merge_support::{Broker, merged};

/// The tests.
pub const TESTS: &[Test] = &[
    Test::new("merge_limits::of_a_machine", 240, of_a_machine).merging(),
    Test::new("merge_limits::of_the_broker", 240, of_the_broker).merging(),
    Test::new("merge_limits::without_a_node", 240, without_a_node).merging(),
];

const ROOT: &str = "/sys/fs/cgroup";

/// A cgroup, removed when dropped, which must be empty then.
struct Cgroup(PathBuf);

impl Cgroup {
    /// Makes one with this controller.
    fn new(scene: &Scene, name: &str, controller: &str) -> Self {
        let root = Path::new(ROOT);
        fs::write(root.join("cgroup.subtree_control"), format!("+{controller}")).unwrap();
        let folder = root.join(unique(scene, name));
        fs::create_dir(&folder).unwrap();
        Self(folder)
    }

    fn set(&self, file: &str, value: &str) {
        let path = self.0.join(file);
        fs::write(&path, value).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    }

    /// The option with which a monitor moves to it.
    fn option(&self) -> String {
        format!("path={}", self.0.strip_prefix(ROOT).unwrap().display())
    }

    /// Limits its memory, that in swap included.
    fn limit(&self, bytes: u64) {
        if self.0.join("memory.swap.max").exists() {
            self.set("memory.swap.max", "0");
        }
        self.set("memory.max", &bytes.to_string());
    }

    fn current(&self) -> u64 {
        fs::read_to_string(self.0.join("memory.current")).unwrap().trim().parse().unwrap()
    }

    /// Processes that the kernel has killed at its limit.
    fn kills(&self) -> u64 {
        let events = fs::read_to_string(self.0.join("memory.events")).unwrap();
        let line = events.lines().find_map(|line| line.strip_prefix("oom_kill "));
        line.unwrap().parse().unwrap()
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

/// Merging returns memory of a machine that may have no more.
fn of_a_machine(scene: &Scene) {
    const HELD: u64 = 16 * MIB;
    let cgroup = Cgroup::new(scene, "machine", "memory");
    let broker = Broker::start(scene, "broker");
    let hold = |guest: &Guest| guest.run(Command::Hold { bytes: HELD, pattern: 71 });
    let setup = || merged(scene, "160M", &broker.member("red"));
    let first = setup().socket("first").start_and_merge();
    hold(&first);
    let setup = setup().socket("limited").args(["--cgroup", &cgroup.option()]);
    let mut limited = setup.start_and_merge_beside(&[&first]);
    limited.set_merge(&json!({ "run": "unmerge" }));
    limited.wait_unmerged();
    hold(&limited);
    // Room for tables, and for what the guest itself does.
    let before = cgroup.current();
    cgroup.limit(before + 4 * MIB);
    limited.set_merge(&json!({ "run": "merge" }));
    limited.wait_merged(HELD / 2);
    eventually("the machine has less than before", 60, || {
        let now = cgroup.current();
        when(now + HELD / 4 <= before, || format!("{now} bytes of {before}"))
    });
    limited.check_held();
    first.check_held();
    assert_eq!(cgroup.kills(), 0);
    // What it has given back it can have again.
    limited.unmerge();
    limited.check_held();
    assert_eq!(cgroup.kills(), 0);
    assert!(limited.is_running());
}

/// The kernel kills a broker that takes more than it may have; its machines lose nothing. A broker
/// that is started with a limit keeps below it.
fn of_the_broker(scene: &Scene) {
    const HELD: u64 = 48 * MIB;
    let cgroup = Cgroup::new(scene, "broker", "memory");
    let mut broker = Broker::start(scene, "broker");
    cgroup.set("cgroup.procs", &broker.pid().to_string());
    cgroup.limit(12 * MIB);
    let start = |name: &str, others: &[&Guest]| {
        let setup = merged(scene, "160M", &broker.member("red")).socket(name);
        let guest = setup.start_and_merge_beside(others);
        guest.run(Command::Hold { bytes: HELD, pattern: 72 });
        guest
    };
    let first = start("first", &[]);
    let second = start("second", &[&first]);
    let guests = [&first, &second];
    eventually("the broker has reached its limit", 90, || {
        let is_degraded = first.merge().state == MergeState::Degraded;
        when(!broker.is_running() && is_degraded, || {
            format!("{} bytes; {:?}", cgroup.current(), first.merge())
        })
    });
    assert_eq!(cgroup.kills(), 1);
    guests.into_iter().for_each(Guest::check_held);
    // A quarter of it is for the domain, and half of that for what one machine publishes.
    cgroup.limit(96 * MIB);
    let mut next = Broker::start_in(scene, "broker", &cgroup.0);
    for guest in guests {
        guest.wait_merged(HELD / 4);
    }
    eventually("the next broker refuses what it has no room for", 60, || {
        let refused = guests.map(|guest| guest.merge_statistics().pages_refused);
        when(refused.iter().any(|pages| *pages > Some(0)), || format!("{:?}", next.status(scene)))
    });
    guests.into_iter().for_each(Guest::check_held);
    assert!(next.is_running());
    assert_eq!(cgroup.kills(), 1);
}

/// A broker may not use the node on which its machines are, as if the node had gone: stable pages
/// are elsewhere then. The same node is taken from the machines afterwards: the kernel moves what
/// they have, and they go on.
fn without_a_node(scene: &Scene) {
    const HELD: u64 = 16 * MIB;
    if !Path::new("/sys/devices/system/node/node1").exists() {
        println!("this host has one node");
        return;
    }
    for across in ["on", "off"] {
        let cpuset = |name: &str, nodes: &str| {
            let cgroup = Cgroup::new(scene, &format!("{name}-{across}"), "cpuset");
            cgroup.set("cpuset.mems", nodes);
            cgroup
        };
        let (of_broker, of_machines) = (cpuset("broker", "0"), cpuset("machines", "1"));
        let mut broker = Broker::start_in(scene, &format!("broker-{across}"), &of_broker.0);
        let member = format!("{},merge_across_nodes={across}", broker.member("red"));
        let start = |name: &str, others: &[&Guest]| {
            let setup = merged(scene, "160M", &member).socket(&format!("{name}-{across}"));
            let setup = setup.args(["--cgroup", &of_machines.option()]);
            let guest = setup.start_and_merge_beside(others);
            guest.run(Command::Hold { bytes: HELD, pattern: 73 });
            guest
        };
        let first = start("first", &[]);
        let second = start("second", &[&first]);
        let guests = [&first, &second];
        for guest in guests {
            guest.wait_merged(HELD / 2);
        }
        of_machines.set("cpuset.mems", "0");
        guests.into_iter().for_each(Guest::check_held);
        for guest in guests {
            guest.run(Command::Hold { bytes: HELD, pattern: 74 });
        }
        for guest in guests {
            guest.wait_merged(HELD / 2 * 3);
        }
        guests.into_iter().for_each(Guest::check_held);
        assert!(broker.is_running());
    }
}

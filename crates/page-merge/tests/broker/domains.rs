//! Isolation of domains.

use ebb_page_merge::Nodes;
use std::collections::{BTreeMap, BTreeSet};

use ebb_guest_ram::StableSlot;
use ebb_page_merge::broker::{BrokerError, DomainRule, Limits, NodeStatus};
use ebb_page_merge::{Answer, Node, PageHash, StableStore};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use crate::support::{Member, Running, page};

const NAMES: [&str; 2] = ["blue", "green"];

#[derive(Clone, Copy, Debug)]
enum Step {
    Query(usize, u64),
    Publish(usize, u64),
    /// Share the newest reservation, or return it.
    Share(usize),
    Unused(usize),
    Release(usize),
    Notifications(usize),
}

fn step() -> impl Strategy<Value = Step> {
    let client = 0..4_usize;
    let number = 0..5_u64;
    prop_oneof![
        4 => (client.clone(), number.clone())
            .prop_map(|(client, number)| Step::Query(client, number)),
        2 => (client.clone(), number).prop_map(|(client, number)| Step::Publish(client, number)),
        3 => client.clone().prop_map(Step::Share),
        1 => client.clone().prop_map(Step::Unused),
        2 => client.clone().prop_map(Step::Release),
        1 => client.prop_map(Step::Notifications),
    ]
}

/// A stable page: inode of the memory file, and number of the page. Each client has its own numbers
/// of files.
type Place = (u64, u32);

impl Member {
    fn place(&self, slot: StableSlot) -> Place {
        let files = self.segments.files.lock().unwrap();
        (rustix::fs::fstat(&files[&slot.segment]).unwrap().st_ino, slot.index)
    }
}

/// The expected state of a domain.
#[derive(Default)]
struct Domain {
    /// The place of each content, and the number of its holds.
    stable: BTreeMap<u64, (Place, usize)>,
    asked: BTreeSet<(u64, usize)>,
}

#[derive(Default)]
struct Client {
    reserved: Vec<(u64, StableSlot)>,
    shared: Vec<(u64, StableSlot)>,
    notifications: Vec<u64>,
}

struct World {
    members: Vec<Member>,
    clients: [Client; 4],
    domains: [Domain; 2],
}

impl World {
    fn new(broker: &Running) -> Self {
        let members = (0..4).map(|client| broker.member(NAMES[client % 2])).collect();
        Self { members, clients: Default::default(), domains: Default::default() }
    }

    fn apply(&mut self, step: Step) {
        match step {
            Step::Query(client, number) => {
                let domain = &mut self.domains[client % 2];
                let answer = self.members[client].query(number);
                if let Some((place, holds)) = domain.stable.get_mut(&number) {
                    let Answer::Stable(slot) = answer else { panic!("{answer:?}") };
                    assert_eq!(self.members[client].place(slot), *place);
                    *holds += 1;
                    self.clients[client].reserved.push((number, slot));
                } else {
                    let others =
                        domain.asked.iter().any(|&(asked, by)| asked == number && by != client);
                    assert_eq!(answer, if others { Answer::Wanted } else { Answer::Unknown });
                    domain.asked.insert((number, client));
                }
            }
            Step::Publish(client, number) => {
                let slot = self.members[client].publish(&[number])[0];
                let place = self.members[client].place(slot);
                let domain = &mut self.domains[client % 2];
                if let Some((known, holds)) = domain.stable.get_mut(&number) {
                    assert_eq!(place, *known);
                    *holds += 1;
                } else {
                    domain.stable.insert(number, (place, 1));
                    for &(_, by) in
                        domain.asked.iter().filter(|(asked, by)| *asked == number && *by != client)
                    {
                        self.clients[by].notifications.push(number);
                    }
                    domain.asked.retain(|(asked, _)| *asked != number);
                }
                self.clients[client].reserved.push((number, slot));
            }
            Step::Share(client) => {
                let Some((number, slot)) = self.clients[client].reserved.pop() else { return };
                self.members[client].store.shared(slot);
                self.clients[client].shared.push((number, slot));
            }
            Step::Unused(client) => {
                let Some((number, slot)) = self.clients[client].reserved.pop() else { return };
                self.members[client].store.unused(slot);
                self.drop_hold(client, number);
            }
            Step::Release(client) => {
                let Some((number, slot)) = self.clients[client].shared.pop() else { return };
                self.members[client].store.release(slot);
                self.drop_hold(client, number);
            }
            Step::Notifications(client) => {
                let member = &mut self.members[client];
                let expected: Vec<(Node, PageHash)> =
                    std::mem::take(&mut self.clients[client].notifications)
                        .into_iter()
                        .map(|number| (Node::ANY, member.hash(number)))
                        .collect();
                assert_eq!(member.take_notifications(), expected);
            }
        }
    }

    fn drop_hold(&mut self, client: usize, number: u64) {
        // Later requests of others must not overtake it.
        self.members[client].store.flush();
        let mut ignored = Vec::new();
        self.members[client].store.take_notifications(&mut ignored);
        let member = &self.members[client];
        let notifications =
            ignored.into_iter().map(|(_, hash)| (0..5).find(|&n| member.hash(n) == hash).unwrap());
        assert!(notifications.eq(std::mem::take(&mut self.clients[client].notifications)));
        let stable = &mut self.domains[client % 2].stable;
        let (_, holds) = stable.get_mut(&number).unwrap();
        *holds -= 1;
        if *holds == 0 {
            stable.remove(&number);
        }
    }

    fn check(&mut self, broker: &Running) {
        for (client, member) in self.clients.iter().zip(&self.members) {
            for (number, slot) in client.reserved.iter().chain(&client.shared) {
                assert_eq!(member.read(*slot), page(*number));
            }
        }
        let inodes = |first: usize| {
            let of_domain = self.members.iter().skip(first).step_by(2);
            let mut inodes = BTreeSet::new();
            for member in of_domain {
                for file in member.segments.files.lock().unwrap().values() {
                    inodes.insert(rustix::fs::fstat(file).unwrap().st_ino);
                }
            }
            inodes
        };
        assert!(inodes(0).is_disjoint(&inodes(1)), "a memory file is in another domain");
        self.members.iter_mut().for_each(|member| {
            member.store.take_notifications(&mut Vec::new());
        });
        for (number, name) in NAMES.iter().enumerate() {
            let clients = || self.clients.iter().skip(number).step_by(2);
            let expected = NodeStatus {
                node: None,
                stable_pages: self.domains[number].stable.len() as u64,
                sharers: clients().map(|client| client.shared.len() as u64).sum(),
                reservations: clients().map(|client| client.reserved.len() as u64).sum(),
                remembered_hashes: self.domains[number].asked.len() as u64,
            };
            assert_eq!(broker.pages_of(name), expected);
        }
    }
}

#[test]
fn events_in_one_domain_are_invisible_in_the_other() {
    let mut runner = TestRunner::new(Config { cases: 60, ..Config::default() });
    let histories = prop::collection::vec(step(), 0..120);
    let result = runner.run(&histories, |steps| {
        let broker = Running::new(Limits::default());
        let mut world = World::new(&broker);
        for step in steps {
            world.apply(step);
        }
        world.check(&broker);
        Ok(())
    });
    assert!(result.is_ok(), "{result:?}");
}

#[test]
fn each_domain_has_its_own_secret() {
    let broker = Running::new(Limits::default());
    let members = [broker.member("blue"), broker.member("green"), broker.member("blue")];
    assert_eq!(members[0].store.secret(), members[2].store.secret());
    assert_ne!(members[0].store.secret(), members[1].store.secret());
    assert_ne!(members[0].hash(1), members[1].hash(1));
    // A new domain of the same name has another secret.
    let secret = members[1].store.secret();
    drop(members);
    crate::support::wait_until("the end of the domains", || broker.status().domains.is_empty());
    assert_ne!(broker.member("green").store.secret(), secret);
}

fn refusal(result: Result<Member, BrokerError>) -> String {
    match result {
        Err(BrokerError::Refused { reason }) => reason,
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("it was admitted"),
    }
}

#[test]
fn only_served_domains_can_be_joined() {
    let broker = Running::with_rules(Limits::default(), vec!["blue".parse().unwrap()]);
    broker.member("blue");
    let reason = refusal(Member::join(&broker.path(), "green", Nodes::Across));
    assert!(reason.contains("green") && reason.contains("--domain"), "{reason}");
    assert_eq!(broker.status().refused, 1);
}

#[test]
fn a_domain_of_a_user_is_for_that_user_and_root() {
    let rules: Vec<DomainRule> =
        ["blue=65533", "green=65534", "mine"].map(|rule| rule.parse().unwrap()).to_vec();
    let broker = Running::with_rules(Limits::default(), rules);
    let path = broker.path();
    let folder = path.parent().unwrap();
    let everybody = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(folder, everybody).unwrap();
    let join = |domain: &str| Member::join(&path, domain, Nodes::Across);
    if !rustix::process::geteuid().is_root() {
        let reason = refusal(join("blue"));
        assert!(reason.contains("blue"), "{reason}");
        assert!(join("mine").is_ok());
        return;
    }
    for domain in ["blue", "green", "mine"] {
        assert!(join(domain).is_ok(), "root joins {domain}");
    }
    // A thread of another user: the kernel has users for threads, and a connection has its
    // thread's.
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            let nobody = rustix::process::Uid::from_raw(65534);
            rustix::thread::set_thread_res_uid(nobody, nobody, nobody).unwrap();
            let member = join("green");
            (member.map(|_| ()), refusal(join("blue")), refusal(join("mine")))
        });
        let (green, blue, mine) = other.join().unwrap();
        green.unwrap();
        assert!(blue.contains("blue") && blue.contains("65534"), "{blue}");
        assert!(mine.contains("mine"), "{mine}");
    });
}

#[test]
fn all_clients_of_a_domain_keep_nodes_apart_or_none_does() {
    let broker = Running::new(Limits::default());
    let across = broker.member("web");
    let reason = refusal(Member::join(&broker.path(), "web", Nodes::Apart));
    assert!(
        reason.contains("merge across nodes") && reason.contains("keep nodes apart"),
        "{reason}"
    );
    drop(across);
    // Once all have left, it is a new domain.
    crate::support::wait_until("the end of the domain", || broker.status().domains.is_empty());
    Member::join(&broker.path(), "web", Nodes::Apart).unwrap();
}

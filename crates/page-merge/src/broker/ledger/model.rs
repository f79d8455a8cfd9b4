//! All orders in which two clients can query, publish, map, write, lose their connection and die,
//! with messages in flight: a client that has a stable page mapped sees its content for as long as
//! its process lives.

use std::collections::{BTreeMap, HashSet, VecDeque};

use super::sim::{hash, hasher, page};
use super::*;

const NODE: Node = Node::ANY;

/// The possible contents of pages.
const CONTENTS: [u8; 2] = [1, 2];

/// Number of queries of each client: the first one has one more, which can take a freed slot.
const STARTS: [u8; 2] = [2, 1];

/// Slots and the numbers of their contents. Segments have two slots.
#[derive(Clone, Debug, Default)]
struct Numbers(BTreeMap<StableSlot, Option<u8>>);

impl Slots for Numbers {
    fn allocate(&mut self, _: Node, pages: usize, slots: &mut Vec<StableSlot>) -> io::Result<()> {
        let all = (0..8).map(|number| StableSlot { segment: number / 2, index: number % 2 });
        // The lowest free slot: reused as soon as possible.
        let free: Vec<StableSlot> =
            all.filter(|slot| self.0.get(slot).is_none_or(Option::is_none)).take(pages).collect();
        for slot in free {
            self.0.insert(slot, Some(0));
            slots.push(slot);
        }
        Ok(())
    }

    fn write(&mut self, first: StableSlot, contents: &[u8]) -> io::Result<()> {
        for (index, page) in (first.index..).zip(contents.chunks_exact(PAGE)) {
            self.0.insert(StableSlot { segment: first.segment, index }, Some(page[17]));
        }
        Ok(())
    }

    fn read(&self, slot: StableSlot, content: &mut [u8]) -> io::Result<()> {
        content.copy_from_slice(&page(self.0[&slot].expect("only stable pages are read")));
        Ok(())
    }

    fn free(&mut self, slot: StableSlot) -> Option<u32> {
        let content = self.0.get_mut(&slot).expect("a slot that was allocated");
        content.take().expect("a slot is freed once");
        None
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sent {
    Query(u8),
    Publish(u8),
    Change(Change, StableSlot),
}

/// State of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Doing {
    Nothing,
    Waiting(u8),
    Answered(u8, Answer),
}

#[derive(Clone, Debug)]
struct Client {
    /// Its number at the broker, until the broker has removed it.
    member: Option<MemberId>,
    lives: bool,
    connected: bool,
    /// Whether the broker has noticed the loss of the connection.
    noticed: bool,
    doing: Doing,
    starts: u8,
    /// Mapped slots, with their contents.
    mapped: Vec<(StableSlot, u8)>,
    under_way: VecDeque<Sent>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    Start(usize, u8),
    Deliver(usize),
    /// Process an answer: compare and map, or not.
    Map(usize),
    Decline(usize),
    Write(usize, usize),
    Lose(usize),
    Die(usize),
    NoticeLoss(usize),
    NoticeDeath(usize),
}

/// A defect of the broker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mistake {
    None,
    /// A lost connection counts as the end of the process.
    FreesAtLoss,
    /// A slot in an answer is not held for the client until the client shares it.
    ForgetsReservations,
    /// One client's release ends the shares of all.
    ReleasesForAll,
}

#[derive(Clone, Debug)]
struct World {
    ledger: Ledger<Numbers>,
    clients: [Client; 2],
}

impl World {
    fn new() -> Self {
        let mut ledger = Ledger::new(Numbers::default(), Nodes::Apart, hasher(), Limits::default());
        let clients = [(), ()].map(|()| Client {
            member: ledger.join(),
            lives: true,
            connected: true,
            noticed: false,
            doing: Doing::Nothing,
            starts: 0,
            mapped: Vec::new(),
            under_way: VecDeque::new(),
        });
        Self { ledger, clients }
    }

    /// All possible next events.
    fn events(&self) -> Vec<Event> {
        let mut events = Vec::new();
        for (number, client) in self.clients.iter().enumerate() {
            if client.lives {
                events.push(Event::Die(number));
                if client.connected {
                    events.push(Event::Lose(number));
                    if client.doing == Doing::Nothing && client.starts < STARTS[number] {
                        events.extend(CONTENTS.map(|content| Event::Start(number, content)));
                    }
                }
                // A client processes an answer that it has, and writes to its pages, connected or
                // not.
                if let Doing::Answered(_, answer) = client.doing {
                    events.push(Event::Map(number));
                    // Without publishing, the client has no next step.
                    if matches!(answer, Answer::Stable(_)) {
                        events.push(Event::Decline(number));
                    }
                }
                events.extend((0..client.mapped.len()).map(|index| Event::Write(number, index)));
            }
            if !client.noticed && !client.under_way.is_empty() {
                events.push(Event::Deliver(number));
            }
            // Messages in flight can be lost then.
            if !(client.noticed || client.connected && client.lives) {
                events.push(Event::NoticeLoss(number));
            }
            if client.noticed && !client.lives && client.member.is_some() {
                events.push(Event::NoticeDeath(number));
            }
        }
        events
    }

    fn apply(&mut self, event: Event, mistake: Mistake) {
        match event {
            Event::Start(number, content) => {
                let client = &mut self.clients[number];
                client.starts += 1;
                client.doing = Doing::Waiting(content);
                client.under_way.push_back(Sent::Query(content));
            }
            Event::Deliver(number) => self.deliver(number, mistake),
            Event::Map(number) => self.process_answer(number, true),
            Event::Decline(number) => self.process_answer(number, false),
            Event::Write(number, index) => {
                let (slot, _) = self.clients[number].mapped.remove(index);
                self.clients[number].send(Sent::Change(Change::Released, slot));
            }
            Event::Lose(number) => self.clients[number].connected = false,
            Event::Die(number) => {
                let client = &mut self.clients[number];
                client.lives = false;
                client.doing = Doing::Nothing;
                client.mapped.clear();
            }
            Event::NoticeLoss(number) => {
                let client = &mut self.clients[number];
                client.noticed = true;
                client.under_way.clear();
                let Some(member) = client.member else { return };
                if mistake == Mistake::FreesAtLoss {
                    self.ledger.leave(member);
                    client.member = None;
                } else if !self.ledger.disconnect(member) {
                    client.member = None;
                }
            }
            Event::NoticeDeath(number) => {
                if let Some(member) = self.clients[number].member.take() {
                    self.ledger.leave(member);
                }
            }
        }
    }

    fn deliver(&mut self, number: usize, mistake: Mistake) {
        let other = self.clients[1 - number].member;
        let client = &mut self.clients[number];
        let (Some(sent), Some(member)) = (client.under_way.pop_front(), client.member) else {
            return;
        };
        let (content, answer) = match sent {
            Sent::Query(content) => {
                let mut answers = Vec::new();
                self.ledger.query(member, NODE, &[hash(content)], &mut answers);
                (content, answers[0])
            }
            Sent::Publish(content) => {
                let mut slots = Vec::new();
                self.ledger
                    .publish(member, NODE, &page(content), &mut slots)
                    .expect("there is room");
                (content, Answer::Stable(slots[0]))
            }
            Sent::Change(change, slot) => {
                let result = self.ledger.change(member, change, slot);
                assert!(
                    result.is_ok() || mistake != Mistake::None,
                    "an honest client is refused: {result:?}"
                );
                if let Some(other) = other.filter(|_| mistake == Mistake::ReleasesForAll)
                    && change == Change::Released
                {
                    let _ = self.ledger.change(other, Change::Released, slot);
                }
                return;
            }
        };
        if mistake == Mistake::ForgetsReservations
            && matches!(sent, Sent::Query(_))
            && let Answer::Stable(slot) = answer
        {
            self.ledger.change(member, Change::Unused, slot).expect("it was just reserved");
        }
        if client.connected && client.lives {
            client.doing = Doing::Answered(content, answer);
        }
    }

    /// Processes an answer: the client maps the slot if the content is right, or publishes.
    fn process_answer(&mut self, number: usize, wants: bool) {
        let client = &mut self.clients[number];
        let Doing::Answered(content, answer) = std::mem::replace(&mut client.doing, Doing::Nothing)
        else {
            return;
        };
        match answer {
            Answer::Stable(slot) => {
                let same = self.ledger.slots().0.get(&slot) == Some(&Some(content));
                if wants && same {
                    client.mapped.push((slot, content));
                    client.send(Sent::Change(Change::Shared, slot));
                } else {
                    client.send(Sent::Change(Change::Unused, slot));
                }
            }
            Answer::Unknown | Answer::Wanted if wants && client.connected => {
                client.doing = Doing::Waiting(content);
                client.under_way.push_back(Sent::Publish(content));
            }
            Answer::Unknown | Answer::Wanted => {}
        }
    }

    /// A mapped page with a wrong content.
    fn broken(&self) -> Option<String> {
        self.clients.iter().find_map(|client| {
            let wrong = client
                .mapped
                .iter()
                .find(|(slot, content)| self.ledger.slots().0.get(slot) != Some(&Some(*content)));
            wrong.map(|(slot, content)| format!("{slot:?} should contain {content}"))
        })
    }

    /// Everything that determines the possible next events.
    fn key(&self) -> String {
        let ledger = &self.ledger;
        let mut members: Vec<_> = ledger
            .members
            .iter()
            .map(|(id, member)| {
                let mut holds: Vec<_> = member
                    .holds
                    .iter()
                    .map(|(slot, hold)| (*slot, hold.reserved, hold.shared))
                    .collect();
                holds.sort_unstable();
                (*id, holds)
            })
            .collect();
        members.sort();
        let mut stable: Vec<_> = ledger
            .publishers
            .iter()
            .map(|(slot, publisher)| (*slot, ledger.stable.references(*slot), *publisher))
            .collect();
        stable.sort_unstable();
        let clients: Vec<_> = self
            .clients
            .iter()
            .map(|client| {
                let mut mapped = client.mapped.clone();
                mapped.sort_unstable();
                let flags = (client.lives, client.connected, client.noticed, client.starts);
                (client.member, flags, client.doing, mapped, &client.under_way)
            })
            .collect();
        format!("{members:?}{stable:?}{clients:?}{:?}", ledger.slots().0)
    }
}

impl Client {
    fn send(&mut self, sent: Sent) {
        if self.connected {
            self.under_way.push_back(sent);
        }
    }
}

/// Explores all states; returns their number, or the path to one in which a page has a wrong
/// content.
fn explore(mistake: Mistake) -> Result<usize, String> {
    let mut seen = HashSet::new();
    let mut stack = vec![(World::new(), Vec::new())];
    while let Some((world, way)) = stack.pop() {
        for event in world.events() {
            let mut next = world.clone();
            next.apply(event, mistake);
            let mut way = way.clone();
            way.push(event);
            if let Some(broken) = next.broken() {
                return Err(format!("{broken} after {way:?}"));
            }
            if !seen.insert(next.key()) {
                continue;
            }
            if seen.len().is_multiple_of(64) {
                next.ledger.check();
            }
            if next.clients.iter().all(|client| client.member.is_none()) {
                let left: Vec<_> = next.ledger.slots().0.values().flatten().collect();
                assert!(
                    left.is_empty() || mistake != Mistake::None,
                    "{left:?} is left after {way:?}"
                );
            }
            stack.push((next, way));
        }
    }
    Ok(seen.len())
}

#[test]
fn no_order_of_events_changes_a_mapped_page() {
    let states = explore(Mistake::None).unwrap();
    assert!(states > 5_000, "only {states} states");
}

#[test]
fn brokers_that_free_too_early_are_detected() {
    for mistake in [Mistake::FreesAtLoss, Mistake::ForgetsReservations, Mistake::ReleasesForAll] {
        let found = explore(mistake);
        assert!(found.is_err(), "{mistake:?} is not detected in {found:?} states");
    }
}

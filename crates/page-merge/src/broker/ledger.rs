//! The holders of each stable page of a domain, and the time at which a slot may be reused. No I/O:
//! tests explore all orders of events.
//!
//! The basic rule: **the content of a slot never changes while any client holds it**, be it by a
//! share or by a reservation. A client may have a page mapped from its reservation on, and a client
//! whose connection is lost still has it mapped; only the end of its process ends its holds.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::io;

use ebb_guest_ram::StableSlot;

use crate::hash::{PageHash, PageHasher};
use crate::memory::Node;
use crate::settings::Nodes;
use crate::slots::Slots;
use crate::stable::{Dropped, Found, Left, StablePages};
use crate::store::{Answer, StableStore};

use super::interest::{Asker, Before, Interest};
use super::limits::Limits;
use super::message::{Change, PAGE};

/// A client of the domain. Numbers are reused.
pub(super) type MemberId = u16;

/// A client broke the protocol. Its connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "it changed slot {index} of segment {segment}, which it does not hold in this way",
    segment = .0.segment,
    index = .0.index
)]
pub(super) struct NotHeld(StableSlot);

/// Reason for which nothing was published.
#[derive(Debug, thiserror::Error)]
pub(super) enum NoRoom {
    #[error("the domain's quota of {0} stable pages is exhausted")]
    Domain(u64),
    #[error("one client may have published {0} of the stable pages at a time")]
    Client(u64),
    #[error("one client may have {0} reservations at a time")]
    Reservations(u32),
    #[error(transparent)]
    System(#[from] io::Error),
}

/// Counts of a node of a domain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct NodeCounts {
    /// Stable pages.
    pub pages: u64,
    /// Shares of them.
    pub shares: u64,
    /// Reservations.
    pub reservations: u64,
    /// Remembered hashes.
    pub remembered_hashes: u64,
}

/// The state of a domain.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(super) struct Ledger<T> {
    stable: StablePages<T>,
    /// Clients choose the hashes; they must not choose the cells of the index.
    keys: RandomState,
    hasher: PageHasher,
    limits: Limits,
    nodes: BTreeMap<Node, NodeIndex>,
    publishers: HashMap<StableSlot, Publisher>,
    members: BTreeMap<MemberId, Member>,
    /// Number of clients that have joined so far.
    joined: u32,
}

/// Counts and unanswered hashes of one node.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
struct NodeIndex {
    interest: Interest,
    pages: u64,
    shares: u64,
    reservations: u64,
}

/// A client that may have left: its number may have been reused, but not the number of clients that
/// had joined before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Publisher {
    member: MemberId,
    joined: u32,
}

#[derive(Debug, Default)]
#[cfg_attr(test, derive(Clone))]
struct Member {
    /// Number of clients that had joined before.
    joined: u32,
    holds: HashMap<StableSlot, Hold>,
    reservations: u32,
    published: u64,
    segments: BTreeSet<u32>,
    closed: Vec<u32>,
    notifications: VecDeque<(Node, PageHash)>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Hold {
    reserved: u32,
    shared: u32,
}

impl Hold {
    const fn is_empty(self) -> bool {
        self.reserved == 0 && self.shared == 0
    }
}

impl<T: Slots> Ledger<T> {
    pub(super) fn new(slots: T, nodes: Nodes, hasher: PageHasher, limits: Limits) -> Self {
        let mut stable = StablePages::new(slots);
        stable.merge_across_nodes(nodes);
        stable.limit_sharing(limits.max_page_sharing);
        Self {
            stable,
            keys: RandomState::new(),
            hasher,
            limits,
            nodes: BTreeMap::new(),
            publishers: HashMap::new(),
            members: BTreeMap::new(),
            joined: 0,
        }
    }

    pub(super) fn slots(&self) -> &T {
        self.stable.slots()
    }

    /// The index key of a content's stable pages.
    fn key(&self, hash: PageHash) -> PageHash {
        PageHash::new(self.keys.hash_one(hash.get()))
    }

    /// Adds a client; `None` if there are too many.
    pub(super) fn join(&mut self) -> Option<MemberId> {
        let id = (0..Asker::LIMIT).find(|id| !self.members.contains_key(id))?;
        self.members.insert(id, Member { joined: self.joined, ..Member::default() });
        self.joined = self.joined.wrapping_add(1);
        Some(id)
    }

    /// Answers for each hash; a slot in an answer is reserved for the client.
    pub(super) fn query(
        &mut self,
        member: MemberId,
        node: Node,
        hashes: &[PageHash],
        answers: &mut Vec<Answer>,
    ) {
        let mut before = None;
        for &hash in hashes {
            let answer = self.answer(member, node, hash, before);
            before = answer.slot();
            answers.push(answer);
        }
    }

    fn answer(
        &mut self,
        member: MemberId,
        node: Node,
        hash: PageHash,
        before: Option<StableSlot>,
    ) -> Answer {
        match self.stable.find(node, self.key(hash), before) {
            Found::Full => Answer::Wanted,
            Found::Available(number) if self.may_reserve(member, 1) => {
                let slot = self.stable.reserve(number);
                self.note_reservation(member, node, slot);
                Answer::Stable(slot)
            }
            Found::Available(_) => Answer::Unknown,
            Found::Nothing => {
                let limit = self.hashes_of_a_client();
                match self.node(node).interest.ask(hash, Asker(member), limit) {
                    Before::NoOther => Answer::Unknown,
                    Before::Another => Answer::Wanted,
                }
            }
        }
    }

    /// Applies a client's change to a slot that it holds.
    pub(super) fn change(
        &mut self,
        member: MemberId,
        change: Change,
        slot: StableSlot,
    ) -> Result<(), NotHeld> {
        let not_held = NotHeld(slot);
        let state = self.members.get_mut(&member).ok_or(not_held)?;
        let hold = state.holds.get_mut(&slot).ok_or(not_held)?;
        match change {
            Change::Shared if hold.reserved > 0 => {
                hold.reserved -= 1;
                state.reservations -= 1;
                hold.shared += 1;
                let node = self.stable.node(slot).ok_or(not_held)?;
                let node = self.node(node);
                node.reservations -= 1;
                node.shares += 1;
            }
            Change::Unused if hold.reserved > 0 => self.end_reservation(member, slot),
            Change::Released if hold.shared > 0 => {
                hold.shared -= 1;
                if hold.is_empty() {
                    state.holds.remove(&slot);
                }
                self.drop_holds(slot, Hold { reserved: 0, shared: 1 });
            }
            Change::Retired => self.stable.retire(slot),
            _ => return Err(not_held),
        }
        Ok(())
    }

    /// Marks a client as disconnected while its process lives: it gets no answers, and keeps its
    /// holds. Returns false if it holds nothing; it is removed then.
    pub(super) fn disconnect(&mut self, member: MemberId) -> bool {
        for node in self.nodes.values_mut() {
            node.interest.forget(Asker(member));
        }
        let Some(state) = self.members.get_mut(&member) else { return false };
        state.notifications = VecDeque::new();
        state.closed = Vec::new();
        state.segments = BTreeSet::new();
        if state.holds.is_empty() {
            self.leave(member);
            return false;
        }
        true
    }

    /// Removes a client whose process has ended, with all its holds.
    pub(super) fn leave(&mut self, member: MemberId) {
        for node in self.nodes.values_mut() {
            node.interest.forget(Asker(member));
        }
        let Some(state) = self.members.remove(&member) else { return };
        for (slot, hold) in state.holds {
            self.drop_holds(slot, hold);
        }
    }

    /// Whether this segment is new to the client; it counts as announced afterwards.
    pub(super) fn announce(&mut self, member: MemberId, segment: u32) -> bool {
        self.members.get_mut(&member).is_some_and(|state| state.segments.insert(segment))
    }

    /// Segments that were closed since they were announced to the client, at most `most`.
    pub(super) fn take_closed(&mut self, member: MemberId, most: usize) -> Vec<u32> {
        let Some(state) = self.members.get_mut(&member) else { return Vec::new() };
        let count = state.closed.len().min(most);
        state.closed.drain(..count).collect()
    }

    /// Notifications for the client, at most `most`.
    pub(super) fn take_notifications(
        &mut self,
        member: MemberId,
        most: usize,
    ) -> Vec<(Node, PageHash)> {
        let Some(state) = self.members.get_mut(&member) else { return Vec::new() };
        let count = state.notifications.len().min(most);
        state.notifications.drain(..count).collect()
    }

    /// Counts by node.
    pub(super) fn counts(&self) -> BTreeMap<Node, NodeCounts> {
        let count = |node: &NodeIndex| NodeCounts {
            pages: node.pages,
            shares: node.shares,
            reservations: node.reservations,
            remembered_hashes: node.interest.len() as u64,
        };
        self.nodes.iter().map(|(&number, node)| (number, count(node))).collect()
    }

    fn node(&mut self, node: Node) -> &mut NodeIndex {
        self.nodes.entry(node).or_insert_with(|| NodeIndex {
            interest: Interest::new(self.limits.remembered_hashes),
            pages: 0,
            shares: 0,
            reservations: 0,
        })
    }

    /// Limit of remembered hashes per client and node: it falls as their number grows.
    fn hashes_of_a_client(&self) -> u32 {
        let parts = (self.members.len() * self.nodes.len()).max(1) as u64;
        let share = u32::try_from(self.limits.domain_hashes / parts).unwrap_or(u32::MAX);
        self.limits.remembered_hashes.min(share)
    }

    fn may_reserve(&self, member: MemberId, count: u32) -> bool {
        let taken = self.members.get(&member).map_or(u32::MAX, |state| state.reservations);
        taken.checked_add(count).is_some_and(|sum| sum <= self.limits.reservations)
    }

    /// Counts a client's reservation of a stable page.
    fn note_reservation(&mut self, member: MemberId, node: Node, slot: StableSlot) {
        if let Some(state) = self.members.get_mut(&member) {
            state.holds.entry(slot).or_default().reserved += 1;
            state.reservations += 1;
        }
        self.node(node).reservations += 1;
    }

    fn end_reservation(&mut self, member: MemberId, slot: StableSlot) {
        let Some(state) = self.members.get_mut(&member) else { return };
        let Some(hold) = state.holds.get_mut(&slot) else { return };
        hold.reserved -= 1;
        state.reservations -= 1;
        if hold.is_empty() {
            state.holds.remove(&slot);
        }
        self.drop_holds(slot, Hold { reserved: 1, shared: 0 });
    }

    fn drop_holds(&mut self, slot: StableSlot, Hold { reserved, shared }: Hold) {
        let Some(Dropped { node, left }) = self.stable.drop_references(slot, reserved + shared)
        else {
            return;
        };
        let node = self.node(node);
        node.reservations -= u64::from(reserved);
        node.shares -= u64::from(shared);
        let Left::None { closed } = left else { return };
        node.pages -= 1;
        if let Some(Publisher { member, joined }) = self.publishers.remove(&slot)
            && let Some(publisher) =
                self.members.get_mut(&member).filter(|state| state.joined == joined)
        {
            publisher.published -= 1;
        }
        let Some(segment) = closed else { return };
        for state in self.members.values_mut() {
            if state.segments.remove(&segment) {
                state.closed.push(segment);
            }
        }
    }
}

mod publish;

#[cfg(test)]
mod model;
#[cfg(test)]
mod sim;
#[cfg(test)]
mod tests;

//! Who has which stable page of a domain, and when a slot may be used again. No input or output:
//! tests go through all orders of events.
//!
//! The rule that everything rests on: **the content of a slot never changes while anybody holds
//! it**, be it by a share or by a reservation. A client may have a page mapped from its reservation
//! on, and a client whose connection is lost has it mapped still; only the end of its process ends
//! its holds.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::io;

use crate::hash::PageHasher;
use crate::memory::{Node, PageHash};
use crate::store::{Answer, Slot};

use super::asked::{Asked, Asker, Before};
use super::limits::Limits;
use super::message::{Change, PAGE};

/// Memory files of a domain's stable pages.
pub(super) trait Pages {
    /// Appends free slots on `node`, neighbours as far as possible; none after an error.
    fn allocate(&mut self, node: Node, pages: usize, slots: &mut Vec<Slot>) -> io::Result<()>;
    /// Fills neighbouring slots from `first` on, which nobody else knows.
    fn write(&mut self, first: Slot, contents: &[u8]) -> io::Result<()>;
    /// Copies a page that was written.
    fn read(&self, slot: Slot, content: &mut [u8]) -> io::Result<()>;
    /// Gives back a slot that nobody holds. The segment that was closed with it, if it was its last
    /// one.
    fn free(&mut self, slot: Slot) -> Option<u32>;
    /// Pages that the segments may have memory for.
    fn capacity(&self) -> u64;
}

/// A client of the domain. Numbers are given again.
pub(super) type MemberId = u16;

/// A client did what none does. Its connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it changed slot {index} of segment {segment}, which it does not hold like that", segment = .0.segment, index = .0.index)]
pub(super) struct NotHeld(Slot);

/// Nothing was published.
#[derive(Debug, thiserror::Error)]
pub(super) enum NoRoom {
    #[error("the domain's quota of {0} stable pages is used up")]
    Domain(u64),
    #[error("one client may have published {0} of the stable pages at a time")]
    Client(u64),
    #[error("one client may have {0} reservations at a time")]
    Reservations(u32),
    #[error(transparent)]
    System(#[from] io::Error),
}

/// What there is in a domain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct NodeCounts {
    /// Stable pages.
    pub pages: u64,
    /// Shares of them.
    pub shares: u64,
    /// Reservations.
    pub reservations: u64,
    /// Hashes that are remembered.
    pub asked: u64,
}

/// The state of a domain.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(super) struct Ledger<P> {
    pages: P,
    hasher: PageHasher,
    limits: Limits,
    shelves: BTreeMap<Node, Shelf>,
    stable: HashMap<Slot, Page>,
    members: BTreeMap<MemberId, Member>,
    /// Clients that have joined so far.
    joined: u32,
}

/// Stable pages and unanswered hashes of one node.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
struct Shelf {
    index: HashMap<PageHash, Duplicates>,
    asked: Asked,
    pages: u64,
    shares: u64,
    reservations: u64,
}

/// Stable pages with one content.
#[derive(Debug, Default)]
#[cfg_attr(test, derive(Clone))]
struct Duplicates {
    /// Those that may get more sharers, each at its [`Page::place`]; the last one does next.
    roomy: Vec<Slot>,
    /// Number of those that have as many as they may.
    full: u32,
}

/// Where a stable page stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    Roomy,
    Full,
    Retired,
}

#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
struct Page {
    node: Node,
    hash: PageHash,
    holds: u32,
    standing: Standing,
    /// Where it is among its content's roomy ones, if it is one of them: a content can have many,
    /// and nobody shall search them.
    place: u32,
    publisher: Publisher,
}

/// A client that may be gone by now: its number can be another's then, but not how many had joined
/// before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Publisher {
    member: MemberId,
    joined: u32,
}

#[derive(Debug, Default)]
#[cfg_attr(test, derive(Clone))]
struct Member {
    /// Clients that had joined before.
    joined: u32,
    holds: HashMap<Slot, Hold>,
    reservations: u32,
    published: u64,
    segments: BTreeSet<u32>,
    closed: Vec<u32>,
    news: VecDeque<(Node, PageHash)>,
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

impl<P: Pages> Ledger<P> {
    pub(super) fn new(pages: P, hasher: PageHasher, limits: Limits) -> Self {
        Self {
            pages,
            hasher,
            limits,
            shelves: BTreeMap::new(),
            stable: HashMap::new(),
            members: BTreeMap::new(),
            joined: 0,
        }
    }

    pub(super) fn pages(&self) -> &P {
        &self.pages
    }

    /// One more client; `None` if there are too many.
    pub(super) fn join(&mut self) -> Option<MemberId> {
        let id = (0..Asker::LIMIT).find(|id| !self.members.contains_key(id))?;
        self.members.insert(id, Member { joined: self.joined, ..Member::default() });
        self.joined = self.joined.wrapping_add(1);
        Some(id)
    }

    /// Answers for each hash; a slot in them is reserved for the client.
    pub(super) fn query(
        &mut self,
        member: MemberId,
        node: Node,
        hashes: &[PageHash],
        answers: &mut Vec<Answer>,
    ) {
        for &hash in hashes {
            let answer = self.answer(member, node, hash);
            answers.push(answer);
        }
    }

    fn answer(&mut self, member: MemberId, node: Node, hash: PageHash) -> Answer {
        let limit = self.hashes_of_a_client();
        let shelf = self.shelves.entry(node).or_insert_with(|| Shelf::new(&self.limits));
        if let Some(duplicates) = shelf.index.get(&hash) {
            let Some(&slot) = duplicates.roomy.last() else { return Answer::Wanted };
            if !self.may_reserve(member, 1) {
                return Answer::Unknown;
            }
            self.reserve(member, slot);
            return Answer::Stable(slot);
        }
        match shelf.asked.ask(hash, Asker(member), limit) {
            Before::Nobody => Answer::Unknown,
            Before::Another => Answer::Wanted,
        }
    }

    /// What a client did with a slot that it holds.
    pub(super) fn change(
        &mut self,
        member: MemberId,
        change: Change,
        slot: Slot,
    ) -> Result<(), NotHeld> {
        let not_held = NotHeld(slot);
        let state = self.members.get_mut(&member).ok_or(not_held)?;
        let hold = state.holds.get_mut(&slot).ok_or(not_held)?;
        match change {
            Change::Shared if hold.reserved > 0 => {
                hold.reserved -= 1;
                state.reservations -= 1;
                hold.shared += 1;
                let page = self.stable.get(&slot).ok_or(not_held)?;
                let shelf = self.shelves.get_mut(&page.node).ok_or(not_held)?;
                shelf.reservations -= 1;
                shelf.shares += 1;
            }
            Change::Unused if hold.reserved > 0 => self.end_reservation(member, slot),
            Change::Released if hold.shared > 0 => {
                hold.shared -= 1;
                if hold.is_empty() {
                    state.holds.remove(&slot);
                }
                self.drop_holds(slot, Hold { reserved: 0, shared: 1 });
            }
            Change::Retired => self.set_standing(slot, Standing::Retired),
            _ => return Err(not_held),
        }
        Ok(())
    }

    /// The client is not there any more, but its process is: it gets no answers, and keeps what it
    /// holds. False if it holds nothing; it is forgotten then.
    pub(super) fn disconnect(&mut self, member: MemberId) -> bool {
        for shelf in self.shelves.values_mut() {
            shelf.asked.forget(Asker(member));
        }
        let Some(state) = self.members.get_mut(&member) else { return false };
        state.news = VecDeque::new();
        state.closed = Vec::new();
        state.segments = BTreeSet::new();
        if state.holds.is_empty() {
            self.leave(member);
            return false;
        }
        true
    }

    /// The client's process has ended: everything it held is free for others.
    pub(super) fn leave(&mut self, member: MemberId) {
        for shelf in self.shelves.values_mut() {
            shelf.asked.forget(Asker(member));
        }
        let Some(state) = self.members.remove(&member) else { return };
        for (slot, hold) in state.holds {
            self.drop_holds(slot, hold);
        }
    }

    /// Whether the client has not been told of this segment; it is taken as told then.
    pub(super) fn announce(&mut self, member: MemberId, segment: u32) -> bool {
        self.members.get_mut(&member).is_some_and(|state| state.segments.insert(segment))
    }

    /// Segments that were closed since the client was told of them, at most `most`.
    pub(super) fn take_closed(&mut self, member: MemberId, most: usize) -> Vec<u32> {
        let Some(state) = self.members.get_mut(&member) else { return Vec::new() };
        let count = state.closed.len().min(most);
        state.closed.drain(..count).collect()
    }

    /// News for the client, at most `most`.
    pub(super) fn take_news(&mut self, member: MemberId, most: usize) -> Vec<(Node, PageHash)> {
        let Some(state) = self.members.get_mut(&member) else { return Vec::new() };
        let count = state.news.len().min(most);
        state.news.drain(..count).collect()
    }

    /// What there is, by node.
    pub(super) fn counts(&self) -> BTreeMap<Node, NodeCounts> {
        let count = |shelf: &Shelf| NodeCounts {
            pages: shelf.pages,
            shares: shelf.shares,
            reservations: shelf.reservations,
            asked: shelf.asked.len() as u64,
        };
        self.shelves.iter().map(|(&node, shelf)| (node, count(shelf))).collect()
    }

    /// What may be remembered for a client and a node: the more of them there are, the less.
    fn hashes_of_a_client(&self) -> u32 {
        let parts = (self.members.len() * self.shelves.len()).max(1) as u64;
        let share = u32::try_from(self.limits.domain_hashes / parts).unwrap_or(u32::MAX);
        self.limits.remembered_hashes.min(share)
    }

    fn may_reserve(&self, member: MemberId, count: u32) -> bool {
        let taken = self.members.get(&member).map_or(u32::MAX, |state| state.reservations);
        taken.checked_add(count).is_some_and(|sum| sum <= self.limits.reservations)
    }

    fn reserve(&mut self, member: MemberId, slot: Slot) {
        let (Some(state), Some(page)) = (self.members.get_mut(&member), self.stable.get_mut(&slot))
        else {
            return;
        };
        page.holds += 1;
        if let Some(shelf) = self.shelves.get_mut(&page.node) {
            shelf.reservations += 1;
        }
        let full = page.holds >= self.limits.max_page_sharing && page.standing == Standing::Roomy;
        state.holds.entry(slot).or_default().reserved += 1;
        state.reservations += 1;
        if full {
            self.set_standing(slot, Standing::Full);
        }
    }

    fn end_reservation(&mut self, member: MemberId, slot: Slot) {
        let Some(state) = self.members.get_mut(&member) else { return };
        let Some(hold) = state.holds.get_mut(&slot) else { return };
        hold.reserved -= 1;
        state.reservations -= 1;
        if hold.is_empty() {
            state.holds.remove(&slot);
        }
        self.drop_holds(slot, Hold { reserved: 1, shared: 0 });
    }

    fn drop_holds(&mut self, slot: Slot, Hold { reserved, shared }: Hold) {
        let Some(page) = self.stable.get_mut(&slot) else { return };
        if let Some(shelf) = self.shelves.get_mut(&page.node) {
            shelf.reservations -= u64::from(reserved);
            shelf.shares -= u64::from(shared);
        }
        page.holds -= reserved + shared;
        if page.holds == 0 {
            self.remove(slot);
        } else if page.standing == Standing::Full && page.holds < self.limits.max_page_sharing {
            self.set_standing(slot, Standing::Roomy);
        }
    }

    /// Nobody holds this page any more.
    fn remove(&mut self, slot: Slot) {
        self.set_standing(slot, Standing::Retired);
        let Some(page) = self.stable.remove(&slot) else { return };
        if let Some(shelf) = self.shelves.get_mut(&page.node) {
            shelf.pages -= 1;
        }
        let Publisher { member, joined } = page.publisher;
        if let Some(publisher) =
            self.members.get_mut(&member).filter(|state| state.joined == joined)
        {
            publisher.published -= 1;
        }
        self.give_back(slot);
    }

    fn give_back(&mut self, slot: Slot) {
        let Some(segment) = self.pages.free(slot) else { return };
        for state in self.members.values_mut() {
            if state.segments.remove(&segment) {
                state.closed.push(segment);
            }
        }
    }

    /// Moves a page between the lists of its content.
    fn set_standing(&mut self, slot: Slot, standing: Standing) {
        let Some(page) = self.stable.get_mut(&slot) else { return };
        let was = page.standing;
        if was == standing || was == Standing::Retired {
            return;
        }
        let Some(shelf) = self.shelves.get_mut(&page.node) else { return };
        let hash = page.hash;
        let duplicates = shelf.index.entry(hash).or_default();
        page.standing = standing;
        let place = page.place as usize;
        match standing {
            Standing::Roomy => {
                page.place = duplicates.roomy.len() as u32;
                duplicates.roomy.push(slot);
            }
            Standing::Full => duplicates.full += 1,
            Standing::Retired => {}
        }
        if was == Standing::Full {
            duplicates.full -= 1;
        } else {
            duplicates.roomy.swap_remove(place);
            // The last one has taken its place.
            if let Some(moved) =
                duplicates.roomy.get(place).and_then(|moved| self.stable.get_mut(moved))
            {
                moved.place = place as u32;
            }
        }
        if duplicates.roomy.is_empty() && duplicates.full == 0 {
            shelf.index.remove(&hash);
        }
    }
}

impl Shelf {
    fn new(limits: &Limits) -> Self {
        let asked = Asked::new(limits.remembered_hashes);
        Self { index: HashMap::new(), asked, pages: 0, shares: 0, reservations: 0 }
    }
}

mod publish;

#[cfg(test)]
mod model;
#[cfg(test)]
mod sim;
#[cfg(test)]
mod tests;

//! Publishing: contents become stable pages, as far as there is room.

use std::io;

use crate::memory::{Node, PageHash};
use crate::store::Slot;

use super::{Asker, Ledger, MemberId, NoRoom, PAGE, Page, Pages, Publisher, Shelf, Standing};

/// A segment of a node that is hardly used does not count against the quota.
const SPARE_PAGES: u64 = 1 << 13;

impl<P: Pages> Ledger<P> {
    /// Makes stable pages, or finds equal ones. Each page is found under its own hash, whatever the
    /// client thinks that is: a client cannot make others look at pages that are not what they ask
    /// for.
    pub(in crate::broker) fn publish(
        &mut self,
        member: MemberId,
        node: Node,
        contents: &[u8],
        slots: &mut Vec<Slot>,
    ) -> Result<(), NoRoom> {
        let pages: Vec<&[u8]> = contents.chunks_exact(PAGE).collect();
        if !self.may_reserve(member, pages.len() as u32) {
            return Err(NoRoom::Reservations(self.limits.reservations));
        }
        let hashes: Vec<PageHash> = pages.iter().map(|page| self.hasher.hash(page)).collect();
        // What there is already is reserved before anything else, so that it has room for all of
        // them.
        let mut found = Vec::with_capacity(pages.len());
        for (page, &hash) in pages.iter().zip(&hashes) {
            let slot = self.find(node, hash, page);
            if let Some(slot) = slot {
                self.reserve(member, slot);
            }
            found.push(slot);
        }
        let missing = pages.iter().zip(&found).filter(|(_, slot)| slot.is_none());
        let missing: Vec<&[u8]> = missing.map(|(page, _)| *page).collect();
        let fresh = match self.make(member, node, &missing) {
            Ok(fresh) => fresh,
            Err(error) => {
                for slot in found.into_iter().flatten() {
                    self.end_reservation(member, slot);
                }
                return Err(error);
            }
        };
        let mut fresh = fresh.into_iter();
        for (slot, hash) in found.into_iter().zip(hashes) {
            let slot = if let Some(slot) = slot {
                slot
            } else {
                // There are as many as were missing.
                let Some(slot) = fresh.next() else { break };
                self.shelve(member, node, hash, slot);
                self.reserve(member, slot);
                slot
            };
            slots.push(slot);
        }
        Ok(())
    }

    /// A stable page with room for one more and this content.
    fn find(&self, node: Node, hash: PageHash, content: &[u8]) -> Option<Slot> {
        let slot = *self.shelves.get(&node)?.index.get(&hash)?.roomy.last()?;
        let mut stable = [0; PAGE];
        self.pages.read(slot, &mut stable).ok()?;
        (stable == content).then_some(slot)
    }

    /// Slots with these contents, not yet in the index.
    fn make(
        &mut self,
        member: MemberId,
        node: Node,
        contents: &[&[u8]],
    ) -> Result<Vec<Slot>, NoRoom> {
        let mut slots = Vec::with_capacity(contents.len());
        if contents.is_empty() {
            return Ok(slots);
        }
        let limit = self.limits.domain_pages;
        if self.stable.len() as u64 + contents.len() as u64 > limit {
            return Err(NoRoom::Domain(limit));
        }
        let published = self.members.get(&member).map_or(0, |state| state.published);
        if published + contents.len() as u64 > self.limits.published_pages {
            return Err(NoRoom::Client(self.limits.published_pages));
        }
        self.pages.allocate(node, contents.len(), &mut slots)?;
        // Free slots between others keep their memory.
        let nodes = self.shelves.len() as u64 + 1;
        let result = if self.pages.capacity() > 2 * limit + nodes * SPARE_PAGES {
            Err(NoRoom::Domain(limit))
        } else {
            self.write(&slots, contents).map_err(NoRoom::from)
        };
        if let Err(error) = result {
            for slot in slots {
                self.give_back(slot);
            }
            return Err(error);
        }
        Ok(slots)
    }

    /// Writes pages into slots, neighbours in one go.
    fn write(&mut self, slots: &[Slot], pages: &[&[u8]]) -> io::Result<()> {
        let mut done = 0;
        while let Some(rest) = slots.get(done..).filter(|rest| !rest.is_empty()) {
            let run =
                1 + rest.windows(2).take_while(|pair| pair[0].is_followed_by(pair[1])).count();
            self.pages.write(rest[0], &pages[done..done + run].concat())?;
            done += run;
        }
        Ok(())
    }

    /// A stable page that was written gets into the index, and those who asked for it learn of it.
    fn shelve(&mut self, member: MemberId, node: Node, hash: PageHash, slot: Slot) {
        let Some(state) = self.members.get_mut(&member) else { return };
        state.published += 1;
        let publisher = Publisher { member, joined: state.joined };
        let shelf = self.shelves.entry(node).or_insert_with(|| Shelf::new(&self.limits));
        shelf.pages += 1;
        let roomy = &mut shelf.index.entry(hash).or_default().roomy;
        let place = roomy.len() as u32;
        roomy.push(slot);
        let mut askers = Vec::new();
        shelf.asked.take(hash, &mut askers);
        let page = Page { node, hash, holds: 0, standing: Standing::Roomy, place, publisher };
        self.stable.insert(slot, page);
        for Asker(asker) in askers {
            let Some(state) = self.members.get_mut(&asker).filter(|_| asker != member) else {
                continue;
            };
            if state.news.len() >= self.limits.news {
                state.news.pop_front();
            }
            state.news.push_back((node, hash));
        }
    }
}

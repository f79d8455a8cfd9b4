//! Publishing: contents become stable pages, as far as there is room.

use ebb_guest_ram::StableSlot;

use crate::hash::PageHash;
use crate::memory::Node;
use crate::slots::Slots;
use crate::stable::{Found, Number};

use super::{Asker, Ledger, MemberId, NoRoom, PAGE, Publisher};

impl<T: Slots> Ledger<T> {
    /// Makes stable pages on `place`, or finds equal ones. Each page is indexed under its own hash,
    /// whatever hash the client claims: a client cannot make others compare pages that are not what
    /// they query.
    pub(in crate::broker) fn publish(
        &mut self,
        member: MemberId,
        place: Node,
        contents: &[u8],
        slots: &mut Vec<StableSlot>,
    ) -> Result<(), NoRoom> {
        let node = self.stable.index_of(place);
        let pages: Vec<&[u8]> = contents.chunks_exact(PAGE).collect();
        if !self.may_reserve(member, pages.len() as u32) {
            return Err(NoRoom::Reservations(self.limits.reservations));
        }
        let hashes: Vec<PageHash> = pages.iter().map(|page| self.hasher.hash(page)).collect();
        // Existing pages are reserved before anything else, so that all of them have room.
        let mut found = Vec::with_capacity(pages.len());
        let (mut missing, mut missing_contents) = (Vec::new(), Vec::new());
        for (page, &hash) in pages.iter().zip(&hashes) {
            let slot = self.find(node, hash, page).map(|number| self.stable.reserve(number));
            if let Some(slot) = slot {
                self.note_reservation(member, node, slot);
            } else {
                missing.push(hash);
                missing_contents.extend_from_slice(page);
            }
            found.push(slot);
        }
        let fresh = match self.make(member, place, &missing, &missing_contents) {
            Ok(fresh) => fresh,
            Err(error) => {
                for slot in found.into_iter().flatten() {
                    self.end_reservation(member, slot);
                }
                return Err(error);
            }
        };
        // As many as were missing.
        let mut fresh = fresh.into_iter();
        slots.extend(found.into_iter().filter_map(|slot| slot.or_else(|| fresh.next())));
        Ok(())
    }

    /// A stable page with this content and room for one more sharer.
    fn find(&self, node: Node, hash: PageHash, content: &[u8]) -> Option<Number> {
        let Found::Available(number) = self.stable.find(node, self.key(hash), None) else {
            return None;
        };
        let mut stable = [0; PAGE];
        self.slots().read(self.stable.slot(number), &mut stable).ok()?;
        (stable == content).then_some(number)
    }

    /// Makes stable pages with a reservation for the client.
    fn make(
        &mut self,
        member: MemberId,
        place: Node,
        hashes: &[PageHash],
        contents: &[u8],
    ) -> Result<Vec<StableSlot>, NoRoom> {
        let node = self.stable.index_of(place);
        let mut slots = Vec::with_capacity(hashes.len());
        if hashes.is_empty() {
            return Ok(slots);
        }
        let limit = self.limits.domain_pages;
        if self.stable.len() + hashes.len() as u64 > limit {
            return Err(NoRoom::Domain(limit));
        }
        let Some(state) = self.members.get_mut(&member) else { return Ok(slots) };
        if state.published + hashes.len() as u64 > self.limits.published_pages {
            return Err(NoRoom::Client(self.limits.published_pages));
        }
        let publisher = Publisher { member, joined: state.joined };
        let keys: Vec<PageHash> = hashes.iter().map(|&hash| self.key(hash)).collect();
        self.stable.make(place, &keys, contents, &mut slots)?;
        if let Some(state) = self.members.get_mut(&member) {
            state.published += hashes.len() as u64;
        }
        self.node(node).pages += hashes.len() as u64;
        for &slot in &slots {
            self.publishers.insert(slot, publisher);
            self.note_reservation(member, node, slot);
        }
        for &hash in hashes {
            self.notify(member, node, hash);
        }
        Ok(slots)
    }

    /// Notifies the clients that queried a content that it has a stable page.
    fn notify(&mut self, publisher: MemberId, node: Node, hash: PageHash) {
        let mut askers = Vec::new();
        self.node(node).interest.take(hash, &mut askers);
        for Asker(asker) in askers {
            let Some(state) = self.members.get_mut(&asker).filter(|_| asker != publisher) else {
                continue;
            };
            if state.notifications.len() >= self.limits.notifications {
                state.notifications.pop_front();
            }
            state.notifications.push_back((node, hash));
        }
    }
}

//! Moves the shares of merged pages to other stable pages with the same content: of the right node,
//! or of the store in use. The pages stay shared all the time.

use std::collections::HashSet;

use ebb_abi::Pfn;
use ebb_guest_ram::StableSlot;
use ebb_guest_ram::merge::{MergeOutcome, MergeTarget};

use crate::{
    blocks::{PageNumber, block_of, first_of},
    domain::{Domain, Pass, StoreHealth},
    join::{Candidate, Publish},
    memory::Memory,
    record::{NodeNumber, State},
    scan::Known,
    store::{Answer, StableStore},
};

impl<M: Memory, S: StableStore> Domain<M, S> {
    /// Looks up the present nodes of merged pages (ascending), and compares them with the former
    /// ones. Where nodes are kept apart, shares of pages on another node are moved back.
    pub(crate) fn note_nodes_of_merged(&mut self, pages: &[PageNumber], pass: &Pass<'_>) {
        let pfns: Vec<Pfn> = pages.iter().filter_map(|&page| self.blocks.pfn(page)).collect();
        let nodes = self.nodes_now(&pfns);
        let mut remote = Vec::new();
        for (&page, node) in pages.iter().zip(nodes) {
            let record = self.blocks.record(page);
            let Some(node) = node else { continue };
            let home = if record.node() == NodeNumber::NONE { node } else { record.node() };
            let is_remote = node != home;
            self.blocks.set(page, record.on(home).with(State::Merged, u64::from(is_remote)));
            if is_remote {
                remote.push(page);
            }
        }
        if !pass.are_apart() {
            return;
        }
        for block in remote.chunk_by(|left, right| block_of(*left) == block_of(*right)) {
            let slots = self.slots_of(block_of(block[0]));
            let moved = |(page, _): &(PageNumber, StableSlot)| block.binary_search(page).is_ok();
            let shares: Vec<_> = slots.into_iter().filter(moved).collect();
            // They are found no longer where they are not.
            for (_, slot) in &shares {
                self.store_of(*slot).retire(*slot);
            }
            self.move_shares(&shares, pass);
        }
    }

    /// Moves the shares of a block that are of a former store.
    pub(crate) fn leave_former_stores(&mut self, block: u32, pass: &Pass<'_>) {
        let mut shares = self.slots_of(block);
        shares.retain(|(_, slot)| self.is_former(*slot));
        self.move_shares(&shares, pass);
        self.take_released();
    }

    /// The merged pages of a block, with the stable page that each shares.
    fn slots_of(&mut self, number: u32) -> Vec<(PageNumber, StableSlot)> {
        let Some(range) = self.blocks.block(number).map(|block| block.range) else {
            return Vec::new();
        };
        let mut slots = Vec::new();
        self.memory.slots(range, &mut slots);
        let page = |pfn: Pfn| first_of(number) + (pfn.0 - range.start.0) as PageNumber;
        let is_merged = |page| self.blocks.record(page).state() == State::Merged;
        let slots = slots.into_iter().map(|(pfn, slot)| (page(pfn), slot));
        slots.filter(|(page, _)| is_merged(*page)).collect()
    }

    /// Moves the shares of pages of a block (ascending) to stable pages of the store in use, on the
    /// pages' nodes where nodes are kept apart; these are made where there are none. What fails is
    /// tried again later.
    fn move_shares(&mut self, shares: &[(PageNumber, StableSlot)], pass: &Pass<'_>) {
        let pages: Vec<PageNumber> = shares.iter().map(|(page, _)| *page).collect();
        let mut left: Vec<Candidate> = Vec::with_capacity(pages.len());
        for content in self.contents_of(&pages, Known::Old) {
            let home = self.blocks.record(content.page).node();
            let node = if pass.are_apart() { home } else { NodeNumber(0) };
            // Without a home it gets one by the next look at its node.
            if node != NodeNumber::NONE {
                left.push(Candidate { page: content.page, hash: content.hash, node });
            }
        }
        let (mut moves, mut made) = (Vec::with_capacity(left.len()), Vec::new());
        // Each round gives at least one page a stable page, or is the last one.
        while !left.is_empty() && self.health == StoreHealth::Full {
            let (mut missing, mut later) = (Vec::new(), Vec::new());
            let mut asked = HashSet::new();
            let answers = self.ask(&left);
            for (candidate, answer) in left.into_iter().zip(answers) {
                if let Answer::Stable(slot) = answer {
                    moves.push((candidate.page, slot));
                } else if asked.insert((candidate.node, candidate.hash)) {
                    missing.push(Publish::own(&candidate));
                } else {
                    later.push(candidate);
                }
            }
            if self.health == StoreHealth::Full {
                moves.extend(self.make_stable(&missing, pass));
                made.extend(asked);
            }
            left = later;
        }
        moves.sort_unstable_by_key(|(page, _)| *page);
        let list: Vec<(Pfn, StableSlot)> =
            moves.iter().filter_map(|&(page, slot)| Some((self.blocks.pfn(page)?, slot))).collect();
        let mut outcomes = Vec::with_capacity(list.len());
        self.memory.move_shares(&list, &mut outcomes);
        for ((page, slot), outcome) in moves.into_iter().zip(outcomes) {
            if outcome == MergeOutcome::Done {
                self.note_shared(slot);
                self.blocks.set(page, self.blocks.record(page).with(State::Merged, 0));
                self.counters.moved_pages += 1;
            } else {
                self.store.unused(slot);
            }
        }
        self.join_waiting(&made, pass);
    }

    /// Makes stable pages of the contents of these pages, as far as the store can.
    fn make_stable(&mut self, list: &[Publish], pass: &Pass<'_>) -> Vec<(PageNumber, StableSlot)> {
        let before = self.planned.len();
        self.publish_all(list, pass);
        let made = self.planned.split_off(before);
        let slot = |target| match target {
            MergeTarget::Slot(slot) => Some(slot),
            MergeTarget::Zero => None,
        };
        made.into_iter().filter_map(|item| Some((item.page, slot(item.target)?))).collect()
    }
}

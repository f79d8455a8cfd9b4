//! A scan of a block: the new state of each page, and the pages that are worth reading.

use ebb_abi::Pfn;
use ebb_guest_ram::merge::PageLook;

use crate::{
    blocks::{PageNumber, block_of, first_of},
    domain::{Domain, Pass},
    hash::{Content, PageHash},
    join::{Candidate, Found},
    memory::{BLOCK_PAGES, Memory, Node},
    record::{NodeNumber, Record, State},
    store::StableStore,
};

/// Result of scanning a huge page.
#[derive(Clone, Copy, Default)]
struct HugeLook {
    clean: u64,
    written: u64,
}

/// Action for a huge page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    /// No huge page, or no action.
    Nothing,
    /// Check whether it is worth splitting.
    Judge,
    /// It is no longer a huge page.
    Split,
}

impl<M: Memory, S: StableStore> Domain<M, S> {
    /// Scans a block and merges what can be merged of it. Returns the number of pages scanned.
    pub(crate) fn scan_block(&mut self, number: u32, pass: &Pass<'_>) -> u64 {
        let Some(block) = self.blocks.block(number) else { return 0 };
        let range = block.range;
        // The scan must see the actual state of a page.
        if self.planned.iter().any(|item| block_of(item.page) == number) {
            self.replace_planned(pass);
        }
        self.take_released();
        let mut looks = Vec::with_capacity(range.pages as usize);
        if let Err(error) = self.memory.look(range, &mut looks) {
            self.note_memory_error(&error);
            return range.pages;
        }
        self.counters.pages_scanned += range.pages;

        let mut worth = Vec::new();
        let mut huge = HugeLook::default();
        for (page, look) in (first_of(number)..).zip(looks) {
            if self.note_look(page, look, &mut huge, pass) {
                worth.push(page);
            }
        }
        let turn = self.note_huge(number, huge, pass);
        let judged = turn == Turn::Judge;
        let pages = first_of(number)..first_of(number) + range.pages as u32;
        match turn {
            Turn::Nothing => {}
            Turn::Judge => worth = pages.collect(),
            Turn::Split => {
                // They may have partners that did not join them because of the huge page.
                worth.extend(
                    pages.filter(|&page| self.blocks.record(page).state() == State::Unshared),
                );
                worth.sort_unstable();
            }
        }
        if !worth.is_empty() {
            let found = self.find_candidates(&worth, pass);
            if judged
                && found.zeros.len() + found.others.len() < worth.len()
                && let Some(block) = self.blocks.block_mut(number)
            {
                // Not all of it could be read: judge it again some passes later.
                block.cold_passes = 0;
            }
            if !judged || self.judge(number, &found, pass) {
                self.join(found, pass);
            }
        }
        if pass.is_turn_of(number) {
            self.check_nodes(number, pass);
        }
        if pass.are_apart() && pass.is_rare_turn_of(number) {
            self.follow_moved(number, pass);
        }
        self.blocks.shrink(number);
        range.pages
    }

    /// Processes the scan of a page; returns `true` if the page should be read now.
    fn note_look(
        &mut self,
        page: PageNumber,
        look: PageLook,
        huge: &mut HugeLook,
        pass: &Pass<'_>,
    ) -> bool {
        let record = self.blocks.record(page);
        match (look, record.state()) {
            (PageLook::Clean | PageLook::HugeClean, State::Unshared)
            | (PageLook::Merged, State::Merged) => {
                self.counters.clean_pages += 1;
                huge.clean += u64::from(look == PageLook::HugeClean);
                false
            }
            (PageLook::Absent, State::Unknown | State::Zeroed)
            | (PageLook::Excluded, State::Unknown)
            // The record is kept until the page can be merged again.
            | (PageLook::Copied, State::Watched) => false,
            (PageLook::Absent | PageLook::Excluded, _) => {
                self.set_state(page, Record::UNKNOWN);
                false
            }
            (PageLook::Merged, _) => {
                // Merged before this core had a record of the page.
                self.set_state(page, Record::UNKNOWN.with(State::Merged, 0));
                false
            }
            (PageLook::Broken(slot), _) => {
                self.counters.broken_pages += 1;
                self.counters.written_pages += 1;
                self.store.release(slot);
                // Merging it was a mistake: it counts twice.
                self.blocks.set(page, self.blocks.record(page).older());
                self.watch(page, pass);
                false
            }
            (PageLook::Written, _) => {
                self.counters.written_pages += 1;
                self.watch(page, pass);
                false
            }
            (PageLook::HugeWritten, _) => {
                huge.written += 1;
                self.counters.written_pages += 1;
                self.watch(page, pass);
                false
            }
            (PageLook::HugeClean, state) => {
                self.counters.clean_pages += 1;
                huge.clean += 1;
                if !matches!(state, State::Watched | State::Refused) {
                    self.watch(page, pass);
                }
                false
            }
            (PageLook::Clean, State::Watched) => {
                self.counters.clean_pages += 1;
                let waits = record.value();
                if waits > 0 {
                    self.counters.pages_skipped += u64::from(waits > pass.ordinary_waits());
                    self.blocks.set(page, record.with(State::Watched, waits - 1));
                }
                waits == 0
            }
            (PageLook::Clean, State::Refused) => {
                self.counters.clean_pages += 1;
                pass.is_turn_of(block_of(page))
            }
            (PageLook::Clean | PageLook::Copied, _) => {
                self.watch(page, pass);
                false
            }
        }
    }

    /// Records whether the block is a huge page, and for how long it was not written to.
    fn note_huge(&mut self, number: u32, look: HugeLook, pass: &Pass<'_>) -> Turn {
        let Some(block) = self.blocks.block_mut(number) else { return Turn::Nothing };
        let was_huge = std::mem::replace(&mut block.huge, look.clean + look.written > 0);
        if !block.huge || look.written > 0 || look.clean < BLOCK_PAGES {
            block.cold_passes = 0;
            block.wanted = 0;
            return if was_huge && !block.huge { Turn::Split } else { Turn::Nothing };
        }
        block.cold_passes = block.cold_passes.saturating_add(1);
        let cold = pass.settings.huge_cold_passes;
        // Once by itself; later only if others have found enough duplicates in it.
        let wanted = block.cold_passes > cold && block.wanted >= pass.settings.huge_min_duplicates;
        if block.cold_passes == cold || wanted { Turn::Judge } else { Turn::Nothing }
    }

    /// Reads pages whose content is unknown, and separates zeros from other contents.
    fn find_candidates(&mut self, pages: &[PageNumber], pass: &Pass<'_>) -> Found {
        let mut contents: Vec<(PageNumber, Pfn, Option<PageHash>)> =
            Vec::with_capacity(pages.len());
        for &page in pages {
            let record = self.blocks.record(page);
            let known =
                matches!(record.state(), State::Unshared | State::Refused).then(|| record.hash());
            if let Some(pfn) = self.blocks.pfn(page) {
                contents.push((page, pfn, known));
            }
        }
        let unread: Vec<Pfn> = contents
            .iter()
            .filter(|(_, _, known)| known.is_none())
            .map(|(_, pfn, _)| *pfn)
            .collect();
        let mut read = Vec::with_capacity(unread.len());
        if !unread.is_empty() {
            self.counters.hashed_pages += unread.len() as u64;
            if let Err(error) = self.memory.hash(&unread, &self.hasher, &mut read) {
                self.note_memory_error(&error);
            }
        }
        let mut read = read.into_iter();
        for (_, _, hash) in &mut contents {
            if hash.is_none() {
                *hash = match read.next().flatten() {
                    None => None,
                    Some(Content::Zero) => Some(PageHash::ZEROS),
                    Some(Content::Hash(hash)) => Some(hash),
                };
            }
        }
        contents.retain(|(_, _, hash)| hash.is_some());

        let mut found = Found::default();
        if pass.settings.use_zero_pages {
            found.zeros = contents
                .iter()
                .filter(|(_, _, hash)| *hash == Some(PageHash::ZEROS))
                .map(|(page, ..)| *page)
                .collect();
            contents.retain(|(_, _, hash)| *hash != Some(PageHash::ZEROS));
        }
        let places: Vec<Pfn> = contents.iter().map(|(_, pfn, _)| *pfn).collect();
        let nodes = self.nodes_of(&places, pass);
        for ((page, _, hash), node) in contents.into_iter().zip(nodes) {
            if let (Some(hash), Some(node)) = (hash, node) {
                found.others.push(Candidate { page, hash, node });
            }
        }
        found
    }

    /// The index that each page belongs to: that of its node, or the only one; `None` if a page has
    /// no node at present.
    pub(crate) fn nodes_of(&mut self, pages: &[Pfn], pass: &Pass<'_>) -> Vec<Option<NodeNumber>> {
        if !pass.are_apart() {
            return vec![Some(NodeNumber(0)); pages.len()];
        }
        self.nodes_now(pages)
    }

    /// The node of each page.
    pub(crate) fn nodes_now(&mut self, pages: &[Pfn]) -> Vec<Option<NodeNumber>> {
        let mut nodes = Vec::with_capacity(pages.len());
        if !pages.is_empty()
            && let Err(error) = self.memory.nodes(pages, &mut nodes)
        {
            self.note_memory_error(&error);
        }
        nodes.resize(pages.len(), None);
        nodes
            .into_iter()
            .map(|node| {
                node.map(|node| self.node_number(Node(node)))
                    .filter(|number| *number != NodeNumber::NONE)
            })
            .collect()
    }

    /// Looks up the nodes of the stable pages behind a block's merged pages.
    fn check_nodes(&mut self, number: u32, pass: &Pass<'_>) {
        let Some(block) = self.blocks.block(number) else { return };
        if block.merged_pages() == 0 {
            return;
        }
        let pages: Vec<PageNumber> = (first_of(number)..)
            .take(block.range.pages as usize)
            .filter(|&page| self.blocks.record(page).state() == State::Merged)
            .collect();
        self.note_nodes_of_merged(&pages, pass);
    }

    /// Looks up the nodes of a block's waiting pages, and joins those that have moved to another
    /// node with pages there.
    fn follow_moved(&mut self, number: u32, pass: &Pass<'_>) {
        let Some(block) = self.blocks.block(number) else { return };
        let first = block.range.start;
        let waiting: Vec<(PageNumber, Pfn)> = block
            .records()
            .unwrap_or_default()
            .iter()
            .enumerate()
            .filter(|(_, record)| record.state() == State::Unshared)
            .map(|(place, _)| (first_of(number) + place as u32, Pfn(first.0 + place as u64)))
            .collect();
        if block.huge || waiting.is_empty() {
            return;
        }
        let places: Vec<Pfn> = waiting.iter().map(|(_, pfn)| *pfn).collect();
        let mut found = Found::default();
        for ((page, _), node) in waiting.into_iter().zip(self.nodes_now(&places)) {
            let record = self.blocks.record(page);
            match node {
                Some(node) if node != record.node() => {
                    found.others.push(Candidate { page, hash: record.hash(), node });
                }
                _ => {}
            }
        }
        self.join(found, pass);
    }
}

//! A scan of a block: the new state of each page, and the pages that are worth reading.

use ebb_abi::Pfn;
use ebb_guest_ram::merge::PageLook;

use crate::{
    blocks::{PageNumber, Reading, block_of, first_of},
    domain::{Domain, Pass},
    hash::{Content, PageHash},
    join::{Candidate, Found},
    memory::{BLOCK_PAGES, Memory, Node},
    record::{NodeNumber, Record, State},
    store::StableStore,
};

/// Longest interval, in passes, at which a huge page is read.
const MOST_READ_EVERY: u8 = 64;

/// How often a huge page is judged before it is due, because it seems to be worth splitting. What is
/// decided depends on what is decided of others.
const MOST_TRIES: u8 = 4;

/// Passes in which a block must be whole and unmerged before it becomes a huge page again.
const WHOLE_PASSES: u8 = 16;

/// Number of attempts in a row that may fail. Then there is none for [`WHOLE_PASSES`] passes, and
/// for twice as many after each further failure.
const MOST_FAILURES: u32 = 8;

/// Maximum number of pages of which one query asks whether any exists: 1 GiB. The kernel holds the
/// lock of the process's mappings meanwhile.
const MOST_QUERIED_PAGES: u64 = 1 << 18;

/// How often that time doubles at most.
const MOST_DOUBLINGS: u32 = 6;

/// Whether a hash that a page has had is that of its content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Known {
    /// Yes: it would have been found written to.
    Trusted,
    /// It may have changed.
    Old,
}

/// The content of a page.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PageContent {
    pub(crate) page: PageNumber,
    pfn: Pfn,
    pub(crate) hash: PageHash,
}

impl<M: Memory, S: StableStore> Domain<M, S> {
    /// The first block from `number` on that is worth scanning, as far as one query shows it: most
    /// of a small guest's memory does not exist, and nothing is known about it.
    pub(crate) fn after_absent(&mut self, number: u32) -> u32 {
        let range = self.blocks.unknown_range(number, MOST_QUERIED_PAGES);
        if range.is_empty() {
            return number;
        }
        let absent = match self.memory.first_with_content(range) {
            Ok(Some(page)) => page.0.clamp(range.start.0, range.end().0) / BLOCK_PAGES,
            Ok(None) => range.end().0.div_ceil(BLOCK_PAGES),
            Err(error) => {
                self.note_memory_error(&error);
                return number;
            }
        };
        number + (absent - range.start.0 / BLOCK_PAGES) as u32
    }

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

        let is_huge = looks.iter().all(|look| *look == PageLook::Huge);
        self.note_huge(number, is_huge, pass);
        if is_huge {
            self.counters.untracked_pages += range.pages;
            self.read_huge_page(number, pass);
            self.blocks.shrink(number);
            return range.pages;
        }
        let is_whole = range.pages == BLOCK_PAGES
            && looks.iter().all(|look| matches!(look, PageLook::Clean | PageLook::Written));
        let mut worth = Vec::new();
        for (page, look) in (first_of(number)..).zip(looks) {
            if self.note_look(page, look, pass) {
                worth.push(page);
            }
        }
        if !worth.is_empty() {
            let contents = self.contents_of(&worth, Known::Trusted);
            let found = self.sort_out(contents, pass);
            self.join(found, pass);
        }
        self.collapse_if_due(number, is_whole, pass);
        if pass.is_turn_of(number) {
            if self.has_former_stores() {
                self.leave_former_stores(number, pass);
            }
            self.check_nodes(number, pass);
        }
        if pass.are_apart() && pass.is_rare_turn_of(number) {
            self.follow_moved(number, pass);
        }
        self.blocks.shrink(number);
        range.pages
    }

    /// Processes the scan of a page; returns `true` if the page should be read now.
    fn note_look(&mut self, page: PageNumber, look: PageLook, pass: &Pass<'_>) -> bool {
        let record = self.blocks.record(page);
        match (look, record.state()) {
            (PageLook::Clean, State::Unshared) | (PageLook::Merged, State::Merged) => {
                self.counters.clean_pages += 1;
                false
            }
            (PageLook::Absent, State::Unknown | State::Zeroed)
            | (PageLook::Excluded, State::Unknown)
            // The record is kept until the page can be merged again.
            | (PageLook::Copied, State::Watched) => false,
            // The block became a huge page during the scan.
            (PageLook::Huge, _) => {
                self.counters.untracked_pages += 1;
                self.set_state(page, Record::UNKNOWN);
                false
            }
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
                self.store_of(slot).release(slot);
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

    /// Records whether the block is a huge page. If that has changed, what was known of its pages is
    /// outdated, but which of them are merged since it was split.
    fn note_huge(&mut self, number: u32, is_huge: bool, pass: &Pass<'_>) {
        let Some(block) = self.blocks.block_mut(number) else { return };
        if block.huge == is_huge {
            block.reading.split = false;
            return;
        }
        let was_split_here = block.reading.split;
        if is_huge {
            self.has_huge_pages = true;
            self.forget_block(number);
        } else {
            self.forget_contents(number);
        }
        if let Some(block) = self.blocks.block_mut(number) {
            let due_in = if is_huge { pass.settings.huge_cold_passes } else { 0 };
            block.reading = Reading { due_in, ..Reading::default() };
            (block.huge, block.whole_passes) = (is_huge, 0);
        }
        if was_split_here && !is_huge {
            self.counters.huge_pages_split += 1;
            let merged = (first_of(number)..)
                .take(BLOCK_PAGES as usize)
                .filter(|page| {
                    matches!(self.blocks.record(*page).state(), State::Merged | State::Zeroed)
                })
                .count();
            let few = merged < usize::from(pass.settings.huge_min_duplicates);
            self.counters.huge_pages_split_in_vain += u64::from(few);
        }
    }

    /// Reads a huge page as a whole, if it is due, and merges it if enough of it has not changed
    /// since the last time and has partners. Until it is due, what was read is judged again if
    /// enough of it was found to be duplicate since; the content is compared anyway when it is
    /// merged.
    fn read_huge_page(&mut self, number: u32, pass: &Pass<'_>) {
        let settings = pass.settings;
        let Some(block) = self.blocks.block_mut(number) else { return };
        let reading = &mut block.reading;
        reading.due_in = reading.due_in.saturating_sub(1);
        let is_due = reading.due_in == 0;
        if is_due {
            let cold = settings.huge_cold_passes;
            reading.interval = match reading.interval {
                0 => cold,
                interval => interval.saturating_mul(2).min(MOST_READ_EVERY).max(cold),
            };
            (reading.due_in, reading.tries) = (reading.interval, 0);
        } else if reading.wanted >= settings.huge_min_duplicates && reading.tries < MOST_TRIES {
            reading.tries += 1;
        } else {
            return;
        }
        (reading.wanted, reading.willing) = (0, false);
        let mut pages: Vec<PageNumber> =
            (first_of(number)..).take(block.range.pages as usize).collect();
        let contents = if is_due {
            let contents = self.contents_of(&pages, Known::Old);
            contents.into_iter().filter(|content| self.is_steady(content)).collect()
        } else {
            pages.retain(|page| self.blocks.record(*page).state().has_hash());
            self.contents_of(&pages, Known::Trusted)
        };
        if contents.is_empty() {
            return;
        }
        let found = self.sort_out(contents, pass);
        if self.judge(number, &found, pass) {
            self.join(found, pass);
        }
    }

    /// Whether a page of a huge page has the content that it had the last time; if not, the new one
    /// is recorded.
    fn is_steady(&mut self, content: &PageContent) -> bool {
        let record = self.blocks.record(content.page);
        let is_known = record.state() == State::Seen || record.state().has_hash();
        let is_steady = is_known && record.hash() == content.hash;
        if !is_steady {
            self.set_state(content.page, record.with(State::Seen, content.hash.get()));
        }
        is_steady
    }

    /// Makes a huge page of a block that was whole and unmerged for long enough, if this memory has
    /// huge pages. An attempt costs the guest a fault for each page: they become rare if they fail.
    fn collapse_if_due(&mut self, number: u32, is_whole: bool, pass: &Pass<'_>) {
        if !self.has_huge_pages {
            return;
        }
        let Some(block) = self.blocks.block_mut(number) else { return };
        block.whole_passes = if is_whole { block.whole_passes.saturating_add(1) } else { 0 };
        // Pages that are about to be merged would be split off again.
        if block.whole_passes < WHOLE_PASSES
            || pass.number < self.no_collapse_before
            || self.planned.iter().any(|item| block_of(item.page) == number)
        {
            return;
        }
        block.whole_passes = 0;
        let range = block.range;
        match self.memory.collapse(range) {
            Ok(true) => {
                self.counters.huge_pages_collapsed += 1;
                self.collapse_failures = 0;
                return;
            }
            Ok(false) => {}
            Err(error) => self.note_memory_error(&error),
        }
        self.collapse_failures = self.collapse_failures.saturating_add(1);
        if let Some(more) = self.collapse_failures.checked_sub(MOST_FAILURES) {
            let pause = u64::from(WHOLE_PASSES) << more.min(MOST_DOUBLINGS);
            self.no_collapse_before = pass.number + pause;
        }
    }

    /// The contents of pages, as far as they can be read. Those with a hash are read only if it is
    /// not `known` to be up to date.
    pub(crate) fn contents_of(&mut self, pages: &[PageNumber], known: Known) -> Vec<PageContent> {
        let mut contents: Vec<(PageNumber, Pfn, Option<PageHash>)> =
            Vec::with_capacity(pages.len());
        for &page in pages {
            let record = self.blocks.record(page);
            let is_known = known == Known::Trusted && record.state().has_hash();
            if let Some(pfn) = self.blocks.pfn(page) {
                contents.push((page, pfn, is_known.then(|| record.hash())));
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
        contents
            .into_iter()
            .filter_map(|(page, pfn, known)| {
                let hash = known.or_else(|| match read.next().flatten()? {
                    Content::Zero => Some(PageHash::ZEROS),
                    Content::Hash(hash) => Some(hash),
                })?;
                Some(PageContent { page, pfn, hash })
            })
            .collect()
    }

    /// Separates zeros from other contents, and finds the nodes of these.
    fn sort_out(&mut self, mut contents: Vec<PageContent>, pass: &Pass<'_>) -> Found {
        let mut found = Found::default();
        if pass.settings.use_zero_pages {
            let is_zero = |content: &PageContent| content.hash == PageHash::ZEROS;
            found.zeros = contents.iter().filter(|c| is_zero(c)).map(|c| c.page).collect();
            contents.retain(|content| !is_zero(content));
        }
        let places: Vec<Pfn> = contents.iter().map(|content| content.pfn).collect();
        let nodes = self.nodes_of(&places, pass);
        for (PageContent { page, hash, .. }, node) in contents.into_iter().zip(nodes) {
            if let Some(node) = node {
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

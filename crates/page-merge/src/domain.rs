//! A machine's memory within its trust domain: the record of each page, the unstable index for each
//! node, and the domain's store of stable pages.

use ebb_guest_ram::{StableSlot, merge::MergeTarget};

use crate::{
    blocks::{Block, Blocks, PageNumber, block_of, first_of},
    hash::{PageHash, PageHasher, Secret},
    memory::{Memory, Node},
    record::{NodeNumber, Record, State},
    settings::{Nodes, Settings},
    statistics::Statistics,
    store::{StableStore, StoreError},
    table::Table,
};

/// Maximum number of pages with one hash in an unstable index. More of them have the same content
/// and cannot be merged at present, or are forged collisions: neither is worth long searches.
const SAME_HASH: usize = 8;

/// Interval, in passes, of retries and of checks of slowly changing state.
pub(crate) const SELDOM_PASSES: u64 = 16;

/// Passes without an error after which the last error is dropped: every failed action has been
/// retried by then.
const CALM_PASSES: u64 = 2 * SELDOM_PASSES;

/// Maximum length of a run that is required when mappings are scarce.
const LONGEST_MIN_RUN: u32 = 64;

/// A pass over all memory, and its settings.
pub(crate) struct Pass<'a> {
    pub(crate) number: u64,
    pub(crate) settings: &'a Settings,
}

impl Pass<'_> {
    /// Whether this block is due for the actions of every [`SELDOM_PASSES`]th pass.
    pub(crate) fn is_turn_of(&self, block: u32) -> bool {
        (self.number + u64::from(block)).is_multiple_of(SELDOM_PASSES)
    }

    /// Whether this block is due for the actions of every fourth such pass only.
    pub(crate) fn is_rare_turn_of(&self, block: u32) -> bool {
        (self.number + u64::from(block)).is_multiple_of(4 * SELDOM_PASSES)
    }

    /// Number of clean scans required beyond the one in which a page is read: it grows with the
    /// number of times that the page changed after it had been hashed or merged.
    pub(crate) fn waits(&self, age: u8) -> u64 {
        const WAITS: [u64; Record::OLDEST as usize + 1] = [0, 2, 4, 8, 16, 32, 32, 32];
        let smart =
            if self.settings.smart_scan { WAITS[usize::from(age.min(Record::OLDEST))] } else { 0 };
        self.ordinary_waits() + smart
    }

    /// The same for a page that has not changed before.
    pub(crate) fn ordinary_waits(&self) -> u64 {
        u64::from(self.settings.clean_passes).saturating_sub(1)
    }

    pub(crate) fn are_apart(&self) -> bool {
        self.settings.merge_across_nodes == Nodes::Apart
    }
}

/// Usability of the store in this pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StoreHealth {
    /// Fully usable.
    Full,
    /// Full: existing stable pages can be shared, and nothing is published.
    LookupOnly,
    /// It does not answer. Pages that it was not queried for are tried later: others may have their
    /// contents.
    Late,
    /// Lost; a lost store usually never comes back.
    Gone,
}

/// A page to be replaced; its slot is reserved.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Planned {
    pub(crate) page: PageNumber,
    pub(crate) hash: PageHash,
    pub(crate) target: MergeTarget,
}

/// A store that is used no longer, but by pages that are still merged.
struct Former<S> {
    store: S,
    /// All its segments have lower numbers, and those of later stores do not.
    end: u32,
}

pub(crate) struct Domain<M, S> {
    pub(crate) memory: M,
    pub(crate) store: S,
    /// Stores used before, of which pages are still shared; the oldest is the first.
    former: Vec<Former<S>>,
    /// Higher than the numbers of all segments that pages have shared.
    segments_end: u32,
    pub(crate) hasher: PageHasher,
    pub(crate) blocks: Blocks,
    /// Nodes by number; the first is [`Node::ANY`].
    pub(crate) nodes: Vec<Node>,
    /// Unstable index by the node's number.
    pub(crate) unstable: Vec<Table>,
    /// The counters that only grow; the other fields are 0.
    pub(crate) counters: Statistics,
    /// Buffer for contents to be published.
    pub(crate) contents: Vec<u8>,
    /// Pages to be replaced; empty between two steps.
    pub(crate) planned: Vec<Planned>,
    pub(crate) health: StoreHealth,
    /// Shortest run that is worth an attempt.
    pub(crate) min_run_pages: u32,
    /// The host has given huge pages to this memory.
    pub(crate) has_huge_pages: bool,
    /// The pass before which no block is to become a huge page, because the last ones could not.
    pub(crate) no_collapse_before: u64,
    /// How many could not, one after another.
    pub(crate) collapse_failures: u32,
    /// Most recent error, for diagnostics.
    pub(crate) last_error: Option<String>,
    /// Passes since that error.
    calm_passes: u64,
}

impl<M: Memory, S: StableStore> Domain<M, S> {
    /// `None` if the memory has more pages than can be numbered.
    pub(crate) fn new(memory: M, store: S, secret: &Secret) -> Option<Self> {
        let mut blocks = Blocks::default();
        memory.ranges().into_iter().all(|range| blocks.add(range)).then(|| Self {
            memory,
            store,
            former: Vec::new(),
            segments_end: 0,
            hasher: PageHasher::new(secret),
            blocks,
            nodes: vec![Node::ANY],
            unstable: vec![Table::default()],
            counters: Statistics::default(),
            contents: Vec::new(),
            planned: Vec::new(),
            health: StoreHealth::Full,
            min_run_pages: 1,
            has_huge_pages: false,
            no_collapse_before: 0,
            collapse_failures: 0,
            last_error: None,
            calm_passes: 0,
        })
    }

    /// Begins a pass: failed actions of the last one are retried.
    pub(crate) fn begin_pass(&mut self, pass: &Pass<'_>) {
        self.health = StoreHealth::Full;
        self.calm_passes += 1;
        if self.calm_passes > CALM_PASSES {
            self.last_error = None;
        }
        if pass.number.is_multiple_of(SELDOM_PASSES) {
            self.min_run_pages /= 2;
            if self.min_run_pages < pass.settings.min_run_pages {
                self.min_run_pages = 1;
            }
        }
    }

    /// The memory refused a run because of its length: from now on only longer ones are worth an
    /// attempt.
    pub(crate) fn require_longer_runs(&mut self, pass: &Pass<'_>) {
        let longer = (self.min_run_pages * 2).min(LONGEST_MIN_RUN);
        self.min_run_pages = longer.max(pass.settings.min_run_pages);
    }

    /// The number of a node; [`NodeNumber::NONE`] if there are too many.
    pub(crate) fn node_number(&mut self, node: Node) -> NodeNumber {
        if let Some(number) = self.nodes.iter().position(|known| *known == node) {
            return NodeNumber(number as u16);
        }
        if self.nodes.len() >= usize::from(NodeNumber::NONE.0) {
            return NodeNumber::NONE;
        }
        self.nodes.push(node);
        self.unstable.push(Table::default());
        NodeNumber(self.nodes.len() as u16 - 1)
    }

    /// Uses another store from now on, whose users hash with `secret`. Its segments have higher
    /// numbers than those of all stores before.
    ///
    /// Merged pages stay merged with stable pages of the former one until they are
    /// [moved](Self::leave_former_stores); all other contents are hashed anew.
    pub(crate) fn renew(&mut self, store: S, secret: &Secret) {
        let former = std::mem::replace(&mut self.store, store);
        self.former.push(Former { store: former, end: self.segments_end });
        self.take_released();
        self.hasher = PageHasher::new(secret);
        for block in 0..self.blocks.len() {
            self.forget_contents(block);
            self.blocks.shrink(block);
        }
        self.health = StoreHealth::Full;
        self.last_error = None;
    }

    pub(crate) fn has_former_stores(&self) -> bool {
        !self.former.is_empty()
    }

    /// Records that a page shares a slot of the store in use now.
    pub(crate) fn note_shared(&mut self, slot: StableSlot) {
        self.store.shared(slot);
        self.segments_end = self.segments_end.max(slot.segment.saturating_add(1));
    }

    /// Whether the slot is not of the store in use.
    pub(crate) fn is_former(&self, slot: StableSlot) -> bool {
        self.former.last().is_some_and(|last| slot.segment < last.end)
    }

    /// The store that a slot is of.
    pub(crate) fn store_of(&mut self, slot: StableSlot) -> &mut S {
        let former = self.former.iter_mut().find(|former| slot.segment < former.end);
        former.map_or(&mut self.store, |former| &mut former.store)
    }

    /// Returns the shares of pages that the owner has discarded, or that were moved, and drops former
    /// stores of which nothing is shared any more.
    pub(crate) fn take_released(&mut self) {
        let mut released = Vec::new();
        self.memory.take_released(&mut released);
        for slot in released {
            self.store_of(slot).release(slot);
        }
        self.former.retain(|former| former.store.counts().pages_shared > 0);
    }

    /// Removes a page from the unstable index, if it is there.
    pub(crate) fn unindex(&mut self, page: PageNumber) {
        let record = self.blocks.record(page);
        if record.state() == State::Unshared {
            let blocks = &self.blocks;
            if let Some(table) = self.unstable.get_mut(usize::from(record.node().0)) {
                table.remove(record.hash(), page, |number| blocks.record(number).hash());
            }
        }
    }

    /// Sets a page's state, and keeps the unstable index consistent.
    pub(crate) fn set_state(&mut self, page: PageNumber, record: Record) {
        self.unindex(page);
        self.blocks.set(page, record);
    }

    /// Watches a page that changed until it has been clean for long enough.
    pub(crate) fn watch(&mut self, page: PageNumber, pass: &Pass<'_>) {
        let mut record = self.blocks.record(page);
        if matches!(record.state(), State::Unshared | State::Refused | State::Merged) {
            record = record.older();
        }
        self.set_state(page, record.with(State::Watched, pass.waits(record.age())));
    }

    /// Puts a page without a duplicate into the unstable index.
    pub(crate) fn insert_unshared(&mut self, page: PageNumber, hash: PageHash, node: NodeNumber) {
        let record = self.blocks.record(page).on(node);
        let unshared = record.with(State::Unshared, hash.get());
        if self.blocks.record(page) == unshared {
            return;
        }
        self.unindex(page);
        let mut same = 0;
        let blocks = &self.blocks;
        let Some(table) = self.unstable.get_mut(usize::from(node.0)) else {
            self.blocks.set(page, record.with(State::Refused, hash.get()));
            return;
        };
        table.find(hash, |number| {
            same += usize::from(blocks.record(number).hash() == hash);
            same >= SAME_HASH
        });
        if same >= SAME_HASH {
            self.blocks.set(page, record.with(State::Refused, hash.get()));
            return;
        }
        table.insert(hash, page, |number| blocks.record(number).hash());
        self.blocks.set(page, unshared);
    }

    /// Resets the records of a block's pages. Shares are not affected.
    pub(crate) fn forget_block(&mut self, block: u32) {
        let pages = self.blocks.block(block).and_then(Block::records).map_or(0, <[Record]>::len);
        (first_of(block)..).take(pages).for_each(|page| self.unindex(page));
        self.blocks.forget(block);
    }

    /// Resets the records of a block's pages that are neither merged nor zeroed.
    pub(crate) fn forget_contents(&mut self, block: u32) {
        let pages = self.blocks.block(block).and_then(Block::records).map_or(0, <[Record]>::len);
        for page in (first_of(block)..).take(pages) {
            if !matches!(self.blocks.record(page).state(), State::Merged | State::Zeroed) {
                self.set_state(page, Record::UNKNOWN);
            }
        }
    }

    /// Zero pages are discarded from now on: those that wait for a partner are read again.
    pub(crate) fn watch_zeros(&mut self) {
        let mut zeros = Vec::new();
        for table in &self.unstable {
            table.find(PageHash::ZEROS, |page| {
                zeros.extend((self.blocks.record(page).hash() == PageHash::ZEROS).then_some(page));
                false
            });
        }
        for page in zeros {
            match self.blocks.block_mut(block_of(page)) {
                // It is judged again.
                Some(block) if block.huge => block.reading.due_in = 0,
                _ => {
                    let record = self.blocks.record(page);
                    self.set_state(page, record.with(State::Watched, 0));
                }
            }
        }
    }

    /// Unmerges all pages of a block, and resets their records. After an error some may still be
    /// merged.
    pub(crate) fn unmerge_block(&mut self, block: u32) -> Result<(), M::Error> {
        let Some(range) = self.blocks.block(block).map(|block| block.range) else { return Ok(()) };
        let mut released = Vec::new();
        let outcome = self.memory.unmerge(range, &mut released);
        for slot in released {
            self.store_of(slot).release(slot);
        }
        self.take_released();
        if outcome.is_ok() {
            self.forget_block(block);
        }
        outcome
    }

    /// Resets everything except the shares, for a restart under other rules.
    pub(crate) fn forget_all(&mut self) {
        for block in 0..self.blocks.len() {
            self.forget_block(block);
        }
        self.nodes.truncate(1);
        self.unstable = vec![Table::default()];
    }

    pub(crate) fn note_store_error(&mut self, error: &StoreError) {
        self.counters.store_errors += 1;
        self.health = match error {
            StoreError::NoRoom { .. } => StoreHealth::LookupOnly,
            StoreError::Late(_) => StoreHealth::Late,
            StoreError::Gone(_) => StoreHealth::Gone,
        };
        // The loss of a store is logged elsewhere, once.
        if self.is_worth_a_line(self.counters.store_errors) && self.health != StoreHealth::Gone {
            tracing::warn!(%error, "some pages are merged later");
        } else {
            tracing::debug!(%error, "some pages are merged later");
        }
        self.note_error(error.to_string());
    }

    pub(crate) fn note_memory_error(&mut self, error: &M::Error) {
        self.counters.memory_errors += 1;
        if self.is_worth_a_line(self.counters.memory_errors) {
            tracing::warn!(%error, "some memory could not be merged");
        }
        self.note_error(error.to_string());
    }

    /// Whether to log an error, the `count`th of its kind: the first one after an error-free
    /// period, and then with decreasing frequency.
    fn is_worth_a_line(&self, count: u64) -> bool {
        self.last_error.is_none() || count.is_power_of_two()
    }

    fn note_error(&mut self, text: String) {
        (self.last_error, self.calm_passes) = (Some(text), 0);
    }

    /// The statistics so far.
    pub(crate) fn statistics(&self) -> Statistics {
        let mut counts = self.store.counts();
        for former in &self.former {
            let former = former.store.counts();
            counts.pages_shared += former.pages_shared;
            counts.metadata_bytes += former.metadata_bytes;
        }
        let merged_pages = self.blocks.count(State::Merged);
        let ksm_zero_pages = self.blocks.count(State::Zeroed);
        let pages_sharing = merged_pages.saturating_sub(counts.pages_shared);
        let indexes: u64 = self.unstable.iter().map(Table::memory_bytes).sum();
        let metadata_bytes = self.blocks.memory_bytes() + indexes + counts.metadata_bytes;
        let broken_cow = self.memory.broken_cow_stats();
        Statistics {
            pages_shared: counts.pages_shared,
            pages_sharing,
            pages_unshared: self.blocks.count(State::Unshared),
            pages_volatile: self.blocks.count(State::Watched) + self.blocks.count(State::Seen),
            pages_refused: self.blocks.count(State::Refused),
            ksm_zero_pages,
            merged_pages,
            remote_merged_pages: self.blocks.remote(),
            stable_node_chains: counts.stable_node_chains,
            stable_node_dups: counts.stable_node_dups,
            metadata_bytes,
            general_profit: ((pages_sharing + ksm_zero_pages) * ebb_abi::PAGE_SIZE_BYTES) as i64
                - metadata_bytes as i64,
            brought_back_pages: broken_cow.brought_back_pages,
            remerged_pages: broken_cow.remerged_pages,
            ..self.counters.clone()
        }
    }
}

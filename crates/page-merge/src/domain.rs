//! One trust domain: its members' pages, its unstable index for each node, and its store of stable
//! pages.

use std::collections::BTreeSet;

use ebb_abi::PageRange;

use crate::{
    blocks::{Block, Blocks, PageNumber, block_of, cut, first_of},
    hash::PageHasher,
    memory::{Memory, Node, PageHash, Secret},
    record::{NodeNumber, Record, State},
    replace::Planned,
    settings::{Nodes, Settings},
    statistics::{Counters, Statistics},
    store::{Slot, StableStore, StoreError},
    table::Table,
};

/// Pages of one hash in an unstable index at most. More of them have the same content and cannot be
/// merged for now, or somebody has found a way to make hashes collide: neither is worth long
/// searches.
const SAME_HASH: usize = 8;

/// Passes after which what could not be done, or seldom changes, is looked at again.
pub(crate) const SELDOM_PASSES: u64 = 16;

/// Passes without an error after which the last one is of no interest any more: what could not be
/// done was tried again by then.
const CALM_PASSES: u64 = 2 * SELDOM_PASSES;

/// Longest run that is waited for when mappings are scarce.
const LONGEST_MIN_RUN: u32 = 64;

/// Pass of the scan over all memory, and how it is done.
pub(crate) struct Pass<'a> {
    pub(crate) number: u64,
    pub(crate) settings: &'a Settings,
}

impl Pass<'_> {
    /// Whether it is this block's turn for what is done only every [`SELDOM_PASSES`] passes.
    pub(crate) fn is_turn_of(&self, block: u32) -> bool {
        (self.number + u64::from(block)).is_multiple_of(SELDOM_PASSES)
    }

    /// Whether it is this block's turn for what is done every fourth such pass only.
    pub(crate) fn is_rare_turn_of(&self, block: u32) -> bool {
        (self.number + u64::from(block)).is_multiple_of(4 * SELDOM_PASSES)
    }

    /// Clean looks that a page must have had, beyond the one that is its turn to be read: the more,
    /// the more often it changed after it had been hashed or merged.
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

/// What the store is good for in this pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Help {
    /// Everything.
    Full,
    /// It has no room: what is there can be shared, and nothing is published.
    Known,
    /// It does not answer. Pages that it was not asked for are tried later: somebody else may have
    /// what they contain.
    Late,
    /// It is gone, for good as a rule.
    None,
}

/// The memory of one virtual machine.
pub(crate) struct Member<M> {
    pub(crate) memory: M,
    pub(crate) ranges: Vec<PageRange>,
    /// Shortest run that is worth a try.
    pub(crate) min_run_pages: u32,
    /// The memory refused a run in this pass because of its length.
    pub(crate) refused_short_runs: bool,
}

pub(crate) struct Domain<M, S> {
    pub(crate) store: S,
    pub(crate) secret: Secret,
    pub(crate) hasher: PageHasher,
    pub(crate) members: Vec<Option<Member<M>>>,
    pub(crate) blocks: Blocks,
    /// Nodes by number; the first is [`Node::ANY`].
    pub(crate) nodes: Vec<Node>,
    /// Unstable index by the node's number.
    pub(crate) unstable: Vec<Table>,
    pub(crate) counters: Counters,
    /// Room for contents that are about to be published.
    pub(crate) contents: Vec<u8>,
    /// Pages that are about to be replaced; none between two steps.
    pub(crate) planned: Vec<Planned>,
    /// What the store is good for in this pass.
    pub(crate) help: Help,
    /// The last error, for whoever wonders.
    pub(crate) last_error: Option<String>,
    /// Passes since then.
    calm_passes: u64,
}

impl<M: Memory, S: StableStore> Domain<M, S> {
    pub(crate) fn new(store: S, secret: Secret) -> Self {
        Self {
            store,
            secret,
            hasher: PageHasher::new(&secret),
            members: Vec::new(),
            blocks: Blocks::default(),
            nodes: vec![Node::ANY],
            unstable: vec![Table::default()],
            counters: Counters::default(),
            contents: Vec::new(),
            planned: Vec::new(),
            help: Help::Full,
            last_error: None,
            calm_passes: 0,
        }
    }

    /// Adds a member; gives the memory back if the domain is full.
    pub(crate) fn add_member(&mut self, memory: M) -> Result<usize, M> {
        let number = self.members.iter().position(Option::is_none).unwrap_or(self.members.len());
        let ranges = memory.ranges();
        for range in &ranges {
            if !self.blocks.add(number as u32, *range) {
                self.remove_blocks(number as u32);
                return Err(memory);
            }
        }
        let member = Some(Member { memory, ranges, min_run_pages: 1, refused_short_runs: false });
        match self.members.get_mut(number) {
            Some(place) => *place = member,
            None => self.members.push(member),
        }
        Ok(number)
    }

    /// Removes a member whose memory is about to go away, and gives up its shares.
    pub(crate) fn remove_member(&mut self, number: usize) -> Option<(M, Result<(), M::Error>)> {
        self.take_released(number);
        let mut member = self.members.get_mut(number)?.take()?;
        let mut released = Vec::new();
        let mut outcome = Ok(());
        for range in &member.ranges {
            if let Err(error) = member.memory.abandon(*range, &mut released) {
                outcome = Err(error);
            }
        }
        member.memory.take_released(&mut released);
        self.counters.returns += member.memory.returns();
        for slot in released {
            self.store.release(slot);
        }
        self.remove_blocks(number as u32);
        Some((member.memory, outcome))
    }

    fn remove_blocks(&mut self, member: u32) {
        for block in self.blocks.of_member(member) {
            self.forget_block(block);
            self.blocks.remove(block);
        }
    }

    /// Takes over what has changed in the members' layout, and begins a pass.
    pub(crate) fn begin_pass(&mut self, pass: &Pass<'_>) {
        self.help = Help::Full;
        self.calm_passes += 1;
        if self.calm_passes > CALM_PASSES {
            self.last_error = None;
        }
        for number in 0..self.members.len() {
            let Some(member) = self.members[number].as_mut() else { continue };
            if member.refused_short_runs {
                member.min_run_pages =
                    (member.min_run_pages * 2).clamp(pass.settings.min_run_pages, LONGEST_MIN_RUN);
            } else if pass.number.is_multiple_of(SELDOM_PASSES) {
                member.min_run_pages /= 2;
                if member.min_run_pages < pass.settings.min_run_pages {
                    member.min_run_pages = 1;
                }
            }
            member.refused_short_runs = false;
            let ranges = member.memory.ranges();
            if ranges != member.ranges {
                self.change_ranges(number, ranges);
            }
        }
    }

    /// The member's memory has another layout: pages that are no longer part of it get pages of
    /// their own again. If that fails, the old layout is kept, and the next pass tries again.
    fn change_ranges(&mut self, number: usize, ranges: Vec<PageRange>) {
        let mut missing: BTreeSet<PageRange> = ranges.iter().copied().flat_map(cut).collect();
        for block in self.blocks.of_member(number as u32) {
            let Some(old) = self.blocks.block(block).map(|block| block.range) else { continue };
            if missing.remove(&old) {
                continue;
            }
            if let Err(error) = self.unmerge_block(block) {
                self.note_memory_error(&error);
                return;
            }
            self.blocks.remove(block);
        }
        for block in missing {
            // There was room for the old layout; what does not fit is not looked at.
            self.blocks.add_block(number as u32, block);
        }
        if let Some(Some(member)) = self.members.get_mut(number) {
            member.ranges = ranges;
        }
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

    /// Gives back shares of pages that the owner has discarded.
    pub(crate) fn take_released(&mut self, member: usize) {
        let Some(Some(member)) = self.members.get_mut(member) else { return };
        let mut released = Vec::new();
        member.memory.take_released(&mut released);
        for slot in released {
            self.store.release(slot);
        }
    }

    /// Takes a page out of the unstable index, if it is there.
    pub(crate) fn unindex(&mut self, page: PageNumber) {
        let record = self.blocks.record(page);
        if record.state() == State::Unshared {
            let blocks = &self.blocks;
            if let Some(table) = self.unstable.get_mut(usize::from(record.node().0)) {
                table.remove(record.hash(), page, |number| blocks.record(number).hash());
            }
        }
    }

    /// Sets a page's state, and keeps the unstable index in step.
    pub(crate) fn set_state(&mut self, page: PageNumber, record: Record) {
        self.unindex(page);
        self.blocks.set(page, record);
    }

    /// The page changed: it is watched until it has been clean for long enough.
    pub(crate) fn watch(&mut self, page: PageNumber, pass: &Pass<'_>) {
        let mut record = self.blocks.record(page);
        if matches!(record.state(), State::Unshared | State::Refused | State::Merged) {
            record = record.older();
        }
        self.set_state(page, record.with(State::Watched, pass.waits(record.age())));
    }

    /// Puts a page without a duplicate into the unstable index.
    pub(crate) fn insert_unshared(&mut self, page: PageNumber, hash: PageHash, node: NodeNumber) {
        self.unindex(page);
        let record = self.blocks.record(page).on(node);
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
        self.blocks.set(page, record.with(State::Unshared, hash.get()));
    }

    /// Forgets what is known of a block's pages. Shares are not touched.
    pub(crate) fn forget_block(&mut self, block: u32) {
        let pages = self.blocks.block(block).and_then(Block::records).map_or(0, <[Record]>::len);
        (first_of(block)..).take(pages).for_each(|page| self.unindex(page));
        self.blocks.forget(block);
    }

    /// Zeros are to be taken away from now on: those that wait for a partner are read again.
    pub(crate) fn watch_zeros(&mut self) {
        let mut zeros = Vec::new();
        for table in &self.unstable {
            table.find(PageHash::ZEROS, |page| {
                zeros.extend((self.blocks.record(page).hash() == PageHash::ZEROS).then_some(page));
                false
            });
        }
        for page in zeros {
            let record = self.blocks.record(page);
            self.set_state(page, record.with(State::Watched, 0));
            if let Some(block) = self.blocks.block_mut(block_of(page)) {
                // A huge page is judged once more.
                block.cold_passes = 0;
            }
        }
    }

    /// Gives all pages of a block pages of their own again, and forgets them. After an error some
    /// may still be merged.
    pub(crate) fn unmerge_block(&mut self, block: u32) -> Result<(), M::Error> {
        let Some((member, range)) =
            self.blocks.block(block).map(|block| (block.member as usize, block.range))
        else {
            return Ok(());
        };
        let mut released = Vec::new();
        let outcome = match self.members.get_mut(member) {
            Some(Some(member)) => member.memory.unmerge(range, &mut released),
            _ => Ok(()),
        };
        for slot in released {
            self.store.release(slot);
        }
        self.take_released(member);
        if outcome.is_ok() {
            self.forget_block(block);
        }
        outcome
    }

    /// Forgets everything but the shares, for a new start under other rules.
    pub(crate) fn forget_all(&mut self) {
        for block in 0..self.blocks.len() {
            self.forget_block(block);
        }
        self.nodes.truncate(1);
        self.unstable = vec![Table::default()];
    }

    /// Pages of this domain that have a share.
    pub(crate) fn merged_pages(&self) -> u64 {
        self.blocks.count(State::Merged)
    }

    /// A page's member, if it is still there.
    pub(crate) fn member_of(&mut self, page: PageNumber) -> Option<&mut Member<M>> {
        let number = self.blocks.block(block_of(page))?.member as usize;
        self.members.get_mut(number)?.as_mut()
    }

    /// A page's share is gone.
    pub(crate) fn release(&mut self, slot: Slot) {
        self.store.release(slot);
    }

    pub(crate) fn note_store_error(&mut self, error: &StoreError) {
        self.counters.store_errors += 1;
        self.help = match error {
            StoreError::NoRoom { .. } => Help::Known,
            StoreError::Late(_) => Help::Late,
            StoreError::Gone(_) => Help::None,
        };
        // A store that is gone is so for good, and its owner has said so already.
        if self.is_worth_a_line(self.counters.store_errors) && self.help != Help::None {
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

    /// Whether an error should be told, as the `count`th of its kind: the first one after a calm
    /// time, and then ever fewer.
    fn is_worth_a_line(&self, count: u64) -> bool {
        self.last_error.is_none() || count.is_power_of_two()
    }

    fn note_error(&mut self, text: String) {
        (self.last_error, self.calm_passes) = (Some(text), 0);
    }

    /// Memory of tables.
    fn metadata_bytes(&self) -> u64 {
        let indexes: u64 = self.unstable.iter().map(Table::memory_bytes).sum();
        self.blocks.memory_bytes() + indexes + self.store.counts().metadata_bytes
    }

    /// Adds this domain's numbers to `statistics`.
    pub(crate) fn add_to(&self, statistics: &mut Statistics) {
        let counts = self.store.counts();
        let (merged, zeroed) = (self.merged_pages(), self.blocks.count(State::Zeroed));
        let sharing = merged.saturating_sub(counts.pages_shared);
        let metadata = self.metadata_bytes();
        self.counters.add_to(statistics);
        for member in self.members.iter().flatten() {
            statistics.add_returns(member.memory.returns());
        }
        statistics.pages_shared += counts.pages_shared;
        statistics.pages_sharing += sharing;
        statistics.pages_unshared += self.blocks.count(State::Unshared);
        statistics.pages_volatile += self.blocks.count(State::Watched);
        statistics.pages_refused += self.blocks.count(State::Refused);
        statistics.ksm_zero_pages += zeroed;
        statistics.merged_pages += merged;
        statistics.remote_merged_pages += self.blocks.remote();
        statistics.stable_node_chains += counts.stable_node_chains;
        statistics.stable_node_dups += counts.stable_node_dups;
        statistics.metadata_bytes += metadata;
        statistics.general_profit +=
            ((sharing + zeroed) * ebb_abi::PAGE_SIZE_BYTES) as i64 - metadata as i64;
    }
}

//! Replaces pages, and takes over what became of each.

use ebb_abi::{PageRange, Pfn};

use crate::{
    blocks::PageNumber,
    domain::{Domain, Pass},
    memory::{Memory, PageHash, Replace, Replaced, Target},
    record::{NodeNumber, Record, State},
    store::StableStore,
};

/// A page that is to be replaced; for a slot there is a reservation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Planned {
    pub(crate) page: PageNumber,
    pub(crate) hash: PageHash,
    pub(crate) target: Target,
}

/// Calls `tell` for each of `count` places in runs that are shorter than the least length that
/// `least` says for a place.
pub(crate) fn pages_in_short_runs(
    count: usize,
    follows: impl Fn(usize, usize) -> bool,
    least: impl Fn(usize) -> u32,
    mut tell: impl FnMut(usize),
) {
    let mut begin = 0;
    while begin < count {
        let mut end = begin + 1;
        while end < count && follows(end - 1, end) {
            end += 1;
        }
        if end - begin < least(begin) as usize {
            (begin..end).for_each(&mut tell);
        }
        begin = end;
    }
}

/// Whether both are replaced in one go.
fn are_one_run(a: &Replace, b: &Replace) -> bool {
    a.page.0 + 1 == b.page.0
        && match (a.target, b.target) {
            (Target::Slot(a), Target::Slot(b)) => a.is_followed_by(b),
            (Target::Zero, Target::Zero) => true,
            _ => false,
        }
}

impl<M: Memory, S: StableStore> Domain<M, S> {
    /// A page is to be replaced soon, together with others near it: the fewer steps for the same
    /// pages, the less each costs.
    pub(crate) fn plan(&mut self, item: Planned) {
        let record = self.blocks.record(item.page);
        if record.state() == State::Unshared {
            // It shall not be found, and planned, once more.
            self.set_state(item.page, record.with(State::Watched, 0));
        }
        self.planned.push(item);
    }

    /// Replaces all pages that are planned to be, of whatever members. Every reservation is used up
    /// or given back.
    pub(crate) fn replace_planned(&mut self, pass: &Pass<'_>) {
        let mut order: Vec<(u32, Pfn, Planned)> = Vec::with_capacity(self.planned.len());
        for item in std::mem::take(&mut self.planned) {
            match self.blocks.page(item.page) {
                Some((member, pfn)) => order.push((member, pfn, item)),
                None => self.give_back(&item),
            }
        }
        order.sort_unstable_by_key(|(member, pfn, _)| (*member, *pfn));
        let mut begin = 0;
        while begin < order.len() {
            let member = order[begin].0;
            let end = order[begin..]
                .iter()
                .position(|item| item.0 != member)
                .map_or(order.len(), |n| begin + n);
            self.replace_in(member as usize, &order[begin..end], pass);
            begin = end;
        }
    }

    fn replace_in(&mut self, number: usize, items: &[(u32, Pfn, Planned)], pass: &Pass<'_>) {
        let Some(Some(member)) = self.members.get_mut(number) else {
            for (_, _, item) in items {
                self.give_back(item);
            }
            return;
        };
        let mut list: Vec<Replace> = items
            .iter()
            .map(|(_, pfn, item)| Replace { page: *pfn, target: item.target })
            .collect();
        let mut tried = vec![true; list.len()];
        if member.min_run_pages > 1 {
            let follows = |a: usize, b: usize| are_one_run(&list[a], &list[b]);
            let least = |place: usize| {
                if list[place].target == Target::Zero { 1 } else { member.min_run_pages }
            };
            pages_in_short_runs(list.len(), follows, least, |place| tried[place] = false);
        }
        let mut kept = tried.iter();
        list.retain(|_| kept.next().copied().unwrap_or(true));
        let pages: Vec<Pfn> = list.iter().map(|item| item.page).collect();

        // Where the pages are before they are merged: their own node, whatever index they belong
        // to.
        let homes = self.where_are(number, &pages);
        let mut told = Vec::with_capacity(list.len());
        if let Some(Some(member)) = self.members.get_mut(number)
            && !list.is_empty()
            && let Err(error) = member.memory.replace(&list, &mut told)
        {
            self.note_memory_error(&error);
        }
        let mut outcomes = told.into_iter().zip(homes);
        let mut merged = Vec::new();
        for ((_, _, item), tried) in items.iter().zip(tried) {
            if tried {
                let (outcome, home) =
                    outcomes.next().map_or((None, None), |(outcome, home)| (Some(outcome), home));
                if outcome == Some(Replaced::NoMappings)
                    && let Some(Some(member)) = self.members.get_mut(number)
                {
                    member.refused_short_runs = true;
                }
                self.note_outcome(item, outcome, home, pass);
                if outcome == Some(Replaced::Done) && item.target != Target::Zero {
                    merged.push(item.page);
                }
            } else {
                self.note_outcome(item, Some(Replaced::NoMappings), None, pass);
            }
        }
        self.note_nodes_of_merged(&merged, pass);
    }

    /// A page is not replaced: its reservation is not needed.
    fn give_back(&mut self, item: &Planned) {
        if let Target::Slot(slot) = item.target {
            self.store.unused(slot);
        }
    }

    fn note_outcome(
        &mut self,
        item: &Planned,
        outcome: Option<Replaced>,
        home: Option<NodeNumber>,
        pass: &Pass<'_>,
    ) {
        let record = self.blocks.record(item.page);
        let Some(outcome) = outcome else {
            // The memory failed before this page.
            self.give_back(item);
            self.set_state(item.page, record.with(State::Watched, pass.waits(record.age())));
            return;
        };
        if outcome != Replaced::Done {
            self.give_back(item);
        }
        match outcome {
            Replaced::Done => {
                self.counters.replaced_done += 1;
                let record = match item.target {
                    Target::Zero => record.with(State::Zeroed, 0),
                    Target::Slot(slot) => {
                        self.store.shared(slot);
                        record.on(home.unwrap_or(NodeNumber::NONE)).with(State::Merged, 0)
                    }
                };
                // The index still has the page under its old record.
                self.set_state(item.page, record);
            }
            Replaced::Different => {
                self.counters.replaced_different += 1;
                let record = record.older();
                self.set_state(item.page, record.with(State::Watched, pass.waits(record.age())));
            }
            Replaced::Busy => {
                self.counters.replaced_busy += 1;
                self.set_state(item.page, record.with(State::Refused, item.hash.get()));
            }
            Replaced::NoMappings => {
                self.counters.replaced_no_mappings += 1;
                self.set_state(item.page, record.with(State::Refused, item.hash.get()));
            }
            Replaced::Gone => {
                self.counters.replaced_gone += 1;
                self.set_state(item.page, Record::UNKNOWN);
            }
        }
    }

    /// Looks up where merged pages (ascending, of one member) are now, and compares with where they
    /// were before. Where nodes are kept apart, those on another node are given pages of their own
    /// again.
    pub(crate) fn note_nodes_of_merged(&mut self, pages: &[PageNumber], pass: &Pass<'_>) {
        let Some(&first) = pages.first() else { return };
        let Some((member, _)) = self.blocks.page(first) else { return };
        let member = member as usize;
        let places: Vec<Pfn> =
            pages.iter().filter_map(|&page| self.blocks.page(page).map(|(_, pfn)| pfn)).collect();
        let nodes = self.where_are(member, &places);
        for ((&page, pfn), node) in pages.iter().zip(places).zip(nodes) {
            let record = self.blocks.record(page);
            let Some(node) = node else { continue };
            let home = if record.node() == NodeNumber::NONE { node } else { record.node() };
            let remote = node != home;
            if remote && pass.are_apart() {
                self.unmerge_moved(member, page, pfn);
            } else {
                self.blocks.set(page, record.on(home).with(State::Merged, u64::from(remote)));
            }
        }
    }

    /// The stable page behind a merged page is on the wrong node: nobody shall share it any more.
    fn unmerge_moved(&mut self, member: usize, page: PageNumber, pfn: Pfn) {
        let Some(Some(owner)) = self.members.get_mut(member) else { return };
        let mut released = Vec::new();
        let outcome = owner.memory.unmerge(PageRange::new(pfn, 1), &mut released);
        for slot in released {
            self.store.retire(slot);
            self.store.release(slot);
        }
        match outcome {
            Ok(()) => {
                self.counters.moved_pages += 1;
                let record = self.blocks.record(page);
                self.set_state(page, record.on(NodeNumber::NONE).with(State::Watched, 0));
            }
            Err(error) => {
                let record = self.blocks.record(page);
                self.blocks.set(page, record.with(State::Merged, 1));
                self.note_memory_error(&error);
            }
        }
    }
}

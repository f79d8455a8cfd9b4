//! Replaces pages, and processes the outcome of each.

use ebb_abi::Pfn;
use ebb_guest_ram::merge::{MergeOutcome, MergeTarget};

use crate::{
    domain::{Domain, Pass, Planned},
    memory::Memory,
    record::{NodeNumber, Record, State},
    store::StableStore,
};

/// Calls `report` for each of `count` places in runs shorter than the minimum that `least` returns
/// for a place.
pub(crate) fn pages_in_short_runs(
    count: usize,
    follows: impl Fn(usize, usize) -> bool,
    least: impl Fn(usize) -> u32,
    mut report: impl FnMut(usize),
) {
    let mut begin = 0;
    while begin < count {
        let mut end = begin + 1;
        while end < count && follows(end - 1, end) {
            end += 1;
        }
        if end - begin < least(begin) as usize {
            (begin..end).for_each(&mut report);
        }
        begin = end;
    }
}

/// Whether both are replaced together.
fn are_one_run(a: &(Pfn, MergeTarget), b: &(Pfn, MergeTarget)) -> bool {
    a.0.0 + 1 == b.0.0
        && match (a.1, b.1) {
            (MergeTarget::Slot(a), MergeTarget::Slot(b)) => a.is_followed_by(b),
            (MergeTarget::Zero, MergeTarget::Zero) => true,
            _ => false,
        }
}

impl<M: Memory, S: StableStore> Domain<M, S> {
    /// Plans to replace a page, together with others near it: the fewer steps for the same pages,
    /// the less each costs.
    pub(crate) fn plan(&mut self, item: Planned) {
        let record = self.blocks.record(item.page);
        if record.state() == State::Unshared {
            // The page must not be found, and planned, again.
            self.set_state(item.page, record.with(State::Watched, 0));
        }
        self.planned.push(item);
    }

    /// Replaces all planned pages. Every reservation is used or returned.
    pub(crate) fn replace_planned(&mut self, pass: &Pass<'_>) {
        let mut items: Vec<(Pfn, Planned)> = Vec::with_capacity(self.planned.len());
        for item in std::mem::take(&mut self.planned) {
            match self.blocks.pfn(item.page) {
                Some(pfn) => items.push((pfn, item)),
                None => self.give_back(&item),
            }
        }
        if items.is_empty() {
            return;
        }
        items.sort_unstable_by_key(|(pfn, _)| *pfn);
        let mut list: Vec<(Pfn, MergeTarget)> =
            items.iter().map(|(pfn, item)| (*pfn, item.target)).collect();
        let mut tried = vec![true; list.len()];
        if self.min_run_pages > 1 {
            let follows = |a: usize, b: usize| are_one_run(&list[a], &list[b]);
            let least = |place: usize| {
                if list[place].1 == MergeTarget::Zero { 1 } else { self.min_run_pages }
            };
            pages_in_short_runs(list.len(), follows, least, |place| tried[place] = false);
        }
        let mut kept = tried.iter();
        list.retain(|_| kept.next().copied().unwrap_or(true));
        let pages: Vec<Pfn> = list.iter().map(|(pfn, _)| *pfn).collect();

        // The nodes of the pages before they are merged, whatever index they belong to.
        let homes = self.nodes_now(&pages);
        let mut outcomes = Vec::with_capacity(list.len());
        if !list.is_empty()
            && let Err(error) = self.memory.replace(&list, &mut outcomes)
        {
            self.note_memory_error(&error);
        }
        let mut outcomes = outcomes.into_iter().zip(homes);
        let mut merged = Vec::new();
        let mut refused_runs = false;
        for ((_, item), tried) in items.iter().zip(tried) {
            let (outcome, home) = if tried {
                outcomes.next().map_or((None, None), |(outcome, home)| (Some(outcome), home))
            } else {
                (Some(MergeOutcome::NoMappings), None)
            };
            refused_runs |= tried && outcome == Some(MergeOutcome::NoMappings);
            self.note_outcome(item, outcome, home, pass);
            if outcome == Some(MergeOutcome::Done) && item.target != MergeTarget::Zero {
                merged.push(item.page);
            }
        }
        if refused_runs {
            self.require_longer_runs(pass);
        }
        self.note_nodes_of_merged(&merged, pass);
    }

    /// Returns the reservation of a page that is not replaced.
    fn give_back(&mut self, item: &Planned) {
        if let MergeTarget::Slot(slot) = item.target {
            self.store.unused(slot);
        }
    }

    fn note_outcome(
        &mut self,
        item: &Planned,
        outcome: Option<MergeOutcome>,
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
        if outcome != MergeOutcome::Done {
            self.give_back(item);
        }
        match outcome {
            MergeOutcome::Done => {
                self.counters.replaced_done += 1;
                let record = match item.target {
                    MergeTarget::Zero => record.with(State::Zeroed, 0),
                    MergeTarget::Slot(slot) => {
                        self.note_shared(slot);
                        record.on(home.unwrap_or(NodeNumber::NONE)).with(State::Merged, 0)
                    }
                };
                // The index still has the page under its old record.
                self.set_state(item.page, record);
            }
            MergeOutcome::Different => {
                self.counters.replaced_different += 1;
                let record = record.older();
                self.set_state(item.page, record.with(State::Watched, pass.waits(record.age())));
            }
            MergeOutcome::Busy => {
                self.counters.replaced_busy += 1;
                self.set_state(item.page, record.with(State::Refused, item.hash.get()));
            }
            MergeOutcome::NoMappings => {
                self.counters.replaced_no_mappings += 1;
                self.set_state(item.page, record.with(State::Refused, item.hash.get()));
            }
            MergeOutcome::Gone => {
                self.counters.replaced_gone += 1;
                self.set_state(item.page, Record::UNKNOWN);
            }
        }
    }
}

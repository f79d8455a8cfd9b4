//! A guest's memory, as seen by the core.

use ebb_abi::{PAGE_SIZE_BYTES, PageRange, Pfn};
use ebb_guest_ram::StableSlot;
use ebb_guest_ram::merge::{MergeOutcome, MergeTarget, PageLook};

use super::world::{Backing, Guest, Inner, Page, World};
use crate::{Content, Memory, PageHasher, memory::BLOCK_PAGES};

/// Simulated memory of one process.
#[derive(Clone, Debug)]
pub struct SimMemory {
    world: World,
    number: usize,
}

/// The simulation was configured to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("simulated failure")]
pub struct Failure;

/// A page full of one number.
fn page_of(content: u64) -> Vec<u8> {
    content.to_le_bytes().repeat(PAGE_SIZE_BYTES as usize / 8)
}

impl Guest {
    /// This machine's memory, to be merged.
    pub fn memory(&self) -> SimMemory {
        SimMemory { world: self.world.clone(), number: self.number }
    }
}

impl Inner {
    fn may_fail(&mut self, vm: usize) -> Result<(), Failure> {
        match self.vms[vm].failing.checked_sub(1) {
            Some(left) => {
                self.vms[vm].failing = left;
                Err(Failure)
            }
            None => Ok(()),
        }
    }

    fn look(page: &mut Page) -> PageLook {
        if page.excluded {
            // Merged pages stay merged, and writes are reported all the same.
            if let Some(slot) = page.lost.take() {
                return PageLook::Broken(slot);
            }
            return if matches!(page.backing, Backing::Merged(_)) {
                PageLook::Merged
            } else {
                PageLook::Excluded
            };
        }
        match (page.lost.take(), page.backing) {
            (Some(slot), _) => PageLook::Broken(slot),
            (None, Backing::Private) if page.copied > 0 => {
                page.copied -= 1;
                // The anonymous page is new.
                page.written = true;
                PageLook::Copied
            }
            (None, Backing::Absent) => PageLook::Absent,
            (None, Backing::Merged(_)) => PageLook::Merged,
            (None, Backing::Private) if std::mem::take(&mut page.written) => PageLook::Written,
            (None, Backing::Private) => PageLook::Clean,
            (None, Backing::Huge) => PageLook::Huge,
        }
    }

    fn replace(&mut self, vm: usize, &(pfn, target): &(Pfn, MergeTarget)) -> MergeOutcome {
        let content = self.content(vm, pfn);
        let Some(page) = self.vms[vm].pages.get(&pfn).copied() else {
            return MergeOutcome::Gone;
        };
        match page.backing {
            // A page that has not yet reported its lost share must do so first.
            Backing::Absent | Backing::Merged(_) => return MergeOutcome::Gone,
            _ if page.excluded || page.lost.is_some() || page.copied > 0 => {
                return MergeOutcome::Gone;
            }
            _ if page.pinned => return MergeOutcome::Busy,
            _ => {}
        }
        let wanted = match target {
            MergeTarget::Zero => Some(0),
            MergeTarget::Slot(slot) => match self.slots.get(&slot) {
                Some(stable) => stable.content,
                None => panic!("{pfn} should be replaced by {slot:?}, which is free"),
            },
        };
        if wanted != content {
            return MergeOutcome::Different;
        }
        let backing = match target {
            MergeTarget::Zero => Backing::Absent,
            MergeTarget::Slot(slot) => Backing::Merged(slot),
        };
        if let Some(place) = self.vms[vm].pages.get_mut(&pfn) {
            *place = Page { backing, content: 0, written: false, ..*place };
        }
        if let MergeTarget::Slot(slot) = target
            && let Some(stable) = self.slots.get_mut(&slot)
        {
            stable.mapped += 1;
        }
        MergeOutcome::Done
    }

    fn move_share(&mut self, vm: usize, pfn: Pfn, to: StableSlot) -> MergeOutcome {
        let Some(Backing::Merged(from)) = self.vms[vm].pages.get(&pfn).map(|page| page.backing)
        else {
            return MergeOutcome::Gone;
        };
        if from == to {
            return MergeOutcome::Gone;
        }
        let content = self.slots.get(&from).and_then(|stable| stable.content);
        match self.slots.get_mut(&to) {
            None => panic!("{pfn} should share {to:?}, which is free"),
            Some(stable) if stable.content != content => return MergeOutcome::Different,
            Some(stable) => stable.mapped += 1,
        }
        self.unmap(from);
        self.vms[vm].released.push(from);
        if let Some(page) = self.vms[vm].pages.get_mut(&pfn) {
            page.backing = Backing::Merged(to);
        }
        MergeOutcome::Done
    }

    /// Undoes a replacement of what was `before`.
    fn undo(&mut self, vm: usize, (pfn, target): (Pfn, MergeTarget), before: Page) {
        if let MergeTarget::Slot(slot) = target {
            self.unmap(slot);
        }
        self.vms[vm].pages.insert(pfn, before);
    }
}

impl Memory for SimMemory {
    type Error = Failure;

    fn ranges(&self) -> Vec<PageRange> {
        self.world.lock().vms[self.number].ranges.clone()
    }

    fn first_with_content(&mut self, range: PageRange) -> Result<Option<Pfn>, Failure> {
        let mut inner = self.world.lock();
        inner.may_fail(self.number)?;
        let mut pages = inner.vms[self.number].pages.range(range.start..range.end());
        let has_content = |page: &Page| Inner::look(&mut page.clone()) != PageLook::Absent;
        Ok(pages.find(|(_, page)| has_content(page)).map(|(pfn, _)| *pfn))
    }

    fn look(&mut self, block: PageRange, looks: &mut Vec<PageLook>) -> Result<(), Failure> {
        let mut inner = self.world.lock();
        inner.may_fail(self.number)?;
        let pages = &mut inner.vms[self.number].pages;
        looks.extend(pages.range_mut(block.start..block.end()).map(|(_, page)| Inner::look(page)));
        Ok(())
    }

    fn hash(
        &mut self,
        pages: &[Pfn],
        hasher: &PageHasher,
        contents: &mut Vec<Option<Content>>,
    ) -> Result<(), Failure> {
        let mut inner = self.world.lock();
        inner.may_fail(self.number)?;
        inner.hashed += pages.len() as u64;
        contents.extend(pages.iter().map(|&pfn| {
            inner.content(self.number, pfn).map(|content| hasher.content(&page_of(content)))
        }));
        Ok(())
    }

    fn nodes(&mut self, pages: &[Pfn], nodes: &mut Vec<Option<u32>>) -> Result<(), Failure> {
        let mut inner = self.world.lock();
        inner.may_fail(self.number)?;
        nodes.extend(pages.iter().map(|pfn| {
            let page = inner.vms[self.number].pages.get(pfn)?;
            match page.backing {
                Backing::Absent => None,
                Backing::Merged(slot) => inner.slots.get(&slot).map(|stable| stable.node.0),
                Backing::Private | Backing::Huge => Some(page.node.0),
            }
        }));
        Ok(())
    }

    fn read(&mut self, page: Pfn, content: &mut [u8]) -> Result<(), Failure> {
        let mut inner = self.world.lock();
        inner.may_fail(self.number)?;
        content.copy_from_slice(&page_of(inner.content(self.number, page).unwrap_or(0)));
        Ok(())
    }

    fn replace(
        &mut self,
        pages: &[(Pfn, MergeTarget)],
        replaced: &mut Vec<MergeOutcome>,
    ) -> Result<(), Failure> {
        assert!(pages.windows(2).all(|pair| pair[0].0 < pair[1].0), "not ascending: {pages:?}");
        let mut inner = self.world.lock();
        for (pfn, content) in std::mem::take(&mut inner.vms[self.number].races) {
            inner.write(self.number, pfn, content);
        }
        for run in pages.chunk_by(|a, b| match (a.1, b.1) {
            (MergeTarget::Slot(first), MergeTarget::Slot(second)) => {
                a.0.0 + 1 == b.0.0 && first.is_followed_by(second)
            }
            _ => false,
        }) {
            inner.may_fail(self.number)?;
            let begin = replaced.len();
            let mut before = Vec::with_capacity(run.len());
            for item in run {
                before.push(inner.vms[self.number].pages.get(&item.0).copied());
                let outcome = inner.replace(self.number, item);
                replaced.push(outcome);
            }
            if inner.vms[self.number]
                .mappings
                .is_some_and(|most| inner.mappings(self.number, Pfn(0)..Pfn(u64::MAX)) > most)
            {
                for ((item, outcome), before) in run.iter().zip(&mut replaced[begin..]).zip(&before)
                {
                    if let (MergeOutcome::Done, MergeTarget::Slot(_), Some(before)) =
                        (*outcome, item.1, before)
                    {
                        inner.undo(self.number, *item, *before);
                        *outcome = MergeOutcome::NoMappings;
                    }
                }
            }
            for ((pfn, _), (outcome, before)) in
                run.iter().zip(replaced[begin..].iter().zip(before))
            {
                if *outcome == MergeOutcome::Done
                    && before.is_some_and(|page| page.backing == Backing::Huge)
                {
                    inner.split(self.number, *pfn);
                }
            }
        }
        Ok(())
    }

    fn collapse(&mut self, block: PageRange) -> Result<bool, Failure> {
        let mut inner = self.world.lock();
        inner.may_fail(self.number)?;
        inner.collapses += 1;
        let pages = &mut inner.vms[self.number].pages;
        let is_small = |page: &Page| {
            page.backing == Backing::Private
                && page.copied == 0
                && page.lost.is_none()
                && !page.excluded
                && !page.pinned
        };
        if block.pages != BLOCK_PAGES
            || !pages.range(block.start..block.end()).all(|(_, page)| is_small(page))
        {
            return Ok(false);
        }
        for (_, page) in pages.range_mut(block.start..block.end()) {
            page.backing = Backing::Huge;
        }
        Ok(true)
    }

    fn unmerge(&mut self, range: PageRange, released: &mut Vec<StableSlot>) -> Result<(), Failure> {
        let mut inner = self.world.lock();
        inner.unmerges += 1;
        let pages: Vec<(Pfn, Page)> = inner.vms[self.number]
            .pages
            .range(range.start..range.end())
            .map(|(pfn, page)| (*pfn, *page))
            .collect();
        for (pfn, page) in pages {
            if page.lost.is_none() && !matches!(page.backing, Backing::Merged(_)) {
                continue;
            }
            inner.may_fail(self.number)?;
            let content = inner.content(self.number, pfn).unwrap_or(0);
            released.extend(page.lost);
            let mut new = Page { lost: None, ..page };
            if let Backing::Merged(slot) = page.backing {
                released.push(slot);
                inner.unmap(slot);
                new =
                    Page { backing: Backing::Private, content, written: true, lost: None, ..page };
            }
            inner.vms[self.number].pages.insert(pfn, new);
        }
        Ok(())
    }

    fn slots(&mut self, range: PageRange, slots: &mut Vec<(Pfn, StableSlot)>) {
        let inner = self.world.lock();
        let pages = inner.vms[self.number].pages.range(range.start..range.end());
        slots.extend(pages.filter_map(|(pfn, page)| match page.backing {
            Backing::Merged(slot) => Some((*pfn, slot)),
            _ => None,
        }));
    }

    fn move_shares(&mut self, pages: &[(Pfn, StableSlot)], outcomes: &mut Vec<MergeOutcome>) {
        assert!(pages.windows(2).all(|pair| pair[0].0 < pair[1].0), "not ascending: {pages:?}");
        let mut inner = self.world.lock();
        for (pfn, content) in std::mem::take(&mut inner.vms[self.number].races) {
            inner.write(self.number, pfn, content);
        }
        let is_full = inner.vms[self.number]
            .mappings
            .is_some_and(|most| inner.mappings(self.number, Pfn(0)..Pfn(u64::MAX)) >= most);
        for &(pfn, slot) in pages {
            outcomes.push(if inner.may_fail(self.number).is_err() {
                MergeOutcome::Busy
            } else if is_full {
                MergeOutcome::NoMappings
            } else {
                inner.move_share(self.number, pfn, slot)
            });
        }
    }

    fn take_released(&mut self, released: &mut Vec<StableSlot>) {
        released.append(&mut self.world.lock().vms[self.number].released);
    }
}

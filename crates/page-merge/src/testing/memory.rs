//! A guest's memory, as the core sees it.

use ebb_abi::{PAGE_SIZE_BYTES, PageRange, Pfn};

use super::world::{Backing, Guest, Inner, Page, World};
use crate::{Content, Look, Memory, Node, PageHasher, Replace, Replaced, Secret, Slot, Target};

/// Simulated memory of one machine.
#[derive(Clone, Debug)]
pub struct SimMemory {
    world: World,
    number: usize,
}

/// The simulation was told to fail.
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

    fn look(page: &mut Page) -> Look {
        if page.excluded {
            // What is merged stays so, and what was written to is told all the same.
            if let Some(slot) = page.lost.take() {
                return Look::Broken(slot);
            }
            return if matches!(page.backing, Backing::Merged(_)) {
                Look::Merged
            } else {
                Look::Excluded
            };
        }
        match (page.lost.take(), page.backing) {
            (Some(slot), _) => Look::Broken(slot),
            (None, Backing::Private) if page.copied > 0 => {
                page.copied -= 1;
                // What it was brought back as is new.
                page.written = true;
                Look::Copied
            }
            (None, Backing::Absent) => Look::Absent,
            (None, Backing::Merged(_)) => Look::Merged,
            (None, Backing::Private) if std::mem::take(&mut page.written) => Look::Written,
            (None, Backing::Private) => Look::Clean,
            (None, Backing::Huge) if std::mem::take(&mut page.written) => Look::HugeWritten,
            (None, Backing::Huge) => Look::HugeClean,
        }
    }

    fn replace(&mut self, vm: usize, item: &Replace) -> Replaced {
        let content = self.content(vm, item.page);
        let Some(page) = self.vms[vm].pages.get(&item.page).copied() else { return Replaced::Gone };
        match page.backing {
            // A page that has not yet told that it lost its share must do so first.
            Backing::Absent | Backing::Merged(_) => return Replaced::Gone,
            _ if page.excluded || page.lost.is_some() || page.copied > 0 => return Replaced::Gone,
            _ if page.pinned => return Replaced::Busy,
            _ => {}
        }
        let target = match item.target {
            Target::Zero => Some(0),
            Target::Slot(slot) => match self.slots.get(&slot) {
                Some(stable) => stable.content,
                None => panic!("{} was to be replaced by {slot:?}, which is free", item.page),
            },
        };
        if target != content {
            return Replaced::Different;
        }
        let backing = match item.target {
            Target::Zero => Backing::Absent,
            Target::Slot(slot) => Backing::Merged(slot),
        };
        if page.backing == Backing::Huge {
            self.split(vm, item.page);
        }
        if let Some(place) = self.vms[vm].pages.get_mut(&item.page) {
            *place = Page { backing, content: 0, written: false, ..*place };
        }
        if let Target::Slot(slot) = item.target
            && let Some(stable) = self.slots.get_mut(&slot)
        {
            stable.mapped += 1;
        }
        Replaced::Done
    }

    /// Takes a replacement back.
    fn undo(&mut self, vm: usize, item: &Replace) {
        let content = self.content(vm, item.page).unwrap_or(0);
        if let Target::Slot(slot) = item.target {
            self.unmap(slot);
        }
        if let Some(page) = self.vms[vm].pages.get_mut(&item.page) {
            *page = Page { backing: Backing::Private, content, ..*page };
        }
    }
}

impl Memory for SimMemory {
    type Error = Failure;

    fn ranges(&self) -> Vec<PageRange> {
        self.world.lock().vms[self.number].ranges.clone()
    }

    fn look(&mut self, block: PageRange, looks: &mut Vec<Look>) -> Result<(), Failure> {
        let mut inner = self.world.lock();
        inner.may_fail(self.number)?;
        let pages = &mut inner.vms[self.number].pages;
        looks.extend(pages.range_mut(block.start..block.end()).map(|(_, page)| Inner::look(page)));
        Ok(())
    }

    fn hash(
        &mut self,
        pages: &[Pfn],
        secret: &Secret,
        contents: &mut Vec<Option<Content>>,
    ) -> Result<(), Failure> {
        let mut inner = self.world.lock();
        inner.may_fail(self.number)?;
        inner.hashed += pages.len() as u64;
        let hasher = PageHasher::new(secret);
        contents.extend(pages.iter().map(|&pfn| {
            inner.content(self.number, pfn).map(|content| hasher.content(&page_of(content)))
        }));
        Ok(())
    }

    fn nodes(&mut self, pages: &[Pfn], nodes: &mut Vec<Option<Node>>) -> Result<(), Failure> {
        let mut inner = self.world.lock();
        inner.may_fail(self.number)?;
        nodes.extend(pages.iter().map(|pfn| {
            let page = inner.vms[self.number].pages.get(pfn)?;
            match page.backing {
                Backing::Absent => None,
                Backing::Merged(slot) => inner.slots.get(&slot).map(|stable| stable.node),
                Backing::Private | Backing::Huge => Some(page.node),
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

    fn replace(&mut self, pages: &[Replace], replaced: &mut Vec<Replaced>) -> Result<(), Failure> {
        assert!(
            pages.windows(2).all(|pair| pair[0].page < pair[1].page),
            "not ascending: {pages:?}"
        );
        let mut inner = self.world.lock();
        for (pfn, content) in std::mem::take(&mut inner.vms[self.number].races) {
            inner.write(self.number, pfn, content);
        }
        for run in pages.chunk_by(|a, b| match (a.target, b.target) {
            (Target::Slot(first), Target::Slot(second)) => {
                a.page.0 + 1 == b.page.0 && first.is_followed_by(second)
            }
            _ => false,
        }) {
            inner.may_fail(self.number)?;
            let begin = replaced.len();
            for item in run {
                let outcome = inner.replace(self.number, item);
                replaced.push(outcome);
            }
            if inner.vms[self.number]
                .mappings
                .is_some_and(|most| inner.mappings(self.number) > most)
            {
                for (item, outcome) in run.iter().zip(&mut replaced[begin..]) {
                    if *outcome == Replaced::Done && item.target != Target::Zero {
                        inner.undo(self.number, item);
                        *outcome = Replaced::NoMappings;
                    }
                }
            }
        }
        Ok(())
    }

    fn unmerge(&mut self, range: PageRange, released: &mut Vec<Slot>) -> Result<(), Failure> {
        let mut inner = self.world.lock();
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

    fn take_released(&mut self, released: &mut Vec<Slot>) {
        released.append(&mut self.world.lock().vms[self.number].released);
    }
}

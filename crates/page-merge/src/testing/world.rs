//! The host: the backing and the content of each page.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use ebb_abi::{PageRange, Pfn};
use ebb_guest_ram::StableSlot;

use crate::Node;

/// Backing of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Backing {
    Absent,
    Private,
    /// Part of a huge page.
    Huge,
    Merged(StableSlot),
}

/// A page of a guest.
#[derive(Clone, Copy, Debug)]
pub(super) struct Page {
    pub(super) backing: Backing,
    /// Content of a page that is not merged: one number repeated over the page.
    pub(super) content: u64,
    pub(super) node: Node,
    pub(super) written: bool,
    pub(super) pinned: bool,
    pub(super) excluded: bool,
    /// Share that was lost to a write and has not been reported yet.
    pub(super) lost: Option<StableSlot>,
    /// Number of scans in which it cannot be merged, since it was merged and written to.
    pub(super) copied: u8,
    /// The last value that the guest wrote, or zeros after a discard: the value that it must read,
    /// whatever is merged.
    pub(super) expected: u64,
}

impl Page {
    fn absent(node: Node) -> Self {
        Self {
            backing: Backing::Absent,
            content: 0,
            node,
            written: false,
            pinned: false,
            excluded: false,
            lost: None,
            copied: 0,
            expected: 0,
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct Vm {
    pub(super) ranges: Vec<PageRange>,
    pub(super) pages: BTreeMap<Pfn, Page>,
    pub(super) released: Vec<StableSlot>,
    /// Maximum number of mappings of its memory beyond the first of each range.
    pub(super) mappings: Option<usize>,
    /// Writes by the guest just before pages are frozen the next time.
    pub(super) races: Vec<(Pfn, u64)>,
    /// Scans until a page that was merged and written to can be merged again.
    pub(super) copied_looks: u8,
    /// Number of fallible calls that fail from now on.
    pub(super) failing: usize,
}

/// A slot of a memory file.
#[derive(Clone, Copy, Debug)]
pub(super) struct SimSlot {
    /// `None` before it is written.
    pub(super) content: Option<u64>,
    pub(super) node: Node,
    pub(super) mapped: u64,
}

#[derive(Debug, Default)]
pub(super) struct Inner {
    pub(super) vms: Vec<Vm>,
    pub(super) slots: BTreeMap<StableSlot, SimSlot>,
    /// Calls of `hash`, in pages.
    pub(super) hashed: u64,
    /// Contents written to slots, in pages.
    pub(super) published: u64,
    /// Attempts to make a huge page of small ones.
    pub(super) collapses: u64,
    /// Calls that unmerge pages.
    pub(super) unmerges: u64,
    pub(super) no_room: bool,
}

/// A simulated host.
#[derive(Clone, Debug, Default)]
pub struct World(Arc<Mutex<Inner>>);

/// A virtual machine of a [`World`], as seen by its guest and its host. Several can be parts of one
/// process's memory.
#[derive(Clone, Debug)]
pub struct Guest {
    pub(super) world: World,
    /// Number of the process.
    pub(super) number: usize,
    /// Beginning of its pages in the memory of the process.
    base: u64,
}

/// Pages of a process's memory that belong to one guest.
const GUEST_PAGES: u64 = 1 << 30;

impl World {
    /// An empty host.
    pub fn new() -> Self {
        Self::default()
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A machine with absent pages in `ranges`; all of node 0 once they are present.
    pub fn guest(&self, ranges: &[PageRange]) -> Guest {
        let mut inner = self.lock();
        inner.vms.push(Vm::default());
        let process = Guest { world: self.clone(), number: inner.vms.len() - 1, base: 0 };
        drop(inner);
        process.add(0, ranges);
        process
    }

    /// Number of slots in use.
    pub fn slots_in_use(&self) -> usize {
        self.lock().slots.len()
    }

    /// For each slot in use, the number of pages that have it mapped, or have not reported its
    /// loss.
    pub fn shares(&self) -> BTreeMap<StableSlot, u64> {
        let inner = self.lock();
        let mut shares: BTreeMap<StableSlot, u64> =
            inner.slots.iter().map(|(slot, stable)| (*slot, stable.mapped)).collect();
        for vm in &inner.vms {
            for slot in
                vm.pages.values().filter_map(|page| page.lost).chain(vm.released.iter().copied())
            {
                *shares.entry(slot).or_default() += 1;
            }
        }
        shares
    }

    /// Moves the page of a slot to another node, as the host does when a node is taken offline.
    pub fn move_slot(&self, slot: StableSlot, node: Node) {
        if let Some(stable) = self.lock().slots.get_mut(&slot) {
            stable.node = node;
        }
    }

    /// Slots in use, and the node of each.
    pub fn slot_nodes(&self) -> BTreeMap<StableSlot, Node> {
        self.lock().slots.iter().map(|(slot, stable)| (*slot, stable.node)).collect()
    }

    /// Number of pages that were read for hashing.
    pub fn hashed_pages(&self) -> u64 {
        self.lock().hashed
    }

    /// Number of contents that were published as stable pages.
    pub fn published_pages(&self) -> u64 {
        self.lock().published
    }

    /// Number of attempts to make a huge page of small ones.
    pub fn collapse_attempts(&self) -> u64 {
        self.lock().collapses
    }

    /// Number of calls that unmerged pages.
    pub fn unmerge_calls(&self) -> u64 {
        self.lock().unmerges
    }

    /// Sets whether there is memory for stable pages.
    pub fn set_room(&self, room: bool) {
        self.lock().no_room = !room;
    }
}

impl Inner {
    /// Unmaps a slot from a page.
    pub(super) fn unmap(&mut self, slot: StableSlot) {
        let Some(stable) = self.slots.get_mut(&slot) else {
            panic!("{slot:?} was freed while it was mapped")
        };
        stable.mapped -= 1;
    }

    /// The content that a page reads as.
    pub(super) fn content(&self, vm: usize, pfn: Pfn) -> Option<u64> {
        let page = self.vms.get(vm)?.pages.get(&pfn)?;
        Some(match page.backing {
            Backing::Absent => 0,
            Backing::Private | Backing::Huge => page.content,
            Backing::Merged(slot) => match self.slots.get(&slot) {
                Some(SimSlot { content: Some(content), .. }) => *content,
                found => panic!("{pfn} of machine {vm} is mapped to {slot:?}, which is {found:?}"),
            },
        })
    }

    pub(super) fn write(&mut self, vm: usize, pfn: Pfn, content: u64) {
        let Some(vm) = self.vms.get_mut(vm) else { return };
        let copied_looks = vm.copied_looks;
        let Some(page) = vm.pages.get_mut(&pfn) else { return };
        let backing = page.backing;
        page.content = content;
        page.expected = content;
        page.written = true;
        match backing {
            Backing::Absent => page.backing = Backing::Private,
            Backing::Merged(slot) => {
                page.backing = Backing::Private;
                page.lost = Some(slot);
                page.copied = copied_looks;
                self.unmap(slot);
            }
            Backing::Private | Backing::Huge => {}
        }
    }

    /// Splits the huge page that contains this page.
    pub(super) fn split(&mut self, vm: usize, pfn: Pfn) {
        let first = pfn.0 / 512 * 512;
        for (_, page) in self.vms[vm].pages.range_mut(Pfn(first)..Pfn(first + 512)) {
            if page.backing == Backing::Huge {
                page.backing = Backing::Private;
                // Writes to it were not tracked before.
                page.written = true;
            }
        }
    }

    /// Number of mappings of a machine's memory: runs of neighbouring slots, and the parts between
    /// them.
    pub(super) fn mappings(&self, vm: usize, pages: std::ops::Range<Pfn>) -> usize {
        let key = |pfn: Pfn, page: &Page| match page.backing {
            Backing::Merged(slot) => {
                Some((slot.segment, i128::from(slot.index) - i128::from(pfn.0)))
            }
            _ => None,
        };
        let keys: Vec<_> =
            self.vms[vm].pages.range(pages).map(|(pfn, page)| (*pfn, key(*pfn, page))).collect();
        keys.windows(2)
            .filter(|pair| pair[0].1 != pair[1].1 || pair[0].0.0 + 1 != pair[1].0.0)
            .count()
    }
}

impl Guest {
    /// Another machine whose memory is merged by the same process.
    #[must_use]
    pub fn beside(&self, ranges: &[PageRange]) -> Self {
        let last = self.world.lock().vms[self.number].ranges.last().map_or(0, |last| last.start.0);
        let base = (last / GUEST_PAGES + 1) * GUEST_PAGES;
        self.add(base, ranges);
        Self { base, ..self.clone() }
    }

    fn add(&self, base: u64, ranges: &[PageRange]) {
        let vm = &mut self.world.lock().vms[self.number];
        for range in ranges {
            let range = PageRange::new(Pfn(base + range.start.0), range.pages);
            let pages = range.start.0..range.end().0;
            // Many at once, which fills the map quickly.
            let mut new = pages.map(|pfn| (Pfn(pfn), Page::absent(Node(0)))).collect();
            vm.pages.append(&mut new);
            vm.ranges.push(range);
        }
    }

    fn at(&self, pfn: u64) -> Pfn {
        Pfn(self.base + pfn)
    }

    /// Its pages in the memory of the process.
    fn all(&self) -> std::ops::Range<Pfn> {
        self.at(0)..self.at(GUEST_PAGES)
    }

    /// Writes a content: a page full of this number. 0 is a page of zeros.
    pub fn write(&self, pfn: u64, content: u64) {
        self.world.lock().write(self.number, self.at(pfn), content);
    }

    /// The content of a page.
    pub fn read(&self, pfn: u64) -> Option<u64> {
        self.world.lock().content(self.number, self.at(pfn))
    }

    fn change(&self, pfn: u64, change: impl FnOnce(&mut Page)) {
        if let Some(page) = self.world.lock().vms[self.number].pages.get_mut(&self.at(pfn)) {
            change(page);
        }
    }

    /// The owner discards a page (balloon): it reads as zeros.
    pub fn discard(&self, pfn: u64) {
        let mut inner = self.world.lock();
        inner.split(self.number, self.at(pfn));
        let vm = &mut inner.vms[self.number];
        let Some(page) = vm.pages.get_mut(&self.at(pfn)) else { return };
        let backing = std::mem::replace(&mut page.backing, Backing::Absent);
        let lost = page.lost.take();
        (page.content, page.expected, page.copied) = (0, 0, 0);
        vm.released.extend(lost);
        if let Backing::Merged(slot) = backing {
            vm.released.push(slot);
            inner.unmap(slot);
        }
    }

    /// Moves a page to another node (without effect on a merged page, whose slot is moved by
    /// [`World::move_slot`]).
    pub fn move_to(&self, pfn: u64, node: Node) {
        self.change(pfn, |page| {
            if !matches!(page.backing, Backing::Merged(_)) {
                page.node = node;
            }
        });
    }

    /// Checks that each page reads as the guest's last write.
    pub fn check(&self) {
        let inner = self.world.lock();
        for (pfn, page) in inner.vms[self.number].pages.range(self.all()) {
            assert_eq!(
                inner.content(self.number, *pfn),
                Some(page.expected),
                "{pfn} of machine {} is {page:?}",
                self.number
            );
        }
    }

    /// Merged pages: the slot, the node that the page was on, and the node that the slot is on.
    pub fn merged(&self) -> Vec<(StableSlot, Node, Node)> {
        let inner = self.world.lock();
        let pages = inner.vms[self.number].pages.range(self.all());
        pages
            .filter_map(|(_, page)| match page.backing {
                Backing::Merged(slot) => Some((slot, page.node, inner.slots.get(&slot)?.node)),
                _ => None,
            })
            .collect()
    }

    /// Sets whether a device has pinned the page.
    pub fn pin(&self, pfn: u64, pinned: bool) {
        self.change(pfn, |page| page.pinned = pinned);
    }

    /// Sets whether the owner excludes the page from merging.
    pub fn exclude(&self, pfn: u64, excluded: bool) {
        self.change(pfn, |page| page.excluded = excluded);
    }

    /// Sets the number of scans until pages that are merged and written to from now on can be
    /// merged again.
    pub fn keep_copies(&self, looks: u8) {
        self.world.lock().vms[self.number].copied_looks = looks;
    }

    /// Makes a huge page of 512 pages from `pfn` on, with their contents. They must not be merged.
    pub fn make_huge(&self, pfn: u64) {
        (pfn..pfn + 512).for_each(|pfn| {
            self.change(pfn, |page| (page.backing, page.copied) = (Backing::Huge, 0));
        });
    }

    /// Whether the page is part of a huge page.
    pub fn is_huge(&self, pfn: u64) -> bool {
        self.world.lock().vms[self.number]
            .pages
            .get(&self.at(pfn))
            .is_some_and(|page| page.backing == Backing::Huge)
    }

    /// The slot with which a page is merged.
    pub fn slot(&self, pfn: u64) -> Option<StableSlot> {
        match self.world.lock().vms[self.number].pages.get(&self.at(pfn))?.backing {
            Backing::Merged(slot) => Some(slot),
            _ => None,
        }
    }

    /// The node that a page is on, or was on before it was merged.
    pub fn node(&self, pfn: u64) -> Node {
        self.world.lock().vms[self.number]
            .pages
            .get(&self.at(pfn))
            .map_or(Node::ANY, |page| page.node)
    }

    /// Whether the host has no page for it.
    pub fn is_absent(&self, pfn: u64) -> bool {
        self.world.lock().vms[self.number]
            .pages
            .get(&self.at(pfn))
            .is_none_or(|page| page.backing == Backing::Absent)
    }

    /// Bounds the mappings of this machine's memory.
    pub fn limit_mappings(&self, mappings: Option<usize>) {
        self.world.lock().vms[self.number].mappings = mappings;
    }

    /// Number of mappings of its memory, less one.
    pub fn mappings(&self) -> usize {
        self.world.lock().mappings(self.number, self.all())
    }

    /// Makes the guest write this just before pages are frozen the next time.
    pub fn write_before_freeze(&self, pfn: u64, content: u64) {
        self.world.lock().vms[self.number].races.push((self.at(pfn), content));
    }

    /// Makes the next `calls` calls of its memory fail.
    pub fn fail(&self, calls: usize) {
        self.world.lock().vms[self.number].failing = calls;
    }
}

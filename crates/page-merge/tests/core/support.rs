//! A merger over simulated machines.

use ebb_abi::{PageRange, Pfn};
use ebb_guest_ram::StableSlot;
use ebb_page_merge::{
    Merger, Nodes, Run, Secret, Settings, StablePages, Statistics,
    testing::{Guest, SimMemory, SimSlots, UnreliableStore, World},
};

/// The store of the tests.
pub type Store = UnreliableStore<StablePages<SimSlots>>;

/// A host, and a merger over the machines of one trust domain. (In production each machine has a
/// process of its own, and they share a store; see the tests of the broker.)
pub struct Host {
    pub world: World,
    /// Distinguishes its stable pages from those of other domains of the same world.
    pub domain: u32,
    /// Number of its stores before the present one.
    renewed: u32,
    pub merger: Merger<SimMemory, Store>,
    pub guests: Vec<Guest>,
    /// The host has moved slots lately: pages may share one of another node until that is detected.
    pub slots_were_moved: bool,
}

/// Trust domains in one world.
const DOMAINS: u32 = 2;

/// Settings under which all equal pages are merged at once.
pub fn eager() -> Settings {
    Settings {
        run: Run::Merge,
        smart_scan: false,
        clean_passes: 1,
        max_page_sharing: ebb_page_merge::MAX_PAGE_SHARING,
        most_copies: 1,
        ..Settings::default()
    }
}

/// The store with this number, and its secret.
fn store(world: &World, number: u32) -> (Store, Secret) {
    let store = UnreliableStore::new(StablePages::new(world.slots(number)));
    (store, Secret([number as u8; 32]))
}

fn merger(
    memory: SimMemory,
    world: &World,
    domain: u32,
    settings: Settings,
) -> Merger<SimMemory, Store> {
    let (store, secret) = store(world, domain);
    Merger::new(memory, store, secret, settings).unwrap()
}

impl Host {
    pub fn new(settings: Settings) -> Self {
        Self::in_world(&World::new(), 0, settings)
    }

    /// Another trust domain of a world.
    pub fn in_world(world: &World, domain: u32, settings: Settings) -> Self {
        let nothing = world.guest(&[]).memory();
        let merger = merger(nothing, world, domain, settings);
        Self {
            world: world.clone(),
            domain,
            renewed: 0,
            merger,
            guests: Vec::new(),
            slots_were_moved: false,
        }
    }

    /// A machine with `pages` pages from 0 on.
    pub fn guest(&mut self, pages: u64) -> Guest {
        self.guest_of(&[PageRange::new(Pfn(0), pages)])
    }

    /// A machine; all must be created before the first pass.
    pub fn guest_of(&mut self, ranges: &[PageRange]) -> Guest {
        assert_eq!(self.merger.statistics().pages_scanned, 0, "merging has begun");
        let guest = match self.guests.first() {
            Some(first) => first.beside(ranges),
            None => self.world.guest(ranges),
        };
        let settings = self.merger.settings().clone();
        self.merger = merger(guest.memory(), &self.world, self.domain, settings);
        self.guests.push(guest.clone());
        guest
    }

    /// Gives it another store.
    pub fn renew(&mut self) {
        self.renewed += 1;
        let (store, secret) = store(&self.world, self.domain + self.renewed * DOMAINS);
        self.merger.renew(store, secret);
    }

    pub fn store(&mut self) -> &mut Store {
        self.merger.store_mut()
    }

    /// Runs whole passes.
    pub fn passes(&mut self, count: u64) {
        let end = self.merger.statistics().full_scans + count;
        while self.merger.statistics().full_scans < end {
            self.merger.scan(u64::MAX);
        }
    }

    /// Runs passes until everything that can be merged is merged.
    pub fn settle(&mut self) -> Statistics {
        self.passes(40);
        self.check();
        self.merger.statistics()
    }

    /// (pages_shared, pages_sharing, pages_volatile, pages_unshared), the order of LTP's
    /// `group_check`.
    pub fn counts(&self) -> (u64, u64, u64, u64) {
        let statistics = self.merger.statistics();
        (
            statistics.pages_shared,
            statistics.pages_sharing,
            statistics.pages_volatile,
            statistics.pages_unshared,
        )
    }

    pub fn unmerge(&mut self) {
        let settings = Settings { run: Run::Unmerge, ..self.merger.settings().clone() };
        self.merger.change(settings).unwrap();
        for _ in 0..10_000 {
            if self.merger.step(512).finished_pass {
                return;
            }
        }
        panic!("unmerging does not end");
    }

    pub fn change(&mut self, change: impl FnOnce(&mut Settings)) {
        let mut settings = self.merger.settings().clone();
        change(&mut settings);
        self.merger.change(settings).unwrap();
    }

    /// Checks the invariants between two steps.
    pub fn check(&self) {
        let shares = self.world.shares();
        let store = self.merger.store();
        assert_eq!(store.reservations, 0, "reservations are left");
        let mine: Vec<StableSlot> =
            shares.keys().copied().filter(|slot| self.is_mine(*slot)).collect();
        for slot in &mine {
            if !self.is_former(*slot) {
                assert_eq!(
                    u64::from(store.inner().references(*slot)),
                    shares[slot],
                    "references of {slot:?} are not its shares"
                );
            }
            assert_ne!(shares[slot], 0, "{slot:?} is in use without a share");
        }
        assert_eq!(self.merger.statistics().pages_shared, mine.len() as u64);
        let apart = self.merger.settings().merge_across_nodes == Nodes::Apart;
        for guest in &self.guests {
            guest.check();
            for (slot, page_node, slot_node) in guest.merged() {
                assert!(self.is_mine(slot), "a slot of another domain");
                if apart && !self.slots_were_moved {
                    assert_eq!(page_node, slot_node, "a page shares one of another node");
                }
            }
        }
    }

    fn is_mine(&self, slot: StableSlot) -> bool {
        slot.segment / 1000 % DOMAINS == self.domain
    }

    fn is_former(&self, slot: StableSlot) -> bool {
        slot.segment / 1000 < self.domain + self.renewed * DOMAINS
    }

    /// Stable pages of its former stores.
    pub fn former_slots(&self) -> u64 {
        let shares = self.world.shares();
        shares.keys().filter(|slot| self.is_mine(**slot) && self.is_former(**slot)).count() as u64
    }

    /// Stable pages of this domain.
    pub fn slots_in_use(&self) -> u64 {
        self.world.shares().keys().filter(|slot| self.is_mine(**slot)).count() as u64
    }

    /// Number of pages that are merged in the machines.
    pub fn merged_pages(&self) -> u64 {
        self.guests.iter().map(|guest| guest.merged().len() as u64).sum()
    }
}

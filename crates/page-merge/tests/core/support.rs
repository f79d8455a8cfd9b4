//! A merger over simulated machines.

use ebb_abi::{PageRange, Pfn};
use ebb_page_merge::{
    DomainId, LocalStore, MemberId, Merger, Nodes, Run, Secret, Settings, Slot, StableStore,
    Statistics,
    testing::{Guest, SimMemory, SimSlots, UnreliableStore, World},
};

/// The store of the tests.
pub type Store = UnreliableStore<LocalStore<SimSlots>>;

/// A host, and a merger over its machines.
pub struct Host {
    pub world: World,
    pub merger: Merger<SimMemory, Store>,
    pub domains: Vec<DomainId>,
    pub guests: Vec<(DomainId, Guest, Option<MemberId>)>,
    /// The host has moved slots lately: pages may share one of another node until that is noticed.
    pub slots_were_moved: bool,
}

/// Settings under which all that is equal is merged at once.
pub fn eager() -> Settings {
    Settings {
        run: Run::Merge,
        smart_scan: false,
        clean_passes: 1,
        max_page_sharing: ebb_page_merge::MAX_PAGE_SHARING,
        ..Settings::default()
    }
}

impl Host {
    pub fn new(settings: Settings, domains: usize) -> Self {
        let world = World::new();
        let mut merger = Merger::new(settings).unwrap();
        let domains = (0..domains)
            .map(|number| {
                let store = UnreliableStore::new(LocalStore::new(world.slots(number as u32)));
                merger.add_domain(store, Secret([number as u8; 32]))
            })
            .collect();
        Self { world, merger, domains, guests: Vec::new(), slots_were_moved: false }
    }

    /// A machine with `pages` pages from 0 on, in the first domain.
    pub fn guest(&mut self, pages: u64) -> Guest {
        self.guest_of(0, &[PageRange::new(Pfn(0), pages)])
    }

    pub fn guest_of(&mut self, domain: usize, ranges: &[PageRange]) -> Guest {
        let guest = self.world.guest(ranges);
        let domain = self.domains[domain];
        let member = self.merger.add_member(domain, guest.memory()).unwrap();
        self.guests.push((domain, guest.clone(), Some(member)));
        guest
    }

    pub fn store(&mut self) -> &mut Store {
        self.merger.store_mut(self.domains[0]).unwrap()
    }

    /// Whole passes.
    pub fn passes(&mut self, count: u64) {
        let end = self.merger.statistics().full_scans + count;
        while self.merger.statistics().full_scans < end {
            self.merger.scan(u64::MAX);
        }
    }

    /// As many passes as it takes for everything that can be merged to be so.
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
        panic!("unmerging does not come to an end");
    }

    pub fn change(&mut self, change: impl FnOnce(&mut Settings)) {
        let mut settings = self.merger.settings().clone();
        change(&mut settings);
        self.merger.change(settings).unwrap();
    }

    /// What holds at any time between two steps.
    pub fn check(&self) {
        let shares = self.world.shares();
        let mut of_domains = std::collections::BTreeMap::<Slot, usize>::new();
        for (number, domain) in self.domains.iter().enumerate() {
            let store = self.merger.store(*domain).unwrap();
            assert_eq!(store.reservations, 0, "reservations are left");
            let mine: Vec<Slot> = shares
                .keys()
                .copied()
                .filter(|slot| slot.segment / 1000 == number as u32)
                .collect();
            for slot in &mine {
                assert_eq!(
                    u64::from(store.inner().references(*slot)),
                    shares[slot],
                    "references of {slot:?} are not its shares"
                );
                assert_ne!(shares[slot], 0, "{slot:?} is in use without a share");
            }
            assert_eq!(store.counts().pages_shared, mine.len() as u64);
            of_domains.extend(mine.iter().map(|slot| (*slot, number)));
        }
        let apart = self.merger.settings().merge_across_nodes == Nodes::Apart;
        for (domain, guest, member) in &self.guests {
            guest.check();
            if member.is_none() {
                continue;
            }
            let number = self.domains.iter().position(|known| known == domain).unwrap();
            for (slot, page_node, slot_node) in guest.merged() {
                assert_eq!(of_domains.get(&slot), Some(&number), "a slot of another domain");
                if apart && !self.slots_were_moved {
                    assert_eq!(page_node, slot_node, "a page shares one of another node");
                }
            }
        }
    }

    /// Pages that are merged, as the machines have them.
    pub fn merged_pages(&self) -> u64 {
        self.guests
            .iter()
            .filter(|guest| guest.2.is_some())
            .map(|(_, guest, _)| guest.merged().len() as u64)
            .sum()
    }
}

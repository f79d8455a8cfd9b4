//! Any events in any order: no page changes its content by being merged, the store's counts match
//! the mappings, no page is shared across domains, or across nodes where they are kept apart, and
//! nothing is left at the end.

use ebb_abi::{PageRange, Pfn};
use ebb_page_merge::testing::{Guest, SimMemory, World};
use ebb_page_merge::{Merger, Node, Nodes, Run, Settings, SettingsError};
use proptest::prelude::*;

use crate::support::{Host, Store, eager};

const NODES: u32 = 3;
/// Machines 0 and 1 are in the first domain, 2 in the second.
const MACHINES: usize = 3;

#[derive(Clone, Debug)]
enum Event {
    Write(usize, u64, u64),
    /// That many neighbours get contents from this one on, which forms runs.
    Fill(usize, u64, u64, u64),
    WriteBeforeFreeze(usize, u64, u64),
    Discard(usize, u64),
    Move(usize, u64, u32),
    MoveSlot(usize, u32),
    Pin(usize, u64, bool),
    Exclude(usize, u64, bool),
    KeepCopies(usize, u8),
    MakeHuge(usize),
    Scan(u64),
    Passes(u64),
    Apart(Nodes),
    Sharing(u32),
    ZeroPages(bool),
    SmartScan(bool),
    Run(Run),
    Step(u64),
    StoreGone(bool),
    Renew,
    Room(bool),
    MemoryFails(usize, usize),
    Mappings(usize, Option<usize>),
}

/// Two ranges, one of which holds a whole aligned block when `huge` pages are wanted.
fn ranges(huge: bool) -> Vec<PageRange> {
    if huge {
        vec![PageRange::new(Pfn(0), 16), PageRange::new(Pfn(512), 520)]
    } else {
        vec![PageRange::new(Pfn(0), 16), PageRange::new(Pfn(505), 20)]
    }
}

fn page(huge: bool) -> impl Strategy<Value = u64> {
    if huge {
        prop_oneof![0_u64..16, 512_u64..1032].boxed()
    } else {
        prop_oneof![0_u64..16, 505_u64..525].boxed()
    }
}

fn event(huge: bool) -> impl Strategy<Value = Event> {
    let machine = 0..MACHINES;
    let content = prop_oneof![4 => 1_u64..5, 1 => Just(0_u64), 1 => 100_u64..120];
    let often = prop_oneof![
        4 => (machine.clone(), page(huge), content.clone())
            .prop_map(|(m, p, c)| Event::Write(m, p, c)),
        4 => (machine.clone(), page(huge), 1_u64..600, 1_u64..9)
            .prop_map(|(m, p, n, c)| Event::Fill(m, p, n, c)),
        1 => (machine.clone(), page(huge), content)
            .prop_map(|(m, p, c)| Event::WriteBeforeFreeze(m, p, c)),
        2 => (machine.clone(), page(huge)).prop_map(|(m, p)| Event::Discard(m, p)),
        6 => (1_u64..1200).prop_map(Event::Scan),
        8 => (1_u64..4).prop_map(Event::Passes),
        2 => (1_u64..600).prop_map(Event::Step),
    ];
    let seldom = prop_oneof![
        3 => (machine.clone(), page(huge), 0..NODES).prop_map(|(m, p, n)| Event::Move(m, p, n)),
        1 => (0_usize..8, 0..NODES).prop_map(|(s, n)| Event::MoveSlot(s, n)),
        1 => (machine.clone(), page(huge), any::<bool>())
            .prop_map(|(m, p, on)| Event::Pin(m, p, on)),
        1 => (machine.clone(), page(huge), any::<bool>())
            .prop_map(|(m, p, on)| Event::Exclude(m, p, on)),
        1 => (machine.clone(), 0_u8..5).prop_map(|(m, looks)| Event::KeepCopies(m, looks)),
        2 => machine.clone().prop_map(Event::MakeHuge),
        2 => prop_oneof![Just(Nodes::Apart), Just(Nodes::Across)].prop_map(Event::Apart),
        1 => (2_u32..5).prop_map(Event::Sharing),
        1 => any::<bool>().prop_map(Event::ZeroPages),
        1 => any::<bool>().prop_map(Event::SmartScan),
        3 => prop_oneof![Just(Run::Unmerge), Just(Run::Merge), Just(Run::Stop)]
            .prop_map(Event::Run),
        1 => any::<bool>().prop_map(Event::StoreGone),
        1 => Just(Event::Renew),
        1 => any::<bool>().prop_map(Event::Room),
        1 => (machine.clone(), 1_usize..4).prop_map(|(m, n)| Event::MemoryFails(m, n)),
        1 => (machine, prop::option::of(0_usize..12)).prop_map(|(m, n)| Event::Mappings(m, n)),
    ];
    prop_oneof![2 => often, 1 => seldom]
}

struct Play {
    /// One for each domain, in one world.
    hosts: [Host; 2],
    huge: bool,
}

impl Play {
    fn new(huge: bool) -> Self {
        let settings =
            Settings { max_page_sharing: 4, most_copies: 3, huge_min_duplicates: 100, ..eager() };
        let world = World::new();
        let mut hosts = [0, 1].map(|domain| Host::in_world(&world, domain, settings.clone()));
        for number in 0..MACHINES {
            hosts[number / 2].guest_of(&ranges(huge));
        }
        Self { hosts, huge }
    }

    fn guest(&self, machine: usize) -> &Guest {
        &self.hosts[machine / 2].guests[machine % 2]
    }

    fn world(&self) -> &World {
        &self.hosts[0].world
    }

    fn mergers(&mut self) -> impl Iterator<Item = &mut Merger<SimMemory, Store>> {
        self.hosts.iter_mut().map(|host| &mut host.merger)
    }

    /// A change of a setting that decides sharing is refused exactly while something is merged.
    fn change(&mut self, change: impl Fn(&mut Settings)) {
        for host in &mut self.hosts {
            let old = host.merger.settings().clone();
            let mut settings = old.clone();
            change(&mut settings);
            let decisive = settings.merge_across_nodes != old.merge_across_nodes
                || settings.max_page_sharing != old.max_page_sharing;
            let outcome = host.merger.change(settings);
            let shared = host.slots_in_use() > 0;
            if decisive && shared {
                assert!(matches!(outcome, Err(SettingsError::Merged { .. })), "{outcome:?}");
                assert_eq!(*host.merger.settings(), old);
            } else if decisive {
                // Pages that have not reported their lost shares yet count as merged.
                assert!(outcome.is_ok() || host.merger.statistics().merged_pages > 0);
            } else {
                outcome.unwrap();
            }
            if decisive && host.merger.settings().merge_across_nodes == Nodes::Apart && !shared {
                host.slots_were_moved = false;
            }
        }
    }

    fn apply(&mut self, event: &Event) {
        match *event {
            Event::Write(machine, page, content) => self.guest(machine).write(page, content),
            Event::Fill(machine, page, pages, content) => {
                (page..page + pages)
                    .for_each(|pfn| self.guest(machine).write(pfn, content * 1000 + pfn));
            }
            Event::WriteBeforeFreeze(machine, page, content) => {
                self.guest(machine).write_before_freeze(page, content);
            }
            Event::Discard(machine, page) => self.guest(machine).discard(page),
            Event::Move(machine, page, node) => self.guest(machine).move_to(page, Node(node)),
            Event::MoveSlot(number, node) => {
                if let Some(slot) = self.world().shares().keys().nth(number) {
                    self.world().move_slot(*slot, Node(node));
                    self.hosts.iter_mut().for_each(|host| host.slots_were_moved = true);
                }
            }
            Event::Pin(machine, page, on) => self.guest(machine).pin(page, on),
            Event::Exclude(machine, page, on) => self.guest(machine).exclude(page, on),
            Event::KeepCopies(machine, looks) => self.guest(machine).keep_copies(looks),
            Event::MakeHuge(machine) => {
                if self.huge && (512..1024).all(|pfn| self.guest(machine).slot(pfn).is_none()) {
                    self.guest(machine).make_huge(512);
                }
            }
            Event::Scan(pages) => {
                for merger in self.mergers() {
                    merger.scan(pages);
                }
            }
            Event::Passes(count) => self.hosts.iter_mut().for_each(|host| host.passes(count)),
            Event::Step(pages) => {
                for merger in self.mergers() {
                    merger.step(pages);
                }
            }
            Event::Apart(nodes) => self.change(|settings| settings.merge_across_nodes = nodes),
            Event::Sharing(most) => self.change(|settings| settings.max_page_sharing = most),
            Event::ZeroPages(on) => self.change(|settings| settings.use_zero_pages = on),
            Event::SmartScan(on) => self.change(|settings| settings.smart_scan = on),
            Event::Run(run) => self.change(|settings| settings.run = run),
            Event::StoreGone(gone) => self.hosts[0].store().gone = gone,
            Event::Renew => self.hosts[0].renew(),
            Event::Room(room) => self.world().set_room(room),
            Event::MemoryFails(machine, calls) => self.guest(machine).fail(calls),
            Event::Mappings(machine, most) => self.guest(machine).limit_mappings(most),
        }
        self.hosts.iter().for_each(Host::check);
    }

    /// Once nothing fails and nothing changes any more, everything mergeable is merged; and after
    /// unmerging nothing is left.
    fn finish(mut self) {
        self.hosts[0].store().gone = false;
        self.world().set_room(true);
        for machine in 0..MACHINES {
            self.guest(machine).fail(0);
            self.guest(machine).limit_mappings(None);
            for pfn in ranges(self.huge).iter().flat_map(|range| range.start.0..range.end().0) {
                self.guest(machine).pin(pfn, false);
                self.guest(machine).exclude(pfn, false);
            }
        }
        self.change(|settings| {
            settings.run = Run::Merge;
            settings.smart_scan = false;
        });
        for host in &mut self.hosts {
            host.passes(130);
            host.slots_were_moved = false;
            host.check();
            let statistics = host.merger.statistics();
            assert_eq!(statistics.merged_pages, host.merged_pages());
            assert_eq!(statistics.pages_shared, host.slots_in_use());
            assert_eq!((statistics.pages_volatile, host.former_slots()), (0, 0));
            if host.merger.settings().merge_across_nodes == Nodes::Apart {
                assert_eq!(statistics.remote_merged_pages, 0);
            }
            if !self.huge {
                check_that_nothing_was_missed(host);
            }
            let hashed = host.world.hashed_pages();
            host.passes(70);
            // Huge pages are read every 64 passes.
            let huge = host.guests.iter().filter(|guest| guest.is_huge(512)).count() as u64;
            let read = host.world.hashed_pages() - hashed;
            assert!(read <= huge * 2 * 512, "pages are read again and again: {read}");
        }
        for host in &mut self.hosts {
            host.unmerge();
            host.check();
            assert_eq!(host.slots_in_use(), 0);
            let statistics = host.merger.statistics();
            assert_eq!(
                (
                    statistics.pages_shared,
                    statistics.pages_sharing,
                    statistics.pages_unshared,
                    statistics.pages_volatile
                ),
                (0, 0, 0, 0)
            );
            assert_eq!((statistics.ksm_zero_pages, statistics.merged_pages), (0, 0));
        }
    }
}

/// No two pages of a domain (and node, if kept apart) with equal contents are both unmerged,
/// unless stable pages are full.
fn check_that_nothing_was_missed(host: &Host) {
    let apart = host.merger.settings().merge_across_nodes == Nodes::Apart;
    let zeros = host.merger.settings().use_zero_pages;
    let mut seen = std::collections::BTreeSet::new();
    for guest in &host.guests {
        for pfn in ranges(false).iter().flat_map(|range| range.start.0..range.end().0) {
            if guest.is_absent(pfn) || guest.slot(pfn).is_some() {
                continue;
            }
            let content = guest.read(pfn).unwrap();
            assert!(content != 0 || !zeros, "zeros at {pfn:#x}");
            let node = if apart { guest.node(pfn) } else { Node::ANY };
            assert!(seen.insert((node, content)), "{content} occurs twice, and is not merged");
        }
    }
}

fn replay(huge: bool, events: &[Event]) {
    let mut play = Play::new(huge);
    events.iter().for_each(|event| play.apply(event));
    play.finish();
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 300,
        max_shrink_iters: 2000,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn small_pages(events in prop::collection::vec(event(false), 1..120)) {
        replay(false, &events);
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 40,
        max_shrink_iters: 300,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn with_huge_pages(events in prop::collection::vec(event(true), 1..60)) {
        replay(true, &events);
    }
}

/// A page in the unstable index whose block becomes huge is a candidate again; it was planned both
/// as itself and as the partner of another page.
#[test]
fn a_page_of_a_new_huge_page_is_replaced_once() {
    let events = [
        Event::ZeroPages(false),
        Event::Write(2, 513, 0),
        Event::Passes(2),
        Event::MakeHuge(2),
        Event::Scan(1),
    ];
    replay(true, &events);
}

/// Moving many shares of one content to a new store makes several stable pages of it; the pages of
/// the unstable index that wait for that content are joined once.
#[test]
fn a_page_that_waits_is_replaced_once() {
    let events = [
        Event::ZeroPages(false),
        Event::Passes(3),
        Event::MakeHuge(1),
        Event::Passes(5),
        Event::Scan(1065),
        Event::Passes(10),
        Event::Write(1, 512, 100),
        Event::Discard(1, 513),
        Event::Passes(3),
        Event::Scan(17),
        Event::Scan(537),
        Event::Passes(1),
        Event::Passes(2),
        Event::Scan(1065),
        Event::Scan(1065),
        Event::Scan(17),
        Event::Scan(25),
        Event::WriteBeforeFreeze(0, 0, 0),
        Event::Renew,
    ];
    replay(true, &events);
}

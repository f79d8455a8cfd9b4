use super::*;
use crate::testing::{SimSlots, World};

impl<T: Slots> StablePages<T> {
    /// Recounts the index.
    pub(crate) fn check(&self) {
        let indexed = self.entries.iter().filter(|entry| !entry.is_retired()).count();
        let found = |index: &Index| {
            index.table.len() + (index.chains.pages() - index.chains.len()) as usize
        };
        assert_eq!(self.indexes.iter().map(found).sum::<usize>(), indexed);
        assert_eq!(self.entries.iter().count() as u64, self.len());
    }
}

fn hash(number: u64) -> PageHash {
    PageHash::new(number << 20 | number)
}

fn store(world: &World, max_page_sharing: u32) -> StablePages<SimSlots> {
    let mut store = StablePages::new(world.slots(0));
    store.limit_sharing(max_page_sharing);
    store
}

fn publish(store: &mut StablePages<SimSlots>, node: Node, numbers: &[u64]) -> Vec<StableSlot> {
    let hashes: Vec<PageHash> = numbers.iter().map(|&number| hash(number)).collect();
    let contents: Vec<u8> =
        numbers.iter().flat_map(|number| number.to_le_bytes().repeat(512)).collect();
    let mut slots = Vec::new();
    store.publish(node, &hashes, &contents, &mut slots).unwrap();
    slots
}

fn query(store: &mut StablePages<SimSlots>, node: Node, number: u64) -> Option<StableSlot> {
    let mut answers = Vec::new();
    store.query(node, &[hash(number)], &mut answers).unwrap();
    match answers[..] {
        [Answer::Stable(slot)] => Some(slot),
        [Answer::Unknown] => None,
        _ => panic!("{answers:?}"),
    }
}

#[test]
fn pages_published_together_have_neighbouring_slots() {
    let world = World::new();
    let mut store = store(&world, 256);
    let slots = publish(&mut store, Node::ANY, &(0..2000).collect::<Vec<_>>());
    assert!(slots.windows(2).all(|pair| pair[0].is_followed_by(pair[1])));
    for number in 0..2000 {
        assert_eq!(query(&mut store, Node::ANY, number), Some(slots[number as usize]));
        assert_eq!(store.references(slots[number as usize]), 2);
    }
    assert_eq!(query(&mut store, Node::ANY, 2000), None);
    assert_eq!(store.counts().pages_shared, 2000);
}

#[test]
fn nodes_are_apart() {
    let world = World::new();
    let mut store = store(&world, 256);
    let slots = [publish(&mut store, Node(0), &[7])[0], publish(&mut store, Node(3), &[7])[0]];
    assert_eq!(query(&mut store, Node(0), 7), Some(slots[0]));
    assert_eq!(query(&mut store, Node(3), 7), Some(slots[1]));
    assert_eq!(query(&mut store, Node(1), 7), None);
    assert_eq!(query(&mut store, Node::ANY, 7), None);
    assert_eq!(world.slot_nodes()[&slots[1]], Node(3));
    assert_eq!(store.counts().stable_node_chains, 0);
}

#[test]
fn the_last_reference_frees_the_slot() {
    let world = World::new();
    let mut store = store(&world, 256);
    let slot = publish(&mut store, Node::ANY, &[7])[0];
    assert_eq!(query(&mut store, Node::ANY, 7), Some(slot));
    store.shared(slot);
    store.unused(slot);
    assert_eq!((store.references(slot), world.slots_in_use()), (1, 1));
    store.release(slot);
    assert_eq!((store.references(slot), world.slots_in_use()), (0, 0));
    assert_eq!(query(&mut store, Node::ANY, 7), None);
    assert_eq!(store.counts().pages_shared, 0);
    // An absent page is not counted.
    store.release(slot);
    assert_eq!(
        store.counts(),
        StoreCounts { metadata_bytes: store.counts().metadata_bytes, ..StoreCounts::default() }
    );
}

#[test]
fn new_sharers_go_to_the_fullest_page_with_room() {
    let world = World::new();
    let mut store = store(&world, 4);
    let first = publish(&mut store, Node::ANY, &[7])[0];
    (0..3).for_each(|_| assert_eq!(query(&mut store, Node::ANY, 7), Some(first)));
    assert_eq!(query(&mut store, Node::ANY, 7), None, "it is full");
    let second = publish(&mut store, Node::ANY, &[7])[0];
    let third = publish(&mut store, Node::ANY, &[7])[0];
    let counts = store.counts();
    assert_eq!(
        (counts.pages_shared, counts.stable_node_chains, counts.stable_node_dups),
        (3, 1, 3)
    );
    let next = query(&mut store, Node::ANY, 7).unwrap();
    assert_eq!(query(&mut store, Node::ANY, 7), Some(next), "one of them fills up first");
    let other = if next == second { third } else { second };
    assert_ne!(next, first);
    // The first has room for one again, too: of two that are as full, it is taken.
    store.release(first);
    assert_eq!(query(&mut store, Node::ANY, 7), Some(first));
    // All but one leave: the chain is dissolved, and the one is still found.
    while store.references(first) > 0 {
        store.release(first);
    }
    while store.references(next) > 0 {
        store.release(next);
    }
    let counts = store.counts();
    assert_eq!(
        (counts.pages_shared, counts.stable_node_chains, counts.stable_node_dups),
        (1, 0, 0)
    );
    assert_eq!(query(&mut store, Node::ANY, 7), Some(other));
    assert_eq!(world.slots_in_use(), 1);
}

#[test]
fn a_retired_page_gets_no_sharers_and_keeps_those_it_has() {
    let world = World::new();
    let mut store = store(&world, 4);
    let slot = publish(&mut store, Node(1), &[7])[0];
    assert_eq!(query(&mut store, Node(1), 7), Some(slot));
    store.retire(slot);
    store.retire(slot);
    assert_eq!(query(&mut store, Node(1), 7), None);
    let other = publish(&mut store, Node(1), &[7])[0];
    assert_eq!(query(&mut store, Node(1), 7), Some(other));
    assert_eq!(store.counts().pages_shared, 2);
    store.release(slot);
    assert_eq!(world.slots_in_use(), 2);
    store.release(slot);
    assert_eq!(world.slots_in_use(), 1);
    assert_eq!(query(&mut store, Node(1), 7), Some(other));
}

#[test]
fn without_room_nothing_is_published() {
    let world = World::new();
    let mut store = store(&world, 4);
    world.set_room(false);
    let mut slots = Vec::new();
    let error = store.publish(Node(2), &[hash(1)], &[0; 4096], &mut slots).unwrap_err();
    assert!(error.to_string().starts_with("no room for another stable page on node 2"), "{error}");
    assert!(slots.is_empty());
    assert_eq!((world.slots_in_use(), store.counts().pages_shared), (0, 0));
}

#[test]
fn a_neighbour_gets_the_page_behind() {
    let world = World::new();
    let mut store = store(&world, 4);
    let slots = publish(&mut store, Node::ANY, &[7, 7, 7, 8]);
    let mut ask = |numbers: &[u64]| {
        let hashes: Vec<PageHash> = numbers.iter().map(|&number| hash(number)).collect();
        let mut answers = Vec::new();
        store.query(Node::ANY, &hashes, &mut answers).unwrap();
        let place = |answer: &Answer| slots.iter().position(|slot| answer.slot() == Some(*slot));
        answers.iter().map(place).collect::<Vec<_>>()
    };
    assert_eq!(ask(&[7, 7, 7, 8, 7]), [Some(0), Some(1), Some(2), Some(3), Some(0)]);
    assert_eq!(ask(&[7, 8, 7]), [Some(0), Some(3), Some(1)]);
    // The first is full, and soon the second.
    assert_eq!(ask(&[7, 7, 7]), [Some(1), Some(2), Some(2)]);
}

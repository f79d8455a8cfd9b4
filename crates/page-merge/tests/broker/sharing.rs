//! Clients that share pages.

use ebb_page_merge::Nodes;
use ebb_page_merge::broker::{Limits, NodeStatus};
use ebb_page_merge::{Answer, Node, StableStore, StoreError};

use crate::support::{Member, NOTHING, PAGE, Running, page};

#[test]
fn two_clients_find_each_others_pages_in_one_memory_file() {
    let broker = Running::new(Limits::default());
    let (mut a, mut b) = (broker.member("web"), broker.member("web"));
    assert_eq!(a.query(1), Answer::Unknown);
    assert_eq!(b.query(1), Answer::Wanted);
    let slot = b.make(&[1])[0];
    assert_eq!(a.take_notifications(), [(Node::ANY, a.hash(1))]);
    assert!(b.take_notifications().is_empty());
    assert_eq!(a.share(1), slot);
    assert_eq!((a.read(slot), b.read(slot)), (page(1), page(1)));
    let inode = |member: &Member| {
        let files = member.segments.files.lock().unwrap();
        let stat = rustix::fs::fstat(&files[&slot.segment]).unwrap();
        (stat.st_dev, stat.st_ino)
    };
    assert_eq!(inode(&a), inode(&b));
    // Two sharers, as the counts report.
    b.take_notifications();
    assert_eq!(broker.pages_of("web"), NodeStatus { stable_pages: 1, sharers: 2, ..NOTHING });
    assert_eq!(broker.pages_of("web").saved_pages(), 1);
    assert_eq!(a.store.counts().pages_shared, 1);
}

#[test]
fn neighbouring_pages_get_neighbouring_slots() {
    let broker = Running::new(Limits::default());
    let mut member = broker.member("web");
    let numbers: Vec<u64> = (0..300).collect();
    let slots = member.make(&numbers);
    assert!(slots.windows(2).all(|pair| pair[0].is_followed_by(pair[1])), "{slots:?}");
    for (&slot, number) in slots.iter().zip(numbers) {
        assert_eq!(member.read(slot), page(number));
    }
}

#[test]
fn counts_of_many_clients_are_exact_and_memory_is_freed() {
    const CLIENTS: u64 = 24;
    const PAGES: u64 = 200;
    let broker =
        Running::new(Limits { max_page_sharing: 5, clients_of_process: 24, ..Limits::default() });
    let mut clients: Vec<Member> = (0..CLIENTS).map(|_| broker.member("web")).collect();
    let mut held = Vec::new();
    for (number, client) in clients.iter_mut().enumerate() {
        let mut slots = Vec::new();
        for page in 0..PAGES {
            match client.query(page) {
                Answer::Stable(slot) => {
                    client.store.shared(slot);
                    slots.push(slot);
                }
                Answer::Unknown | Answer::Wanted => slots.extend(client.make(&[page])),
            }
        }
        // Pages of this client only.
        slots.extend(client.make(&[1000 + number as u64]));
        client.take_notifications();
        held.push(slots);
    }
    let duplicates = CLIENTS.div_ceil(5) * PAGES;
    let expected = NodeStatus {
        stable_pages: duplicates + CLIENTS,
        sharers: CLIENTS * (PAGES + 1),
        ..NOTHING
    };
    assert_eq!(broker.pages_of("web"), expected);
    for (client, slots) in clients.iter().zip(&held) {
        for (&slot, number) in slots.iter().zip(0..PAGES) {
            assert_eq!(client.read(slot), page(number));
        }
    }
    for (client, slots) in clients.iter_mut().zip(held) {
        for slot in slots {
            client.store.release(slot);
        }
        client.take_notifications();
    }
    assert_eq!(broker.pages_of("web"), NOTHING);
    let domain = broker.domain("web").unwrap();
    assert_eq!((domain.segments, domain.segment_pages), (0, 0));
    for client in &mut clients {
        client.take_notifications();
        assert!(client.segments.numbers().is_empty(), "a closed segment is kept");
    }
}

#[test]
fn a_released_slot_is_reused_and_others_keep_theirs() {
    let broker = Running::new(Limits::default());
    let (mut a, mut b) = (broker.member("web"), broker.member("web"));
    let slots = a.make(&[1, 2, 3]);
    b.share(1);
    for &slot in &slots {
        a.store.release(slot);
    }
    a.take_notifications();
    assert_eq!(broker.pages_of("web"), NodeStatus { stable_pages: 1, sharers: 1, ..NOTHING });
    let fresh = a.make(&[4, 5]);
    assert_eq!(fresh, slots[1..], "free slots are used before others");
    assert_eq!(b.read(slots[0]), page(1));
    assert_eq!(b.share(5), fresh[1]);
}

#[test]
fn an_exceeded_quota_is_reported_and_changes_nothing() {
    let broker = Running::new(Limits::default().with_quota(100 * PAGE as u64));
    let mut member = broker.member("web");
    let numbers: Vec<u64> = (0..51).collect();
    let contents: Vec<u8> = numbers.iter().flat_map(|&number| page(number)).collect();
    let hashes: Vec<_> = numbers.iter().map(|&number| member.hash(number)).collect();
    let mut slots = Vec::new();
    // One client may publish half of the quota.
    let error = member.store.publish(Node::ANY, &hashes, &contents, &mut slots).unwrap_err();
    assert!(matches!(error, StoreError::NoRoom { node: Node::ANY, .. }), "{error}");
    assert!(error.to_string().contains("50"), "{error}");
    assert!(slots.is_empty());
    member.take_notifications();
    assert_eq!(broker.pages_of("web"), NOTHING);
    assert!(member.store.why_gone().is_none());
    member.make(&numbers[..50]);
}

#[test]
fn a_batch_that_fails_half_way_leaves_nothing() {
    let broker = Running::new(Limits { published_pages: 100, ..Limits::default() });
    let mut member = broker.member("web");
    let numbers: Vec<u64> = (0..128).collect();
    let contents: Vec<u8> = numbers.iter().flat_map(|&number| page(number)).collect();
    let hashes: Vec<_> = numbers.iter().map(|&number| member.hash(number)).collect();
    let mut slots = Vec::new();
    member.store.publish(Node::ANY, &hashes, &contents, &mut slots).unwrap_err();
    assert!(slots.is_empty());
    member.take_notifications();
    assert_eq!(broker.pages_of("web"), NOTHING);
}

#[test]
fn nodes_that_are_kept_apart_have_their_own_pages_and_others_do_not_exist() {
    let broker = Running::new(Limits::default());
    let mut member = Member::join(&broker.path(), "numa", Nodes::Apart).unwrap();
    member.make(&[1]);
    member.node = Node(999);
    let mut answers = Vec::new();
    let hash = member.hash(1);
    for node in [Node(999), Node::ANY] {
        let error = member.store.query(node, &[hash], &mut answers).unwrap_err();
        assert!(matches!(error, StoreError::NoRoom { .. }), "{error}");
        assert!(error.to_string().contains("[0"), "which nodes there are: {error}");
    }
    assert!(answers.is_empty() && member.store.why_gone().is_none());
    let domain = broker.domain("numa").unwrap();
    assert_eq!((domain.placement, domain.nodes[0].node), (Nodes::Apart, Some(0)));
}

#[test]
fn pages_of_a_node_that_is_new_on_the_host_are_anywhere() {
    let broker = Running::new(Limits::default());
    let mut member = broker.member("web");
    let (hash, mut slots) = (member.hash(1), Vec::new());
    member.store.publish(Node(999), &[hash], &page(1), &mut slots).unwrap();
    assert_eq!(slots.len(), 1);
    let domain = broker.domain("web").unwrap();
    let pages: Vec<_> = domain.nodes.iter().map(|node| (node.node, node.stable_pages)).collect();
    assert_eq!(pages, [(None, 1)]);
}

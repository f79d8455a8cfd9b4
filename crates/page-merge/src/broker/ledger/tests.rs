use super::sim::{SimPages, hash, hasher, page};
use super::*;

const NODE: Node = Node(0);

fn ledger(limits: Limits) -> (Ledger<SimPages>, SimPages) {
    let pages = SimPages::new(4);
    (Ledger::new(pages.clone(), Nodes::Apart, hasher(), limits), pages)
}

fn query(ledger: &mut Ledger<SimPages>, member: MemberId, number: u8) -> Answer {
    let mut answers = Vec::new();
    ledger.query(member, NODE, &[hash(number)], &mut answers);
    answers[0]
}

fn publish(
    ledger: &mut Ledger<SimPages>,
    member: MemberId,
    numbers: &[u8],
) -> Result<Vec<StableSlot>, NoRoom> {
    let contents: Vec<u8> = numbers.iter().flat_map(|&number| page(number)).collect();
    let mut slots = Vec::new();
    ledger.publish(member, NODE, &contents, &mut slots).map(|()| slots)
}

#[test]
fn two_clients_share_a_page() {
    let (mut ledger, pages) = ledger(Limits::default());
    let (a, b) = (ledger.join().unwrap(), ledger.join().unwrap());
    assert_eq!(query(&mut ledger, a, 1), Answer::Unknown);
    assert_eq!(query(&mut ledger, a, 1), Answer::Unknown, "a client is not its own partner");
    assert_eq!(query(&mut ledger, b, 1), Answer::Wanted);
    let slot = publish(&mut ledger, b, &[1]).unwrap()[0];
    assert_eq!(pages.content(slot), Some(page(1)));
    assert_eq!(ledger.take_notifications(a, 10), [(NODE, hash(1))]);
    assert!(ledger.take_notifications(b, 10).is_empty());
    assert_eq!(query(&mut ledger, a, 1), Answer::Stable(slot));
    for member in [a, b] {
        ledger.change(member, Change::Shared, slot).unwrap();
    }
    let counts = ledger.counts()[&NODE];
    assert_eq!(counts, NodeCounts { pages: 1, shares: 2, reservations: 0, remembered_hashes: 0 });
    ledger.change(a, Change::Released, slot).unwrap();
    assert_eq!(pages.in_use(), 1);
    ledger.change(b, Change::Released, slot).unwrap();
    assert_eq!(pages.in_use(), 0);
    assert_eq!(query(&mut ledger, a, 1), Answer::Unknown);
}

#[test]
fn only_own_shares_and_reservations_can_be_released() {
    let (mut ledger, pages) = ledger(Limits::default());
    let (a, b) = (ledger.join().unwrap(), ledger.join().unwrap());
    let slot = publish(&mut ledger, a, &[1]).unwrap()[0];
    let nowhere = StableSlot { segment: 9, index: 9 };
    for change in [Change::Shared, Change::Released, Change::Unused, Change::Retired] {
        assert_eq!(ledger.change(b, change, slot), Err(NotHeld(slot)), "{change:?}");
        assert_eq!(ledger.change(a, change, nowhere), Err(NotHeld(nowhere)), "{change:?}");
    }
    // A reservation is not a share, nor the reverse.
    assert_eq!(ledger.change(a, Change::Released, slot), Err(NotHeld(slot)));
    ledger.change(a, Change::Shared, slot).unwrap();
    assert_eq!(ledger.change(a, Change::Unused, slot), Err(NotHeld(slot)));
    assert_eq!(ledger.change(a, Change::Shared, slot), Err(NotHeld(slot)));
    assert_eq!(pages.in_use(), 1);
}

#[test]
fn a_published_page_is_found_under_its_own_hash() {
    let (mut ledger, _) = ledger(Limits::default());
    let (honest, liar) = (ledger.join().unwrap(), ledger.join().unwrap());
    assert_eq!(query(&mut ledger, honest, 1), Answer::Unknown);
    assert_eq!(query(&mut ledger, liar, 1), Answer::Wanted);
    // The hash claimed by the client was that of page 1.
    let slot = publish(&mut ledger, liar, &[2]).unwrap()[0];
    assert_eq!(query(&mut ledger, honest, 1), Answer::Wanted);
    assert!(ledger.take_notifications(honest, 10).is_empty());
    assert_eq!(query(&mut ledger, honest, 2), Answer::Stable(slot));
}

#[test]
fn equal_pages_of_two_publishers_become_one() {
    let (mut ledger, pages) = ledger(Limits::default());
    let (a, b) = (ledger.join().unwrap(), ledger.join().unwrap());
    let first = publish(&mut ledger, a, &[1, 2]).unwrap();
    let second = publish(&mut ledger, b, &[3, 2, 1]).unwrap();
    assert_eq!(second[1..], [first[1], first[0]]);
    assert_eq!(pages.in_use(), 3);
}

#[test]
fn a_page_with_all_its_sharers_gets_a_duplicate() {
    let (mut ledger, pages) = ledger(Limits { max_page_sharing: 2, ..Limits::default() });
    let members: Vec<_> = (0..5).map(|_| ledger.join().unwrap()).collect();
    let first = publish(&mut ledger, members[0], &[1]).unwrap()[0];
    assert_eq!(query(&mut ledger, members[1], 1), Answer::Stable(first));
    assert_eq!(query(&mut ledger, members[2], 1), Answer::Wanted);
    let second = publish(&mut ledger, members[2], &[1]).unwrap()[0];
    assert_ne!(first, second);
    assert_eq!(query(&mut ledger, members[3], 1), Answer::Stable(second));
    assert_eq!(query(&mut ledger, members[4], 1), Answer::Wanted);
    // Room again on the first one.
    ledger.change(members[0], Change::Unused, first).unwrap();
    assert_eq!(query(&mut ledger, members[4], 1), Answer::Stable(first));
    assert_eq!(pages.in_use(), 2);
    for member in members {
        ledger.leave(member);
    }
    assert_eq!(pages.in_use(), 0);
    let fresh = ledger.join().unwrap();
    assert_eq!(query(&mut ledger, fresh, 1), Answer::Unknown);
}

#[test]
fn one_batch_cannot_exceed_the_sharers_of_a_page() {
    let (mut ledger, _) = ledger(Limits { max_page_sharing: 2, ..Limits::default() });
    let member = ledger.join().unwrap();
    publish(&mut ledger, member, &[1]).unwrap();
    let slots = publish(&mut ledger, member, &[1, 1, 1]).unwrap();
    assert!(slots[0] != slots[1] && slots[1] != slots[2]);
}

#[test]
fn a_retired_page_gets_no_more_sharers_and_keeps_those_it_has() {
    let (mut ledger, pages) = ledger(Limits::default());
    let (a, b) = (ledger.join().unwrap(), ledger.join().unwrap());
    let slot = publish(&mut ledger, a, &[1]).unwrap()[0];
    ledger.change(a, Change::Shared, slot).unwrap();
    ledger.change(a, Change::Retired, slot).unwrap();
    assert_eq!(query(&mut ledger, b, 1), Answer::Unknown);
    let other = publish(&mut ledger, b, &[1]).unwrap()[0];
    assert_ne!(other, slot);
    assert_eq!(pages.content(slot), Some(page(1)));
    ledger.change(a, Change::Released, slot).unwrap();
    assert_eq!(pages.content(slot), None);
    assert_eq!(query(&mut ledger, a, 1), Answer::Stable(other));
}

/// Many pages of one content: whichever leaves, the others are still found.
#[test]
fn duplicates_come_and_go_in_any_order() {
    let (mut ledger, pages) = ledger(Limits { max_page_sharing: 3, ..Limits::default() });
    let mut members: Vec<_> = (0..3).map(|_| ledger.join().unwrap()).collect();
    let mut held: Vec<(MemberId, StableSlot)> = Vec::new();
    let mut random = 1_u32;
    for step in 0..3000_usize {
        random ^= random << 13;
        random ^= random >> 17;
        random ^= random << 5;
        let member = members[random as usize % 3];
        match (random >> 8) % 8 {
            0..4 => {
                let number = (random >> 16) as u8 % 2;
                let slot = match query(&mut ledger, member, number) {
                    Answer::Stable(slot) => slot,
                    _ => publish(&mut ledger, member, &[number]).unwrap()[0],
                };
                held.push((member, slot));
            }
            4..7 if !held.is_empty() => {
                let (member, slot) = held.swap_remove(random as usize / 64 % held.len());
                if random & 32 == 0 {
                    ledger.change(member, Change::Retired, slot).unwrap();
                }
                ledger.change(member, Change::Unused, slot).unwrap();
            }
            7 if step % 50 == 0 => {
                ledger.leave(member);
                held.retain(|(of, _)| *of != member);
                members[random as usize % 3] = ledger.join().unwrap();
            }
            _ => {}
        }
        ledger.check();
    }
    for member in members {
        ledger.leave(member);
    }
    ledger.check();
    assert_eq!(pages.in_use(), 0);
}

#[test]
fn more_clients_leave_fewer_remembered_hashes_for_each() {
    let limits = Limits { remembered_hashes: 40, domain_hashes: 60, ..Limits::default() };
    let (mut ledger, _) = ledger(limits);
    for _ in 0..4 {
        let member = ledger.join().unwrap();
        for number in 0..100 {
            query(&mut ledger, member, number);
        }
    }
    // 40 for the first one, half of 60 for the second, a third and a quarter of 60.
    assert!(ledger.counts()[&NODE].remembered_hashes <= 40 + 30 + 20 + 15, "{:?}", ledger.counts());
}

#[test]
fn a_lost_connection_frees_nothing_and_the_end_of_the_process_everything() {
    let (mut ledger, pages) = ledger(Limits::default());
    let (a, b) = (ledger.join().unwrap(), ledger.join().unwrap());
    let slot = publish(&mut ledger, a, &[1]).unwrap()[0];
    ledger.change(a, Change::Shared, slot).unwrap();
    query(&mut ledger, a, 7);
    assert!(ledger.disconnect(a));
    assert_eq!(pages.content(slot), Some(page(1)));
    // It is no longer a partner, but its shares remain.
    assert_eq!(query(&mut ledger, b, 7), Answer::Unknown);
    assert_eq!(query(&mut ledger, b, 1), Answer::Stable(slot));
    ledger.change(b, Change::Unused, slot).unwrap();
    ledger.leave(a);
    assert_eq!(pages.in_use(), 0);
    assert!(!ledger.disconnect(b), "it holds nothing");
}

#[test]
fn everything_that_a_client_can_make_grow_has_a_limit() {
    let limits = Limits {
        domain_pages: 5,
        published_pages: 3,
        reservations: 4,
        remembered_hashes: 10,
        notifications: 2,
        ..Limits::default()
    };
    let (mut ledger, pages) = ledger(limits);
    let (a, b) = (ledger.join().unwrap(), ledger.join().unwrap());
    let published = publish(&mut ledger, a, &[1, 2, 3]).unwrap();
    assert!(matches!(publish(&mut ledger, a, &[4]), Err(NoRoom::Client(3))));
    assert!(matches!(publish(&mut ledger, b, &[4, 5, 6]), Err(NoRoom::Domain(5))));
    publish(&mut ledger, b, &[4, 5]).unwrap();
    assert!(matches!(publish(&mut ledger, b, &[6]), Err(NoRoom::Domain(5))));
    // A refused publication leaves nothing, not even references to existing pages.
    let before = ledger.counts()[&NODE];
    assert!(matches!(publish(&mut ledger, b, &[1, 6]), Err(NoRoom::Domain(5))));
    assert_eq!(ledger.counts()[&NODE], before);
    assert_eq!(pages.in_use(), 5);
    // Two reservations are left to b.
    assert_eq!(query(&mut ledger, b, 1), Answer::Stable(published[0]));
    assert_eq!(query(&mut ledger, b, 1), Answer::Stable(published[0]));
    assert_eq!(query(&mut ledger, b, 1), Answer::Unknown);
    assert!(matches!(publish(&mut ledger, b, &[1]), Err(NoRoom::Reservations(4))));
    // Pages published by a client count until they have no holder.
    for &slot in &published {
        ledger.change(a, Change::Unused, slot).unwrap();
    }
    assert_eq!(pages.in_use(), 3);
    publish(&mut ledger, a, &[7, 8]).unwrap();
    assert!(publish(&mut ledger, a, &[9]).is_err());
    for number in 20..200 {
        query(&mut ledger, a, number);
    }
    assert!(ledger.counts()[&NODE].remembered_hashes <= 11);
    for slot in [published[0]; 2] {
        ledger.change(b, Change::Unused, slot).unwrap();
    }
    for number in [197, 198] {
        let slot = publish(&mut ledger, b, &[number]).unwrap()[0];
        ledger.change(b, Change::Unused, slot).unwrap();
    }
    let slot = publish(&mut ledger, b, &[199]).unwrap()[0];
    ledger.change(b, Change::Unused, slot).unwrap();
    assert_eq!(ledger.take_notifications(a, 10), [(NODE, hash(198)), (NODE, hash(199))]);
}

#[test]
fn a_failed_system_call_leaves_nothing_behind() {
    let (mut ledger, pages) = ledger(Limits::default());
    let member = ledger.join().unwrap();
    pages.files.borrow_mut().fail_next = true;
    assert!(matches!(publish(&mut ledger, member, &[1, 2]), Err(NoRoom::System(_))));
    assert_eq!((pages.in_use(), ledger.counts().len()), (0, 0));
    publish(&mut ledger, member, &[1, 2]).unwrap();
}

#[test]
fn closed_segments_are_announced_to_clients_that_know_them() {
    let (mut ledger, _) = ledger(Limits::default());
    let (a, b) = (ledger.join().unwrap(), ledger.join().unwrap());
    let slot = publish(&mut ledger, a, &[1]).unwrap()[0];
    assert!(ledger.announce(a, slot.segment));
    assert!(!ledger.announce(a, slot.segment));
    ledger.change(a, Change::Unused, slot).unwrap();
    assert_eq!(ledger.take_closed(a, 10), [slot.segment]);
    assert!(ledger.take_closed(a, 10).is_empty());
    assert!(ledger.take_closed(b, 10).is_empty());
}

#[test]
fn across_nodes_contents_are_found_wherever_they_are() {
    let (apart, pages) = ledger(Limits::default());
    drop(apart);
    let mut ledger = Ledger::new(pages, Nodes::Across, hasher(), Limits::default());
    let (a, b) = (ledger.join().unwrap(), ledger.join().unwrap());
    let (mut first, mut second, mut answers) = (Vec::new(), Vec::new(), Vec::new());
    ledger.publish(a, Node(1), &page(1), &mut first).unwrap();
    assert_eq!(first[0].segment, 1000);
    ledger.query(b, Node::ANY, &[hash(1)], &mut answers);
    assert_eq!(answers, [Answer::Stable(first[0])]);
    ledger.publish(b, Node(0), &page(1), &mut second).unwrap();
    assert_eq!(second, first);
}

#[test]
fn nodes_have_nothing_in_common() {
    let (mut ledger, _) = ledger(Limits::default());
    let (a, b) = (ledger.join().unwrap(), ledger.join().unwrap());
    publish(&mut ledger, a, &[1]).unwrap();
    query(&mut ledger, a, 2);
    let mut answers = Vec::new();
    ledger.query(b, Node(1), &[hash(1), hash(2)], &mut answers);
    assert_eq!(answers, [Answer::Unknown; 2]);
    let mut slots = Vec::new();
    ledger.publish(b, Node(1), &page(1), &mut slots).unwrap();
    assert_eq!(slots[0].segment, 1000);
    assert!(ledger.take_notifications(a, 10).is_empty());
}

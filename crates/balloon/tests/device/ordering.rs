//! Order of discard and answer, as seen by a guest that uses a page as soon as it has it back.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Barrier};
use std::thread;

use ebb_abi::balloon::{Feature, Features, QueueKind};
use ebb_balloon::testing::{Buffer, Guest};
use vm_memory::{Bytes, GuestAddress};

/// Rounds in which the guest races with the device.
const ROUNDS: u64 = 50;

/// Chains of a round.
const CHAINS: u64 = 32;

/// Runs rounds in which a second thread writes to each page as soon as its chain is in the used
/// ring, and returns how many of these writes were lost.
fn lost_writes(
    negotiated: Features,
    kind: QueueKind,
    chain: impl Fn(&mut Guest, u64) -> Buffer,
) -> u64 {
    let mut guest = Guest::with_features(negotiated);
    let page = |index: u64| GuestAddress((600 + 2 * index) * 4096);
    let mut lost = 0;
    for round in 0..ROUNDS {
        for index in 0..CHAINS {
            let buffer = chain(&mut guest, page(index).0);
            guest.offer(kind, &[buffer]);
        }
        let ram = Arc::clone(&guest.ram);
        let used_index = GuestAddress(guest.used_index_address(kind));
        let start = Arc::new(Barrier::new(2));
        let racer = thread::spawn({
            let start = Arc::clone(&start);
            move || {
                start.wait();
                for index in 0..CHAINS {
                    let wanted = (round * CHAINS + index + 1) as u16;
                    let used = || ram.memory().load::<u16>(used_index, Ordering::Acquire).unwrap();
                    while used().wrapping_sub(wanted) > u16::MAX / 2 {
                        std::hint::spin_loop();
                    }
                    ram.memory().write_obj(0x5a_u8, page(index)).unwrap();
                }
            }
        });
        start.wait();
        let _ = guest.kick(kind);
        racer.join().unwrap();
        let content = |index| guest.ram.memory().read_obj::<u8>(page(index)).unwrap();
        lost += (0..CHAINS).filter(|index| content(*index) != 0x5a).count() as u64;
    }
    assert_eq!(guest.balloon.counters().discard.bytes, ROUNDS * CHAINS * 4096);
    lost
}

#[test]
fn a_reported_page_is_discarded_before_the_guest_has_it_back() {
    let chain = |_: &mut Guest, address| Buffer { address, length: 4096, writable: true };
    assert_eq!(lost_writes(Features::ALL_BALLOON, QueueKind::Reporting, chain), 0);
}

#[test]
fn without_must_tell_host_an_inflated_page_is_discarded_before_the_answer() {
    let negotiated = Features::ALL_BALLOON.without(Feature::MustTellHost);
    let chain = |guest: &mut Guest, address| guest.pfns([(address / 4096) as u32]);
    assert_eq!(lost_writes(negotiated, QueueKind::Inflate, chain), 0);
}

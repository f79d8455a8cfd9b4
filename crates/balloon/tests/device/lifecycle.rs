//! Activation, reset, targets, snapshots.

use std::sync::Arc;

use ebb_abi::balloon::{Feature, Features, QueueKind, StatisticsEntry};
use ebb_balloon::testing::{Guest, REGION_BYTES, Setup};
use ebb_balloon::{Balloon, BalloonConfig, BalloonError, BalloonState, STATE_VERSION};
use virtio_queue::QueueT;

const FIRST: u32 = 512;

#[test]
fn a_target_larger_than_memory_is_refused_by_name_and_number() {
    let mut guest = Guest::with_all_features();
    assert_eq!(guest.balloon.set_target_bytes(2 * REGION_BYTES), Ok(true));
    assert_eq!(guest.balloon.set_target_bytes(2 * REGION_BYTES), Ok(false));
    assert_eq!(
        guest.balloon.set_target_bytes(2 * REGION_BYTES + 1000),
        Err(BalloonError::TargetTooLarge {
            target_bytes: 2 * REGION_BYTES + 1000,
            ram_bytes: 2 * REGION_BYTES,
        })
    );
    assert!(guest.balloon.set_target_bytes(u64::MAX).is_err());
    assert_eq!(guest.balloon.target_bytes(), 2 * REGION_BYTES);
    assert_eq!(guest.balloon.set_target_bytes(4095), Ok(true));
    assert_eq!(guest.balloon.target_bytes(), 0);
    let config = BalloonConfig { target_bytes: 1 << 50, ..BalloonConfig::default() };
    assert!(matches!(
        Balloon::new(config, Arc::clone(&guest.ram)),
        Err(BalloonError::TargetTooLarge { .. })
    ));
}

#[test]
fn a_reloaded_driver_finds_an_empty_balloon() {
    let mut guest = Guest::with_all_features();
    guest.mark(guest.low_pages());
    guest.balloon.set_target_bytes(8 << 20).unwrap();
    guest.balloon.write_config(4, &256_u32.to_le_bytes());
    guest.balloon.write_config(12, &0_u32.to_le_bytes());
    let _ = guest.inflate(FIRST..FIRST + 256);
    guest.balloon.reset();
    assert_eq!((guest.balloon.actual_bytes(), guest.balloon.target_bytes()), (0, 8 << 20));
    assert_eq!(guest.balloon.counters().discard.dropped_bytes, 1 << 20);
    assert!(!guest.balloon.info().active);

    // Waiting pages belong to the guest again.
    guest.activate();
    let _ = guest.inflate(FIRST + 256..FIRST + 512);
    guest.balloon.flush();
    assert_eq!(guest.unmarked(guest.low_pages()), (768..1024).collect::<Vec<_>>());
    assert_eq!(guest.balloon.counters().activations, 2);
}

#[test]
fn activation_checks_features_and_queues() {
    let mut guest = Guest::new(Setup {
        offered: Features(0b10_0001),
        negotiated: Features(0b10_0001),
        ..Setup::default()
    });
    let queues = guest.fresh_queues();
    assert_eq!(guest.balloon.activate(0, queues), Err(BalloonError::AlreadyActive));

    guest.balloon.reset();
    let queues = guest.fresh_queues();
    let refused = guest.balloon.activate(Feature::StatisticsQueue.mask(), queues);
    assert!(matches!(refused, Err(BalloonError::FeaturesNotOffered { .. })));

    let mut queues = guest.fresh_queues();
    queues[1].set_used_ring_address(Some(0xc000_0000), None);
    assert_eq!(guest.balloon.activate(0b1, queues), Err(BalloonError::InvalidQueue { index: 1 }));

    let mut queues = guest.fresh_queues();
    queues[1].set_ready(false);
    assert!(matches!(guest.balloon.activate(0b1, queues), Err(BalloonError::Queues(_))));
    assert!(!guest.balloon.info().active);

    // Bits of virtio and of the rings belong to the transport.
    let queues = guest.fresh_queues();
    let ring_bits = 1 << 28 | 1 << 29 | 1 << 32;
    assert_eq!(guest.balloon.activate(0b10_0001 | ring_bits, queues), Ok(()));
    assert_eq!(guest.balloon.info().features, ["MUST_TELL_HOST", "PAGE_REPORTING"]);
}

#[test]
fn only_balloon_features_are_offered() {
    let guest = Guest::with_all_features();
    let config = BalloonConfig { features: Features(u64::MAX), ..BalloonConfig::default() };
    let balloon = Balloon::new(config, Arc::clone(&guest.ram)).unwrap();
    assert_eq!(balloon.device_features(), 0xff | 0b1111 << 50);
    // The extension and the proposed features are offered only on request.
    assert_eq!(guest.balloon.device_features(), 0x3f);
    assert_eq!((guest.balloon.queue_max_sizes().len(), balloon.queue_max_sizes().len()), (5, 6));
}

#[test]
fn the_device_can_move_to_another_thread() {
    fn is_send<T: Send>(_: &T) {}
    is_send(&Guest::with_all_features().balloon);
}

#[test]
fn a_snapshot_keeps_the_statistics_buffer_and_the_balloon() {
    let mut guest = Guest::with_all_features();
    guest.mark(guest.low_pages());
    guest.balloon.set_target_bytes(4 << 20).unwrap();
    guest.balloon.write_config(4, &77_u32.to_le_bytes());
    let entry = guest.buffer(&StatisticsEntry { tag: 4, value: 9 }.to_bytes());
    let _ = guest.send(QueueKind::Statistics, &[entry]);
    let _ = guest.inflate([FIRST]);

    let state = guest.balloon.save();
    // No pages wait in a snapshot.
    assert_eq!(guest.unmarked(guest.low_pages()), [u64::from(FIRST)]);
    let text = serde_json::to_string(&state).unwrap();
    let state: BalloonState = serde_json::from_str(&text).unwrap();

    let mut queues = guest.fresh_queues();
    queues[2].set_next_avail(1);
    let mut balloon = Balloon::restore(&state, Arc::clone(&guest.ram), queues).unwrap();
    assert_eq!((balloon.target_bytes(), balloon.actual_bytes()), (4 << 20, 77 * 4096));
    assert_eq!(balloon.negotiated(), Features::ALL_BALLOON);
    assert!(balloon.request_statistics());
    assert_eq!(guest.used(QueueKind::Statistics), [0]);
}

#[test]
fn a_state_that_does_not_fit_is_refused() {
    let mut guest = Guest::with_all_features();
    let state = guest.balloon.save();
    let bad = [
        BalloonState { version: STATE_VERSION + 1, ..state.clone() },
        BalloonState { offered: 0, ..state.clone() },
        BalloonState { statistics_head: Some(5000), ..state.clone() },
        BalloonState { statistics_head: Some(0), negotiated: None, ..state.clone() },
        BalloonState { config: [0xff; 16], ..state.clone() },
    ];
    for state in bad {
        let queues = guest.fresh_queues();
        assert!(Balloon::restore(&state, Arc::clone(&guest.ram), queues).is_err(), "{state:?}");
    }
    let queues = guest.fresh_queues();
    assert!(Balloon::restore(&state, Arc::clone(&guest.ram), queues).is_ok());
}

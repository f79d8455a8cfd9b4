//! The balloon driver is loaded and unloaded while the guest runs.

use ebb_agent::protocol::Command;
use ebb_vmm::api::BalloonState;

use crate::guest::{Guest, MIB};
use crate::harness::{Scene, Test, counts, eventually, when};
use crate::setup::Setup;

/// The tests.
pub const TESTS: &[Test] =
    &[Test::new("driver::reload_with_a_full_balloon", 300, reload_with_a_full_balloon)];

fn unload(guest: &Guest) {
    guest.run(Command::UnloadModule { name: "virtio_balloon".to_owned() });
}

fn load(guest: &Guest) {
    guest.run(Command::LoadModule {
        path: "/modules/virtio_balloon.ko".to_owned(),
        parameters: String::new(),
    });
}

fn reload_with_a_full_balloon(scene: &Scene) {
    let guest = Setup::new(scene).balloon("reporting=on,deflate_on_oom=off").start();
    guest.run(Command::Hold { bytes: 64 * MIB, pattern: 21 });
    let total = guest.meminfo("MemTotal");
    for round in 0..counts(2, 5) {
        guest.inflate_to(128 * MIB);
        unload(&guest);
        let info = guest.balloon();
        assert_eq!(info.state, BalloonState::DriverAbsent, "round {round}");
        assert_eq!(info.negotiated_features, []);
        assert_eq!(
            (info.target_bytes, info.actual_bytes),
            (128 * MIB, 0),
            "the target is kept, the balloon is empty"
        );
        assert_eq!(
            guest.meminfo("MemTotal"),
            total,
            "the driver deflates the balloon before it is unloaded"
        );
        guest.run(Command::AllocTouchExit { bytes: 250 * MIB });
        assert_eq!(guest.wrong_pages(), 0, "round {round}");
        load(&guest);
        eventually("the new driver reaches the target", 30, || {
            let info = guest.balloon();
            when(info.actual_bytes == 128 * MIB, || format!("{info:?}"))
        });
        assert!(guest.statistics().is_ok() || guest.statistics().is_ok(), "round {round}");
    }
    // Also during an inflation.
    guest.set_target(300 * MIB);
    unload(&guest);
    load(&guest);
    guest.inflate_to(300 * MIB);
    guest.inflate_to(0);
    assert_eq!(guest.wrong_pages(), 0);
    for kind in ["broken_queue", "outside_ram", "bad_address", "extra_statistics", "discard_failed"]
    {
        assert_eq!(
            guest.metric(&format!("ebb_balloon_errors_total{{kind=\"{kind}\"}}")),
            0,
            "{kind}"
        );
    }
}

//! Merging of pages that forked machines have written since they were made.

use std::path::Path;

use ebb_agent::protocol::Command;
use ebb_page_merge::kernel::knobs::RUN_MERGE;
use ebb_page_merge::kernel::{Knob, Ksm, KsmGuard, SYSFS};
use ebb_vmm::api::MergeState;

use crate::forked::{Fork, checkpoint, failure, fork, silently, unique};
use crate::guest::MIB;
use crate::harness::{Scene, Test, eventually, when};
use crate::merge_support::{Broker, PAGE_BYTES, stable_frames};
use crate::setup::Setup;

/// The tests.
pub const TESTS: &[Test] = &[
    Test::new("merge_forks::by_their_monitors", 300, by_their_monitors).merging(),
    Test::new("merge_forks::by_the_kernel", 300, by_the_kernel).merging(),
];

/// Memory that each machine writes the same content to, in bytes.
const HELD: u64 = 8 * MIB;
/// Part of it that must be merged.
const MERGED: u64 = HELD / 4 * 3;

fn hold(forks: &[Fork], pattern: u64) {
    for fork in forks {
        fork.guest.run(Command::Hold { bytes: HELD, pattern });
    }
}

fn by_their_monitors(scene: &Scene) {
    let broker = Broker::start(scene, "broker");
    let parent = Setup::new(scene).memory("size=192M,thp=off").args(["--forkable"]).start();
    parent.run(Command::Hold { bytes: 2 * HELD, pattern: 5 });
    let name = unique(scene, "template");
    checkpoint(scene, &parent, &name);
    let memory = format!("merge=owner{}", broker.member("red"));
    let mut forks = fork(scene, &name, "a", 3, &["--memory", &memory]);
    for fork in &forks {
        let info = fork.guest.merge();
        assert_eq!((info.state, info.domain.as_deref()), (MergeState::Merging, Some("red")));
        fork.guest.merge_quickly();
    }
    hold(&forks, 9);
    for fork in &forks {
        fork.guest.wait_merged(MERGED);
        // Merged pages are mapped as soon as they are read.
        fork.guest.check_held();
    }
    let common = forks.iter().map(|fork| stable_frames(fork.pid()));
    let common = common.reduce(|all, one| all.intersection(&one).copied().collect()).unwrap();
    assert!(common.len() as u64 * PAGE_BYTES >= MERGED, "{} pages", common.len());
    // Nothing that they share with the template already.
    for fork in &forks {
        let hashed = fork.guest.merge_statistics().hashed_pages.unwrap();
        assert!(hashed * PAGE_BYTES < 2 * HELD + 8 * MIB, "{hashed} pages were read");
    }
    // One is killed, and the pages of the others stay.
    drop(forks.remove(0));
    hold(&forks, 11);
    for fork in &forks {
        fork.guest.wait_merged(2 * MERGED);
        fork.guest.check_held();
        fork.guest.inflate_to(32 * MIB);
        fork.guest.check_held();
        fork.guest.inflate_to(0);
    }
    let socket = forks[0].guest.socket().to_str().unwrap().to_owned();
    let text = failure(scene, &["ctl", &socket, "checkpoint", &unique(scene, "again")]);
    assert!(text.contains("pages are merged"), "{text}");
    forks[0].guest.unmerge();
    for fork in &forks {
        fork.guest.check_held();
    }
    assert_eq!(parent.wrong_pages(), 0);

    // What cannot be had is said before a machine is made.
    let text = failure(scene, &["fork", &name, "--memory", "merge=kernel"]);
    assert!(text.contains("start that with merge=kernel"), "{text}");
    let nowhere = scene.path("nowhere");
    let nowhere = format!("merge=owner,merge_domain=red,merge_broker={}", nowhere.display());
    let text = failure(scene, &["fork", &name, "--memory", &nowhere]);
    assert!(text.contains("nowhere"), "{text}");
    silently(scene, &["checkpoints", "remove", &name]);
    parent.end();
}

fn by_the_kernel(scene: &Scene) {
    let host = KsmGuard::new(Ksm::open(Path::new(SYSFS)).unwrap()).unwrap();
    let quick = [(Knob::PagesToScan, 800), (Knob::SleepMillisecs, 20), (Knob::Run, RUN_MERGE)];
    host.ksm().apply(&quick.into_iter().collect()).unwrap();
    let memory = "size=160M,thp=off,merge=kernel,merge_domain=red";
    let parent = Setup::new(scene).memory(memory).args(["--forkable"]).start();
    let name = unique(scene, "template");
    checkpoint(scene, &parent, &name);
    parent.end();
    let forks = fork(scene, &name, "a", 2, &[]);
    hold(&forks, 71);
    for fork in &forks {
        eventually("ksmd merges", 60, || {
            let info = fork.guest.merge();
            let merged = info.statistics.as_ref().and_then(|statistics| statistics.merged_bytes);
            when(merged >= Some(MERGED), || format!("{info:?}"))
        });
        fork.guest.check_held();
    }
    let text = failure(scene, &["fork", &name, "--memory", "merge=owner"]);
    assert!(text.contains("merge=kernel"), "{text}");
    // As long as one of them is there, machines of other domains stay out: forks, then the
    // checkpoint alone.
    let state_of_stranger = |socket: &str| {
        let memory = "size=128M,merge=kernel,merge_domain=blue";
        let stranger = Setup::new(scene).memory(memory).socket(socket).start_api();
        let state = stranger.merge().state;
        stranger.end();
        state
    };
    assert_eq!(state_of_stranger("first"), MergeState::Unavailable);
    drop(forks);
    assert_eq!(state_of_stranger("second"), MergeState::Unavailable);
    silently(scene, &["checkpoints", "remove", &name]);
    eventually("the checkpoint has ended", 20, || {
        let state = state_of_stranger("third");
        when(state == MergeState::Merging, || format!("{state:?}"))
    });
}

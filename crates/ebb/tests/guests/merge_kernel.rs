//! Merging by Linux's KSM on a machine's behalf: its settings are everybody's, so they are put
//! back.

use std::fs;

use ebb_agent::protocol::Command;
use ebb_vmm::api::{MergeScope, MergeState};
use rustix::process::Signal;
use serde_json::json;

use crate::guest::MIB;
use crate::harness::{Scene, Test, eventually, when};
use crate::setup::Setup;

/// The tests. They run where tests that merge do: settings of a host on which others are started
/// would be theirs, too.
pub const TESTS: &[Test] =
    &[Test::new("merge_kernel::settings_are_put_back", 240, settings_are_put_back).merging()];

/// Settings that merging changes.
const SETTINGS: [&str; 6] = [
    "run",
    "merge_across_nodes",
    "pages_to_scan",
    "sleep_millisecs",
    "max_page_sharing",
    "advisor_mode",
];

fn settings() -> Vec<String> {
    let read = |name: &&str| {
        let text = fs::read_to_string(format!("/sys/kernel/mm/ksm/{name}")).unwrap_or_default();
        format!("{name}={}", text.trim())
    };
    SETTINGS.iter().map(read).collect()
}

fn red<'a>(scene: &'a Scene, name: &str) -> Setup<'a> {
    let memory = "size=160M,thp=off,merge=kernel,merge_domain=red,merge_across_nodes=off";
    Setup::new(scene).memory(memory).socket(name)
}

fn settings_are_put_back(scene: &Scene) {
    let before = settings();
    assert!(
        before.contains(&"merge_across_nodes=1".to_owned()),
        "another one was here: {before:?}"
    );
    let mut first = red(scene, "first").start();
    first.set_merge(&json!({ "pages_per_second": 40_000 }));
    for _ in 0..2 {
        first.run(Command::Hold { bytes: 16 * MIB, pattern: 71 });
    }
    assert!(settings().contains(&"merge_across_nodes=0".to_owned()), "{:?}", settings());
    eventually("ksmd merges", 60, || {
        let info = first.merge();
        let merged = info.statistics.as_ref().and_then(|statistics| statistics.merged_bytes);
        when(merged >= Some(16 * MIB), || format!("{info:?}"))
    });
    let info = first.merge();
    assert_eq!(
        (info.state, info.statistics.unwrap().scope),
        (MergeState::Merging, MergeScope::Host)
    );
    first.check_held();
    // Nobody of another domain may join.
    let blue = Setup::new(scene).memory("size=128M,merge=kernel,merge_domain=blue");
    let stranger = blue.socket("stranger").start_api();
    let info = stranger.merge();
    assert_eq!(info.state, MergeState::Unavailable);
    assert!(info.reason.as_ref().is_some_and(|reason| reason.contains("red")), "{info:?}");
    stranger.end();
    // The last one that ends puts everything back, whoever was killed before.
    let second = red(scene, "second").start_api();
    first.signal(Signal::KILL);
    first.wait_end();
    assert!(settings().contains(&"merge_across_nodes=0".to_owned()), "{:?}", settings());
    second.end();
    assert_eq!(settings(), before);
    // Without another one, the next one does.
    let mut alone = red(scene, "alone").start_api();
    alone.signal(Signal::KILL);
    alone.wait_end();
    assert_ne!(settings(), before);
    red(scene, "after").start_api().end();
    assert_eq!(settings(), before);
}

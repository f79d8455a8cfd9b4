//! Merging by Linux's KSM on a machine's behalf: the settings are the host's, and KSM has no trust
//! domains.

use std::path::Path;

use ebb_agent::protocol::Command;
use ebb_page_merge::kernel::knobs::{RUN_MERGE, RUN_STOP};
use ebb_page_merge::kernel::{Knob, Ksm, KsmGuard, SYSFS, Values};
use ebb_vmm::api::{MergeScope, MergeState};
use rustix::process::Signal;

use crate::guest::MIB;
use crate::harness::{Scene, Test, eventually, when};
use crate::setup::Setup;

/// The tests. They run with the other tests of merging, because the host's settings would also
/// affect tests that are started on the same host.
pub const TESTS: &[Test] =
    &[Test::new("merge_kernel::one_domain_on_a_host", 240, one_domain_on_a_host).merging()];

fn red<'a>(scene: &'a Scene, name: &str) -> Setup<'a> {
    let memory = "size=160M,thp=off,merge=kernel,merge_domain=red,merge_across_nodes=off";
    Setup::new(scene).memory(memory).socket(name)
}

fn one_domain_on_a_host(scene: &Scene) {
    let host = KsmGuard::new(Ksm::open(Path::new(SYSFS)).unwrap()).unwrap();
    let set = |values: &[(Knob, u64)]| {
        host.ksm().apply(&values.iter().copied().collect()).unwrap();
        host.ksm().settings().unwrap()
    };
    set(&[(Knob::Run, RUN_STOP), (Knob::MergeAcrossNodes, 1)]);
    // The machine requests a setting that differs from the host's.
    let apart = red(scene, "apart").start_api();
    let info = apart.merge();
    assert_eq!(info.state, MergeState::Unavailable);
    assert!(info.reason.as_ref().is_some_and(|reason| reason.contains(SYSFS)), "{info:?}");
    apart.end();

    set(&[(Knob::MergeAcrossNodes, 0), (Knob::PagesToScan, 800), (Knob::SleepMillisecs, 20)]);
    let mut first = red(scene, "first").start();
    let info = first.merge();
    assert_eq!(info.state, MergeState::Stopped, "{info:?}");
    let start = "`echo 1 > /sys/kernel/mm/ksm/run`";
    assert!(info.reason.as_ref().is_some_and(|reason| reason.contains(start)), "{info:?}");
    let settings = set(&[(Knob::Run, RUN_MERGE)]);
    for _ in 0..2 {
        first.run(Command::Hold { bytes: 16 * MIB, pattern: 71 });
    }
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
    assert_eq!(info.settings.unwrap().pages_per_second, Some(40_000));
    first.check_held();

    // A machine cannot change settings of the whole host.
    for (body, file) in [
        (r#"{"pages_per_second":100}"#, "pages_to_scan"),
        (r#"{"merge_across_nodes":true}"#, "merge_across_nodes"),
        (r#"{"run":"stop"}"#, "run"),
    ] {
        let (status, said) = first.refused("PUT", "/merge", body);
        assert_eq!(status, 409, "{said}");
        assert!(said.contains(&format!("{SYSFS}/{file}")), "{said}");
    }

    // No machine of another domain may join.
    let stranger = |name| {
        let setup = Setup::new(scene).memory("size=128M,merge=kernel,merge_domain=blue");
        setup.socket(name).start_api()
    };
    let is_refused = |name| {
        let blue = stranger(name);
        let info = blue.merge();
        assert_eq!(info.state, MergeState::Unavailable);
        assert!(info.reason.as_ref().is_some_and(|reason| reason.contains("red")), "{info:?}");
        blue.end();
    };
    is_refused("stranger");
    // As long as one machine of the domain runs, however others end.
    let second = red(scene, "second").start_api();
    first.signal(Signal::KILL);
    first.wait_end();
    is_refused("stranger still");
    second.end();
    let blue = stranger("another");
    assert_eq!(blue.merge().state, MergeState::Merging);
    blue.end();
    assert_eq!(host.ksm().settings().unwrap(), settings, "the settings are the host's");
    // Unmerged, with the former settings.
    let before: Values = *host.before();
    drop(host);
    assert_eq!(Ksm::open(Path::new(SYSFS)).unwrap().settings().unwrap(), before);
}

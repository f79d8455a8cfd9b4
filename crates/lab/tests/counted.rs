//! Costs of the trackers in instructions, compared with committed ones.
//!
//! Guests run in an emulator that counts, so that the result depends neither on the machine nor on
//! its load. A tracker must not cost more than in the baseline by one percent of what a page costs
//! without a tracker. Only differences to the guest without a tracker are compared: the counts
//! themselves change with the agent's compiler and with the size of the initramfs. The differences
//! change with the kernel, which Debian renews every few weeks: with another release than the
//! baseline's, overheads are only compared with wide bounds.
//!
//! `UPDATE=1 cargo test -p ebb-lab --test counted` renews the baseline, after
//! `cargo build -p ebb-agent` and `make module`.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::path::Path;
use std::{env, fs};

use ebb_agent::page_faults::FaultKind;
use ebb_lab::experiments::faults::TRACKERS;
use ebb_lab::experiments::faults::counted::metrics::{Compared, compare};
use ebb_lab::experiments::faults::counted::{Count, Work, count};
use ebb_lab::harness::driver::Tracker;
use ebb_lab::harness::emulator::Emulator;
use serde::{Deserialize, Serialize};

/// A fraction of a second of a guest's time: frees of single pages and of huge ones. Of a smaller
/// mapping, most pages would stay on per-CPU lists, where `bitmap` does not see them.
const WORK: Work = Work {
    kinds: &[FaultKind::Fault1, FaultKind::Fault1Huge],
    mapping_mib: 96,
    warm_up_passes: 1,
    idle_ms: 3000,
};
/// Largest increase of a tracker's extra instructions, in percent of all instructions without it.
const TOLERANCE_PERCENT: f64 = 1.0;

/// Instructions a page by tracker, in the order of [`WORK`].
#[derive(Debug, Serialize, Deserialize)]
struct Baseline {
    /// Release of the guests' kernel.
    kernel: String,
    instructions: BTreeMap<String, Vec<f64>>,
}

impl Baseline {
    /// Extra instructions of a tracker, in percent of all without it.
    fn overhead_percent(&self, tracker: Tracker, workload: usize) -> f64 {
        let without = self.instructions[Tracker::Off.name()][workload];
        (self.instructions[tracker.name()][workload] / without - 1.0) * 100.0
    }
}

/// Largest overhead with a kernel other than the baseline's: about twice that of Linux 6.1.
fn bound_percent(tracker: Tracker) -> f64 {
    match tracker {
        Tracker::Off => 0.0,
        Tracker::Percpu => 5.0,
        Tracker::Bitmap => 2.5,
        Tracker::Reporting => 1.0,
    }
}

#[test]
fn no_tracker_costs_more_instructions_than_before() {
    let directory = tempfile::tempdir().unwrap();
    let emulator = Emulator::find(directory.path()).unwrap();
    let counts: Vec<Vec<Count>> = count(&emulator, &TRACKERS, WORK, None)
        .into_iter()
        .map(|counts| counts.unwrap_or_else(|error| panic!("{error}")))
        .collect();
    let now = Baseline {
        kernel: emulator.kernel().to_owned(),
        instructions: TRACKERS.into_iter().zip(&counts).map(instructions).collect(),
    };
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/counted.json");
    if env::var_os("UPDATE").is_some() {
        fs::write(&path, serde_json::to_string_pretty(&now).unwrap() + "\n").unwrap();
    }
    let before: Baseline = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let same_kernel = before.kernel == now.kernel;
    if !same_kernel {
        eprintln!(
            "the baseline is for Linux {}, guests have {}: only compared with wide bounds; renew \
             it with UPDATE=1",
            before.kernel, now.kernel
        );
    }
    let mut worse = Vec::new();
    for tracker in TRACKERS {
        for (at, kind) in WORK.kinds.iter().enumerate() {
            let percent = now.overhead_percent(tracker, at);
            let limit = if same_kernel {
                before.overhead_percent(tracker, at) + TOLERANCE_PERCENT
            } else {
                bound_percent(tracker)
            };
            let line = format!("{} {kind:?}: {percent:.3} %, limit {limit:.3} %", tracker.name());
            eprintln!("{line}");
            if percent > limit {
                worse.push(line);
            }
        }
    }
    assert!(worse.is_empty(), "costs more than before: {worse:#?}\nnow {now:#?}");
    // Without its hook a tracker would cost nothing, and the comparison would mean nothing.
    for tracker in [Tracker::Percpu, Tracker::Bitmap] {
        assert!(now.overhead_percent(tracker, 0) > 0.1, "{} did not run: {now:#?}", tracker.name());
    }
}

fn instructions((tracker, counts): (Tracker, &Vec<Count>)) -> (String, Vec<f64>) {
    let each = compare(counts, None).iter().map(Compared::instructions).collect();
    (tracker.name().to_owned(), each)
}

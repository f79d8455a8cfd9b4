//! Tests on a copy of the files, and on this machine's own KSM where available.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::knobs::{ADVISOR_NONE, ADVISOR_SCAN_TIME, RUN_MERGE, RUN_STOP, RUN_UNMERGE};
use super::*;

mod domain;
mod order;
mod real;

/// The files of Linux 6.18 on a host with NUMA.
const FILES: [(&str, &str); 24] = [
    ("advisor_max_cpu", "70"),
    ("advisor_max_pages_to_scan", "30000"),
    ("advisor_min_pages_to_scan", "500"),
    ("advisor_mode", "[none] scan-time"),
    ("advisor_target_scan_time", "200"),
    ("full_scans", "3"),
    ("general_profit", "-64"),
    ("ksm_zero_pages", "0"),
    ("max_page_sharing", "256"),
    ("merge_across_nodes", "1"),
    ("pages_scanned", "12345"),
    ("pages_shared", "0"),
    ("pages_sharing", "0"),
    ("pages_skipped", "0"),
    ("pages_to_scan", "100"),
    ("pages_unshared", "7"),
    ("pages_volatile", "0"),
    ("run", "0"),
    ("sleep_millisecs", "20"),
    ("smart_scan", "1"),
    ("stable_node_chains", "0"),
    ("stable_node_chains_prune_millisecs", "2000"),
    ("stable_node_dups", "0"),
    ("use_zero_pages", "0"),
];

/// A copy of the files.
struct Copy {
    folder: tempfile::TempDir,
}

impl Copy {
    fn new() -> Self {
        let copy = Self { folder: tempfile::tempdir().unwrap() };
        fs::create_dir(copy.sysfs()).unwrap();
        for (name, text) in FILES {
            copy.write(name, text);
        }
        copy
    }

    fn sysfs(&self) -> PathBuf {
        self.folder.path().join("ksm")
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.sysfs().join(name), format!("{text}\n")).unwrap();
    }

    /// The last text written to a file.
    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.sysfs().join(name)).unwrap().lines().next().unwrap().to_owned()
    }

    fn without(self, names: &[&str]) -> Self {
        for name in names {
            fs::remove_file(self.sysfs().join(name)).unwrap();
        }
        self
    }

    fn ksm(&self) -> Ksm {
        Ksm::open(&self.sysfs()).unwrap().with_patience(Duration::from_millis(30))
    }
}

fn merge_apart() -> Values {
    Values::new().with(Knob::Run, RUN_MERGE).with(Knob::MergeAcrossNodes, 0)
}

#[test]
fn everything_is_read() {
    let copy = Copy::new();
    let settings = copy.ksm().settings().unwrap();
    assert_eq!(settings.iter().count(), Knob::ALL.len());
    assert_eq!(settings.get(Knob::MaxPageSharing), Some(256));
    assert_eq!(settings.get(Knob::AdvisorMode), Some(ADVISOR_NONE));
    copy.write("advisor_mode", "none [scan-time]");
    assert_eq!(copy.ksm().settings().unwrap().get(Knob::AdvisorMode), Some(ADVISOR_SCAN_TIME));
    let counters = copy.ksm().counters().unwrap();
    assert_eq!(counters.get(Counter::GeneralProfit), Some(-64));
    assert_eq!(counters.count(Counter::PagesScanned), 12345);
    assert_eq!(counters.count(Counter::GeneralProfit), 0);
}

#[test]
fn an_older_kernel_has_fewer_settings() {
    let copy = Copy::new().without(&[
        "smart_scan",
        "advisor_mode",
        "general_profit",
        "merge_across_nodes",
    ]);
    let ksm = copy.ksm();
    let settings = ksm.settings().unwrap();
    assert_eq!(settings.get(Knob::SmartScan), None);
    assert_eq!(settings.get(Knob::Run), Some(RUN_STOP));
    assert_eq!(ksm.counters().unwrap().get(Counter::GeneralProfit), None);
    let error = ksm.apply(&Values::new().with(Knob::SmartScan, 1)).unwrap_err().to_string();
    assert!(error.contains("'smart_scan'") && error.contains("6.7"), "{error}");
    let error = ksm.apply(&merge_apart()).unwrap_err().to_string();
    assert!(error.contains("'merge_across_nodes'"), "{error}");
    assert_eq!(copy.read("run"), "0", "nothing is changed if something cannot be");
    let error = Ksm::open(&copy.folder.path().join("nothing")).unwrap_err().to_string();
    assert!(error.contains("CONFIG_KSM"), "{error}");
}

#[test]
fn invalid_numbers_are_reported() {
    let copy = Copy::new();
    copy.write("run", "yes");
    let error = copy.ksm().settings().unwrap_err().to_string();
    assert!(error.contains("ksm/run contains 'yes'"), "{error}");
    copy.write("run", "0");
    copy.write("pages_shared", "");
    assert!(matches!(copy.ksm().counters(), Err(KsmError::Strange { .. })));
}

#[test]
fn shorter_text_replaces_longer() {
    let copy = Copy::new();
    let ksm = copy.ksm();
    ksm.apply(&Values::new().with(Knob::AdvisorMode, ADVISOR_SCAN_TIME)).unwrap();
    ksm.apply(&Values::new().with(Knob::AdvisorMode, ADVISOR_NONE).with(Knob::PagesToScan, 5))
        .unwrap();
    assert_eq!(ksm.settings().unwrap().get(Knob::PagesToScan), Some(5));
    assert_eq!(ksm.settings().unwrap().get(Knob::AdvisorMode), Some(ADVISOR_NONE));
}

#[test]
fn a_setting_is_not_changed_while_pages_stay_shared() {
    let copy = Copy::new();
    copy.write("pages_shared", "9");
    let error = copy.ksm().apply(&merge_apart()).unwrap_err().to_string();
    assert!(error.contains("9 pages"), "{error}");
    assert_eq!(copy.read("merge_across_nodes"), "1");
    assert_eq!(copy.read("run"), "2", "it unmerges");
}

#[test]
fn changes_require_write_permission() {
    // Root may write any file, so files that cannot be written at all stand in for those of another
    // user.
    let copy = Copy::new();
    fs::remove_file(copy.sysfs().join("run")).unwrap();
    fs::create_dir(copy.sysfs().join("run")).unwrap();
    let error =
        Ksm::open(&copy.sysfs()).map(|ksm| ksm.check_writable()).unwrap().unwrap_err().to_string();
    assert!(error.contains("run as root"), "{error}");
}

#[test]
fn all_settings_are_restored() {
    let copy = Copy::new();
    let guard = KsmGuard::new(copy.ksm()).unwrap();
    guard.ksm().apply(&merge_apart().with(Knob::PagesToScan, 4000)).unwrap();
    guard.ksm().apply(&Values::new().with(Knob::AdvisorMode, ADVISOR_SCAN_TIME)).unwrap();
    assert_eq!((copy.read("run"), copy.read("merge_across_nodes")), ("1".into(), "0".into()));
    let before = *guard.before();
    drop(guard);
    assert_eq!(copy.ksm().settings().unwrap(), before);
}

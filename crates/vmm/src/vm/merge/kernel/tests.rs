use std::time::{Duration, Instant};

use ebb_guest_ram::{Backing, HugePages, Populate, RegionSpec};
use ebb_page_merge::testing::MachineKsm;
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::config::MergeBackend;

fn present() -> Values {
    let values = [
        (Knob::Run, RUN_MERGE),
        (Knob::PagesToScan, 100),
        (Knob::SleepMillisecs, 20),
        (Knob::AdvisorMode, 0),
        (Knob::AdvisorMaxCpu, 70),
        (Knob::AdvisorTargetScanTime, 200),
        (Knob::MergeAcrossNodes, 1),
        (Knob::MaxPageSharing, 256),
    ];
    values.into_iter().collect()
}

#[test]
fn the_hosts_settings_are_reported_in_the_apis_terms() {
    let fixed = settings(&present(), MergeRun::Merge);
    assert_eq!(
        (fixed.pages_per_second, fixed.cpu_percent, fixed.target_scan_seconds),
        (Some(5000), None, None)
    );
    assert_eq!((fixed.merge_across_nodes, fixed.max_page_sharing), (Some(true), Some(256)));
    let advised = settings(&present().with(Knob::AdvisorMode, ADVISOR_SCAN_TIME), MergeRun::Merge);
    assert_eq!(
        (advised.pages_per_second, advised.cpu_percent, advised.target_scan_seconds),
        (None, Some(70), Some(200))
    );
}

#[test]
fn every_setting_of_the_host_is_refused_with_its_file() {
    let change = |change: MergeChange| of_the_host(&change).map(|(_, file)| file);
    let nothing = MergeChange::default;
    for (wanted, file) in [
        (MergeChange { run: Some(MergeRun::Stop), ..nothing() }, Some("run")),
        (MergeChange { run: Some(MergeRun::Unmerge), ..nothing() }, None),
        (MergeChange { run: Some(MergeRun::Merge), ..nothing() }, None),
        (MergeChange { merge_across_nodes: Some(true), ..nothing() }, Some("merge_across_nodes")),
        (MergeChange { max_page_sharing: Some(5), ..nothing() }, Some("max_page_sharing")),
        (MergeChange { use_zero_pages: Some(true), ..nothing() }, Some("use_zero_pages")),
        (MergeChange { smart_scan: Some(true), ..nothing() }, Some("smart_scan")),
        (MergeChange { pages_per_second: Some(5), ..nothing() }, Some("pages_to_scan")),
        (MergeChange { cpu_percent: Some(5), ..nothing() }, Some("advisor_max_cpu")),
        (
            MergeChange { target_scan_seconds: Some(5), ..nothing() },
            Some("advisor_target_scan_time"),
        ),
    ] {
        assert_eq!(change(wanted), file);
    }
}

const PAGES: u64 = 512;

fn ram(backing: Backing) -> Arc<GuestRam> {
    let spec = RegionSpec { start: GuestAddress(0), size_bytes: PAGES << 12, host_node: None };
    let ram = GuestRam::new(&[spec], backing, HugePages::Off, Populate::Lazy).unwrap();
    ram.memory().write_slice(&vec![7; (PAGES as usize) << 12], GuestAddress(0)).unwrap();
    Arc::new(ram)
}

fn start(folder: &Path, domain: &str, ram: &Arc<GuestRam>) -> Result<KernelMerging, String> {
    let config = MergeConfig {
        backend: MergeBackend::Kernel,
        domain: Some(domain.to_owned()),
        ..MergeConfig::default()
    };
    KernelMerging::start_among(folder, &config, ram)
}

fn wait(merging: &KernelMerging, what: &str, reached: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !reached() {
        assert!(
            Instant::now() < deadline,
            "{what}: {:?} {:?}",
            merging.status(),
            merging.statistics()
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn run(run: MergeRun) -> MergeChange {
    MergeChange { run: Some(run), ..MergeChange::default() }
}

#[test]
fn the_kernel_merges_and_unmerges_and_its_settings_stay_as_they_are() {
    let Some(machine) = MachineKsm::take() else { return };
    let quick = [
        (Knob::Run, RUN_MERGE),
        (Knob::AdvisorMode, 0),
        (Knob::PagesToScan, 10_000),
        (Knob::SleepMillisecs, 20),
    ];
    let known = |(knob, _): &(Knob, u64)| machine.before().get(*knob).is_some();
    machine.ksm().apply(&quick.into_iter().filter(known).collect()).unwrap();
    let during = machine.ksm().settings().unwrap();
    let (folder, ram) = (tempfile::tempdir().unwrap(), ram(Backing::Anonymous));
    let merging = start(folder.path(), "a", &ram).unwrap();
    assert_eq!(merging.settings().unwrap().pages_per_second, Some(500_000));
    let merged = || merging.statistics().unwrap().merged_bytes.unwrap();
    wait(&merging, "merging", || merged() >= (PAGES / 2) << 12);
    assert_eq!(merging.status().state, MergeState::Merging);

    let refused = start(folder.path(), "b", &ram).err().unwrap();
    assert!(refused.contains("trust domain 'a'"), "{refused}");

    let sharing = MergeChange { max_page_sharing: Some(300), ..MergeChange::default() };
    let error = merging.change(&sharing).unwrap_err();
    assert!(matches!(&error, ControlError::WrongState { .. }), "{error}");
    merging.change(&run(MergeRun::Unmerge)).unwrap();
    assert_eq!((merging.status().state, merged()), (MergeState::Unmerged, 0));
    merging.change(&run(MergeRun::Merge)).unwrap();
    wait(&merging, "merging again", || merged() > 0);
    assert_eq!(machine.ksm().settings().unwrap(), during);
    drop(merging);
    start(folder.path(), "b", &ram).unwrap();
}

#[test]
fn a_kernel_that_does_not_merge_is_reported_with_what_starts_it() {
    let Some(machine) = MachineKsm::take() else { return };
    machine.ksm().apply(&Values::new().with(Knob::Run, 0)).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let ram = ram(Backing::Anonymous);
    let merging = start(folder.path(), "a", &ram).unwrap();
    let status = merging.status();
    assert_eq!(status.state, MergeState::Stopped);
    let reason = status.reason.unwrap();
    assert!(reason.contains("`echo 1 > /sys/kernel/mm/ksm/run`"), "{reason}");
    machine.ksm().apply(&Values::new().with(Knob::Run, RUN_MERGE)).unwrap();
    assert_eq!(merging.status().state, MergeState::Merging);
    drop(merging);

    let Some(across) = machine.before().get(Knob::MergeAcrossNodes) else { return };
    let config = MergeConfig {
        backend: MergeBackend::Kernel,
        across_nodes: Some(across == 0),
        ..MergeConfig::default()
    };
    let reason = KernelMerging::start_among(folder.path(), &config, &ram).err().unwrap();
    assert!(reason.contains("/sys/kernel/mm/ksm/merge_across_nodes"), "{reason}");
}

#[test]
fn memory_of_files_is_refused() {
    let Some(_machine) = MachineKsm::take() else { return };
    let folder = tempfile::tempdir().unwrap();
    let reason = start(folder.path(), "a", &ram(Backing::Memfd)).err().unwrap();
    assert!(reason.contains("memfd"), "{reason}");
    KernelDomain::join(folder.path(), "b").unwrap();
}

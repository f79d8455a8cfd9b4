use std::time::Instant;

use ebb_guest_ram::{Backing, HugePages, Populate, RegionSpec};
use ebb_page_merge::testing::MachineKsm;
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::config::{MergeBackend, Switch};

fn present() -> Values {
    let values = [
        (Knob::Run, RUN_MERGE),
        (Knob::PagesToScan, 100),
        (Knob::SleepMillisecs, 20),
        (Knob::AdvisorMode, ADVISOR_NONE),
        (Knob::AdvisorMaxCpu, 70),
        (Knob::AdvisorTargetScanTime, 200),
        (Knob::MergeAcrossNodes, 1),
        (Knob::MaxPageSharing, 256),
    ];
    values.into_iter().collect()
}

fn after(change: &MergeChange) -> MergeSettings {
    let mut values_after = present();
    for (knob, value) in values(change, &present()).iter() {
        values_after.set(knob, value);
    }
    settings(&values_after, MergeRun::Merge)
}

#[test]
fn a_pace_is_what_was_asked_for() {
    assert_eq!(settings(&present(), MergeRun::Merge).pages_per_second, Some(5000));
    for pages_per_second in [1, 10, 50, 5000, 1_000_000] {
        let change =
            MergeChange { pages_per_second: Some(pages_per_second), ..MergeChange::default() };
        assert_eq!(after(&change).pages_per_second, Some(pages_per_second));
    }
}

#[test]
fn a_fixed_pace_and_the_advisor_exclude_each_other() {
    let advised = after(&MergeChange { target_scan_seconds: Some(60), ..MergeChange::default() });
    assert_eq!(
        (advised.target_scan_seconds, advised.cpu_percent, advised.pages_per_second),
        (Some(60), Some(70), None)
    );
    let limited = after(&MergeChange { cpu_percent: Some(5), ..MergeChange::default() });
    assert_eq!((limited.target_scan_seconds, limited.cpu_percent), (Some(200), Some(5)));
    let fixed =
        MergeChange { pages_per_second: Some(100), cpu_percent: Some(5), ..MergeChange::default() };
    assert_eq!((after(&fixed).cpu_percent, after(&fixed).pages_per_second), (None, Some(100)));
}

#[test]
fn a_kernel_without_advisor_can_have_a_pace() {
    let old: Values = present().iter().filter(|(knob, _)| *knob < Knob::AdvisorMode).collect();
    let change = MergeChange { pages_per_second: Some(100), ..MergeChange::default() };
    assert_eq!(values(&change, &old).get(Knob::AdvisorMode), None);
    let advised = MergeChange { cpu_percent: Some(5), ..MergeChange::default() };
    assert!(
        values(&advised, &old).get(Knob::AdvisorMode).is_some(),
        "which the kernel then refuses"
    );
}

#[test]
fn what_somebody_else_decides_is_a_conflict() {
    let error = refused(&KsmError::Busy { knob: Knob::MergeAcrossNodes, pages_shared: 5 });
    assert!(
        matches!(&error, ControlError::WrongState { message, .. } if message.contains("unmerge first"))
    );
    let error = refused(&KsmError::Record { path: "/run/x".into(), problem: "y".to_owned() });
    assert!(matches!(error, ControlError::Failed { .. }));
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
    let exit = Arc::new(ExitSignal::new().unwrap());
    KernelMerging::start_among(folder, &config, ram, &Filters::new(Switch::On).unwrap(), &exit)
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

#[test]
fn the_kernel_merges_and_unmerges_and_is_left_as_it_was() {
    let Some(machine) = MachineKsm::take() else { return };
    let (folder, ram) = (tempfile::tempdir().unwrap(), ram(Backing::Anonymous));
    let merging = start(folder.path(), "a", &ram).unwrap();
    merging
        .change(&MergeChange { pages_per_second: Some(500_000), ..MergeChange::default() })
        .unwrap();
    assert_eq!(merging.settings().unwrap().pages_per_second, Some(500_000));
    let merged = || merging.statistics().unwrap().merged_bytes.unwrap();
    wait(&merging, "merging", || merged() >= (PAGES / 2) << 12);
    assert_eq!(merging.status().state, MergeState::Merging);

    let refused = start(folder.path(), "b", &ram).err().unwrap();
    assert!(refused.contains("trust domain 'a'"), "{refused}");

    let sharing = machine.before.get(Knob::MaxPageSharing).unwrap();
    let change = MergeChange { max_page_sharing: Some(sharing + 1), ..MergeChange::default() };
    let error = merging.change(&change).unwrap_err();
    assert!(
        matches!(&error, ControlError::WrongState { message, .. } if message.contains("unmerge first"))
    );
    merging
        .change(&MergeChange { run: Some(MergeRun::Unmerge), ..MergeChange::default() })
        .unwrap();
    wait(&merging, "unmerging", || merging.status().state == MergeState::Unmerged);
    assert_eq!(merged(), 0);
    merging.change(&change).unwrap();
    assert_eq!(merging.settings().unwrap().max_page_sharing, Some(sharing + 1));
    merging.change(&MergeChange { run: Some(MergeRun::Merge), ..MergeChange::default() }).unwrap();
    wait(&merging, "merging again", || merged() > 0);
    merging.change(&MergeChange { run: Some(MergeRun::Stop), ..MergeChange::default() }).unwrap();
    assert_eq!(merging.status().state, MergeState::Stopped);
    assert_eq!(machine.ksm.settings().unwrap().get(Knob::Run), Some(RUN_STOP));

    // As in a machine that ends: memory goes first, and nothing has to be copied.
    let membership = merging.membership();
    drop(merging);
    drop(ram);
    drop(membership);
    assert_eq!(machine.ksm.settings().unwrap(), machine.before);
}

#[test]
fn memory_of_files_is_refused_and_nothing_stays_changed() {
    let Some(machine) = MachineKsm::take() else { return };
    let folder = tempfile::tempdir().unwrap();
    let reason = start(folder.path(), "a", &ram(Backing::Memfd)).err().unwrap();
    assert!(reason.contains("memfd"), "{reason}");
    assert_eq!(machine.ksm.settings().unwrap(), machine.before);
}

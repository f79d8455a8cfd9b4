use std::time::{Duration, Instant};

use ebb_guest_ram::{Backing, HugePages, Populate, RegionSpec};
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::config::{MergeBackend, Switch};
use crate::vm::merge::Merging;

const PAGE: u64 = 4096;
const PAGES: u64 = 2048;

fn ram(backing: Backing) -> Arc<GuestRam> {
    let spec = RegionSpec { start: GuestAddress(0), size_bytes: PAGES * PAGE, host_node: None };
    Arc::new(GuestRam::new(&[spec], backing, HugePages::Off, Populate::Lazy).unwrap())
}

/// Fills each page with the number of its kind.
fn fill(ram: &GuestRam, kind: impl Fn(u64) -> u64) {
    for page in 0..PAGES {
        ram.memory()
            .write_slice(&kind(page).to_ne_bytes().repeat(512), GuestAddress(page * PAGE))
            .unwrap();
    }
}

fn check(ram: &GuestRam, kind: impl Fn(u64) -> u64) {
    let mut content = vec![0; PAGE as usize];
    for page in 0..PAGES {
        ram.memory().read_slice(&mut content, GuestAddress(page * PAGE)).unwrap();
        assert_eq!(content, kind(page).to_ne_bytes().repeat(512), "page {page}");
    }
}

fn start(config: &MergeConfig, ram: &Arc<GuestRam>) -> Merging {
    let exit = Arc::new(ExitSignal::new().unwrap());
    let merging = Merging::start(config, ram, &Filters::new(Switch::On).unwrap(), &exit);
    if merging.info().unwrap().settings.is_some() {
        let quick = MergeChange {
            min_pass_millisecs: Some(0),
            clean_passes: Some(1),
            ..MergeChange::default()
        };
        merging.change(&quick).unwrap();
    }
    merging
}

fn owner() -> MergeConfig {
    MergeConfig { backend: MergeBackend::Owner, ..MergeConfig::default() }
}

/// Waits until `reached`, which takes seconds at most; the limit is generous for busy machines.
fn wait(what: &str, merging: &Merging, reached: impl Fn(&crate::api::merge::MergeInfo) -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !reached(&merging.info().unwrap()) {
        assert!(Instant::now() < deadline, "{what}: {:#?}", merging.info());
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn counted(info: &crate::api::merge::MergeInfo) -> MergeStatistics {
    info.statistics.clone().unwrap()
}

fn run(run: MergeRun) -> MergeChange {
    MergeChange { run: Some(run), ..MergeChange::default() }
}

#[test]
fn equal_pages_are_merged_behind_the_filter_and_unmerged_again() {
    let ram = ram(Backing::Anonymous);
    let kind = |page| page / 64 % 4;
    fill(&ram, |page| 7 + kind(page));
    let merging = start(&owner(), &ram);
    assert_eq!(merging.info().unwrap().state, MergeState::Merging, "{:?}", merging.info());
    // Merging is paused until the machine runs.
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(counted(&merging.info().unwrap()).pages_scanned, Some(0));
    merging.resume();
    wait("merging", &merging, |info| {
        counted(info)
            .pages_sharing
            .zip(counted(info).pages_shared)
            .is_some_and(|(a, b)| a + b == PAGES)
    });
    let info = merging.info().unwrap();
    assert_eq!(counted(&info).merged_bytes, Some(PAGES * PAGE));
    assert!(counted(&info).pages_shared.unwrap() < PAGES / 4, "{info:#?}");
    check(&ram, |page| 7 + kind(page));

    let apart = MergeChange { merge_across_nodes: Some(false), ..MergeChange::default() };
    let error = merging.change(&apart).unwrap_err();
    assert!(
        matches!(&error, ControlError::WrongState { message, .. } if message.contains("unmerge")),
        "{error}"
    );

    merging.pause();
    let scanned = counted(&merging.info().unwrap()).pages_scanned;
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(counted(&merging.info().unwrap()).pages_scanned, scanned);
    merging.resume();

    merging.change(&run(MergeRun::Unmerge)).unwrap();
    wait("unmerging", &merging, |info| info.state == MergeState::Unmerged);
    check(&ram, |page| 7 + kind(page));
    assert_eq!(counted(&merging.info().unwrap()).merged_bytes, Some(0));
    merging.change(&apart).unwrap();
    assert_eq!(merging.info().unwrap().settings.unwrap().merge_across_nodes, Some(false));
    merging.change(&run(MergeRun::Stop)).unwrap();
    assert_eq!(merging.info().unwrap().state, MergeState::Stopped);
}

#[test]
fn unmergeable_memory_is_reported() {
    let ram = ram(Backing::Memfd);
    let merging = start(&owner(), &ram);
    let info = merging.info().unwrap();
    assert_eq!((info.state, info.settings, info.statistics), (MergeState::Unavailable, None, None));
    assert!(info.reason.unwrap().contains("shared with other processes"));
    let error = merging.change(&run(MergeRun::Merge)).unwrap_err();
    assert!(matches!(error, ControlError::WrongState { .. }), "{error}");
    assert_eq!(merging.merged_bytes(), None);
}

#[test]
fn without_its_broker_a_machine_merges_on_its_own() {
    let ram = ram(Backing::Anonymous);
    fill(&ram, |_| 5);
    let broker = Some("/nothing/here".into());
    let merging = start(&MergeConfig { domain: Some("red".to_owned()), broker, ..owner() }, &ram);
    let info = merging.info().unwrap();
    assert_eq!(info.state, MergeState::Degraded);
    assert!(info.reason.unwrap().contains("/nothing/here"));
    merging.resume();
    wait("merging", &merging, |info| counted(info).pages_sharing > Some(0));
}

#[test]
fn every_setting_is_applied() {
    let mut changed = Settings::default();
    let fixed = MergeChange {
        run: Some(MergeRun::Merge),
        merge_across_nodes: Some(false),
        max_page_sharing: Some(9),
        use_zero_pages: Some(false),
        smart_scan: Some(false),
        pages_per_second: Some(1_000_000),
        cpu_percent: Some(3),
        target_scan_seconds: None,
        min_pass_millisecs: Some(0),
        clean_passes: Some(1),
    };
    apply(&fixed, &mut changed);
    changed.check().unwrap();
    assert_eq!(
        settings(&changed),
        MergeSettings {
            run: Some(MergeRun::Merge),
            merge_across_nodes: Some(false),
            max_page_sharing: Some(9),
            use_zero_pages: Some(false),
            smart_scan: Some(false),
            pages_per_second: Some(1_000_000),
            cpu_percent: Some(3),
            target_scan_seconds: None,
            min_pass_millisecs: Some(0),
            clean_passes: Some(1),
        }
    );
    apply(&MergeChange { target_scan_seconds: Some(60), ..MergeChange::default() }, &mut changed);
    let advised = settings(&changed);
    assert_eq!((advised.target_scan_seconds, advised.pages_per_second), (Some(60), None));
    assert_eq!(advised.cpu_percent, Some(3));
    apply(&MergeChange { pages_per_second: Some(1), ..MergeChange::default() }, &mut changed);
    assert_eq!(settings(&changed).target_scan_seconds, None);
    assert_eq!(changed.pages_at_a_time(1 << 20), 1);
    changed.check().unwrap();
    let before = changed.clone();
    apply(&MergeChange::default(), &mut changed);
    assert_eq!(changed, before);
}

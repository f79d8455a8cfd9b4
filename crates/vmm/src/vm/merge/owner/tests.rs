use std::fs::File;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use ebb_guest_ram::{Backing, HugePages, Populate, RegionSpec};
use ebb_page_merge::broker::{Broker, BrokerConfig, Limits, ask_status, connect};
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::config::{MergeBackend, Switch};
use crate::isolation::TestCompanion;
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
    start_with(config, ram, None)
}

fn start_with(config: &MergeConfig, ram: &Arc<GuestRam>, link: Option<ConnectLink>) -> Merging {
    let exit = Arc::new(ExitSignal::new().unwrap());
    let merging = Merging::start(config, ram, link, &Filters::new(Switch::On).unwrap(), &exit);
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

/// A broker on a thread, which ends with the pipe's other end.
fn broker(path: &Path) -> (JoinHandle<()>, OwnedFd) {
    let domains = Vec::new();
    let config = BrokerConfig { path: path.to_owned(), domains, limits: Limits::default() };
    let mut broker = Broker::bind(config).unwrap();
    let (wait, stop) = rustix::pipe::pipe().unwrap();
    (std::thread::spawn(move || broker.run(wait.as_fd()).unwrap()), stop)
}

fn of_domain(path: &Path) -> MergeConfig {
    let (domain, broker) = (Some("red".to_owned()), Some(path.to_owned()));
    MergeConfig { domain, broker, ..owner() }
}

/// Started before its broker, and goes on beside the next one.
#[test]
fn a_machine_finds_its_broker_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("broker");
    let ram = ram(Backing::Anonymous);
    let kind = |page| page % (PAGES / 2);
    fill(&ram, kind);
    let (link, companion) = TestCompanion::pair().unwrap();
    let merging = start_with(&of_domain(&path), &ram, Some(link));
    merging.resume();
    // Two pages are of zeros.
    let all = Some((PAGES - 2) * PAGE);
    wait("merging alone", &merging, |info| counted(info).merged_bytes == all);
    assert_eq!(merging.info().unwrap().state, MergeState::Degraded);
    let serve = || {
        if companion.request().is_some() {
            let connection = connect(&path, "red".parse().unwrap(), Duration::ZERO);
            companion.answer(connection.as_ref().ok().map(|connection| connection.as_fd()));
        }
    };
    for round in 0..2 {
        let (thread, stop) = broker(&path);
        wait("the broker", &merging, |info| {
            serve();
            info.state == MergeState::Merging
        });
        let shared = || {
            let status = ask_status(&path, Duration::from_secs(5)).unwrap();
            status.domains[0].nodes.iter().map(|node| node.sharers).sum::<u64>()
        };
        wait("its shares", &merging, |info| {
            check(&ram, kind);
            assert_eq!(counted(info).merged_bytes, all, "round {round}");
            shared() == PAGES - 2
        });
        drop(stop);
        thread.join().unwrap();
        wait("the loss", &merging, |info| info.state == MergeState::Degraded);
    }
    check(&ram, kind);
}

/// A connection that does not lead to a broker: the machine asks again.
#[test]
fn what_is_no_broker_is_not_used() {
    let ram = ram(Backing::Anonymous);
    fill(&ram, |_| 5);
    let (link, companion) = TestCompanion::pair().unwrap();
    let merging = start_with(&of_domain(Path::new("/nothing/here")), &ram, Some(link));
    merging.resume();
    let (other, _silent) = UnixStream::pair().unwrap();
    let file = File::open("/dev/null").unwrap();
    for wrong in [None, Some(file.as_fd()), Some(other.as_fd())] {
        wait("a request", &merging, |_| companion.request().is_some());
        companion.answer(wrong);
    }
    wait("the last request", &merging, |_| companion.request().is_some());
    assert_eq!(merging.info().unwrap().state, MergeState::Degraded);
    // It ends while it waits.
    drop(merging);
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

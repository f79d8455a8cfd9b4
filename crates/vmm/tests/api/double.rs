//! A test double of a virtual machine. The server under test is the real one.

// Tests of another crate include this file by its path.
#[path = "double/answers.rs"]
mod answers;

use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use ebb_vmm::api::*;
use ebb_vmm::config::Backing;
use ebb_vmm::isolation::IsolationInfo;

pub const MEMORY_BYTES: u64 = 4 << 30;

/// Behaviour of the double.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mood {
    /// Everything works.
    Willing,
    /// The guest never delivers statistics.
    Silent,
    /// Nothing is possible in this state.
    WrongState,
    /// The host fails.
    Broken,
    /// There is no balloon.
    NoBalloon,
}

/// Requirements of an operation.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Needs {
    Nothing,
    Balloon,
}

pub struct State {
    pub mood: Mood,
    pub vm: VmState,
    pub target_bytes: u64,
    /// Interval of requests for statistics, in seconds.
    pub interval: u64,
    pub statistics_at: Option<Instant>,
    /// How often the guest has delivered statistics.
    pub updates: u64,
    pub requests: u32,
    pub kills: u32,
    /// Requests for free pages in progress.
    pub questions: u32,
    /// Requests that were withdrawn.
    pub withdrawn: u32,
    /// The last migration requested.
    pub migration: Option<MigrationRequest>,
    /// Number of descriptors that came with the last operation.
    pub descriptors: Option<usize>,
    /// Operation of merging.
    pub merge_run: MergeRun,
    /// The limits of the only device, `disk0`.
    pub limits: RateLimits,
    /// Size of the only disk, `disk0`.
    pub disk_bytes: u64,
    /// The link of the only network device, `net0`.
    pub link: LinkState,
}

struct Shared {
    state: Mutex<State>,
    asked: Condvar,
}

impl State {
    /// Delivers statistics as the guest.
    pub fn deliver(&mut self) {
        self.statistics_at = Some(Instant::now());
        self.updates += 1;
    }
}

impl Shared {
    fn statistics(&self) -> Result<Statistics, ControlError> {
        let state = self.state();
        match state.mood {
            Mood::NoBalloon => return Err(ControlError::NoBalloon),
            Mood::Broken => return Err(ControlError::Failed { message: "KVM said EIO".into() }),
            _ => {}
        }
        let Some(at) = state.statistics_at else { return Ok(Statistics::default()) };
        Ok(Statistics {
            values: StatisticsValues {
                free_memory_bytes: Some(1 << 30),
                oom_kills: Some(0),
                ..StatisticsValues::default()
            },
            age_ms: Some(at.elapsed().as_millis() as u64),
            updates: state.updates,
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    fn wait_until(&self, what: &str, reached: impl Fn(&State) -> bool) {
        let result =
            self.asked
                .wait_timeout_while(self.state(), Duration::from_secs(20), |state| !reached(state));
        assert!(!result.unwrap().1.timed_out(), "{what}");
    }
}

pub struct TestVm {
    shared: Arc<Shared>,
}

/// A request for free pages; a silent machine never answers it.
struct Question(Arc<Shared>, FreePagesRequest);

impl Question {
    fn describe(&self, status: RequestStatus) -> FreePagesReport {
        let block = FreeBlocks { order: 9, block_bytes: 2 << 20, blocks: 3, bytes: 6 << 20 };
        FreePagesReport {
            request_id: 7,
            status,
            min_order: self.1.min_order,
            bytes: block.bytes,
            blocks: 3,
            ranges: 2,
            largest_range_bytes: 4 << 20,
            by_order: vec![block],
            poisoned_bytes: 0,
            memory_bytes: MEMORY_BYTES,
            free_memory_bytes: Some(8 << 20),
            free_memory_age_ms: Some(3),
            coverage_percent: Some(75.0),
            messages: 1,
            encodings: MessageEncodings { bitmaps: 1, ..MessageEncodings::default() },
            message_bytes: 33,
            translate_ns: 500_000,
            elapsed_us: 12_345,
        }
    }
}

impl Drop for Question {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.questions -= 1;
        state.withdrawn += u32::from(state.mood == Mood::Silent);
        self.0.asked.notify_all();
    }
}

impl TestVm {
    pub fn new(mood: Mood) -> Self {
        let state = State {
            mood,
            vm: VmState::Running,
            target_bytes: 0,
            interval: 0,
            statistics_at: None,
            updates: 0,
            requests: 0,
            kills: 0,
            questions: 0,
            withdrawn: 0,
            migration: None,
            descriptors: None,
            merge_run: MergeRun::Merge,
            limits: RateLimits::default(),
            disk_bytes: 1 << 30,
            link: LinkState::Up,
        };
        Self { shared: Arc::new(Shared { state: Mutex::new(state), asked: Condvar::new() }) }
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state()
    }

    /// Waits until statistics have been requested `count` times.
    pub fn wait_for_requests(&self, count: u32) {
        self.shared.wait_until("statistics were not requested", |state| state.requests >= count);
    }

    /// Waits until `count` requests for free pages are in progress.
    pub fn wait_for_questions(&self, count: u32) {
        self.shared.wait_until("another number of requests", |state| state.questions == count);
    }

    fn change(&self, needs: Needs) -> Result<MutexGuard<'_, State>, ControlError> {
        let state = self.state();
        match state.mood {
            Mood::WrongState => Err(ControlError::WrongState {
                message: "the machine is paused".into(),
                remedy: Some("resume it".into()),
            }),
            Mood::Broken => Err(ControlError::Failed { message: "KVM said EIO".into() }),
            Mood::NoBalloon if needs == Needs::Balloon => Err(ControlError::NoBalloon),
            Mood::Willing | Mood::Silent | Mood::NoBalloon => Ok(state),
        }
    }
}

impl Machine for TestVm {
    fn handle(
        &self,
        operation: Operation,
        descriptors: Vec<OwnedFd>,
    ) -> Result<Outcome, ControlError> {
        self.state().descriptors = Some(descriptors.len());
        let document = match operation {
            Operation::OpenApi => Document::OpenApi,
            Operation::VmInfo => Document::Vm(self.info()),
            Operation::Pause(_) => {
                self.change(Needs::Nothing)?.vm = VmState::Paused;
                Document::Vm(self.info())
            }
            Operation::Resume => {
                self.change(Needs::Nothing)?.vm = VmState::Running;
                Document::Vm(self.info())
            }
            Operation::PowerButton => {
                drop(self.change(Needs::Nothing)?);
                Document::Vm(self.info())
            }
            Operation::Trim => {
                drop(self.change(Needs::Nothing)?);
                Document::Trim(answers::TRIMMED)
            }
            Operation::Park(request) => {
                drop(self.change(Needs::Nothing)?);
                Document::Park(answers::parked(&request))
            }
            Operation::ParkStatus => Document::ParkStatus(answers::park_status()),
            Operation::Snapshot(target) => {
                drop(self.change(Needs::Nothing)?);
                Document::Snapshot(answers::snapshot(&target))
            }
            Operation::WorkingSet => {
                drop(self.change(Needs::Nothing)?);
                Document::WorkingSet(answers::working_set())
            }
            Operation::Checkpoint(target) => {
                drop(self.change(Needs::Nothing)?);
                Document::Checkpoint(answers::checkpoint(target.name))
            }
            Operation::Migrate(request) => {
                self.change(Needs::Nothing)?.migration = Some(*request);
                Document::Migration(Box::new(self.migration()))
            }
            Operation::Migration { .. } => Document::Migration(Box::new(self.migration())),
            Operation::CancelMigration => {
                drop(self.change(Needs::Nothing)?);
                Document::Migration(Box::new(self.migration()))
            }
            Operation::Kill => {
                {
                    let mut state = self.change(Needs::Nothing)?;
                    state.kills += 1;
                    state.vm = VmState::Stopping;
                }
                Document::Vm(self.info())
            }
            Operation::Balloon => Document::Balloon(self.balloon()?),
            Operation::SetBalloon(target) => {
                self.set_balloon_target(target.target_bytes)?;
                Document::Balloon(self.balloon()?)
            }
            Operation::Statistics { max_age } => {
                let shared = self.shared.clone();
                return fresh_statistics(max_age, move || shared.statistics(), || self.request());
            }
            Operation::SetStatisticsInterval(interval) => {
                self.change(Needs::Balloon)?.interval = interval.interval_seconds;
                Document::Balloon(self.balloon()?)
            }
            Operation::FreePages(request) => return self.request_free_pages(request),
            Operation::Reclaim(request) => {
                drop(self.change(Needs::Balloon)?);
                Document::Reclaim(answers::reclaimed(&request))
            }
            Operation::HintRun(_) => return Err(ControlError::NoBalloon),
            Operation::Disks => Document::Disks(self.disks()?),
            Operation::ResizeDisk(change) => {
                self.resize_disk(&change)?;
                Document::Disks(self.disks()?)
            }
            Operation::Net => Document::Net(self.net()?),
            Operation::SetNet(change) => {
                self.set_net(&change)?;
                Document::Net(self.net()?)
            }
            Operation::AttachConsole => {
                drop(self.change(Needs::Nothing)?);
                Document::Console(ConsoleInfo { recent_bytes: 0 })
            }
            Operation::Limits => Document::Limits(self.limits()?),
            Operation::SetLimits(change) => {
                self.set_limits(&change)?;
                Document::Limits(self.limits()?)
            }
            Operation::Merge => Document::Merge(Box::new(self.merge()?)),
            Operation::SetMerge(change) => {
                {
                    let mut state = self.change(Needs::Nothing)?;
                    state.merge_run = change.run.unwrap_or(state.merge_run);
                }
                Document::Merge(Box::new(self.merge()?))
            }
            Operation::Metrics => Document::Metrics(Box::new(answers::metrics())),
        };
        Ok(document.into())
    }
}

impl TestVm {
    fn info(&self) -> VmInfo {
        let state = self.state();
        let summary = BalloonSummary {
            target_bytes: state.target_bytes,
            actual_bytes: 0,
            state: BalloonState::Idle,
        };
        VmInfo {
            state: state.vm,
            cpus: 2,
            memory_bytes: MEMORY_BYTES,
            backing: Backing::Anonymous,
            resident_bytes: 123 << 20,
            merged_bytes: Some(5 << 20),
            snapshot_bytes: None,
            clock: ClockInfo {
                stopped: Some(ClockInstant { clock_ns: 7, realtime_ns: 1_800_000_000_000_000_000 }),
                ..ClockInfo::default()
            },
            uptime_ms: 1234,
            pause_lease_ms: Some(1500),
            kernel: "/boot/vmlinuz".into(),
            pid: std::process::id(),
            isolation: IsolationInfo::default(),
            version: "0.1.0".into(),
            balloon: (state.mood != Mood::NoBalloon).then_some(summary),
            vsock: Some(VsockInfo {
                cid: 3,
                path: "/run/vm.vsock".into(),
                driver: true,
                connections: 2,
            }),
        }
    }

    fn migration(&self) -> MigrationStatus {
        let state = self.state();
        let Some(request) = &state.migration else { return MigrationStatus::default() };
        let report = MigrationReport {
            status: MigrationPhase::Completed,
            rounds_detail: vec![MigrationRound { round: 1, ..MigrationRound::default() }],
            ..MigrationReport::default()
        };
        MigrationStatus {
            phase: MigrationPhase::Completed,
            to: Some(request.to.clone()),
            expected_downtime_ms: Some(12),
            report: Some(report),
            ..MigrationStatus::default()
        }
    }

    fn balloon(&self) -> Result<BalloonInfo, ControlError> {
        let state = self.state();
        match state.mood {
            Mood::NoBalloon => return Err(ControlError::NoBalloon),
            Mood::Broken => return Err(ControlError::Failed { message: "KVM said EIO".into() }),
            _ => {}
        }
        Ok(BalloonInfo {
            target_bytes: state.target_bytes,
            actual_bytes: 0,
            state: BalloonState::from_sizes(DriverPresence::Present, state.target_bytes, 0),
            lease_ms: None,
            offered_features: {
                let version_1 = BalloonFeature::Version1;
                BalloonFeature::ALL.into_iter().filter(|feature| *feature != version_1).collect()
            },
            negotiated_features: vec![
                BalloonFeature::StatisticsQueue,
                BalloonFeature::DeflateOnOom,
                BalloonFeature::PageReporting,
            ],
            poison: None,
            discard_inhibited: Some("a migration is coming in".into()),
            statistics_interval_seconds: state.interval as u32,
        })
    }

    fn set_balloon_target(&self, target_bytes: u64) -> Result<(), ControlError> {
        let mut state = self.change(Needs::Balloon)?;
        if target_bytes > MEMORY_BYTES {
            return Err(ControlError::Invalid {
                field: "target_bytes",
                message: format!("the target of {target_bytes} bytes is above the guest's memory"),
                remedy: Some(format!("ask for at most {MEMORY_BYTES}")),
            });
        }
        state.target_bytes = target_bytes;
        Ok(())
    }

    fn request(&self) -> Result<(), ControlError> {
        let mut state = self.change(Needs::Balloon)?;
        state.requests += 1;
        self.shared.asked.notify_all();
        if state.mood == Mood::Willing {
            state.deliver();
        }
        Ok(())
    }

    fn request_free_pages(&self, request: FreePagesRequest) -> Result<Outcome, ControlError> {
        let mut state = self.change(Needs::Balloon)?;
        if state.questions > 0 {
            return Err(ControlError::WrongState {
                message: "the guest is being asked already".into(),
                remedy: Some("wait".into()),
            });
        }
        state.questions += 1;
        self.shared.asked.notify_all();
        let question = Question(self.shared.clone(), request);
        let deadline = Instant::now() + Duration::from_millis(request.timeout_ms);
        Ok(Outcome::Await(Wait::until(deadline, move |left| {
            let is_willing = question.0.state().mood == Mood::Willing;
            let status = match left {
                _ if is_willing => RequestStatus::Done,
                TimeLeft::None => RequestStatus::Timeout,
                TimeLeft::Some => return None,
            };
            Some(Ok(Document::FreePages(question.describe(status))))
        })))
    }

    fn merge(&self) -> Result<MergeInfo, ControlError> {
        let state = self.change(Needs::Nothing)?;
        Ok(MergeInfo {
            backend: MergeBackend::Owner,
            domain: Some("red".into()),
            broker: Some("/run/ebb-merge.sock".into()),
            state: MergeState::Degraded,
            reason: Some("the broker is gone".into()),
            settings: Some(MergeSettings {
                run: Some(state.merge_run),
                merge_across_nodes: Some(true),
                pages_per_second: Some(50_000),
                ..MergeSettings::default()
            }),
            statistics: Some(answers::counted()),
        })
    }

    fn disks(&self) -> Result<DisksInfo, ControlError> {
        let size_bytes = self.change(Needs::Nothing)?.disk_bytes;
        let requests = DiskRequests { reads: 3, read_bytes: 12 << 10, ..DiskRequests::default() };
        let disk = DiskInfo {
            device: "disk0".into(),
            path: "/image".into(),
            size_bytes,
            requests,
            ..DiskInfo::default()
        };
        Ok(DisksInfo { disks: vec![disk] })
    }

    fn resize_disk(&self, change: &DiskResize) -> Result<(), ControlError> {
        let mut state = self.change(Needs::Nothing)?;
        let invalid = |field: &'static str| {
            Err(ControlError::Invalid { field, message: field.into(), remedy: None })
        };
        if change.device != "disk0" {
            return invalid("device");
        }
        if change.size_bytes.is_some() {
            return invalid("size_bytes");
        }
        if change.path.is_some() {
            // So that a test sees how many files have come.
            state.disk_bytes = 4096 * state.descriptors.unwrap_or(0) as u64;
            return Ok(());
        }
        state.disk_bytes *= 2;
        Ok(())
    }

    fn net(&self) -> Result<NetInfo, ControlError> {
        let link = self.change(Needs::Nothing)?.link;
        Ok(NetInfo {
            devices: vec![NetDeviceInfo {
                device: "net0".into(),
                backend: "tap=tap0".into(),
                mac: "02:00:00:00:00:01".parse().unwrap(),
                mtu: None,
                link,
                wanted_link: link,
                driver: true,
            }],
        })
    }

    fn set_net(&self, change: &NetChange) -> Result<(), ControlError> {
        let mut state = self.change(Needs::Nothing)?;
        if change.device != "net0" {
            let message = "no such device".into();
            return Err(ControlError::Invalid { field: "device", message, remedy: None });
        }
        state.link = change.link;
        Ok(())
    }

    fn limits(&self) -> Result<LimitsInfo, ControlError> {
        let limits = self.change(Needs::Nothing)?.limits;
        let disk = DeviceLimits { device: "disk0".into(), limits, delayed_requests: 5 };
        Ok(LimitsInfo { devices: vec![disk] })
    }

    fn set_limits(&self, change: &LimitsChange) -> Result<(), ControlError> {
        let mut state = self.change(Needs::Nothing)?;
        let invalid = |field| ControlError::Invalid { field, message: field.into(), remedy: None };
        if change.device != "disk0" {
            return Err(invalid("device"));
        }
        state.limits = state.limits.changed(&change.limits).map_err(invalid)?;
        Ok(())
    }
}

//! A stand-in for a virtual machine. The server under test is the real one.

use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use ebb_vmm::api::*;

pub const MEMORY_BYTES: u64 = 4 << 30;

/// What the stand-in does when it is asked.
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

/// What an operation works on.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Needs {
    Nothing,
    Balloon,
}

pub struct State {
    pub mood: Mood,
    pub vm: VmState,
    pub target_bytes: u64,
    pub interval: Option<Duration>,
    pub statistics_at: Option<Instant>,
    pub requests: u32,
    pub kills: u32,
    /// Questions for free pages that are under way.
    pub questions: u32,
    /// Questions that were withdrawn.
    pub withdrawn: u32,
    /// The migration asked for last.
    pub migration: Option<MigrationRequest>,
    /// What is to be done about equal pages.
    pub merge_run: MergeRun,
}

/// Every counter of merging.
fn counted() -> MergeStatistics {
    MergeStatistics {
        scope: MergeScope::Machine,
        pages_shared: Some(1),
        pages_sharing: Some(2),
        pages_unshared: Some(3),
        pages_volatile: Some(4),
        pages_scanned: Some(5),
        pages_skipped: Some(6),
        full_scans: Some(7),
        ksm_zero_pages: Some(8),
        general_profit: Some(-9),
        stable_node_chains: Some(10),
        stable_node_dups: Some(11),
        merged_bytes: Some(12),
        remote_merged_pages: Some(13),
        hashed_pages: Some(14),
        clean_pages: Some(15),
        broken_pages: Some(21),
        brought_back_pages: Some(20),
        remerged_pages: Some(19),
        metadata_bytes: Some(16),
        replaced: Some(MergeReplaced { done: 17, ..MergeReplaced::default() }),
    }
}

struct Shared {
    state: Mutex<State>,
    asked: Condvar,
}

impl Shared {
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

/// A question for free pages: in a silent machine it is never answered.
struct Question(Arc<Shared>, FreePagesRequest);

impl Question {
    fn describe(&self, status: FreePagesStatus) -> FreePagesReport {
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

impl FreePagesAnswer for Question {
    fn report(&self) -> Option<FreePagesReport> {
        (self.0.state().mood == Mood::Willing).then(|| self.describe(FreePagesStatus::Done))
    }

    fn give_up(&self) -> FreePagesReport {
        self.describe(FreePagesStatus::Timeout)
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
            interval: None,
            statistics_at: None,
            requests: 0,
            kills: 0,
            questions: 0,
            withdrawn: 0,
            migration: None,
            merge_run: MergeRun::Merge,
        };
        Self { shared: Arc::new(Shared { state: Mutex::new(state), asked: Condvar::new() }) }
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state()
    }

    /// Waits until statistics have been asked for `count` times.
    pub fn wait_for_requests(&self, count: u32) {
        self.shared.wait_until("nobody asked for statistics", |state| state.requests >= count);
    }

    /// Waits until this many questions for free pages are under way.
    pub fn wait_for_questions(&self, count: u32) {
        self.shared.wait_until("another number of questions", |state| state.questions == count);
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

    fn values() -> StatisticsValues {
        StatisticsValues {
            free_memory_bytes: Some(1 << 30),
            oom_kills: Some(0),
            ..StatisticsValues::default()
        }
    }
}

impl VmControl for TestVm {
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
            backing: RamBacking::Anon,
            resident_bytes: 123 << 20,
            merged_bytes: Some(5 << 20),
            snapshot_bytes: None,
            clock: ClockInfo {
                stopped: Some(ClockInstant { clock_ns: 7, realtime_ns: 1_800_000_000_000_000_000 }),
                ..ClockInfo::default()
            },
            uptime_ms: 1234,
            kernel: "/boot/vmlinuz".into(),
            pid: std::process::id(),
            version: "0.1.0".into(),
            balloon: (state.mood != Mood::NoBalloon).then_some(summary),
        }
    }

    fn pause(&self) -> Result<(), ControlError> {
        self.change(Needs::Nothing)?.vm = VmState::Paused;
        Ok(())
    }

    fn resume(&self) -> Result<(), ControlError> {
        self.change(Needs::Nothing)?.vm = VmState::Running;
        Ok(())
    }

    fn power_button(&self) -> Result<(), ControlError> {
        self.change(Needs::Nothing).map(|_| ())
    }

    fn snapshot(&self, path: &Path) -> Result<SnapshotReport, ControlError> {
        let _state = self.change(Needs::Nothing)?;
        Ok(SnapshotReport {
            path: path.display().to_string(),
            file_bytes: 1 << 30,
            stored_bytes: 100 << 20,
            ram_bytes: 99 << 20,
            elapsed_ms: 700,
            paused_ms: 600,
        })
    }

    fn trim(&self) -> Result<TrimReport, ControlError> {
        let _state = self.change(Needs::Nothing)?;
        Ok(TrimReport {
            scanned_bytes: 4 << 20,
            returned_bytes: 1 << 20,
            pauses: 1,
            longest_pause_us: 900,
            complete: true,
        })
    }

    fn migrate(&self, request: MigrationRequest) -> Result<(), ControlError> {
        self.change(Needs::Nothing)?.migration = Some(request);
        Ok(())
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

    fn cancel_migration(&self) -> Result<(), ControlError> {
        self.change(Needs::Nothing).map(|_| ())
    }

    fn kill(&self) -> Result<(), ControlError> {
        let mut state = self.change(Needs::Nothing)?;
        state.kills += 1;
        state.vm = VmState::Stopping;
        Ok(())
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
            offered_features: BalloonFeature::ALL.to_vec(),
            negotiated_features: BalloonFeature::from_bits(0b10_0110),
            poison: None,
            discard_inhibited: Some("a migration is coming in".into()),
            statistics_interval_seconds: state
                .interval
                .map_or(0, |interval| interval.as_secs() as u32),
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

    fn request_statistics(&self) -> Result<(), ControlError> {
        let mut state = self.change(Needs::Balloon)?;
        state.requests += 1;
        self.shared.asked.notify_all();
        if state.mood == Mood::Willing {
            state.statistics_at = Some(Instant::now());
        }
        Ok(())
    }

    fn statistics(&self) -> Result<StatisticsReading, ControlError> {
        let state = self.state();
        match state.mood {
            Mood::NoBalloon => return Err(ControlError::NoBalloon),
            Mood::Broken => return Err(ControlError::Failed { message: "KVM said EIO".into() }),
            _ => {}
        }
        Ok(match state.statistics_at {
            Some(at) => StatisticsReading { age: Some(at.elapsed()), values: Self::values() },
            None => StatisticsReading::default(),
        })
    }

    fn set_statistics_interval(&self, interval: Option<Duration>) -> Result<(), ControlError> {
        self.change(Needs::Balloon)?.interval = interval;
        Ok(())
    }

    fn request_free_pages(
        &self,
        request: FreePagesRequest,
    ) -> Result<Box<dyn FreePagesAnswer>, ControlError> {
        let mut state = self.change(Needs::Balloon)?;
        if state.questions > 0 {
            return Err(ControlError::WrongState {
                message: "the guest is being asked already".into(),
                remedy: Some("wait".into()),
            });
        }
        state.questions += 1;
        self.shared.asked.notify_all();
        Ok(Box::new(Question(self.shared.clone(), request)))
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
                run: state.merge_run,
                merge_across_nodes: Some(true),
                pages_per_second: Some(50_000),
                ..MergeSettings::default()
            }),
            statistics: Some(counted()),
        })
    }

    fn set_merge(&self, change: &MergeChange) -> Result<(), ControlError> {
        let mut state = self.change(Needs::Nothing)?;
        state.merge_run = change.run.unwrap_or(state.merge_run);
        Ok(())
    }

    fn metrics(&self) -> Metrics {
        let errors = vec![KindCount::new("bad_address", 3)];
        let kinds = |kind: &'static str| vec![KindCount::new(kind, 1)];
        Metrics {
            memory_bytes: MEMORY_BYTES,
            guest_resident_bytes: 123 << 20,
            guest_shared_bytes: 0,
            process_resident_bytes: 128 << 20,
            uptime_ms: 1234,
            balloon: Some(BalloonMetrics {
                reported_bytes: 2 << 20,
                kept_bytes: kinds("inhibited"),
                translate_ns: kinds("inflate"),
                queue_buffers: kinds("inflate"),
                queue_bytes: kinds("inflate"),
                messages: kinds("bitmaps"),
                requests: kinds("sent"),
                errors,
                ..BalloonMetrics::default()
            }),
            merge: Some(counted()),
            vcpu_exits: vec![KindCount::new("io", 17)],
        }
    }
}

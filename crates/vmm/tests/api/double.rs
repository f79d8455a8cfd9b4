//! A stand-in for a virtual machine. The server under test is the real one.

use std::path::Path;
use std::sync::{Condvar, Mutex, MutexGuard};
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
}

pub struct TestVm {
    state: Mutex<State>,
    asked: Condvar,
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
        };
        Self { state: Mutex::new(state), asked: Condvar::new() }
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Waits until statistics have been asked for `count` times.
    pub fn wait_for_requests(&self, count: u32) {
        let state = self.state();
        let result =
            self.asked.wait_timeout_while(state, Duration::from_secs(20), |state| state.requests < count);
        assert!(!result.unwrap().1.timed_out(), "nobody asked for statistics");
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
        let summary =
            BalloonSummary { target_bytes: state.target_bytes, actual_bytes: 0, state: BalloonState::Idle };
        VmInfo {
            state: state.vm,
            cpus: 2,
            memory_bytes: MEMORY_BYTES,
            backing: RamBacking::Anon,
            resident_bytes: 123 << 20,
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
            statistics_interval_seconds: state.interval.map_or(0, |interval| interval.as_secs() as u32),
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
        self.asked.notify_all();
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

    fn metrics(&self) -> Metrics {
        let errors = vec![KindCount::new("bad_address", 3)];
        Metrics {
            memory_bytes: MEMORY_BYTES,
            guest_resident_bytes: 123 << 20,
            process_resident_bytes: 128 << 20,
            uptime_ms: 1234,
            balloon: Some(BalloonMetrics { reported_bytes: 2 << 20, errors, ..BalloonMetrics::default() }),
            vcpu_exits: vec![KindCount::new("io", 17)],
        }
    }
}

//! The machine as the migration engine sees it: paused and saved, resumed, throttled.

use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ebb_migration::{BoxError, Guest};
use thiserror::Error;

use crate::api::vm::VmState;
use crate::config::RebootAction;
use crate::exit::GuestExit;
use crate::file::write_back;
use crate::snapshot::MachineState;
use crate::vm::{Vm, lock};

/// How long a throttled guest runs between two rests.
const SLICE: Duration = Duration::from_millis(10);
/// Time limit for a reboot of the guest at the moment of the switch-over.
const REBOOT_LIMIT: Duration = Duration::from_secs(20);
/// Interval of checks for the end of a reboot.
const REBOOT_POLL: Duration = Duration::from_millis(5);

/// The machine cannot be handed over.
#[derive(Debug, Error)]
enum NotReady {
    #[error("the guest has ended ({0})")]
    Ended(GuestExit),
    #[error("the machine is about to end")]
    Stopping,
    #[error(
        "the guest is rebooting and has not finished after {} s",
        REBOOT_LIMIT.as_secs()
    )]
    Rebooting,
}

/// Result of an attempt to stop the machine.
enum Stop {
    Saved,
    /// The guest must reboot first.
    RebootFirst,
}

/// Results of stopping the machine, shared by the engine, which owns the machine, and the code that
/// runs the engine.
#[derive(Clone, Default)]
pub(super) struct Stopped(Arc<Mutex<Saved>>);

#[derive(Default)]
struct Saved {
    state: Option<MachineState>,
    at: Option<Instant>,
    was_paused: bool,
}

impl Stopped {
    /// Takes the saved state.
    pub(super) fn take_state(&self) -> Option<MachineState> {
        lock(&self.0).state.take()
    }

    /// When the guest was stopped, if it was running.
    pub(super) fn at(&self) -> Option<Instant> {
        lock(&self.0).at
    }
}

/// A machine that is being migrated.
pub(super) struct MovedGuest {
    vm: Arc<Vm>,
    stopped: Stopped,
    throttle: Option<Throttle>,
}

impl MovedGuest {
    pub(super) fn new(vm: Arc<Vm>, stopped: Stopped) -> Self {
        Self { vm, stopped, throttle: None }
    }

    fn try_stop(&mut self) -> Result<Stop, BoxError> {
        let mut state = lock(&self.vm.state);
        match self.vm.exit.pending() {
            None => {}
            Some(GuestExit::Reboot) if self.vm.config.on_reboot == RebootAction::Reset => {
                return Ok(Stop::RebootFirst);
            }
            Some(exit) => return Err(NotReady::Ended(exit).into()),
        }
        let (at, was_paused) = match *state {
            VmState::Running => {
                let at = Instant::now();
                *state = VmState::Migrating;
                // Stopping may take a while. The new state keeps others from continuing or
                // resetting the machine.
                drop(state);
                let frozen = self.vm.freeze();
                if frozen.is_err() || self.vm.exit.pending().is_some() {
                    // A vCPU has ended or rebooted the guest while it stopped.
                    self.vm.not_stopped(frozen)?;
                    return Ok(Stop::RebootFirst);
                }
                (Some(at), false)
            }
            VmState::Paused => {
                *state = VmState::Migrating;
                drop(state);
                (None, true)
            }
            _ => return Err(NotReady::Stopping.into()),
        };
        *lock(&self.stopped.0) = Saved { state: None, at, was_paused };
        let mut state = self.vm.capture()?;
        state.paused = was_paused;
        lock(&self.stopped.0).state = Some(state);
        if let Some(at) = at {
            tracing::debug!("stopped and saved in {:?}", at.elapsed());
        }
        Ok(Stop::Saved)
    }
}

impl Guest for MovedGuest {
    /// Writes back the page cache of the disks until it is cancelled, without the locks of their
    /// devices: this may take long, and the guest uses them meanwhile.
    fn flush(&mut self) -> Result<(), BoxError> {
        for device in &self.vm.devices {
            let file = lock(device).written_file()?;
            if let Some(file) = file {
                let _ = write_back(&file, &|| self.vm.migrations.is_cancelled())?;
            }
        }
        Ok(())
    }

    fn pause_and_save(&mut self) -> Result<(), BoxError> {
        let deadline = Instant::now() + REBOOT_LIMIT;
        while let Stop::RebootFirst = self.try_stop()? {
            if Instant::now() >= deadline {
                return Err(NotReady::Rebooting.into());
            }
            std::thread::park_timeout(REBOOT_POLL);
        }
        Ok(())
    }

    fn resume(&mut self) -> Result<(), BoxError> {
        let saved = std::mem::take(&mut *lock(&self.stopped.0));
        Ok(self.vm.take_back(saved.was_paused)?)
    }

    fn throttle(&mut self, percent: u8) -> Result<(), BoxError> {
        self.throttle = None;
        if percent > 0 {
            self.throttle = Some(Throttle::start(self.vm.clone(), percent)?);
        }
        Ok(())
    }
}

/// A thread that makes the vCPUs rest repeatedly. Dropping it ends the thread.
struct Throttle {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Throttle {
    fn start(vm: Arc<Vm>, percent: u8) -> std::io::Result<Self> {
        let percent = u32::from(percent.min(99));
        let rest = SLICE * percent / (100 - percent);
        let (stop, stopped) = mpsc::channel();
        let thread = std::thread::Builder::new().name("throttle".to_owned()).spawn(move || {
            while stopped.recv_timeout(SLICE + rest) == Err(RecvTimeoutError::Timeout) {
                vm.vcpus.rest(rest);
            }
        })?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Throttle {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A panic was printed where it happened.
            let _ = thread.join();
        }
    }
}

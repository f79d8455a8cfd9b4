//! The machine as the engine sees it: stopped and saved, let go on, slowed down.

use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ebb_migration::{BoxError, Guest};
use thiserror::Error;

use crate::api::vm::VmState;
use crate::config::RebootAction;
use crate::exit::GuestExit;
use crate::snapshot::MachineState;
use crate::vm::{Vm, lock};

/// How often a guest that is throttled runs between two rests.
const SLICE: Duration = Duration::from_millis(10);
/// How long a reboot of the guest may take that comes at the moment of the switch-over.
const REBOOT_LIMIT: Duration = Duration::from_secs(20);
/// How often it is looked for the end of a reboot.
const REBOOT_POLL: Duration = Duration::from_millis(5);

/// The machine cannot be handed over.
#[derive(Debug, Error)]
enum NotReady {
    #[error("the guest has ended ({0})")]
    Ended(GuestExit),
    #[error("the machine is about to end")]
    Stopping,
    #[error("the guest is starting again and is not through with it after {} s", REBOOT_LIMIT.as_secs())]
    Rebooting,
}

/// What a stop has found.
enum Stop {
    Saved,
    /// The guest starts again first.
    RebootFirst,
}

/// What is known of a machine that was stopped; the engine has the machine, and whoever runs the
/// engine has this.
#[derive(Clone, Default)]
pub(super) struct Stopped(Arc<Mutex<Saved>>);

#[derive(Default)]
struct Saved {
    state: Option<MachineState>,
    at: Option<Instant>,
    was_paused: bool,
}

impl Stopped {
    /// What was saved.
    pub(super) fn take_state(&self) -> Option<MachineState> {
        lock(&self.0).state.take()
    }

    /// When the guest was stopped, if it ran before.
    pub(super) fn at(&self) -> Option<Instant> {
        lock(&self.0).at
    }
}

/// A machine that is being moved.
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
                self.vm.freeze()?;
                if self.vm.exit.pending().is_some() {
                    // A vCPU has ended the guest on its way out, or started it again.
                    self.vm.thaw()?;
                    return Ok(Stop::RebootFirst);
                }
                (Some(at), false)
            }
            VmState::Paused => (None, true),
            _ => return Err(NotReady::Stopping.into()),
        };
        *state = VmState::Migrating;
        drop(state);
        *lock(&self.stopped.0) = Saved { state: None, at, was_paused };
        lock(&self.stopped.0).state = Some(self.vm.capture()?);
        if let Some(at) = at {
            tracing::debug!("stopped and saved in {:?}", at.elapsed());
        }
        Ok(Stop::Saved)
    }
}

impl Guest for MovedGuest {
    fn pause_and_save(&mut self) -> Result<(), BoxError> {
        let deadline = Instant::now() + REBOOT_LIMIT;
        while let Stop::RebootFirst = self.try_stop()? {
            if Instant::now() >= deadline {
                return Err(NotReady::Rebooting.into());
            }
            std::thread::sleep(REBOOT_POLL);
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

/// A thread that lets the vCPUs rest again and again; dropped, it ends.
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
            // A panic of the thread has been printed where it happened.
            let _ = thread.join();
        }
    }
}

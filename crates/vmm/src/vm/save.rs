//! A snapshot as a job of the thread for migrations: the API passes the client's file on, and
//! waits for the report.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::{Vm, VmError, lock};
use crate::api::control::{ControlError, Document, Outcome, Wait};
use crate::api::vm::{SnapshotReport, SnapshotTarget, VmState};
use crate::file::{Completion, write_back};
use crate::isolation::{Companion, IsolationError, NO_DIRECTORY, NewFile};
use crate::snapshot::file::{RAM_OFFSET_BYTES, Sizes, check_target, write_rest};
use crate::snapshot::{MachineState, SnapshotError};

/// A requested snapshot, shared by the client's connection and the thread that writes it.
pub(super) struct Save {
    /// Name of the file, for messages and the report.
    path: PathBuf,
    file: File,
    /// Gives the file its name, if the companion has created it and not the client.
    unpublished: Mutex<Option<NewFile>>,
    cancelled: AtomicBool,
    answer: Mutex<Option<Result<SnapshotReport, ControlError>>>,
}

impl Save {
    /// The snapshot that a client has requested with `descriptors`: one, or none if `companion` may
    /// create the file.
    ///
    /// # Errors
    /// [`ControlError::Invalid`] for another number of descriptors, or if the path is not allowed.
    pub(super) fn new(
        target: SnapshotTarget,
        descriptors: Vec<OwnedFd>,
        companion: Option<&Companion>,
    ) -> Result<Arc<Self>, ControlError> {
        let invalid = |message: String| ControlError::Invalid {
            field: "path",
            message,
            remedy: Some(
                "`ebb ctl SOCKET snapshot FILE` opens the file and passes its descriptor; \
                 --allow-dir allows paths"
                    .to_owned(),
            ),
        };
        let mut descriptors = descriptors.into_iter();
        let (file, unpublished) = match (descriptors.next(), descriptors.next()) {
            (Some(file), None) => (file, None),
            (Some(_), Some(_)) => {
                let message = "more than one file descriptor came with the request";
                return Err(invalid(message.to_owned()));
            }
            (None, _) => {
                let companion = companion.ok_or_else(|| invalid(NO_DIRECTORY.to_owned()))?;
                let created = companion.create(&target.path);
                let (file, new) = created.map_err(|error| invalid(error.to_string()))?;
                (file, Some(new))
            }
        };
        Ok(Arc::new(Self {
            path: target.path,
            file: file.into(),
            unpublished: Mutex::new(unpublished),
            cancelled: AtomicBool::new(false),
            answer: Mutex::new(None),
        }))
    }

    /// Refuses a file of another kind.
    pub(super) fn check(&self) -> Result<(), SnapshotError> {
        check_target(&self.path, &self.file)
    }

    /// Waits for the report. A client that no longer waits cancels the snapshot.
    pub(super) fn outcome(self: &Arc<Self>) -> Outcome {
        let client = Client(self.clone());
        Outcome::Await(Wait::without_limit(move || {
            lock(&client.0.answer).clone().map(|answer| answer.map(Document::Snapshot))
        }))
    }

    pub(super) fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    pub(super) fn finish(&self, answer: Result<SnapshotReport, ControlError>) {
        *lock(&self.answer) = Some(answer);
    }
}

/// A client that waits for the report.
struct Client(Arc<Save>);

impl Drop for Client {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

/// Why no snapshot was written.
enum Failure {
    /// Not possible in this state, or the client's file is of the wrong kind.
    Refused(ControlError),
    Cancelled,
    /// An operation failed.
    Vm(VmError),
}

impl<E: Into<VmError>> From<E> for Failure {
    fn from(error: E) -> Self {
        match error.into() {
            VmError::Ram(ebb_guest_ram::RamError::SaveCancelled) => Self::Cancelled,
            VmError::Snapshot(problem @ SnapshotError::Target { .. }) => {
                Self::Refused(ControlError::Invalid {
                    field: "path",
                    message: problem.to_string(),
                    remedy: None,
                })
            }
            error => Self::Vm(error),
        }
    }
}

impl From<Failure> for ControlError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Refused(error) => error,
            Failure::Cancelled => Self::cancelled_save(),
            Failure::Vm(error) => Self::failed(error),
        }
    }
}

impl Vm {
    /// Writes the snapshot. A running machine is stopped while its memory is copied, and runs
    /// while the copy is written back to the disk.
    pub(super) fn write_snapshot(&self, save: &Save) -> Result<SnapshotReport, ControlError> {
        Ok(self.try_write_snapshot(save)?)
    }

    fn try_write_snapshot(&self, save: &Save) -> Result<SnapshotReport, Failure> {
        let started = Instant::now();
        save.check()?;
        let (captured, paused) = self.stop_and_save(save)?;
        let failed = |source| SnapshotError::Write { path: save.path.clone(), source };
        write_rest(&save.file, &captured, self.ram.size_bytes()).map_err(failed)?;
        match write_back(&save.file, &|| save.is_cancelled()).map_err(failed)? {
            Completion::Done => {}
            Completion::Cancelled => return Err(Failure::Cancelled),
        }
        let sizes = Sizes::of(&save.file).map_err(failed)?;
        if let Some(new) = lock(&save.unpublished).take() {
            new.publish().map_err(IsolationError::from)?;
        }
        Ok(SnapshotReport {
            path: save.path.to_string_lossy().into_owned(),
            file_bytes: sizes.file_bytes,
            stored_bytes: sizes.stored_bytes,
            ram_bytes: captured.ram.as_ref().map_or(0, ebb_guest_ram::RamImage::data_bytes),
            elapsed_ms: milliseconds(started.elapsed()),
            paused_ms: milliseconds(paused),
        })
    }

    /// Copies memory and state. Returns how long a running machine was stopped.
    ///
    /// The lock of the state is not held meanwhile: [`VmState::Saving`] keeps others from stopping,
    /// continuing or resetting the machine.
    fn stop_and_save(&self, save: &Save) -> Result<(MachineState, Duration), Failure> {
        let before = {
            let mut state = lock(&self.state);
            if self.exit.pending().is_some() {
                // It could not continue: the access with which it ended itself would never
                // complete.
                return Err(ended());
            }
            match *state {
                before @ (VmState::Running | VmState::Paused) => {
                    *state = VmState::Saving;
                    before
                }
                other => return Err(Failure::Refused(ControlError::not_running(other))),
            }
        };
        let stopped = Instant::now();
        let (saved, is_frozen) = match before {
            VmState::Running => match self.freeze() {
                // A vCPU may have ended the guest while it stopped.
                Ok(()) if self.exit.pending().is_some() => (Err(ended()), true),
                Ok(()) => (self.save_all(save), true),
                Err(error) => (Err(error.into()), false),
            },
            _ => (self.save_all(save), false),
        };
        let mut state = lock(&self.state);
        if *state != VmState::Saving {
            // The machine is being ended.
            return Err(Failure::Cancelled);
        }
        if is_frozen && let Err(error) = self.thaw() {
            // It can be resumed when the cause is removed.
            *state = VmState::Paused;
            return Err(error.into());
        }
        *state = before;
        drop(state);
        let paused = if is_frozen { stopped.elapsed() } else { Duration::ZERO };
        Ok((saved?, paused))
    }

    /// State of a stopped machine; copies its RAM to the file. RAM comes last: saving the devices
    /// makes them finish what they have begun.
    fn save_all(&self, save: &Save) -> Result<MachineState, Failure> {
        let mut state = self.capture()?;
        let is_cancelled = || save.is_cancelled();
        let ram = self.ram.save_unless(&save.file, RAM_OFFSET_BYTES, &mut |_| {}, &is_cancelled)?;
        state.ram = Some(ram);
        Ok(state)
    }
}

fn ended() -> Failure {
    Failure::Refused(ControlError::wrong_state(
        "the guest has ended or is about to reboot",
        "wait until it runs",
    ))
}

fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

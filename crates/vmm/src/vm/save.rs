//! A snapshot as a [task](super::task) of the thread for migrations.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::task::{TaskKind, Ticket};
use super::{Vm, VmError, lock};
use crate::api::control::ControlError;
use crate::api::vm::{SnapshotReport, SnapshotTarget, VmState};
use crate::file::{Completion, write_back};
use crate::isolation::{Companion, IsolationError, NO_DIRECTORY, NewFile};
use crate::snapshot::file::{RAM_OFFSET_BYTES, Sizes, check_target, write_rest};
use crate::snapshot::{MachineState, SnapshotError};

/// The file of a requested snapshot.
pub(super) struct Save {
    /// Name of the file, for messages and the report.
    path: PathBuf,
    file: File,
    /// Gives the file its name, if the companion has created it and not the client.
    unpublished: Option<NewFile>,
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
    ) -> Result<Self, ControlError> {
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
        Ok(Self { path: target.path, file: file.into(), unpublished })
    }

    /// Refuses a file of another kind.
    pub(super) fn check(&self) -> Result<(), SnapshotError> {
        check_target(&self.path, &self.file)
    }
}

/// Why no snapshot was written, or no checkpoint made.
pub(super) enum Failure {
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
            Failure::Cancelled => TaskKind::Snapshot.cancelled(),
            Failure::Vm(error) => Self::failed(error),
        }
    }
}

impl Vm {
    /// Writes the snapshot. A running machine is stopped while its memory is copied, and runs
    /// while the copy is written back to the disk.
    pub(super) fn write_snapshot(
        &self,
        save: Save,
        ticket: &Ticket,
    ) -> Result<SnapshotReport, ControlError> {
        Ok(self.try_write_snapshot(save, ticket)?)
    }

    fn try_write_snapshot(&self, save: Save, ticket: &Ticket) -> Result<SnapshotReport, Failure> {
        let started = Instant::now();
        save.check()?;
        let (captured, paused) = self.stop_and_save(&save, ticket)?;
        let failed = |source| SnapshotError::Write { path: save.path.clone(), source };
        write_rest(&save.file, &captured, self.ram.size_bytes()).map_err(failed)?;
        match write_back(&save.file, &|| ticket.is_cancelled()).map_err(failed)? {
            Completion::Done => {}
            Completion::Cancelled => return Err(Failure::Cancelled),
        }
        let sizes = Sizes::of(&save.file).map_err(failed)?;
        if let Some(new) = save.unpublished {
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
    fn stop_and_save(
        &self,
        save: &Save,
        ticket: &Ticket,
    ) -> Result<(MachineState, Duration), Failure> {
        self.while_stopped(|| self.save_all(save, ticket))
    }

    /// Does `work` while the machine is stopped. Returns how long a running machine was.
    ///
    /// The lock of the state is not held meanwhile: [`VmState::Saving`] keeps others from stopping,
    /// continuing or resetting the machine.
    pub(super) fn while_stopped<T>(
        &self,
        work: impl FnOnce() -> Result<T, Failure>,
    ) -> Result<(T, Duration), Failure> {
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
                Ok(()) => (work(), true),
                Err(error) => (Err(error.into()), false),
            },
            _ => (work(), false),
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
    fn save_all(&self, save: &Save, ticket: &Ticket) -> Result<MachineState, Failure> {
        let mut state = self.capture()?;
        let is_cancelled = || ticket.is_cancelled();
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

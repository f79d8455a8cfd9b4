//! A snapshot as a [task](super::task) of the thread for migrations.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use ebb_guest_ram::{BackgroundSave, GuestRam, InhibitReason, PreparedSave, RamError};
use rustix::fs::OFlags;

use super::task::{TaskKind, Ticket};
use super::{Vm, VmError, lock};
use crate::api::control::ControlError;
use crate::api::merge::MergeBackend;
use crate::api::vm::{CopiedWhile, SnapshotReport, SnapshotTarget, VmState};
use crate::config::VmConfig;
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

    /// Whether what was written can be read again.
    fn is_readable(&self) -> bool {
        let flags = rustix::fs::fcntl_getfl(&self.file);
        flags.is_ok_and(|flags| flags & OFlags::RWMODE == OFlags::RDWR)
    }
}

/// A machine as it was in a pause.
struct Captured<'a> {
    /// Without RAM if that is still to be copied.
    state: MachineState,
    ram: Option<BackgroundSave<'a>>,
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
            VmError::Ram(RamError::SaveCancelled) => Self::Cancelled,
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
    /// Writes the snapshot. A running machine is stopped while its state is read, and while its
    /// memory is copied if that is not possible [in use](ebb_guest_ram::BackgroundSave).
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
        let (captured, copied) = match captured {
            Captured { state, ram: None } => (state, CopiedWhile::Stopped),
            Captured { mut state, ram: Some(ram) } => {
                let is_cancelled = || ticket.is_cancelled();
                let image = ram.write(&save.file, RAM_OFFSET_BYTES, &mut |_| {}, &is_cancelled)?;
                state.ram = Some(image);
                (state, CopiedWhile::Running)
            }
        };
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
            copied,
        })
    }

    /// Captures the state, and copies or protects memory. Returns how long a running machine was
    /// stopped.
    fn stop_and_save(
        &self,
        save: &Save,
        ticket: &Ticket,
    ) -> Result<(Captured<'_>, Duration), Failure> {
        let prepared =
            if self.state() == VmState::Running { self.prepare_copy(save) } else { None };
        self.while_stopped(|| self.save_all(save, prepared, ticket))
    }

    /// Does `work` while the machine is stopped. Returns how long a running machine was.
    ///
    /// The lock of the state is not held meanwhile: [`VmState::Saving`] keeps others from stopping,
    /// continuing or resetting the machine. From the protection of its memory on, all other threads
    /// may wait for this one to copy it. So the rest of this function waits for none that could
    /// write to memory: vCPUs only set their clocks, and no thread writes while it holds the
    /// state's lock.
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

    /// Prepares memory for being copied while the guest runs; `None` if that is not possible.
    fn prepare_copy(&self, save: &Save) -> Option<PreparedSave<'_>> {
        let reason = if let Some(reason) = &self.copies_stopped {
            reason.clone()
        } else if !save.is_readable() {
            "the file is not open for reading".to_owned()
        } else {
            match self.ram.prepare_background_save() {
                Ok(prepared) => return Some(prepared),
                Err(reason) => reason.to_string(),
            }
        };
        tracing::debug!("the guest is stopped while its memory is copied: {reason}");
        None
    }

    /// State of a stopped machine; copies its RAM to the file, or protects it as `prepared`. RAM
    /// comes last: saving the devices makes them finish what they have begun.
    fn save_all<'a>(
        &'a self,
        save: &Save,
        prepared: Option<PreparedSave<'a>>,
        ticket: &Ticket,
    ) -> Result<Captured<'a>, Failure> {
        let mut state = self.capture()?;
        match prepared.map(PreparedSave::protect) {
            Some(Ok(ram)) => return Ok(Captured { state, ram: Some(ram) }),
            Some(Err(error)) => tracing::debug!("memory is copied in the pause: {error}"),
            None => {}
        }
        let is_cancelled = || ticket.is_cancelled();
        let ram = self.ram.save_unless(&save.file, RAM_OFFSET_BYTES, &mut |_| {}, &is_cancelled)?;
        state.ram = Some(ram);
        Ok(Captured { state, ram: None })
    }

    /// Whether memory is being copied for a snapshot while the guest runs, which keeps all pages.
    pub(super) fn is_being_copied(&self) -> bool {
        self.ram.inhibit_reasons().contains(&InhibitReason::BackgroundSnapshot)
    }

    /// Refuses what has no effect while memory is being copied.
    pub(super) fn not_being_copied(&self) -> Result<(), ControlError> {
        if self.is_being_copied() { Err(ControlError::being_saved()) } else { Ok(()) }
    }
}

/// Who opens /dev/userfaultfd.
pub(super) enum UserfaultfdBy {
    /// This process, which can still open files.
    Monitor,
    /// The client that has forked the machine, if it could.
    Client(Option<File>),
}

/// Prepares the monitor for copying memory while the guest runs.
///
/// # Errors
/// Why that is not possible.
pub(super) fn prepare_for_copies(
    config: &VmConfig,
    ram: &GuestRam,
    userfaultfd: UserfaultfdBy,
) -> Result<(), String> {
    if config.api.is_none() {
        return Err("no API".to_owned());
    }
    // Linux does not keep the protection of a page that it merges (mm/ksm.c, `replace_page`).
    if config.memory.merge.backend != MergeBackend::Off {
        return Err("pages of the machine may be merged".to_owned());
    }
    match userfaultfd {
        UserfaultfdBy::Monitor => ram.enable_background_saves(),
        UserfaultfdBy::Client(Some(device)) => ram.enable_background_saves_by(&device),
        UserfaultfdBy::Client(None) => {
            return Err("`ebb fork` could not open /dev/userfaultfd".to_owned());
        }
    }
    .map_err(|error| error.to_string())
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

//! The API as commands: the operations of a machine, and their results.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::balloon::{
    BalloonInfo, BalloonTarget, HintRun, HintRunStatus, StatisticsDocument, StatisticsInterval,
};
use super::disks::{DiskResize, DisksInfo};
use super::free_pages::{FreePagesReport, FreePagesRequest, ReclaimReport, ReclaimRequest};
use super::lease::PauseRequest;
use super::limits::{LimitsChange, LimitsInfo};
use super::merge::{MergeInfo, MergeSettings};
use super::metrics::Metrics;
use super::migration::{MigrationRequest, MigrationStatus};
use super::net::{NetChange, NetInfo};
use super::park::{ParkReport, ParkRequest, ParkStatus};
use super::vm::{
    CheckpointReport, CheckpointTarget, ConsoleInfo, SnapshotReport, SnapshotTarget, TrimReport,
    VmInfo, VmState,
};
use super::working_set::WorkingSet;

/// A virtual machine as the API sees it.
pub trait Machine: Send + Sync {
    /// Executes `operation` with the file descriptors that came with the request: none unless it
    /// [takes some](Operation::takes_descriptors).
    ///
    /// One thread serves all clients, so this must not wait for the guest, the network or the end
    /// of the monitor: long-running operations return [`Outcome::Await`]. Waiting for vCPU threads
    /// to leave the guest is allowed.
    ///
    /// # Errors
    /// Why the operation was not executed; the machine is unchanged.
    fn handle(
        &self,
        operation: Operation,
        descriptors: Vec<OwnedFd>,
    ) -> Result<Outcome, ControlError>;

    /// Undoes changes whose lease has ended at `now`, and returns when to be called again.
    fn on_time(&self, now: Instant) -> Option<Instant> {
        let _ = now;
        None
    }
}

/// The operations of the API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operation {
    /// `GET /openapi.json`
    OpenApi,
    /// `GET /vm`: the state of the machine. Available in every state.
    VmInfo,
    /// `PUT /vm/pause`: pauses all vCPUs; returns when no vCPU runs guest code. Pausing a paused
    /// machine is not an error.
    Pause(PauseRequest),
    /// `PUT /vm/resume`: resumes the vCPUs. Resuming a running machine is not an error.
    Resume,
    /// `PUT /vm/power-button`: presses the power button (ACPI); the guest decides how to react. The
    /// machine must not be paused.
    PowerButton,
    /// `PUT /vm/trim`: discards guest memory that is all zero. A running machine is paused for it,
    /// a few milliseconds at a time. A call works for about a second; the next one continues where
    /// it ended.
    Trim,
    /// `PUT /vm/park`: makes an idle guest small: free memory, cold caches and zeros go back to the
    /// host. A client that hangs up cancels it, and the guest gets its memory back.
    Park(ParkRequest),
    /// `GET /vm/park`: the last parking, and what the guest has read again since.
    ParkStatus,
    /// `PUT /vm/snapshot`: writes the machine to an empty file that is open for writing, the one
    /// descriptor of the request. A running machine is stopped while its state is read, and while
    /// its memory is copied if it cannot run meanwhile. After any error the machine is as before. A
    /// client that hangs up cancels it.
    Snapshot(SnapshotTarget),
    /// `GET /vm/working-set`: the parts of its snapshot that a restored machine has accessed.
    WorkingSet,
    /// `PUT /vm/checkpoint`: keeps the machine in memory, in a process that serves the socket which
    /// is the one descriptor of the request. A running machine stands still for the state of its
    /// vCPUs and devices, and while its memory is made copy-on-write.
    Checkpoint(CheckpointTarget),
    /// `PUT /vm/migrate`: starts a migration to another monitor, and returns at once.
    Migrate(Box<MigrationRequest>),
    /// `GET /vm/migration`: progress of the current migration, or the result of the last one.
    Migration {
        /// How long to wait for its end.
        wait: Option<Duration>,
    },
    /// `PUT /vm/migration/cancel`: requests cancellation of the current migration, without waiting.
    CancelMigration,
    /// `PUT /vm/kill`: ends the machine at once, like pulling the plug. Returns without waiting for
    /// the end: the reply is sent afterwards, at the latest when the
    /// [`ApiServer`](super::ApiServer) is dropped.
    Kill,
    /// `GET /balloon`
    Balloon,
    /// `PUT /balloon`: sets the balloon's target size, for as long as its lease is renewed if it has
    /// one.
    SetBalloon(BalloonTarget),
    /// `GET /balloon/statistics`: current memory statistics of the guest.
    Statistics {
        /// Statistics of at most this age are returned without asking the guest.
        max_age: Option<Duration>,
    },
    /// `PUT /balloon/statistics-interval`: sets the interval of requests for statistics.
    SetStatisticsInterval(StatisticsInterval),
    /// A run of free page hinting, which only Firecracker's API has: what is to be done about it.
    HintRun(HintRun),
    /// `PUT /balloon/free-pages`: asks the guest which of its pages are free; one request at a
    /// time.
    FreePages(FreePagesRequest),
    /// `PUT /balloon/reclaim`: the guest reports its free pages at once, and the host has their
    /// memory before the answer; one request at a time, of both kinds.
    Reclaim(ReclaimRequest),
    /// `GET /disks`: the disks, with counts of their requests.
    Disks,
    /// `PUT /disks`: gives a disk the size of its image, or another image, and notifies the guest.
    ResizeDisk(DiskResize),
    /// `GET /limits`: limits of devices' requests.
    Limits,
    /// `PUT /limits`: changes the limits of a device; requests that wait are considered again.
    SetLimits(LimitsChange),
    /// `GET /net`: network devices.
    Net,
    /// `PUT /net`: takes the link of a network device up or down.
    SetNet(NetChange),
    /// `GET /merge`: state, settings and statistics of same-page merging.
    Merge,
    /// `PUT /merge`: changes how pages are merged. Waits for settings to take effect, but not for
    /// pages to be unmerged by the monitor. The kernel unmerges within one system call, so with
    /// `merge=kernel` the call takes about a second for each 4 GiB of merged pages.
    SetMerge(Box<MergeSettings>),
    /// `PUT /console`: connects a stream socket, the one descriptor of the request, with the
    /// guest's serial line, and takes the place of an earlier one.
    AttachConsole,
    /// `GET /metrics`: all counters, for monitoring.
    Metrics,
}

impl Operation {
    /// Whether file descriptors may come with the request. They belong to the first request that is
    /// complete after their arrival: a client that sends some waits for earlier replies first.
    pub fn takes_descriptors(&self) -> bool {
        matches!(
            self,
            Self::Snapshot(_)
                | Self::Checkpoint(_)
                | Self::Migrate(_)
                | Self::AttachConsole
                | Self::ResizeDisk(_)
        )
    }
}

/// Outcome of an operation.
pub enum Outcome {
    /// It is done, or has been passed on; this is the answer.
    Done(Box<Document>),
    /// The answer is still to come.
    Await(Wait),
}

impl From<Document> for Outcome {
    fn from(document: Document) -> Self {
        Self::Done(Box::new(document))
    }
}

/// The answer to an operation.
#[derive(Debug, Serialize)]
#[serde(untagged)]
#[expect(missing_docs, reason = "each is the document that it holds")]
pub enum Document {
    #[serde(skip)]
    OpenApi,
    Vm(VmInfo),
    Trim(TrimReport),
    Park(ParkReport),
    ParkStatus(ParkStatus),
    Snapshot(SnapshotReport),
    WorkingSet(WorkingSet),
    Checkpoint(CheckpointReport),
    Migration(Box<MigrationStatus>),
    Balloon(BalloonInfo),
    Statistics(StatisticsDocument),
    FreePages(FreePagesReport),
    Reclaim(ReclaimReport),
    HintRun(HintRunStatus),
    Disks(DisksInfo),
    Limits(LimitsInfo),
    Net(NetInfo),
    Merge(Box<MergeInfo>),
    Console(ConsoleInfo),
    #[serde(skip)]
    Metrics(Box<Metrics>),
}

/// An answer that is still to come. Dropping it withdraws the request.
pub struct Wait {
    /// `None` for no limit.
    deadline: Option<Instant>,
    answer: Box<dyn FnMut(TimeLeft) -> Option<Result<Document, ControlError>> + Send>,
}

/// Whether an answer may still be waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimeLeft {
    /// There is time left.
    Some,
    /// The answer must be given now.
    None,
}

impl Wait {
    /// Waits for `answer` until `deadline`; it must not return `None` when no time is left.
    pub fn until(
        deadline: Instant,
        answer: impl FnMut(TimeLeft) -> Option<Result<Document, ControlError>> + Send + 'static,
    ) -> Self {
        Self { deadline: Some(deadline), answer: Box::new(answer) }
    }

    /// Waits for `answer`, as long as the client does.
    pub fn without_limit(
        mut answer: impl FnMut() -> Option<Result<Document, ControlError>> + Send + 'static,
    ) -> Self {
        Self { deadline: None, answer: Box::new(move |_| answer()) }
    }

    /// The answer, once it is available or the time is up; `None` before.
    pub fn poll(&mut self) -> Option<Result<Document, ControlError>> {
        let is_late = self.deadline.is_some_and(|deadline| Instant::now() >= deadline);
        (self.answer)(if is_late { TimeLeft::None } else { TimeLeft::Some })
    }
}

/// Why an operation was not executed. The variant determines the HTTP status.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ControlError {
    /// The machine has no balloon device (404).
    #[error("this virtual machine has no balloon device")]
    NoBalloon,
    /// Not possible in the current state of the machine (409).
    #[error("{message}")]
    WrongState {
        /// The request and the state found.
        message: String,
        /// What to do first.
        remedy: Option<String>,
    },
    /// An invalid value (422).
    #[error("{message}")]
    Invalid {
        /// The JSON field.
        field: &'static str,
        /// The value and its limits.
        message: String,
        /// A valid alternative.
        remedy: Option<String>,
    },
    /// An unexpected failure (500).
    #[error("{message}")]
    Failed {
        /// The request and the error.
        message: String,
    },
    /// The guest did not answer in time (504).
    #[error("the guest did not deliver statistics within {} ms", limit.as_millis())]
    NoAnswer {
        /// The time limit.
        limit: Duration,
    },
    /// There are no fresh statistics; the status is that of `error`.
    #[error("{error}")]
    NoFreshStatistics {
        /// The reason.
        error: Box<ControlError>,
        /// The last statistics received.
        last_known: Box<StatisticsDocument>,
    },
}

/// Message of operations that are not possible during a migration.
pub(crate) const BEING_MOVED: &str = "the virtual machine is migrating to another monitor";

impl ControlError {
    /// An operation that is not possible now: `message` says why, and `remedy` what to do first.
    pub(crate) fn wrong_state(message: impl Into<String>, remedy: &str) -> Self {
        Self::WrongState { message: message.into(), remedy: Some(remedy.to_owned()) }
    }

    /// An operation that is not possible while a snapshot is written.
    pub(crate) fn being_saved() -> Self {
        Self::wrong_state(
            "a snapshot of the virtual machine is being written",
            "wait for its end, or end the client that has requested it, which cancels it",
        )
    }

    /// A snapshot that was cancelled.
    pub(crate) fn cancelled_save() -> Self {
        Self::wrong_state(
            "the snapshot was cancelled",
            "request it again while the virtual machine runs",
        )
    }

    /// An operation that failed unexpectedly with `error`.
    pub(crate) fn failed(error: impl std::fmt::Display) -> Self {
        Self::Failed { message: error.to_string() }
    }

    /// Whether the guest has not answered in time.
    pub(crate) fn is_unanswered(&self) -> bool {
        match self {
            Self::NoAnswer { .. } => true,
            Self::NoFreshStatistics { error, .. } => error.is_unanswered(),
            _ => false,
        }
    }

    /// An operation that is not possible with a machine that is neither running nor paused.
    pub(crate) fn not_running(state: VmState) -> Self {
        match state {
            VmState::Migrating => {
                Self::wrong_state(BEING_MOVED, "wait for the end of the migration, or cancel it")
            }
            VmState::Saving => Self::being_saved(),
            VmState::Receiving => Self::wrong_state(
                "the virtual machine has not arrived here yet",
                "wait until it runs",
            ),
            _ => Self::wrong_state("the virtual machine is not running", "wait until it runs"),
        }
    }
}

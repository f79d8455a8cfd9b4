//! The API as one command: what can be asked of a machine, and what comes back.

use std::time::{Duration, Instant};

use serde::Serialize;

use super::balloon::{BalloonInfo, BalloonTarget, StatisticsDocument, StatisticsInterval};
use super::free_pages::{FreePagesReport, FreePagesRequest};
use super::merge::{MergeInfo, MergeSettings};
use super::metrics::Metrics;
use super::migration::{MigrationRequest, MigrationStatus};
use super::vm::{SnapshotReport, SnapshotTarget, TrimReport, VmInfo, VmState};

/// A virtual machine as the API sees it.
pub trait Machine: Send + Sync {
    /// Carries out `operation`.
    ///
    /// One thread serves all clients, so this must not wait for the guest, for the network or for
    /// the end of the monitor: what takes a while is an [`Outcome::Await`]. Waiting for vCPU threads
    /// to leave the guest is fine.
    ///
    /// # Errors
    /// Why it was not carried out; the machine is as before.
    fn handle(&self, operation: Operation) -> Result<Outcome, ControlError>;
}

/// Everything the API can do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operation {
    /// `GET /openapi.json`
    OpenApi,
    /// `GET /vm`: the state of the machine. It is answered in every state.
    VmInfo,
    /// `PUT /vm/pause`: stops all vCPUs; returns when no vCPU runs guest code. Pausing a paused
    /// machine is no error.
    Pause,
    /// `PUT /vm/resume`: lets the vCPUs run again. Resuming a running machine is no error.
    Resume,
    /// `PUT /vm/power-button`: presses the power button (ACPI); the guest decides what to do. A
    /// paused machine is the wrong state.
    PowerButton,
    /// `PUT /vm/trim`: gives back guest memory that holds nothing but zeros. A running machine is
    /// stopped for it, a few milliseconds at a time. It works for about a second; the next call goes
    /// on where this one ended.
    Trim,
    /// `PUT /vm/snapshot`: writes the machine to a file. A running machine is stopped meanwhile. On
    /// any error the machine is as before, and there is no file of that name that was not there
    /// before.
    Snapshot(SnapshotTarget),
    /// `PUT /vm/migrate`: begins to move the machine to another monitor, and returns at once.
    Migrate(Box<MigrationRequest>),
    /// `GET /vm/migration`: how far the migration under way is, or what the last one has come to.
    Migration {
        /// How long to wait for its end.
        wait: Option<Duration>,
    },
    /// `PUT /vm/migration/cancel`: asks for the end of the migration under way, without waiting.
    CancelMigration,
    /// `PUT /vm/kill`: ends the machine at once, like pulling the plug. It returns without waiting
    /// for the end: the reply is sent afterwards, at the latest when the
    /// [`ApiServer`](super::ApiServer) is dropped.
    Kill,
    /// `GET /balloon`
    Balloon,
    /// `PUT /balloon`: sets the size the balloon should get to.
    SetBalloon(BalloonTarget),
    /// `GET /balloon/statistics`: what the guest says of its memory, now.
    Statistics {
        /// Values at most this old will do without asking the guest.
        max_age: Option<Duration>,
    },
    /// `PUT /balloon/statistics-interval`: asks the guest for statistics regularly from now on.
    SetStatisticsInterval(StatisticsInterval),
    /// `PUT /balloon/free-pages`: asks the guest which of its pages are free; one question at a
    /// time.
    FreePages(FreePagesRequest),
    /// `GET /merge`: what same-page merging is doing.
    Merge,
    /// `PUT /merge`: changes how pages are merged. It waits for a change of settings to take effect,
    /// not for pages to be unmerged by their owner. The kernel unmerges within one system call, so
    /// with `merge=kernel` it does wait: about a second for each 4 GiB of merged pages.
    SetMerge(Box<MergeSettings>),
    /// `GET /metrics`: all counters, for monitoring.
    Metrics,
}

/// What an operation has come to.
pub enum Outcome {
    /// It is done, or has been passed on; this is what to answer.
    Done(Box<Document>),
    /// The answer is still to come.
    Await(Wait),
}

impl From<Document> for Outcome {
    fn from(document: Document) -> Self {
        Self::Done(Box::new(document))
    }
}

/// What an operation answers.
#[derive(Debug, Serialize)]
#[serde(untagged)]
#[expect(missing_docs, reason = "each is the document that it holds")]
pub enum Document {
    #[serde(skip)]
    OpenApi,
    Vm(VmInfo),
    Trim(TrimReport),
    Snapshot(SnapshotReport),
    Migration(Box<MigrationStatus>),
    Balloon(BalloonInfo),
    Statistics(StatisticsDocument),
    FreePages(FreePagesReport),
    Merge(Box<MergeInfo>),
    #[serde(skip)]
    Metrics(Box<Metrics>),
}

/// An answer that is still to come. Dropping it withdraws the question.
pub struct Wait {
    deadline: Instant,
    answer: Box<dyn FnMut(TimeLeft) -> Option<Result<Document, ControlError>> + Send>,
}

/// Whether an answer may still be waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimeLeft {
    /// It may.
    Some,
    /// It is to be given now.
    None,
}

impl Wait {
    /// Waits until `deadline` for `answer`, which must not be `None` when no time is left.
    pub fn until(
        deadline: Instant,
        answer: impl FnMut(TimeLeft) -> Option<Result<Document, ControlError>> + Send + 'static,
    ) -> Self {
        Self { deadline, answer: Box::new(answer) }
    }

    /// The answer, as soon as there is one or the time is up; `None` before.
    pub fn poll(&mut self) -> Option<Result<Document, ControlError>> {
        let is_late = Instant::now() >= self.deadline;
        (self.answer)(if is_late { TimeLeft::None } else { TimeLeft::Some })
    }
}

/// Why the machine did not do what it was asked. The variant decides the HTTP status.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ControlError {
    /// The machine has no balloon device (404).
    #[error("this virtual machine has no balloon device")]
    NoBalloon,
    /// Not possible in the machine's present state (409).
    #[error("{message}")]
    WrongState {
        /// What was asked and what state was found.
        message: String,
        /// What to do first.
        remedy: Option<String>,
    },
    /// A value that cannot be used (422).
    #[error("{message}")]
    Invalid {
        /// The JSON field.
        field: &'static str,
        /// What was asked, and what the limits are.
        message: String,
        /// What to ask for instead.
        remedy: Option<String>,
    },
    /// It should have worked (500).
    #[error("{message}")]
    Failed {
        /// What was asked and what went wrong.
        message: String,
    },
    /// The guest did not answer in time (504).
    #[error("the guest did not deliver statistics within {} ms", limit.as_millis())]
    NoAnswer {
        /// How long it had.
        limit: Duration,
    },
    /// There are no fresh statistics; the status is that of `error`.
    #[error("{error}")]
    NoFreshStatistics {
        /// Why not.
        error: Box<ControlError>,
        /// The statistics received last.
        last_known: Box<StatisticsDocument>,
    },
}

/// Why something does not go together with a migration.
pub(crate) const BEING_MOVED: &str = "the virtual machine is migrating to another monitor";

impl ControlError {
    /// Not possible now: `message` says why, and `remedy` what to do first.
    pub(crate) fn wrong_state(message: impl Into<String>, remedy: &str) -> Self {
        Self::WrongState { message: message.into(), remedy: Some(remedy.to_owned()) }
    }

    /// Something that should have worked has failed with `error`.
    pub(crate) fn failed(error: impl std::fmt::Display) -> Self {
        Self::Failed { message: error.to_string() }
    }

    /// Not possible with a machine that neither runs nor is paused.
    pub(crate) fn not_running(state: VmState) -> Self {
        match state {
            VmState::Migrating => {
                Self::wrong_state(BEING_MOVED, "wait for the end of the migration, or cancel it")
            }
            VmState::Receiving => Self::wrong_state(
                "the virtual machine has not arrived here yet",
                "wait until it runs",
            ),
            _ => Self::wrong_state("the virtual machine is not running", "wait until it runs"),
        }
    }
}

//! Work of the API that takes long: the thread for migrations does it, one task at a time, and the
//! client waits for the result. A client that hangs up cancels its task.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use super::{Vm, lock};
use crate::api::control::{ControlError, Document, Outcome, Wait};

/// What is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TaskKind {
    /// A snapshot is written.
    Snapshot,
    /// The guest is made small.
    Park,
    /// The machine is kept in memory.
    Checkpoint,
}

impl TaskKind {
    /// Why nothing else can be done meanwhile.
    pub(super) fn busy(self) -> ControlError {
        match self {
            Self::Snapshot => ControlError::being_saved(),
            Self::Checkpoint => ControlError::wrong_state(
                "a checkpoint of the virtual machine is being made",
                "try again in a moment",
            ),
            Self::Park => ControlError::wrong_state(
                "the virtual machine is being parked",
                "wait for its end, or end the client that has requested it, which cancels it",
            ),
        }
    }

    /// The answer to a cancelled task.
    pub(super) fn cancelled(self) -> ControlError {
        match self {
            Self::Snapshot => ControlError::cancelled_save(),
            Self::Checkpoint => ControlError::wrong_state(
                "the checkpoint was cancelled",
                "request it again while the virtual machine runs",
            ),
            Self::Park => ControlError::wrong_state(
                "parking was cancelled",
                "request it again while the virtual machine runs",
            ),
        }
    }
}

type Answer = Result<Document, ControlError>;
type Work = Box<dyn FnOnce(&Vm, &Ticket) -> Answer + Send>;

/// A task that has not begun.
pub(super) struct Task {
    ticket: Arc<Ticket>,
    work: Work,
}

/// A task as its client and the thread see it.
pub(super) struct Ticket {
    kind: TaskKind,
    cancelled: AtomicBool,
    answer: Mutex<Option<Answer>>,
}

impl Task {
    /// A task of `kind`, which `work` carries out. It should look at
    /// [`is_cancelled`](Ticket::is_cancelled) often.
    pub(super) fn new(
        kind: TaskKind,
        work: impl FnOnce(&Vm, &Ticket) -> Answer + Send + 'static,
    ) -> Self {
        let ticket = Ticket { kind, cancelled: AtomicBool::new(false), answer: Mutex::new(None) };
        Self { ticket: Arc::new(ticket), work: Box::new(work) }
    }

    pub(super) fn ticket(&self) -> &Arc<Ticket> {
        &self.ticket
    }

    /// Does the work; its answer is for [`Ticket::finish`].
    pub(super) fn carry_out(self, vm: &Vm) -> Answer {
        (self.work)(vm, &self.ticket)
    }
}

impl Ticket {
    pub(super) fn kind(&self) -> TaskKind {
        self.kind
    }

    pub(super) fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    /// Passes the answer to the client.
    pub(super) fn finish(&self, answer: Answer) {
        *lock(&self.answer) = Some(answer);
    }

    /// Waits for the answer.
    pub(super) fn outcome(self: &Arc<Self>) -> Outcome {
        let client = Client(self.clone());
        Outcome::Await(Wait::without_limit(move || lock(&client.0.answer).take()))
    }
}

/// A client that waits for the answer.
struct Client(Arc<Ticket>);

impl Drop for Client {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

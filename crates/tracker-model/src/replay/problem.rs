//! What the model does not allow.

use thiserror::Error;

use super::pages::PageUse;
use crate::units::{Block, Pfn};

/// What the model does not allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Problem {
    /// A page is used for something that this cannot happen to.
    #[error("page {page:?} is {found:?}")]
    WrongUse {
        /// The first such page.
        page: Pfn,
        /// What it is used for.
        found: PageUse,
    },
    /// Not in the free lists.
    #[error("{0:?} is not free")]
    NotFree(Block),
    /// In a free block of another size.
    #[error("{block:?} is in {whole:?} and not free on its own")]
    OtherOrder {
        /// The block.
        block: Block,
        /// The free block that it is in.
        whole: Block,
    },
    /// The host knows the block as free, so that no tracker should take it.
    #[error("{0:?} has the Reported flag")]
    KnownToHost(Block),
    /// No tracker runs that does this.
    #[error("no tracker runs that does this")]
    NoTracker,
    /// A tracker is started while another one runs, or stopped when none does.
    #[error("a tracker is started or stopped out of turn")]
    OutOfTurn,
    /// Reported, answered or put back and not isolated.
    #[error("{0:?} is not held by a tracker")]
    NotHeld(Block),
    /// Reported, and not what the tracker's bits say.
    #[error("{0:?} is not what is to be reported")]
    NotNamed(Block),
    /// Reported again before it was put back.
    #[error("{0:?} is reported twice")]
    ReportedTwice(Block),
    /// Answered without a report, or twice.
    #[error("{0:?} is answered and no report waits")]
    NotReported(Block),
    /// Put back without a report.
    #[error("{0:?} is put back and was not reported")]
    PutBackUnreported(Block),
    /// Put back before the answer.
    #[error("{0:?} is put back before the host has answered")]
    PutBackUnanswered(Block),
    /// Not put back when the tracker has stopped or the recording ends.
    #[error("{0:?} was not put back")]
    StillHeld(Block),
    /// `bitmap`: a bit that has to be set is not.
    #[error("{0:?} is not marked in the bitmap")]
    NotMarked(Block),
    /// `bitmap`: a bit is set for no reason.
    #[error("{0:?} is marked, and nothing of it has become free")]
    MarkedUnfounded(Block),
    /// `bitmap`: a bit is cleared that is not set.
    #[error("the mark of {0:?} is cleared and was not set")]
    ClearedUnset(Block),
    /// `percpu`: freed, and neither written down nor lost.
    #[error("{0:?} was freed, and neither written down nor lost")]
    FreeMissed(Block),
    /// `percpu`: written down or lost, and not freed.
    #[error("{0:?} was written down or lost, and not freed")]
    NotFreed(Block),
    /// `percpu`: isolated, and nothing around it was written down.
    #[error("{0:?} is isolated, and nothing around it was written down")]
    NotCaptured(Block),
    /// `percpu`: a full array is written to.
    #[error("the CPU's array is full already")]
    ArrayFull,
    /// `percpu`: a free is lost because of an array that is not full, or one is said to be full
    /// that no scan has left full.
    #[error("the CPU's array is not full")]
    ArrayNotFull,
    /// `percpu`: an array is handed over that is empty or was handed over before.
    #[error("the CPU's array is empty or handed over already")]
    NothingToFlush,
    /// `percpu`: a thread takes an array that was not handed over.
    #[error("the CPU's array was not handed over")]
    ArrayNotDue,
    /// `percpu`: an array does not have so many entries.
    #[error("the CPU's array has {expected} entries, and {recorded} are recorded")]
    Entries {
        /// By the model.
        expected: u32,
        /// In the recording.
        recorded: u32,
    },
}

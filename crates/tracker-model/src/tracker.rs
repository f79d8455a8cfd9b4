//! What the three trackers have in common, and the flaws that they can be given.

use crate::buddy::Allocator;
use crate::units::Block;

/// Which tracker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// An array of freed pages.
    Percpu,
    /// A bitmap of large blocks.
    Bitmap,
    /// A flag on free blocks.
    Reporting,
}

/// What the host says to a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The blocks have been discarded.
    Discarded,
    /// Something went wrong; any of them may have been discarded.
    Failed,
}

/// How a freed block got to the free lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// From a per-CPU list: the tracepoint behind the merge sees it.
    CpuList,
    /// Directly: no tracepoint behind the merge.
    Direct,
}

/// Blocks that are out of the allocator together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// As the allocator had them.
    pub held: Vec<Block>,
    /// What the host is told: parts of them, or all.
    pub named: Vec<Block>,
}

/// A mistake that a tracker or the code around it makes. The properties have to find each of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flaw {
    /// No mistake.
    None,
    /// Blocks are reported while they can be allocated.
    ReportBeforeIsolate,
    /// What was written down some time ago is taken to be free.
    IsolateUnchecked,
    /// Blocks go back before the host has answered.
    PutBackEarly,
    /// A tracker that is stopped forgets what it holds.
    StopForgets,
    /// The bits of blocks whose report failed are not set again.
    FailureForgotten,
    /// Too few bits for the threshold start no walk, ever.
    NoLeftoverWalk,
    /// A walk that leaves bits behind queues no other one.
    NoSecondWalk,
    /// What was free at the start is not looked for.
    NoSeeding,
    /// A page on its way to the free lists is taken for one that was allocated again.
    NoSecondLook,
    /// Frees that an array has no place for are not counted.
    LossUncounted,
    /// The last entry is taken to be in an array that the thread has taken.
    LastEntryKept,
    /// The Reported flag stays on blocks that leave the free lists.
    FlagOutlivesAllocation,
    /// The Reported flag is set on what a returned block was merged into.
    FlagOnMerged,
    /// A pass that has used up its budget does not ask for another one.
    BudgetEndsAll,
}

/// How many frees or entries a tracker knows that it will not report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Losses {
    /// Calls of the hook.
    pub frees: u32,
    /// Frees written down.
    pub captured: u32,
    /// Frees in the block of the last entry, which stands for them.
    pub again: u32,
    /// Frees not written down, and blocks given up because of the host or a shortage of memory.
    pub lost: u32,
    /// Entries that were not free when an array was looked through.
    pub not_free: u32,
    /// Entries in blocks that are too small.
    pub small: u32,
}

/// A tracker, as the steps that locks make indivisible.
pub trait Tracker {
    /// Hook: a block is going to be free (tracepoint `mm_page_free`; for `bitmap`, a probe on the
    /// function that frees past the per-CPU lists).
    fn freed(&mut self, block: Block, allocator: &Allocator);

    /// Hook: a block has become free and was merged into another one.
    fn merged(&mut self, block: Block, into: Block, path: Path);

    /// A timer fires or a thread wakes up. Whether there is something to do: a pass begins.
    fn begin(&mut self, allocator: &Allocator) -> bool;

    /// Takes the next blocks out of the allocator. None: the pass is over.
    fn fill(&mut self, allocator: &mut Allocator) -> Option<Batch>;

    /// The host has answered and the batch is about to be put back by [`Tracker::put_back`].
    fn answered(&mut self, named: &[Block], answer: Answer);

    /// Puts a block back.
    fn put_back(&mut self, block: Block, answer: Answer, allocator: &mut Allocator);

    /// What it knows to be lost.
    fn losses(&self) -> Losses;
}

/// Takes a block into a batch, as `ebb_batch_hold()` does. Whether the batch has it now.
pub(crate) fn hold(batch: &mut Batch, block: Block, allocator: &mut Allocator, flaw: Flaw) -> bool {
    match flaw {
        Flaw::ReportBeforeIsolate => allocator.has(block),
        _ if allocator.isolate(block) => {
            batch.held.push(block);
            true
        }
        _ => false,
    }
}

//! The running guest as the engine uses it.

use crate::{BoxError, HintReceiver};

/// The guest that is migrated.
pub trait Guest {
    /// Writes back what [`pause_and_save`](Self::pause_and_save) or the end of the migration would
    /// otherwise wait for while the guest is paused, such as the page cache of its disks. Called at
    /// the end of each round while the guest runs, before its writes are synced: what it takes is
    /// part of the round.
    ///
    /// # Errors
    /// If something cannot be written back. The migration continues: the end reports it again.
    fn flush(&mut self) -> Result<(), BoxError>;

    /// Pauses vCPUs and devices and saves their state, which the implementor keeps. Nothing writes
    /// to guest memory from the return of this call until [`resume`](Self::resume). Writes made
    /// while the state is saved are in the dirty source.
    ///
    /// # Errors
    /// If the guest cannot be paused or its state cannot be saved. The engine then calls `resume`.
    fn pause_and_save(&mut self) -> Result<(), BoxError>;

    /// Resumes the guest after [`pause_and_save`](Self::pause_and_save), also after one that
    /// failed.
    ///
    /// # Errors
    /// If the guest cannot be resumed.
    fn resume(&mut self) -> Result<(), BoxError>;

    /// Throttles the vCPUs: takes this percentage of their time, from 0 (full speed) to 99.
    ///
    ///
    /// # Errors
    /// If the guest cannot be throttled. The migration continues without.
    fn throttle(&mut self, percent: u8) -> Result<(), BoxError>;
}

/// Source of free page hints: virtio's free page hinting, or a query of free pages.
///
/// Hints may arrive from any thread after [`start`](Self::start). The [`HintReceiver`] ignores late
/// ones, so `stop` need not wait.
///
/// Order of calls: `start`, `stop`, possibly both again, and finally `finish`, on every exit path.
pub trait FreePageSource {
    /// Requests hints from the guest. The guest must not see the command id or request that `hints`
    /// is for before this call.
    ///
    /// # Errors
    /// If hints cannot be requested now (no driver, feature not negotiated). The migration
    /// continues without hints and says so in its report.
    fn start(&mut self, hints: HintReceiver) -> Result<(), BoxError>;

    /// Ends hinting (virtio's `VIRTIO_BALLOON_CMD_ID_STOP`). The guest still keeps hinted pages
    /// aside.
    fn stop(&mut self);

    /// The guest may use all of its pages again (virtio's `VIRTIO_BALLOON_CMD_ID_DONE`). Called
    /// before the guest's state is saved, and after every failure and cancellation.
    fn finish(&mut self);
}

/// Acknowledgements of rounds from the destination.
pub trait RoundSync {
    /// Waits until the destination confirms that everything up to the end of this round is in its
    /// memory. Must return when the connection is shut down.
    ///
    /// # Errors
    /// If the destination failed, does not answer in time, or is no longer reachable.
    fn wait_round_done(&mut self, round: u32) -> Result<(), BoxError>;
}

//! What the engine wants of a running guest.

use crate::{BoxError, HintReceiver};

/// The guest that is moved.
pub trait Guest {
    /// Stops vCPUs and devices and takes their state, which the implementor keeps: nothing writes
    /// to the guest's memory when this returns, until [`resume`](Self::resume). What taking the
    /// state writes there is in the dirty source.
    ///
    /// # Errors
    /// If the guest cannot be stopped or its state not be taken. The engine then calls `resume`.
    fn pause_and_save(&mut self) -> Result<(), BoxError>;

    /// Lets the guest go on after [`pause_and_save`](Self::pause_and_save), also after one that
    /// failed.
    ///
    /// # Errors
    /// If it cannot go on.
    fn resume(&mut self) -> Result<(), BoxError>;

    /// Takes this part of their time from the vCPUs, in percent, from 0 (the guest runs as fast as
    /// it can) to 99.
    ///
    /// # Errors
    /// If that is not possible. A migration goes on without it.
    fn throttle(&mut self, percent: u8) -> Result<(), BoxError>;
}

/// Somebody who can tell which pages the guest does not use: virtio's free page hinting, or a query
/// of free pages.
///
/// Hints may come from any thread from [`start`](Self::start) on. Those that come too late are
/// ignored by the [`HintReceiver`], so `stop` need not wait.
///
/// Calls come in this order: `start`, `stop`, perhaps both again, and `finish` at last, on every
/// way out.
pub trait FreePageSource {
    /// Asks the guest. Only from here on the guest may be told of the command or request that
    /// `hints` is for.
    ///
    /// # Errors
    /// If there is no way to ask now (no driver, feature not negotiated). The migration goes on
    /// without hints and says so in its report.
    fn start(&mut self, hints: HintReceiver) -> Result<(), BoxError>;

    /// No more hints are wanted (virtio's `VIRTIO_BALLOON_CMD_ID_STOP`). The guest still keeps
    /// hinted pages aside.
    fn stop(&mut self);

    /// The guest may use all of its pages again (virtio's `VIRTIO_BALLOON_CMD_ID_DONE`). Called
    /// before the guest's state is taken, and after every failure and cancellation.
    fn finish(&mut self);
}

/// Tells when the other end has dealt with a round.
pub trait RoundSync {
    /// Waits until the destination says that everything up to the end of this round is in its
    /// memory. Must return when the connection is shut down.
    ///
    /// # Errors
    /// If the destination gave up, does not answer in time, or cannot be reached any more.
    fn wait_round_done(&mut self, round: u32) -> Result<(), BoxError>;
}

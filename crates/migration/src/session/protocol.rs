//! The control protocol without I/O: which message may come next, and which side runs the guest.
//!
//! Both sides keep a [`Protocol`] and pass it every message they send (before the first byte) and
//! receive, and every failure. A test explores all interleavings of two of them over connections
//! that are cut at every point, with time limits that expire at every moment.
//!
//! ```text
//!            source                 destination
//!   Opening    Hello ------------------->
//!   Called     <------------------- Hello
//!   Greeted    Setup ------------------->
//!   Asked      <------- Accept, or Refuse
//!   Streaming  Descriptors ------------->
//!              <--------------- RoundDone     (one for each round of the data streams)
//!              State ------------------->
//!   Restoring  <------------------- Ready
//!   Prepared   Commit ------------------>
//!   Committed  <------- Running, or Failed
//! ```
//!
//! `Abort` ends the session at any point before `Commit`. From `Ready` on the destination sends
//! `Failed` instead, the only message after which a source that has written `Commit` may resume the
//! guest.

use super::message::MessageKind;

/// One end of the control connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Side {
    Source,
    Destination,
}

/// Stage of the session, as seen by one side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Stage {
    Opening,
    Called,
    Greeted,
    Asked,
    Streaming,
    Restoring,
    Prepared,
    Committed,
    Over(End),
}

/// The side that runs the guest after the session, as known to one side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum End {
    /// The source; the destination never will.
    Stays,
    /// The destination; the source never will.
    Moved,
    /// The source cannot know. It keeps the guest paused.
    Unknown,
}

/// A message that may not be sent or received now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Misplaced;

/// One side's view of the session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Protocol {
    side: Side,
    stage: Stage,
}

impl Side {
    const fn other(self) -> Self {
        match self {
            Self::Source => Self::Destination,
            Self::Destination => Self::Source,
        }
    }
}

impl Protocol {
    pub(super) const fn new(side: Side) -> Self {
        Self { side, stage: Stage::Opening }
    }

    pub(super) const fn stage(self) -> Stage {
        self.stage
    }

    /// Records that this side is about to send a message.
    pub(super) fn send(&mut self, kind: MessageKind) -> Result<(), Misplaced> {
        self.stage = next(self.stage, self.side, kind).ok_or(Misplaced)?;
        Ok(())
    }

    /// Records that the kernel did not accept the last byte of the message being sent, so that the
    /// other side cannot have it. Nothing more may be written: the rest of the message would
    /// complete it.
    pub(super) fn unsent(&mut self, kind: MessageKind) {
        if self.side == Side::Source
            && kind == MessageKind::Commit
            && self.stage == Stage::Committed
        {
            self.stage = Stage::Over(End::Stays);
        } else {
            self.lost();
        }
    }

    /// Records a complete message from the other side. One that is not valid here changes nothing;
    /// this side must abort.
    pub(super) fn receive(&mut self, kind: MessageKind) -> Result<(), Misplaced> {
        self.stage = next(self.stage, self.side.other(), kind).ok_or(Misplaced)?;
        Ok(())
    }

    /// Records that this side has given up, after a failure message if one was valid.
    pub(super) fn lost(&mut self) {
        self.stage = match (self.stage, self.side) {
            (over @ Stage::Over(_), _) => over,
            (Stage::Committed, Side::Source) => Stage::Over(End::Unknown),
            // The decision is known here; no further message is needed.
            (Stage::Committed, Side::Destination) => Stage::Committed,
            _ => Stage::Over(End::Stays),
        };
    }

    /// Whether this side may run the guest. Between `Commit` and `Running` the destination starts
    /// it.
    #[cfg(test)]
    pub(super) fn may_run(self) -> bool {
        match (self.side, self.stage) {
            (Side::Source, Stage::Committed | Stage::Over(End::Moved | End::Unknown)) => false,
            (Side::Source, _) | (Side::Destination, Stage::Committed | Stage::Over(End::Moved)) => {
                true
            }
            (Side::Destination, _) => false,
        }
    }

    /// The message by which this side reports a failure, if one is valid now.
    pub(super) fn failure_message(self) -> Option<MessageKind> {
        [MessageKind::Abort, MessageKind::Failed]
            .into_iter()
            .find(|&kind| next(self.stage, self.side, kind).is_some())
    }
}

/// The stage after `sender` has sent `kind`, or `None` if it may not.
fn next(stage: Stage, sender: Side, kind: MessageKind) -> Option<Stage> {
    use Side::{Destination, Source};
    Some(match (stage, sender, kind) {
        (Stage::Opening, Source, MessageKind::Hello) => Stage::Called,
        (Stage::Called, Destination, MessageKind::Hello) => Stage::Greeted,
        (Stage::Greeted, Source, MessageKind::Setup) => Stage::Asked,
        (Stage::Asked, Destination, MessageKind::Accept)
        | (Stage::Streaming, Source, MessageKind::Descriptors)
        | (Stage::Streaming, Destination, MessageKind::RoundDone) => Stage::Streaming,
        (Stage::Streaming, Source, MessageKind::State) => Stage::Restoring,
        (Stage::Restoring, Destination, MessageKind::Ready) => Stage::Prepared,
        (Stage::Prepared, Source, MessageKind::Commit) => Stage::Committed,
        (Stage::Committed, Destination, MessageKind::Running) => Stage::Over(End::Moved),
        (Stage::Asked, Destination, MessageKind::Refuse)
        | (Stage::Prepared | Stage::Committed, Destination, MessageKind::Failed) => {
            Stage::Over(End::Stays)
        }
        // From `Ready` on a decision may be in transit to the destination: see `Failed`.
        (Stage::Prepared, Destination, _) | (Stage::Committed | Stage::Over(_), _, _) => {
            return None;
        }
        (_, _, MessageKind::Abort) => Stage::Over(End::Stays),
        _ => return None,
    })
}

#[cfg(test)]
mod tests;

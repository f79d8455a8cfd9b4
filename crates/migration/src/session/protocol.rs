//! Whose turn it is, and who runs the guest in the end: the control protocol without any I/O.
//!
//! Both sides keep a [`Protocol`] and tell it of every message they send (before the first byte)
//! and receive, and of everything that goes wrong. A test walks through all interleavings of two of
//! them over connections that are cut at every place, with time limits that expire at every moment.
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
//! `Abort` ends it at any place before `Commit`; from `Ready` on the destination says `Failed`
//! instead, the one word after which a source that has written `Commit` may run the guest again.

use super::message::MessageKind;

/// Which end of the control connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Side {
    Source,
    Destination,
}

/// How far the conversation is, as one side sees it.
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

/// Who runs the guest after the session, as one side knows it.
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

/// One side's view of the conversation.
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

    /// This side is about to send a message.
    pub(super) fn send(&mut self, kind: MessageKind) -> Result<(), Misplaced> {
        self.stage = next(self.stage, self.side, kind).ok_or(Misplaced)?;
        Ok(())
    }

    /// The system did not take the last byte of the message that was about to be sent, so the other
    /// side cannot have it. Nothing more may be written: what is left of the message would complete
    /// it.
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

    /// A whole message has come. One that has no place here changes nothing; this side has to give
    /// up.
    pub(super) fn receive(&mut self, kind: MessageKind) -> Result<(), Misplaced> {
        self.stage = next(self.stage, self.side.other(), kind).ok_or(Misplaced)?;
        Ok(())
    }

    /// No more messages: this side has given up, after a word of failure if one had a place.
    pub(super) fn lost(&mut self) {
        self.stage = match (self.stage, self.side) {
            (over @ Stage::Over(_), _) => over,
            (Stage::Committed, Side::Source) => Stage::Over(End::Unknown),
            // The decision is known here; nobody has to be heard any more.
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

    /// With what this side tells the other that it gives up, where that has a place.
    pub(super) fn word_of_failure(self) -> Option<MessageKind> {
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
        // From `Ready` on a decision may be on its way to the destination: see `Failed`.
        (Stage::Prepared, Destination, _) | (Stage::Committed | Stage::Over(_), _, _) => {
            return None;
        }
        (_, _, MessageKind::Abort) => Stage::Over(End::Stays),
        _ => return None,
    })
}

#[cfg(test)]
mod tests;

//! Why a migration failed.

use std::fmt;
use std::time::Duration;

use ebb_abi::PageRange;
use ebb_abi::migration::RecordError;

use crate::{BoxError, Report};

/// Why the source gave up. The guest runs on there.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MigrationError {
    /// Somebody called it off.
    #[error("the migration was cancelled; the guest runs on here")]
    Cancelled,

    /// The time limit has passed.
    #[error(
        "the migration was not done within {} s: {remaining_bytes} bytes were left to send; the guest runs on here. \
         Allow more time, a longer downtime, more bandwidth, or let the guest be slowed down or be stopped at the limit",
        limit.as_secs_f64()
    )]
    TimeLimit {
        /// The limit.
        limit: Duration,
        /// What was left.
        remaining_bytes: u64,
    },

    /// There was no stream to send on.
    #[error("a migration needs at least one data stream and was given none")]
    NoStreams,

    /// The dirty log refused something.
    #[error("cannot {action}: {source}")]
    Dirty {
        /// What was tried.
        action: &'static str,
        /// Why not.
        source: BoxError,
    },

    /// Guest memory could not be read.
    #[error("cannot {action} guest memory {range}: {source}")]
    Memory {
        /// What was tried.
        action: &'static str,
        /// With which pages.
        range: PageRange,
        /// Why not.
        source: BoxError,
    },

    /// A stream failed.
    #[error("cannot send to the destination on stream {stream}: {source}; did it give up?")]
    Stream {
        /// Number of the stream.
        stream: usize,
        /// Why not.
        source: std::io::Error,
    },

    /// The destination did not say that it was through with a round.
    #[error("the destination did not confirm round {round} of memory: {source}")]
    NotConfirmed {
        /// Number of the round.
        round: u32,
        /// Why not.
        source: BoxError,
    },

    /// The guest could not be stopped.
    #[error("the guest could not be stopped and its state taken: {0}")]
    Pause(#[source] BoxError),

    /// The guest could not go on after a failure.
    #[error("the migration failed ({first}) and the guest at the source cannot go on: {source}")]
    Resume {
        /// What had failed before.
        first: Box<MigrationError>,
        /// Why the guest cannot go on.
        source: BoxError,
    },
}

/// A migration that failed before the guest was handed over.
#[derive(Debug)]
pub struct Failure {
    /// Why.
    pub error: MigrationError,
    /// How far it was.
    pub report: Report,
}

impl fmt::Display for Failure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(formatter)
    }
}

impl std::error::Error for Failure {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}

/// Why the destination gave up. Its memory is worth nothing then.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReceiveError {
    /// Somebody called it off.
    #[error("the migration was cancelled")]
    Cancelled,

    /// There was no stream to read from.
    #[error("a migration needs at least one data stream and was given none")]
    NoStreams,

    /// A stream could not be read.
    #[error("cannot read from the source on stream {stream}: {source}")]
    Stream {
        /// Number of the stream.
        stream: usize,
        /// Why not.
        source: std::io::Error,
    },

    /// A stream ended within a round.
    #[error("stream {stream} ended in the middle of round {round}: did the source give up?")]
    CutShort {
        /// Number of the stream.
        stream: usize,
        /// Number of the round.
        round: u32,
    },

    /// What came is not what a source sends.
    #[error("stream {stream} of the source is damaged or hostile: {source}")]
    Malformed {
        /// Number of the stream.
        stream: usize,
        /// What was wrong.
        source: StreamError,
    },

    /// One stream ended the last round, and another one a round in between.
    #[error("the streams of the source do not agree on whether round {round} was the last")]
    Disagreement {
        /// Number of the round.
        round: u32,
    },

    /// Guest memory could not be written.
    #[error("cannot {action} guest memory {range}: {source}")]
    Memory {
        /// What was tried.
        action: &'static str,
        /// With which pages.
        range: PageRange,
        /// Why not.
        source: BoxError,
    },

    /// The source could not be told of the end of a round.
    #[error("cannot confirm round {round} to the source: {source}")]
    Confirm {
        /// Number of the round.
        round: u32,
        /// Why not.
        source: BoxError,
    },
}

/// What is wrong with a data stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StreamError {
    /// A record that cannot be.
    #[error(transparent)]
    Record(#[from] RecordError),

    /// Pages that are not the guest's.
    #[error("a record for {range}, which is not in guest memory")]
    OutsideRam {
        /// The pages.
        range: PageRange,
    },

    /// The end of another round than the one that is going on.
    #[error("an end of round {found} during round {expected}")]
    WrongRound {
        /// The round that is going on.
        expected: u32,
        /// The one that was ended.
        found: u32,
    },

    /// Records were lost or added.
    #[error("round {round} ended after {found} records, and the source says {claimed}")]
    RecordCount {
        /// Number of the round.
        round: u32,
        /// Records that came.
        found: u64,
        /// Records that the source has sent.
        claimed: u64,
    },

    /// What came is not what was sent.
    #[error("the checksum of round {round} is {found:#018x}, and the source says {claimed:#018x}")]
    Checksum {
        /// Number of the round.
        round: u32,
        /// Checksum of what came.
        found: u64,
        /// Checksum of what was sent.
        claimed: u64,
    },
}

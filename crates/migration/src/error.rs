//! Errors of a migration.

use std::fmt;
use std::time::Duration;

use ebb_abi::PageRange;
use ebb_abi::migration::RecordError;

use crate::{BoxError, Report};

/// Failure at the source. The guest continues there.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MigrationError {
    /// The migration was cancelled.
    #[error("the migration was cancelled; the guest continues to run here")]
    Cancelled,

    /// The time limit expired.
    #[error(
        "the migration did not finish within {} s: {remaining_bytes} bytes were left to send; the \
         guest continues to run here. Allow more time, a longer downtime or more bandwidth, or let \
         the guest be throttled, or be stopped at the limit",
        limit.as_secs_f64()
    )]
    TimeLimit {
        /// The limit.
        limit: Duration,
        /// Bytes left to send.
        remaining_bytes: u64,
    },

    /// No data stream was given.
    #[error("a migration needs at least one data stream and was given none")]
    NoStreams,

    /// An operation on the dirty log failed.
    #[error("cannot {action}: {source}")]
    Dirty {
        /// Operation, for the message.
        action: &'static str,
        /// Cause.
        source: BoxError,
    },

    /// Guest memory could not be read.
    #[error("cannot {action} guest memory {range}: {source}")]
    Memory {
        /// Operation, for the message.
        action: &'static str,
        /// Pages concerned.
        range: PageRange,
        /// Cause.
        source: BoxError,
    },

    /// A stream failed.
    #[error("cannot send to the destination on stream {stream}: {source}; did it give up?")]
    Stream {
        /// Number of the stream.
        stream: usize,
        /// Cause.
        source: std::io::Error,
    },

    /// The destination did not confirm a round.
    #[error("the destination did not confirm round {round} of memory: {source}")]
    NotConfirmed {
        /// Number of the round.
        round: u32,
        /// Cause.
        source: BoxError,
    },

    /// The guest could not be paused.
    #[error("the guest could not be paused and its state saved: {0}")]
    Pause(#[source] BoxError),

    /// The guest could not be resumed after a failure.
    #[error(
        "the migration failed ({first}) and the guest at the source cannot be resumed: {source}"
    )]
    Resume {
        /// The failure before.
        first: Box<MigrationError>,
        /// Why the guest cannot be resumed.
        source: BoxError,
    },
}

/// A migration that failed before the guest was handed over.
#[derive(Debug)]
pub struct Failure {
    /// Error.
    pub error: MigrationError,
    /// Report up to the failure.
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

/// Failure at the destination. The memory's content must not be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReceiveError {
    /// The migration was cancelled.
    #[error("the migration was cancelled")]
    Cancelled,

    /// No data stream was given.
    #[error("a migration needs at least one data stream and was given none")]
    NoStreams,

    /// A stream could not be read.
    #[error("cannot read from the source on stream {stream}: {source}")]
    Stream {
        /// Number of the stream.
        stream: usize,
        /// Cause.
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

    /// A stream carried something that no source sends.
    #[error("stream {stream} of the source is damaged or hostile: {source}")]
    Malformed {
        /// Number of the stream.
        stream: usize,
        /// What was wrong with it.
        source: StreamError,
    },

    /// One stream ended the last round, another one an earlier round.
    #[error("the streams of the source do not agree on whether round {round} was the last")]
    Disagreement {
        /// Number of the round.
        round: u32,
    },

    /// Guest memory could not be written.
    #[error("cannot {action} guest memory {range}: {source}")]
    Memory {
        /// Operation, for the message.
        action: &'static str,
        /// Pages concerned.
        range: PageRange,
        /// Cause.
        source: BoxError,
    },

    /// A round could not be confirmed to the source.
    #[error("cannot confirm round {round} to the source: {source}")]
    Confirm {
        /// Number of the round.
        round: u32,
        /// Cause.
        source: BoxError,
    },
}

/// Error in the content of a data stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StreamError {
    /// An invalid record.
    #[error(transparent)]
    Record(#[from] RecordError),

    /// A record for pages outside of guest memory.
    #[error("a record for {range}, which is not in guest memory")]
    OutsideRam {
        /// The pages.
        range: PageRange,
    },

    /// The end of another round than the current one.
    #[error("an end of round {found} during round {expected}")]
    WrongRound {
        /// Number of the current round.
        expected: u32,
        /// Number in the record.
        found: u32,
    },

    /// Records were lost or added.
    #[error("round {round} ended after {found} records, but the source sent {claimed}")]
    RecordCount {
        /// Number of the round.
        round: u32,
        /// Number of records received.
        found: u64,
        /// Number of records sent, according to the source.
        claimed: u64,
    },

    /// The bytes received differ from those sent.
    #[error("the checksum of round {round} is {found:#018x}, but the source sent {claimed:#018x}")]
    Checksum {
        /// Number of the round.
        round: u32,
        /// Checksum of the bytes received.
        found: u64,
        /// Checksum according to the source.
        claimed: u64,
    },
}

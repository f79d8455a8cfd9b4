//! Counters of the device's work and of the driver's mistakes.

use std::fmt;
use std::time::Instant;

use ebb_abi::PageRange;
use ebb_abi::balloon::QueueKind;
use ebb_abi::balloon::extension::Encoding;
use ebb_guest_ram::DiscardOutcome;
use serde::Serialize;

use crate::log_limit::LogLimit;

/// A driver's mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum GuestError {
    /// The available ring is inconsistent; the queue is ignored until the device is reset.
    BrokenQueue,
    /// A chain starts at a descriptor that does not exist, so that it cannot be returned.
    BadHead,
    /// A chain names an indirect table, which was not negotiated; it was returned unread.
    IndirectTable,
    /// A chain has no usable descriptor.
    EmptyChain,
    /// A chain has more descriptors or bytes than the device reads; the rest was ignored.
    OversizedChain,
    /// A descriptor has the wrong direction for its queue; it was ignored.
    WrongDirection,
    /// A buffer is not in guest memory; the rest of its chain was ignored.
    BadAddress,
    /// A buffer ends within an entry; the incomplete entry was ignored.
    PartialEntry,
    /// The named pages are not guest memory; they were ignored.
    OutsideRam,
    /// A page was named twice in a buffer.
    DoublePage,
    /// A reported or hinted range does not consist of whole pages; the whole pages in it were used.
    UnalignedRange,
    /// A statistics buffer arrived while the device held another one.
    ExtraStatistics,
    /// A hint belongs to no active command; it was ignored.
    StaleHint,
    /// The driver wrote to a read-only field of the configuration space.
    ReadOnlyConfig,
    /// A message's header is incomplete, has an invalid value or is for another queue; the message
    /// was refused.
    BadMessage,
    /// The length of a message's payload differs from its header; the message was refused.
    MessageLength,
    /// A message is in an encoding that was not negotiated; it was refused.
    ForbiddenEncoding,
    /// A range of a message is empty or ends beyond the address space; the message was refused.
    BadRange,
    /// An answer belongs to no active request; it was ignored.
    StaleAnswer,
    /// A request buffer arrived while the device held another one, which was returned.
    ExtraRequestBuffer,
    /// A request buffer is too short or not in guest memory; it was returned.
    ShortRequestBuffer,
}

impl GuestError {
    /// All kinds.
    pub const ALL: [Self; 21] = [
        Self::BrokenQueue,
        Self::BadHead,
        Self::IndirectTable,
        Self::EmptyChain,
        Self::OversizedChain,
        Self::WrongDirection,
        Self::BadAddress,
        Self::PartialEntry,
        Self::OutsideRam,
        Self::DoublePage,
        Self::UnalignedRange,
        Self::ExtraStatistics,
        Self::StaleHint,
        Self::ReadOnlyConfig,
        Self::BadMessage,
        Self::MessageLength,
        Self::ForbiddenEncoding,
        Self::BadRange,
        Self::StaleAnswer,
        Self::ExtraRequestBuffer,
        Self::ShortRequestBuffer,
    ];

    /// Name in logs and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::BrokenQueue => "broken_queue",
            Self::BadHead => "bad_head",
            Self::IndirectTable => "indirect_table",
            Self::EmptyChain => "empty_chain",
            Self::OversizedChain => "oversized_chain",
            Self::WrongDirection => "wrong_direction",
            Self::BadAddress => "bad_address",
            Self::PartialEntry => "partial_entry",
            Self::OutsideRam => "outside_ram",
            Self::DoublePage => "double_page",
            Self::UnalignedRange => "unaligned_range",
            Self::ExtraStatistics => "extra_statistics",
            Self::StaleHint => "stale_hint",
            Self::ReadOnlyConfig => "read_only_config",
            Self::BadMessage => "bad_message",
            Self::MessageLength => "message_length",
            Self::ForbiddenEncoding => "forbidden_encoding",
            Self::BadRange => "bad_range",
            Self::StaleAnswer => "stale_answer",
            Self::ExtraRequestBuffer => "extra_request_buffer",
            Self::ShortRequestBuffer => "short_request_buffer",
        }
    }
}

/// Number of mistakes of each kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ErrorCounts([u64; GuestError::ALL.len()]);

impl ErrorCounts {
    /// Number of mistakes of kind `error`.
    pub const fn get(&self, error: GuestError) -> u64 {
        self.0[error as usize]
    }

    /// All kinds with their counts, zero counts included.
    pub fn iter(&self) -> impl Iterator<Item = (GuestError, u64)> {
        GuestError::ALL.into_iter().zip(self.0)
    }

    /// Total number of mistakes.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }
}

impl Serialize for ErrorCounts {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.iter().map(|(error, count)| (error.name(), count)))
    }
}

/// Counters of one queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct QueueCounters {
    /// Chains taken from the queue.
    pub buffers: u64,
    /// Bytes of guest memory named in them, without duplicates within a buffer and without
    /// addresses outside memory.
    pub bytes: u64,
    /// Contiguous ranges formed by these bytes.
    pub ranges: u64,
    /// Bytes of the arrays and messages that named pages; 0 for queues whose descriptors name them.
    pub message_bytes: u64,
    /// Time spent reading them and computing their ranges, in nanoseconds, without discards.
    pub translate_ns: u64,
}

impl QueueCounters {
    /// Counts a range of pages that a driver has named.
    pub(crate) fn count(&mut self, range: PageRange) {
        self.bytes += range.size_bytes();
        self.ranges += 1;
    }

    /// Adds the time since `started`, and returns it in nanoseconds.
    pub(crate) fn translated(&mut self, started: Instant) -> u64 {
        let elapsed_ns = elapsed_ns(started);
        self.translate_ns += elapsed_ns;
        elapsed_ns
    }
}

fn elapsed_ns(started: Instant) -> u64 {
    u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

/// How buffers of the inflate, deflate and host request queues named pages. Refused messages are
/// not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct EncodingCounters {
    /// Bare arrays of page frame numbers, as in the standard.
    pub arrays: u64,
    /// Messages with page frame numbers.
    pub pfns: u64,
    /// Messages with a bitmap.
    pub bitmaps: u64,
    /// Messages with ranges.
    pub ranges: u64,
}

impl EncodingCounters {
    /// Counts a message.
    pub(crate) fn count(&mut self, encoding: Encoding) {
        *match encoding {
            Encoding::Pfns => &mut self.pfns,
            Encoding::Bitmap => &mut self.bitmaps,
            Encoding::Ranges => &mut self.ranges,
        } += 1;
    }
}

/// Requests for free pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RequestCounters {
    /// Requests sent to the driver.
    pub sent: u64,
    /// Requests that it answered completely.
    pub completed: u64,
    /// Requests that it aborted.
    pub aborted: u64,
    /// Requests that the owner cancelled.
    pub cancelled: u64,
    /// Bytes named in answers but not passed on because the guest relies on the content of free
    /// pages.
    pub poisoned_bytes: u64,
}

/// Memory returned to the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DiscardCounters {
    /// Bytes discarded.
    pub bytes: u64,
    /// Ranges discarded.
    pub ranges: u64,
    /// System calls for discards.
    pub syscalls: u64,
    /// Time spent, in nanoseconds.
    pub elapsed_ns: u64,
    /// Bytes kept because discards were inhibited.
    pub inhibited_bytes: u64,
    /// Bytes kept because the rest of their hugetlb page was in use.
    pub deferred_bytes: u64,
    /// Bytes kept because the guest fills free pages with a pattern.
    pub poisoned_bytes: u64,
    /// Bytes kept because the driver was reset before they were discarded.
    pub dropped_bytes: u64,
    /// Discards that the host refused.
    pub failures: u64,
    /// Pages overwritten before they were discarded, see [`ReportCheck`](crate::ReportCheck).
    pub verified_pages: u64,
}

impl DiscardCounters {
    /// Adds the time since `started`.
    pub(crate) fn took(&mut self, started: Instant) {
        self.elapsed_ns += elapsed_ns(started);
    }

    pub(crate) fn add(&mut self, outcome: DiscardOutcome) {
        self.bytes += outcome.bytes;
        self.ranges += outcome.ranges;
        self.syscalls += outcome.syscalls;
        self.inhibited_bytes += outcome.inhibited_bytes;
        self.deferred_bytes += outcome.deferred_bytes;
    }

    pub(crate) fn sum(self, other: Self) -> Self {
        Self {
            bytes: self.bytes + other.bytes,
            ranges: self.ranges + other.ranges,
            syscalls: self.syscalls + other.syscalls,
            elapsed_ns: self.elapsed_ns + other.elapsed_ns,
            inhibited_bytes: self.inhibited_bytes + other.inhibited_bytes,
            deferred_bytes: self.deferred_bytes + other.deferred_bytes,
            poisoned_bytes: self.poisoned_bytes + other.poisoned_bytes,
            dropped_bytes: self.dropped_bytes + other.dropped_bytes,
            failures: self.failures + other.failures,
            verified_pages: self.verified_pages + other.verified_pages,
        }
    }
}

/// All counters. Never reset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counters {
    /// Pages that went into the balloon.
    pub inflate: QueueCounters,
    /// Pages that left the balloon.
    pub deflate: QueueCounters,
    /// Free pages reported.
    pub reporting: QueueCounters,
    /// Free pages hinted.
    pub hinting: QueueCounters,
    /// Statistics buffers; their `bytes` and `ranges` stay 0.
    pub statistics: QueueCounters,
    /// Free pages named in answers to requests, stale ones included.
    pub host_request: QueueCounters,
    /// Requests for free pages.
    pub requests: RequestCounters,
    /// Encodings of buffers.
    pub encodings: EncodingCounters,
    /// Memory that inflation and reporting returned to the host.
    pub discard: DiscardCounters,
    /// Bytes of pages that the guest was told to be zero.
    pub initialized_bytes: u64,
    /// Pages named by the driver that are not guest memory.
    pub rejected_pages: u64,
    /// Activations by a driver.
    pub activations: u64,
    /// The driver's mistakes.
    pub errors: ErrorCounts,
}

impl Counters {
    /// Counters of a queue.
    pub fn queue(&self, kind: QueueKind) -> &QueueCounters {
        match kind {
            QueueKind::Inflate => &self.inflate,
            QueueKind::Deflate => &self.deflate,
            QueueKind::Statistics => &self.statistics,
            QueueKind::FreePageHint => &self.hinting,
            QueueKind::Reporting => &self.reporting,
            QueueKind::HostRequest => &self.host_request,
        }
    }

    pub(crate) fn queue_mut(&mut self, kind: QueueKind) -> &mut QueueCounters {
        match kind {
            QueueKind::Inflate => &mut self.inflate,
            QueueKind::Deflate => &mut self.deflate,
            QueueKind::Statistics => &mut self.statistics,
            QueueKind::FreePageHint => &mut self.hinting,
            QueueKind::Reporting => &mut self.reporting,
            QueueKind::HostRequest => &mut self.host_request,
        }
    }
}

/// Counts a driver's mistakes and logs some of them.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    counts: ErrorCounts,
    limit: LogLimit,
}

impl Faults {
    /// Counts a mistake; logs it with `detail` unless the log limit is reached.
    pub(crate) fn count(&mut self, error: GuestError, detail: impl fmt::Display) {
        self.counts.0[error as usize] += 1;
        if let Some(suppressed) = self.limit.permit(Instant::now()) {
            tracing::warn!(suppressed, "balloon driver: {}: {detail}", error.name());
        }
    }

    /// Logs an error of the host.
    pub(crate) fn log_host_error(&mut self, error: &dyn std::error::Error) {
        self.limit.log_host_error(error);
    }

    pub(crate) fn counts(&self) -> ErrorCounts {
        self.counts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn error_kinds_are_numbered_and_named_uniquely() {
        for (index, error) in GuestError::ALL.into_iter().enumerate() {
            assert_eq!(error as usize, index);
        }
        let names: BTreeSet<_> = GuestError::ALL.map(GuestError::name).into_iter().collect();
        assert_eq!(names.len(), GuestError::ALL.len());
    }

    #[test]
    fn counters_serialize_with_errors_by_name() {
        let mut faults = Faults::default();
        faults.count(GuestError::BadAddress, "test");
        let counters = Counters { errors: faults.counts(), ..Counters::default() };
        let json = serde_json::to_value(counters).unwrap();
        assert_eq!(json["errors"]["bad_address"], 1);
        assert_eq!(json["errors"]["stale_hint"], 0);
        assert_eq!(counters.errors.total(), 1);
    }
}

//! Requests about the guest's free pages: documents.
//!
//! The guest names them in an answer, which describes the past: it may use any of the pages by now.
//! Such an answer serves users, experiments and migrations, and is never a reason to discard a
//! page. Or it reports them, and the host has their memory when the answer arrives.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The largest order in a request: 1 GiB.
pub const MAX_FREE_PAGES_ORDER: u8 = 18;
/// Default of the smallest order that is reported: 2 MiB. Less would split huge pages of the host.
const RECLAIM_ORDER: u8 = 9;
/// Default time limit of a request.
pub const FREE_PAGES_TIME_LIMIT_MS: u64 = 5000;
/// The longest time limit of a request: a minute.
pub const MAX_FREE_PAGES_TIME_LIMIT_MS: u64 = 60 * 1000;

/// `PUT /balloon/free-pages`: the request to the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct FreePagesRequest {
    /// Omit blocks smaller than 2 to the power of this many pages.
    #[schemars(range(max = MAX_FREE_PAGES_ORDER), extend("x-unit" = "binary orders of pages"))]
    pub min_order: u8,
    /// Time limit for the guest.
    #[schemars(range(min = 1, max = MAX_FREE_PAGES_TIME_LIMIT_MS))]
    #[schemars(extend("x-unit" = "milliseconds"))]
    pub timeout_ms: u64,
}

impl Default for FreePagesRequest {
    fn default() -> Self {
        Self { min_order: 0, timeout_ms: FREE_PAGES_TIME_LIMIT_MS }
    }
}

/// `PUT /balloon/reclaim`: the request to the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ReclaimRequest {
    /// Omit blocks smaller than 2 to the power of this many pages.
    #[schemars(range(max = MAX_FREE_PAGES_ORDER), extend("x-unit" = "binary orders of pages"))]
    pub min_order: u8,
    /// Time limit for the guest.
    #[schemars(range(min = 1, max = MAX_FREE_PAGES_TIME_LIMIT_MS))]
    #[schemars(extend("x-unit" = "milliseconds"))]
    pub timeout_ms: u64,
}

impl Default for ReclaimRequest {
    fn default() -> Self {
        Self { min_order: RECLAIM_ORDER, timeout_ms: FREE_PAGES_TIME_LIMIT_MS }
    }
}

/// `PUT /balloon/reclaim`: what the host has got.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "Reclaim")]
pub struct ReclaimReport {
    /// Number of the request in the protocol.
    pub request_id: u64,
    /// done: the guest has reported all that it found. aborted: it could not; see its log. timeout:
    /// it did not finish in time, and the request was withdrawn. reset: its driver is gone.
    pub status: RequestStatus,
    /// The smallest order requested.
    #[schemars(range(max = MAX_FREE_PAGES_ORDER))]
    pub min_order: u8,
    /// Memory reported between request and answer, in part perhaps without regard to the request.
    pub reported_bytes: u64,
    /// Resident memory of the guest when the request was made.
    pub resident_before_bytes: u64,
    /// The same after the answer.
    pub resident_bytes: u64,
    /// Time from the request to the end of the answer, in microseconds.
    pub elapsed_us: u64,
}

/// How an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RequestStatus {
    /// The guest has named or reported all free pages that it found.
    Done,
    /// The guest has given up; the pages it named were free, and the host has what it reported.
    Aborted,
    /// The guest did not finish within the time limit, and the request was withdrawn.
    Timeout,
    /// The guest's driver was unloaded or the guest was reset.
    Reset,
}

/// `PUT /balloon/free-pages`: the guest's answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "FreePages")]
pub struct FreePagesReport {
    /// Number of the request in the protocol.
    pub request_id: u64,
    /// done: the guest has named all that it found. aborted: it has given up; the pages it named
    /// were free. timeout: it did not finish in time, and the request was withdrawn. reset: its
    /// driver is gone.
    pub status: RequestStatus,
    /// The smallest order requested.
    #[schemars(range(max = MAX_FREE_PAGES_ORDER))]
    pub min_order: u8,
    /// Free memory named by the guest, each page once.
    pub bytes: u64,
    /// Blocks of this memory, aligned to their size and of at most 4 MiB, as in a buddy allocator.
    pub blocks: u64,
    /// Contiguous ranges of this memory.
    pub ranges: u64,
    /// The largest of these ranges.
    pub largest_range_bytes: u64,
    /// The blocks by size, without sizes that do not occur.
    pub by_order: Vec<FreeBlocks>,
    /// Memory named that may not be treated as free because the guest relies on the content of free
    /// pages (page_poison, init_reported or init_on_inflate was negotiated); not included in the
    /// figures above.
    pub poisoned_bytes: u64,
    /// Size of the guest's memory, including pages in the balloon.
    pub memory_bytes: u64,
    /// Free memory according to the guest's statistics, requested at the same time; null if it has
    /// not reported any.
    pub free_memory_bytes: Option<u64>,
    /// Age of this value.
    pub free_memory_age_ms: Option<u64>,
    /// `bytes` as a percentage of `free_memory_bytes`.
    pub coverage_percent: Option<f64>,
    /// Messages of the answer.
    pub messages: u64,
    /// Messages by the encoding of pages.
    pub encodings: MessageEncodings,
    /// Length of all messages.
    pub message_bytes: u64,
    /// Time the monitor took to read them, in nanoseconds.
    pub translate_ns: u64,
    /// Time from the request to the end of the answer, in microseconds.
    pub elapsed_us: u64,
}

/// Free blocks of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FreeBlocks {
    /// Binary logarithm of the size in pages.
    #[schemars(range(max = MAX_FREE_PAGES_ORDER))]
    pub order: u8,
    /// Size of each.
    pub block_bytes: u64,
    /// Number of blocks.
    pub blocks: u64,
    /// Size of all blocks together.
    pub bytes: u64,
}

/// Messages by encoding (docs/extension.md, "Messages").
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MessageEncodings {
    /// Page frame numbers.
    pub pfns: u64,
    /// Bitmaps.
    pub bitmaps: u64,
    /// Ranges.
    pub ranges: u64,
}

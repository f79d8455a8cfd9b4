//! Asking a guest for its free pages: what is asked, and what is answered.
//!
//! An answer is a picture of the past: the guest may use any of the pages by now. It is for people,
//! experiments and migrations, and never a reason to take a page away.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The largest order that can be asked for: 1 GiB.
pub const MAX_FREE_PAGES_ORDER: u8 = 18;
/// How long a guest may take to name its free pages, unless the request says otherwise.
pub const FREE_PAGES_TIME_LIMIT_MS: u64 = 5000;
/// The longest that can be asked for: a minute.
pub const MAX_FREE_PAGES_TIME_LIMIT_MS: u64 = 60 * 1000;

/// `PUT /balloon/free-pages`: what to ask the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct FreePagesRequest {
    /// Leave out blocks smaller than 2 to the power of this many pages.
    #[schemars(range(max = MAX_FREE_PAGES_ORDER), extend("x-unit" = "binary orders of pages"))]
    pub min_order: u8,
    /// How long the guest may take.
    #[schemars(range(min = 1, max = MAX_FREE_PAGES_TIME_LIMIT_MS))]
    #[schemars(extend("x-unit" = "milliseconds"))]
    pub timeout_ms: u64,
}

impl Default for FreePagesRequest {
    fn default() -> Self {
        Self { min_order: 0, timeout_ms: FREE_PAGES_TIME_LIMIT_MS }
    }
}

/// How an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum FreePagesStatus {
    /// The guest has named all free pages that it found.
    Done,
    /// The guest has given up; what it has named was free.
    Aborted,
    /// The guest was not through within the time limit, and has been told to stop.
    Timeout,
    /// The guest's driver was unloaded or the guest was reset.
    Reset,
}

/// `PUT /balloon/free-pages`: what the guest has said.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "FreePages")]
pub struct FreePagesReport {
    /// Number of the request, as the guest knows it.
    pub request_id: u64,
    /// done: the guest has named all that it found. aborted: it has given up; what it named was
    /// free. timeout: it was not through in time, and has been told to stop. reset: its driver is
    /// gone.
    pub status: FreePagesStatus,
    /// The smallest order that was asked for.
    #[schemars(range(max = MAX_FREE_PAGES_ORDER))]
    pub min_order: u8,
    /// Free memory that was named, each page once.
    pub bytes: u64,
    /// Blocks that it is made of, aligned to their size and of at most 4 MiB, as a buddy allocator
    /// has them.
    pub blocks: u64,
    /// Contiguous ranges that it is made of.
    pub ranges: u64,
    /// The largest of them.
    pub largest_range_bytes: u64,
    /// The blocks by size; sizes of which there are none are left out.
    pub by_order: Vec<FreeBlocks>,
    /// Memory named that may not be treated as free because the guest relies on the content of free
    /// pages (page_poison was negotiated); not in the figures above.
    pub poisoned_bytes: u64,
    /// The guest's memory, without regard to the balloon.
    pub memory_bytes: u64,
    /// What the guest's statistics, asked for at the same time, say is free; null if it has not
    /// told.
    pub free_memory_bytes: Option<u64>,
    /// Age of that value.
    pub free_memory_age_ms: Option<u64>,
    /// `bytes` as a percentage of `free_memory_bytes`.
    pub coverage_percent: Option<f64>,
    /// Messages of the answer.
    pub messages: u64,
    /// Messages by the way in which they named pages.
    pub encodings: MessageEncodings,
    /// Length of all messages.
    pub message_bytes: u64,
    /// Time it took the monitor to read them, in nanoseconds.
    pub translate_ns: u64,
    /// Time from the decision to ask to the end of the answer, in microseconds.
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
    /// How many.
    pub blocks: u64,
    /// Size of all of them.
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

//! What a restored machine has accessed of its snapshot: documents.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// `GET /vm/working-set`: the parts of a snapshot that were accessed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WorkingSet {
    /// The snapshot: XXH3 of its state, 16 hexadecimal digits.
    pub snapshot: String,
    /// The parts, in whole blocks of 64 KiB: in the monitor's answer in ascending order, in a file
    /// in the order in which they are read.
    pub extents: Vec<WorkingSetExtent>,
}

/// A part of a snapshot's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WorkingSetExtent {
    /// Offset in the memory: that of the guest's address, without the gaps between its regions.
    pub offset_bytes: u64,
    /// Size.
    pub size_bytes: u64,
}

impl WorkingSet {
    /// Size of all parts in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.extents.iter().fold(0, |sum, extent| sum.saturating_add(extent.size_bytes))
    }
}

//! Disks: documents.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use crate::config::DiskFormat;

/// `GET /disks`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "Disks")]
pub struct DisksInfo {
    /// The disks in the order in which the guest sees them.
    pub disks: Vec<DiskInfo>,
}

/// A disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "Disk")]
pub struct DiskInfo {
    /// Name of the device: disk0 and further.
    pub device: String,
    /// The file that the guest's writes go to, or that it reads.
    pub path: PathBuf,
    /// Format of its image.
    pub format: DiskFormat,
    /// Size that the guest knows.
    #[schemars(extend("x-unit" = "bytes"))]
    pub size_bytes: u64,
    /// Whether the guest's writes are refused.
    pub readonly: bool,
    /// Whether the host's page cache is bypassed.
    pub direct: bool,
    /// Completed requests.
    pub requests: DiskRequests,
}

/// Completed requests of a disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DiskRequests {
    /// Reads.
    pub reads: u64,
    /// Bytes that they have read.
    #[schemars(extend("x-unit" = "bytes"))]
    pub read_bytes: u64,
    /// Writes.
    pub writes: u64,
    /// Bytes that they have written.
    #[schemars(extend("x-unit" = "bytes"))]
    pub written_bytes: u64,
    /// Flushes.
    pub flushes: u64,
    /// Requests to discard.
    pub discards: u64,
    /// Bytes that they have discarded.
    #[schemars(extend("x-unit" = "bytes"))]
    pub discarded_bytes: u64,
    /// Requests to write zeros.
    pub zeroes: u64,
    /// Bytes that they have zeroed.
    #[schemars(extend("x-unit" = "bytes"))]
    pub zeroed_bytes: u64,
    /// Requests that were answered with an error.
    pub errors: u64,
}

/// `PUT /disks`: gives a disk the size of its image, which its owner has enlarged, or another
/// image.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DiskResize {
    /// Name of the disk, as in `GET /disks`.
    #[schemars(extend("x-form" = "the name of a disk, such as disk0"))]
    pub device: String,
    /// New size of an image in the format qcow2, which the monitor enlarges; omitted for a raw
    /// image, whose size is that of the file or device.
    #[serde(default)]
    #[schemars(range(max = MOST_BYTES), extend("x-unit" = "bytes"))]
    pub size_bytes: Option<u64>,
    /// Absolute path of the image that takes the place of the disk's, for messages. The monitor
    /// does not open it: files that are open come with the request (`SCM_RIGHTS`). A disk that is
    /// written to needs two of the same image, each from an open(2) of its own: the first one for
    /// reading and writing, the second one for reading. The format is that of the old image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = "^/"))]
    pub path: Option<PathBuf>,
}

/// Largest size of an image, in bytes.
pub(crate) const MOST_BYTES: u64 = 1 << 50;

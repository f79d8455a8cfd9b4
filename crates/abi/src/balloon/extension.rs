//! The extension of virtio-balloon that docs/extension.md specifies: pages named by bitmaps and
//! ranges, and requests of the host.
//!
//! A message is a [`Header`] and a payload in one of the [`Encoding`]s. The code works on bytes
//! that the caller owns: it does not allocate, decodes any bytes to a value or an error, and a
//! [`Header`] is always valid. The caller must check that the encoding and the queue match the
//! negotiated features, see [`Encoding::is_allowed`].

mod bitmap;
mod encoding;
mod entries;
mod header;
mod request;
#[cfg(test)]
mod tests;

pub use bitmap::{BitRun, BitRuns, Bitmap, BitmapWriter};
pub use encoding::{Encoding, Shape};
pub use entries::{Pfns, RangeError, Ranges, encode_range};
pub use header::{AnswerStatus, Header, HeaderError, Layout, Purpose};
pub use request::{HostRequest, RequestError};

/// Size of a message header in bytes.
pub const HEADER_BYTES: usize = 32;

/// Size of a range in a message, in bytes.
pub const RANGE_BYTES: usize = 16;

/// Size of a host request in bytes.
pub const REQUEST_BYTES: usize = 16;

/// Maximum number of bits in a bitmap: 1 MiB, which covers 32 GiB in single pages.
pub const MAX_BITMAP_BITS: u32 = 8 << 20;

/// Maximum number of ranges in a message: 1 MiB.
pub const MAX_RANGES: u32 = 64 << 10;

/// Maximum number of page frame numbers in a message.
pub const MAX_PFNS: u32 = 64 << 10;

/// Size of the largest message in bytes, header included.
pub const MAX_MESSAGE_BYTES: usize = HEADER_BYTES + (1 << 20);

/// Binary logarithm of the size in bytes of the largest block of a bitmap: 1 GiB.
pub const MAX_PAGE_SHIFT: u32 = 30;

/// First page frame number beyond the 64-bit address space.
pub const PFN_LIMIT: u64 = 1 << (64 - crate::PAGE_SHIFT);

const _: () = {
    assert!(MAX_BITMAP_BITS as usize / 8 + HEADER_BYTES == MAX_MESSAGE_BYTES);
    assert!(MAX_RANGES as usize * RANGE_BYTES + HEADER_BYTES == MAX_MESSAGE_BYTES);
    assert!(MAX_PFNS as usize * super::PFN_BYTES + HEADER_BYTES <= MAX_MESSAGE_BYTES);
};

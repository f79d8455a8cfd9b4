//! The extension of virtio-balloon that docs/extension.md specifies: pages named by bitmaps and
//! ranges, and requests of the host.
//!
//! A message is a [`Header`] and a payload in one of the [`Encoding`]s. Everything here works on
//! bytes that the caller holds: nothing is allocated, any bytes are answered with a value or an
//! error, and a header that exists is a legal one. Whether the encoding and the queue fit what was
//! negotiated is the caller's to check, see [`Encoding::is_allowed`].

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

/// Size of a message's header in bytes.
pub const HEADER_BYTES: usize = 32;

/// Size of a range in a message, in bytes.
pub const RANGE_BYTES: usize = 16;

/// Size of a request of the host in bytes.
pub const REQUEST_BYTES: usize = 16;

/// Bits of a bitmap at most: 1 MiB of them, 32 GiB of single pages.
pub const MAX_BITMAP_BITS: u32 = 8 << 20;

/// Ranges in a message at most: 1 MiB of them.
pub const MAX_RANGES: u32 = 64 << 10;

/// Page frame numbers in a message at most.
pub const MAX_PFNS: u32 = 64 << 10;

/// Bytes of the largest message, header included.
pub const MAX_MESSAGE_BYTES: usize = HEADER_BYTES + (1 << 20);

/// Largest block that a bit can stand for: 1 GiB, as binary logarithm of bytes.
pub const MAX_PAGE_SHIFT: u32 = 30;

/// Page frame numbers end here: the address space of 64 bits.
pub const PFN_LIMIT: u64 = 1 << (64 - crate::PAGE_SHIFT);

const _: () = {
    assert!(MAX_BITMAP_BITS as usize / 8 + HEADER_BYTES == MAX_MESSAGE_BYTES);
    assert!(MAX_RANGES as usize * RANGE_BYTES + HEADER_BYTES == MAX_MESSAGE_BYTES);
    assert!(MAX_PFNS as usize * super::PFN_BYTES + HEADER_BYTES <= MAX_MESSAGE_BYTES);
};

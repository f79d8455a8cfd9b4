//! The header of every message.

use core::fmt;
use core::mem::{align_of, offset_of, size_of};

use super::{
    Encoding, HEADER_BYTES, MAX_BITMAP_BITS, MAX_PAGE_SHIFT, MAX_PFNS, MAX_RANGES, PFN_LIMIT,
};
use super::{MAX_MESSAGE_BYTES, RANGE_BYTES};
use crate::balloon::{Le16, Le64, PFN_BYTES};
use crate::{PAGE_SHIFT, PageRange, Pfn};

/// `struct virtio_balloon_msg_hdr` as laid out in the buffer.
#[derive(Clone, Copy)]
#[repr(C)]
struct Wire {
    command: Le16,
    page_shift: Le16,
    status: Le16,
    encoding: Le16,
    request_id: Le64,
    start_pfn: Le64,
    count: Le64,
}

const _: () = {
    assert!(size_of::<Wire>() == HEADER_BYTES && align_of::<Wire>() == 1);
    assert!(offset_of!(Wire, page_shift) == 2 && offset_of!(Wire, status) == 4);
    assert!(offset_of!(Wire, encoding) == 6 && offset_of!(Wire, request_id) == 8);
    assert!(offset_of!(Wire, start_pfn) == 16 && offset_of!(Wire, count) == 24);
};

const INFLATE: u16 = 1;
const DEFLATE: u16 = 2;
pub(super) const FREE_PAGES: u16 = 3;

const STATUS_NONE: u16 = 0;
const STATUS_MORE: u16 = 1;
const STATUS_DONE: u16 = 2;
const STATUS_ABORTED: u16 = 3;

/// Purpose of the pages in a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Purpose {
    /// They go into the balloon.
    Inflate,
    /// They leave the balloon.
    Deflate,
    /// They are free: part of the answer to a request of the host.
    FreePages {
        /// The request's number, which is not 0.
        request_id: u64,
        /// Whether more messages follow.
        status: AnswerStatus,
    },
}

/// Whether a message is the last one of an answer. Values, not bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum AnswerStatus {
    /// Another message of the same answer follows.
    More = STATUS_MORE,
    /// The answer is complete.
    Done = STATUS_DONE,
    /// The driver gave up: its messages are valid but incomplete.
    Aborted = STATUS_ABORTED,
}

/// How the payload is laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layout {
    /// Page frame numbers.
    Pfns {
        /// Number of entries.
        count: u32,
    },
    /// Bits from `start` on.
    Bitmap {
        /// First page of the block that bit 0 stands for; a multiple of the block's size.
        start: Pfn,
        /// Binary logarithm of a block's size in bytes.
        page_shift: u32,
        /// Number of bits.
        bits: u32,
    },
    /// Ranges.
    Ranges {
        /// Number of entries.
        count: u32,
    },
}

impl Layout {
    /// The encoding.
    pub const fn encoding(self) -> Encoding {
        match self {
            Self::Pfns { .. } => Encoding::Pfns,
            Self::Bitmap { .. } => Encoding::Bitmap,
            Self::Ranges { .. } => Encoding::Ranges,
        }
    }

    /// Number of entries in the payload: page frame numbers, bits or ranges.
    pub const fn count(self) -> u32 {
        match self {
            Self::Pfns { count } | Self::Ranges { count } => count,
            Self::Bitmap { bits, .. } => bits,
        }
    }

    /// Size of the payload in bytes.
    pub const fn payload_bytes(self) -> usize {
        match self {
            Self::Pfns { count } => count as usize * PFN_BYTES,
            Self::Bitmap { bits, .. } => bits.div_ceil(8) as usize,
            Self::Ranges { count } => count as usize * RANGE_BYTES,
        }
    }

    /// The pages that a run of bits of a bitmap stands for; empty for the other layouts.
    pub const fn pages_of_bits(self, first_bit: u32, bits: u32) -> PageRange {
        match self {
            Self::Bitmap { start, page_shift, .. } => {
                // No overflow: `start` and all blocks of a valid header end below PFN_LIMIT.
                let order = page_shift - PAGE_SHIFT;
                PageRange::new(Pfn(start.0 + ((first_bit as u64) << order)), (bits as u64) << order)
            }
            _ => PageRange::new(Pfn(0), 0),
        }
    }
}

/// Reason why a header is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeaderError {
    /// Unknown command.
    Command(u16),
    /// Unknown encoding.
    Encoding(u16),
    /// Unknown status, or one that the command does not allow.
    Status(u16),
    /// The request number is 0 in an answer, or not 0 in another message.
    RequestId(u64),
    /// A bitmap's block size is not between 4 KiB and 1 GiB, or another encoding's unit is not
    /// 4 KiB.
    PageShift(u16),
    /// A bitmap does not start at a block boundary or ends beyond the address space, or another
    /// encoding has a start.
    StartPfn(u64),
    /// Too many entries, or none in a message that must not be empty.
    Count(u64),
}

impl fmt::Display for HeaderError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Command(number) => write!(formatter, "unknown command {number}"),
            Self::Encoding(number) => write!(formatter, "unknown encoding {number}"),
            Self::Status(number) => {
                write!(formatter, "status {number} is invalid for the command")
            }
            Self::RequestId(id) => {
                write!(formatter, "request number {id} is invalid for the command")
            }
            Self::PageShift(shift) => {
                write!(formatter, "page shift {shift} is invalid for the encoding")
            }
            Self::StartPfn(pfn) => write!(formatter, "pages cannot start at {pfn:#x}"),
            Self::Count(count) => write!(formatter, "invalid number of entries: {count}"),
        }
    }
}

impl core::error::Error for HeaderError {}

/// A valid header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Header {
    purpose: Purpose,
    layout: Layout,
}

impl Header {
    /// Creates a header.
    ///
    /// # Errors
    /// [`HeaderError`] if the specification does not allow it.
    pub fn new(purpose: Purpose, layout: Layout) -> Result<Self, HeaderError> {
        let is_answer = match purpose {
            Purpose::Inflate | Purpose::Deflate => false,
            Purpose::FreePages { request_id: 0, .. } => return Err(HeaderError::RequestId(0)),
            Purpose::FreePages { .. } => true,
        };
        let limit = match layout {
            Layout::Pfns { .. } => MAX_PFNS,
            Layout::Ranges { .. } => MAX_RANGES,
            Layout::Bitmap { start, page_shift, bits } => {
                if !(PAGE_SHIFT..=MAX_PAGE_SHIFT).contains(&page_shift) {
                    return Err(HeaderError::PageShift(
                        u16::try_from(page_shift).unwrap_or(u16::MAX),
                    ));
                }
                let order = page_shift - PAGE_SHIFT;
                let end = start.0.checked_add(u64::from(bits) << order);
                if !start.0.is_multiple_of(1 << order) || end.is_none_or(|end| end > PFN_LIMIT) {
                    return Err(HeaderError::StartPfn(start.0));
                }
                MAX_BITMAP_BITS
            }
        };
        let count = layout.count();
        if count > limit || (count == 0 && !is_answer) {
            return Err(HeaderError::Count(count.into()));
        }
        debug_assert!(layout.payload_bytes() + HEADER_BYTES <= MAX_MESSAGE_BYTES);
        Ok(Self { purpose, layout })
    }

    /// Purpose of the pages.
    pub const fn purpose(&self) -> Purpose {
        self.purpose
    }

    /// How the payload is laid out.
    pub const fn layout(&self) -> Layout {
        self.layout
    }

    /// Encodes the header.
    pub fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let (command, status, request_id) = match self.purpose {
            Purpose::Inflate => (INFLATE, STATUS_NONE, 0),
            Purpose::Deflate => (DEFLATE, STATUS_NONE, 0),
            Purpose::FreePages { request_id, status } => (FREE_PAGES, status as u16, request_id),
        };
        let (page_shift, start) = match self.layout {
            Layout::Bitmap { start, page_shift, .. } => (page_shift, start),
            _ => (PAGE_SHIFT, Pfn(0)),
        };
        let wire = Wire {
            command: Le16::new(command),
            page_shift: Le16::new(page_shift as u16),
            status: Le16::new(status),
            encoding: Le16::new(self.layout.encoding() as u16),
            request_id: Le64::new(request_id),
            start_pfn: Le64::new(start.0),
            count: Le64::new(self.layout.count().into()),
        };
        wire.to_bytes()
    }

    /// Decodes a header.
    ///
    /// # Errors
    /// [`HeaderError`] for the first field with an invalid value.
    pub fn from_bytes(bytes: [u8; HEADER_BYTES]) -> Result<Self, HeaderError> {
        let wire = Wire::from_bytes(bytes);
        let (status, request_id) = (wire.status.get(), wire.request_id.get());
        let purpose = match wire.command.get() {
            FREE_PAGES => {
                let status = match status {
                    STATUS_MORE => AnswerStatus::More,
                    STATUS_DONE => AnswerStatus::Done,
                    STATUS_ABORTED => AnswerStatus::Aborted,
                    other => return Err(HeaderError::Status(other)),
                };
                Purpose::FreePages { request_id, status }
            }
            INFLATE | DEFLATE if status != STATUS_NONE => return Err(HeaderError::Status(status)),
            INFLATE | DEFLATE if request_id != 0 => return Err(HeaderError::RequestId(request_id)),
            INFLATE => Purpose::Inflate,
            DEFLATE => Purpose::Deflate,
            other => return Err(HeaderError::Command(other)),
        };
        let encoding = wire.encoding.get();
        let encoding = Encoding::from_number(encoding).ok_or(HeaderError::Encoding(encoding))?;
        let (page_shift, start) = (wire.page_shift.get(), wire.start_pfn.get());
        if encoding != Encoding::Bitmap {
            if u32::from(page_shift) != PAGE_SHIFT {
                return Err(HeaderError::PageShift(page_shift));
            }
            if start != 0 {
                return Err(HeaderError::StartPfn(start));
            }
        }
        let count = wire.count.get();
        let count = u32::try_from(count).map_err(|_| HeaderError::Count(count))?;
        let layout = match encoding {
            Encoding::Pfns => Layout::Pfns { count },
            Encoding::Ranges => Layout::Ranges { count },
            Encoding::Bitmap => {
                Layout::Bitmap { start: Pfn(start), page_shift: page_shift.into(), bits: count }
            }
        };
        Self::new(purpose, layout)
    }
}

impl Wire {
    fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[offset_of!(Self, command)..][..2].copy_from_slice(&self.command.0);
        bytes[offset_of!(Self, page_shift)..][..2].copy_from_slice(&self.page_shift.0);
        bytes[offset_of!(Self, status)..][..2].copy_from_slice(&self.status.0);
        bytes[offset_of!(Self, encoding)..][..2].copy_from_slice(&self.encoding.0);
        bytes[offset_of!(Self, request_id)..][..8].copy_from_slice(&self.request_id.0);
        bytes[offset_of!(Self, start_pfn)..][..8].copy_from_slice(&self.start_pfn.0);
        bytes[offset_of!(Self, count)..][..8].copy_from_slice(&self.count.0);
        bytes
    }

    fn from_bytes(bytes: [u8; HEADER_BYTES]) -> Self {
        Self {
            command: Le16(field(&bytes, offset_of!(Self, command))),
            page_shift: Le16(field(&bytes, offset_of!(Self, page_shift))),
            status: Le16(field(&bytes, offset_of!(Self, status))),
            encoding: Le16(field(&bytes, offset_of!(Self, encoding))),
            request_id: Le64(field(&bytes, offset_of!(Self, request_id))),
            start_pfn: Le64(field(&bytes, offset_of!(Self, start_pfn))),
            count: Le64(field(&bytes, offset_of!(Self, count))),
        }
    }
}

/// The bytes of a structure's field at `offset`; the field must lie within `bytes`.
pub(super) fn field<const SIZE: usize>(bytes: &[u8], offset: usize) -> [u8; SIZE] {
    core::array::from_fn(|index| bytes[offset + index])
}

//! Requests of the host to the driver.

use core::fmt;
use core::mem::{align_of, offset_of, size_of};

use super::header::{FREE_PAGES, field};
use super::{MAX_PAGE_SHIFT, REQUEST_BYTES};
use crate::PAGE_SHIFT;
use crate::balloon::{Le16, Le32, Le64};

/// `struct virtio_balloon_host_request` as laid out in the buffer.
#[repr(C)]
struct Wire {
    command: Le16,
    page_shift: Le16,
    reserved: Le32,
    request_id: Le64,
}

const _: () = {
    assert!(size_of::<Wire>() == REQUEST_BYTES && align_of::<Wire>() == 1);
    assert!(offset_of!(Wire, page_shift) == 2 && offset_of!(Wire, reserved) == 4);
    assert!(offset_of!(Wire, request_id) == 8);
};

const CANCEL: u16 = 4;
const REPORT: u16 = 5;

/// A request of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HostRequest {
    /// Name the free pages.
    FreePages {
        /// Number that every message of the answer repeats; not 0.
        request_id: u64,
        /// Binary logarithm of the size in bytes of the smallest block to name.
        page_shift: u32,
    },
    /// Report the free pages on the reporting queue, then answer.
    Report {
        /// Number that the answer repeats; not 0.
        request_id: u64,
        /// Binary logarithm of the size in bytes of the smallest block to report.
        page_shift: u32,
    },
    /// Stop answering this request.
    Cancel {
        /// The request's number.
        request_id: u64,
    },
}

/// Reason why a request is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestError {
    /// Unknown command.
    Command(u16),
    /// The request number is 0.
    RequestId,
    /// The block size is not between 4 KiB and 1 GiB, or given for a command without one.
    PageShift(u16),
    /// The reserved field is not 0.
    Reserved(u32),
}

impl fmt::Display for RequestError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Command(number) => write!(formatter, "unknown command {number}"),
            Self::RequestId => formatter.write_str("request number 0"),
            Self::PageShift(shift) => {
                write!(formatter, "page shift {shift} is invalid for the request")
            }
            Self::Reserved(value) => write!(formatter, "reserved field is {value}"),
        }
    }
}

impl core::error::Error for RequestError {}

impl HostRequest {
    /// The request's number.
    pub const fn request_id(self) -> u64 {
        match self {
            Self::FreePages { request_id, .. }
            | Self::Report { request_id, .. }
            | Self::Cancel { request_id } => request_id,
        }
    }

    /// Encodes the request.
    pub fn to_bytes(self) -> [u8; REQUEST_BYTES] {
        let (command, page_shift) = match self {
            Self::FreePages { page_shift, .. } => (FREE_PAGES, page_shift as u16),
            Self::Report { page_shift, .. } => (REPORT, page_shift as u16),
            Self::Cancel { .. } => (CANCEL, 0),
        };
        let mut bytes = [0; REQUEST_BYTES];
        bytes[offset_of!(Wire, command)..][..2].copy_from_slice(&command.to_le_bytes());
        bytes[offset_of!(Wire, page_shift)..][..2].copy_from_slice(&page_shift.to_le_bytes());
        bytes[offset_of!(Wire, request_id)..][..8]
            .copy_from_slice(&self.request_id().to_le_bytes());
        bytes
    }

    /// Decodes a request, as a driver does.
    ///
    /// # Errors
    /// [`RequestError`] for the first field with an invalid value.
    pub fn from_bytes(bytes: [u8; REQUEST_BYTES]) -> Result<Self, RequestError> {
        let page_shift = u16::from_le_bytes(field(&bytes, offset_of!(Wire, page_shift)));
        let reserved = u32::from_le_bytes(field(&bytes, offset_of!(Wire, reserved)));
        let request_id = u64::from_le_bytes(field(&bytes, offset_of!(Wire, request_id)));
        let request = match u16::from_le_bytes(field(&bytes, offset_of!(Wire, command))) {
            FREE_PAGES | REPORT if !(PAGE_SHIFT..=MAX_PAGE_SHIFT).contains(&page_shift.into()) => {
                return Err(RequestError::PageShift(page_shift));
            }
            FREE_PAGES => Self::FreePages { request_id, page_shift: page_shift.into() },
            REPORT => Self::Report { request_id, page_shift: page_shift.into() },
            CANCEL if page_shift != 0 => return Err(RequestError::PageShift(page_shift)),
            CANCEL => Self::Cancel { request_id },
            other => return Err(RequestError::Command(other)),
        };
        match (reserved, request_id) {
            (1.., _) => Err(RequestError::Reserved(reserved)),
            (_, 0) => Err(RequestError::RequestId),
            _ => Ok(request),
        }
    }
}

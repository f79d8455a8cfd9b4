//! A slow check for guests under test: pages that are about to be discarded are overwritten first.
//!
//! A discard alone can hide a guest's mistake: a reported page that is in use reads as zeros, which
//! looks like fresh memory, and where nothing was discarded it keeps its content. With a pattern in
//! it, a guest that still uses the page finds content that it never wrote.

use ebb_abi::{PAGE_SIZE_BYTES, PageRange};
use ebb_guest_ram::GuestRam;
use vm_memory::{Bytes, GuestAddress};

/// Whether pages are overwritten before they are discarded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReportCheck {
    /// Pages are overwritten.
    Overwrite,
    /// Pages are not overwritten.
    #[default]
    None,
}

/// Recognizable in a memory dump, and never zero.
const MARK: u64 = 0xebb0_0000_0000_0001;

/// The word written over the 8 bytes at this guest-physical address.
pub const fn overwritten_word(address: u64) -> u64 {
    MARK ^ address
}

/// Overwrites pages of guest memory; returns their number.
pub(crate) fn overwrite(ram: &GuestRam, ranges: &[PageRange]) -> u64 {
    let mut page = [0; PAGE_SIZE_BYTES as usize];
    let mut written = 0;
    for range in ranges {
        for address in (range.start.address()..range.end().address()).step_by(page.len()) {
            for (word, bytes) in (address..).step_by(8).zip(page.chunks_exact_mut(8)) {
                bytes.copy_from_slice(&overwritten_word(word).to_le_bytes());
            }
            // Ranges were clipped to memory when they were read.
            written += u64::from(ram.memory().write_slice(&page, GuestAddress(address)).is_ok());
        }
    }
    written
}

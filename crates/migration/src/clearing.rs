//! An allocator that clears what is freed.

use std::alloc::{GlobalAlloc, Layout, System};
use std::hint::black_box;

/// Largest piece that is cleared, in bytes. Keys, their files and records of TLS are smaller; what
/// is larger are tables and buffers of guest memory, whose untouched pages clearing would allocate.
const MOST_BYTES: usize = 64 << 10;

/// The system's allocator, which clears pieces of up to 64 KiB when they are freed.
///
/// For the program of a monitor: `rustls` and `ring` free private keys and keys of connections as
/// they are, and a process that is forked after a migration would inherit them.
#[derive(Debug, Clone, Copy, Default)]
pub struct ClearingAllocator;

// SAFETY: all memory is `System`'s, with the layouts of the callers, and is written to only before
// it is returned.
unsafe impl GlobalAlloc for ClearingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as the caller vouches for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as the caller vouches for.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, start: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        if layout.size() > MOST_BYTES && new_size > MOST_BYTES {
            // In place, if it can be; neither is cleared.
            // SAFETY: as the caller vouches for.
            return unsafe { System.realloc(start, layout, new_size) };
        }
        // SAFETY: the caller vouches for this size, with the alignment of the old layout.
        let new_layout = unsafe { Layout::from_size_align_unchecked(new_size, layout.align()) };
        // SAFETY: as the caller vouches for: the new size is not zero.
        let new = unsafe { self.alloc(new_layout) };
        if !new.is_null() {
            // SAFETY: both pieces have so many bytes, and are different ones.
            unsafe { start.copy_to_nonoverlapping(new, layout.size().min(new_size)) };
            // SAFETY: the caller gives up this piece, which has this layout.
            unsafe { self.dealloc(start, layout) };
        }
        new
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        if layout.size() <= MOST_BYTES {
            // SAFETY: the caller gives up this piece, which has this size.
            unsafe { start.write_bytes(0, layout.size()) };
        }
        // Without this, the compiler may leave out writes to memory that is freed.
        let start = black_box(start);
        // SAFETY: as the caller vouches for.
        unsafe { System.dealloc(start, layout) };
    }
}

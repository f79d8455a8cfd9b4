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
// it is returned. The default `realloc` is made of these functions.
unsafe impl GlobalAlloc for ClearingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as the caller vouches for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as the caller vouches for.
        unsafe { System.alloc_zeroed(layout) }
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

//! Memory of the monitor's own program.

use std::ffi::c_void;
use std::slice;

const PAGE_BYTES: usize = 4096;

/// Releases the resident pages of the program's code and constants. Linux maps 16 of them around
/// each one that is used; after the start, only those that a running machine needs come back, from
/// the page cache.
pub fn release_program_pages() {
    // SAFETY: the callback has the type that the function expects, takes the entry for the program,
    // and does not unwind.
    unsafe { libc::dl_iterate_phdr(Some(release), std::ptr::null_mut()) };
}

/// Releases the read-only segments of one object.
///
/// # Safety
/// `info` is valid, as dl_iterate_phdr(3) promises.
unsafe extern "C" fn release(
    info: *mut libc::dl_phdr_info,
    _size: usize,
    _data: *mut c_void,
) -> libc::c_int {
    // SAFETY: promised by the caller.
    let info = unsafe { &*info };
    // SAFETY: the table has this many entries and is part of the program.
    let segments = unsafe { slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum)) };
    for segment in segments {
        if segment.p_type != libc::PT_LOAD || segment.p_flags & libc::PF_W != 0 {
            continue;
        }
        let start = info.dlpi_addr.wrapping_add(segment.p_vaddr) as usize;
        let first = start / PAGE_BYTES * PAGE_BYTES;
        let bytes = (start + segment.p_memsz as usize).next_multiple_of(PAGE_BYTES) - first;
        // SAFETY: the range is a private mapping of the program's file that cannot be written to,
        // so that its pages have no content but the file's, which they get again when they are
        // accessed. A failure leaves them resident.
        unsafe { libc::madvise(first as *mut c_void, bytes, libc::MADV_DONTNEED) };
    }
    // Only the first object, the program itself.
    1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn released_pages_come_back_with_their_content() {
        static TEXT: &str = "a constant of the program";
        let function: fn() = release_program_pages;
        for _ in 0..3 {
            function();
            assert_eq!(TEXT.split(' ').count(), 5);
        }
    }
}

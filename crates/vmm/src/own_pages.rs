//! Memory of the monitor's own program.

use std::ffi::c_void;
use std::{io, slice};

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

// include/uapi/linux/prctl.h, since Linux 6.4
const PR_SET_MEMORY_MERGE: libc::c_int = 67;
const PR_GET_MEMORY_MERGE: libc::c_int = 68;

/// Ends the merging of all memory of this process by ksmd, which a process inherits from the one
/// that started it (`MemoryKSM=` of systemd's services). Memory that is offered to ksmd on its own
/// later is merged all the same.
pub fn end_inherited_merging() -> io::Result<()> {
    // SAFETY: the call has no other arguments and changes nothing. Kernels without it refuse it.
    if unsafe { libc::prctl(PR_GET_MEMORY_MERGE, 0, 0, 0, 0) } != 1 {
        return Ok(());
    }
    // SAFETY: the call changes what ksmd may merge, and no content. Other arguments must be 0.
    match unsafe { libc::prctl(PR_SET_MEMORY_MERGE, 0, 0, 0, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
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

    fn control(option: libc::c_int, value: libc::c_ulong) -> libc::c_int {
        // SAFETY: the options change what ksmd may merge, and no content.
        unsafe { libc::prctl(option, value, 0, 0, 0) }
    }

    #[test]
    fn inherited_merging_ends() {
        let is_known = control(PR_SET_MEMORY_MERGE, 1) == 0;
        assert!(!is_known || control(PR_GET_MEMORY_MERGE, 0) == 1);
        end_inherited_merging().unwrap();
        // A kernel without KSM has nothing to end.
        assert_eq!(control(PR_GET_MEMORY_MERGE, 0), if is_known { 0 } else { -1 });
    }
}

//! mincore(2).

use std::io;

use ebb_abi::PAGE_SIZE_BYTES;

/// Fills `states` with what the host says of the pages from `address` on: the lowest bit of each is
/// whether the page is in memory. That includes pages of a mapped file that are not mapped, and the
/// shared page of zeros; pages in swap space do not count.
pub(crate) fn mincore(address: usize, states: &mut [u8]) -> io::Result<()> {
    let size_bytes = states.len() * PAGE_SIZE_BYTES as usize;
    // SAFETY: mincore writes one byte a page of the range into `states`, which has as many. It
    // changes nothing else, and answers with an error where nothing is mapped.
    let result =
        unsafe { libc::mincore(address as *mut libc::c_void, size_bytes, states.as_mut_ptr()) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Whether a state says that the page is in memory.
pub(crate) const fn is_in_memory(state: u8) -> bool {
    state & 1 != 0
}

//! Binding a mapping to a node of the host.

use std::io;

/// Allocate from the given nodes only (include/uapi/linux/mempolicy.h).
const MPOL_BIND: libc::c_int = 2;

/// Bits in a word of the kernel's node mask.
const WORD_BITS: u32 = usize::BITS;

/// Largest node number that Linux can be configured for (`NODES_SHIFT` 10).
const MAX_NODE: u32 = 1023;

/// Binds the pages of `[address, address + size_bytes)` that will be allocated from now on to
/// `node` (mbind(2)).
pub(crate) fn bind(address: usize, size_bytes: usize, node: u32) -> io::Result<()> {
    if node > MAX_NODE {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    let mut mask = [0_usize; (MAX_NODE + 1) as usize / WORD_BITS as usize];
    mask[(node / WORD_BITS) as usize] = 1 << (node % WORD_BITS);
    // The kernel reads one bit less than the number given (mm/mempolicy.c, get_nodes).
    let mask_bits = mask.len() * WORD_BITS as usize + 1;
    // SAFETY: mbind changes only where future pages of the range come from, never the content of
    // memory, and reads `mask_bits - 1` bits from `mask`, which lives until the call returns and is
    // that long.
    let result = unsafe {
        libc::syscall(libc::SYS_mbind, address, size_bytes, MPOL_BIND, mask.as_ptr(), mask_bits, 0)
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

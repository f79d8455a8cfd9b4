//! The host's state of each page: /proc/self/pagemap and mincore(2).
//!
//! Private memory requires pagemap: mincore(2) does not report a page that was swapped out, and for
//! a private mapping of a file it reports the page cache.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use ebb_abi::PAGE_SIZE_BYTES;
use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};

/// Bytes of an entry (Linux Documentation/admin-guide/mm/pagemap.rst).
const ENTRY_BYTES: usize = 8;

/// Kept open: a monitor may have no access to /proc later on.
#[derive(Debug)]
pub(crate) struct Pagemap(File);

/// State of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PageState(u64);

impl PageState {
    const PRESENT: u64 = 1 << 63;
    const SWAPPED: u64 = 1 << 62;
    /// Protected against writes by a userfaultfd (Linux 5.14).
    const PROTECTED: u64 = 1 << 57;
    /// Mapped nowhere else.
    const EXCLUSIVE: u64 = 1 << 56;
    /// A page of a file, or shared.
    const FILE: u64 = 1 << 61;

    /// Whether the host holds content for the page that belongs to the process alone, in memory or
    /// in swap space. The shared page of zeros, which a read maps, counts too.
    pub(crate) const fn is_private(self) -> bool {
        self.0 & (Self::PRESENT | Self::SWAPPED) != 0 && self.0 & Self::FILE == 0
    }

    /// Whether other processes have the same anonymous page, after a fork(2).
    #[cfg(feature = "merge")]
    pub(crate) const fn is_shared_with_others(self) -> bool {
        self.is_private_in_memory() && !self.is_exclusive()
    }

    /// Whether any page is mapped.
    pub(crate) const fn is_in_memory(self) -> bool {
        self.0 & Self::PRESENT != 0
    }

    /// Whether a userfaultfd protects the page against writes, in memory or in swap space.
    pub(crate) const fn is_protected(self) -> bool {
        self.0 & Self::PROTECTED != 0
    }

    /// Whether the page is mapped nowhere else, by another process for example.
    pub(crate) const fn is_exclusive(self) -> bool {
        self.0 & Self::EXCLUSIVE != 0
    }

    /// Whether the page is private and in memory.
    pub(crate) const fn is_private_in_memory(self) -> bool {
        self.is_private() && self.is_in_memory()
    }
}

impl Pagemap {
    /// `None` if /proc is missing or not readable for the process.
    pub(crate) fn open() -> Option<Self> {
        // On a thread without capabilities: to a file that was opened with CAP_SYS_ADMIN, the
        // kernel would show physical addresses for as long as it is open (Linux
        // fs/proc/task_mmu.c, `pagemap_read`).
        let open = || -> io::Result<File> {
            let none = CapabilitySet::empty();
            let sets = CapabilitySets { effective: none, permitted: none, inheritable: none };
            set_capabilities(None, sets)?;
            File::open("/proc/self/pagemap")
        };
        let file = std::thread::Builder::new().spawn(open).and_then(|thread| {
            thread.join().unwrap_or_else(|_| Err(io::Error::other("the thread has panicked")))
        });
        let file =
            file.inspect_err(|error| tracing::debug!("/proc/self/pagemap cannot be read: {error}"));
        file.ok().map(Self)
    }

    /// The file.
    pub(crate) fn file(&self) -> &File {
        &self.0
    }

    /// States of the `pages` pages from `address` on.
    pub(crate) fn read(&self, address: usize, pages: usize) -> io::Result<Vec<PageState>> {
        let mut entries = vec![0; pages * ENTRY_BYTES];
        let first = address as u64 / PAGE_SIZE_BYTES;
        self.0.read_exact_at(&mut entries, first * ENTRY_BYTES as u64)?;
        let (entries, _) = entries.as_chunks::<ENTRY_BYTES>();
        Ok(entries.iter().map(|entry| PageState(u64::from_ne_bytes(*entry))).collect())
    }
}

/// Fills `states` with the states of the pages from `address` on: the lowest bit of each indicates
/// whether the page is in memory. That includes pages of a mapped file that are not mapped, and the
/// shared page of zeros; pages in swap space do not count.
pub(crate) fn mincore(address: usize, states: &mut [u8]) -> io::Result<()> {
    let size_bytes = states.len() * PAGE_SIZE_BYTES as usize;
    // SAFETY: mincore writes one byte per page of the range into `states`, which has as many. It
    // changes nothing else, and returns an error where nothing is mapped.
    let result =
        unsafe { libc::mincore(address as *mut libc::c_void, size_bytes, states.as_mut_ptr()) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Whether a state indicates that the page is in memory.
pub(crate) const fn is_in_memory(state: u8) -> bool {
    state & 1 != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_in_memory_and_in_swap_space_are_private_and_those_of_files_are_not() {
        let swapped = PageState(PageState::SWAPPED | 0x1234);
        assert!(swapped.is_private() && !swapped.is_private_in_memory());
        let present = PageState(PageState::PRESENT | 0x1234);
        assert!(present.is_private() && present.is_private_in_memory());
        for bits in [0, PageState::PRESENT | PageState::FILE, PageState::FILE] {
            assert!(
                !PageState(bits).is_private() && !PageState(bits).is_private_in_memory(),
                "{bits:#x}"
            );
        }
    }
}

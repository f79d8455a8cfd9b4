//! Allocating guest memory in advance.

use std::io;
use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use rustix::io::Errno;
use rustix::mm::{Advice, madvise};

use crate::mapping::Mapping;
use crate::{Backing, RamError};

/// Bytes that a thread populates at a time: large enough to make the system call's cost negligible,
/// small enough to share the work evenly.
const CHUNK_BYTES: usize = 64 << 20;

/// Maximum number of threads; more contend for the host's zone locks without gain.
const MAX_THREADS: usize = 8;

/// Refuses requests that cannot succeed: the kernel would fail page by page, and kill processes for
/// lack of memory on the way. Huge pages of the pool are reserved when it is mapped: the pool's
/// size is the limit there.
///
/// # Errors
/// [`RamError::LargerThanHost`] if `size_bytes` is more than all RAM of the host.
pub(crate) fn check_possible(size_bytes: u64, backing: Backing) -> Result<(), RamError> {
    if backing == Backing::Hugetlb2M {
        return Ok(());
    }
    let info = rustix::system::sysinfo();
    let host_bytes = (info.totalram as u64).saturating_mul(u64::from(info.mem_unit));
    if size_bytes > host_bytes {
        Err(RamError::LargerThanHost { size_bytes, host_bytes })
    } else {
        Ok(())
    }
}

/// Allocates every page of `mapping` (`MADV_POPULATE_WRITE`, Linux 5.14), with several threads if
/// it is large. Each asks `is_cancelled` before every [`CHUNK_BYTES`].
///
/// # Errors
/// [`RamError::Populate`] if the host cannot allocate a page, [`RamError::PopulateCancelled`].
/// Allocated pages stay allocated.
pub(crate) fn populate(
    mapping: &Mapping,
    is_cancelled: &(dyn Fn() -> bool + Sync),
) -> Result<(), RamError> {
    let chunks = mapping.size_bytes().div_ceil(CHUNK_BYTES);
    let processors = thread::available_parallelism().map_or(1, NonZero::get);
    let threads = processors.min(MAX_THREADS).min(chunks);
    let next_chunk = AtomicUsize::new(0);
    let work = || loop {
        // Relaxed: the counter only hands out numbers, no data depends on it.
        let chunk = next_chunk.fetch_add(1, Ordering::Relaxed);
        if chunk >= chunks {
            return Ok(());
        }
        if is_cancelled() {
            return Err(RamError::PopulateCancelled);
        }
        let start = chunk * CHUNK_BYTES;
        populate_chunk(mapping, start, CHUNK_BYTES.min(mapping.size_bytes() - start))?;
    };
    if threads <= 1 {
        return work();
    }
    thread::scope(|scope| {
        let helpers: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        let own = work();
        helpers
            .into_iter()
            .map(|helper| helper.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .fold(own, Result::and)
    })
}

fn populate_chunk(mapping: &Mapping, start: usize, size_bytes: usize) -> Result<(), RamError> {
    loop {
        let address = (mapping.address() + start) as *mut _;
        // SAFETY: the chunk lies within `mapping`, which stays mapped while it is borrowed.
        // Populating allocates pages and changes no content.
        match unsafe { madvise(address, size_bytes, Advice::LinuxPopulateWrite) } {
            Ok(()) => return Ok(()),
            Err(Errno::INTR | Errno::AGAIN) => {}
            Err(error) => {
                let source = io::Error::from(error);
                return Err(RamError::Populate { size_bytes: size_bytes as u64, source });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_than_the_hosts_memory_is_refused_at_once() {
        assert!(check_possible(4096, Backing::Memfd).is_ok());
        let error = check_possible(1 << 60, Backing::Memfd).unwrap_err();
        assert!(
            matches!(error, RamError::LargerThanHost { size_bytes, .. } if size_bytes == 1 << 60),
            "{error}"
        );
    }
}

//! Pages changed by the monitor itself: writes through vm-memory's interface, and discards.

use rustix::thread::{MembarrierCommand, membarrier};
use vm_memory::GuestMemoryBackend;
use vm_memory::bitmap::Bitmap;

use crate::{GuestRam, GuestRange, PageBitmap, RamError, WriteLog};

impl GuestRam {
    /// Starts logging the pages that the monitor changes: by writes through
    /// [`memory`](Self::memory), and by discards, whose pages are logged after they are discarded.
    /// Earlier log entries are dropped.
    ///
    /// Each change that is not finished when this returns is logged.
    /// [`take_write_log`](Self::take_write_log) finds it when it is finished, not before: a thread
    /// in the middle of a change has to finish it before a last call.
    ///
    /// Not logged are writes of vCPUs, and writes through pointers that were taken out of
    /// vm-memory's types. System call: `membarrier`.
    ///
    /// # Errors
    /// [`RamError::Barrier`] if the kernel lacks this call; nothing is logged then.
    pub fn start_write_log(&self) -> Result<(), RamError> {
        self.logs().for_each(WriteLog::start);
        // A thread may have written to memory and then have found the log off, with the write still
        // in its processor's store buffer. After this barrier all threads see such writes.
        let barrier = membarrier(MembarrierCommand::RegisterPrivateExpedited)
            .and_then(|()| membarrier(MembarrierCommand::PrivateExpedited));
        barrier.map_err(|error| {
            self.stop_write_log();
            RamError::Barrier { source: error.into() }
        })
    }

    /// Adds the pages that were changed since the log was started or last taken to `pages`, and
    /// removes them from the log.
    pub fn take_write_log(&self, pages: &mut PageBitmap) {
        for (region, log) in self.regions().iter().zip(self.logs()) {
            pages.insert_words(region.pages().start, log.take());
        }
    }

    /// Stops logging. Logged pages can still be taken.
    pub fn stop_write_log(&self) {
        self.logs().for_each(WriteLog::stop);
    }

    /// Whether changes are logged.
    pub fn is_write_log_on(&self) -> bool {
        self.logs().all(WriteLog::is_on)
    }

    /// Logs a change of the content of pages. Parts outside guest memory are ignored.
    pub(crate) fn note_changed(&self, ranges: &[GuestRange]) {
        for range in ranges {
            for (region, log) in self.regions().iter().zip(self.logs()) {
                let part = region.pages().intersection(*range);
                if !part.is_empty() {
                    let offset_bytes = part.start.address() - region.start.0;
                    log.mark_dirty(offset_bytes as usize, part.size_bytes() as usize);
                }
            }
        }
    }

    /// The regions' logs, in the regions' order.
    fn logs(&self) -> impl Iterator<Item = &WriteLog> {
        GuestMemoryBackend::iter(self.memory()).map(|region| (**region).bitmap())
    }
}

#[cfg(test)]
mod tests;

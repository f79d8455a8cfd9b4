//! Which pages the monitor itself has changed: writes through vm-memory's interface, and discards.

use rustix::thread::{MembarrierCommand, membarrier};
use vm_memory::GuestMemoryBackend;
use vm_memory::bitmap::Bitmap;

use crate::{GuestRam, GuestRange, PageBitmap, RamError, WriteLog};

impl GuestRam {
    /// Starts to note which pages the monitor changes: by writes through [`memory`](Self::memory),
    /// and by discards, whose pages are noted after they are gone. What was noted before is
    /// forgotten.
    ///
    /// Each change that is not finished when this returns is noted.
    /// [`take_write_log`](Self::take_write_log) finds it when it is finished, not before: a thread
    /// that is in the middle of it has to end it before a last look.
    ///
    /// Not noted is what cannot be seen from here: writes of vCPUs, and writes through pointers
    /// that were taken out of vm-memory's types. System call: `membarrier`.
    ///
    /// # Errors
    /// [`RamError::Barrier`] if the kernel has no such call; nothing is noted then.
    pub fn start_write_log(&self) -> Result<(), RamError> {
        self.logs().for_each(WriteLog::start);
        // A thread may have written to memory and then have found the log switched off, with the
        // write still in its processor's store buffer. Behind this barrier all threads see such
        // writes.
        let barrier = membarrier(MembarrierCommand::RegisterPrivateExpedited)
            .and_then(|()| membarrier(MembarrierCommand::PrivateExpedited));
        barrier.map_err(|error| {
            self.stop_write_log();
            RamError::Barrier { source: error.into() }
        })
    }

    /// Adds the pages that were changed since the log was started or last taken to `pages`, and
    /// forgets them.
    pub fn take_write_log(&self, pages: &mut PageBitmap) {
        for (region, log) in self.regions().iter().zip(self.logs()) {
            pages.insert_words(region.pages().start, log.take());
        }
    }

    /// Notes nothing any more. What was noted can still be taken.
    pub fn stop_write_log(&self) {
        self.logs().for_each(WriteLog::stop);
    }

    /// Whether changes are noted.
    pub fn is_write_log_on(&self) -> bool {
        self.logs().all(WriteLog::is_on)
    }

    /// Notes that the content of pages has changed. Parts outside guest memory are ignored.
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

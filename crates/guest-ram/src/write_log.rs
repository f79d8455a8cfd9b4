//! Which pages the monitor itself has changed: writes through vm-memory's interface, and discards.
//!
//! KVM's log of dirty pages knows of what vCPUs write and of what KVM writes on their behalf, not
//! of what the monitor's devices write. [`GuestMemory`] notes those writes while somebody wants to
//! know.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, compiler_fence};

use ebb_abi::{PAGE_SHIFT, PAGE_SIZE_BYTES};
use rustix::thread::{MembarrierCommand, membarrier};
use vm_memory::bitmap::{Bitmap, NewBitmap, RefSlice, WithBitmapSlice};
use vm_memory::{GuestMemoryBackend, GuestMemoryMmap};

use crate::{GuestRam, GuestRange, PageBitmap, RamError};

/// Guest memory as vm-memory has it, with a log of what is written through it.
pub type GuestMemory = GuestMemoryMmap<WriteLog>;

/// What the parts of [`GuestMemory`] carry with them, for example virtio-queue's readers and
/// writers of descriptor chains.
pub type WriteLogSlice<'a> = RefSlice<'a, WriteLog>;

/// The pages of a region that were written to.
///
/// While it is off it costs some nanoseconds a write, most of them to carry it along with
/// vm-memory's slices, and it takes no memory until it was switched on for the first time.
#[derive(Debug, Default)]
pub struct WriteLog {
    recording: AtomicBool,
    pages: u64,
    /// A bit for each page.
    words: OnceLock<Box<[AtomicU64]>>,
}

impl WriteLog {
    /// Starts with nothing noted. A write that ends after this and the memory barrier that all
    /// threads need after it will be noted.
    fn start(&self) {
        let words = self.words.get_or_init(|| {
            std::iter::repeat_with(AtomicU64::default)
                .take(self.pages.div_ceil(64) as usize)
                .collect()
        });
        // Relaxed: what a thread notes late, of a time before, is a page too many, which does no
        // harm.
        words.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        self.recording.store(true, Ordering::SeqCst);
    }

    fn stop(&self) {
        self.recording.store(false, Ordering::SeqCst);
    }

    fn is_on(&self) -> bool {
        self.recording.load(Ordering::SeqCst)
    }

    /// Hands over what was noted since the last time, word by word.
    fn take(&self) -> impl Iterator<Item = u64> {
        // Most words are 0, and need no locked access. A bit that is set just behind the look is
        // found the next time. Acquire, as partner of the Release in `mark`: who finds a bit finds
        // what was written before it was set.
        self.words.get().into_iter().flatten().map(|word| {
            if word.load(Ordering::Relaxed) == 0 { 0 } else { word.swap(0, Ordering::Acquire) }
        })
    }

    #[cold]
    fn mark(&self, offset_bytes: usize, size_bytes: usize) {
        let Some(words) = self.words.get() else { return };
        if size_bytes == 0 || self.pages == 0 {
            return;
        }
        let last_byte = (offset_bytes as u64).saturating_add(size_bytes as u64 - 1);
        let last = (last_byte >> PAGE_SHIFT).min(self.pages - 1);
        let mut page = offset_bytes as u64 >> PAGE_SHIFT;
        while page <= last {
            let end = (page / 64 * 64 + 64).min(last + 1);
            let mask = u64::MAX >> (64 - (end - page)) << (page % 64);
            // Release, as partner of the Acquire in `take`.
            words[(page / 64) as usize].fetch_or(mask, Ordering::Release);
            page = end;
        }
    }
}

impl<'a> WithBitmapSlice<'a> for WriteLog {
    type S = WriteLogSlice<'a>;
}

impl Bitmap for WriteLog {
    /// Called by vm-memory after the write.
    #[inline]
    fn mark_dirty(&self, offset: usize, len: usize) {
        // The write must not be moved behind the look at the flag. The compiler is kept from that
        // here, the processor by the barrier that `GuestRam::start_write_log` makes all threads
        // execute: a fence here would cost each write more than all the rest of this.
        compiler_fence(Ordering::SeqCst);
        if self.recording.load(Ordering::Relaxed) {
            self.mark(offset, len);
        }
    }

    fn dirty_at(&self, offset: usize) -> bool {
        let page = offset as u64 >> PAGE_SHIFT;
        let word = self.words.get().and_then(|words| words.get((page / 64) as usize));
        word.is_some_and(|word| word.load(Ordering::Acquire) >> (page % 64) & 1 != 0)
    }

    #[inline]
    fn slice_at(&self, offset: usize) -> WriteLogSlice<'_> {
        RefSlice::new(self, offset)
    }
}

impl NewBitmap for WriteLog {
    fn with_len(len: usize) -> Self {
        Self { pages: (len as u64).div_ceil(PAGE_SIZE_BYTES), ..Self::default() }
    }
}

impl GuestRam {
    /// Starts to note which pages the monitor changes: by writes through [`memory`](Self::memory),
    /// and by discards, whose pages are noted after they are gone. What was noted before is
    /// forgotten.
    ///
    /// Each change that is not finished when this returns is noted.
    /// [`take_write_log`](Self::take_write_log) finds it when it is finished, not before: a thread
    /// that is in the middle of it has to end it before a last look.
    ///
    /// Not noted is what nobody can see from here: writes of vCPUs, and writes through pointers
    /// that were taken out of vm-memory's types. System call: `membarrier`.
    ///
    /// # Errors
    /// [`RamError::Barrier`] if the kernel has no such call; nothing is noted then.
    pub fn start_write_log(&self) -> Result<(), RamError> {
        self.logs().for_each(WriteLog::start);
        // A thread may have written to memory and then have found the log switched off, with the
        // write still in its processor's store buffer. Behind this barrier everybody sees such
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

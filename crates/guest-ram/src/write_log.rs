//! A log of writes through vm-memory's interface.
//!
//! KVM's log of dirty pages knows of what vCPUs write and of what KVM writes on their behalf, not
//! of what the monitor's devices write. [`GuestMemory`] notes those writes while the log is on.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, compiler_fence};

use ebb_abi::{PAGE_SHIFT, PAGE_SIZE_BYTES};
use vm_memory::GuestMemoryMmap;
use vm_memory::bitmap::{Bitmap, NewBitmap, RefSlice, WithBitmapSlice};

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
    pub(crate) fn start(&self) {
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

    pub(crate) fn stop(&self) {
        self.recording.store(false, Ordering::SeqCst);
    }

    pub(crate) fn is_on(&self) -> bool {
        self.recording.load(Ordering::SeqCst)
    }

    /// Hands over what was noted since the last time, word by word.
    pub(crate) fn take(&self) -> impl Iterator<Item = u64> {
        // Most words are 0, and need no locked access. A bit that is set just behind the look is
        // found the next time. Acquire, as partner of the Release in `mark`: a reader that finds a
        // bit finds what was written before it was set.
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

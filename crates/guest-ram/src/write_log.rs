//! A log of writes through vm-memory's interface.
//!
//! KVM's log of dirty pages covers writes of vCPUs and of KVM on their behalf, but not those of the
//! monitor's devices. [`GuestMemory`] logs those writes while the log is on.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, compiler_fence};

use ebb_abi::{PAGE_SHIFT, PAGE_SIZE_BYTES};
use vm_memory::GuestMemoryMmap;
use vm_memory::bitmap::{Bitmap, NewBitmap, RefSlice, WithBitmapSlice};

/// Guest memory of vm-memory's type, with a log of the writes through it.
pub type GuestMemory = GuestMemoryMmap<WriteLog>;

/// Slice type of the parts of [`GuestMemory`], for example in virtio-queue's readers and writers of
/// descriptor chains.
pub type WriteLogSlice<'a> = RefSlice<'a, WriteLog>;

/// Log of the pages of a region that were written to.
///
/// While it is off it costs some nanoseconds per write, most of them for passing it along with
/// vm-memory's slices, and it takes no memory until it is switched on for the first time.
#[derive(Debug, Default)]
pub struct WriteLog {
    recording: AtomicBool,
    pages: u64,
    /// A bit for each page.
    words: OnceLock<Box<[AtomicU64]>>,
}

impl WriteLog {
    /// Starts with an empty log. A write that ends after this and after the memory barrier that all
    /// threads must then execute will be logged.
    pub(crate) fn start(&self) {
        let words = self.words.get_or_init(|| {
            std::iter::repeat_with(AtomicU64::default)
                .take(self.pages.div_ceil(64) as usize)
                .collect()
        });
        // Relaxed: a late entry of an earlier write is a superfluous page, which is harmless.
        words.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        self.recording.store(true, Ordering::SeqCst);
    }

    pub(crate) fn stop(&self) {
        self.recording.store(false, Ordering::SeqCst);
    }

    pub(crate) fn is_on(&self) -> bool {
        self.recording.load(Ordering::SeqCst)
    }

    /// Returns the entries since the last call, word by word.
    pub(crate) fn take(&self) -> impl Iterator<Item = u64> {
        // Most words are 0, and need no locked access. A bit that is set just after the load is
        // found the next time. Acquire, pairs with the Release in `mark`: a reader that finds a bit
        // finds the data written before it was set.
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
            // Release, pairs with the Acquire in `take`.
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
        // The write must not be moved behind the load of the flag. This fence prevents the compiler
        // from doing so, and the barrier that `GuestRam::start_write_log` makes all threads execute
        // prevents the processor: a processor fence here would cost each write more than all the
        // rest.
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

//! Mapped memory that the workloads write to.

use std::ffi::c_void;
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

/// Page size of x86-64 in bytes.
pub const PAGE_BYTES: usize = 4096;
/// Number of words in a page.
pub const PAGE_WORDS: usize = PAGE_BYTES / size_of::<u64>();
/// Size of a transparent huge page of x86-64.
pub const HUGE_PAGE_BYTES: usize = 2 << 20;
/// Step size with which numactl's memhog fills memory.
pub const MEMHOG_STEP_BYTES: usize = 10 << 20;
/// Multiplier that spreads a word's index over all bits, so that pages differ (2^64 divided by the
/// golden ratio).
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;

/// A mapping, which is unmapped on drop.
#[derive(Debug)]
pub struct Mapping {
    start: NonNull<u64>,
    len_bytes: usize,
}

/// Visibility of writes to a mapped file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sharing {
    /// For all mappings of the file (MAP_SHARED).
    Shared,
    /// Only for this mapping (MAP_PRIVATE).
    Private,
}

impl Mapping {
    /// Maps `bytes` of private anonymous memory, rounded up to whole pages, without touching it.
    pub fn new(bytes: u64) -> io::Result<Self> {
        let len_bytes = whole_pages(bytes)?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: the kernel chooses an unused address, so that no memory in use is replaced.
        let start = unsafe { mmap_anonymous(std::ptr::null_mut(), len_bytes, PROTECTION, flags) }?;
        Self::at(start, len_bytes)
    }

    /// Maps private anonymous memory that is aligned to huge pages and requests them; `bytes` are
    /// rounded up to whole huge pages.
    pub fn huge(bytes: u64) -> io::Result<Self> {
        let len_bytes = whole_pages(bytes)?
            .checked_next_multiple_of(HUGE_PAGE_BYTES)
            .ok_or_else(|| cannot_map(bytes))?;
        let around = Self::new((len_bytes + HUGE_PAGE_BYTES) as u64)?;
        let before = around.start.as_ptr().cast::<u8>().align_offset(HUGE_PAGE_BYTES);
        let mut mapping = around.cut(before, len_bytes);
        mapping.advise(0..mapping.pages(), Advice::LinuxHugepage)?;
        Ok(mapping)
    }

    /// Maps the first `bytes` of a file, rounded up to whole pages.
    pub fn of_file(file: &File, bytes: u64, sharing: Sharing) -> io::Result<Self> {
        let len_bytes = whole_pages(bytes)?;
        let flags = match sharing {
            Sharing::Shared => MapFlags::SHARED,
            Sharing::Private => MapFlags::PRIVATE,
        };
        // SAFETY: as in `new`. Only this process and its children have the file (`unnamed_file`),
        // and none of them truncates it.
        let start = unsafe { mmap(std::ptr::null_mut(), len_bytes, PROTECTION, flags, file, 0) }?;
        Self::at(start, len_bytes)
    }

    fn at(start: *mut c_void, len_bytes: usize) -> io::Result<Self> {
        let start = NonNull::new(start.cast()).ok_or_else(|| cannot_map(len_bytes as u64))?;
        Ok(Self { start, len_bytes })
    }

    /// Keeps `len_bytes` from `before` on, both multiples of the page size, and unmaps the rest.
    fn cut(self, before: usize, len_bytes: usize) -> Self {
        let start = self.start.cast::<u8>();
        let end = before + len_bytes;
        // SAFETY: `huge` has mapped one huge page more than it keeps, so `before` is inside the
        // mapping.
        let kept = unsafe { start.add(before) }.cast();
        // SAFETY: for the same reason, `end` is not beyond the end of the mapping.
        let behind = unsafe { start.add(end) }.cast();
        let behind_bytes = self.len_bytes - end;
        // Dropped as separate mappings: the kernel can unmap any part of a mapping.
        let ends = [(start.cast(), before), (behind, behind_bytes)];
        std::mem::forget(self);
        for (start, len_bytes) in ends.into_iter().filter(|(_, len_bytes)| *len_bytes > 0) {
            drop(Self { start, len_bytes });
        }
        Self { start: kept, len_bytes }
    }

    /// Calls `madvise` on a range of pages, which may change their content.
    pub fn advise(&mut self, pages: Range<usize>, advice: Advice) -> io::Result<()> {
        if pages.start > pages.end || pages.end > self.pages() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // SAFETY: the range was checked to be inside the mapping.
        let start = unsafe { self.start.as_ptr().cast::<u8>().add(pages.start * PAGE_BYTES) };
        // SAFETY: this value owns the range, and `&mut self` excludes any other reference into it.
        unsafe { madvise(start.cast(), pages.len() * PAGE_BYTES, advice) }.map_err(Into::into)
    }

    /// Address of the first byte.
    pub fn address(&self) -> usize {
        self.start.as_ptr() as usize
    }

    /// Length in bytes, whole pages.
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Fills the mapping with `byte` in steps of `step_bytes`. `after` is called after each step
    /// with the number of bytes written so far; it stops by returning false. Returns the number of
    /// bytes written.
    pub fn fill(
        &mut self,
        byte: u8,
        step_bytes: usize,
        mut after: impl FnMut(usize) -> bool,
    ) -> usize {
        let mut done = 0;
        while done < self.len_bytes {
            let step = step_bytes.max(1).min(self.len_bytes - done);
            // SAFETY: `done` is less than the length of the mapping, so the result is inside it.
            let target = unsafe { self.start.cast::<u8>().add(done) };
            // SAFETY: `step` bytes from `target` are inside the mapping, which only this value
            // owns.
            unsafe { target.write_bytes(byte, step) };
            done += step;
            if !after(done) {
                break;
            }
        }
        done
    }

    /// Fills the mapping with the pattern of `seed`.
    pub fn fill_pattern(&mut self, seed: u64) {
        for (index, word) in self.words_mut().iter_mut().enumerate() {
            *word = pattern_word(seed, index);
        }
    }

    /// Number of pages that differ from the pattern of `seed`.
    pub fn wrong_pages(&self, seed: u64) -> usize {
        let page_is_wrong = |page: usize, words: &[u64]| {
            let first = page * PAGE_WORDS;
            words.iter().enumerate().any(|(index, word)| *word != pattern_word(seed, first + index))
        };
        self.words()
            .chunks(PAGE_WORDS)
            .enumerate()
            .filter(|(page, words)| page_is_wrong(*page, words))
            .count()
    }

    /// Writes one byte at `offset` to cause a page fault; volatile, so that the compiler does not
    /// remove it.
    pub fn write_byte(&mut self, offset: usize) {
        let word = &mut self.words_mut()[offset / size_of::<u64>()];
        // SAFETY: the pointer comes from a reference, so it is valid, and a byte needs no
        // alignment.
        unsafe { std::ptr::from_mut(word).cast::<u8>().write_volatile(1) };
    }

    /// Number of pages.
    pub fn pages(&self) -> usize {
        self.len_bytes / PAGE_BYTES
    }

    /// The words of a page.
    pub fn page(&self, page: usize) -> &[u64] {
        &self.words()[page * PAGE_WORDS..][..PAGE_WORDS]
    }

    /// The words of a page, mutable.
    pub fn page_mut(&mut self, page: usize) -> &mut [u64] {
        &mut self.words_mut()[page * PAGE_WORDS..][..PAGE_WORDS]
    }

    /// All words.
    pub fn words(&self) -> &[u64] {
        // SAFETY: the mapping is readable, page-aligned, and of this length until `self` is
        // dropped; every bit pattern is a u64.
        unsafe {
            std::slice::from_raw_parts(self.start.as_ptr(), self.len_bytes / size_of::<u64>())
        }
    }

    /// All words, mutable.
    pub fn words_mut(&mut self) -> &mut [u64] {
        // SAFETY: as in `words`, and `&mut self` makes it the only reference.
        unsafe {
            std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len_bytes / size_of::<u64>())
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this value owns the mapping and no reference into it outlives it.
        let _ = unsafe { munmap(self.start.as_ptr().cast::<c_void>(), self.len_bytes) };
    }
}

const PROTECTION: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

fn cannot_map(bytes: u64) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, format!("cannot map {bytes} bytes"))
}

fn whole_pages(bytes: u64) -> io::Result<usize> {
    usize::try_from(bytes)
        .ok()
        .and_then(|len| len.checked_next_multiple_of(PAGE_BYTES))
        .filter(|len| *len > 0)
        .ok_or_else(|| cannot_map(bytes))
}

/// An unlinked file of `bytes` zeros in `/tmp`.
pub fn unnamed_file(bytes: u64) -> io::Result<File> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let path = format!("/tmp/ebb-agent-{}-{number}", std::process::id());
    let path = Path::new(&path);
    let file = File::options().read(true).write(true).create_new(true).open(path)?;
    fs::remove_file(path)?;
    file.set_len(bytes)?;
    Ok(file)
}

/// Word number `index` of the pattern of `seed`.
pub fn pattern_word(seed: u64, index: usize) -> u64 {
    seed ^ (index as u64 + 1).wrapping_mul(SPREAD)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn lengths_are_whole_pages() {
        assert_eq!(Mapping::new(1).unwrap().len_bytes(), PAGE_BYTES);
        assert_eq!(Mapping::new(3 << 20).unwrap().len_bytes(), 3 << 20);
        assert!(Mapping::new(0).is_err());
        assert!(Mapping::new(u64::MAX).is_err());
        assert!(Mapping::new(1 << 60).is_err());
    }

    #[test]
    fn every_byte_is_written_step_by_step() {
        let mut mapping = Mapping::new(1 << 20).unwrap();
        let mut steps = Vec::new();
        let written = mapping.fill(0xff, 300_000, |done| {
            steps.push(done);
            true
        });
        assert_eq!((written, steps), (1 << 20, vec![300_000, 600_000, 900_000, 1 << 20]));
        assert!(mapping.words().iter().all(|word| *word == u64::MAX));
    }

    #[test]
    fn filling_stops_on_request() {
        let mut mapping = Mapping::new(1 << 20).unwrap();
        assert_eq!(mapping.fill(1, PAGE_BYTES, |done| done < 3 * PAGE_BYTES), 3 * PAGE_BYTES);
        assert_eq!(mapping.words()[3 * PAGE_BYTES / 8], 0);
    }

    #[test]
    fn huge_mappings_are_aligned_and_complete() {
        for bytes in [1, HUGE_PAGE_BYTES as u64, 5 << 20] {
            let mut mapping = Mapping::huge(bytes).unwrap();
            assert_eq!(mapping.address() % HUGE_PAGE_BYTES, 0);
            assert_eq!(mapping.len_bytes() as u64, bytes.next_multiple_of(HUGE_PAGE_BYTES as u64));
            mapping.fill_pattern(bytes);
            assert_eq!(mapping.wrong_pages(bytes), 0);
        }
        assert!(Mapping::huge(0).is_err() && Mapping::huge(u64::MAX).is_err());
    }

    #[test]
    fn only_shared_mappings_of_files_share_writes() {
        let file = unnamed_file(2 * PAGE_BYTES as u64).unwrap();
        let map = |sharing| Mapping::of_file(&file, 2 * PAGE_BYTES as u64, sharing).unwrap();
        let (mut private, mut shared) = (map(Sharing::Private), map(Sharing::Shared));
        private.page_mut(0).fill(1);
        shared.page_mut(1).fill(2);
        drop(shared);
        assert_eq!((private.page(0)[7], private.page(1)[511]), (1, 2));
        private.advise(0..1, Advice::LinuxDontNeed).unwrap();
        assert_eq!((private.page(0)[7], private.page(1)[511]), (0, 2));
        assert!(private.advise(1..3, Advice::LinuxDontNeed).is_err());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn damage_is_found_at_its_position(
            seed: u64,
            pages in 1_usize..40,
            places in proptest::collection::vec(any::<prop::sample::Index>(), 0..10),
        ) {
            let mut mapping = Mapping::new((pages * PAGE_BYTES) as u64).unwrap();
            mapping.fill_pattern(seed);
            prop_assert_eq!(mapping.wrong_pages(seed), 0);
            prop_assert_eq!(mapping.wrong_pages(!seed), pages);
            let mut damaged = std::collections::BTreeSet::new();
            let mut words = std::collections::BTreeSet::new();
            for place in places {
                let word = place.index(mapping.words().len());
                if words.insert(word) {
                    mapping.words_mut()[word] ^= 1 << (word % 64);
                    damaged.insert(word * 8 / PAGE_BYTES);
                }
            }
            prop_assert_eq!(mapping.wrong_pages(seed), damaged.len());
        }
    }
}

//! Threads that write to memory, and check their writes, while its pages are merged repeatedly.
//!
//! For tests of this crate and of others, and for trying out a machine's kernel. The control
//! without a freeze shows that lost writes are detected: it compares a page in place and then
//! replaces it, as if no thread could write in between.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use ebb_abi::{PAGE_SIZE_BYTES, Pfn};
use vm_memory::GuestAddress;

use super::schedule::Protection;
use super::{
    MergeError, MergeOutcome, MergeSession, MergeTarget, MergeUnavailable, PageLook, StableError,
    StableMemory, StableSegments, StableSlot,
};
use crate::{Backing, GuestRam, GuestRange, HugePages, Populate, RamError, RegionSpec};

const WORDS: usize = PAGE_SIZE_BYTES as usize / 8;

/// Contents of pages between single writes; the first is zeros.
const PATTERNS: u64 = 5;

/// Neighbouring slots for each content, so that neighbouring pages can be merged at once.
const SLOTS: u32 = 64;

/// Whether pages are frozen while they are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Freeze {
    /// As required.
    Yes,
    /// Not at all: writes will be lost.
    No,
    /// While they are compared, but not while they are reanonymized: writes will be lost, too.
    NotWhenBroughtBack,
}

/// Parameters of a stress test.
#[derive(Clone, Copy, Debug)]
pub struct Stress {
    /// Pages of memory.
    pub pages: u64,
    /// Threads that write.
    pub writers: usize,
    /// Single writes of each thread.
    pub writes: u64,
    /// Whether pages are frozen.
    pub freeze: Freeze,
    /// Whether the memory may have huge pages.
    pub huge_pages: HugePages,
}

/// Result of a stress test.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Single writes of all writers; filled pages do not count.
    pub writes: u64,
    /// Words that did not contain the written value.
    pub lost: u64,
    /// Pages that were merged.
    pub merged: u64,
    /// Pages that were replaced by nothing.
    pub zeros: u64,
    /// Pages that were different when they were frozen.
    pub different: u64,
    /// Pages that could not be moved.
    pub busy: u64,
    /// Merged pages that were found to have been written to.
    pub broken: u64,
    /// Pages that were reanonymized after that.
    pub brought_back: u64,
    /// Of these, pages that were merged again.
    pub remerged: u64,
    /// Mappings that were saved by coalescing neighbouring ones.
    pub joined: u64,
    /// Pages that were discarded.
    pub discarded: u64,
}

/// Reason why the stress test could not be run.
#[derive(Debug, thiserror::Error)]
pub enum StressError {
    /// Merging is not possible here.
    #[error(transparent)]
    Unavailable(#[from] MergeUnavailable),
    /// Merging failed.
    #[error(transparent)]
    Merge(#[from] MergeError),
    /// Memory could not be allocated or discarded.
    #[error(transparent)]
    Ram(#[from] RamError),
    /// Stable pages could not be made.
    #[error(transparent)]
    Stable(#[from] StableError),
}

/// Runs the stress test.
///
/// # Errors
/// [`StressError`]; lost writes are not an error but part of the report.
pub fn run(stress: &Stress) -> Result<Report, StressError> {
    let spec = RegionSpec {
        start: GuestAddress(0),
        size_bytes: stress.pages * PAGE_SIZE_BYTES,
        host_node: None,
    };
    let ram =
        Arc::new(GuestRam::new(&[spec], Backing::Anonymous, stress.huge_pages, Populate::Lazy)?);
    let segments = StableSegments::new();
    let mut stable = StableMemory::own(Arc::clone(&segments));
    let mut slots = HashMap::new();
    for pattern in 1..PATTERNS {
        let mut of_pattern = Vec::new();
        stable.allocate(None, SLOTS, &mut of_pattern)?;
        let page: Vec<u8> =
            (0..WORDS).flat_map(|word| value(pattern, word).to_ne_bytes()).collect();
        stable.write(of_pattern[0], &page.repeat(SLOTS as usize))?;
        slots.insert(pattern, of_pattern[0]);
    }
    ram.enable_merging(segments)?;
    let mut session = MergeSession::new(Arc::clone(&ram))?;
    session.sampler.set_looks(2);
    if stress.freeze == Freeze::NotWhenBroughtBack {
        session.protection = Protection::No;
    }
    let running = AtomicUsize::new(stress.writers);
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..stress.writers)
            .map(|number| {
                let (ram, running) = (&ram, &running);
                scope.spawn(move || {
                    let report = Writer::new(ram, stress, number).run(stress.writes);
                    running.fetch_sub(1, Ordering::Release);
                    report
                })
            })
            .collect();
        let mut report = Report::default();
        let mut result = Ok(());
        while result.is_ok() && running.load(Ordering::Acquire) > 0 {
            result = merge_all(&mut session, stress, &slots, &mut report);
        }
        for writer in writers {
            let of_writer =
                writer.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            report.writes += of_writer.writes;
            report.lost += of_writer.lost;
            report.discarded += of_writer.discarded;
        }
        let returns = ram.broken_cow_stats();
        (report.brought_back, report.remerged) =
            (returns.brought_back_pages, returns.remerged_pages);
        report.joined = returns.joined_mappings;
        result.map(|()| report)
    })
}

/// Value of a word of a page with a pattern.
fn value(pattern: u64, word: usize) -> u64 {
    pattern.wrapping_mul(0x0101_0101_0101_0101) * u64::from(word.is_multiple_of(3))
}

/// Merges all pages that have a pattern's content.
fn merge_all(
    session: &mut MergeSession,
    stress: &Stress,
    slots: &HashMap<u64, StableSlot>,
    report: &mut Report,
) -> Result<(), StressError> {
    let (mut looks, mut outcomes) = (Vec::new(), Vec::new());
    for start in (0..stress.pages).step_by(512) {
        let block = GuestRange::new(Pfn(start), 512.min(stress.pages - start));
        session.look(block, &mut looks)?;
        let mut wanted = Vec::new();
        for (page, look) in (block.start.0..).map(Pfn).zip(&looks) {
            match look {
                PageLook::Written | PageLook::Clean | PageLook::Huge => {
                    let mut first_words = [0; 4];
                    session.read_each(&[page], |content| {
                        let words = content.map(|content| content.as_chunks::<8>().0);
                        for (word, bytes) in first_words.iter_mut().zip(words.unwrap_or_default()) {
                            *word = u64::from_ne_bytes(*bytes);
                        }
                    });
                    // By the first words only, so that some pages are different.
                    let pattern = first_words[0] & 0xff;
                    let target = if pattern == 0 {
                        MergeTarget::Zero
                    } else if let Some(first) = slots.get(&pattern) {
                        MergeTarget::Slot(first.offset(page.0 as u32 % SLOTS))
                    } else {
                        continue;
                    };
                    wanted.push((page, target));
                }
                PageLook::Broken(_) => report.broken += 1,
                PageLook::Absent | PageLook::Merged | PageLook::Copied | PageLook::Excluded => {}
            }
        }
        outcomes.clear();
        match stress.freeze {
            Freeze::Yes | Freeze::NotWhenBroughtBack => session.replace(&wanted, &mut outcomes)?,
            Freeze::No => session.replace_without_freeze(&wanted, &mut outcomes),
        }
        for ((_, target), outcome) in wanted.iter().zip(&outcomes) {
            let count = match (outcome, target) {
                (MergeOutcome::Done, MergeTarget::Zero) => &mut report.zeros,
                (MergeOutcome::Done, MergeTarget::Slot(_)) => &mut report.merged,
                (MergeOutcome::Different, _) => &mut report.different,
                (MergeOutcome::Busy, _) => &mut report.busy,
                (MergeOutcome::NoMappings | MergeOutcome::Gone, _) => continue,
            };
            *count += 1;
        }
    }
    Ok(())
}

impl MergeSession {
    /// Replaces pages incorrectly, as a control: nothing keeps them from changing between
    /// comparison and mapping.
    fn replace_without_freeze(
        &mut self,
        pages: &[(Pfn, MergeTarget)],
        outcomes: &mut Vec<MergeOutcome>,
    ) {
        let ram = Arc::clone(&self.ram);
        let Some(mut overlaid) = ram.lock_overlay() else { return };
        // All comparisons first, as with a freeze.
        let mut same = Vec::new();
        for &(page, target) in pages {
            let range = GuestRange::new(page, 1);
            let MergeTarget::Slot(slot) = target else { continue };
            let segment = self.merging().segments.get(slot.segment);
            let address = segment.as_ref().and_then(|segment| segment.address(slot.index, 1));
            let (Some(segment), Some(address), Some(piece)) = (segment, address, ram.piece(range))
            else {
                continue;
            };
            if overlaid.is_stable_mapped(page) || !overlaid.may_map(range, slot) {
                continue;
            }
            // SAFETY: both are mapped pages, read through pointers.
            let order = unsafe {
                libc::memcmp(
                    piece.address as *const _,
                    address as *const _,
                    PAGE_SIZE_BYTES as usize,
                )
            };
            if order == 0 {
                same.push((page, slot, segment, piece));
            }
        }
        outcomes.resize(pages.len(), MergeOutcome::Gone);
        for (page, slot, segment, piece) in same {
            // SAFETY: not upheld: this is the control, whose memory belongs to a test that counts
            // lost writes.
            if unsafe { segment.map_over(slot.index, 1, piece.address, None) }.is_ok() {
                overlaid.note_merged(GuestRange::new(page, 1), slot);
                if let Some(index) = pages.iter().position(|(of, _)| *of == page) {
                    outcomes[index] = MergeOutcome::Done;
                }
            }
        }
    }
}

/// A thread that writes to its own pages, and knows their expected content.
struct Writer<'a> {
    ram: &'a GuestRam,
    pages: Vec<Pfn>,
    /// Expected content of each page.
    shadows: Vec<[u64; WORDS]>,
    /// The word of each page that is not the pattern's, with the pattern's value.
    changed: Vec<Option<(usize, u64)>>,
    random: u64,
    report: Report,
}

impl<'a> Writer<'a> {
    fn new(ram: &'a GuestRam, stress: &Stress, number: usize) -> Self {
        // Runs of 32 pages, so that runs of merged pages are longer than one page and their
        // neighbours belong to another writer.
        let own = |page: &u64| (page / 32) as usize % stress.writers == number;
        let pages: Vec<Pfn> = (0..stress.pages).filter(own).map(Pfn).collect();
        Self {
            ram,
            shadows: vec![[0; WORDS]; pages.len()],
            changed: vec![None; pages.len()],
            pages,
            random: 0x9e37_79b9_7f4a_7c15 ^ (number as u64 + 1),
            report: Report::default(),
        }
    }

    fn run(mut self, writes: u64) -> Result<Report, StressError> {
        while self.report.writes < writes {
            self.step()?;
        }
        for index in 0..self.pages.len() {
            for word in 0..WORDS {
                self.check(index, word);
            }
        }
        Ok(self.report)
    }

    fn step(&mut self) -> Result<(), StressError> {
        let random = self.next();
        let index = (random >> 8) as usize % self.pages.len();
        let word = (random >> 40) as usize % WORDS;
        self.check(index, word);
        if random.is_multiple_of(256) {
            return self.renew(index);
        }
        self.report.writes += 1;
        if let Some((word, of_pattern)) = self.changed[index].take() {
            self.check(index, word);
            self.write(index, word, of_pattern);
        } else {
            self.changed[index] = Some((word, self.shadows[index][word]));
            self.write(index, word, random | 0xff);
        }
        Ok(())
    }

    /// Discards the pages around one, and fills them with a pattern.
    fn renew(&mut self, index: usize) -> Result<(), StressError> {
        let first = index / 32 * 32;
        let last = self.pages.len().min(first + 32);
        let range = GuestRange::new(self.pages[first], (last - first) as u64);
        self.ram.discard(&[range])?;
        self.report.discarded += range.pages;
        let pattern = self.next() % PATTERNS;
        for index in first..last {
            self.shadows[index] = [0; WORDS];
            self.changed[index] = None;
            let word = (self.next() >> 40) as usize % WORDS;
            self.check(index, word);
            for word in 0..WORDS {
                let value = value(pattern, word);
                if value != 0 {
                    self.write(index, word, value);
                }
            }
        }
        Ok(())
    }

    /// Counts a word with an unexpected value.
    fn check(&mut self, index: usize, word: usize) {
        let found = self.word(index, word).load(Ordering::Relaxed);
        if found != self.shadows[index][word] {
            self.report.lost += 1;
            self.shadows[index][word] = found;
        }
    }

    fn write(&mut self, index: usize, word: usize, value: u64) {
        self.word(index, word).store(value, Ordering::Relaxed);
        self.shadows[index][word] = value;
    }

    fn word(&self, index: usize, word: usize) -> &AtomicU64 {
        let address =
            self.ram.host_address(GuestRange::new(self.pages[index], 1)).unwrap_or_default();
        // SAFETY: the word is guest memory of `self.ram`, aligned, and accessed only with atomics;
        // the kernel may replace the page, which is what is tested here.
        unsafe { AtomicU64::from_ptr((address + word * 8) as *mut u64) }
    }

    /// xorshift64*
    fn next(&mut self) -> u64 {
        self.random ^= self.random >> 12;
        self.random ^= self.random << 25;
        self.random ^= self.random >> 27;
        self.random.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
}

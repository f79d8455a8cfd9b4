//! Saving memory that is in use: the file gets its content at one moment.
//!
//! At that moment, while nothing writes, all populated pages are write-protected (userfaultfd).
//! Then memory may be used again, and one thread writes it to the file in order, block by block,
//! and releases each block. Between blocks it looks for threads that wait to write: a block with
//! such a page is written to its place in the file at once and released. When the order arrives
//! there, its content is read back from the file for the checksum, so that no memory is needed for
//! copies.
//!
//! # Which pages are saved
//! A page is saved if the kernel reports it as protected when its block's turn comes. Pages that
//! were absent at the moment cannot be protected; one that is allocated later is not, so it is a
//! page of zeros in the file, as it was. So neither the moment itself nor the save must search
//! memory for populated pages.
//!
//! Three things would make a page lose its protection, and are excluded: discards (inhibited),
//! merging by the monitor, and by the kernel (Linux mm/ksm.c, `replace_page`). Swapping, migration
//! and splits of huge pages keep it.
//!
//! # Deadlocks
//! Any thread that writes to memory may wait for the thread that saves, whatever locks it holds. So
//! that one takes no lock but the inhibitors' at the end, which no thread holds while discards are
//! inhibited, and never writes to guest memory.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, TryLockError};

use ebb_abi::{HUGE_PAGE_SIZE_BYTES, PAGE_SIZE_BYTES};
use vm_memory::GuestAddress;

use super::{BUFFER_BYTES, BackgroundUnavailable, Output, check_cancelled, copy_out};
use crate::image::{CHUNK_BYTES, nonzero_runs};
use crate::mapping::Mapping;
use crate::pagemap::Pagemap;
use crate::uffd::{Userfaultfd, Watch, must_succeed};
use crate::{
    Backing, GuestRam, HugePages, InhibitGuard, InhibitReason, RamError, RamImage, Region,
    RegionSpec, UffdUnavailable,
};

/// Bytes that are released when a page of them is written to, without huge pages.
const SMALL_BLOCK_BYTES: u64 = 64 << 10;

/// Bytes that are saved and released in one go, in order: as many as a writer may have to wait for
/// in addition to its own block.
const STEP_BYTES: u64 = 512 << 10;

impl GuestRam {
    /// Prepares the process for saving this memory while it is in use. Must be called while files
    /// can be opened.
    ///
    /// # Errors
    /// [`BackgroundUnavailable`]: it can only be saved while nothing writes to it.
    pub fn enable_background_saves(&self) -> Result<(), BackgroundUnavailable> {
        self.enable_with(Userfaultfd::open_protecting)
    }

    /// As [`enable_background_saves`](Self::enable_background_saves), in a forked process, where a
    /// userfaultfd of the former one is of no use. `device` is /dev/userfaultfd, which another
    /// process has opened.
    ///
    /// # Errors
    /// As there.
    pub fn enable_background_saves_by(&self, device: &File) -> Result<(), BackgroundUnavailable> {
        self.enable_with(|| Userfaultfd::open_protecting_by(device))
    }

    fn enable_with(
        &self,
        open: impl FnOnce() -> Result<Userfaultfd, UffdUnavailable>,
    ) -> Result<(), BackgroundUnavailable> {
        if self.backing() != Backing::Anonymous {
            return Err(BackgroundUnavailable::Backing { backing: self.backing() });
        }
        if self.overlay.get().is_some() {
            return Err(BackgroundUnavailable::Overlay);
        }
        if is_merged_by_kernel() {
            return Err(BackgroundUnavailable::KernelMerging);
        }
        let pagemap = self.pagemap.as_ref().ok_or(BackgroundUnavailable::NoPagemap)?;
        let userfaultfd = open()?;
        check_protection(&userfaultfd, pagemap)?;
        if let Some(former) = self.protection.get() {
            match former.try_lock() {
                Ok(mut former) => *former = userfaultfd,
                Err(TryLockError::Poisoned(poisoned)) => *poisoned.into_inner() = userfaultfd,
                Err(TryLockError::WouldBlock) => return Err(BackgroundUnavailable::InUse),
            }
        } else {
            // It is set once: the machine is not built yet.
            let _ = self.protection.set(Mutex::new(userfaultfd));
        }
        Ok(())
    }

    /// Begins to save this memory: discards are inhibited from now on, and memory is registered for
    /// protection. It may be in use. System calls: `getpid`, `ioctl` (`UFFDIO_REGISTER`; in the end
    /// `UFFDIO_UNREGISTER`, `UFFDIO_WAKE`).
    ///
    /// # Errors
    /// [`BackgroundUnavailable`]: as if nothing had been begun.
    pub fn prepare_background_save(&self) -> Result<PreparedSave<'_>, BackgroundUnavailable> {
        let protection = self.protection.get().ok_or(BackgroundUnavailable::NotEnabled)?;
        if self.overlay.get().is_some() {
            return Err(BackgroundUnavailable::Overlay);
        }
        let userfaultfd = match protection.try_lock() {
            Ok(userfaultfd) => userfaultfd,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Err(BackgroundUnavailable::InUse),
        };
        if !userfaultfd.is_of_this_process() {
            return Err(BackgroundUnavailable::Forked);
        }
        let inhibited = self.inhibit_discard(InhibitReason::BackgroundSnapshot);
        // Before anything is registered: it is unregistered even after an error.
        let watched = Watched { ram: self, userfaultfd, _inhibited: inhibited };
        for region in self.regions() {
            let (address, size_bytes) = (region.host_address as usize, region.size_bytes as usize);
            // SAFETY: threads that wait to write are woken when `watched` is dropped at the latest.
            unsafe { watched.userfaultfd.watch(address, size_bytes, Watch::Writes) }
                .map_err(|source| BackgroundUnavailable::Watch { source })?;
        }
        Ok(PreparedSave(watched))
    }

    /// Bytes that are saved and released together when one of their pages is written to. Whole huge
    /// pages, since to release a part of one would split it.
    fn block_bytes(&self) -> u64 {
        match self.huge_pages() {
            HugePages::On => HUGE_PAGE_SIZE_BYTES,
            HugePages::Off => SMALL_BLOCK_BYTES,
        }
    }
}

/// Memory that is registered for protection. Dropping it releases all pages, and discards work
/// again.
struct Watched<'a> {
    ram: &'a GuestRam,
    userfaultfd: MutexGuard<'a, Userfaultfd>,
    _inhibited: InhibitGuard,
}

impl Drop for Watched<'_> {
    fn drop(&mut self) {
        for region in self.ram.regions() {
            let (address, size_bytes) = (region.host_address as usize, region.size_bytes as usize);
            must_succeed("guest memory cannot be released", || {
                self.userfaultfd.forget(address, size_bytes)
            });
            must_succeed("threads that wait for a guest page cannot be woken", || {
                self.userfaultfd.wake(address, size_bytes)
            });
        }
    }
}

/// A save whose moment has not come.
#[must_use = "dropping it gives up the save"]
pub struct PreparedSave<'a>(Watched<'a>);

impl<'a> PreparedSave<'a> {
    /// Protects the memory as it is now: nothing may write to it during the call. Afterwards,
    /// threads that write to protected pages wait for [`BackgroundSave::write`]. The caller must
    /// not be one of them.
    ///
    /// One system call for each region, `ioctl` (`UFFDIO_WRITEPROTECT`), whose cost is that of a
    /// walk through the page tables.
    ///
    /// # Errors
    /// [`RamError::Protect`]; nothing is protected then.
    pub fn protect(self) -> Result<BackgroundSave<'a>, RamError> {
        for region in self.0.ram.regions() {
            self.0
                .userfaultfd
                .protect(region.host_address as usize, region.size_bytes as usize)
                .map_err(|source| RamError::Protect { source })?;
        }
        Ok(BackgroundSave(self.0))
    }
}

/// Memory to be saved as it was when it was protected.
#[must_use = "dropping it gives up the save; until then, threads that write may wait"]
pub struct BackgroundSave<'a>(Watched<'a>);

impl BackgroundSave<'_> {
    /// As [`GuestRam::save_unless`], for memory in use; all of it is released at the end. The file
    /// must also be open for reading.
    ///
    /// `is_cancelled` is called for each block. A thread that writes waits for at most two blocks.
    /// System calls: `read`, `pread64`, `pwrite64`, `ioctl` (`UFFDIO_WRITEPROTECT` and at the end
    /// those of [`GuestRam::prepare_background_save`]), and those of [`GuestRam::save`].
    ///
    /// # Errors
    /// As for [`GuestRam::save_unless`], and [`RamError::Protect`] if a block cannot be released.
    pub fn write(
        self,
        file: &File,
        file_offset_bytes: u64,
        progress: &mut dyn FnMut(u64),
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<RamImage, RamError> {
        let ram = self.0.ram;
        let mut pass = Pass {
            ram,
            userfaultfd: &self.0.userfaultfd,
            pagemap: ram.pagemap.as_ref().ok_or_else(no_pagemap)?,
            output: Output::new(ram, file, file_offset_bytes)?,
            is_cancelled,
            buffer: vec![0; BUFFER_BYTES as usize],
            done_bytes: 0,
            early: BTreeMap::new(),
            early_bytes: 0,
            faults: Vec::new(),
        };
        for region in ram.regions() {
            pass.write_region(region, progress)?;
        }
        let early_bytes = pass.early_bytes;
        tracing::debug!("{early_bytes} bytes were saved early, because they were written to");
        pass.output.finish()
    }
}

/// A piece of one region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Block {
    guest_address: u64,
    host_address: usize,
    /// RAM offset.
    offset_bytes: u64,
    size_bytes: u64,
}

impl Block {
    /// All of a region, which begins at a RAM offset.
    fn of(region: &Region, offset_bytes: u64) -> Self {
        Self {
            guest_address: region.start.0,
            host_address: region.host_address as usize,
            offset_bytes,
            size_bytes: region.size_bytes,
        }
    }

    fn end_bytes(self) -> u64 {
        self.offset_bytes + self.size_bytes
    }

    /// The first piece of this one that ends at a multiple of `unit_bytes` or with it.
    fn first(self, unit_bytes: u64) -> Self {
        let aligned_bytes = unit_bytes - self.guest_address % unit_bytes;
        Self { size_bytes: self.size_bytes.min(aligned_bytes), ..self }
    }

    /// What is left without the first bytes.
    fn without(self, bytes: u64) -> Self {
        Self {
            guest_address: self.guest_address + bytes,
            host_address: self.host_address + bytes as usize,
            offset_bytes: self.offset_bytes + bytes,
            size_bytes: self.size_bytes - bytes,
        }
    }

    /// The pieces between multiples of `unit_bytes`.
    fn pieces(self, unit_bytes: u64) -> impl Iterator<Item = Self> {
        let mut rest = self;
        std::iter::from_fn(move || {
            let piece = rest.first(unit_bytes);
            rest = rest.without(piece.size_bytes);
            (piece.size_bytes > 0).then_some(piece)
        })
    }
}

/// Why a block is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    /// All before it is in the file.
    InOrder,
    /// A thread waits to write to it.
    Early,
}

/// A save in progress.
struct Pass<'a> {
    ram: &'a GuestRam,
    userfaultfd: &'a Userfaultfd,
    pagemap: &'a Pagemap,
    output: Output<'a>,
    is_cancelled: &'a dyn Fn() -> bool,
    buffer: Vec<u8>,
    /// RAM offset up to which everything is saved.
    done_bytes: u64,
    /// Blocks behind it that are in the file already, by RAM offset: their data, also as RAM
    /// offsets.
    early: BTreeMap<u64, Vec<Range<u64>>>,
    early_bytes: u64,
    /// Addresses of pages that threads wait to write to; kept for its allocation.
    faults: Vec<usize>,
}

impl Pass<'_> {
    fn write_region(
        &mut self,
        region: &Region,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), RamError> {
        let whole = Block::of(region, self.done_bytes);
        for step in whole.pieces(STEP_BYTES.max(self.ram.block_bytes())) {
            self.answer_faults()?;
            self.write_step(step)?;
            let is_last = step.end_bytes() == self.ram.size_bytes();
            if is_last || step.offset_bytes / CHUNK_BYTES < step.end_bytes() / CHUNK_BYTES {
                progress(step.end_bytes());
            }
        }
        Ok(())
    }

    /// Writes what comes next.
    fn write_step(&mut self, step: Block) -> Result<(), RamError> {
        let mut is_protected = false;
        for block in step.pieces(self.ram.block_bytes()) {
            match self.early.remove(&block.offset_bytes) {
                Some(data) => self.note_early(data)?,
                None => is_protected |= self.write_block(block, Turn::InOrder)?.is_some(),
            }
        }
        if is_protected {
            self.release(step)?;
        }
        self.done_bytes = step.end_bytes();
        Ok(())
    }

    /// Lets all threads go on that wait now.
    fn answer_faults(&mut self) -> Result<(), RamError> {
        check_cancelled(self.is_cancelled)?;
        let mut faults = std::mem::take(&mut self.faults);
        self.userfaultfd.read_faults(&mut faults).map_err(|source| RamError::Protect { source })?;
        for address in faults.drain(..) {
            check_cancelled(self.is_cancelled)?;
            let Some(block) = self.block_of(address) else { continue };
            if block.offset_bytes >= self.done_bytes
                && !self.early.contains_key(&block.offset_bytes)
            {
                let data = self.write_block(block, Turn::Early)?.unwrap_or_default();
                self.early.insert(block.offset_bytes, data);
            }
            // A block that was released before may have waiting threads, too: they are woken.
            self.release(block)?;
        }
        self.faults = faults;
        Ok(())
    }

    /// The block with a host address.
    fn block_of(&self, address: usize) -> Option<Block> {
        let (address, unit_bytes) = (address as u64, self.ram.block_bytes());
        let mut region_offset_bytes = 0;
        for region in self.ram.regions() {
            if (region.host_address..region.host_address + region.size_bytes).contains(&address) {
                let guest_address = region.start.0 + (address - region.host_address);
                let start = (guest_address - guest_address % unit_bytes).max(region.start.0);
                let whole = Block::of(region, region_offset_bytes);
                return Some(whole.without(start - region.start.0).first(unit_bytes));
            }
            region_offset_bytes += region.size_bytes;
        }
        None
    }

    /// Writes the protected pages of a block to the file, except zeros. Returns where, if it has
    /// any.
    fn write_block(
        &mut self,
        block: Block,
        turn: Turn,
    ) -> Result<Option<Vec<Range<u64>>>, RamError> {
        let pages = (block.size_bytes / PAGE_SIZE_BYTES) as usize;
        let states = self
            .pagemap
            .read(block.host_address, pages)
            .map_err(|source| RamError::Resident { source })?;
        let mut written: Option<Vec<Range<u64>>> = None;
        let mut rest = block;
        for same in states.chunk_by(|one, other| one.is_protected() == other.is_protected()) {
            let run = Block { size_bytes: same.len() as u64 * PAGE_SIZE_BYTES, ..rest };
            rest = rest.without(run.size_bytes);
            if !same[0].is_protected() {
                continue;
            }
            let written = written.get_or_insert_default();
            for piece in run.pieces(BUFFER_BYTES) {
                let content = &mut self.buffer[..piece.size_bytes as usize];
                copy_out(self.ram, piece.guest_address, content)?;
                for data in nonzero_runs(content) {
                    let offset_bytes = piece.offset_bytes + data.start as u64;
                    let data = &content[data];
                    self.output.store(offset_bytes, data, self.done_bytes)?;
                    match turn {
                        Turn::InOrder => self.output.note(offset_bytes, data),
                        Turn::Early => written.push(offset_bytes..offset_bytes + data.len() as u64),
                    }
                }
            }
        }
        Ok(written)
    }

    /// Notes data that was written early.
    fn note_early(&mut self, data: Vec<Range<u64>>) -> Result<(), RamError> {
        for Range { start, end } in data {
            for offset_bytes in (start..end).step_by(BUFFER_BYTES as usize) {
                let length = (end - offset_bytes).min(BUFFER_BYTES) as usize;
                let content = &mut self.buffer[..length];
                self.output.load(offset_bytes, content)?;
                self.output.note(offset_bytes, content);
                self.early_bytes += length as u64;
            }
        }
        Ok(())
    }

    fn release(&self, block: Block) -> Result<(), RamError> {
        self.userfaultfd
            .unprotect(block.host_address, block.size_bytes as usize)
            .map_err(|source| RamError::Protect { source })
    }
}

fn no_pagemap() -> RamError {
    RamError::Resident { source: std::io::ErrorKind::Unsupported.into() }
}

/// Whether the kernel may merge all anonymous memory of this process.
fn is_merged_by_kernel() -> bool {
    // SAFETY: the call has no other arguments and changes nothing. Kernels without it refuse it.
    unsafe { libc::prctl(PR_GET_MEMORY_MERGE, 0, 0, 0, 0) == 1 }
}

/// include/uapi/linux/prctl.h
const PR_GET_MEMORY_MERGE: libc::c_int = 68;

/// Tries the protection, and the report of it, on a page mapped for this purpose.
fn check_protection(
    userfaultfd: &Userfaultfd,
    pagemap: &Pagemap,
) -> Result<(), BackgroundUnavailable> {
    let refused = |source| BackgroundUnavailable::Watch { source };
    let spec = RegionSpec { start: GuestAddress(0), size_bytes: PAGE_SIZE_BYTES, host_node: None };
    let page = Mapping::new(&spec, Backing::Anonymous, HugePages::Off)
        .map_err(|error| refused(std::io::Error::other(error)))?;
    let (address, size_bytes) = (page.address(), page.size_bytes());
    // SAFETY: the page was mapped above, writable, and nothing else uses it.
    unsafe { (address as *mut u8).write_volatile(1) };
    // SAFETY: no thread accesses the page while it is protected.
    unsafe { userfaultfd.watch(address, size_bytes, Watch::Writes) }.map_err(refused)?;
    let states = userfaultfd
        .protect(address, size_bytes)
        .and_then(|()| pagemap.read(address, 1))
        .map_err(refused);
    userfaultfd.forget(address, size_bytes).map_err(refused)?;
    if states?.iter().all(|state| state.is_protected()) {
        Ok(())
    } else {
        Err(BackgroundUnavailable::NotReported)
    }
}

#[cfg(test)]
mod tests;

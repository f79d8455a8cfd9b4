//! Coalesces memory that lies in many small VMAs.
//!
//! Merging, writes and discards leave many mappings behind, and the kernel joins few of them: each
//! has private pages that came from elsewhere. Where nothing is merged any more they serve no
//! purpose, and the number of mappings of a process is limited.
//!
//! So all pages of neighbouring mappings of ordinary memory are moved away (`UFFDIO_MOVE`), to a
//! mapping that then replaces all of them. As with pages that are [compared](super::freeze), an
//! access to them blocks meanwhile, and a page that is pinned cannot be moved: then all of them are
//! moved back. No page is copied, and none changes its content.

use std::sync::Arc;

use ebb_abi::PAGE_SIZE_BYTES;
use rustix::io::Errno;

use super::merging::Merging;
use super::scan::Question;
use super::session::MergeSession;
use crate::GuestRange;
use crate::discard::Piece;
use crate::overlay::FileExtents;
use crate::ranges::gaps;
use crate::uffd::{Watch, must_succeed};

const PAGE: usize = PAGE_SIZE_BYTES as usize;

/// Minimum number of neighbouring mappings worth coalescing.
const LEAST_MAPPINGS: usize = 4;

/// Maximum number of repetitions of a move, at the kernel's request, without progress.
const MOVE_ATTEMPTS: u32 = 8;

impl MergeSession {
    /// Coalesces small mappings of a block, if it is due.
    pub(super) fn coalesce_vmas(&mut self, block: GuestRange) {
        if !self.sampler.is_next() {
            return;
        }
        let ram = Arc::clone(&self.ram);
        let (Some(merging), Some(mut overlaid)) = (ram.merging(), ram.lock_overlay()) else {
            return;
        };
        let of_files: Vec<GuestRange> = overlaid.mapped(block).map(|(part, _)| part).collect();
        for ordinary in gaps(block, &of_files) {
            let mappings = overlaid.vmas.within(ordinary);
            let (Some(first), Some(last)) = (mappings.first(), mappings.last()) else { continue };
            let range = GuestRange::new(first.start, last.end().0 - first.start.0);
            if mappings.len() >= LEAST_MAPPINGS
                && let Some(piece) = ram.piece(range)
            {
                self.join(merging, &mut overlaid, &piece, &mappings);
            }
        }
    }

    /// Coalesces `mappings`, or parts of some, which `piece` consists of. Returns true if it is one
    /// mapping now.
    pub(super) fn join(
        &mut self,
        merging: &Merging,
        overlaid: &mut FileExtents,
        piece: &Piece<'_>,
        mappings: &[GuestRange],
    ) -> bool {
        let size_bytes = piece.range.size_bytes() as usize;
        // The destination of a move must be watched, too.
        let scratch = merging.scratch.empty_for(piece).and_then(|scratch| {
            merging.watch_writes_again(scratch, size_bytes)?;
            Ok(scratch)
        });
        let scratch = match scratch {
            Ok(scratch) => scratch,
            Err(error) => {
                tracing::debug!("no memory to coalesce mappings: {error}");
                return false;
            }
        };
        // SAFETY: blocked threads are woken below, whatever happens in between.
        let watched =
            unsafe { merging.uffd.watch(piece.address, size_bytes, Watch::WritesAndMissing) };
        let is_joined = watched.is_ok()
            && mappings.iter().all(|mapping| {
                let (place, away, size_bytes) = places(piece, scratch, *mapping);
                self.move_all(merging, place, away, size_bytes)
            })
            // SAFETY: all pages of the piece have been moved to the scratch area.
            && unsafe { merging.scratch.put(piece) }
                .inspect_err(|error| {
                    tracing::debug!("{} stays in its mappings: {error}", piece.range);
                })
                .is_ok();
        if is_joined {
            overlaid.note_coalesced(piece.range);
        } else {
            for mapping in mappings {
                let (place, away, size_bytes) = places(piece, scratch, *mapping);
                self.move_back(merging, away, place, size_bytes);
            }
            must_succeed("the place of moved pages cannot be released", || {
                merging.uffd.forget(piece.address, size_bytes)
            });
            if !self.watch_range(piece.range) {
                self.unwatched.push(piece.range);
            }
        }
        must_succeed("threads that wait for a guest page cannot be woken", || {
            merging.uffd.wake(piece.address, size_bytes)
        });
        is_joined
    }

    /// Moves all pages at `from`, within one mapping, to `to`. Returns true if none is left.
    fn move_all(&mut self, merging: &Merging, from: usize, to: usize, size_bytes: usize) -> bool {
        let mut attempts = 0;
        let mut done = 0;
        while done < size_bytes {
            // SAFETY: both are anonymous memory of this crate's mappings, to which no Rust
            // reference exists, and an access to guest memory among them blocks until this is over.
            let moved = unsafe {
                merging.uffd.move_what_is_there(from + done, to + done, size_bytes - done)
            };
            done += moved.bytes;
            attempts = if moved.bytes > 0 { 0 } else { attempts + 1 };
            match moved.stopped.filter(|_| moved.bytes == 0) {
                None => {}
                Some(Errno::AGAIN) if attempts <= MOVE_ATTEMPTS => std::thread::yield_now(),
                // The kernel may have moved more than it counts.
                Some(Errno::EXIST) => {
                    let left = self.first_page(from + done, size_bytes - done);
                    match left {
                        None => return true,
                        Some(0) => return false,
                        Some(bytes) => (done, attempts) = (done + bytes, 0),
                    }
                }
                Some(_) => return false,
            }
        }
        self.first_page(from, size_bytes).is_none()
    }

    /// Moves all pages at `from` back, by copying them if necessary.
    fn move_back(&mut self, merging: &Merging, from: usize, to: usize, size_bytes: usize) {
        if self.move_all(merging, from, to, size_bytes) {
            return;
        }
        let mut done = 0;
        while let Some(bytes) = self.first_page(from + done, size_bytes - done) {
            let place = done + bytes;
            must_succeed("a guest page that was moved away cannot be moved back", || {
                // SAFETY: the page is in the scratch area, and its place is watched guest memory.
                unsafe { merging.uffd.copy_page(from + place, to + place, PAGE) }
            });
            done = place + PAGE;
        }
    }

    /// Offset of the first page with content, in bytes from `address` on.
    fn first_page(&mut self, address: usize, size_bytes: usize) -> Option<usize> {
        let mut first = None;
        must_succeed("the location of guest pages cannot be determined", || {
            let found = self.scan.ask(address, size_bytes, Question::Any)?;
            first = found.first().map(|run| run.address() - address);
            Ok(())
        });
        first
    }
}

/// Address of a mapping of `piece`, address of its pages while moved away, and its size in bytes.
fn places(piece: &Piece<'_>, scratch: usize, mapping: GuestRange) -> (usize, usize, usize) {
    let offset_bytes = (mapping.start.address() - piece.range.start.address()) as usize;
    (piece.address + offset_bytes, scratch + offset_bytes, mapping.size_bytes() as usize)
}

//! Moves shares to other stable pages with the same content.
//!
//! Neither of the two stable pages changes while it is held, so they are compared in place. Only
//! what the guest writes before the one is mapped over the other must not be lost: as when pages
//! are unmerged, writes block meanwhile, and pages that have a private copy stay as they are.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use ebb_abi::{PAGE_SIZE_BYTES, Pfn};

use super::StableSlot;
use super::freeze::MergeOutcome;
use super::session::MergeSession;
use super::stable::Segment;
use crate::GuestRange;
use crate::overlay::FileExtents;

impl MergeSession {
    /// Appends the slots that the pages of `range` share, in ascending order of the pages.
    pub fn slots(&self, range: GuestRange, slots: &mut Vec<(Pfn, StableSlot)>) {
        let Some(overlaid) = self.ram.lock_overlay() else { return };
        for (part, first) in overlaid.shares(range) {
            slots.extend(
                (0..part.pages).map(|page| (Pfn(part.start.0 + page), first.offset(page as u32))),
            );
        }
    }

    /// Makes pages share other stable pages with the same content: `pages` are ascending, each with
    /// its new slot, which must be allocated. `outcomes` gets an entry for each: with
    /// [`MergeOutcome::Done`] the page shares the new one, and
    /// [`take_released`](Self::take_released) reports the former one; with all others nothing has
    /// changed.
    pub fn move_shares(&mut self, pages: &[(Pfn, StableSlot)], outcomes: &mut Vec<MergeOutcome>) {
        let ram = Arc::clone(&self.ram);
        let region = |page: Pfn| ram.piece(GuestRange::new(page, 1)).map(|piece| piece.region);
        let are_one = |left: &(Pfn, StableSlot), right: &(Pfn, StableSlot)| {
            left.0.0 + 1 == right.0.0
                && left.1.is_followed_by(right.1)
                && left.0.huge_block() == right.0.huge_block()
                && region(left.0) == region(right.0)
        };
        for run in pages.chunk_by(are_one) {
            let before = outcomes.len();
            outcomes.resize(before + run.len(), MergeOutcome::Gone);
            // Not longer than a run: a discard waits for it.
            if let Some(mut overlaid) = ram.lock_overlay() {
                self.move_run(&mut overlaid, run, &mut outcomes[before..]);
            }
        }
    }

    /// The same for neighbours in a block that go to neighbouring slots.
    fn move_run(
        &self,
        overlaid: &mut FileExtents,
        run: &[(Pfn, StableSlot)],
        outcomes: &mut [MergeOutcome],
    ) {
        let Some(target) = self.merging().segments.get(run[0].1.segment) else { return };
        for (&(page, to), outcome) in run.iter().zip(&mut *outcomes) {
            *outcome = self.compare_stable(overlaid.share_of(page), to, &target);
        }
        // Those that may be moved are done until something else is found.
        for part in done(outcomes) {
            let (first, slot) = run[part.start];
            let range = GuestRange::new(first, part.len() as u64);
            let outcomes = &mut outcomes[part];
            if let Err(error) = self.move_part(overlaid, range, slot, &target, outcomes) {
                tracing::debug!("shares at {range} cannot be moved: {error}");
                outcomes.fill(MergeOutcome::Busy);
            }
        }
    }

    /// Whether a share may be moved, as its outcome.
    fn compare_stable(
        &self,
        from: Option<StableSlot>,
        to: StableSlot,
        target: &Segment,
    ) -> MergeOutcome {
        let Some(from) = from.filter(|from| *from != to) else { return MergeOutcome::Gone };
        let segment = self.merging().segments.get(from.segment);
        let address = segment.as_ref().and_then(|segment| segment.address(from.index, 1));
        let (Some(from), Some(to)) = (address, target.address(to.index, 1)) else {
            return MergeOutcome::Gone;
        };
        // SAFETY: each is a page of a segment, which is mapped for reading as long as `segment` and
        // `target` live. memcmp reads both through pointers.
        let order =
            unsafe { libc::memcmp(from as *const _, to as *const _, PAGE_SIZE_BYTES as usize) };
        if order == 0 { MergeOutcome::Done } else { MergeOutcome::Different }
    }

    /// Maps equal stable pages, from `slot` on, over `range`, whose pages all share stable pages. If
    /// this fails, none is moved.
    fn move_part(
        &self,
        overlaid: &mut FileExtents,
        range: GuestRange,
        slot: StableSlot,
        target: &Segment,
        outcomes: &mut [MergeOutcome],
    ) -> io::Result<()> {
        let may = |overlaid: &FileExtents| overlaid.may_map(range, slot);
        if !self.merging().may(self.ram.regions(), overlaid, may) {
            outcomes.fill(MergeOutcome::NoMappings);
            return Ok(());
        }
        self.while_writes_block(range, || {
            for (state, outcome) in self.states(range)?.into_iter().zip(&mut *outcomes) {
                // It was written to: the next scan reports it.
                if state.is_private() {
                    *outcome = MergeOutcome::Gone;
                }
            }
            for part in done(outcomes) {
                let first = part.start as u64;
                let range = GuestRange::new(Pfn(range.start.0 + first), part.len() as u64);
                let slot = slot.offset(first as u32);
                let Some(piece) = self.ram.piece(range) else { continue };
                let node = self.ram.regions()[piece.region].host_node;
                // SAFETY: the range is guest memory that is not written to, and its pages are equal
                // to those mapped there.
                match unsafe {
                    target.map_over(slot.index, range.pages as u32, piece.address, node)
                } {
                    Ok(()) => overlaid.note_merged(range, slot),
                    Err(error) => {
                        tracing::debug!("stable pages cannot be mapped over {range}: {error}");
                        outcomes[part].fill(MergeOutcome::NoMappings);
                    }
                }
            }
            Ok(())
        })
    }
}

/// The runs of outcomes that are [`MergeOutcome::Done`].
fn done(outcomes: &[MergeOutcome]) -> Vec<Range<usize>> {
    let is_done = |place: usize| outcomes[place] == MergeOutcome::Done;
    let places: Vec<usize> = (0..outcomes.len()).filter(|place| is_done(*place)).collect();
    let runs = places.chunk_by(|left, right| left + 1 == *right);
    runs.map(|run| run[0]..run[0] + run.len()).collect()
}

//! Parts of guest memory that may contain something other than zeros, and the best source to read
//! them from.

use std::fs::File;
use std::io;
use std::ops::Range;

use ebb_abi::{PAGE_SIZE_BYTES, Pfn};

use crate::holes::{data_segments, mapped_data_segments};
use crate::overlay::Source;
use crate::{Backing, GuestRam, GuestRange};

/// A run of pages that may contain data.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PopulatedRun<'a> {
    /// Guest pages, within one region.
    pub(crate) range: GuestRange,
    /// Location of their content.
    pub(crate) content: Content<'a>,
}

/// Location of the content of pages.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Content<'a> {
    /// In memory or swap space.
    Memory,
    /// In a file, from this offset in bytes on. Read from there, pages need not be mapped, and
    /// holes of the file get no page: reading a hole through a mapping would allocate one
    /// (hugetlbfs, tmpfs).
    File(&'a File, u64),
}

/// Location of the content of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PageContent {
    Nothing,
    Memory,
    Snapshot,
}

impl GuestRam {
    /// The runs of `range`, which must lie within one region, that may contain data, in ascending
    /// order. Pages in none of them are zero.
    pub(crate) fn populated_runs(&self, range: GuestRange) -> io::Result<Vec<PopulatedRun<'_>>> {
        let Some(piece) = self.piece(range) else { return Ok(Vec::new()) };
        if let Some((file, offset)) = piece.file {
            let in_file = offset..offset + range.size_bytes();
            let segments = match self.backing() {
                // mincore reports only huge pages that are mapped.
                Backing::Hugetlb2M => data_segments(file, in_file)?,
                Backing::Memfd | Backing::Anonymous => {
                    mapped_data_segments(file, in_file, piece.address)?
                }
            };
            return Ok(runs_of_segments(file, offset, range, segments));
        }
        // Pages that are being merged look absent.
        let extents = self.lock_overlay();
        let states = self.pagemap.as_ref().and_then(|pagemap| {
            let states = pagemap.read(piece.address, range.pages as usize);
            states
                .inspect_err(|error| {
                    tracing::warn!("/proc/self/pagemap: {error}; looking at all pages");
                })
                .ok()
        });
        let Some(states) = states else {
            // Nothing else reports pages in swap space: each must be examined, which costs time and
            // page tables.
            return Ok(vec![PopulatedRun { range, content: Content::Memory }]);
        };
        let mut contents: Vec<_> = states
            .iter()
            .map(
                |state| if state.is_private() { PageContent::Memory } else { PageContent::Nothing },
            )
            .collect();
        for (part, source) in extents.iter().flat_map(|extents| extents.mapped(range)) {
            let first = (part.start.0 - range.start.0) as usize;
            let contents = contents[first..first + part.pages as usize].iter_mut();
            match source {
                Source::Snapshot => {
                    contents.filter(|content| **content == PageContent::Nothing).for_each(
                        |content| {
                            *content = PageContent::Snapshot;
                        },
                    );
                }
                // Read from memory, whether or not an access has mapped the stable page since it
                // was put there.
                #[cfg(feature = "merge")]
                Source::Stable(_) => contents.for_each(|content| *content = PageContent::Memory),
            }
        }
        drop(extents);
        let mut runs = Vec::new();
        let mut first = range.start;
        for same in contents.chunk_by(PartialEq::eq) {
            let part = GuestRange::new(first, same.len() as u64);
            first = part.end();
            match (same[0], self.snapshot()) {
                (PageContent::Memory, _) => {
                    runs.push(PopulatedRun { range: part, content: Content::Memory });
                }
                (PageContent::Snapshot, Some(snapshot)) => {
                    let (file, offset) = snapshot.at(self.ram_offset_bytes(part.start));
                    runs.append(&mut runs_of_file(file, offset, part)?);
                }
                _ => {}
            }
        }
        Ok(runs)
    }
}

/// The runs of `range` for which `file`, from `offset` on, has data.
fn runs_of_file(file: &File, offset: u64, range: GuestRange) -> io::Result<Vec<PopulatedRun<'_>>> {
    let segments = data_segments(file, offset..offset + range.size_bytes())?;
    Ok(runs_of_segments(file, offset, range, segments))
}

/// The runs of `range`, which is in `file` from `offset` on, that correspond to segments of the
/// file.
fn runs_of_segments(
    file: &File,
    offset: u64,
    range: GuestRange,
    segments: Vec<Range<u64>>,
) -> Vec<PopulatedRun<'_>> {
    let run = |segment: Range<u64>| PopulatedRun {
        range: GuestRange::new(
            Pfn(range.start.0 + (segment.start - offset) / PAGE_SIZE_BYTES),
            (segment.end - segment.start) / PAGE_SIZE_BYTES,
        ),
        content: Content::File(file, segment.start),
    };
    segments.into_iter().map(run).collect()
}

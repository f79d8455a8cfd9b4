//! Data segments of sparse files.

use std::fs::File;
use std::io;
use std::ops::Range;

use ebb_abi::PAGE_SIZE_BYTES;
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

use crate::pagemap::{is_in_memory, mincore};

/// The parts of `range`, which must begin and end at page boundaries, that may contain something
/// other than zeros, in whole pages and ascending order (lseek(2), `SEEK_DATA`). A file system
/// without holes reports the whole range; the file's end counts as a hole.
///
/// Moves the file's position.
pub(crate) fn data_segments(file: &File, range: Range<u64>) -> io::Result<Vec<Range<u64>>> {
    let mut segments: Vec<Range<u64>> = Vec::new();
    let mut next = range.start;
    while next < range.end {
        let data = match seek(file, SeekFrom::Data(next)) {
            Ok(data) => data,
            // No data up to the end.
            Err(Errno::NXIO) => break,
            Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok(vec![range]),
            Err(error) => return Err(error.into()),
        };
        if data >= range.end {
            break;
        }
        let hole = seek(file, SeekFrom::Hole(data))?;
        // File system blocks may be smaller than pages.
        let start = data / PAGE_SIZE_BYTES * PAGE_SIZE_BYTES;
        let end = hole.next_multiple_of(PAGE_SIZE_BYTES).min(range.end);
        push(&mut segments, start..end);
        next = end;
    }
    Ok(segments)
}

/// As [`data_segments`], for a memory file that is mapped at `address` from the range's start on.
///
/// Finding the end of a segment with `SEEK_HOLE` is expensive in such a file: the kernel examines
/// each page up to there, and all of a guest's memory can be one segment. mincore(2) reports a
/// bounded number of pages, except those in swap space; `SEEK_DATA` is cheap, and finds these.
pub(crate) fn mapped_data_segments(
    file: &File,
    range: Range<u64>,
    address: usize,
) -> io::Result<Vec<Range<u64>>> {
    // Most of an idle guest's memory is one hole, which is skipped immediately.
    let Some(first) = data_pages(file, range.clone()).next().transpose()? else {
        return Ok(Vec::new());
    };
    let mut states = vec![0; ((range.end - first) / PAGE_SIZE_BYTES) as usize];
    mincore(address + (first - range.start) as usize, &mut states)?;
    let mut segments = Vec::new();
    let mut next = first;
    for same in states.chunk_by(|one, other| is_in_memory(*one) == is_in_memory(*other)) {
        let end = next + same.len() as u64 * PAGE_SIZE_BYTES;
        if is_in_memory(same[0]) {
            push(&mut segments, next..end);
        } else {
            for page in data_pages(file, next..end) {
                let page = page?;
                push(&mut segments, page..page + PAGE_SIZE_BYTES);
            }
        }
        next = end;
    }
    Ok(segments)
}

/// Offsets of the pages of a range that are not in holes of the file, in memory or not.
fn data_pages(file: &File, range: Range<u64>) -> impl Iterator<Item = io::Result<u64>> {
    let mut next = range.start;
    std::iter::from_fn(move || {
        if next >= range.end {
            return None;
        }
        let data = match seek(file, SeekFrom::Data(next)) {
            Ok(data) if data < range.end => data / PAGE_SIZE_BYTES * PAGE_SIZE_BYTES,
            // No data in the range.
            Ok(_) | Err(Errno::NXIO) => return None,
            Err(error) => {
                next = range.end;
                return Some(Err(error.into()));
            }
        };
        next = data + PAGE_SIZE_BYTES;
        Some(Ok(data))
    })
}

/// Appends a segment.
fn push(segments: &mut Vec<Range<u64>>, segment: Range<u64>) {
    match segments.last_mut() {
        Some(last) if segment.start <= last.end => last.end = segment.end,
        _ => segments.push(segment),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mapping::Mapping;
    use crate::{Backing, HugePages, RegionSpec};
    use std::os::unix::fs::FileExt;
    use vm_memory::GuestAddress;

    const PAGE: u64 = PAGE_SIZE_BYTES;

    #[test]
    fn segments_are_the_pages_that_were_written() {
        let memory = File::from(
            rustix::fs::memfd_create("ebb-holes", rustix::fs::MemfdFlags::CLOEXEC).unwrap(),
        );
        let disk = tempfile::tempfile().unwrap();
        for file in [memory, disk] {
            file.set_len(1 << 20).unwrap();
            for page in [16, 17, 40] {
                file.write_all_at(&[1], page * PAGE + 5).unwrap();
            }
            let all = data_segments(&file, 0..1 << 20).unwrap();
            // Disk blocks may be larger than pages, but all data is there and nothing overlaps.
            for page in [16, 17, 40] {
                assert!(all.iter().any(|segment| segment.contains(&(page * PAGE))), "{all:?}");
            }
            assert!(all.windows(2).all(|pair| pair[0].end < pair[1].start), "{all:?}");
            assert_eq!(data_segments(&file, 17 * PAGE..18 * PAGE).unwrap(), [17 * PAGE..18 * PAGE]);
            assert_eq!(data_segments(&file, 128 * PAGE..256 * PAGE).unwrap(), []);
            assert_eq!(data_segments(&file, 5 * PAGE..5 * PAGE).unwrap(), []);
            assert_eq!(data_segments(&file, 1 << 20..2 << 20).unwrap(), []);
        }
    }

    #[test]
    fn a_mapped_file_has_the_same_segments() {
        let spec = RegionSpec { start: GuestAddress(0), size_bytes: 1 << 20, host_node: None };
        let mapping = Mapping::new(&spec, Backing::Memfd, HugePages::Off).unwrap();
        let file = mapping.file().unwrap();
        for page in [16, 17, 40, 255] {
            file.write_all_at(&[1], page * PAGE + 5).unwrap();
        }
        for range in [0..256, 17..18, 17..41, 18..40, 200..256, 5..5] {
            let range = range.start * PAGE..range.end * PAGE;
            let address = mapping.address() + range.start as usize;
            let found = mapped_data_segments(file, range.clone(), address).unwrap();
            assert_eq!(found, data_segments(file, range.clone()).unwrap(), "{range:?}");
            // The result if none of it were in memory.
            let pages: Vec<_> = data_pages(file, range).map(Result::unwrap).collect();
            let expected = found.into_iter().flat_map(|segment| segment.step_by(PAGE as usize));
            assert_eq!(pages, expected.collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_partly_written_page_counts_as_data() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&[1; 10], 3 * PAGE).unwrap();
        assert_eq!(data_segments(&file, 3 * PAGE..9 * PAGE).unwrap(), [3 * PAGE..4 * PAGE]);
    }
}

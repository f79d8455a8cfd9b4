//! Which parts of a sparse file hold data.

use std::fs::File;
use std::io;
use std::ops::Range;

use ebb_abi::PAGE_SIZE_BYTES;
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

/// The parts of `range`, which must begin and end at page borders, that may hold something other than zeros, in whole pages and
/// ascending order (lseek(2), `SEEK_DATA`). A file system that does not know holes answers with the whole range; the
/// file's end counts as a hole.
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
        // Blocks of a file system may be smaller than pages.
        let start = data / PAGE_SIZE_BYTES * PAGE_SIZE_BYTES;
        let end = hole.next_multiple_of(PAGE_SIZE_BYTES).min(range.end);
        match segments.last_mut() {
            Some(last) if start <= last.end => last.end = end,
            _ => segments.push(start..end),
        }
        next = end;
    }
    Ok(segments)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    const PAGE: u64 = PAGE_SIZE_BYTES;

    #[test]
    fn segments_are_the_pages_that_were_written() {
        let memory =
            File::from(rustix::fs::memfd_create("ebb-holes", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        let disk = tempfile::tempfile().unwrap();
        for file in [memory, disk] {
            file.set_len(1 << 20).unwrap();
            for page in [16, 17, 40] {
                file.write_all_at(&[1], page * PAGE + 5).unwrap();
            }
            let all = data_segments(&file, 0..1 << 20).unwrap();
            // Disks may have larger blocks than pages, but all data is there and nothing overlaps.
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
    fn a_page_counts_as_data_if_part_of_it_is_written() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&[1; 10], 3 * PAGE).unwrap();
        assert_eq!(data_segments(&file, 3 * PAGE..9 * PAGE).unwrap(), [3 * PAGE..4 * PAGE]);
    }
}

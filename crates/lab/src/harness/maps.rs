//! The address space of a process: its mappings (`/proc/PID/maps`), the place of guest memory in a
//! monitor, and the state of its pages (`/proc/PID/pagemap`).

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use ebb_guest_ram::merge::STABLE_FILE_NAME;

/// Bytes of a page.
pub const PAGE_BYTES: u64 = 4096;
/// Bytes of an entry of `/proc/PID/pagemap` and `/proc/kpagecount` (Linux
/// Documentation/admin-guide/mm/pagemap.rst).
const ENTRY_BYTES: usize = 8;
/// The page is in memory.
pub const PRESENT: u64 = 1 << 63;
/// The page is in swap.
pub const SWAPPED: u64 = 1 << 62;
/// The page belongs to a file, or is shared.
pub const OF_FILE: u64 = 1 << 61;
/// The page frame of a page that is present; 0 for all but root.
pub const FRAME: u64 = (1 << 55) - 1;

/// The entries of pages from `first` on.
///
/// # Errors
/// Those of the file.
pub fn entries(file: &File, first: u64, count: usize) -> io::Result<Vec<u64>> {
    let mut bytes = vec![0; count * ENTRY_BYTES];
    file.read_exact_at(&mut bytes, first * ENTRY_BYTES as u64)?;
    let entries = bytes.as_chunks::<ENTRY_BYTES>().0;
    Ok(entries.iter().map(|entry| u64::from_ne_bytes(*entry)).collect())
}

/// A mapping of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mapping {
    /// First address.
    pub start: u64,
    /// Address after the last one.
    pub end: u64,
    /// Permissions, such as `rw-p`.
    pub permissions: String,
    /// Offset in its file.
    pub offset: u64,
    /// Inode number of its file; 0 for none.
    pub inode: u64,
    /// File or name; empty for plain anonymous memory.
    pub name: String,
}

impl Mapping {
    /// `start-end perms offset dev inode   name`, as in `maps` and `smaps`.
    pub fn parse(line: &str) -> Option<Self> {
        let mut words = line.split_ascii_whitespace();
        let (start, end) = words.next()?.split_once('-')?;
        let number = |text| u64::from_str_radix(text, 16).ok();
        let (start, end) = (number(start)?, number(end)?);
        let permissions = words.next()?.to_owned();
        let offset = number(words.next()?)?;
        let inode = words.nth(1)?.parse().ok()?;
        let name = words.collect::<Vec<_>>().join(" ");
        (start <= end).then_some(Self { start, end, permissions, offset, inode, name })
    }

    /// Its pages: number of the first one in the address space, and the count.
    pub fn pages(&self) -> (u64, usize) {
        (self.start / PAGE_BYTES, ((self.end - self.start) / PAGE_BYTES) as usize)
    }

    /// For a file of stable pages: the file's inode number, and the number of the first page in it.
    pub fn stable(&self) -> Option<(u64, u64)> {
        self.name.contains(STABLE_FILE_NAME).then_some((self.inode, self.offset / PAGE_BYTES))
    }

    /// Whether it is private writable memory.
    pub fn is_private_memory(&self) -> bool {
        self.permissions.starts_with("rw-p")
    }

    /// Whether it is the process's read-only mapping of stable pages.
    pub fn is_reader(&self) -> bool {
        self.stable().is_some() && self.permissions.starts_with("r--s")
    }

    /// Whether it is inaccessible: reserved address space.
    fn is_reserved(&self) -> bool {
        self.permissions.starts_with("---")
    }
}

/// All mappings.
pub fn parse(text: &str) -> Vec<Mapping> {
    text.lines().filter_map(Mapping::parse).collect()
}

/// Threads' stacks look like guest memory, but are smaller.
const LEAST_BYTES: u64 = 16 << 20;

/// Ranges of guest memory: private memory without gaps between two adjacent pieces of reserved
/// address space. Not all of it is stable pages: a monitor also has private mappings of whole files
/// of them, of which it makes those in guest memory.
pub fn guest_memory(mappings: &[Mapping]) -> Vec<Range<u64>> {
    let mut found = Vec::new();
    // The current mappings, which began right after reserved address space.
    let mut open: Option<Range<usize>> = None;
    for (number, mapping) in mappings.iter().enumerate() {
        let before = number.checked_sub(1).map(|before| &mappings[before]);
        let touches = before.is_some_and(|before| before.end == mapping.start);
        open = match open.take() {
            Some(all) if touches && mapping.is_private_memory() => Some(all.start..number + 1),
            Some(all) if touches && mapping.is_reserved() => {
                let all = &mappings[all];
                let range = all[0].start..mapping.start;
                let is_guests = range.end - range.start >= LEAST_BYTES
                    && all.iter().any(|one| one.stable().is_none());
                found.extend(is_guests.then_some(range));
                None
            }
            None if touches
                && before.is_some_and(Mapping::is_reserved)
                && mapping.is_private_memory() =>
            {
                Some(number..number + 1)
            }
            _ => None,
        };
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
7f0000000000-7f0000001000 ---p 00000000 00:00 0
7f0000001000-7f0000010000 rw-p 00003000 00:01 77                         /memfd:ebb-stable (deleted)
7f0000010000-7f0002000000 rw-p 00000000 00:00 0
7f0002000000-7f0002001000 rw-p 00000000 00:01 77                         /memfd:ebb-stable (deleted)
7f0002001000-7f0002050000 ---p 00000000 00:00 0
7f0002060000-7f0006070000 rw-p 00000000 00:01 77                         /memfd:ebb-stable (deleted)
7f0006070000-7f0006071000 r--s 00000000 00:01 77                         /memfd:ebb-stable (deleted)
7f0010000000-7f0010001000 ---p 00000000 00:00 0
7f0010001000-7f0012000000 rw-p 00000000 00:00 0
7f0013000000-7f0013001000 ---p 00000000 00:00 0
7f0014000000-7f0014001000 ---p 00000000 00:00 0
7f0014001000-7f0016000000 r--p 00000000 00:00 0
7f0016000000-7f0016001000 ---p 00000000 00:00 0
7f0016001000-7f0016201000 rw-p 00000000 00:00 0
7f0016201000-7f0016202000 ---p 00000000 00:00 0
7f0017000000-7f0017001000 ---p 00000000 00:00 0
7f0017001000-7f0019001000 rw-p 00000000 00:01 77                         /memfd:ebb-stable (deleted)
7f0019001000-7f001b001000 rw-p 00000000 00:01 78                         /memfd:ebb-stable (deleted)
7f001b001000-7f001b002000 ---p 00000000 00:00 0
55d0a8c00000-55d0a8e00000 rw-p 00000000 00:01 1234                       /bin/ebb
rubbish
";

    #[test]
    fn mappings_are_classified() {
        let mappings = parse(MAPS);
        assert_eq!(mappings.len(), 20);
        assert_eq!(mappings[1].stable(), Some((77, 3)));
        assert_eq!(mappings[1].pages(), (0x7_f000_0001, 15));
        assert!(mappings[1].is_private_memory() && !mappings[1].is_reader());
        assert!(mappings[6].is_reader() && !mappings[6].is_private_memory());
        assert_eq!((mappings[2].inode, mappings[19].inode), (0, 1234));
        assert_eq!(mappings[19].name, "/bin/ebb");
    }

    #[test]
    fn guest_memory_is_between_reserved_address_space() {
        // Neither a range with a gap at its end, nor a read-only one, nor a stack, nor whole files of
        // stable pages.
        assert_eq!(guest_memory(&parse(MAPS)), [0x7f00_0000_1000..0x7f00_0200_1000]);
        assert_eq!(guest_memory(&[]), []);
    }
}

//! Where a monitor has its guest's memory, and files of stable pages, by `/proc/PID/maps`.

use std::ops::Range;

use ebb_guest_ram::merge::STABLE_FILE_NAME;

pub(super) const PAGE_BYTES: u64 = 4096;

/// A mapping of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Mapping {
    pub(super) start: u64,
    pub(super) end: u64,
    /// What may be done with it, as `rw-p`.
    permissions: String,
    /// Of a file of stable pages: the file's number, and the number of the first page in it.
    pub(super) stable: Option<(u64, u64)>,
    /// Of no file.
    pub(super) is_anonymous: bool,
}

impl Mapping {
    /// `start-end perms offset dev inode   name`.
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.split_ascii_whitespace();
        let (start, end) = words.next()?.split_once('-')?;
        let number = |text| u64::from_str_radix(text, 16).ok();
        let (start, end) = (number(start)?, number(end)?);
        let permissions = words.next()?.to_owned();
        let offset = number(words.next()?)?;
        let inode: u64 = words.nth(1)?.parse().ok()?;
        let is_stable = words.next().is_some_and(|name| name.contains(STABLE_FILE_NAME));
        let stable = is_stable.then_some((inode, offset / PAGE_BYTES));
        Some(Self { start, end, permissions, stable, is_anonymous: inode == 0 })
    }

    /// Its pages: number of the first one in the address space, and how many they are.
    pub(super) fn pages(&self) -> (u64, usize) {
        (self.start / PAGE_BYTES, ((self.end - self.start) / PAGE_BYTES) as usize)
    }

    /// Whether it is memory that the process may write to, and nobody else sees that.
    pub(super) fn is_private_memory(&self) -> bool {
        self.permissions.starts_with("rw-p")
    }

    /// Whether it is what the process reads stable pages through.
    pub(super) fn is_reader(&self) -> bool {
        self.stable.is_some() && self.permissions.starts_with("r--s")
    }

    /// Whether nobody may do anything with it: address space that is kept free.
    fn is_reserved(&self) -> bool {
        self.permissions.starts_with("---")
    }
}

/// All mappings.
pub(super) fn parse(text: &str) -> Vec<Mapping> {
    text.lines().filter_map(Mapping::parse).collect()
}

/// Threads' stacks look like guest memory, but are smaller.
const LEAST_BYTES: u64 = 16 << 20;

/// Where guest memory is: private memory without gaps between two pieces of reserved address space
/// that touch it.
pub(super) fn guest_memory(mappings: &[Mapping]) -> Vec<Range<u64>> {
    let mut found = Vec::new();
    // What began right behind reserved address space, and goes on.
    let mut open: Option<Range<u64>> = None;
    let mut before: Option<&Mapping> = None;
    for mapping in mappings {
        let touches = before.is_some_and(|before| before.end == mapping.start);
        open = match open.take() {
            Some(range) if touches && mapping.is_private_memory() => Some(range.start..mapping.end),
            Some(range) if touches && mapping.is_reserved() => {
                found.extend((range.end - range.start >= LEAST_BYTES).then_some(range));
                None
            }
            None if touches
                && before.is_some_and(Mapping::is_reserved)
                && mapping.is_private_memory() =>
            {
                Some(mapping.start..mapping.end)
            }
            _ => None,
        };
        before = Some(mapping);
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
55d0a8c00000-55d0a8e00000 rw-p 00000000 00:01 1234                       /bin/ebb
rubbish
";

    #[test]
    fn mappings_say_what_they_are_of() {
        let mappings = parse(MAPS);
        assert_eq!(mappings.len(), 16);
        assert_eq!(mappings[1].stable, Some((77, 3)));
        assert_eq!(mappings[1].pages(), (0x7_f000_0001, 15));
        assert!(mappings[1].is_private_memory() && !mappings[1].is_reader());
        assert!(mappings[6].is_reader() && !mappings[6].is_private_memory());
        assert!(mappings[2].is_anonymous && !mappings[15].is_anonymous);
    }

    #[test]
    fn guest_memory_is_between_reserved_address_space() {
        // Neither what has a gap at its end, nor what is only read, nor a stack.
        assert_eq!(guest_memory(&parse(MAPS)), [0x7f00_0000_1000..0x7f00_0200_1000]);
        assert_eq!(guest_memory(&[]), []);
    }
}

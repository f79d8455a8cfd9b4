//! A guest's memory, read from outside through its monitor's `/proc/PID/mem`.

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use crate::harness::maps::{self, Mapping, PRESENT};

/// Bytes of a page.
const PAGE_BYTES: usize = maps::PAGE_BYTES as usize;
/// Number of pages to read at a time.
const CHUNK_PAGES: usize = 256;

/// The memory of the guest in a monitor. Reading it needs the permissions of ptrace(2): a monitor
/// that is a child of this process, or root.
#[derive(Debug)]
pub(super) struct GuestMemory {
    memory: File,
    pagemap: File,
    /// Start of guest memory in the monitor.
    start: u64,
    pages: usize,
}

impl GuestMemory {
    /// Opens the memory of a guest that has `bytes` of it.
    pub(super) fn open(pid: u32, bytes: u64) -> io::Result<Self> {
        let maps = fs::read_to_string(format!("/proc/{pid}/maps"))?;
        let start = start_of(&maps, bytes).ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::NotFound,
                format!("no mapping of {bytes} bytes in process {pid}"),
            )
        })?;
        Ok(Self {
            memory: File::open(format!("/proc/{pid}/mem"))?,
            pagemap: File::open(format!("/proc/{pid}/pagemap"))?,
            start,
            pages: bytes as usize / PAGE_BYTES,
        })
    }

    /// Reads a word, which the guest may be writing. The kernel copies an aligned word in one piece
    /// (`rep movsq` or a register, Linux arch/x86/lib/memcpy_64.S), except on processors for which
    /// it prefers `rep movsb`; those also move short strings in one piece, though no manual
    /// guarantees it.
    pub(super) fn word(&self, at: u64) -> io::Result<u64> {
        let mut bytes = [0; 8];
        self.memory.read_exact_at(&mut bytes, self.start + at)?;
        Ok(u64::from_ne_bytes(bytes))
    }

    /// Reads the words of the page at this place.
    pub(super) fn page(&self, at: u64) -> io::Result<Vec<u64>> {
        let mut bytes = vec![0; PAGE_BYTES];
        self.memory.read_exact_at(&mut bytes, self.start + at)?;
        Ok(words(&bytes))
    }

    /// Places of the resident pages that contain a word of each of these pairs.
    pub(super) fn find(&self, wanted: &[[u64; 2]]) -> io::Result<Vec<u64>> {
        let wanted: Vec<_> = wanted.iter().map(|words| words.map(u64::to_ne_bytes)).collect();
        let holds_all = |page: &[u8]| {
            let (words, _) = page.as_chunks::<8>();
            wanted.iter().all(|any| words.iter().any(|word| any.contains(word)))
        };
        let mut found = Vec::new();
        let mut bytes = vec![0; CHUNK_PAGES * PAGE_BYTES];
        for pages in self.present()? {
            for first in pages.clone().step_by(CHUNK_PAGES) {
                let chunk = &mut bytes[..(pages.end - first).min(CHUNK_PAGES) * PAGE_BYTES];
                self.memory.read_exact_at(chunk, self.start + (first * PAGE_BYTES) as u64)?;
                let places = (first..).zip(chunk.chunks(PAGE_BYTES));
                found.extend(
                    places
                        .filter(|(_, page)| holds_all(page))
                        .map(|(page, _)| (page * PAGE_BYTES) as u64),
                );
            }
        }
        Ok(found)
    }

    /// Runs of resident pages: reading others would populate them.
    fn present(&self) -> io::Result<Vec<Range<usize>>> {
        let entries = maps::entries(&self.pagemap, self.start / maps::PAGE_BYTES, self.pages)?;
        let mut runs: Vec<Range<usize>> = Vec::new();
        for (page, _) in entries.iter().enumerate().filter(|(_, entry)| *entry & PRESENT != 0) {
            match runs.last_mut() {
                Some(run) if run.end == page => run.end += 1,
                _ => runs.push(page..page + 1),
            }
        }
        Ok(runs)
    }
}

fn words(bytes: &[u8]) -> Vec<u64> {
    let (words, _) = bytes.as_chunks::<8>();
    words.iter().map(|word| u64::from_ne_bytes(*word)).collect()
}

/// Start of memory of this size in the text of `/proc/PID/maps`: adjacent writable mappings. The
/// monitor keeps inaccessible pages at both ends of guest memory. Memory of a restored guest is
/// partly that of a file; the monitor then has a range of that size without one beside it.
fn start_of(maps: &str, bytes: u64) -> Option<u64> {
    let mappings = maps::parse(maps);
    let writable: Vec<&Mapping> =
        mappings.iter().filter(|mapping| mapping.permissions.starts_with("rw")).collect();
    let runs: Vec<&[&Mapping]> = writable
        .chunk_by(|one, next| one.end == next.start)
        .filter(|run| run.iter().map(|mapping| mapping.end - mapping.start).sum::<u64>() == bytes)
        .collect();
    let has_file = |run: &&&[&Mapping]| run.iter().any(|mapping| mapping.inode != 0);
    runs.iter().find(has_file).or(runs.first())?.first().map(|mapping| mapping.start)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guest_memory_in_several_mappings_is_found() {
        let maps = "\
7e0000000000-7e0000200000 rw-p 00000000 00:00 0\n\
7f0000000000-7f0000001000 rw-p 00000000 00:00 0\n\
7f0000001000-7f0000200000 ---p 00000000 00:00 0\n\
7f0000200000-7f0000300000 rw-p 00200000 00:01 42 /tmp/vm.snapshot\n\
7f0000300000-7f0000400000 rw-p 00000000 00:00 0\n\
7f0000400000-7f0000401000 ---p 00000000 00:00 0\n";
        assert_eq!(start_of(maps, 2 << 20), Some(0x7f00_0020_0000));
        let fresh = &maps[..maps.find("7f00").unwrap()];
        assert_eq!(start_of(fresh, 2 << 20), Some(0x7e00_0000_0000));
        assert_eq!(start_of(maps, 3 << 20), None);
    }

    #[test]
    fn words_of_this_process_are_found() {
        // A separate mapping, with a value that occurs nowhere else.
        let value = std::hint::black_box(0x1bad_c0de_u64) << 32 | u64::from(std::process::id());
        let mut own = vec![0_u64; 16 * PAGE_BYTES / 8];
        let at = 5 * PAGE_BYTES / 8 + 3;
        own[at] = value;
        let start = own.as_ptr() as u64;
        let skipped = start.next_multiple_of(PAGE_BYTES as u64) - start;
        let open = |name: &str| File::open(format!("/proc/self/{name}")).unwrap();
        let memory = GuestMemory {
            memory: open("mem"),
            pagemap: open("pagemap"),
            start: start + skipped,
            pages: 15,
        };
        let place = at as u64 * 8 - skipped;
        assert_eq!(memory.word(place).unwrap(), value);
        let found = memory.find(&[[value, 1], [0, 0]]).unwrap();
        assert_eq!(found, [place / PAGE_BYTES as u64 * PAGE_BYTES as u64]);
        assert!(memory.page(found[0]).unwrap().contains(&value));
    }

    #[test]
    fn a_missing_process_is_an_error() {
        assert!(GuestMemory::open(u32::MAX, 4096).is_err());
    }
}

//! A region of memory with known content of each page.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use rustix::mm::Advice;
use serde::{Deserialize, Serialize};

use crate::memory::{Mapping, PAGE_BYTES, PAGE_WORDS, Sharing, pattern_word, unnamed_file};
use crate::random::mix;

/// Number of reported words of a wrong page.
const SHOWN_WORDS: usize = 4;
/// Bits of the page frame number in an entry of `/proc/PID/pagemap` (Linux
/// Documentation/admin-guide/mm/pagemap.rst).
const PAGEMAP_PFN: u64 = (1 << 55) - 1;

/// Source of a region's pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// Private anonymous memory.
    Anonymous,
    /// Private anonymous memory in huge pages.
    Huge,
    /// A file in `/tmp`, mapped shared.
    SharedFile,
    /// A file in `/tmp`, mapped privately.
    PrivateFile,
}

/// A page whose content differs from the last write.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WrongPage {
    /// Source of the page.
    pub source: Source,
    /// Address in the process, in hexadecimal.
    pub address: String,
    /// Page frame number in the guest, in hexadecimal, if available.
    pub pfn: Option<String>,
    /// Index of the first wrong word of 8 bytes.
    pub word: usize,
    /// Number of wrong words.
    pub wrong_words: usize,
    /// Expected words from there on, in hexadecimal.
    pub expected: Vec<String>,
    /// Words found, in hexadecimal.
    pub found: Vec<String>,
}

/// Memory with known content of each page: either never written, or the pattern of its version.
#[derive(Debug)]
pub struct Region {
    source: Source,
    mapping: Mapping,
    file: Option<File>,
    seed: u64,
    /// Version of each page; 0 for zeros.
    versions: Vec<u32>,
    /// Version of a page after its copy was freed.
    base: u32,
}

impl Region {
    /// Maps a region. A privately mapped file is filled; the other sources contain zeros.
    pub fn map(source: Source, pages: usize, seed: u64) -> io::Result<Self> {
        let bytes = (pages * PAGE_BYTES) as u64;
        let (file, mapping) = match source {
            Source::Anonymous => (None, Mapping::new(bytes)?),
            Source::Huge => (None, Mapping::huge(bytes)?),
            Source::SharedFile | Source::PrivateFile => {
                let file = unnamed_file(bytes)?;
                let sharing =
                    if source == Source::SharedFile { Sharing::Shared } else { Sharing::Private };
                let mapping = Mapping::of_file(&file, bytes, sharing)?;
                (Some(file), mapping)
            }
        };
        let base = u32::from(source == Source::PrivateFile);
        let versions = vec![base; mapping.pages()];
        let region = Self { source, mapping, file, seed, versions, base };
        if let Some(file) = region.file.as_ref().filter(|_| base > 0) {
            for page in 0..region.pages() {
                let words: Vec<u8> = region.content(page).flat_map(u64::to_ne_bytes).collect();
                file.write_all_at(&words, (page * PAGE_BYTES) as u64)?;
            }
        }
        Ok(region)
    }

    /// Number of pages.
    pub fn pages(&self) -> usize {
        self.mapping.pages()
    }

    /// Memory of the region in pages once all of it was written.
    pub fn cost_pages(&self) -> usize {
        if self.source == Source::PrivateFile { 2 * self.pages() } else { self.pages() }
    }

    /// Whether writes are visible to other processes.
    pub fn is_shared(&self) -> bool {
        self.source == Source::SharedFile
    }

    /// Writes a new version of these pages.
    pub fn write(&mut self, pages: Range<usize>) {
        for page in pages {
            self.versions[page] = self.versions[page].wrapping_add(1).max(1);
            self.restore(page);
        }
    }

    /// Frees these pages: their content reverts to zeros or to the file's content.
    pub fn give_back(&mut self, pages: Range<usize>) -> io::Result<()> {
        // MADV_DONTNEED would keep a shared file's pages in the page cache.
        let advice = if self.is_shared() { Advice::LinuxRemove } else { Advice::LinuxDontNeed };
        self.mapping.advise(pages.clone(), advice)?;
        self.versions[pages].fill(self.base);
        Ok(())
    }

    /// Checks these pages; reports each wrong one and restores it, so that it is reported once.
    pub fn verify(&mut self, pages: Range<usize>, mut report: impl FnMut(WrongPage)) {
        for page in pages {
            if !self.mapping.page(page).iter().copied().eq(self.content(page)) {
                report(self.describe(page));
                self.restore(page);
            }
        }
    }

    /// Expected content of a page.
    fn content(&self, page: usize) -> impl Iterator<Item = u64> + use<> {
        let version = self.versions[page];
        let seed = mix(self.seed ^ mix(page as u64) ^ (u64::from(version) << 32));
        (0..PAGE_WORDS).map(move |index| if version == 0 { 0 } else { pattern_word(seed, index) })
    }

    fn restore(&mut self, page: usize) {
        let content = self.content(page);
        self.mapping
            .page_mut(page)
            .iter_mut()
            .zip(content)
            .for_each(|(word, content)| *word = content);
    }

    fn describe(&self, page: usize) -> WrongPage {
        let pairs = || self.mapping.page(page).iter().copied().zip(self.content(page)).enumerate();
        let wrong = || pairs().filter(|(_, (found, expected))| found != expected);
        let word = wrong().next().map_or(0, |(index, _)| index);
        let shown = |choose: fn((u64, u64)) -> u64| {
            pairs().skip(word).take(SHOWN_WORDS).map(|(_, pair)| hex(choose(pair))).collect()
        };
        let address = (self.mapping.address() + page * PAGE_BYTES) as u64;
        WrongPage {
            source: self.source,
            address: hex(address),
            pfn: pfn_of(address).map(hex),
            word,
            wrong_words: wrong().count(),
            expected: shown(|(_, expected)| expected),
            found: shown(|(found, _)| found),
        }
    }
}

fn hex(number: u64) -> String {
    format!("{number:#x}")
}

/// Page frame number at an address of this process. The kernel reports it only to privileged
/// processes.
fn pfn_of(address: u64) -> Option<u64> {
    let mut entry = [0; 8];
    let page = address / PAGE_BYTES as u64;
    File::open("/proc/self/pagemap").ok()?.read_exact_at(&mut entry, page * 8).ok()?;
    Some(u64::from_ne_bytes(entry) & PAGEMAP_PFN).filter(|pfn| *pfn > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Source; 4] =
        [Source::Anonymous, Source::Huge, Source::SharedFile, Source::PrivateFile];

    fn wrong(region: &mut Region) -> Vec<WrongPage> {
        let mut wrong = Vec::new();
        region.verify(0..region.pages(), |page| wrong.push(page));
        wrong
    }

    #[test]
    fn content_after_writes_and_frees_is_known() {
        for source in ALL {
            let mut region = Region::map(source, 512, 7).unwrap();
            assert_eq!(wrong(&mut region), [], "{source:?} as mapped");
            region.write(0..100);
            region.write(50..60);
            assert_eq!(wrong(&mut region), [], "{source:?} as written");
            region.give_back(40..55).unwrap();
            assert_eq!(wrong(&mut region), [], "{source:?} with a part freed");
            region.write(45..50);
            assert_eq!(wrong(&mut region), [], "{source:?} as written again");
        }
    }

    #[test]
    fn a_changed_page_is_reported_once() {
        for source in ALL {
            let mut region = Region::map(source, 512, 7).unwrap();
            region.write(0..10);
            region.mapping.page_mut(3)[5..8].fill(0xeb_eb);
            let reported = wrong(&mut region);
            assert_eq!(reported.len(), 1, "{source:?}");
            let page = &reported[0];
            assert_eq!((page.source, page.word, page.wrong_words), (source, 5, 3));
            assert_eq!(page.address, hex((region.mapping.address() + 3 * PAGE_BYTES) as u64));
            assert_eq!(page.found[..3], ["0xebeb", "0xebeb", "0xebeb"]);
            assert_eq!(page.found[3], page.expected[3]);
            assert_eq!(wrong(&mut region), []);
        }
    }

    #[test]
    fn lost_and_exchanged_pages_are_detected() {
        let mut region = Region::map(Source::Anonymous, 4, 1).unwrap();
        region.write(0..4);
        region.mapping.advise(1..2, Advice::LinuxDontNeed).unwrap();
        let other = region.mapping.page(2).to_vec();
        region.mapping.page_mut(3).copy_from_slice(&other);
        assert_eq!(wrong(&mut region).len(), 2);
        // Also an older version of the same page.
        let old = region.mapping.page(0).to_vec();
        region.write(0..1);
        region.mapping.page_mut(0).copy_from_slice(&old);
        assert_eq!(wrong(&mut region).len(), 1);
        // Also content where zeros are expected.
        region.give_back(0..1).unwrap();
        region.mapping.page_mut(0)[511] = 1;
        assert_eq!(wrong(&mut region)[0].word, 511);
    }
}

//! Merged pages according to the host's kernel, from outside of the monitors: the pages, their
//! sharers, and their nodes.
//!
//! The counters of either side are not used. Pages merged by their owner are those of private
//! mappings of its files of stable pages in the place of guest memory, as long as they were not
//! written to (`/proc/PID/maps`, `/proc/PID/pagemap`), whether or not they have been read since;
//! pages merged by the kernel are those of guest memory that are mapped more than once
//! (`/proc/kpagecount`), since monitors never fork. Their flag in `/proc/kpageflags` is not usable:
//! since Linux 6.10 all anonymous pages have it (fs/proc/page.c, `stable_page_flags`).
//! move_pages(2) reports their nodes. All of this needs root.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use ebb_page_merge::{PageHash, PageHasher, Secret};

use crate::LabError;
use crate::harness::maps::{self, FRAME, Mapping, OF_FILE, PAGE_BYTES, PRESENT, SWAPPED, entries};

/// Number of pages per query.
const CHUNK: usize = 4096;

/// The component whose merged pages are examined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MergedBy {
    /// The process that owns the memory.
    Owner,
    /// The kernel.
    Kernel,
}

/// Identity of a shared page, the same for all sharers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SharedPage {
    /// The page of a file: the file's inode number, and the page's number in it.
    OfFile(u64, u64),
    /// A page frame.
    Frame(u64),
}

/// A mapping of a merged page in a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MergedPage {
    /// The shared page.
    pub page: SharedPage,
    /// Number of the guest's page, counted from the beginning of its memory.
    pub place: u64,
    /// The node, if the mapping in the guest's memory has an entry in the page tables: otherwise
    /// the page has not been read since it was merged.
    pub node: Option<u32>,
}

/// Observations of one guest's memory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Observed {
    /// Its merged pages.
    pub merged: Vec<MergedPage>,
    /// Number of them that the kernel has merged and that are zero. Owners discard such pages.
    pub zero_pages: u64,
    /// Number of pages that were merged and then written to, which have a private copy.
    pub copied_pages: u64,
    /// Number of its other pages by node.
    pub others: BTreeMap<u32, u64>,
    /// Stable pages in the monitor's read-only mapping, and their nodes.
    pub stable: Vec<(SharedPage, u32)>,
}

/// Observes the guest memory of a process.
///
/// # Errors
/// [`LabError::SystemFile`], [`LabError::Merging`].
pub fn of_process(pid: u32, by: MergedBy) -> Result<Observed, LabError> {
    let process = PathBuf::from(format!("/proc/{pid}"));
    let path = process.join("maps");
    let text = fs::read_to_string(&path).map_err(LabError::of_file(&path))?;
    let look = Look {
        pid,
        pagemap: open(process.join("pagemap"))?,
        counts: match by {
            MergedBy::Owner => None,
            MergedBy::Kernel => Some(open("/proc/kpagecount")?),
        },
        memory: open(process.join("mem"))?,
    };
    let mappings = maps::parse(&text);
    let mut observed = Observed::default();
    let mut pages_before = 0;
    for memory in maps::guest_memory(&mappings) {
        for mapping in
            mappings.iter().filter(|one| memory.start <= one.start && one.end <= memory.end)
        {
            let place = pages_before + (mapping.start - memory.start) / PAGE_BYTES;
            look.memory(mapping, place, &mut observed).map_err(|cause| failed(&cause))?;
        }
        pages_before += (memory.end - memory.start) / PAGE_BYTES;
    }
    for mapping in mappings.iter().filter(|mapping| mapping.is_reader()) {
        observed.stable.extend(look.stable(mapping).map_err(|cause| failed(&cause))?);
    }
    Ok(observed)
}

/// The contents of all pages of guest memory that a process has at the host, by their places in the
/// guest's memory.
///
/// # Errors
/// [`LabError::SystemFile`], [`LabError::Merging`].
pub fn contents_of_process(pid: u32) -> Result<BTreeMap<u64, PageHash>, LabError> {
    let process = PathBuf::from(format!("/proc/{pid}"));
    let path = process.join("maps");
    let text = fs::read_to_string(&path).map_err(LabError::of_file(&path))?;
    let (pagemap, memory) = (open(process.join("pagemap"))?, open(process.join("mem"))?);
    // A fixed secret will do: the guests are the lab's own, and prepare no collisions.
    let hasher = PageHasher::new(&Secret([0; 32]));
    let mut contents = BTreeMap::new();
    let mut pages_before = 0;
    for range in maps::guest_memory(&maps::parse(&text)) {
        let (first, count) = (range.start / PAGE_BYTES, (range.end - range.start) / PAGE_BYTES);
        let entries = entries(&pagemap, first, count as usize).map_err(|cause| failed(&cause))?;
        for (page, entry) in (0..).zip(entries) {
            if entry & (PRESENT | SWAPPED) != 0 {
                let mut content = [0; PAGE_BYTES as usize];
                memory
                    .read_exact_at(&mut content, range.start + page * PAGE_BYTES)
                    .map_err(|cause| failed(&cause))?;
                contents.insert(pages_before + page, hasher.hash(&content));
            }
        }
        pages_before += count;
    }
    Ok(contents)
}

fn failed(cause: &io::Error) -> LabError {
    LabError::Merging(format!("cannot examine a process's pages: {cause}"))
}

fn open(path: impl AsRef<Path>) -> Result<File, LabError> {
    File::open(&path).map_err(LabError::of_file(path))
}

/// Open files of the kernel for the examination of one process.
struct Look {
    pid: u32,
    pagemap: File,
    /// Counts of mappings of page frames, if the kernel merges.
    counts: Option<File>,
    /// Its content.
    memory: File,
}

impl Look {
    /// Examines a piece of guest memory, whose first page has the number `place`.
    fn memory(&self, mapping: &Mapping, place: u64, observed: &mut Observed) -> io::Result<()> {
        let (first, count) = mapping.pages();
        // Pages whose node to query: mapped ones. For merged pages, with the shared page.
        let (mut addresses, mut shared) = (Vec::new(), Vec::new());
        for (entry, page) in entries(&self.pagemap, first, count)?.into_iter().zip(0..) {
            let is_present = entry & PRESENT != 0;
            let merged = match (mapping.stable(), &self.counts) {
                // A private copy of a page of the file.
                (Some(_), _) if entry & SWAPPED != 0 || (is_present && entry & OF_FILE == 0) => {
                    observed.copied_pages += 1;
                    None
                }
                (Some((inode, offset)), _) => Some(SharedPage::OfFile(inode, offset + page)),
                (None, Some(counts)) if is_present && entry & OF_FILE == 0 => {
                    let frame = entry & FRAME;
                    let is_merged = entries(counts, frame, 1)?.iter().any(|count| *count > 1);
                    if is_merged {
                        observed.zero_pages +=
                            u64::from(self.is_zero(mapping.start + page * PAGE_BYTES)?);
                    }
                    is_merged.then_some(SharedPage::Frame(frame))
                }
                _ => None,
            };
            if is_present {
                addresses.push(mapping.start + page * PAGE_BYTES);
                shared.push(merged.map(|shared| (shared, place + page)));
            } else if let Some(page_shared) = merged {
                observed.merged.push(MergedPage {
                    page: page_shared,
                    place: place + page,
                    node: None,
                });
            }
        }
        for (shared, node) in shared.into_iter().zip(nodes(self.pid, &addresses)?) {
            match (shared, node) {
                (Some((page, place)), node) => {
                    observed.merged.push(MergedPage { page, place, node });
                }
                (None, Some(node)) => *observed.others.entry(node).or_default() += 1,
                (None, None) => {}
            }
        }
        Ok(())
    }

    /// Whether a page is zero.
    fn is_zero(&self, address: u64) -> io::Result<bool> {
        let mut content = [0; PAGE_BYTES as usize];
        // Most other pages differ in the first bytes.
        self.memory.read_exact_at(&mut content[..8], address)?;
        if content[..8] != [0; 8] {
            return Ok(false);
        }
        self.memory.read_exact_at(&mut content, address)?;
        Ok(content == [0; PAGE_BYTES as usize])
    }

    /// Stable pages in a read-only mapping.
    fn stable(&self, mapping: &Mapping) -> io::Result<Vec<(SharedPage, u32)>> {
        let Some((inode, offset)) = mapping.stable() else { return Ok(Vec::new()) };
        let (first, count) = mapping.pages();
        let (mut addresses, mut shared) = (Vec::new(), Vec::new());
        for (entry, page) in entries(&self.pagemap, first, count)?.into_iter().zip(0..) {
            if entry & PRESENT != 0 {
                addresses.push(mapping.start + page * PAGE_BYTES);
                shared.push(SharedPage::OfFile(inode, offset + page));
            }
        }
        let nodes = nodes(self.pid, &addresses)?;
        Ok(shared.into_iter().zip(nodes).filter_map(|(page, node)| Some((page, node?))).collect())
    }
}

/// The node of each page of a process; `None` for a page that is not mapped at present.
pub fn nodes(pid: u32, addresses: &[u64]) -> io::Result<Vec<Option<u32>>> {
    let mut nodes = Vec::with_capacity(addresses.len());
    for chunk in addresses.chunks(CHUNK) {
        let mut status = vec![0_i32; chunk.len()];
        // SAFETY: without a list of nodes move_pages(2) moves nothing. It reads as many addresses
        // as `chunk` has, none of which it follows in this process, and writes as many numbers to
        // `status`, which has room for them.
        let result = unsafe {
            libc::syscall(
                libc::SYS_move_pages,
                pid,
                chunk.len(),
                chunk.as_ptr(),
                std::ptr::null::<libc::c_int>(),
                status.as_mut_ptr(),
                0,
            )
        };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
        nodes.extend(status.iter().map(|node| u32::try_from(*node).ok()));
    }
    Ok(nodes)
}

/// Survey of one guest's memory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GuestSurvey {
    /// Number of its merged pages by node.
    pub placement: BTreeMap<u32, u64>,
    /// Merged zero pages, if zero pages are merged with each other.
    pub zero_pages: u64,
    /// Merged pages that were read since: those that have an entry in the page tables.
    pub read_pages: u64,
    /// Pages that were merged and written to since.
    pub copied_pages: u64,
    /// Other populated pages of its memory.
    pub other_pages: u64,
    /// Those of them on another node than the guest's.
    pub misplaced_pages: u64,
    /// Merged pages on another node: number of the first one in the guest's memory, length of the
    /// run, the node.
    pub remote: Vec<(u64, u64, u32)>,
}

impl GuestSurvey {
    /// Its merged pages on other nodes than `home`.
    fn remote_pages(&self, home: u32) -> u64 {
        self.placement.iter().filter(|(node, _)| **node != home).map(|(_, pages)| pages).sum()
    }
}

/// Survey of all processes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Survey {
    /// Pages that are shared.
    pub pages_shared: u64,
    /// Further pages that share them.
    pub pages_sharing: u64,
    /// Merged pages whose shared page is on another node than the memory of their guest.
    pub remote_merged_pages: u64,
    /// Merged pages whose node is unknown.
    pub pages_without_node: u64,
    /// The guests' surveys.
    pub guests: Vec<GuestSurvey>,
}

impl Survey {
    /// Combines the observations of processes, each with the node of its guest's memory.
    pub fn new(processes: &[(u32, Observed)]) -> Self {
        // A page that one process has not read may have been read by another.
        let all = || processes.iter().flat_map(|(_, observed)| &observed.merged);
        let readers = processes.iter().flat_map(|(_, observed)| &observed.stable).copied();
        let known: BTreeMap<SharedPage, u32> =
            all().filter_map(|merged| Some((merged.page, merged.node?))).chain(readers).collect();
        let shared: BTreeSet<SharedPage> = all().map(|merged| merged.page).collect();
        let mut survey = Self { pages_shared: shared.len() as u64, ..Self::default() };
        survey.pages_sharing = all().count() as u64 - survey.pages_shared;
        for (home, observed) in processes {
            let mut guest = GuestSurvey {
                read_pages: observed.merged.iter().filter(|merged| merged.node.is_some()).count()
                    as u64,
                zero_pages: observed.zero_pages,
                copied_pages: observed.copied_pages,
                other_pages: observed.others.values().sum(),
                misplaced_pages: observed
                    .others
                    .iter()
                    .filter(|(node, _)| *node != home)
                    .map(|(_, n)| n)
                    .sum(),
                ..GuestSurvey::default()
            };
            let mut remote = Vec::new();
            for merged in &observed.merged {
                let Some(node) = known.get(&merged.page) else {
                    survey.pages_without_node += 1;
                    continue;
                };
                *guest.placement.entry(*node).or_default() += 1;
                if node != home {
                    remote.push((merged.place, *node));
                }
            }
            remote.sort_unstable();
            guest.remote = runs(&remote);
            survey.remote_merged_pages += guest.remote_pages(*home);
            survey.guests.push(guest);
        }
        survey
    }
}

/// Runs of contiguous pages on the same node.
fn runs(pages: &[(u64, u32)]) -> Vec<(u64, u64, u32)> {
    let follow = |one: &(u64, u32), next: &(u64, u32)| one.0 + 1 == next.0 && one.1 == next.1;
    pages.chunk_by(follow).map(|run| (run[0].0, run.len() as u64, run[0].1)).collect()
}

#[cfg(test)]
mod tests {
    use ebb_guest_ram::{Backing, GuestRam, HugePages, Populate, RegionSpec};
    use vm_memory::{Bytes, GuestAddress};

    use super::*;

    fn merged(number: u64, place: u64, node: Option<u32>) -> MergedPage {
        MergedPage { page: SharedPage::OfFile(7, number), place, node }
    }

    #[test]
    fn pages_are_counted_as_ksm_does_and_by_node() {
        let first = Observed {
            merged: vec![
                merged(1, 0, Some(0)),
                merged(2, 5, None),
                merged(3, 6, None),
                merged(1, 9, Some(0)),
            ],
            zero_pages: 1,
            copied_pages: 2,
            others: BTreeMap::from([(0, 40), (1, 3)]),
            stable: vec![(SharedPage::OfFile(7, 4), 1)],
        };
        let second = Observed {
            merged: vec![merged(1, 0, Some(0)), merged(2, 1, Some(1)), merged(4, 2, None)],
            ..Observed::default()
        };
        let survey = Survey::new(&[(0, first), (1, second)]);
        assert_eq!((survey.pages_shared, survey.pages_sharing), (4, 3));
        // The first process's page 2 and the second one's page 1. The node of page 4 is known only
        // from the first monitor's own mapping.
        assert_eq!((survey.remote_merged_pages, survey.pages_without_node), (2, 1));
        let [first, second] = &survey.guests[..] else { panic!("two guests") };
        assert_eq!(first.placement, BTreeMap::from([(0, 2), (1, 1)]));
        assert_eq!(second.placement, BTreeMap::from([(0, 1), (1, 2)]));
        assert_eq!((first.read_pages, first.zero_pages, first.copied_pages), (2, 1, 2));
        assert_eq!((first.other_pages, first.misplaced_pages), (43, 3));
        assert_eq!(
            (first.remote.as_slice(), second.remote.as_slice()),
            (&[(5, 1, 1)][..], &[(0, 1, 0)][..])
        );
        assert_eq!(Survey::new(&[]), Survey::default());
    }

    #[test]
    fn remote_pages_are_listed_in_runs() {
        assert_eq!(runs(&[(3, 0), (4, 0), (5, 1), (7, 1)]), [(3, 2, 0), (5, 1, 1), (7, 1, 1)]);
    }

    #[test]
    fn pages_of_this_process_are_on_a_node_once_they_are_touched() {
        let page = vec![1_u8; 3 * PAGE_BYTES as usize];
        let address = (page.as_ptr() as u64).next_multiple_of(PAGE_BYTES);
        let nodes = nodes(std::process::id(), &[address, 0]).unwrap();
        assert!(nodes[0].is_some() && nodes[1].is_none(), "{nodes:?}");
        drop(page);
    }

    #[test]
    fn guest_memory_of_this_process_is_found_and_is_on_a_node() {
        let spec = RegionSpec { start: GuestAddress(0), size_bytes: 32 << 20, host_node: None };
        let ram =
            GuestRam::new(&[spec], Backing::Anonymous, HugePages::Off, Populate::Lazy).unwrap();
        ram.memory().write_slice(&[7; 3 * PAGE_BYTES as usize], GuestAddress(0)).unwrap();
        let observed = of_process(std::process::id(), MergedBy::Owner).unwrap();
        // Other tests may have guest memory as well.
        assert!(observed.others.values().sum::<u64>() >= 3, "{observed:?}");
        let look = Look {
            pid: std::process::id(),
            pagemap: open("/proc/self/pagemap").unwrap(),
            counts: None,
            memory: open("/proc/self/mem").unwrap(),
        };
        let address = ram.regions()[0].host_address;
        assert!(!look.is_zero(address).unwrap() && look.is_zero(address + 5 * PAGE_BYTES).unwrap());
    }

    #[test]
    fn a_process_that_merges_nothing_has_no_merged_pages() {
        let observed = of_process(std::process::id(), MergedBy::Owner).unwrap();
        assert_eq!((observed.merged, observed.stable), (Vec::new(), Vec::new()));
        assert!(of_process(u32::MAX, MergedBy::Owner).is_err());
    }
}

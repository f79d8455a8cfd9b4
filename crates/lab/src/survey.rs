//! Merged pages as the host's kernel has them, seen from outside of the monitors: which ones there are, who shares them, and on
//! which node they are.
//!
//! Nobody's own counters are believed. Pages merged by their owner are those of private mappings of its files of stable pages, as
//! long as they were not written to (`/proc/PID/maps`, `/proc/PID/pagemap`); pages merged by the kernel are marked in
//! `/proc/kpageflags`. move_pages(2) says where they are. All of that takes root's rights.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use ebb_guest_ram::merge::STABLE_FILE_NAME;

use crate::LabError;

const PAGE_BYTES: u64 = 4096;
/// Entries of `/proc/PID/pagemap` and `/proc/kpageflags` (Linux Documentation/admin-guide/mm/pagemap.rst).
const ENTRY_BYTES: u64 = 8;
const PRESENT: u64 = 1 << 63;
const OF_FILE: u64 = 1 << 61;
const FRAME: u64 = (1 << 55) - 1;
/// `KPF_KSM`: the page is shared by KSM.
const MERGED_BY_KERNEL: u64 = 1 << 21;
/// Pages that are asked about at once.
const CHUNK: usize = 4096;

/// Whose merging is looked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MergedBy {
    /// The process that owns the memory.
    Owner,
    /// The kernel.
    Kernel,
}

/// A page that others share, by what all sharers see of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SharedPage {
    /// The page of a file: the file's number, and the page's number in it.
    OfFile(u64, u64),
    /// A page frame.
    Frame(u64),
}

/// The merged pages of one process that were read since they were merged: each with its node, where that is known, as often as it is
/// mapped.
pub type MergedPages = Vec<(SharedPage, Option<u32>)>;

/// A mapping of a process that may have merged pages in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Mapping {
    start: u64,
    end: u64,
    /// Number of its file and the first page in it; `None` for anonymous memory.
    file: Option<(u64, u64)>,
}

/// The merged pages of a process.
///
/// # Errors
/// [`LabError::SystemFile`], [`LabError::Merging`].
pub fn of_process(pid: u32, by: MergedBy) -> Result<MergedPages, LabError> {
    let process = PathBuf::from(format!("/proc/{pid}"));
    let text = read(process.join("maps"))?;
    let pagemap = open(process.join("pagemap"))?;
    let mut merged = Vec::new();
    match by {
        MergedBy::Owner => {
            for mapping in mappings(&text, by) {
                merged.extend(of_stable_file(pid, &pagemap, mapping)?);
            }
        }
        MergedBy::Kernel => {
            let flags = open("/proc/kpageflags".into())?;
            for mapping in mappings(&text, by) {
                merged.extend(of_kernel(pid, &pagemap, &flags, mapping)?);
            }
        }
    }
    Ok(merged)
}

fn read(path: PathBuf) -> Result<String, LabError> {
    fs::read_to_string(&path).map_err(|cause| LabError::SystemFile { path, cause })
}

fn open(path: PathBuf) -> Result<File, LabError> {
    File::open(&path).map_err(|cause| LabError::SystemFile { path, cause })
}

/// Mappings of `/proc/PID/maps` in which merged pages may be: private and writable, and a file of stable pages or no file.
fn mappings(text: &str, by: MergedBy) -> Vec<Mapping> {
    text.lines().filter_map(|line| mapping(line, by)).collect()
}

/// `start-end perms offset dev inode   name`.
fn mapping(line: &str, by: MergedBy) -> Option<Mapping> {
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let number = |text| u64::from_str_radix(text, 16).ok();
    let (start, end) = (number(start)?, number(end)?);
    let private = words.next()?.starts_with("rw-p");
    let offset = number(words.next()?)?;
    let inode: u64 = words.nth(1)?.parse().ok()?;
    let name = words.next().unwrap_or_default();
    let file = match by {
        MergedBy::Owner if name.contains(STABLE_FILE_NAME) => Some((inode, offset / PAGE_BYTES)),
        MergedBy::Kernel if inode == 0 => None,
        _ => return None,
    };
    private.then_some(Mapping { start, end, file })
}

/// Entries of the pages from `first` on.
fn entries(file: &File, first: u64, count: usize) -> io::Result<Vec<u64>> {
    let mut bytes = vec![0; count * ENTRY_BYTES as usize];
    file.read_exact_at(&mut bytes, first * ENTRY_BYTES)?;
    Ok(bytes
        .as_chunks::<{ ENTRY_BYTES as usize }>()
        .0
        .iter()
        .map(|entry| u64::from_ne_bytes(*entry))
        .collect())
}

fn failed(what: &'static str) -> impl Fn(io::Error) -> LabError {
    move |cause| LabError::Merging(format!("cannot look at {what}: {cause}"))
}

/// Pages of a private mapping of a file of stable pages that were not written to.
fn of_stable_file(pid: u32, pagemap: &File, mapping: Mapping) -> Result<MergedPages, LabError> {
    let Some((inode, offset)) = mapping.file else { return Ok(Vec::new()) };
    let (first, count) = (mapping.start / PAGE_BYTES, (mapping.end - mapping.start) / PAGE_BYTES);
    let entries = entries(pagemap, first, count as usize).map_err(failed("a process's pages"))?;
    let mut shared = Vec::new();
    let mut addresses = Vec::new();
    for (entry, page) in entries.iter().zip(0..) {
        // A private page that is present is a copy. One that is not present was not read since it was merged, or it belongs to no guest:
        // the monitor has mappings of the files to make others from.
        if entry & PRESENT != 0 && entry & OF_FILE != 0 {
            shared.push(SharedPage::OfFile(inode, offset + page));
            addresses.push(mapping.start + page * PAGE_BYTES);
        }
    }
    Ok(shared.into_iter().zip(nodes(pid, &addresses).map_err(failed("the nodes of pages"))?).collect())
}

/// Pages of anonymous memory that the kernel has merged.
fn of_kernel(pid: u32, pagemap: &File, flags: &File, mapping: Mapping) -> Result<MergedPages, LabError> {
    let (first, count) = (mapping.start / PAGE_BYTES, (mapping.end - mapping.start) / PAGE_BYTES);
    // Pages of zeros that the kernel keeps for devices cannot be read as entries (vsyscall, [vvar]).
    let Ok(entries) = entries(pagemap, first, count as usize) else { return Ok(Vec::new()) };
    let mut shared = Vec::new();
    let mut addresses = Vec::new();
    for (entry, page) in entries.iter().zip(0..) {
        if entry & PRESENT == 0 || entry & OF_FILE != 0 {
            continue;
        }
        let frame = entry & FRAME;
        if self::entries(flags, frame, 1).map_err(failed("page frames"))?[0] & MERGED_BY_KERNEL != 0 {
            shared.push(SharedPage::Frame(frame));
            addresses.push(mapping.start + page * PAGE_BYTES);
        }
    }
    Ok(shared.into_iter().zip(nodes(pid, &addresses).map_err(failed("the nodes of pages"))?).collect())
}

/// The node of each page that a process has mapped; `None` for one that is not mapped at the moment.
pub fn nodes(pid: u32, addresses: &[u64]) -> io::Result<Vec<Option<u32>>> {
    let mut nodes = Vec::with_capacity(addresses.len());
    for chunk in addresses.chunks(CHUNK) {
        let mut status = vec![0_i32; chunk.len()];
        // SAFETY: without a list of nodes move_pages(2) only looks. It reads as many addresses as `chunk` has, none of which it
        // follows in this process, and writes as many numbers to `status`, which has room for them.
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

/// What all processes together share.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Survey {
    /// Pages that are shared.
    pub pages_shared: u64,
    /// Further pages that share them.
    pub pages_sharing: u64,
    /// Merged pages whose shared page is on another node than the memory of their guest.
    pub remote_merged_pages: u64,
    /// Merged pages whose node is not known.
    pub pages_without_node: u64,
    /// For each process, how many of its merged pages are on which node.
    pub placement: Vec<BTreeMap<u32, u64>>,
}

impl Survey {
    /// Sums up what was found in processes, each with the node of its guest's memory.
    pub fn new(processes: &[(u32, MergedPages)]) -> Self {
        // What one process has not read another one may have.
        let known: BTreeMap<SharedPage, u32> = processes
            .iter()
            .flat_map(|(_, pages)| pages)
            .filter_map(|(page, node)| Some((*page, (*node)?)))
            .collect();
        let shared: BTreeSet<SharedPage> =
            processes.iter().flat_map(|(_, pages)| pages).map(|(page, _)| *page).collect();
        let mut survey = Self { pages_shared: shared.len() as u64, ..Self::default() };
        let mut merged = 0;
        for (home, pages) in processes {
            let mut placement = BTreeMap::new();
            for (page, _) in pages {
                merged += 1;
                let Some(node) = known.get(page) else {
                    survey.pages_without_node += 1;
                    continue;
                };
                *placement.entry(*node).or_default() += 1;
                survey.remote_merged_pages += u64::from(node != home);
            }
            survey.placement.push(placement);
        }
        survey.pages_sharing = merged - survey.pages_shared;
        survey
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
7f0000000000-7f0000010000 rw-p 00003000 00:01 77                         /memfd:ebb-stable (deleted)
7f0000010000-7f0000011000 r--s 00000000 00:01 77                         /memfd:ebb-stable (deleted)
7f0000020000-7f0000040000 rw-p 00000000 00:00 0
7f0000040000-7f0000041000 rw-p 00000000 00:00 0                          [anon:ram]
7f0000050000-7f0000051000 r--p 00000000 00:00 0
55d0a8c00000-55d0a8e00000 rw-p 00000000 00:01 1234                       /bin/ebb
rubbish
";

    #[test]
    fn mappings_with_merged_pages_are_private_and_writable() {
        let owner = mappings(MAPS, MergedBy::Owner);
        assert_eq!(owner, [Mapping { start: 0x7f00_0000_0000, end: 0x7f00_0001_0000, file: Some((77, 3)) }]);
        let kernel = mappings(MAPS, MergedBy::Kernel);
        assert_eq!(
            kernel.iter().map(|mapping| mapping.start).collect::<Vec<_>>(),
            [0x7f00_0002_0000, 0x7f00_0004_0000]
        );
    }

    #[test]
    fn pages_are_counted_as_ksm_does_and_by_node() {
        let page = |number| SharedPage::OfFile(7, number);
        let first = (0, vec![(page(1), Some(0)), (page(2), None), (page(3), None), (page(1), Some(0))]);
        let second = (1, vec![(page(1), Some(0)), (page(2), Some(1))]);
        let survey = Survey::new(&[first, second]);
        assert_eq!((survey.pages_shared, survey.pages_sharing), (3, 3));
        // The first process's page 2 and the second one's page 1.
        assert_eq!((survey.remote_merged_pages, survey.pages_without_node), (2, 1));
        assert_eq!(survey.placement, [BTreeMap::from([(0, 2), (1, 1)]), BTreeMap::from([(0, 1), (1, 1)])]);
        assert_eq!(Survey::new(&[]), Survey::default());
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
    fn a_process_that_merges_nothing_has_no_merged_pages() {
        assert_eq!(of_process(std::process::id(), MergedBy::Owner).unwrap(), []);
        assert!(of_process(u32::MAX, MergedBy::Owner).is_err());
    }
}

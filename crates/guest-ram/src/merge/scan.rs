//! The page table state of guest memory: the ioctl `PAGEMAP_SCAN` (Linux 6.7,
//! Documentation/admin-guide/mm/pagemap.rst).

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use super::MergeUnavailable;
use crate::pagemap::Pagemap;

// include/uapi/linux/fs.h
const PAGEMAP_SCAN: libc::Ioctl = 0xc060_6610;
const WP_MATCHING: u64 = 1 << 0;
const WRITTEN: u64 = 1 << 1;
const FILE: u64 = 1 << 2;
const PRESENT: u64 = 1 << 3;
const SWAPPED: u64 = 1 << 4;
const ZERO: u64 = 1 << 5;
const HUGE: u64 = 1 << 6;

/// `struct pm_scan_arg`
#[repr(C)]
#[derive(Default)]
struct Argument {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// `struct page_region`: neighbouring pages with the same properties.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PageRun {
    start: u64,
    end: u64,
    categories: u64,
}

const _: () = assert!(size_of::<Argument>() == 96 && size_of::<PageRun>() == 24);

impl PageRun {
    /// Host address of the first byte.
    pub(super) fn address(&self) -> usize {
        self.start as usize
    }

    /// Size in bytes.
    pub(super) fn size_bytes(&self) -> usize {
        (self.end - self.start) as usize
    }

    /// Written to since it was protected.
    pub(super) fn is_written(&self) -> bool {
        self.categories & WRITTEN != 0
    }

    /// Pages of a file, not private to the process.
    pub(super) fn is_file(&self) -> bool {
        self.categories & FILE != 0
    }

    /// Not in memory.
    pub(super) fn is_swapped(&self) -> bool {
        self.categories & SWAPPED != 0
    }

    /// The shared page of zeros.
    pub(super) fn is_zero(&self) -> bool {
        self.categories & ZERO != 0
    }

    /// A huge page.
    pub(super) fn is_huge(&self) -> bool {
        self.categories & HUGE != 0
    }
}

/// Selection of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Question {
    /// Pages in memory that are watched for writes, except huge ones and the page of zeros. Those
    /// written to are write-protected in the same step. Absent pages are never protected: the
    /// marker would look like content.
    Small,
    /// Everything that has content, unchanged.
    Any,
    /// The first page that has content, except the page of zeros, unchanged.
    First,
}

/// Queries pages.
#[derive(Debug)]
pub(super) struct PageScan {
    pagemap: File,
    runs: Vec<PageRun>,
}

impl PageScan {
    /// Checks whether the process's `pagemap` supports queries. At most `max_runs` runs are found
    /// in one range.
    pub(super) fn new(pagemap: &Pagemap, max_runs: usize) -> Result<Self, MergeUnavailable> {
        let path = "/proc/self/pagemap";
        let pagemap = pagemap.file().try_clone();
        let pagemap = pagemap.map_err(|source| MergeUnavailable::Proc { path, source })?;
        let mut scan = Self { pagemap, runs: vec![PageRun::default(); max_runs] };
        match scan.ask(0, 0, Question::Any) {
            Ok(_) => Ok(scan),
            Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => {
                Err(MergeUnavailable::OldKernel { feature: "PAGEMAP_SCAN", since: "6.8" })
            }
            Err(source) => {
                Err(MergeUnavailable::Refused { action: "ask for states of pages", source })
            }
        }
    }

    /// The pages between two addresses that `question` selects. The range must not contain more
    /// than `max_runs` runs of them.
    pub(super) fn ask(
        &mut self,
        address: usize,
        size_bytes: usize,
        question: Question,
    ) -> io::Result<&[PageRun]> {
        let mut argument = Argument {
            size: size_of::<Argument>() as u64,
            start: address as u64,
            end: (address + size_bytes) as u64,
            vec: self.runs.as_mut_ptr() as u64,
            vec_len: self.runs.len() as u64,
            return_mask: WRITTEN,
            ..Argument::default()
        };
        match question {
            Question::Small => {
                argument.flags = WP_MATCHING;
                argument.category_mask = PRESENT | HUGE | ZERO;
                argument.category_inverted = HUGE | ZERO;
            }
            Question::Any => {
                argument.category_anyof_mask = PRESENT | SWAPPED;
                argument.return_mask = WRITTEN | FILE | PRESENT | SWAPPED | ZERO | HUGE;
            }
            Question::First => {
                (argument.vec_len, argument.max_pages) = (1, 1);
                argument.category_anyof_mask = PRESENT | SWAPPED;
                argument.category_mask = ZERO;
                argument.category_inverted = ZERO;
            }
        }
        loop {
            // SAFETY: PAGEMAP_SCAN reads and writes one `struct pm_scan_arg`, and writes up to
            // `vec_len` regions to `vec`, which is that long and lives until the call returns. It
            // changes no content of memory.
            let found =
                unsafe { libc::ioctl(self.pagemap.as_raw_fd(), PAGEMAP_SCAN, &raw mut argument) };
            if let Ok(found) = usize::try_from(found) {
                return Ok(&self.runs[..found.min(self.runs.len())]);
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
    }
}

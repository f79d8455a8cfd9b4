//! Passing memory to another process of the same host, without copying it.
//!
//! Memory files can be mapped by several processes. A monitor that is to be replaced sends their
//! descriptors to its successor (unix(7), `SCM_RIGHTS`); both then have the same memory, and have
//! to agree on which of them uses it.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::fd::OwnedFd;

use ebb_abi::HUGE_PAGE_SIZE_BYTES;
use rustix::fs::{SealFlags, fcntl_get_seals, fstat, fstatfs};
use rustix::io::fcntl_dupfd_cloexec;
use serde::{Deserialize, Serialize};

use crate::mapping::Mapping;
use crate::ram::check;
use crate::{Backing, GuestRam, HugePages, ImageRegion, RamError, Region, RegionSpec};

/// Version of [`SharedLayout`] that this crate writes, and the only one that it reads.
pub const SHARED_LAYOUT_VERSION: u32 = 1;

/// Lowest file descriptor above standard input and output.
const FIRST_DESCRIPTOR: i32 = 3;

/// Type of the file systems of memory files (statfs(2)).
const TMPFS_MAGIC: i64 = 0x0102_1994;
const HUGETLBFS_MAGIC: i64 = 0x9584_58f6;

/// Guest memory in transfer to another process.
#[derive(Debug)]
pub struct SharedRam {
    /// Layout of the files.
    pub layout: SharedLayout,
    /// A memory file for each region, in the regions' order.
    pub files: Vec<OwnedFd>,
}

/// Layout of the files of [`SharedRam`]; sent with their descriptors.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SharedLayout {
    /// [`SHARED_LAYOUT_VERSION`].
    pub version: u32,
    /// Backing of the memory.
    pub backing: Backing,
    /// The regions in ascending order; each occupies a whole file.
    pub regions: Vec<ImageRegion>,
}

impl GuestRam {
    /// The memory for another process to [adopt](Self::adopt); `None` if it is private to this one
    /// ([`Backing::Anonymous`], and memory that was restored from a file).
    ///
    /// As long as the other process may use the memory, this one must neither run the guest nor
    /// discard pages. Unmapping it (dropping this value) is harmless at any time. System call:
    /// `fcntl` with `F_DUPFD_CLOEXEC`.
    ///
    /// # Errors
    /// [`RamError::Share`] if there is no room for more descriptors.
    pub fn share(&self) -> Result<Option<SharedRam>, RamError> {
        let files: Option<Vec<&File>> = self.mappings.iter().map(Mapping::file).collect();
        let Some(files) = files else { return Ok(None) };
        let files = files
            .into_iter()
            .map(|file| fcntl_dupfd_cloexec(file, FIRST_DESCRIPTOR))
            .collect::<Result<Vec<_>, _>>()
            .map_err(|error| RamError::Share { source: error.into() })?;
        let region =
            |region: &Region| ImageRegion { start: region.start.0, size_bytes: region.size_bytes };
        let layout = SharedLayout {
            version: SHARED_LAYOUT_VERSION,
            backing: self.backing(),
            regions: self.regions().iter().map(region).collect(),
        };
        Ok(Some(SharedRam { layout, files }))
    }

    /// Maps the memory of another process. The regions must be the same, but may be bound to other
    /// nodes, which applies to pages that are not allocated yet.
    ///
    /// The content is not changed, and nothing is allocated: adopting memory and dropping it again
    /// has no effect on it. With [`Backing::Hugetlb2M`], it is not known which parts of huge pages
    /// are in the balloon: those are discarded when their huge page is inflated anew as a whole.
    /// System calls: `fstat`, `fstatfs`, `fcntl` with `F_GET_SEALS`, and those of
    /// [`new`](Self::new) except `memfd_create`.
    ///
    /// # Errors
    /// [`RamError::Adopt`] if the files are not such memory, or could be truncated (an access to a
    /// missing part would end the process); else as [`new`](Self::new).
    pub fn adopt(
        regions: &[RegionSpec],
        huge_pages: HugePages,
        shared: SharedRam,
    ) -> Result<Self, RamError> {
        let SharedRam { layout, files } = shared;
        layout.check_regions(regions, files.len())?;
        let backing = layout.backing;
        check(regions, backing)?;
        let mut seen = BTreeSet::new();
        for (spec, file) in regions.iter().zip(&files) {
            let inode = check_file(spec, backing, file).map_err(|problem| RamError::Adopt {
                problem: format!("the file for the region at {:#x} {problem}", spec.start.0),
            })?;
            if !seen.insert(inode) {
                return Err(RamError::Adopt {
                    problem: "two regions have the same file".to_owned(),
                });
            }
        }
        let mappings = regions
            .iter()
            .zip(files)
            .map(|(spec, file)| Mapping::map(spec, backing, huge_pages, Some(File::from(file))))
            .collect::<Result<Vec<_>, _>>()?;
        Self::assemble(regions, mappings, backing, huge_pages, None)
    }
}

impl SharedLayout {
    fn check_regions(&self, regions: &[RegionSpec], files: usize) -> Result<(), RamError> {
        let problem = if self.version != SHARED_LAYOUT_VERSION {
            format!("its layout has version {}, and {SHARED_LAYOUT_VERSION} is known", self.version)
        } else if self.backing == Backing::Anonymous {
            "anonymous memory cannot be shared; start the machine with a memory file".to_owned()
        } else if files != self.regions.len() {
            format!("there are {files} files for {} regions", self.regions.len())
        } else if !self.regions.iter().copied().eq(regions
            .iter()
            .map(|spec| ImageRegion { start: spec.start.0, size_bytes: spec.size_bytes }))
        {
            format!("its regions are {:x?}, and the machine's are {regions:x?}", self.regions)
        } else {
            return Ok(());
        };
        Err(RamError::Adopt { problem })
    }
}

/// Checks that a file can be mapped as a region. Returns its identity, or the problem.
fn check_file(spec: &RegionSpec, backing: Backing, file: &OwnedFd) -> Result<(u64, u64), String> {
    let unknown = |error: rustix::io::Errno| format!("cannot be examined: {error}");
    let stat = fstat(file).map_err(unknown)?;
    let system = fstatfs(file).map_err(unknown)?;
    let (magic, unit_bytes) = match backing {
        Backing::Hugetlb2M => (HUGETLBFS_MAGIC, Some(HUGE_PAGE_SIZE_BYTES)),
        Backing::Memfd | Backing::Anonymous => (TMPFS_MAGIC, None),
    };
    if system.f_type as i64 != magic
        || unit_bytes.is_some_and(|unit_bytes| system.f_bsize as u64 != unit_bytes)
    {
        return Err(format!("is not {backing}"));
    }
    if stat.st_size as u64 != spec.size_bytes {
        return Err(format!("has {} bytes instead of {}", stat.st_size, spec.size_bytes));
    }
    if !fcntl_get_seals(file).map_err(unknown)?.contains(SealFlags::SHRINK) {
        return Err("could be made shorter: it is not sealed against that".to_owned());
    }
    Ok((stat.st_dev, stat.st_ino))
}

#[cfg(test)]
mod tests;

//! Mapping guest memory.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::ptr;
use std::sync::OnceLock;

use ebb_abi::{HUGE_PAGE_SIZE_BYTES, PAGE_SIZE_BYTES};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{
    Advice, MapFlags, MremapFlags, ProtFlags, madvise, mmap, mmap_anonymous, mremap_fixed, munmap,
};

use crate::RamError;
use crate::region::{Backing, HugePages, RegionSpec};

const HUGE: usize = HUGE_PAGE_SIZE_BYTES as usize;
const PAGE: usize = PAGE_SIZE_BYTES as usize;

/// Allocate from the given node if it has memory (include/uapi/linux/mempolicy.h).
#[cfg(feature = "merge")]
const MPOL_PREFERRED: libc::c_int = 1;
/// Allocate from the given nodes only.
const MPOL_BIND: libc::c_int = 2;

/// Bits in a word of the kernel's node mask.
const WORD_BITS: u32 = usize::BITS;

/// Largest node number that Linux can be configured for (`NODES_SHIFT` 10).
const MAX_NODE: u32 = 1023;

/// A region of guest memory in the process's address space, with at least one inaccessible page at
/// either end.
///
/// Host and guest-physical address are congruent modulo 2 MiB; otherwise neither the host's
/// transparent huge pages nor KVM's huge mappings could cover guest memory.
#[derive(Debug)]
pub(crate) struct Mapping {
    reservation: Reservation,
    address: usize,
    size_bytes: usize,
    file: Option<File>,
}

impl Mapping {
    /// Maps a region that has been checked for alignment.
    pub(crate) fn new(
        spec: &RegionSpec,
        backing: Backing,
        huge_pages: HugePages,
    ) -> Result<Self, RamError> {
        let kind = match backing {
            Backing::Anonymous => return Self::map(spec, backing, huge_pages, None),
            Backing::Memfd => MemfdFlags::empty(),
            Backing::Hugetlb2M => MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB,
        };
        let file = create_file(spec.size_bytes as usize, kind).map_err(|source| RamError::Map {
            action: "create a memfd for",
            size_bytes: spec.size_bytes,
            source,
        })?;
        Self::map(spec, backing, huge_pages, Some(file))
    }

    /// Maps a region that has been checked for alignment, from its file if it has one, whose size
    /// must be the region's and must not be able to change.
    pub(crate) fn map(
        spec: &RegionSpec,
        backing: Backing,
        huge_pages: HugePages,
        file: Option<File>,
    ) -> Result<Self, RamError> {
        let size_bytes = spec.size_bytes as usize;
        let map_error =
            |action| move |source| RamError::Map { action, size_bytes: spec.size_bytes, source };
        // A page of distance at either end and up to 2 MiB for alignment.
        let reservation = Reservation::new(size_bytes + HUGE + 2 * PAGE)
            .map_err(map_error("reserve address space for"))?;
        let offset = spec.start.0 as usize % HUGE;
        let lowest = reservation.address + PAGE;
        let address = lowest + (offset + HUGE - lowest % HUGE) % HUGE;

        reservation.map(address, size_bytes, file.as_ref(), backing).map_err(|error| {
            if backing == Backing::Hugetlb2M && error == Errno::NOMEM {
                too_few_huge_pages(spec.size_bytes)
            } else {
                map_error("map")(error.into())
            }
        })?;

        let mapping = Self { reservation, address, size_bytes, file };
        mapping.set_policies(spec, backing, huge_pages)?;
        Ok(mapping)
    }

    /// Policies that must be in force before the first page is allocated.
    fn set_policies(
        &self,
        spec: &RegionSpec,
        backing: Backing,
        huge_pages: HugePages,
    ) -> Result<(), RamError> {
        self.bind(spec)?;
        self.advise("MADV_DONTDUMP", Advice::LinuxDontDump)?;
        if backing == Backing::Hugetlb2M {
            return Ok(());
        }
        let (name, advice) = match huge_pages {
            HugePages::On => ("MADV_HUGEPAGE", Advice::LinuxHugepage),
            HugePages::Off => ("MADV_NOHUGEPAGE", Advice::LinuxNoHugepage),
        };
        match self.advise(name, advice) {
            // A kernel without transparent huge pages behaves as HugePages::Off requests, and
            // HugePages::On is only a hint.
            Err(RamError::Advise { source, .. }) if source.raw_os_error() == Some(libc::EINVAL) => {
                tracing::debug!("this kernel has no transparent huge pages");
                Ok(())
            }
            other => other,
        }
    }

    fn bind(&self, spec: &RegionSpec) -> Result<(), RamError> {
        let Some(node) = spec.host_node else { return Ok(()) };
        bind_to_node(self.address, self.size_bytes, node)
            .map_err(|source| RamError::BindNode { node, source })
    }

    fn advise(&self, name: &'static str, advice: Advice) -> Result<(), RamError> {
        // SAFETY: the range is this mapping's own. All advices given are policies: none changes the
        // memory's content.
        let result = unsafe { madvise(self.address as *mut _, self.size_bytes, advice) };
        result.map_err(|error| RamError::Advise { advice: name, source: error.into() })
    }

    /// Maps part of `file` over part of this mapping, privately: writes do not reach the file.
    pub(crate) fn map_privately(
        &self,
        offset_bytes: usize,
        size_bytes: usize,
        file: &File,
        file_offset_bytes: u64,
    ) -> Result<(), RamError> {
        assert!(offset_bytes.checked_add(size_bytes).is_some_and(|end| end <= self.size_bytes));
        let address = (self.address + offset_bytes) as *mut _;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
        // SAFETY: MAP_FIXED replaces only pages of this mapping, as asserted above, which is not
        // yet handed out.
        let result =
            unsafe { mmap(address, size_bytes, protection, flags, file, file_offset_bytes) };
        result.map(drop).map_err(|error| {
            self.reservation.lose(address as usize, size_bytes);
            RamError::Map {
                action: "map from its file",
                size_bytes: size_bytes as u64,
                source: error.into(),
            }
        })
    }

    /// Sets the policies that parts mapped with [`map_privately`](Self::map_privately) need.
    pub(crate) fn set_file_policies(&self, spec: &RegionSpec) -> Result<(), RamError> {
        self.bind(spec)?;
        self.advise("MADV_DONTDUMP", Advice::LinuxDontDump)
    }

    /// Replaces memory elsewhere, no larger than this mapping, by memory like this mapping's, which
    /// must be anonymous. This mapping's content moves there; if it was never touched, there is
    /// none.
    ///
    /// # Safety
    /// The memory at `address` must be guest memory or a mapping of this crate's own, nothing may
    /// rely on its content (except that it equals the replacement), and it must not overlap this
    /// mapping.
    pub(crate) unsafe fn copy_over(&self, address: usize, size_bytes: usize) -> io::Result<()> {
        assert!(size_bytes <= self.size_bytes);
        let flags = MremapFlags::MAYMOVE | MremapFlags::DONTUNMAP;
        let (from, to) = (self.address as *mut _, address as *mut _);
        // SAFETY: MREMAP_DONTUNMAP leaves this mapping in place. It replaces guest memory on whose
        // content nothing relies, as the caller guarantees, and the result is guest memory.
        let result = unsafe { mremap_fixed(from, size_bytes, size_bytes, flags, to) };
        if let Err(error) = result {
            abort_unless_mapped(to, size_bytes, error);
            return Err(error.into());
        }
        Ok(())
    }

    /// Host address of the first byte.
    pub(crate) fn address(&self) -> usize {
        self.address
    }

    /// Size in bytes.
    pub(crate) fn size_bytes(&self) -> usize {
        self.size_bytes
    }

    /// The file that is mapped, from its beginning, unless the memory is anonymous.
    pub(crate) fn file(&self) -> Option<&File> {
        self.file.as_ref()
    }

    /// Leaves the memory mapped for the rest of the process's life.
    pub(crate) fn leak(self) {
        std::mem::forget(self.reservation);
    }
}

/// A part of the address space; unmapped when dropped.
#[derive(Debug)]
struct Reservation {
    address: usize,
    size_bytes: usize,
    /// A part that is not this reservation's any more: Linux unmaps a place before it maps something
    /// else there, so that a failure may leave a hole, in which another thread may have mapped
    /// memory of its own since.
    lost: OnceLock<Range<usize>>,
}

impl Reservation {
    fn new(size_bytes: usize) -> io::Result<Self> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: without MAP_FIXED the kernel chooses a free place, so no existing mapping is
        // touched.
        let address =
            unsafe { mmap_anonymous(ptr::null_mut(), size_bytes, ProtFlags::empty(), flags) }?;
        Ok(Self { address: address as usize, size_bytes, lost: OnceLock::new() })
    }

    /// Replaces part of the reservation by memory.
    fn map(
        &self,
        address: usize,
        size_bytes: usize,
        file: Option<&File>,
        backing: Backing,
    ) -> Result<(), Errno> {
        assert!(address >= self.address && address + size_bytes <= self.address + self.size_bytes);
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // Huge pages are reserved at once, so that too small a pool causes an error here and not a
        // SIGBUS in the guest.
        let reserve =
            if backing == Backing::Hugetlb2M { MapFlags::empty() } else { MapFlags::NORESERVE };
        if let Some(file) = file {
            let flags = MapFlags::SHARED | MapFlags::FIXED | reserve;
            // SAFETY: MAP_FIXED replaces only pages of this reservation, as asserted above, and
            // nothing else uses them.
            unsafe { mmap(address as *mut _, size_bytes, protection, flags, file, 0) }
        } else {
            let flags = MapFlags::PRIVATE | MapFlags::FIXED | reserve;
            // SAFETY: MAP_FIXED replaces only pages of this reservation, as asserted above, and
            // nothing else uses them.
            unsafe { mmap_anonymous(address as *mut _, size_bytes, protection, flags) }
        }
        .map(|_| ())
        .inspect_err(|_| self.lose(address, size_bytes))
    }

    /// A mapping at this place has failed. Only the first one counts: construction ends with it.
    fn lose(&self, address: usize, size_bytes: usize) {
        let _ = self.lost.set(address..address + size_bytes);
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let end = self.address + self.size_bytes;
        let lost = self.lost.get().cloned().unwrap_or(end..end);
        for part in
            [self.address..lost.start, lost.end..end].into_iter().filter(|it| !it.is_empty())
        {
            // SAFETY: the reservation owns this range. `GuestRam` drops it only after making sure
            // that no handle to the memory is left, and leaks it otherwise; before that, during
            // construction, no handle exists.
            if let Err(error) = unsafe { munmap(part.start as *mut _, part.len()) } {
                tracing::error!("cannot unmap guest memory at {:#x}: {error}", part.start);
            }
        }
    }
}

/// Binds the pages of `[address, address + size_bytes)` that will be allocated from now on to
/// `node` (mbind(2)).
pub(crate) fn bind_to_node(address: usize, size_bytes: usize, node: u32) -> io::Result<()> {
    set_policy(address, size_bytes, MPOL_BIND, node)
}

/// The same, but other nodes have the pages if `node` has no memory left.
#[cfg(feature = "merge")]
pub(crate) fn prefer_node(address: usize, size_bytes: usize, node: u32) -> io::Result<()> {
    set_policy(address, size_bytes, MPOL_PREFERRED, node)
}

fn set_policy(address: usize, size_bytes: usize, policy: libc::c_int, node: u32) -> io::Result<()> {
    if node > MAX_NODE {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    let mut mask = [0_usize; (MAX_NODE + 1) as usize / WORD_BITS as usize];
    mask[(node / WORD_BITS) as usize] = 1 << (node % WORD_BITS);
    // The kernel reads one bit less than the given number (mm/mempolicy.c, get_nodes).
    let mask_bits = mask.len() * WORD_BITS as usize + 1;
    // SAFETY: mbind changes only the node of future pages of the range, never the content of
    // memory, and reads `mask_bits - 1` bits from `mask`, which lives until the call returns and is
    // that long.
    let result = unsafe {
        libc::syscall(libc::SYS_mbind, address, size_bytes, policy, mask.as_ptr(), mask_bits, 0)
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Ends the process if guest memory was lost. The kernel removes the old mapping before it makes
/// the new one, and can lack memory for that (a cgroup's limit). Another thread could then map its
/// own memory there, to which the guest would write.
pub(crate) fn abort_unless_mapped(address: *mut std::ffi::c_void, size_bytes: usize, error: Errno) {
    // SAFETY: normal access is the advice of all guest memory, and the advice changes no content.
    // The range was guest memory, and guest memory is not unmapped while it is being discarded.
    let result = unsafe { madvise(address, size_bytes, Advice::Normal) };
    if result == Err(Errno::NOMEM) {
        tracing::error!("guest memory at {address:p} was lost while it was replaced: {error}");
        std::process::abort();
    }
}

/// A memory file whose size can never change, so that no access to its mapping can fault beyond the
/// file's end.
fn create_file(size_bytes: usize, kind: MemfdFlags) -> io::Result<File> {
    let fd: OwnedFd =
        memfd_create("ebb-guest-ram", kind | MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&fd, size_bytes as u64)?;
    fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(File::from(fd))
}

fn too_few_huge_pages(size_bytes: u64) -> RamError {
    let read = |name: &str| {
        let path = format!("/sys/kernel/mm/hugepages/hugepages-2048kB/{name}");
        std::fs::read_to_string(path)
            .ok()
            .and_then(|text| text.trim().parse::<u64>().ok())
            .unwrap_or(0)
    };
    let wanted_pages = size_bytes.div_ceil(HUGE_PAGE_SIZE_BYTES);
    let free_pages = read("free_hugepages").saturating_sub(read("resv_hugepages"));
    // At least one: the pool changed between the refusal and this check.
    let missing_pages = wanted_pages.saturating_sub(free_pages).max(1);
    RamError::TooFewHugePages { wanted_pages, free_pages, missing_pages }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The pool of huge pages never has so much.
    const TOO_MUCH: usize = 1 << 40;

    #[test]
    fn memory_in_the_hole_of_a_failed_mapping_is_left_alone() {
        let reservation = Reservation::new(TOO_MUCH + 2 * HUGE).unwrap();
        let place = (reservation.address + PAGE).next_multiple_of(HUGE);
        let file = create_file(TOO_MUCH, MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB).unwrap();
        let mapped = reservation.map(place, TOO_MUCH, Some(&file), Backing::Hugetlb2M);
        assert_eq!(mapped, Err(Errno::NOMEM));
        // Another thread maps memory there.
        let flags = MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE;
        // SAFETY: replaces no mapping; a kernel that has kept the old one refuses it.
        let other = unsafe { mmap_anonymous(place as *mut _, PAGE, ProtFlags::READ, flags) };
        drop(reservation);
        let mut resident = [0];
        // SAFETY: the vector has an entry for the page; mincore fails where nothing is mapped.
        let known = unsafe { libc::mincore(place as *mut _, PAGE, resident.as_mut_ptr()) };
        assert_eq!(known, 0, "{:?} was unmapped", other.map(|at| at as usize));
    }
}

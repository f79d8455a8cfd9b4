//! KVM's rings of dirty pages (Linux Documentation/virt/kvm/api.rst, section 8.29).

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ebb_abi::{PAGE_SIZE_BYTES, Pfn};
use kvm_bindings::{
    KVM_CAP_DIRTY_LOG_RING, KVM_CAP_DIRTY_LOG_RING_ACQ_REL, KVM_DIRTY_LOG_PAGE_OFFSET,
    kvm_dirty_gfn, kvm_enable_cap,
};
use kvm_ioctls::{VcpuFd, VmFd};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::{DirtyLogError, Logging, refused, set_logging, vm_ioctl};
use crate::{GuestRam, GuestRange, PageBitmap};

/// `KVM_RESET_DIRTY_RINGS`: `_IO(KVMIO, 0xc7)`.
const KVM_RESET_DIRTY_RINGS: libc::c_ulong = 0xaec7;

/// An entry's page was written to; the kernel sets it.
const DIRTY: u32 = 1;
/// An entry has been read and can be reused; the reader sets it.
const RESET: u32 = 2;

/// An entry as both sides access it (`struct kvm_dirty_gfn`).
#[derive(Debug)]
#[repr(C)]
struct Entry {
    flags: AtomicU32,
    /// Memory slot, with the address space in the upper half.
    slot: AtomicU32,
    /// Page in the slot.
    offset: AtomicU64,
}

const _: () = assert!(size_of::<Entry>() == size_of::<kvm_dirty_gfn>());

const ENTRY_BYTES: u32 = size_of::<Entry>() as u32;

/// A page of memory; the kernel adds the entries that it reserves for pages that the processor logs
/// by itself.
const MIN_ENTRIES: u32 = PAGE_SIZE_BYTES as u32 / ENTRY_BYTES;

/// The log of dirty pages as a ring for each vCPU.
///
/// A vCPU whose ring is nearly full leaves KVM_RUN with `KVM_EXIT_DIRTY_RING_FULL`; its thread
/// calls [`harvest`](Self::harvest) and continues. No other thread has to stop for that. Harvested
/// pages are kept here, and are protected against writes again, until [`take`](Self::take) returns
/// them: a caller that takes them before it reads the pages misses no write.
///
/// Pages that a processor logs by itself are added to the ring when its vCPU leaves the guest, so
/// the last call must follow after all vCPUs have stopped.
///
/// System calls: `ioctl` with `KVM_CHECK_EXTENSION` (0xae03), `KVM_ENABLE_CAP` (0x4068aea3),
/// `KVM_SET_USER_MEMORY_REGION` (0x4020ae46), `KVM_RESET_DIRTY_RINGS` (0xaec7); `mmap`, `munmap`.
#[derive(Debug)]
pub struct DirtyRing {
    entries: u32,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    rings: Vec<VcpuRing>,
    /// Entries that were read and not reported to the kernel yet.
    read_entries: u64,
    /// Pages harvested and not taken yet; `None` while logging is off.
    found: Option<Found>,
}

#[derive(Debug)]
struct Found {
    /// By slot.
    regions: Vec<GuestRange>,
    pages: PageBitmap,
}

impl DirtyRing {
    /// Gives each vCPU of the machine a ring of `entries` entries. This must be done before the
    /// first vCPU is created; the machine cannot have a [`DirtyBitmap`](super::DirtyBitmap) from
    /// then on.
    ///
    /// # Errors
    /// [`DirtyLogError::Missing`] before Linux 5.11 and on processors other than x86,
    /// [`DirtyLogError::RingSize`], [`DirtyLogError::Refused`].
    pub fn enable(vm: &VmFd, entries: u32) -> Result<Self, DirtyLogError> {
        // The first one means that entries are passed with acquire and release, as is done here; on
        // x86, both are the same.
        let found = [KVM_CAP_DIRTY_LOG_RING_ACQ_REL, KVM_CAP_DIRTY_LOG_RING].into_iter().find_map(
            |capability| {
                let max_bytes = vm.check_extension_raw(capability.into());
                (max_bytes > 0).then_some((capability, max_bytes as u32))
            },
        );
        let (capability, max_bytes) = found.ok_or(DirtyLogError::Missing {
            capability: "KVM_CAP_DIRTY_LOG_RING",
            since: "since Linux 5.11, on x86_64 with CONFIG_HAVE_KVM_DIRTY_RING",
        })?;
        let max_entries = max_bytes / ENTRY_BYTES;
        if !entries.is_power_of_two() || !(MIN_ENTRIES..=max_entries).contains(&entries) {
            return Err(DirtyLogError::RingSize { entries, min_entries: MIN_ENTRIES, max_entries });
        }
        let request = kvm_enable_cap {
            cap: capability,
            args: [u64::from(entries) * u64::from(ENTRY_BYTES), 0, 0, 0],
            ..kvm_enable_cap::default()
        };
        vm.enable_cap(&request).map_err(refused("give each vCPU a ring of dirty pages"))?;
        Ok(Self { entries, state: Mutex::default() })
    }

    /// Maps the ring of a vCPU of the same machine. Each vCPU must be added before it runs while
    /// pages are logged.
    ///
    /// # Errors
    /// [`DirtyLogError::MapRing`].
    pub fn add_vcpu(&self, vcpu: &VcpuFd) -> Result<(), DirtyLogError> {
        let ring = VcpuRing::map(vcpu, self.entries)?;
        self.lock().rings.push(ring);
        Ok(())
    }

    /// Starts logging: every further write is found. No effect if logging is on.
    ///
    /// # Errors
    /// [`DirtyLogError::Refused`]; nothing is logged then.
    ///
    /// # Safety
    /// `vm` must be the machine for which this value was created. Each region of `ram` must be a
    /// memory slot of it, numbered by the region's index in [`GuestRam::regions`], and stay mapped
    /// as long as the machine can access it.
    pub unsafe fn start(&self, vm: &VmFd, ram: &GuestRam) -> Result<(), DirtyLogError> {
        let mut state = self.lock();
        if state.found.is_some() {
            return Ok(());
        }
        let regions = ram.page_ranges();
        state.found = Some(Found { pages: PageBitmap::new(&regions), regions });
        // SAFETY: as guaranteed by the caller.
        let result = unsafe { set_logging(vm, ram, Logging::On) };
        if result.is_err() {
            state.found = None;
            // SAFETY: as guaranteed by the caller.
            unsafe { set_logging(vm, ram, Logging::Off) }?;
        }
        result
    }

    /// Stops logging, and drops the logged pages. No effect if logging is off.
    ///
    /// # Errors
    /// [`DirtyLogError::Refused`]; some memory may still be logged then.
    ///
    /// # Safety
    /// As with [`start`](Self::start).
    pub unsafe fn stop(&self, vm: &VmFd, ram: &GuestRam) -> Result<(), DirtyLogError> {
        let mut state = self.lock();
        if state.found.is_some() {
            // SAFETY: as guaranteed by the caller.
            unsafe { set_logging(vm, ram, Logging::Off) }?;
            state.empty(vm)?;
            state.found = None;
        }
        Ok(())
    }

    /// Empties all rings, and keeps their pages for [`take`](Self::take). Returns the number of
    /// entries read.
    ///
    /// Any thread may call this at any time; vCPUs may run.
    ///
    /// # Errors
    /// [`DirtyLogError::Refused`]; pages found until then are kept.
    pub fn harvest(&self, vm: &VmFd) -> Result<u64, DirtyLogError> {
        self.lock().empty(vm)
    }

    /// Adds the pages to `pages` that were written to since the last call, or since the start.
    ///
    /// # Errors
    /// [`DirtyLogError::Refused`]; pages found until then are returned by the next call.
    pub fn take(&self, vm: &VmFd, pages: &mut PageBitmap) -> Result<(), DirtyLogError> {
        let mut state = self.lock();
        state.empty(vm)?;
        if let Some(found) = &mut state.found {
            pages.union(&found.pages);
            found.pages.clear();
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn empty(&mut self, vm: &VmFd) -> Result<u64, DirtyLogError> {
        let before = self.read_entries;
        for ring in &mut self.rings {
            while let Some((slot, page)) = ring.pop() {
                self.read_entries += 1;
                if let Some(found) = &mut self.found {
                    found.insert(slot, page);
                }
            }
        }
        let count = self.read_entries - before;
        if self.read_entries > 0 {
            // SAFETY: the request takes no argument.
            unsafe { vm_ioctl(vm, KVM_RESET_DIRTY_RINGS, 0) }
                .map_err(refused("reset its dirty rings"))?;
            self.read_entries = 0;
        }
        Ok(count)
    }
}

impl Found {
    fn insert(&mut self, slot: u32, page: u64) {
        // The upper half is the address space: system management mode sees the same memory, in
        // slots of the same numbers.
        if let Some(region) = self.regions.get((slot & 0xffff) as usize) {
            self.pages.insert(GuestRange::new(Pfn(region.start.0.saturating_add(page)), 1));
        }
    }
}

/// The ring of a vCPU, shared with the kernel.
#[derive(Debug)]
struct VcpuRing {
    first: NonNull<Entry>,
    entries: u32,
    /// Number of entries read so far, modulo 2^32.
    position: u32,
}

// SAFETY: the mapping belongs to this value, and can be read by any thread; the kernel does not
// depend on the thread.
unsafe impl Send for VcpuRing {}

impl VcpuRing {
    fn map(vcpu: &VcpuFd, entries: u32) -> Result<Self, DirtyLogError> {
        use std::os::fd::{AsRawFd, BorrowedFd};
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let offset_bytes = u64::from(KVM_DIRTY_LOG_PAGE_OFFSET) * PAGE_SIZE_BYTES;
        // SAFETY: the descriptor is open as long as `vcpu` is borrowed.
        let fd = unsafe { BorrowedFd::borrow_raw(vcpu.as_raw_fd()) };
        let size_bytes = entries as usize * ENTRY_BYTES as usize;
        // SAFETY: without MAP_FIXED the kernel chooses a free place, so no existing mapping is
        // touched.
        let address = unsafe {
            mmap(std::ptr::null_mut(), size_bytes, protection, MapFlags::SHARED, fd, offset_bytes)
        };
        let address = address.map_err(|error| DirtyLogError::MapRing { source: error.into() })?;
        let first = NonNull::new(address.cast()).ok_or_else(|| DirtyLogError::MapRing {
            source: std::io::Error::other("it was mapped at address 0"),
        })?;
        Ok(Self { first, entries, position: 0 })
    }

    /// Slot, with the address space in the upper half, and index in it of the next page that was
    /// written to.
    fn pop(&mut self) -> Option<(u32, u64)> {
        // SAFETY: the index is below the number of entries, which all lie in the mapping.
        let entry = unsafe { self.first.add((self.position % self.entries) as usize) };
        // SAFETY: the mapping is aligned to pages and lives as long as `self`. The only other
        // writer is the kernel, and all parts of an entry are atomics.
        let entry = unsafe { entry.as_ref() };
        // Acquire, pairs with the kernel's release: the rest of the entry was written before.
        if entry.flags.load(Ordering::Acquire) & DIRTY == 0 {
            return None;
        }
        // Relaxed: ordered by the flags on either side.
        let (slot, offset) =
            (entry.slot.load(Ordering::Relaxed), entry.offset.load(Ordering::Relaxed));
        // Release: the kernel may reuse the entry from here on.
        entry.flags.store(RESET, Ordering::Release);
        self.position = self.position.wrapping_add(1);
        Some((slot, offset))
    }
}

impl Drop for VcpuRing {
    fn drop(&mut self) {
        let size_bytes = self.entries as usize * ENTRY_BYTES as usize;
        // SAFETY: the mapping belongs to this value, and no reference into it outlives a call.
        if let Err(error) = unsafe { munmap(self.first.as_ptr().cast(), size_bytes) } {
            tracing::error!("cannot unmap the dirty ring of a vCPU: {error}");
        }
    }
}

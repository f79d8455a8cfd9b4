//! KVM's bitmap of dirty pages (Linux Documentation/virt/kvm/api.rst, sections 4.8 and 4.117).

use ebb_abi::Pfn;
use kvm_bindings::{
    KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE, kvm_clear_dirty_log,
    kvm_clear_dirty_log__bindgen_ty_1, kvm_enable_cap,
};
use kvm_ioctls::VmFd;

use super::{DirtyLogError, Logging, refused, set_logging, vm_ioctl};
use crate::{GuestRam, GuestRange, PageBitmap};

/// `KVM_CLEAR_DIRTY_LOG`: `_IOWR(KVMIO, 0xc0, struct kvm_clear_dirty_log)`.
const KVM_CLEAR_DIRTY_LOG: libc::c_ulong = 0xc018_aec0;

const _: () = assert!(size_of::<kvm_clear_dirty_log>() == 0x18);

/// First page and number of pages of a call must be multiples of this, unless the range ends at the
/// slot's end.
const UNIT_PAGES: u64 = 64;

/// Pages cleared per call, 256 MiB: vCPUs that fault wait until it is done.
const CLEAR_PAGES: u64 = 1 << 16;

const _: () = assert!(CLEAR_PAGES.is_multiple_of(UNIT_PAGES));

/// The log of dirty pages as a bitmap.
///
/// A page that was found dirty stays dirty, and is found again, until it is [cleared](Self::clear):
/// so it must be cleared before it is read, and every page found may be cleared at any time before
/// that. A write after clearing makes it dirty again. Pages are cleared exactly; neighbours that
/// share a word of the kernel's bitmap are not affected.
///
/// Switched off when dropped. System calls: `ioctl` with `KVM_ENABLE_CAP` (0x4068aea3),
/// `KVM_CHECK_EXTENSION` (0xae03), `KVM_SET_USER_MEMORY_REGION` (0x4020ae46), `KVM_GET_DIRTY_LOG`
/// (0x4010ae42), `KVM_CLEAR_DIRTY_LOG` (0xc018aec0).
#[derive(Debug)]
pub struct DirtyBitmap<'a> {
    vm: &'a VmFd,
    ram: &'a GuestRam,
    logging: Logging,
}

impl<'a> DirtyBitmap<'a> {
    /// Creates the log of a machine, not yet enabled. From here on the machine's log is cleared
    /// only by [`clear`](Self::clear) (`KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2`, without "initially
    /// set": with that, pages would not be protected against writes until they were cleared for the
    /// first time).
    ///
    /// # Errors
    /// [`DirtyLogError::Missing`] before Linux 5.1, [`DirtyLogError::Refused`].
    ///
    /// # Safety
    /// Each region of `ram` must be a memory slot of `vm`, numbered by the region's index in
    /// [`GuestRam::regions`], and stay mapped as long as the machine can access it, also after this
    /// value is dropped.
    pub unsafe fn new(vm: &'a VmFd, ram: &'a GuestRam) -> Result<Self, DirtyLogError> {
        if vm.check_extension_raw(KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2.into()) <= 0 {
            return Err(DirtyLogError::Missing {
                capability: "KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2",
                since: "since Linux 5.1",
            });
        }
        let capability = kvm_enable_cap {
            cap: KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2,
            args: [KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE.into(), 0, 0, 0],
            ..kvm_enable_cap::default()
        };
        vm.enable_cap(&capability).map_err(refused("enable clearing of its log page by page"))?;
        Ok(Self { vm, ram, logging: Logging::Off })
    }

    /// Starts logging: when this returns, no page is dirty, and every further write makes its page
    /// dirty. No effect if logging is on.
    ///
    /// # Errors
    /// [`DirtyLogError::Refused`]; nothing is logged then.
    pub fn enable(&mut self) -> Result<(), DirtyLogError> {
        if self.logging == Logging::Off {
            // Before the first slot is switched, so that the slots before a refused one are
            // switched back.
            self.logging = Logging::On;
            // SAFETY: as guaranteed by the caller of `new`.
            let result = unsafe { set_logging(self.vm, self.ram, Logging::On) };
            if result.is_err() {
                self.disable()?;
            }
            return result;
        }
        Ok(())
    }

    /// Adds all pages to `pages` that were written to since they were last cleared, or since the
    /// log was enabled. Processors that log by themselves are made to flush their logs (they leave
    /// the guest for a moment).
    ///
    /// # Errors
    /// [`DirtyLogError::Refused`], for example if logging is not enabled.
    pub fn get(&self, pages: &mut PageBitmap) -> Result<(), DirtyLogError> {
        for (slot, region) in self.ram.regions().iter().enumerate() {
            let words = self
                .vm
                .get_dirty_log(slot as u32, region.size_bytes as usize)
                .map_err(refused("report which pages were written to"))?;
            pages.insert_words(region.pages().start, words);
        }
        Ok(())
    }

    /// Marks the pages of a range as clean; the next write to each makes it dirty again.
    ///
    /// # Errors
    /// [`DirtyLogError::OutsideRam`] if not all of the range is guest memory,
    /// [`DirtyLogError::Refused`].
    pub fn clear(&self, range: GuestRange) -> Result<(), DirtyLogError> {
        let parts = self.ram.parts_of(range).map_err(|_| DirtyLogError::OutsideRam { range })?;
        for part in parts {
            let mut pages = PageBitmap::new(&[part]);
            pages.fill();
            self.clear_part(part, &pages)?;
        }
        Ok(())
    }

    /// As [`clear`](Self::clear), for all pages of a set. Only the set's regions are processed, so
    /// a set of a small region costs little.
    ///
    /// # Errors
    /// [`DirtyLogError::Refused`]. Pages of the set that are not guest memory are ignored.
    pub fn clear_all(&self, pages: &PageBitmap) -> Result<(), DirtyLogError> {
        let parts = pages.regions().flat_map(|region| self.ram.clip(region));
        parts.into_iter().try_for_each(|part| self.clear_part(part, pages))
    }

    /// Clears the pages of a set within `part`, a part of one region.
    fn clear_part(&self, part: GuestRange, pages: &PageBitmap) -> Result<(), DirtyLogError> {
        let regions = self.ram.regions();
        let Some(slot) = regions.iter().position(|region| region.pages().contains(part.start))
        else {
            return Ok(());
        };
        let region = regions[slot].pages();
        let last_page = part.end().0 - region.start.0;
        let mut first_page = (part.start.0 - region.start.0) / UNIT_PAGES * UNIT_PAGES;
        while first_page < last_page {
            let end_page = (first_page + CLEAR_PAGES)
                .min(last_page.next_multiple_of(UNIT_PAGES))
                .min(region.pages);
            let window = GuestRange::new(Pfn(region.start.0 + first_page), end_page - first_page);
            let mut words = vec![0_u64; window.pages.div_ceil(UNIT_PAGES) as usize];
            if pages.copy_words(window, &mut words) {
                self.clear_words(slot as u32, first_page, window.pages as u32, &mut words)?;
            }
            first_page = end_page;
        }
        Ok(())
    }

    /// Clears the pages whose bit is set.
    fn clear_words(
        &self,
        slot: u32,
        first_page: u64,
        num_pages: u32,
        words: &mut [u64],
    ) -> Result<(), DirtyLogError> {
        assert!(words.len() as u64 * UNIT_PAGES >= u64::from(num_pages));
        let request = kvm_clear_dirty_log {
            slot,
            num_pages,
            first_page,
            __bindgen_anon_1: kvm_clear_dirty_log__bindgen_ty_1 {
                dirty_bitmap: words.as_mut_ptr().cast(),
            },
        };
        // SAFETY: the request takes this structure, and reads a bit for each of `num_pages` pages
        // from the bitmap, which has as many.
        let result = unsafe { vm_ioctl(self.vm, KVM_CLEAR_DIRTY_LOG, (&raw const request).addr()) };
        result.map(drop).map_err(refused("clear pages in its log"))
    }

    /// Stops logging, and drops the logged pages. No effect if logging is off.
    ///
    /// # Errors
    /// [`DirtyLogError::Refused`]; some memory may still be logged then.
    pub fn disable(&mut self) -> Result<(), DirtyLogError> {
        if self.logging == Logging::On {
            // SAFETY: as guaranteed by the caller of `new`.
            unsafe { set_logging(self.vm, self.ram, Logging::Off) }?;
            self.logging = Logging::Off;
        }
        Ok(())
    }
}

impl Drop for DirtyBitmap<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.disable() {
            tracing::error!(
                "logging cannot be turned off, so the guest's writes stay slow: {error}"
            );
        }
    }
}

//! userfaultfd (Linux Documentation/admin-guide/mm/userfaultfd.rst): tracking of writes, and moving
//! pages away from the guest.
//!
//! Guest memory is registered for write protection that the kernel resolves by itself
//! (`UFFD_FEATURE_WP_ASYNC`): a write marks the page as written, without a fault to handle. Only
//! while pages are moved away for a comparison their place is also registered for missing pages: an
//! access to it blocks until it is woken.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

use rustix::io::Errno;

use super::MergeUnavailable;

/// Events for which registered memory is watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Watch {
    /// Writes.
    Writes,
    /// Writes, and accesses to absent pages, which block.
    WritesAndMissing,
}

// include/uapi/linux/userfaultfd.h
const UFFD_API: u64 = 0xaa;
const FEATURE_WP_SHMEM: u64 = 1 << 12;
const FEATURE_WP_UNPOPULATED: u64 = 1 << 13;
const FEATURE_WP_ASYNC: u64 = 1 << 15;
const FEATURE_MOVE: u64 = 1 << 16;
const NEEDED_FEATURES: u64 = FEATURE_WP_UNPOPULATED | FEATURE_WP_ASYNC | FEATURE_MOVE;
const MODE_MISSING: u64 = 1 << 0;
const MODE_WP: u64 = 1 << 1;
const PROTECT: u64 = 1 << 0;
const DONT_WAKE: u64 = 1 << 0;
const ALLOW_HOLES: u64 = 1 << 1;
const USERFAULTFD_IOC_NEW: libc::Ioctl = 0xaa00;
const UFFDIO_API: libc::Ioctl = 0xc018_aa3f;
const UFFDIO_REGISTER: libc::Ioctl = 0xc020_aa00;
const UFFDIO_UNREGISTER: libc::Ioctl = 0x8010_aa01;
const UFFDIO_WAKE: libc::Ioctl = 0x8010_aa02;
const UFFDIO_COPY: libc::Ioctl = 0xc028_aa03;
const UFFDIO_MOVE: libc::Ioctl = 0xc028_aa05;
const UFFDIO_WRITEPROTECT: libc::Ioctl = 0xc018_aa06;

/// Number of attempts of an action that must succeed, with a pause of a millisecond in between.
const BACK_ATTEMPTS: u32 = 1000;

/// `struct uffdio_api`
#[repr(C)]
struct Api {
    version: u64,
    features: u64,
    ioctls: u64,
}

/// `struct uffdio_range`
#[repr(C)]
#[derive(Clone, Copy)]
struct Range {
    start: u64,
    len: u64,
}

/// `struct uffdio_register`
#[repr(C)]
struct Register {
    range: Range,
    mode: u64,
    ioctls: u64,
}

/// `struct uffdio_writeprotect`
#[repr(C)]
struct WriteProtect {
    range: Range,
    mode: u64,
}

/// `struct uffdio_copy`
#[repr(C)]
struct CopyPages {
    dst: u64,
    src: u64,
    len: u64,
    mode: u64,
    copied: i64,
}

/// `struct uffdio_move`: the destination comes first, too.
type MovePages = CopyPages;

const _: () =
    assert!(size_of::<Api>() == 24 && size_of::<Register>() == 32 && size_of::<CopyPages>() == 40);

/// Result of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Moved {
    /// Bytes that were moved.
    pub(super) bytes: usize,
    /// Reason for its end.
    pub(super) stopped: Option<Errno>,
}

/// A userfaultfd with the features that merging needs.
#[derive(Debug)]
pub(super) struct Userfaultfd(OwnedFd);

impl Userfaultfd {
    /// Opens one that also catches the kernel's own accesses, and checks the features it can.
    pub(super) fn open() -> Result<Self, MergeUnavailable> {
        let missing = |feature, since| Err(MergeUnavailable::OldKernel { feature, since });
        // The first call queries the features; a second one on the same descriptor is refused.
        let offered = match Self::handshake(&open()?, 0) {
            Ok(offered) => offered,
            Err(error) => return Err(refused("query the features of userfaultfd", error)),
        };
        if offered & (FEATURE_WP_ASYNC | FEATURE_WP_UNPOPULATED)
            != FEATURE_WP_ASYNC | FEATURE_WP_UNPOPULATED
        {
            return missing(
                "asynchronous write protection by userfaultfd (UFFD_FEATURE_WP_ASYNC)",
                "6.8",
            );
        }
        if offered & FEATURE_MOVE == 0 {
            return missing("way to move pages (UFFDIO_MOVE)", "6.8");
        }
        let descriptor = open()?;
        Self::handshake(&descriptor, NEEDED_FEATURES)
            .map_err(|error| refused("switch on the features of userfaultfd", error))?;
        Ok(Self(descriptor))
    }

    /// Opens one for which writers block: with write protection that the kernel does not resolve,
    /// also for memory files.
    pub(super) fn open_waiting() -> Result<Self, MergeUnavailable> {
        let descriptor = open()?;
        Self::handshake(&descriptor, FEATURE_WP_SHMEM)
            .map_err(|error| refused("switch on write protection of memory files", error))?;
        Ok(Self(descriptor))
    }

    fn handshake(descriptor: &OwnedFd, features: u64) -> io::Result<u64> {
        let mut api = Api { version: UFFD_API, features, ioctls: 0 };
        // SAFETY: UFFDIO_API reads and writes one `struct uffdio_api`, which `api` is.
        unsafe { ioctl(descriptor.as_raw_fd(), UFFDIO_API, &raw mut api) }?;
        Ok(api.features)
    }

    /// Watches `size_bytes` from `address` on, also if they were watched for fewer events before.
    /// To be watched for fewer events they must be [forgotten](Self::forget) first (Linux
    /// mm/userfaultfd.c, `userfaultfd_register_range`).
    ///
    /// # Safety
    /// For [`Watch::WritesAndMissing`], the caller must wake the threads that block.
    pub(super) unsafe fn watch(
        &self,
        address: usize,
        size_bytes: usize,
        watch: Watch,
    ) -> io::Result<()> {
        let mode = match watch {
            Watch::Writes => MODE_WP,
            Watch::WritesAndMissing => MODE_WP | MODE_MISSING,
        };
        let mut register = Register { range: range(address, size_bytes), mode, ioctls: 0 };
        // SAFETY: UFFDIO_REGISTER reads and writes one `struct uffdio_register`. It changes no
        // content of memory.
        unsafe { ioctl(self.0.as_raw_fd(), UFFDIO_REGISTER, &raw mut register) }
    }

    /// Stops watching memory, and wakes blocked threads. Its pages count as written from now on.
    pub(super) fn forget(&self, address: usize, size_bytes: usize) -> io::Result<()> {
        let mut range = range(address, size_bytes);
        // SAFETY: UFFDIO_UNREGISTER reads one `struct uffdio_range`. It changes no content of
        // memory.
        unsafe { ioctl(self.0.as_raw_fd(), UFFDIO_UNREGISTER, &raw mut range) }
    }

    /// Wakes threads that block on a page of this range.
    pub(super) fn wake(&self, address: usize, size_bytes: usize) -> io::Result<()> {
        let mut range = range(address, size_bytes);
        // SAFETY: UFFDIO_WAKE reads one `struct uffdio_range`. It changes no memory.
        unsafe { ioctl(self.0.as_raw_fd(), UFFDIO_WAKE, &raw mut range) }
    }

    /// Moves pages: afterwards they are at `to`, which must be watched and have no pages, and
    /// missing at `from`. Pages that are pinned are refused with EBUSY. Wakes no thread.
    ///
    /// # Safety
    /// Both must be mappings of anonymous memory to which no Rust reference exists, and the caller
    /// must ensure that an access to the pages at `from` blocks until they are back.
    pub(super) unsafe fn move_pages(&self, from: usize, to: usize, size_bytes: usize) -> Moved {
        // SAFETY: guaranteed by the caller, as for this function.
        unsafe { self.move_with(DONT_WAKE, from, to, size_bytes) }
    }

    /// As [`move_pages`](Self::move_pages), but absent pages are skipped.
    ///
    /// # Safety
    /// As for [`move_pages`](Self::move_pages).
    pub(super) unsafe fn move_what_is_there(
        &self,
        from: usize,
        to: usize,
        size_bytes: usize,
    ) -> Moved {
        // SAFETY: guaranteed by the caller, as for this function.
        unsafe { self.move_with(DONT_WAKE | ALLOW_HOLES, from, to, size_bytes) }
    }

    /// # Safety
    /// As for [`move_pages`](Self::move_pages).
    unsafe fn move_with(&self, mode: u64, from: usize, to: usize, size_bytes: usize) -> Moved {
        let mut pages =
            MovePages { dst: to as u64, src: from as u64, len: size_bytes as u64, mode, copied: 0 };
        // SAFETY: UFFDIO_MOVE reads and writes one `struct uffdio_move`. The caller guarantees the
        // validity of the memory.
        let result = unsafe { ioctl(self.0.as_raw_fd(), UFFDIO_MOVE, &raw mut pages) };
        let stopped =
            result.err().map(|error| Errno::from_io_error(&error).unwrap_or(Errno::INVAL));
        Moved { bytes: usize::try_from(pages.copied).unwrap_or(0), stopped }
    }

    /// Copies one page to an absent one.
    ///
    /// # Safety
    /// `to` must be a watched page of guest memory, and `from` readable.
    pub(super) unsafe fn copy_page(
        &self,
        from: usize,
        to: usize,
        size_bytes: usize,
    ) -> io::Result<()> {
        let mut pages = CopyPages {
            dst: to as u64,
            src: from as u64,
            len: size_bytes as u64,
            mode: DONT_WAKE,
            copied: 0,
        };
        // SAFETY: UFFDIO_COPY reads and writes one `struct uffdio_copy`, and fills only absent
        // pages.
        unsafe { ioctl(self.0.as_raw_fd(), UFFDIO_COPY, &raw mut pages) }
    }

    /// Protects memory against writes.
    pub(super) fn protect(&self, address: usize, size_bytes: usize) -> io::Result<()> {
        let mut protect = WriteProtect { range: range(address, size_bytes), mode: PROTECT };
        // SAFETY: UFFDIO_WRITEPROTECT reads one `struct uffdio_writeprotect`. It changes no content
        // of memory.
        unsafe { ioctl(self.0.as_raw_fd(), UFFDIO_WRITEPROTECT, &raw mut protect) }
    }

    /// Removes the write protection; the pages count as written from now on.
    pub(super) fn unprotect(&self, address: usize, size_bytes: usize) -> io::Result<()> {
        let mut protect = WriteProtect { range: range(address, size_bytes), mode: 0 };
        // SAFETY: UFFDIO_WRITEPROTECT reads one `struct uffdio_writeprotect`. It changes no content
        // of memory.
        unsafe { ioctl(self.0.as_raw_fd(), UFFDIO_WRITEPROTECT, &raw mut protect) }
    }
}

fn range(address: usize, size_bytes: usize) -> Range {
    Range { start: address as u64, len: size_bytes as u64 }
}

fn refused(action: &'static str, source: io::Error) -> MergeUnavailable {
    MergeUnavailable::Refused { action, source }
}

/// Opens a userfaultfd: by the device, whose file permissions decide, or by the system call, which
/// requires a capability.
fn open() -> Result<OwnedFd, MergeUnavailable> {
    let device = match File::options().read(true).write(true).open("/dev/userfaultfd") {
        Ok(device) => match open_by_device(&device) {
            Ok(descriptor) => return Ok(descriptor),
            Err(error) => error,
        },
        Err(error) => error,
    };
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
    // SAFETY: the call creates a new descriptor and touches no memory.
    let result = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
    if result >= 0 {
        // SAFETY: the call has just returned this descriptor, which nothing else owns.
        return Ok(unsafe { OwnedFd::from_raw_fd(result as RawFd) });
    }
    let call = io::Error::last_os_error();
    if call.raw_os_error() == Some(libc::ENOSYS) {
        return Err(MergeUnavailable::OldKernel { feature: "userfaultfd", since: "6.8" });
    }
    Err(MergeUnavailable::NoPermission { device, call })
}

fn open_by_device(device: &File) -> io::Result<OwnedFd> {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
    // SAFETY: USERFAULTFD_IOC_NEW takes flags by value, creates a new descriptor and touches no
    // memory.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), USERFAULTFD_IOC_NEW, flags) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call has just returned this descriptor, which nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(result) })
}

/// Makes an ioctl with a structure; retries after a signal.
///
/// # Safety
/// `argument` must be valid for `request`, and the caller is responsible for the effect.
unsafe fn ioctl<T>(descriptor: RawFd, request: libc::Ioctl, argument: *mut T) -> io::Result<()> {
    loop {
        // SAFETY: the caller guarantees request and argument.
        if unsafe { libc::ioctl(descriptor, request, argument) } >= 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// Performs an action without which the guest cannot continue; ends the process if it keeps
/// failing.
pub(super) fn must_succeed(what: &str, mut action: impl FnMut() -> io::Result<()>) {
    for _ in 0..BACK_ATTEMPTS {
        match action() {
            Ok(()) => return,
            Err(error) => tracing::warn!("{what}: {error}; retrying"),
        }
        std::thread::park_timeout(Duration::from_millis(1));
    }
    tracing::error!("{what}; the guest cannot continue without it");
    std::process::abort();
}

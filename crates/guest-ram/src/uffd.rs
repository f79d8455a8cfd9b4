//! userfaultfd (Linux Documentation/admin-guide/mm/userfaultfd.rst): memory whose accesses block or
//! are tracked. Merging ([`moves`]) and saves of memory in use
//! ([`save::background`](crate::save)) share it.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

use ebb_abi::PAGE_SIZE_BYTES;
use rustix::fs::{FileType, fstat};
use rustix::io::Errno;
use rustix::process::{Pid, getpid};

#[cfg(feature = "merge")]
mod moves;
mod unavailable;

pub use unavailable::UffdUnavailable;

/// Events for which registered memory is watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Watch {
    /// Writes.
    Writes,
    /// Writes, and accesses to absent pages, which block.
    #[cfg(feature = "merge")]
    WritesAndMissing,
}

// include/uapi/linux/userfaultfd.h
const UFFD_API: u64 = 0xaa;
const FEATURE_PAGEFAULT_FLAG_WP: u64 = 1 << 0;
#[cfg(feature = "merge")]
const MODE_MISSING: u64 = 1 << 0;
const MODE_WP: u64 = 1 << 1;
const PROTECT: u64 = 1 << 0;
const EVENT_PAGEFAULT: u8 = 0x12;
const USERFAULTFD_IOC_NEW: libc::Ioctl = 0xaa00;
const UFFDIO_API: libc::Ioctl = 0xc018_aa3f;
const UFFDIO_REGISTER: libc::Ioctl = 0xc020_aa00;
const UFFDIO_UNREGISTER: libc::Ioctl = 0x8010_aa01;
const UFFDIO_WAKE: libc::Ioctl = 0x8010_aa02;
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

/// Bytes of `struct uffd_msg`: the first one is the event, and the address of a page fault is at
/// offset 16.
const MESSAGE_BYTES: usize = 32;
const MESSAGE_ADDRESS: usize = 16;
/// Messages read at a time.
const MESSAGES: usize = 16;

const _: () = assert!(size_of::<Api>() == 24 && size_of::<Register>() == 32);

/// A userfaultfd.
#[derive(Debug)]
pub(crate) struct Userfaultfd {
    descriptor: OwnedFd,
    /// The process to whose memory it belongs: the one that has made it.
    process: Pid,
}

impl Userfaultfd {
    /// Opens one whose registered memory blocks writers of protected pages until they are no longer
    /// protected, also in the kernel (KVM, system calls). Anonymous memory only.
    pub(crate) fn open_protecting() -> Result<Self, UffdUnavailable> {
        Self::open_with(None, FEATURE_PAGEFAULT_FLAG_WP, "switch on write protection")
    }

    /// As [`open_protecting`](Self::open_protecting), by /dev/userfaultfd, which another process
    /// has opened.
    pub(crate) fn open_protecting_by(device: &File) -> Result<Self, UffdUnavailable> {
        Self::open_with(Some(device), FEATURE_PAGEFAULT_FLAG_WP, "switch on write protection")
    }

    /// `device` is /dev/userfaultfd, if another process has opened it.
    fn open_with(
        device: Option<&File>,
        features: u64,
        action: &'static str,
    ) -> Result<Self, UffdUnavailable> {
        let descriptor = open(device)?;
        Self::handshake(&descriptor, features)
            .map_err(|source| UffdUnavailable::Refused { action, source })?;
        Ok(Self { descriptor, process: getpid() })
    }

    fn handshake(descriptor: &OwnedFd, features: u64) -> io::Result<u64> {
        let mut api = Api { version: UFFD_API, features, ioctls: 0 };
        // SAFETY: UFFDIO_API reads and writes one `struct uffdio_api`, which `api` is.
        unsafe { ioctl(descriptor.as_raw_fd(), UFFDIO_API, &raw mut api) }?;
        Ok(api.features)
    }

    /// Its number, for a forked process, in which it is of no use.
    pub(crate) fn number(&self) -> RawFd {
        self.descriptor.as_raw_fd()
    }

    /// Whether this process has made it. In one that was forked since, the number means the memory
    /// of the old process, or another file. System call: `getpid`.
    pub(crate) fn is_of_this_process(&self) -> bool {
        self.process == getpid()
    }

    /// Watches `size_bytes` from `address` on, also if they were watched for fewer events before.
    /// To be watched for fewer events they must be [forgotten](Self::forget) first (Linux
    /// mm/userfaultfd.c, `userfaultfd_register_range`).
    ///
    /// # Safety
    /// If threads can block on this memory, the caller must wake them.
    pub(crate) unsafe fn watch(
        &self,
        address: usize,
        size_bytes: usize,
        watch: Watch,
    ) -> io::Result<()> {
        let mode = match watch {
            Watch::Writes => MODE_WP,
            #[cfg(feature = "merge")]
            Watch::WritesAndMissing => MODE_WP | MODE_MISSING,
        };
        let mut register = Register { range: range(address, size_bytes), mode, ioctls: 0 };
        // SAFETY: UFFDIO_REGISTER reads and writes one `struct uffdio_register`. It changes no
        // content of memory.
        unsafe { ioctl(self.descriptor.as_raw_fd(), UFFDIO_REGISTER, &raw mut register) }
    }

    /// Stops watching memory. Its pages count as written from now on. Threads that wait to write
    /// must be [woken](Self::wake) (Linux fs/userfaultfd.c, `userfaultfd_unregister`, wakes only
    /// those that wait for missing pages).
    pub(crate) fn forget(&self, address: usize, size_bytes: usize) -> io::Result<()> {
        let mut range = range(address, size_bytes);
        // SAFETY: UFFDIO_UNREGISTER reads one `struct uffdio_range`. It changes no content of
        // memory.
        unsafe { ioctl(self.descriptor.as_raw_fd(), UFFDIO_UNREGISTER, &raw mut range) }
    }

    /// Wakes threads that block on a page of this range.
    pub(crate) fn wake(&self, address: usize, size_bytes: usize) -> io::Result<()> {
        let mut range = range(address, size_bytes);
        // SAFETY: UFFDIO_WAKE reads one `struct uffdio_range`. It changes no memory.
        unsafe { ioctl(self.descriptor.as_raw_fd(), UFFDIO_WAKE, &raw mut range) }
    }

    /// Adds to `found` the addresses of pages that threads wait to write to, each of them once.
    /// Does not wait. System call: `read`.
    pub(crate) fn read_faults(&self, found: &mut Vec<usize>) -> io::Result<()> {
        let mut buffer = [0; MESSAGES * MESSAGE_BYTES];
        loop {
            let length = match rustix::io::read(&self.descriptor, &mut buffer) {
                Ok(length) => length,
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            };
            let (messages, _) = buffer[..length].as_chunks::<MESSAGE_BYTES>();
            for message in messages.iter().filter(|message| message[0] == EVENT_PAGEFAULT) {
                let mut address = [0; size_of::<u64>()];
                address.copy_from_slice(&message[MESSAGE_ADDRESS..][..size_of::<u64>()]);
                let address = u64::from_ne_bytes(address);
                found.push((address - address % PAGE_SIZE_BYTES) as usize);
            }
        }
    }

    /// Protects memory against writes.
    pub(crate) fn protect(&self, address: usize, size_bytes: usize) -> io::Result<()> {
        let mut protect = WriteProtect { range: range(address, size_bytes), mode: PROTECT };
        // SAFETY: UFFDIO_WRITEPROTECT reads one `struct uffdio_writeprotect`. It changes no content
        // of memory.
        unsafe { ioctl(self.descriptor.as_raw_fd(), UFFDIO_WRITEPROTECT, &raw mut protect) }
    }

    /// Removes the write protection, and wakes threads that wait for it; the pages count as written
    /// from now on.
    pub(crate) fn unprotect(&self, address: usize, size_bytes: usize) -> io::Result<()> {
        let mut protect = WriteProtect { range: range(address, size_bytes), mode: 0 };
        // SAFETY: UFFDIO_WRITEPROTECT reads one `struct uffdio_writeprotect`. It changes no content
        // of memory.
        unsafe { ioctl(self.descriptor.as_raw_fd(), UFFDIO_WRITEPROTECT, &raw mut protect) }
    }
}

fn range(address: usize, size_bytes: usize) -> Range {
    Range { start: address as u64, len: size_bytes as u64 }
}

/// Opens a userfaultfd: by the device, whose file permissions decide, or by the system call, which
/// requires a capability. A process that cannot open anything uses the `device` that another one
/// has opened: what is made of it belongs to the memory of the caller (Linux fs/userfaultfd.c,
/// `new_userfaultfd`).
fn open(device: Option<&File>) -> Result<OwnedFd, UffdUnavailable> {
    if let Some(device) = device {
        let action = "use the file that was passed as /dev/userfaultfd";
        let refused = |source| UffdUnavailable::Refused { action, source };
        let kind = fstat(device).map_err(|error| refused(error.into()))?.st_mode;
        if FileType::from_raw_mode(kind) != FileType::CharacterDevice {
            return Err(refused(io::ErrorKind::InvalidInput.into()));
        }
        return open_by_device(device).map_err(refused);
    }
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
        return Err(UffdUnavailable::OldKernel { feature: "userfaultfd", since: "5.14" });
    }
    Err(UffdUnavailable::NoPermission { device, call })
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
pub(crate) fn must_succeed(what: &str, mut action: impl FnMut() -> io::Result<()>) {
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

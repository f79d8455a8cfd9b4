//! Signals that end the monitor, as a descriptor.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Signals that end the monitor, with their names.
const SIGNALS: [(libc::c_int, &str); 4] = [
    (libc::SIGTERM, "SIGTERM"),
    (libc::SIGINT, "SIGINT"),
    (libc::SIGHUP, "SIGHUP"),
    (libc::SIGQUIT, "SIGQUIT"),
];

/// Signal sent when a write would exceed the file size limit (setrlimit(2), `RLIMIT_FSIZE`); it
/// would end the process. The failure of the write is enough: merging, for example, then has no
/// room for shared pages.
const FILE_TOO_LARGE: libc::c_int = libc::SIGXFSZ;

/// Signals read from a descriptor instead of interrupting.
#[derive(Debug)]
pub struct Signals {
    fd: OwnedFd,
}

impl Signals {
    /// Blocks the signals that end a monitor for this thread and the threads it starts, and opens
    /// the descriptor.
    pub fn block() -> io::Result<Self> {
        Self::block_these(&SIGNALS.map(|(signal, _)| signal))
    }

    /// Like [`block`](Self::block), for these signals.
    pub fn block_these(signals: &[libc::c_int]) -> io::Result<Self> {
        let set_of = |signals: &[libc::c_int]| {
            vmm_sys_util::signal::create_sigset(signals)
                .map_err(|error| io::Error::from_raw_os_error(error.errno()))
        };
        let set = set_of(signals)?;
        let blocked = set_of(&[signals, &[FILE_TOO_LARGE]].concat())?;
        // SAFETY: `blocked` is an initialized signal set; the old mask is not requested.
        let result = unsafe {
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const blocked, std::ptr::null_mut())
        };
        if result != 0 {
            return Err(io::Error::from_raw_os_error(result));
        }
        // SAFETY: `set` is an initialized signal set, and -1 requests a new descriptor.
        let fd =
            unsafe { libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new and has no other owner.
        Ok(Self { fd: unsafe { OwnedFd::from_raw_fd(fd) } })
    }

    /// Whether a signal has arrived.
    pub(super) fn is_pending(&self) -> bool {
        let mut fds = [PollFd::new(&self.fd, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
    }

    /// Name of a signal that has arrived, of those that end a monitor.
    pub fn take(&self) -> Option<&'static str> {
        let number = self.take_number()?;
        SIGNALS.iter().find(|(signal, _)| *signal == number).map(|(_, name)| *name)
    }

    /// Number of a signal that has arrived.
    pub fn take_number(&self) -> Option<libc::c_int> {
        let mut info = [0u8; size_of::<libc::signalfd_siginfo>()];
        let length = rustix::io::read(&self.fd, &mut info).ok()?;
        if length < 4 {
            return None;
        }
        Some(i32::from_ne_bytes([info[0], info[1], info[2], info[3]]))
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

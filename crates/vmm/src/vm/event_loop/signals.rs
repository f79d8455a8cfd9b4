//! Signals that end the monitor, as a descriptor.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};

/// Which signals end the monitor, with their names.
const SIGNALS: [(libc::c_int, &str); 4] = [
    (libc::SIGTERM, "SIGTERM"),
    (libc::SIGINT, "SIGINT"),
    (libc::SIGHUP, "SIGHUP"),
    (libc::SIGQUIT, "SIGQUIT"),
];

/// A signal that would end the process when a file must not become larger (setrlimit(2),
/// `RLIMIT_FSIZE`). The call that wanted it fails, which is enough: merging, for one, then has no
/// room for shared pages.
const FILE_TOO_LARGE: libc::c_int = libc::SIGXFSZ;

/// Signals that arrive at a descriptor instead of interrupting.
#[derive(Debug)]
pub struct Signals {
    fd: OwnedFd,
}

impl Signals {
    /// Blocks the signals for this thread and those it starts, and opens the descriptor.
    pub fn block() -> io::Result<Self> {
        let set_of = |signals: &[libc::c_int]| {
            vmm_sys_util::signal::create_sigset(signals)
                .map_err(|error| io::Error::from_raw_os_error(error.errno()))
        };
        let ends = SIGNALS.map(|(signal, _)| signal);
        let set = set_of(&ends)?;
        let blocked = set_of(&[&ends[..], &[FILE_TOO_LARGE]].concat())?;
        // SAFETY: `blocked` is an initialized signal set; the old mask is not asked for.
        let result = unsafe {
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const blocked, std::ptr::null_mut())
        };
        if result != 0 {
            return Err(io::Error::from_raw_os_error(result));
        }
        // SAFETY: `set` is an initialized signal set, and -1 asks for a new descriptor.
        let fd =
            unsafe { libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new and belongs to nobody else.
        Ok(Self { fd: unsafe { OwnedFd::from_raw_fd(fd) } })
    }

    /// Name of a signal that has arrived.
    pub fn take(&self) -> Option<&'static str> {
        let mut info = [0u8; size_of::<libc::signalfd_siginfo>()];
        let length = rustix::io::read(&self.fd, &mut info).ok()?;
        if length < 4 {
            return None;
        }
        let number = i32::from_ne_bytes([info[0], info[1], info[2], info[3]]);
        SIGNALS.iter().find(|(signal, _)| *signal == number).map(|(_, name)| *name)
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

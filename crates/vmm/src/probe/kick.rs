//! Getting a thread out of the guest with a signal.

use std::io;
use std::mem::MaybeUninit;
use std::os::unix::thread::JoinHandleExt as _;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// A signal that the monitor uses for nothing else.
fn signal() -> libc::c_int {
    libc::SIGRTMIN() + 7
}

/// One probe at a time: each sets the process's handler and puts the one before back.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// A handler that does nothing, which is enough to make `KVM_RUN` return with EINTR.
pub(super) struct Kicker {
    signal: libc::c_int,
    previous: Option<libc::sigaction>,
    _guard: MutexGuard<'static, ()>,
}

extern "C" fn do_nothing(_: libc::c_int) {}

impl Kicker {
    /// Sets the handler.
    pub(super) fn install() -> io::Result<Self> {
        let signal = signal();
        let guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: a sigaction of zeros is a valid value: no flags, empty mask, default handler.
        let mut action: libc::sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
        action.sa_sigaction = do_nothing as *const () as libc::sighandler_t;
        let mut previous = MaybeUninit::uninit();
        // SAFETY: both pointers are valid for the call; the handler touches nothing, so it is safe
        // in any thread at any time.
        let result = unsafe { libc::sigaction(signal, &raw const action, previous.as_mut_ptr()) };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: sigaction has returned 0 and has therefore filled it.
        let previous = unsafe { previous.assume_init() };
        Ok(Self { signal, previous: Some(previous), _guard: guard })
    }

    /// Lets the signal through to the calling thread, whatever mask it has inherited.
    pub(super) fn unblock() {
        let mut set = MaybeUninit::uninit();
        // SAFETY: the pointer is valid for the call, which fills the set.
        unsafe { libc::sigemptyset(set.as_mut_ptr()) };
        // SAFETY: sigemptyset has filled the set; the signal's number is valid.
        unsafe { libc::sigaddset(set.as_mut_ptr(), signal()) };
        // SAFETY: the set is filled; no old mask is asked for.
        unsafe { libc::pthread_sigmask(libc::SIG_UNBLOCK, set.as_ptr(), std::ptr::null_mut()) };
    }

    /// Interrupts `thread`, if it has not ended.
    pub(super) fn kick<T>(&self, thread: &JoinHandle<T>) {
        // SAFETY: the thread has not been joined, because its handle is borrowed, so its id is
        // valid; the handler is installed as long as `self` lives.
        unsafe { libc::pthread_kill(thread.as_pthread_t(), self.signal) };
    }

    /// Keeps the handler for good.
    pub(super) fn leave_installed(mut self) {
        self.previous = None;
    }
}

impl Drop for Kicker {
    fn drop(&mut self) {
        if let Some(previous) = &self.previous {
            // SAFETY: `previous` was filled by sigaction, so putting it back restores what the
            // process had.
            unsafe { libc::sigaction(self.signal, &raw const *previous, std::ptr::null_mut()) };
        }
    }
}

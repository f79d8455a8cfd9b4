//! Ending a session from another thread.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use rustix::event::EventfdFlags;

const OPEN: u8 = 0;
const CANCELLED: u8 = 1;
const DECIDED: u8 = 2;

/// Ends a session from another thread: every wait of the session and of its streams returns at
/// once, and the other side is told. Clones are the same handle.
#[derive(Debug, Clone)]
pub struct CancelHandle(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    state: AtomicU8,
    /// Counts to one when cancelled, and is never read: every wait polls it.
    event: OwnedFd,
}

/// What [`CancelHandle::cancel`] has achieved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cancellation {
    /// The session ends; the guest stays with the source.
    Cancelled,
    /// The source has decided, or the destination has learnt of it: the guest has moved or is about
    /// to.
    TooLate,
}

impl CancelHandle {
    /// A handle for one session, from before it connects or listens. It takes a file descriptor.
    pub fn new() -> io::Result<Self> {
        let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self(Arc::new(Inner { state: AtomicU8::new(OPEN), event })))
    }

    /// Readies the handle for another session, for a thread that may not create one. The previous
    /// session, and everything that could cancel it, must have ended.
    pub fn reset(&self) {
        // It is non-blocking, and fails if it was not cancelled.
        let _ = rustix::io::read(&self.0.event, &mut [0; 8]);
        self.0.state.store(OPEN, Ordering::SeqCst);
    }

    /// Ends the session unless its outcome is decided. A second call changes nothing.
    pub fn cancel(&self) -> Cancellation {
        match self.change(CANCELLED) {
            Ok(()) => {
                // Adding one to a counter of zero cannot fail.
                let _ = rustix::io::write(&self.0.event, &1_u64.to_ne_bytes());
                Cancellation::Cancelled
            }
            Err(CANCELLED) => Cancellation::Cancelled,
            Err(_) => Cancellation::TooLate,
        }
    }

    /// Whether the session has been cancelled.
    pub fn is_cancelled(&self) -> bool {
        self.0.state.load(Ordering::SeqCst) == CANCELLED
    }

    /// From here on nothing can be cancelled; false if it has been.
    pub(super) fn decide(&self) -> bool {
        self.change(DECIDED).is_ok()
    }

    pub(super) fn event(&self) -> BorrowedFd<'_> {
        self.0.event.as_fd()
    }

    /// Exactly one of `cancel` and `decide` comes first.
    fn change(&self, to: u8) -> Result<(), u8> {
        self.0.state.compare_exchange(OPEN, to, Ordering::SeqCst, Ordering::SeqCst).map(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, Timespec};

    use super::*;

    #[test]
    fn the_first_of_cancelling_and_deciding_wins() {
        let handle = CancelHandle::new().unwrap();
        assert_eq!(handle.cancel(), Cancellation::Cancelled);
        assert_eq!(handle.cancel(), Cancellation::Cancelled);
        assert!(handle.is_cancelled() && !handle.decide());

        let handle = CancelHandle::new().unwrap();
        assert!(handle.decide());
        assert_eq!(handle.clone().cancel(), Cancellation::TooLate);
        assert!(!handle.is_cancelled());
    }

    #[test]
    fn a_handle_can_be_used_again() {
        let handle = CancelHandle::new().unwrap();
        let is_readable = || {
            let mut event = [PollFd::from_borrowed_fd(handle.event(), PollFlags::IN)];
            rustix::event::poll(&mut event, Some(&Timespec::default())).unwrap() == 1
        };
        for _ in 0..2 {
            assert!(!handle.is_cancelled() && !is_readable());
            assert_eq!(handle.cancel(), Cancellation::Cancelled);
            assert!(handle.is_cancelled() && is_readable());
            handle.reset();
            assert!(handle.decide());
            assert_eq!(handle.cancel(), Cancellation::TooLate);
            handle.reset();
        }
    }
}

//! Eventfds of vmm-sys-util, which KVM's bindings take, as descriptors that can be polled.

use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::event::{PollFd, PollFlags};
use vmm_sys_util::eventfd::EventFd;

/// Polls `event` for being signalled.
pub fn readable(event: &EventFd) -> PollFd<'_> {
    // SAFETY: the descriptor stays open as long as `event` does, which the returned lifetime is
    // bound to.
    let fd = unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) };
    PollFd::from_borrowed_fd(fd, PollFlags::IN)
}

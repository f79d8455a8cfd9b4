//! Counters of the tasks in memory that processes share.

use std::io;
use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use super::TASK_LIMIT;

/// One task's counter, on a cache line of its own and apart from the next one, which processors
/// fetch along.
#[repr(align(128))]
struct Counter(AtomicU64);

/// What tasks and their watcher tell each other. All zeros is its beginning.
#[repr(C)]
pub struct Board {
    /// Tasks that wait for the start. Only a number: nothing is published by it.
    ready: AtomicU32,
    go: AtomicBool,
    stop: AtomicBool,
    counters: [Counter; TASK_LIMIT as usize],
}

impl Board {
    /// Takes note that a task is ready and waits until all may begin, or are to stop.
    pub fn wait_for_go(&self, pause: Duration) {
        self.ready.fetch_add(1, Ordering::Relaxed);
        while !self.go.load(Ordering::Relaxed) && !self.stopped() {
            thread::sleep(pause);
        }
    }

    /// Tasks that are ready.
    pub fn ready(&self) -> u32 {
        self.ready.load(Ordering::Relaxed)
    }

    /// Lets all begin.
    pub fn go(&self) {
        self.go.store(true, Ordering::Relaxed);
    }

    /// Tells all to stop.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Whether all are to stop.
    pub fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Sets a task's count, which only that task does.
    pub fn count(&self, task: usize, count: u64) {
        self.counters[task].0.store(count, Ordering::Relaxed);
    }

    /// The counts of the first tasks.
    pub fn counts(&self, tasks: usize) -> Vec<u64> {
        self.counters[..tasks].iter().map(|counter| counter.0.load(Ordering::Relaxed)).collect()
    }
}

/// A board in memory that is shared with child processes.
pub struct SharedBoard(NonNull<Board>);

// SAFETY: a board is made of atomics only.
unsafe impl Send for SharedBoard {}
// SAFETY: as above.
unsafe impl Sync for SharedBoard {}

impl SharedBoard {
    /// A board of zeros.
    pub fn new() -> io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses an unused place, so that no memory in use is replaced.
        let start = unsafe {
            mmap_anonymous(std::ptr::null_mut(), size_of::<Board>(), protection, MapFlags::SHARED)
        }?;
        NonNull::new(start.cast()).map(Self).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
    }
}

impl Deref for SharedBoard {
    type Target = Board;

    fn deref(&self) -> &Board {
        // SAFETY: the memory is mapped, page-aligned and as large as a board until `self` is
        // dropped; it began as zeros, which is a valid board; all that write to it, in whatever
        // process, do so through atomics.
        unsafe { self.0.as_ref() }
    }
}

impl Drop for SharedBoard {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own and no reference into it outlives it; other
        // processes have their own.
        let _ = unsafe { munmap(self.0.as_ptr().cast(), size_of::<Board>()) };
    }
}

//! Counters of the tasks in shared memory.

use std::io;
use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use super::TASK_LIMIT;

/// One task's counter, on its own cache line and not adjacent to another one, because processors
/// prefetch the adjacent line.
#[repr(align(128))]
struct Counter(AtomicU64);

/// State shared by the tasks and their watcher, initially all zeros.
#[repr(C)]
pub struct Board {
    /// Number of tasks that wait for the start. It publishes no other data.
    ready: AtomicU32,
    go: AtomicBool,
    stop: AtomicBool,
    counters: [Counter; TASK_LIMIT as usize],
}

impl Board {
    /// Registers a ready task and waits for the start or the stop.
    pub fn wait_for_go(&self, pause: Duration) {
        self.ready.fetch_add(1, Ordering::Relaxed);
        while !self.go.load(Ordering::Relaxed) && !self.stopped() {
            thread::sleep(pause);
        }
    }

    /// Number of ready tasks.
    pub fn ready(&self) -> u32 {
        self.ready.load(Ordering::Relaxed)
    }

    /// Starts all tasks.
    pub fn go(&self) {
        self.go.store(true, Ordering::Relaxed);
    }

    /// Stops all tasks.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Whether the tasks must stop.
    pub fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Sets a task's count. Only called by that task.
    pub fn count(&self, task: usize, count: u64) {
        self.counters[task].0.store(count, Ordering::Relaxed);
    }

    /// The counts of the first `tasks` tasks.
    pub fn counts(&self, tasks: usize) -> Vec<u64> {
        self.counters[..tasks].iter().map(|counter| counter.0.load(Ordering::Relaxed)).collect()
    }
}

/// A board in memory shared with child processes.
pub struct SharedBoard(NonNull<Board>);

// SAFETY: a board consists of atomics.
unsafe impl Send for SharedBoard {}
// SAFETY: as above.
unsafe impl Sync for SharedBoard {}

impl SharedBoard {
    /// A board of zeros.
    pub fn new() -> io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses an unused address, so that no memory in use is replaced.
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
        // dropped. It was initialized to zeros, which is a valid board, and all processes write to
        // it through atomics.
        unsafe { self.0.as_ref() }
    }
}

impl Drop for SharedBoard {
    fn drop(&mut self) {
        // SAFETY: this value owns the mapping and no reference into it outlives it; other processes
        // have their own mappings.
        let _ = unsafe { munmap(self.0.as_ptr().cast(), size_of::<Board>()) };
    }
}

//! Watches the clocks with one reader per processor that records errors.
//!
//! The readers are threads of a separate process, because the agent, which forks other processes,
//! must have a single thread. They write to shared memory, so that their observations can be
//! reported while they run, and after a guest was saved and restored.

mod board;

use std::io;
use std::ops::Deref;
use std::ptr::NonNull;
use std::thread;
use std::time::Duration;

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, WaitOptions, getpid, getppid, kill_process, waitid, waitpid,
};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use rustix::time::ClockId;

pub use board::{CPU_LIMIT, CpuReport, Steps, WatchReport};

use crate::clock;
use board::{Board, Position, Reading};

/// Maximum number of readings in a burst, about a second.
pub const BURST_LIMIT: u32 = 1_000_000;

/// Timing of the readers, by which they share their processors with other tasks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rhythm {
    /// Number of successive readings, 1 to [`BURST_LIMIT`].
    pub burst_readings: u32,
    /// Sleep between two bursts.
    pub pause: Duration,
}

/// A board in memory shared with a child process. It is never unmapped, because the agent needs
/// only few of them.
#[derive(Clone, Copy)]
struct SharedBoard(NonNull<Board>);

// SAFETY: a board consists of atomics, and its memory is mapped for the life of the process.
unsafe impl Send for SharedBoard {}

impl SharedBoard {
    fn new() -> io::Result<Self> {
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
        // SAFETY: the memory is mapped, page-aligned, as large as a board and never unmapped. It
        // was initialized to zeros, which is a valid board, and all processes write to it through
        // atomics.
        unsafe { self.0.as_ref() }
    }
}

/// Running readers. They end when this value is dropped.
pub struct ClockWatch {
    board: SharedBoard,
    cpus: Vec<u32>,
    pid: Pid,
}

impl ClockWatch {
    /// Starts one reader on each processor that this process may use, up to [`CPU_LIMIT`].
    ///
    /// The calling process must have a single thread.
    pub fn start(rhythm: Rhythm) -> io::Result<Self> {
        if !(1..=BURST_LIMIT).contains(&rhythm.burst_readings) {
            let text = format!(
                "a burst of {} readings requested; 1 to {BURST_LIMIT} are possible",
                rhythm.burst_readings
            );
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let allowed = sched_getaffinity(None)?;
        let cpus: Vec<u32> = (0..CpuSet::MAX_CPU as u32)
            .filter(|cpu| allowed.is_set(*cpu as usize))
            .take(CPU_LIMIT)
            .collect();
        let board = SharedBoard::new()?;
        let parent = getpid();
        // SAFETY: the process has a single thread (required above), so that no other thread holds a
        // lock in the child.
        match unsafe { libc::fork() } {
            -1 => Err(io::Error::last_os_error()),
            0 => run_child(parent, board, &cpus, rhythm),
            pid => {
                let pid = Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidData)?;
                Ok(Self { board, cpus, pid })
            }
        }
    }

    /// The watched processors.
    pub fn cpus(&self) -> &[u32] {
        &self.cpus
    }

    /// The observations since the start; the readers keep running.
    pub fn report(&self) -> io::Result<WatchReport> {
        let report = self.board.report(&self.cpus)?;
        // Check without reaping: the process id stays allocated until the watch is dropped.
        let check = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        match waitid(WaitId::Pid(self.pid), check)? {
            None => Ok(report),
            Some(_) => Err(io::Error::other("the readers have ended by themselves")),
        }
    }
}

impl Drop for ClockWatch {
    fn drop(&mut self) {
        let _ = kill_process(self.pid, Signal::KILL);
        while matches!(waitpid(Some(self.pid), WaitOptions::empty()), Err(rustix::io::Errno::INTR))
        {
        }
    }
}

/// Main function of the child: starts the readers, which never end by themselves.
fn run_child(parent: Pid, board: SharedBoard, cpus: &[u32], rhythm: Rhythm) -> ! {
    // Readers must not outlive the agent if that is an ordinary process.
    let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
    if getppid() == Some(parent) {
        let readers: Vec<_> = cpus
            .iter()
            .enumerate()
            .filter_map(|(index, cpu)| {
                let cpu = *cpu;
                let reader = thread::Builder::new().spawn(move || {
                    // Captures the whole value; its field alone is not `Send`.
                    let board = board;
                    match bind(cpu) {
                        Ok(()) => read_on(&board, index, rhythm),
                        Err(errno) => board.fail(errno.raw_os_error()),
                    }
                });
                reader
                    .map_err(|error| board.fail(error.raw_os_error().unwrap_or(libc::EAGAIN)))
                    .ok()
            })
            .collect();
        for reader in readers {
            let _ = reader.join();
        }
    }
    // SAFETY: ends the process at once, without the parent's exit handlers and buffers.
    unsafe { libc::_exit(1) }
}

fn bind(cpu: u32) -> rustix::io::Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu as usize);
    sched_setaffinity(None, &set)
}

fn read_on(board: &Board, index: usize, rhythm: Rhythm) -> ! {
    loop {
        for number in 0..rhythm.burst_readings {
            let before = board.published();
            // The counter first: its fences order all readings after the load of the published
            // values.
            let tsc = clock::tsc();
            let monotonic_ns = clock::read(ClockId::Monotonic);
            let realtime_ns = clock::read(ClockId::Realtime);
            let position = if number == 0 { Position::First } else { Position::Next };
            board.enter(index, position, before, Reading { monotonic_ns, tsc, realtime_ns });
        }
        thread::sleep(rhythm.pause);
    }
}

//! The threads that execute a disk's requests side by side.
//!
//! The disk's own thread takes requests from the queue and puts them on the used ring; in between,
//! one of these executes each. They make ordinary system calls, each checked by a filter. io_uring
//! would need fewer threads, but what is submitted to it passes no filter: a captured thread could
//! open files and connect sockets with it.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, PollFlags, eventfd};

use super::disk::{Disk, Done, Durability};
use super::request::Request;
use crate::devices::virtio::HostEvents;
use crate::ending::join_until;
use crate::exit::{ExitSignal, GuestExit};
use crate::seccomp::{Filters, ThreadKind};

/// The threads of a disk. Dropping it waits until they have ended after their current request, as
/// far as the end of the monitor does; the memory and the image that they use exist until then.
pub(super) struct Pool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    exit: Arc<ExitSignal>,
}

struct Shared {
    state: Mutex<State>,
    /// There is a request, or no more will come.
    submitted: Condvar,
    /// No thread executes a request, and none waits.
    drained: Condvar,
    /// Readable while requests are done that nothing has taken yet.
    done: Arc<OwnedFd>,
}

/// What a thread does next.
enum Job {
    Execute(Arc<Disk>, Request, Durability),
    /// Writes back an image that has left its disk.
    WriteBack(Arc<Disk>),
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Job>,
    /// Requests that threads execute.
    running: usize,
    done: Vec<Done>,
    ending: bool,
}

impl State {
    fn in_flight(&self) -> usize {
        self.waiting.len() + self.running + self.done.len()
    }
}

impl Pool {
    /// Starts `threads` threads.
    ///
    /// # Errors
    /// A thread or its event could not be made.
    pub fn start(
        name: &str,
        threads: usize,
        filters: &Filters,
        exit: &Arc<ExitSignal>,
    ) -> io::Result<Self> {
        let done = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            submitted: Condvar::new(),
            drained: Condvar::new(),
            done: Arc::new(done),
        });
        let mut pool = Self { shared, threads: Vec::with_capacity(threads), exit: exit.clone() };
        for thread in 0..threads {
            let (shared, exit) = (pool.shared.clone(), exit.clone());
            let filter = filters.for_thread(ThreadKind::Disk);
            let thread =
                std::thread::Builder::new().name(format!("{name}-{thread}")).spawn(move || {
                    match filter.apply() {
                        Ok(()) => shared.work(),
                        Err(error) => exit.raise(GuestExit::Monitor { message: error.to_string() }),
                    }
                })?;
            pool.threads.push(thread);
        }
        Ok(pool)
    }

    /// Gives a request of `disk` to the threads.
    pub fn submit(&self, disk: &Arc<Disk>, request: Request, durability: Durability) {
        self.shared.lock().waiting.push_back(Job::Execute(disk.clone(), request, durability));
        self.shared.submitted.notify_one();
    }

    /// Writes the image of a disk back that has another one now, without waiting for it.
    pub fn write_back(&self, old: Arc<Disk>) {
        self.shared.lock().waiting.push_back(Job::WriteBack(old));
        self.shared.submitted.notify_one();
    }

    /// Number of requests that were submitted and not taken back yet.
    pub fn in_flight(&self) -> usize {
        self.shared.lock().in_flight()
    }

    /// Takes the requests that are done.
    pub fn take_done(&self) -> Vec<Done> {
        // Before the requests: what is done after this makes it readable again.
        let _ = rustix::io::read(&*self.shared.done, &mut [0_u8; 8]);
        std::mem::take(&mut self.shared.lock().done)
    }

    /// Waits until all submitted requests are done.
    pub fn drain(&self) {
        let mut state = self.shared.lock();
        while state.running > 0 || !state.waiting.is_empty() {
            state = self.shared.drained.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Forgets all requests. Those that threads execute are waited for: they access guest memory.
    pub fn forget(&self) {
        self.shared.lock().waiting.clear();
        self.drain();
        drop(self.take_done());
    }

    /// The event for requests that are done.
    pub fn host_events(&self) -> HostEvents {
        HostEvents { fd: self.shared.done.clone(), wanted: PollFlags::IN }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.ending = true;
        state.waiting.clear();
        drop(state);
        self.shared.submitted.notify_all();
        for thread in self.threads.drain(..) {
            // One that is left behind keeps guest memory mapped.
            let _ = join_until(thread, self.exit.end_deadline());
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        let mut state = self.lock();
        loop {
            let Some(job) = state.waiting.pop_front() else {
                if state.ending {
                    return;
                }
                state = self.submitted.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            state.running += 1;
            drop(state);
            // Both close the image, if the disk has another one by now.
            let done = match job {
                Job::Execute(disk, request, durability) => Some(disk.execute(&request, durability)),
                Job::WriteBack(old) => {
                    if let Err(error) = old.image.flush() {
                        tracing::warn!("an image that was replaced: {error}");
                    }
                    None
                }
            };
            state = self.lock();
            state.running -= 1;
            let is_first = done.is_some() && state.done.is_empty();
            state.done.extend(done);
            if is_first {
                // Its counter cannot be full: it is read before it is written again.
                let _ = rustix::io::write(&*self.done, &1_u64.to_ne_bytes());
            }
            if state.running == 0 && state.waiting.is_empty() {
                self.drained.notify_all();
            }
        }
    }
}

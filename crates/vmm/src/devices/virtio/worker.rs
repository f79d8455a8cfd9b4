//! The thread of a device: waits for notifications and timers and runs the device.

use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vmm_sys_util::eventfd::EventFd;

use super::mmio::MmioTransport;
use super::{HostEvents, VirtioDevice, Work};
use crate::ending::{Ended, join_until};
use crate::exit::{ExitSignal, GuestExit};
use crate::file::readable;
use crate::seccomp::Filters;

/// Notifications in a row that found nothing to do, from which on the next one is looked at after
/// [`REST`] only. A guest can notify much faster than a thread wakes up.
const MOST_IN_VAIN: u32 = 64;
/// Time for which notifications remain in their counters then.
const REST: Duration = Duration::from_millis(1);

/// Whether the device may work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Running,
    Paused,
    Stopping,
}

/// A running device thread. Dropping it ends the thread.
pub struct Worker {
    control: Arc<Control>,
    exit: Arc<ExitSignal>,
    thread: Option<JoinHandle<()>>,
}

struct Control {
    state: Mutex<State>,
    changed: Condvar,
    wake: Arc<EventFd>,
}

struct State {
    mode: Mode,
    /// The thread has seen that it must not work. Remains set until the thread sees that it may
    /// work again: a pause right after a resume finds a thread that has not woken up yet, and need
    /// not wait for it.
    parked: bool,
}

impl Worker {
    /// Starts the thread for `transport`.
    pub fn spawn<D: VirtioDevice + 'static>(
        name: &str,
        transport: Arc<Mutex<MmioTransport<D>>>,
        filters: &Filters,
        exit: Arc<ExitSignal>,
    ) -> io::Result<Self> {
        let (kicks, wake, kind) = {
            let transport = lock(&transport);
            let wires = transport.wires();
            (wires.kicks.clone(), wires.wake.clone(), transport.device().thread_kind())
        };
        let state = State { mode: Mode::Running, parked: false };
        let control = Arc::new(Control { state: Mutex::new(state), changed: Condvar::new(), wake });
        let failed = exit.clone();
        let (thread_control, filter) = (control.clone(), filters.for_thread(kind));
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || {
            let result = filter.apply().map_err(|error| error.to_string()).and_then(|()| {
                run(&transport, &kicks, &thread_control).map_err(|error| error.to_string())
            });
            thread_control.end();
            if let Err(error) = result {
                failed.raise(GuestExit::Monitor { message: format!("device thread: {error}") });
            }
        })?;
        Ok(Self { control, exit, thread: Some(thread) })
    }

    /// Stops the device's work. Returns when the thread has finished its current call or has ended.
    pub fn pause(&self) {
        self.set_mode(Mode::Paused);
        let mut state = lock(&self.control.state);
        while !state.parked {
            state = self.control.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Like [`pause`](Self::pause) without waiting: whether the device has stopped its work.
    pub fn try_pause(&self) -> bool {
        self.set_mode(Mode::Paused);
        lock(&self.control.state).parked
    }

    /// Tells the thread to end.
    pub(crate) fn request_end(&self) {
        self.set_mode(Mode::Stopping);
    }

    /// Ends the thread, or leaves it behind if it takes too long.
    pub(crate) fn end(&mut self) -> Ended {
        self.request_end();
        match self.thread.take() {
            Some(thread) => join_until(thread, self.exit.end_deadline()),
            None => Ended::Yes,
        }
    }

    /// Lets the device work again; notifications that arrived meanwhile are processed.
    pub fn resume(&self) {
        self.set_mode(Mode::Running);
    }

    fn set_mode(&self, mode: Mode) {
        lock(&self.control.state).mode = mode;
        // A full counter has woken the thread already.
        let _ = self.control.wake.write(1);
    }
}

impl Control {
    /// Returns the current mode and records that the thread knows it. Calls `quiesce` before the
    /// thread counts as parked.
    fn observe(&self, quiesce: impl FnOnce()) -> Mode {
        let mut state = lock(&self.state);
        if state.mode == Mode::Paused && !state.parked {
            drop(state);
            quiesce();
            state = lock(&self.state);
        }
        state.parked = state.mode != Mode::Running;
        self.changed.notify_all();
        state.mode
    }

    /// The thread will never work again, so that no caller waits for it.
    fn end(&self) {
        lock(&self.state).parked = true;
        self.changed.notify_all();
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.end();
    }
}

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn run<D: VirtioDevice>(
    transport: &Mutex<MmioTransport<D>>,
    kicks: &[Arc<EventFd>],
    control: &Control,
) -> io::Result<()> {
    // Queues to process; an interrupted one remains set.
    let mut pending = vec![true; kicks.len()];
    let mut notified = Notified::No;
    let mut host_ready = PollFlags::empty();
    let mut in_vain = 0_u32;
    loop {
        let mode = control.observe(|| lock(transport).quiesce());
        if mode == Mode::Stopping {
            return Ok(());
        }
        let parked = mode == Mode::Paused;
        let mut deadline = None;
        let mut host_events = None;
        let mut worked = false;
        if !parked {
            if !host_ready.is_empty() {
                let work = lock(transport).on_host_events(host_ready);
                worked |= work != Work::default();
                if work.more {
                    pending.fill(true);
                }
            }
            for (index, pending) in pending.iter_mut().enumerate().filter(|(_, pending)| **pending)
            {
                // The lock is taken for each call, so that the API and vCPUs get their turn.
                let (work, deferred_work) = {
                    let mut transport = lock(transport);
                    let work = transport.process_queue(index);
                    (work, work.deferred.then(|| transport.device().deferred_work()).flatten())
                };
                worked |= work != Work::default();
                *pending = work.more;
                if let Some(deferred_work) = deferred_work {
                    deferred_work();
                }
            }
            let now = Instant::now();
            let mut transport = lock(transport);
            if transport.deadline().is_some_and(|deadline| deadline <= now)
                && transport.on_timer(now).more
            {
                pending.fill(true);
            }
            deadline = transport.deadline();
            host_events = transport.host_events();
        }
        in_vain = match notified {
            _ if worked => 0,
            Notified::Yes => in_vain.saturating_add(1),
            Notified::No => in_vain,
        };
        let rests = notified == Notified::Yes && in_vain >= MOST_IN_VAIN;
        let timeout = if !parked && pending.contains(&true) {
            Some(Duration::ZERO)
        } else {
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            left.into_iter().chain(rests.then_some(REST)).min()
        };
        // While parked, notifications remain in their counters, too.
        let watched = if parked || rests { &[][..] } else { kicks };
        (notified, host_ready) =
            wait(watched, host_events.as_ref(), control, timeout, &mut pending)?;
    }
}

/// Whether the guest has notified a queue.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Notified {
    Yes,
    No,
}

/// Waits for a notification, an event of the host, a wake-up or the timeout. Marks the queues to
/// process, and returns the host's events.
fn wait(
    watched: &[Arc<EventFd>],
    host: Option<&HostEvents>,
    control: &Control,
    timeout: Option<Duration>,
    pending: &mut [bool],
) -> io::Result<(Notified, PollFlags)> {
    let timeout = timeout.map(|left| Timespec {
        tv_sec: left.as_secs() as i64,
        tv_nsec: i64::from(left.subsec_nanos()),
    });
    let mut fds: Vec<PollFd<'_>> = Vec::with_capacity(watched.len() + 2);
    fds.push(readable(&control.wake));
    fds.extend(watched.iter().map(|kick| readable(kick)));
    fds.extend(host.map(|host| PollFd::from_borrowed_fd(host.fd.as_fd(), host.wanted)));
    match poll(&mut fds, timeout.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        Err(error) => return Err(error.into()),
    }
    let events: Vec<PollFlags> = fds.iter().map(PollFd::revents).collect();
    let ready = |index: usize| events[index].contains(PollFlags::IN);
    if ready(0) {
        let _ = control.wake.read();
        pending.fill(true);
    }
    let mut notified = Notified::No;
    for (index, kick) in watched.iter().enumerate() {
        if ready(index + 1) {
            let _ = kick.read();
            pending[index] = true;
            notified = Notified::Yes;
        }
    }
    let host_ready = host.and_then(|_| events.last().copied()).unwrap_or(PollFlags::empty());
    Ok((notified, host_ready))
}

#[cfg(test)]
mod tests;

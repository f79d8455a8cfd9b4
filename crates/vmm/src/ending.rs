//! The end of threads. A thread that is told to end does so at once, unless it is inside of a system
//! call on a slow disk, or waits for a device that such a thread holds. The end of the monitor does
//! not wait for those ([`ExitSignal::end_deadline`](crate::exit::ExitSignal::end_deadline)).

use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Interval of checks. A thread that has been told to end usually does so within microseconds.
const POLL: Duration = Duration::from_micros(200);

/// Whether threads have ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub(crate) enum Ended {
    Yes,
    /// A thread goes on, and still uses what it has. It ends with the process.
    No,
}

/// Waits until `thread` has ended, but not beyond `deadline`.
pub(crate) fn join_until(thread: JoinHandle<()>, deadline: Instant) -> Ended {
    while !thread.is_finished() {
        if Instant::now() >= deadline {
            let name = thread.thread().name().unwrap_or("unnamed");
            tracing::warn!("the thread {name} does not end, and is left behind");
            return Ended::No;
        }
        std::thread::park_timeout(POLL);
    }
    // A panic was printed where it happened.
    let _ = thread.join();
    Ended::Yes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_does_not_end_is_left_behind() {
        let (end, ends) = std::sync::mpsc::channel::<()>();
        let stuck = std::thread::spawn(move || {
            let _ = ends.recv();
        });
        assert_eq!(join_until(stuck, Instant::now()), Ended::No);
        drop(end);
        let done = std::thread::spawn(|| ());
        assert_eq!(join_until(done, Instant::now() + Duration::from_secs(60)), Ended::Yes);
    }
}

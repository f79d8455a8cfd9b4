//! A thread that runs in the same process during merging, like a vCPU, to measure its slowdown.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use ebb_abi::{PageRange, Pfn};
use ebb_guest_ram::{GuestRam, HugePages};
use vm_memory::{Bytes, GuestAddress};

use super::content::PAGE_BYTES;
use super::memory;
use crate::LabError;
use crate::harness::proc;
use crate::report::statistics::Random;

/// Number of pages that it writes to: more than the TLB covers.
const PAGES: usize = 8192;
/// Name of the thread.
pub(super) const NAME: &str = "sibling";
/// Writes between two page faults.
const WRITES: usize = 512;

/// A thread that writes to memory of its own and has page faults.
#[derive(Debug)]
pub(super) struct Sibling {
    stop: Arc<AtomicBool>,
    rounds: Arc<AtomicU64>,
    /// Number of the thread, once it is known.
    thread_id: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

/// State of the thread at one time.
#[derive(Debug, Clone, Copy)]
pub(super) struct Mark {
    at: Instant,
    rounds: u64,
    /// Time for which it was runnable but not running.
    waited_ns: f64,
}

impl Sibling {
    /// Starts it.
    pub(super) fn start() -> Result<Self, LabError> {
        let cannot = |cause: &dyn std::fmt::Display| {
            LabError::Merging(format!("cannot start a second thread: {cause}"))
        };
        let ram = memory::map(PAGES, HugePages::Off)?;
        let (stop, rounds, thread_id) = (
            Arc::<AtomicBool>::default(),
            Arc::<AtomicU64>::default(),
            Arc::<AtomicU64>::default(),
        );
        let shared = (stop.clone(), rounds.clone(), thread_id.clone());
        let thread = thread::Builder::new()
            .name(NAME.to_owned())
            .spawn(move || work(&ram, &shared.0, &shared.1, &shared.2))
            .map_err(|error| cannot(&error))?;
        Ok(Self { stop, rounds, thread_id, thread: Some(thread) })
    }

    /// Its present state.
    pub(super) fn mark(&self) -> Mark {
        let path = format!("/proc/self/task/{}/schedstat", self.thread_id.load(Ordering::Relaxed));
        let waited_ns = std::fs::read_to_string(path)
            .ok()
            .and_then(|text| proc::schedstat(&text))
            .map_or(0.0, |times| times.waiting_ns as f64);
        Mark { at: Instant::now(), rounds: self.rounds.load(Ordering::Relaxed), waited_ns }
    }

    /// Rounds per second since `mark`, without the time in which other programs had its processor.
    pub(super) fn rounds_per_s(&self, mark: Mark) -> Option<f64> {
        let now = self.mark();
        let ns = (now.at - mark.at).as_nanos() as f64 - (now.waited_ns - mark.waited_ns);
        (ns > 0.0).then(|| (now.rounds - mark.rounds) as f64 * 1e9 / ns)
    }
}

impl Drop for Sibling {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn work(ram: &GuestRam, stop: &AtomicBool, rounds: &AtomicU64, thread_id: &AtomicU64) {
    thread_id.store(rustix::thread::gettid().as_raw_nonzero().get() as u64, Ordering::Relaxed);
    let mut random = Random(1);
    while !stop.load(Ordering::Relaxed) {
        for _ in 0..WRITES {
            let place = random.below(PAGES) * PAGE_BYTES + random.below(PAGE_BYTES / 8) * 8;
            let _ = ram.memory().write_obj(random.0, GuestAddress(place as u64));
        }
        // A page that is discarded and populated again, as with a balloon.
        let page = Pfn::containing((random.below(PAGES) * PAGE_BYTES) as u64);
        let _ = ram.discard(&[PageRange::new(page, 1)]);
        rounds.fetch_add(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_sibling_works_until_it_is_dropped() {
        let sibling = Sibling::start().unwrap();
        let mark = sibling.mark();
        while sibling.rounds.load(Ordering::Relaxed) < mark.rounds + 10 {
            thread::sleep(Duration::from_millis(1));
        }
        assert!(sibling.rounds_per_s(mark).is_some_and(|rate| rate > 0.0));
        let rounds = sibling.rounds.clone();
        drop(sibling);
        assert_eq!(Arc::strong_count(&rounds), 1, "the thread has ended");
    }
}

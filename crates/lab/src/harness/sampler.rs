//! Samples of the host while a series runs.

use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::LabError;
use crate::harness::host::{self, Gauge};
use crate::report::event::{Event, Events};
use crate::report::results::Sample;
use crate::report::statistics::rounded;

/// Processes of the guests, in the order of starting; shared with the sampler.
#[derive(Debug, Clone, Default)]
pub struct GuestProcesses(Arc<Mutex<Vec<u32>>>);

impl GuestProcesses {
    /// Adds the process of the next guest.
    pub fn add(&self, pid: u32) {
        // The list is always complete, even if a thread that held the lock has panicked.
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(pid);
    }

    /// Replaces the list by these processes, for a guest that continues in another process.
    pub fn only(&self, pids: &[u32]) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = pids.to_vec();
    }

    fn list(&self) -> Vec<u32> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Samples at the shortest interval; later ones are this part of the time apart, since a document has
/// them all, each with all guests.
const EVEN_SAMPLES: u32 = 200;

/// A thread that reports a [`Sample`] at intervals until it is dropped.
#[derive(Debug)]
pub struct Sampler {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Sampler {
    /// Starts sampling for a series, at first with this interval.
    pub fn start(
        series: String,
        interval: Duration,
        gauge: Gauge,
        guests: GuestProcesses,
        events: Events,
    ) -> Self {
        let (stop, stopped) = mpsc::channel();
        let begin = Instant::now();
        let thread = thread::spawn(move || {
            loop {
                match sample(&series, begin, &gauge, &guests) {
                    Ok(sample) => events.send(Event::Sample(sample)),
                    Err(error) => tracing::warn!(%error, "no sample"),
                }
                let interval = interval.max(begin.elapsed() / EVEN_SAMPLES);
                if stopped.recv_timeout(interval) != Err(RecvTimeoutError::Timeout) {
                    return;
                }
            }
        });
        Self { stop: Some(stop), thread: Some(thread) }
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // A sampler that has panicked has reported it.
            let _ = thread.join();
        }
    }
}

fn sample(
    series: &str,
    begin: Instant,
    gauge: &Gauge,
    guests: &GuestProcesses,
) -> Result<Sample, LabError> {
    let usage = gauge.read()?;
    let guest_rss_mib: Vec<f64> = guests
        .list()
        .into_iter()
        .map(|pid| {
            host::process_memory(pid).map_or(0.0, |memory| rounded(host::mib(memory.resident_kib)))
        })
        .collect();
    Ok(Sample {
        series: series.to_owned(),
        t_ms: begin.elapsed().as_millis() as u64,
        guest: guest_rss_mib.len() as u32,
        host_used_mib: rounded(usage.used_mib),
        swap_used_mib: rounded(usage.swap_used_mib),
        guest_rss_mib,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_show_the_running_guests_and_end_with_the_sampler() {
        let (sender, receiver) = mpsc::channel();
        let guests = GuestProcesses::default();
        guests.add(std::process::id());
        guests.add(u32::MAX);
        let sampler = Sampler::start(
            "reporting".to_owned(),
            Duration::from_millis(1),
            Gauge::new(1024, 0).unwrap(),
            guests,
            Events::new(sender),
        );
        let samples: Vec<Event> = receiver.iter().take(3).collect();
        drop(sampler);
        for event in samples {
            let Event::Sample(sample) = event else { panic!("{event:?}") };
            assert_eq!((sample.series.as_str(), sample.guest), ("reporting", 2));
            assert!(sample.guest_rss_mib[0] > 0.0);
            assert!(
                sample.guest_rss_mib[1].abs() < f64::EPSILON,
                "a guest that has ended has no memory"
            );
        }
        // The sender was dropped with the thread, so that the iteration ends.
        assert!(receiver.iter().count() < 1000);
    }
}

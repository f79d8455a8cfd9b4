//! All processor time that merging takes, wherever it is spent.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use super::sibling;
use crate::LabError;
use crate::harness::proc;

/// Parent of all kernel threads (kernel/kthread.c, `kthreadd`).
const KTHREADD: u32 = 2;

/// Processor time in ns.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Price {
    /// Of the processes whose memory is merged.
    pub(super) members: u64,
    /// Of the merge broker.
    pub(super) broker: u64,
    /// Of all kernel threads: the one that merges, and those that flush, free and compact.
    pub(super) kernel: u64,
}

impl Price {
    /// All of it.
    pub(super) fn ns(&self) -> u64 {
        self.members + self.broker + self.kernel
    }

    /// `count` for each second of it.
    pub(super) fn per_cpu_s(&self, count: u64) -> Option<f64> {
        (self.ns() > 0).then(|| count as f64 * 1e9 / self.ns() as f64)
    }
}

impl std::ops::Add for Price {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            members: self.members + other.members,
            broker: self.broker + other.broker,
            kernel: self.kernel + other.kernel,
        }
    }
}

/// Measures the price of what is done between two looks, when all of these tasks sleep.
#[derive(Debug)]
pub(super) struct Meter {
    members: Vec<u32>,
    broker: Option<u32>,
    before: Threads,
}

/// Processor time by thread, of members, the broker and the kernel.
type Threads = [BTreeMap<u32, u64>; 3];

impl Meter {
    /// Begins for these processes.
    pub(super) fn start(
        members: impl Iterator<Item = u32>,
        broker: Option<u32>,
    ) -> Result<Self, LabError> {
        let mut meter = Self { members: members.collect(), broker, before: Threads::default() };
        meter.before = meter.look()?;
        Ok(meter)
    }

    /// The price since the start, without that of second threads ([`sibling`]).
    pub(super) fn price(&self) -> Result<Price, LabError> {
        let [members, broker, kernel] = {
            let now = self.look()?;
            let since = |kind: usize| {
                let before = |thread| self.before[kind].get(thread).copied().unwrap_or(0);
                now[kind].iter().map(|(thread, ns)| ns.saturating_sub(before(thread))).sum()
            };
            [0, 1, 2].map(since)
        };
        Ok(Price { members, broker, kernel })
    }

    fn look(&self) -> Result<Threads, LabError> {
        let mut all = Threads::default();
        for member in &self.members {
            all[0].extend(threads(*member)?);
        }
        if let Some(broker) = self.broker {
            all[1].extend(threads(broker)?);
        }
        all[2].extend(kernel_threads()?);
        Ok(all)
    }
}

/// Processor time of the threads of a process.
fn threads(pid: u32) -> Result<Vec<(u32, u64)>, LabError> {
    let path = format!("/proc/{pid}/task");
    let entries = fs::read_dir(&path).map_err(LabError::of_file(&path))?;
    let all = entries.flatten().filter_map(|entry| {
        let thread = entry.file_name().to_str()?.parse().ok()?;
        // A thread that has ended meanwhile has no files.
        let name = fs::read_to_string(entry.path().join("comm")).ok()?;
        (name.trim() != sibling::NAME).then_some((thread, running_ns(&entry.path())?))
    });
    Ok(all.collect())
}

/// Processor time of all threads of the kernel.
fn kernel_threads() -> Result<Vec<(u32, u64)>, LabError> {
    let entries = fs::read_dir("/proc").map_err(LabError::of_file("/proc"))?;
    let all = entries.flatten().filter_map(|entry| {
        let pid = entry.file_name().to_str()?.parse().ok()?;
        let stat = fs::read_to_string(entry.path().join("stat")).ok()?;
        (proc::parent(&stat)? == KTHREADD).then_some((pid, running_ns(&entry.path())?))
    });
    Ok(all.collect())
}

fn running_ns(folder: &Path) -> Option<u64> {
    let text = fs::read_to_string(folder.join("schedstat")).ok()?;
    proc::schedstat(&text).map(|times| times.running_ns)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_by_all_processor_time() {
        let price = Price { members: 300_000_000, broker: 50_000_000, kernel: 150_000_000 };
        assert_eq!(price.per_cpu_s(100), Some(200.0));
        assert_eq!((price + price).ns(), 1_000_000_000);
        assert_eq!(Price::default().per_cpu_s(1), None);
    }

    #[test]
    fn work_of_a_process_has_its_price_and_that_of_its_second_thread_has_none() {
        let spend = || {
            let text = fs::read_to_string("/proc/self/stat").unwrap();
            (0..20_000_u64).map(|n| n.wrapping_mul(text.len() as u64)).fold(0, u64::wrapping_add)
        };
        let own = std::process::id();
        let meter = Meter::start([own].into_iter(), None).unwrap();
        while meter.price().unwrap().members == 0 {
            std::hint::black_box(spend());
        }
        assert_eq!(meter.price().unwrap().broker, 0);
        let sibling = sibling::Sibling::start().unwrap();
        let is_sibling = |thread: &u32| {
            let comm = fs::read_to_string(format!("/proc/{own}/task/{thread}/comm"));
            comm.is_ok_and(|name| name.trim() == sibling::NAME)
        };
        assert!(!threads(own).unwrap().iter().any(|(thread, _)| is_sibling(thread)));
        drop(sibling);
    }
}

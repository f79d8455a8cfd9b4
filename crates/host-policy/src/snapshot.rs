//! What is known of a host and its machines at one moment.
//!
//! A value that is not known is `None`, never zero: the two lead to opposite actions.

use serde::{Deserialize, Serialize};

/// A host at one moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// The moment, of a clock that never goes back (`CLOCK_BOOTTIME`), in milliseconds.
    pub at_ms: u64,
    /// The host.
    pub host: Host,
    /// Its machines, in any order.
    pub machines: Vec<Machine>,
}

/// The largest size, time or counter that is used: 64 TiB. Sums of these do not overflow.
pub(crate) const MOST: u64 = 1 << 46;

impl Snapshot {
    /// The same with all numbers limited to [`MOST`]: statistics are the guest's to choose.
    pub(crate) fn bounded(&self) -> Self {
        let mut snapshot = self.clone();
        bound([&mut snapshot.at_ms]);
        let Host { total_bytes, available_bytes, swap, pressure } = &mut snapshot.host;
        bound([total_bytes, available_bytes]);
        if let Some(Swap { total_bytes, used_bytes, out_bytes }) = swap {
            bound([total_bytes, used_bytes, out_bytes]);
        }
        if let Some(Pressure { some_us, full_us }) = pressure {
            bound([some_us, full_us]);
        }
        for machine in &mut snapshot.machines {
            bound([&mut machine.size_bytes]);
            bound(
                [
                    &mut machine.resident_bytes,
                    &mut machine.swapped_bytes,
                    &mut machine.processor_ms,
                ]
                .into_iter()
                .flatten(),
            );
            if let Some(Balloon { target_bytes, actual_bytes }) = &mut machine.balloon {
                bound([target_bytes, actual_bytes]);
            }
            if let Some(said) = &mut machine.statistics {
                bound([&mut said.taken_ms]);
                bound(
                    [
                        &mut said.total_bytes,
                        &mut said.available_bytes,
                        &mut said.free_bytes,
                        &mut said.caches_bytes,
                        &mut said.major_faults,
                        &mut said.swap_out_bytes,
                        &mut said.oom_kills,
                    ]
                    .into_iter()
                    .flatten(),
                );
            }
        }
        snapshot
    }
}

fn bound<'a>(values: impl IntoIterator<Item = &'a mut u64>) {
    for value in values {
        *value = MOST.min(*value);
    }
}

/// The memory that the machines and the rest of the host share: the host's, or that of a cgroup
/// with a limit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Host {
    /// All of it.
    pub total_bytes: u64,
    /// What can be allocated without swapping (`MemAvailable`, proc_meminfo(5)).
    pub available_bytes: u64,
    /// `None` without swap.
    pub swap: Option<Swap>,
    /// `None` if the kernel does not measure it.
    pub pressure: Option<Pressure>,
}

/// A host's swap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Swap {
    /// Its size.
    pub total_bytes: u64,
    /// What is in use.
    pub used_bytes: u64,
    /// Written to it since the host's start (`pswpout` of /proc/vmstat).
    pub out_bytes: u64,
}

/// Time for which tasks have waited for memory since the host's start: `total=` of the lines of
/// /proc/pressure/memory. (Its averages stay above zero for minutes after the last wait.)
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pressure {
    /// At least one task waited, in microseconds.
    pub some_us: u64,
    /// All tasks waited, in microseconds.
    pub full_us: u64,
}

/// One machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Its name, which no other machine of the host has.
    pub name: String,
    /// Its memory, as its guest found it at boot.
    pub size_bytes: u64,
    /// Host memory that its monitor occupies (`RssAnon` and its like, proc_pid_status(5)); no page
    /// is counted for two machines.
    pub resident_bytes: Option<u64>,
    /// What the host has swapped out of it (`VmSwap`).
    pub swapped_bytes: Option<u64>,
    /// Time that its processors have run, in milliseconds since its start.
    pub processor_ms: Option<u64>,
    /// Whether its processors stand still by an order from outside.
    pub is_paused: bool,
    /// `None` without a balloon or without a driver for it.
    pub balloon: Option<Balloon>,
    /// What its guest has last said; `None` if it never did.
    pub statistics: Option<Statistics>,
    /// What its monitor can do.
    pub means: Means,
}

impl Machine {
    /// What its balloon holds.
    pub fn ballooned_bytes(&self) -> u64 {
        self.balloon.map_or(0, |balloon| balloon.actual_bytes)
    }

    /// What is left to its guest.
    pub fn outside_balloon_bytes(&self) -> u64 {
        self.size_bytes.saturating_sub(self.ballooned_bytes())
    }
}

/// The balloon of a machine: sizes of the balloon, never of the rest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Balloon {
    /// The size that the guest is asked for.
    pub target_bytes: u64,
    /// The size that it has reached.
    pub actual_bytes: u64,
}

/// What a guest says about its memory (virtio 1.3 section 5.5.6.4). It may be wrong or invented.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Statistics {
    /// When it said so, on the snapshot's clock.
    pub taken_ms: u64,
    /// All memory of the guest, without the balloon.
    pub total_bytes: Option<u64>,
    /// What its programs can still get without swapping, caches included.
    pub available_bytes: Option<u64>,
    /// Memory on its free lists.
    pub free_bytes: Option<u64>,
    /// Caches of files.
    pub caches_bytes: Option<u64>,
    /// Page faults that needed I/O, since boot.
    pub major_faults: Option<u64>,
    /// Memory swapped out by the guest since boot.
    pub swap_out_bytes: Option<u64>,
    /// Processes that it has killed for lack of memory, since boot.
    pub oom_kills: Option<u64>,
}

/// A way to get memory back from a machine, the cheapest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mean {
    /// The guest reports free pages by itself.
    Reporting,
    /// The guest reports all of its free pages at once when it is asked.
    Reclaim,
    /// Memory that is all zero is discarded.
    Trim,
    /// The guest evicts its cold caches and reports what is free then.
    Park,
    /// The guest gives up memory to a balloon.
    Balloon,
    /// The machine stands still for a second or two, so that it does not grow.
    Pause,
    /// The machine is saved to a file and stopped.
    Stop,
}

/// A set of [`Mean`]s.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Vec<Mean>", into = "Vec<Mean>")]
pub struct Means(u8);

impl Means {
    /// Whether this one is there.
    pub fn has(self, mean: Mean) -> bool {
        self.0 & 1 << mean as u8 != 0
    }

    /// All that are there, the cheapest first.
    pub fn iter(self) -> impl Iterator<Item = Mean> {
        const ALL: [Mean; 7] = [
            Mean::Reporting,
            Mean::Reclaim,
            Mean::Trim,
            Mean::Park,
            Mean::Balloon,
            Mean::Pause,
            Mean::Stop,
        ];
        ALL.into_iter().filter(move |mean| self.has(*mean))
    }
}

impl FromIterator<Mean> for Means {
    fn from_iter<I: IntoIterator<Item = Mean>>(means: I) -> Self {
        Self(means.into_iter().fold(0, |set, mean| set | 1 << mean as u8))
    }
}

impl From<Vec<Mean>> for Means {
    fn from(means: Vec<Mean>) -> Self {
        means.into_iter().collect()
    }
}

impl From<Means> for Vec<Mean> {
    fn from(means: Means) -> Self {
        means.iter().collect()
    }
}

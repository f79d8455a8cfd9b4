//! What the API needs of a virtual machine: the [`VmControl`] trait and the plain types that go
//! over the socket.
//!
//! The types know nothing of KVM or of the balloon crate, so that clients use them as well. Field
//! names and values are those of the JSON documents, which `docs/openapi.json` describes.

use std::path::Path;
use std::time::Duration;

use ebb_guest_ram::Backing;
use ebb_kvm_clock::ClockPolicy;
use serde::{Deserialize, Serialize};

use super::free_pages::{FreePagesAnswer, FreePagesRequest};
use super::merge::{MergeChange, MergeInfo};
pub use super::metrics::{BalloonMetrics, KindCount, Metrics};
use super::migration::{MigrationRequest, MigrationStatus};

/// The virtual machine as the API sees it.
///
/// One thread serves all clients, therefore no method may wait for the guest: statistics are asked
/// for with [`request_statistics`](Self::request_statistics) and polled with
/// [`statistics`](Self::statistics), free pages are asked for with
/// [`request_free_pages`](Self::request_free_pages), whose result is polled. Waiting for vCPU
/// threads to leave the guest (pause) is fine.
pub trait VmControl: Send + Sync {
    /// The state of the machine. It answers in every state.
    fn info(&self) -> VmInfo;

    /// Stops all vCPUs; returns when no vCPU runs guest code. Pausing a paused machine is no error.
    fn pause(&self) -> Result<(), ControlError>;

    /// Lets the vCPUs run again. Resuming a running machine is no error.
    fn resume(&self) -> Result<(), ControlError>;

    /// Presses the power button (ACPI): the guest decides what to do. A paused machine is the wrong
    /// state.
    fn power_button(&self) -> Result<(), ControlError>;

    /// Gives back guest memory that holds nothing but zeros. A running machine is stopped for it, a
    /// few milliseconds at a time. It works for about a second; the next call goes on where this
    /// one ended.
    fn trim(&self) -> Result<TrimReport, ControlError>;

    /// Writes the machine to the file `path`, which must be absolute. A running machine is stopped
    /// meanwhile. On any error the machine is as before, and there is no file of that name that was
    /// not there before.
    fn snapshot(&self, path: &Path) -> Result<SnapshotReport, ControlError>;

    /// Begins to move the machine to another monitor, and returns at once.
    /// [`ControlError::WrongState`] when a migration is under way already.
    fn migrate(&self, request: MigrationRequest) -> Result<(), ControlError>;

    /// How far the migration under way is, or what the last one has come to.
    fn migration(&self) -> MigrationStatus;

    /// Asks for the end of the migration under way, without waiting for it.
    /// [`ControlError::WrongState`] if there is none, or if the machine has been given away
    /// already.
    fn cancel_migration(&self) -> Result<(), ControlError>;

    /// Asks the monitor to end the machine at once, like pulling the plug. It must return without
    /// waiting for the end: the reply is sent afterwards, at the latest when the
    /// [`ApiServer`](super::ApiServer) is dropped.
    fn kill(&self) -> Result<(), ControlError>;

    /// The state of the balloon; [`ControlError::NoBalloon`] if the machine has none.
    fn balloon(&self) -> Result<BalloonInfo, ControlError>;

    /// Sets the size the balloon should get to. A target above the guest's memory, or one that is
    /// not a multiple of 4096 bytes, is [`ControlError::Invalid`] for the field `target_bytes`.
    fn set_balloon_target(&self, target_bytes: u64) -> Result<(), ControlError>;

    /// Asks the guest for fresh statistics and returns at once. An outstanding request is not
    /// doubled. [`ControlError::WrongState`] when the guest cannot answer: paused, no driver,
    /// statistics not negotiated.
    fn request_statistics(&self) -> Result<(), ControlError>;

    /// The statistics received last, however old; all values `None` when there never were any.
    fn statistics(&self) -> Result<StatisticsReading, ControlError>;

    /// Asks the guest for statistics regularly from now on; `None` stops that.
    fn set_statistics_interval(&self, interval: Option<Duration>) -> Result<(), ControlError>;

    /// Asks the guest which of its pages are free, and returns at once; one question at a time.
    /// [`ControlError::WrongState`] when the guest cannot answer: paused, no driver, host requests
    /// not negotiated, or another question is under way.
    fn request_free_pages(
        &self,
        request: FreePagesRequest,
    ) -> Result<Box<dyn FreePagesAnswer>, ControlError>;

    /// What same-page merging is doing.
    fn merge(&self) -> Result<MergeInfo, ControlError>;

    /// Changes how pages are merged. It waits for a change of settings to take effect, not for
    /// pages to be unmerged. [`ControlError::WrongState`] when nobody merges, or when a setting can
    /// only change while nothing is merged.
    fn set_merge(&self, change: &MergeChange) -> Result<(), ControlError>;

    /// All counters, for monitoring.
    fn metrics(&self) -> Metrics;
}

/// Why the machine did not do what it was asked. The variant decides the HTTP status.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ControlError {
    /// The machine has no balloon device (404).
    #[error("this virtual machine has no balloon device")]
    NoBalloon,
    /// Not possible in the machine's present state (409).
    #[error("{message}")]
    WrongState {
        /// What was asked and what state was found.
        message: String,
        /// What to do first.
        remedy: Option<String>,
    },
    /// A value that cannot be used (422).
    #[error("{message}")]
    Invalid {
        /// The JSON field.
        field: &'static str,
        /// What was asked, and what the limits are.
        message: String,
        /// What to ask for instead.
        remedy: Option<String>,
    },
    /// It should have worked (500).
    #[error("{message}")]
    Failed {
        /// What was asked and what went wrong.
        message: String,
    },
}

/// What a virtual machine is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VmState {
    /// Being set up; no vCPU has run yet.
    Starting,
    /// Waiting for another monitor to send the machine, or receiving it.
    Receiving,
    /// vCPUs run.
    Running,
    /// vCPUs are stopped until resumed.
    Paused,
    /// vCPUs are stopped while the rest of the machine goes to another monitor.
    Migrating,
    /// The guest has ended or is being ended; the monitor is about to exit.
    Stopping,
}

impl From<RamBacking> for Backing {
    fn from(backing: RamBacking) -> Self {
        match backing {
            RamBacking::Anon => Self::Anonymous,
            RamBacking::Memfd => Self::Memfd,
            RamBacking::Hugetlb => Self::Hugetlb2M,
        }
    }
}

impl From<Backing> for RamBacking {
    fn from(backing: Backing) -> Self {
        match backing {
            Backing::Anonymous => Self::Anon,
            Backing::Memfd => Self::Memfd,
            Backing::Hugetlb2M => Self::Hugetlb,
        }
    }
}

/// What guest memory is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RamBacking {
    /// Private anonymous memory.
    Anon,
    /// A shared memfd.
    Memfd,
    /// A memfd of 2 MiB pages out of the host's hugetlb pool.
    Hugetlb,
}

/// What the guest's clocks do while it stands still, and what they said when it last did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClockInfo {
    /// Whether they stand still or catch up.
    pub policy: ClockPolicy,
    /// When the machine was last stopped; for a restored machine that has not been stopped since,
    /// when the snapshot was taken. `None` if it never was.
    pub stopped: Option<ClockInstant>,
    /// When it last went on. `None` if it never did.
    pub started: Option<ClockInstant>,
}

/// One instant on two clocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClockInstant {
    /// KVM's clock, which the guest's monotonic clock follows, in nanoseconds.
    pub clock_ns: u64,
    /// The host's real time, in nanoseconds since 1970.
    pub realtime_ns: u64,
}

/// `GET /vm`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmInfo {
    /// What the machine is doing.
    pub state: VmState,
    /// Number of vCPUs.
    pub cpus: u32,
    /// Guest memory in bytes, without regard to the balloon.
    pub memory_bytes: u64,
    /// What guest memory is made of.
    pub backing: RamBacking,
    /// Guest memory that the host holds at present, in bytes.
    pub resident_bytes: u64,
    /// Memory that shares pages with other memory, in bytes; not part of `resident_bytes` if the
    /// monitor merges. `None` where nobody merges.
    pub merged_bytes: Option<u64>,
    /// Memory that a restored machine reads from its snapshot and has not written, in bytes: it is
    /// in the host's page cache once for all machines that read it. `None` for a machine that was
    /// not restored.
    pub snapshot_bytes: Option<u64>,
    /// Milliseconds since the vCPUs were started; 0 before.
    pub uptime_ms: u64,
    /// The guest's clocks over pauses.
    pub clock: ClockInfo,
    /// Path of the kernel image.
    pub kernel: String,
    /// Process id of the monitor.
    pub pid: u32,
    /// Version of the monitor.
    pub version: String,
    /// The balloon in short; `None` if the machine has none.
    pub balloon: Option<BalloonSummary>,
}

/// What `PUT /vm/trim` did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrimReport {
    /// Guest memory that the host held and that was looked at, in bytes.
    pub scanned_bytes: u64,
    /// Memory of it that was zero and was given back, in bytes.
    pub returned_bytes: u64,
    /// How often the machine was stopped.
    pub pauses: u64,
    /// The longest time it was stopped, in microseconds.
    pub longest_pause_us: u64,
    /// Whether all of guest memory has been looked at; if not, the next call goes on.
    pub complete: bool,
}

impl TrimReport {
    /// Adds what a further call did.
    pub fn add(&mut self, part: &Self) {
        self.scanned_bytes += part.scanned_bytes;
        self.returned_bytes += part.returned_bytes;
        self.pauses += part.pauses;
        self.longest_pause_us = self.longest_pause_us.max(part.longest_pause_us);
        self.complete = part.complete;
    }
}

/// The balloon in short.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BalloonSummary {
    /// The size asked for.
    pub target_bytes: u64,
    /// The size the guest says it has got to.
    pub actual_bytes: u64,
    /// What the balloon is doing.
    pub state: BalloonState,
}

/// What a balloon is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BalloonState {
    /// No driver in the guest has taken over the device (yet).
    DriverAbsent,
    /// The actual size is the target.
    Idle,
    /// The actual size is below the target.
    Inflating,
    /// The actual size is above the target.
    Deflating,
}

impl BalloonState {
    /// The state that follows from the sizes, for a device whose driver is or is not there.
    pub fn from_sizes(driver: DriverPresence, target_bytes: u64, actual_bytes: u64) -> Self {
        match (driver, actual_bytes.cmp(&target_bytes)) {
            (DriverPresence::Absent, _) => Self::DriverAbsent,
            (DriverPresence::Present, std::cmp::Ordering::Less) => Self::Inflating,
            (DriverPresence::Present, std::cmp::Ordering::Equal) => Self::Idle,
            (DriverPresence::Present, std::cmp::Ordering::Greater) => Self::Deflating,
        }
    }
}

/// Whether a driver in the guest has taken over a device (DRIVER_OK, virtio 1.3 section 2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DriverPresence {
    /// No driver.
    Absent,
    /// A driver has set DRIVER_OK.
    Present,
}

/// A feature of the balloon device (virtio 1.3 section 5.5.3; docs/extension.md).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BalloonFeature {
    /// Bit 0, VIRTIO_BALLOON_F_MUST_TELL_HOST.
    MustTellHost,
    /// Bit 1, VIRTIO_BALLOON_F_STATS_VQ.
    Statistics,
    /// Bit 2, VIRTIO_BALLOON_F_DEFLATE_ON_OOM.
    DeflateOnOom,
    /// Bit 3, VIRTIO_BALLOON_F_FREE_PAGE_HINT.
    FreePageHint,
    /// Bit 4, VIRTIO_BALLOON_F_PAGE_POISON.
    PagePoison,
    /// Bit 5, VIRTIO_BALLOON_F_PAGE_REPORTING.
    PageReporting,
    /// Bit 50 of the extension, VIRTIO_BALLOON_F_PAGE_BITMAP.
    PageBitmap,
    /// Bit 51 of the extension, VIRTIO_BALLOON_F_PAGE_RANGES.
    PageRanges,
    /// Bit 52 of the extension, VIRTIO_BALLOON_F_HOST_REQUEST_VQ.
    HostRequests,
}

impl BalloonFeature {
    /// All features, by bit number.
    pub const ALL: [Self; 9] = [
        Self::MustTellHost,
        Self::Statistics,
        Self::DeflateOnOom,
        Self::FreePageHint,
        Self::PagePoison,
        Self::PageReporting,
        Self::PageBitmap,
        Self::PageRanges,
        Self::HostRequests,
    ];

    /// The bit of each of [`ALL`](Self::ALL).
    const BITS: [u32; Self::ALL.len()] = [0, 1, 2, 3, 4, 5, 50, 51, 52];

    /// The features among `bits`; bits that are none are left out.
    pub fn from_bits(bits: u64) -> Vec<Self> {
        Self::BITS
            .into_iter()
            .zip(Self::ALL)
            .filter(|(bit, _)| bits >> bit & 1 != 0)
            .map(|(_, f)| f)
            .collect()
    }
}

/// `GET /balloon`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BalloonInfo {
    /// The size asked for, in bytes.
    pub target_bytes: u64,
    /// The size the guest says it has got to, in bytes.
    pub actual_bytes: u64,
    /// What the balloon is doing.
    pub state: BalloonState,
    /// What the device offers.
    pub offered_features: Vec<BalloonFeature>,
    /// What guest and device have agreed on; empty without a driver.
    pub negotiated_features: Vec<BalloonFeature>,
    /// The value the guest fills free pages with; `None` unless page poison was negotiated.
    pub poison: Option<u32>,
    /// Why memory is not given back to the host at present; `None` when it is.
    pub discard_inhibited: Option<String>,
    /// Seconds between two requests for statistics; 0 when they are not asked for regularly.
    pub statistics_interval_seconds: u32,
}

/// The last statistics with their age.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StatisticsReading {
    /// Time since the guest delivered the values; `None` when it never did.
    pub age: Option<Duration>,
    /// The values.
    pub values: StatisticsValues,
}

/// What a guest says about its memory (virtio 1.3 section 5.5.6.4; tags 10 to 15 as in Linux
/// include/uapi/linux/virtio_balloon.h). `None` (`null`) is "not told", never zero.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StatisticsValues {
    /// Tag 0: memory swapped in since boot.
    pub swap_in_bytes: Option<u64>,
    /// Tag 1: memory swapped out since boot.
    pub swap_out_bytes: Option<u64>,
    /// Tag 2: page faults that needed I/O, since boot.
    pub major_faults: Option<u64>,
    /// Tag 3: page faults that needed no I/O, since boot.
    pub minor_faults: Option<u64>,
    /// Tag 4: memory not in use for anything.
    pub free_memory_bytes: Option<u64>,
    /// Tag 5: memory the guest has in all, without the balloon.
    pub total_memory_bytes: Option<u64>,
    /// Tag 6: an estimate of what programs could get without swapping.
    pub available_memory_bytes: Option<u64>,
    /// Tag 7: file caches that can be given up quickly.
    pub disk_caches_bytes: Option<u64>,
    /// Tag 8: huge pages allocated, since boot.
    pub hugetlb_allocations: Option<u64>,
    /// Tag 9: huge pages that could not be allocated, since boot.
    pub hugetlb_failures: Option<u64>,
    /// Tag 10: processes killed for lack of memory, since boot.
    pub oom_kills: Option<u64>,
    /// Tag 11: allocations that had to reclaim memory themselves, since boot.
    pub allocation_stalls: Option<u64>,
    /// Tag 12: memory scanned in the background, since boot.
    pub async_scan_bytes: Option<u64>,
    /// Tag 13: memory scanned by allocations, since boot.
    pub direct_scan_bytes: Option<u64>,
    /// Tag 14: memory reclaimed in the background, since boot.
    pub async_reclaim_bytes: Option<u64>,
    /// Tag 15: memory reclaimed by allocations, since boot.
    pub direct_reclaim_bytes: Option<u64>,
}

impl StatisticsValues {
    /// Number of known tags: 0 to 15.
    pub const TAGS: usize = 16;

    /// The values by tag: `tags[n]` is the value of tag n.
    pub fn from_tags(tags: [Option<u64>; Self::TAGS]) -> Self {
        Self {
            swap_in_bytes: tags[0],
            swap_out_bytes: tags[1],
            major_faults: tags[2],
            minor_faults: tags[3],
            free_memory_bytes: tags[4],
            total_memory_bytes: tags[5],
            available_memory_bytes: tags[6],
            disk_caches_bytes: tags[7],
            hugetlb_allocations: tags[8],
            hugetlb_failures: tags[9],
            oom_kills: tags[10],
            allocation_stalls: tags[11],
            async_scan_bytes: tags[12],
            direct_scan_bytes: tags[13],
            async_reclaim_bytes: tags[14],
            direct_reclaim_bytes: tags[15],
        }
    }
}

/// `GET /balloon/statistics`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StatisticsDocument {
    /// Milliseconds since the guest delivered the values; `None` when it never did.
    pub age_ms: Option<u64>,
    /// The values.
    pub statistics: StatisticsValues,
}

impl From<StatisticsReading> for StatisticsDocument {
    fn from(reading: StatisticsReading) -> Self {
        let age_ms = reading.age.map(|age| u64::try_from(age.as_millis()).unwrap_or(u64::MAX));
        Self { age_ms, statistics: reading.values }
    }
}

/// `PUT /vm/snapshot`: what was written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotReport {
    /// The file.
    pub path: String,
    /// Its size in bytes, holes included.
    pub file_bytes: u64,
    /// What it takes of its disk, in bytes.
    pub stored_bytes: u64,
    /// Guest memory in it, in bytes: pages that are not all zero.
    pub ram_bytes: u64,
    /// How long it took, in milliseconds.
    pub elapsed_ms: u64,
    /// How long a running machine was stopped for it, in milliseconds.
    pub paused_ms: u64,
}

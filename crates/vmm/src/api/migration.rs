//! Migration of a running machine to another monitor: documents.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::words::{one_of, to_word};

pub use ebb_migration::AtTimeLimit;

/// The longest wait of `GET /vm/migration` for the end: ten seconds.
pub const MAX_MIGRATION_WAIT_MS: u64 = 10 * 1000;
/// The longest time limit of a migration: a day.
pub const MAX_MIGRATION_SECONDS: u64 = 24 * 60 * 60;
/// Most data streams.
pub const MAX_MIGRATION_STREAMS: u16 = 16;
/// The longest downtime that can be set as a target: a minute.
pub const MAX_DOWNTIME_MS: u64 = 60 * 1000;
/// The slowest rate that can be set: below it, not even the state of a machine is sent in
/// reasonable time.
pub const MIN_BANDWIDTH_BYTES: u64 = 64 << 10;

/// `PUT /vm/migrate`: the destination and options. The monitor neither connects nor opens files, so
/// file descriptors come with the request (`SCM_RIGHTS`, unix(7)): stream sockets that are connected
/// to the receiver, one for control and one for each data stream; then, for TLS 1.3 with
/// certificates on both sides, this side's certificate, its private key and the authorities that
/// the receiver's certificate must come from, as PEM files. `ebb migrate` sends them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["to"]))]
pub struct MigrationRequest {
    /// Address of the receiver, `tcp:HOST:PORT` or `unix:PATH`. It names the receiver in messages
    /// and, with TLS and without `tls_name`, in its certificate; the client has connected to it.
    #[schemars(extend("x-form" = "tcp:HOST:PORT or unix:PATH"))]
    pub to: String,
    /// Data streams, each with its own connection and thread.
    #[schemars(range(min = 1, max = MAX_MIGRATION_STREAMS), extend("x-unit" = "streams"))]
    pub streams: u16,
    /// Expected downtime at which the machine is paused and the rest is sent.
    #[schemars(range(min = 1, max = MAX_DOWNTIME_MS), extend("x-unit" = "milliseconds"))]
    pub downtime_ms: u64,
    /// Most bytes sent per second while the guest runs; unlimited by default.
    #[schemars(range(min = MIN_BANDWIDTH_BYTES), extend("x-unit" = "bytes"))]
    pub bandwidth_bytes_per_s: Option<u64>,
    /// Time after which `on_timeout` happens; never by default.
    #[schemars(range(min = 1, max = MAX_MIGRATION_SECONDS), extend("x-unit" = "seconds"))]
    pub timeout_seconds: Option<u64>,
    /// cancel: the machine continues here. force: it is paused for as long as the rest takes.
    #[schemars(schema_with = "one_of::<AtTimeLimit>")]
    pub on_timeout: AtTimeLimit,
    /// Slow the guest's vCPUs down if it writes faster than memory can be sent.
    pub auto_converge: bool,
    /// How to find free pages of the guest, which need not be sent.
    pub free_pages: FreePageChoice,
    /// Send zero pages as records without content.
    pub zero_pages: bool,
    /// Skip memory that is not resident: never touched, reported as free, or in the balloon.
    pub holes: bool,
    /// Name in the receiver's certificate, if it is not the host of `to`.
    #[schemars(extend("x-form" = "the name in a certificate"))]
    pub tls_name: Option<String>,
    /// Send the guest's memory over a plain TCP connection, on this host or to another one. Any
    /// process on the path, or one that has taken the port, can read and change it.
    pub insecure: bool,
    /// Share the memory with a receiver on the same host instead of copying it: needs
    /// `backing=memfd` or `hugetlb` and a `unix:` address.
    pub share_memory: bool,
}

impl Default for MigrationRequest {
    fn default() -> Self {
        Self {
            to: String::new(),
            streams: 1,
            downtime_ms: 300,
            bandwidth_bytes_per_s: None,
            timeout_seconds: None,
            on_timeout: AtTimeLimit::Cancel,
            auto_converge: false,
            free_pages: FreePageChoice::Auto,
            zero_pages: true,
            holes: true,
            tls_name: None,
            insecure: false,
            share_memory: false,
        }
    }
}

impl MigrationRequest {
    /// A migration to `to` with the defaults of the API.
    pub fn new(to: impl Into<String>) -> Self {
        Self { to: to.into(), ..Self::default() }
    }
}

/// How the guest is asked for its free pages, which need not be sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum FreePageChoice {
    /// By the best method that the guest's driver supports.
    #[default]
    Auto,
    /// By free page hinting.
    Hints,
    /// By host requests of the extension.
    Query,
    /// Not at all.
    Off,
}

/// Phase of a migration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum MigrationPhase {
    /// No migration was requested.
    #[default]
    None,
    /// Connecting to the receiver, which checks whether it can take the machine.
    Connecting,
    /// Memory is sent while the guest runs.
    Precopy,
    /// The machine is paused: the rest of its memory and its state are sent.
    SwitchOver,
    /// The machine runs at its destination; this monitor ends.
    Completed,
    /// The migration failed; the machine continues here.
    Failed,
    /// The migration was cancelled; the machine continues here.
    Cancelled,
    /// The connection broke after the migration was committed: it is unknown here whether the
    /// machine runs at the destination. It is paused here.
    Unknown,
}

impl MigrationPhase {
    /// Whether the phase is final.
    pub fn is_end(self) -> bool {
        matches!(self, Self::Completed | Self::Failed | Self::Cancelled | Self::Unknown)
    }

    /// The name of the phase.
    pub fn name(self) -> String {
        to_word(self)
    }

    /// Whether the migration is in progress.
    pub fn is_active(self) -> bool {
        matches!(self, Self::Connecting | Self::Precopy | Self::SwitchOver)
    }
}

/// `GET /vm/migration`: the migration in progress, or the last one.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "Migration")]
pub struct MigrationStatus {
    /// Current phase.
    pub phase: MigrationPhase,
    /// Address of the destination.
    pub to: Option<String>,
    /// Number of the current round, from 1.
    pub round: u64,
    /// Memory that remains to be sent in this round.
    pub remaining_bytes: u64,
    /// Bytes sent so far.
    pub bytes_sent: u64,
    /// Current rate in bytes per second.
    pub rate_bytes_per_s: u64,
    /// How long the machine would be paused if it were paused now; null while unknown.
    pub expected_downtime_ms: Option<u64>,
    /// Throttling of the vCPUs.
    #[schemars(range(max = 100))]
    pub throttle_percent: u8,
    /// Time since the request.
    pub elapsed_ms: u64,
    /// The result, once the migration has ended.
    pub report: Option<MigrationReport>,
}

/// Result of a migration.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct MigrationReport {
    /// `completed`, `failed`, `cancelled` or `unknown`.
    pub status: MigrationPhase,
    /// Why it was not completed.
    pub error: Option<String>,
    /// Time from the request to the end.
    pub total_ms: u64,
    /// How long the guest was paused: from the stop of its vCPUs to the receiver's confirmation
    /// that it runs.
    pub downtime_ms: u64,
    /// Time from the request to the first byte of memory.
    pub setup_ms: u64,
    /// Bytes of all memory records and of the state.
    pub bytes_sent: u64,
    /// Number of rounds.
    pub rounds: u64,
    /// Pages sent with their content, counted each time they were sent.
    pub pages_data: u64,
    /// Zero pages.
    pub pages_zero: u64,
    /// Pages that were not resident.
    pub pages_discarded: u64,
    /// Pages skipped because the guest reported them as free.
    pub pages_skipped: u64,
    /// Size of the guest's memory.
    pub memory_bytes: u64,
    /// Processor time used by this monitor, without that of the guest's vCPUs.
    pub source_cpu_ms: u64,
    /// Average rate in bytes per second while memory was sent.
    pub bandwidth_bytes_per_s: u64,
    /// How the guest was asked for free pages; auto if that was not decided.
    pub free_pages: FreePageChoice,
    /// Why the guest was not asked for free pages, if it should have been.
    pub free_pages_error: Option<String>,
    /// Whether memory was shared instead of sent.
    pub shared_memory: bool,
    /// The rounds.
    pub rounds_detail: Vec<MigrationRound>,
}

/// One round of a migration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MigrationRound {
    /// Number, from 1.
    pub round: u64,
    /// Duration of the round.
    pub elapsed_ms: u64,
    /// Pages sent with their content.
    pub pages_data: u64,
    /// Zero pages.
    pub pages_zero: u64,
    /// Pages that were not resident.
    pub pages_discarded: u64,
    /// Pages skipped because the guest reported them as free.
    pub pages_skipped: u64,
    /// Bytes sent.
    pub bytes_sent: u64,
    /// Pages written by the guest meanwhile.
    pub pages_written: u64,
    /// How long sending was suspended while the guest named its free pages.
    pub hint_wait_ms: u64,
    /// Throttling of the vCPUs.
    #[schemars(range(max = 100))]
    pub throttle_percent: u8,
}

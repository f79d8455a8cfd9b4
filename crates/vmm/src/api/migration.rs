//! Moving a running machine to another monitor: what is asked for, how far it is, and what it has
//! cost.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::words::{one_of, to_word};

pub use ebb_migration::AtTimeLimit;

/// The longest that `GET /vm/migration` waits for the end: ten seconds.
pub const MAX_MIGRATION_WAIT_MS: u64 = 10 * 1000;
/// The longest time limit of a migration: a day.
pub const MAX_MIGRATION_SECONDS: u64 = 24 * 60 * 60;
/// Most data streams.
pub const MAX_MIGRATION_STREAMS: u16 = 16;
/// The longest downtime that can be aimed at: a minute.
pub const MAX_DOWNTIME_MS: u64 = 60 * 1000;
/// The slowest rate that can be asked for: below, not even the state of a machine gets through in
/// reasonable time.
pub const MIN_BANDWIDTH_BYTES: u64 = 64 << 10;

/// `PUT /vm/migrate`: where to, and how.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["to"]))]
pub struct MigrationRequest {
    /// Where the receiver listens: `tcp:HOST:PORT` with the host in numbers or `localhost`
    /// (`ebb migrate` looks names up), or `unix:PATH` with an absolute path.
    #[schemars(extend("x-form" = "tcp:HOST:PORT or unix:PATH"))]
    pub to: String,
    /// Data streams, each with a connection and a thread of its own.
    #[schemars(range(min = 1, max = MAX_MIGRATION_STREAMS), extend("x-unit" = "streams"))]
    pub streams: u16,
    /// The machine is stopped when what is left can be sent in this time.
    #[schemars(range(min = 1, max = MAX_DOWNTIME_MS), extend("x-unit" = "milliseconds"))]
    pub downtime_ms: u64,
    /// Most bytes a second while the guest runs; without it, as many as possible.
    #[schemars(range(min = MIN_BANDWIDTH_BYTES), extend("x-unit" = "bytes"))]
    pub bandwidth_bytes_per_s: Option<u64>,
    /// When `on_timeout` happens; without it, never.
    #[schemars(range(min = 1, max = MAX_MIGRATION_SECONDS), extend("x-unit" = "seconds"))]
    pub timeout_seconds: Option<u64>,
    /// cancel: the machine runs on here. force: it is stopped for as long as the rest takes.
    #[schemars(schema_with = "one_of::<AtTimeLimit>")]
    pub on_timeout: AtTimeLimit,
    /// Slow the guest's vCPUs down when it writes faster than can be sent.
    pub auto_converge: bool,
    /// What names pages that need not be sent because the guest does not use them.
    pub free_pages: FreePageChoice,
    /// Send pages that are zero as such.
    pub zero_pages: bool,
    /// Leave out memory that the host does not hold: never touched, reported as free, in the
    /// balloon.
    pub holes: bool,
    /// Absolute path of our certificate (PEM), for TLS 1.3 with certificates on both sides. All
    /// three files, or none.
    #[schemars(regex(pattern = "^/"))]
    pub tls_cert: Option<PathBuf>,
    /// Absolute path of its private key (PEM).
    #[schemars(regex(pattern = "^/"))]
    pub tls_key: Option<PathBuf>,
    /// Absolute path of the authorities (PEM) that the receiver's certificate must come from.
    #[schemars(regex(pattern = "^/"))]
    pub tls_ca: Option<PathBuf>,
    /// Name in the receiver's certificate, where that is not the host of `to`.
    #[schemars(extend("x-form" = "the name in a certificate"))]
    pub tls_name: Option<String>,
    /// Send the guest's memory over a plain TCP connection, on this host or to another one. Whoever
    /// is on the way, or has taken the port, can read and change it.
    pub insecure: bool,
    /// Hand the memory to a receiver on the same machine instead of copying it: needs
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
            tls_cert: None,
            tls_key: None,
            tls_ca: None,
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

/// Who is asked which pages of the guest are free, so that they need not be sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum FreePageChoice {
    /// The guest's driver, by the best way that it knows.
    #[default]
    Auto,
    /// The driver, by free page hinting.
    Hints,
    /// The driver, by the extension's question.
    Query,
    /// Nobody.
    Off,
}

/// How far a migration is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum MigrationPhase {
    /// None was asked for.
    #[default]
    None,
    /// The receiver is called, and asked whether it can take the machine.
    Connecting,
    /// Memory is sent while the guest runs.
    Precopy,
    /// The machine stands still: the rest of its memory and its state are sent.
    SwitchOver,
    /// The machine runs at its destination; this monitor ends.
    Completed,
    /// It has failed; the machine runs on here.
    Failed,
    /// It was cancelled; the machine runs on here.
    Cancelled,
    /// The connection broke when the machine had been given away: nobody here knows whether it runs
    /// there. It stands still here.
    Unknown,
}

impl MigrationPhase {
    /// Whether nothing more will happen.
    pub fn is_end(self) -> bool {
        matches!(self, Self::Completed | Self::Failed | Self::Cancelled | Self::Unknown)
    }

    /// The word for it.
    pub fn name(self) -> String {
        to_word(self)
    }

    /// Whether it is under way.
    pub fn is_active(self) -> bool {
        matches!(self, Self::Connecting | Self::Precopy | Self::SwitchOver)
    }
}

/// `GET /vm/migration`: the migration that is under way, or the last one.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "Migration")]
pub struct MigrationStatus {
    /// How far it is.
    pub phase: MigrationPhase,
    /// Where to.
    pub to: Option<String>,
    /// Number of the round that is being sent, from 1.
    pub round: u64,
    /// Memory that has to be sent in this round yet.
    pub remaining_bytes: u64,
    /// Bytes sent so far.
    pub bytes_sent: u64,
    /// Bytes a second at present.
    pub rate_bytes_per_s: u64,
    /// How long the machine would stand still if it were stopped now; null before that can be
    /// known.
    pub expected_downtime_ms: Option<u64>,
    /// By how much the vCPUs are slowed down.
    #[schemars(range(max = 100))]
    pub throttle_percent: u8,
    /// Time since the request.
    pub elapsed_ms: u64,
    /// What it has come to, at its end.
    pub report: Option<MigrationReport>,
}

/// What a migration has come to.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct MigrationReport {
    /// `completed`, `failed`, `cancelled` or `unknown`.
    pub status: MigrationPhase,
    /// Why it was not completed.
    pub error: Option<String>,
    /// From the request to the end.
    pub total_ms: u64,
    /// How long the guest stood still: from the stop of its vCPUs to the receiver's word that it
    /// runs.
    pub downtime_ms: u64,
    /// From the request to the first byte of memory.
    pub setup_ms: u64,
    /// Bytes of all memory records and of the state.
    pub bytes_sent: u64,
    /// Rounds.
    pub rounds: u64,
    /// Pages sent with their content; one that was sent twice counts twice.
    pub pages_data: u64,
    /// Pages that were zero.
    pub pages_zero: u64,
    /// Pages that the host did not hold.
    pub pages_discarded: u64,
    /// Pages not sent because the guest said that they are free.
    pub pages_skipped: u64,
    /// The guest's memory.
    pub memory_bytes: u64,
    /// Processor time that it took in this monitor, without that of the guest's vCPUs.
    pub source_cpu_ms: u64,
    /// Bytes a second over the time in which memory was sent.
    pub bandwidth_bytes_per_s: u64,
    /// Who was asked for free pages; auto if it was not decided.
    pub free_pages: FreePageChoice,
    /// Why nobody was asked, if somebody was to be.
    pub free_pages_error: Option<String>,
    /// Whether memory was handed over instead of sent.
    pub shared_memory: bool,
    /// Each round.
    pub rounds_detail: Vec<MigrationRound>,
}

/// One round of a migration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MigrationRound {
    /// Number, from 1.
    pub round: u64,
    /// How long it took.
    pub elapsed_ms: u64,
    /// Pages sent with their content.
    pub pages_data: u64,
    /// Pages that were zero.
    pub pages_zero: u64,
    /// Pages that the host did not hold.
    pub pages_discarded: u64,
    /// Pages left out because the guest said that they are free.
    pub pages_skipped: u64,
    /// Bytes sent.
    pub bytes_sent: u64,
    /// Pages that were written meanwhile.
    pub pages_written: u64,
    /// How long nothing was sent because the guest was naming its free pages.
    pub hint_wait_ms: u64,
    /// By how much the vCPUs were slowed down.
    #[schemars(range(max = 100))]
    pub throttle_percent: u8,
}

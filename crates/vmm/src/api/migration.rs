//! Moving a running machine to another monitor: what is asked for, how far it is, and what it has
//! cost.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The longest time limit of a migration: a day.
pub const MAX_MIGRATION_SECONDS: u64 = 24 * 60 * 60;
/// Most data streams.
pub const MAX_MIGRATION_STREAMS: u64 = 16;
/// The longest downtime that can be aimed at: a minute.
pub const MAX_DOWNTIME_MS: u64 = 60 * 1000;
/// The downtime that is aimed at unless the request says otherwise.
pub const DEFAULT_DOWNTIME_MS: u64 = 300;
/// The longest that `GET /vm/migration` waits for the end: ten seconds.
pub const MAX_MIGRATION_WAIT_MS: u64 = 10 * 1000;

/// `PUT /vm/migrate`: where to, and how.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigrationRequest {
    /// Where the receiver listens: `tcp:HOST:PORT` with the host in numbers, or `unix:PATH`.
    pub to: String,
    /// Number of data streams.
    pub streams: u16,
    /// Downtime to aim at, in milliseconds.
    pub downtime_ms: u64,
    /// Most bytes a second that are sent before the machine is stopped; `None` for as many as
    /// possible.
    pub bandwidth_bytes_per_s: Option<u64>,
    /// When to give up or to force it, in seconds; `None` for never.
    pub timeout_seconds: Option<u64>,
    /// What happens then.
    pub on_timeout: OnTimeout,
    /// Whether a guest that writes faster than can be sent is slowed down.
    pub auto_converge: bool,
    /// Who is asked which pages are free.
    pub free_pages: FreePageChoice,
    /// Whether pages that are zero are sent as such.
    pub zero_pages: bool,
    /// Whether memory that the host does not hold is left out.
    pub holes: bool,
    /// Certificates, for a connection with TLS.
    pub tls: Option<TlsPaths>,
    /// Whether a plain connection may leave this machine.
    pub insecure: bool,
    /// Whether memory is handed over instead of copied.
    pub share_memory: bool,
}

impl MigrationRequest {
    /// A migration to `to` with the defaults of the API.
    pub fn new(to: impl Into<String>) -> Self {
        Self {
            to: to.into(),
            streams: 1,
            downtime_ms: DEFAULT_DOWNTIME_MS,
            bandwidth_bytes_per_s: None,
            timeout_seconds: None,
            on_timeout: OnTimeout::Cancel,
            auto_converge: false,
            free_pages: FreePageChoice::Auto,
            zero_pages: true,
            holes: true,
            tls: None,
            insecure: false,
            share_memory: false,
        }
    }

    /// The body of the request; fields that have their default are left out.
    pub fn to_body(&self) -> serde_json::Value {
        let mut body = serde_json::Map::new();
        let default = Self::new("");
        let mut set = |name: &str, value: serde_json::Value, is_default: bool| {
            if !is_default {
                body.insert(name.to_owned(), value);
            }
        };
        set("to", self.to.as_str().into(), false);
        set("streams", self.streams.into(), self.streams == default.streams);
        set("downtime_ms", self.downtime_ms.into(), self.downtime_ms == default.downtime_ms);
        set(
            "bandwidth_bytes_per_s",
            self.bandwidth_bytes_per_s.into(),
            self.bandwidth_bytes_per_s.is_none(),
        );
        set("timeout_seconds", self.timeout_seconds.into(), self.timeout_seconds.is_none());
        set("on_timeout", self.on_timeout.name().into(), self.on_timeout == default.on_timeout);
        set("auto_converge", self.auto_converge.into(), !self.auto_converge);
        set("free_pages", self.free_pages.name().into(), self.free_pages == default.free_pages);
        set("zero_pages", self.zero_pages.into(), self.zero_pages);
        set("holes", self.holes.into(), self.holes);
        set("insecure", self.insecure.into(), !self.insecure);
        set("share_memory", self.share_memory.into(), !self.share_memory);
        if let Some(TlsPaths { cert, key, ca, name }) = &self.tls {
            set("tls_name", name.as_deref().into(), name.is_none());
            for (name, path) in [("tls_cert", cert), ("tls_key", key), ("tls_ca", ca)] {
                set(name, path.to_string_lossy().into(), false);
            }
        }
        body.into()
    }
}

/// Files of a connection with TLS, in PEM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TlsPaths {
    /// Our certificate, followed by those that lead to the authority.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// Certificates of the authorities that the other side's certificate must come from.
    pub ca: PathBuf,
    /// Name in the receiver's certificate, where that is not the host of the address.
    pub name: Option<String>,
}

/// What happens when the time limit of a migration is reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnTimeout {
    /// It is given up.
    #[default]
    Cancel,
    /// The machine is stopped for as long as the rest takes.
    Force,
}

impl OnTimeout {
    /// All, for those who read and write them.
    pub const ALL: [Self; 2] = [Self::Cancel, Self::Force];

    /// The word for it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cancel => "cancel",
            Self::Force => "force",
        }
    }
}

/// Who is asked which pages of the guest are free, so that they need not be sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
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

impl FreePageChoice {
    /// All, for those who read and write them.
    pub const ALL: [Self; 4] = [Self::Auto, Self::Hints, Self::Query, Self::Off];

    /// The word for it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Hints => "hints",
            Self::Query => "query",
            Self::Off => "off",
        }
    }
}

/// How far a migration is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
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

    /// Whether it is under way.
    pub fn is_active(self) -> bool {
        matches!(self, Self::Connecting | Self::Precopy | Self::SwitchOver)
    }

    /// The word for it.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Connecting => "connecting",
            Self::Precopy => "precopy",
            Self::SwitchOver => "switch_over",
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
            Self::Unknown => "unknown",
        }
    }
}

/// `GET /vm/migration`: the migration that is under way, or the last one.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MigrationStatus {
    /// How far it is.
    pub phase: MigrationPhase,
    /// Where to.
    pub to: Option<String>,
    /// Number of the round that is being sent; the first is 1.
    pub round: u64,
    /// Memory that has to be sent in this round yet, in bytes.
    pub remaining_bytes: u64,
    /// Bytes sent so far.
    pub bytes_sent: u64,
    /// Bytes a second at present.
    pub rate_bytes_per_s: u64,
    /// How long the machine would stand still if it were stopped now; `None` before that can be
    /// known.
    pub expected_downtime_ms: Option<u64>,
    /// By how much the vCPUs are slowed down, in percent.
    pub throttle_percent: u8,
    /// Time since the request, in milliseconds.
    pub elapsed_ms: u64,
    /// What it has come to, at its end.
    pub report: Option<MigrationReport>,
}

/// What a migration has come to.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MigrationReport {
    /// `completed`, `failed`, `cancelled` or `unknown`.
    pub status: MigrationPhase,
    /// Why it was not completed.
    pub error: Option<String>,
    /// From the request to the end.
    pub total_ms: u64,
    /// How long the guest stood still.
    pub downtime_ms: u64,
    /// From the request to the first byte of memory.
    pub setup_ms: u64,
    /// Bytes of all memory records and the state.
    pub bytes_sent: u64,
    /// Rounds.
    pub rounds: u64,
    /// Pages sent with their content; one that was sent twice counts twice.
    pub pages_data: u64,
    /// Pages that were zero.
    pub pages_zero: u64,
    /// Pages that the host did not hold.
    pub pages_discarded: u64,
    /// Pages that were not sent because the guest said that they are free.
    pub pages_skipped: u64,
    /// The guest's memory.
    pub memory_bytes: u64,
    /// Processor time that it took in this monitor, without that of the guest's vCPUs.
    pub source_cpu_ms: u64,
    /// Bytes a second over the time in which memory was sent.
    pub bandwidth_bytes_per_s: u64,
    /// Who was asked for free pages: `hints`, `query` or `off`.
    pub free_pages: FreePageChoice,
    /// Why nobody was asked, if somebody was to be.
    pub free_pages_error: Option<String>,
    /// Whether memory was handed over instead of sent.
    pub shared_memory: bool,
    /// Each round.
    pub rounds_detail: Vec<MigrationRound>,
}

/// One round of a migration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
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
    /// By how much the vCPUs were slowed down, in percent.
    pub throttle_percent: u8,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_those_of_the_documents() {
        for choice in FreePageChoice::ALL {
            assert_eq!(serde_json::to_value(choice).unwrap(), choice.name());
        }
        for action in OnTimeout::ALL {
            assert_eq!(serde_json::to_value(action).unwrap(), action.name());
        }
        for phase in [MigrationPhase::None, MigrationPhase::SwitchOver, MigrationPhase::Unknown] {
            assert_eq!(serde_json::to_value(phase).unwrap(), phase.name());
        }
    }

    #[test]
    fn a_body_has_only_what_differs() {
        let request = MigrationRequest::new("unix:/run/x");
        assert_eq!(request.to_body(), serde_json::json!({ "to": "unix:/run/x" }));
        let request = MigrationRequest { holes: false, streams: 4, ..request };
        let wanted = serde_json::json!({ "to": "unix:/run/x", "holes": false, "streams": 4 });
        assert_eq!(request.to_body(), wanted);
    }
}

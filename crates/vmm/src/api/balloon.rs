//! The balloon and the statistics of its guest: documents.

use ebb_abi::balloon::Features;
use ebb_balloon::Balloon;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

use super::lease::{MAX_LEASE_MS, MIN_LEASE_MS};
use crate::words::words;

pub use crate::devices::virtio::balloon::AfterHints;

pub use ebb_abi::balloon::Feature as BalloonFeature;
pub use ebb_balloon::{Statistics, StatisticsValues};

/// The longest interval of requests for statistics: a day.
pub const MAX_STATISTICS_INTERVAL_SECONDS: u64 = 24 * 60 * 60;

/// Summary of the balloon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct BalloonSummary {
    /// Target size.
    pub target_bytes: u64,
    /// Size last reported by the guest.
    pub actual_bytes: u64,
    /// State of the balloon.
    pub state: BalloonState,
}

impl From<BalloonInfo> for BalloonSummary {
    fn from(BalloonInfo { target_bytes, actual_bytes, state, .. }: BalloonInfo) -> Self {
        Self { target_bytes, actual_bytes, state }
    }
}

/// State of a balloon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum BalloonState {
    /// No driver in the guest has initialized the device.
    DriverAbsent,
    /// The actual size is the target.
    Idle,
    /// The actual size is below the target.
    Inflating,
    /// The actual size is above the target.
    Deflating,
}

impl BalloonState {
    /// The state that follows from the presence of a driver and the sizes.
    pub fn from_sizes(driver: DriverPresence, target_bytes: u64, actual_bytes: u64) -> Self {
        match (driver, actual_bytes.cmp(&target_bytes)) {
            (DriverPresence::Absent, _) => Self::DriverAbsent,
            (DriverPresence::Present, std::cmp::Ordering::Less) => Self::Inflating,
            (DriverPresence::Present, std::cmp::Ordering::Equal) => Self::Idle,
            (DriverPresence::Present, std::cmp::Ordering::Greater) => Self::Deflating,
        }
    }
}

/// Whether a driver in the guest has initialized a device (DRIVER_OK, virtio 1.3 section 2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DriverPresence {
    /// No driver.
    Absent,
    /// A driver has set DRIVER_OK.
    Present,
}

/// `GET /balloon`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "Balloon")]
pub struct BalloonInfo {
    /// Target size.
    pub target_bytes: u64,
    /// Size last reported by the guest.
    pub actual_bytes: u64,
    /// State of the balloon.
    pub state: BalloonState,
    /// Time after which the target becomes 0, unless it is renewed. Null without a lease.
    pub lease_ms: Option<u64>,
    /// Features offered by the device.
    #[schemars(schema_with = "features_schema")]
    pub offered_features: Vec<BalloonFeature>,
    /// Features negotiated by the guest; empty without a driver.
    #[schemars(schema_with = "features_schema")]
    pub negotiated_features: Vec<BalloonFeature>,
    /// The value that the guest fills free pages with; null unless page_poison was negotiated.
    pub poison: Option<u32>,
    /// Why memory is currently not discarded; null if it is.
    pub discard_inhibited: Option<String>,
    /// Interval of requests for statistics; 0 without regular requests.
    pub statistics_interval_seconds: u32,
}

fn features_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "array", "items": { "enum": words::<BalloonFeature>() } })
}

/// The balloon's features among `bits`.
fn features(bits: u64) -> Vec<BalloonFeature> {
    let is_offered = |feature: &BalloonFeature| Features(bits).contains(*feature);
    let version_1 = BalloonFeature::Version1;
    BalloonFeature::ALL.into_iter().filter(|f| is_offered(f) && *f != version_1).collect()
}

impl BalloonInfo {
    /// Describes `balloon`.
    pub fn of(balloon: &Balloon, driver: DriverPresence) -> Self {
        let info = balloon.info();
        let interval = balloon.statistics_interval().unwrap_or_default();
        Self {
            target_bytes: info.target_bytes,
            actual_bytes: info.actual_bytes,
            state: BalloonState::from_sizes(driver, info.target_bytes, info.actual_bytes),
            lease_ms: None,
            offered_features: features(info.offered_features),
            negotiated_features: features(info.negotiated_features),
            poison: info.poison_value,
            discard_inhibited: (!info.inhibited.is_empty()).then(|| info.inhibited.join("; ")),
            statistics_interval_seconds: u32::try_from(interval.as_secs()).unwrap_or(u32::MAX),
        }
    }
}

/// `PUT /balloon`: a target size for the balloon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct BalloonTarget {
    /// A multiple of 4096, at most the guest's memory.
    #[schemars(extend("multipleOf" = 4096, "x-unit" = "bytes"))]
    pub target_bytes: u64,
    /// The target becomes 0 after this time, unless it is set again before: the guest of a client
    /// that has died gets its memory back. Without it, the target stays.
    #[serde(default)]
    #[schemars(range(min = MIN_LEASE_MS, max = MAX_LEASE_MS), extend("x-unit" = "milliseconds"))]
    pub lease_ms: Option<u64>,
}

/// `PUT /balloon/statistics-interval`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct StatisticsInterval {
    /// 0 for never.
    #[schemars(range(max = MAX_STATISTICS_INTERVAL_SECONDS), extend("x-unit" = "seconds"))]
    pub interval_seconds: u64,
}

/// `GET /balloon/statistics`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct StatisticsDocument {
    /// Time since the guest delivered the values; null when it never did.
    pub age_ms: Option<u64>,
    /// The values.
    pub statistics: StatisticsValues,
}

impl From<Statistics> for StatisticsDocument {
    fn from(statistics: Statistics) -> Self {
        Self { age_ms: statistics.age_ms, statistics: statistics.values }
    }
}

/// What is to be done about a run of free page hinting. Its hints are counted, and nothing is
/// discarded: the guest may use a hinted page at any moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HintRun {
    /// Nothing.
    Describe,
    /// Starts one, which takes the place of an earlier one.
    Start(AfterHints),
    /// Ends it.
    Stop,
}

/// Commands of free page hinting (virtio 1.3 section 5.5.6.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct HintRunStatus {
    /// The device's.
    pub host_command: u32,
    /// The one that the driver has answered last.
    pub driver_command: Option<u32>,
}

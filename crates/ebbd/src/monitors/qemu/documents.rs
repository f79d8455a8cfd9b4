//! What QMP's answers mean, without I/O.

use std::fmt::{self, Display, Formatter};

use ebb_host_policy::Statistics;
use serde_json::Value;

use super::super::{Trouble, repeatable};

/// Whether a machine runs (QEMU's qapi/run-state.json).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RunState {
    /// It runs.
    Running,
    /// The command `stop` has paused it, for whatever client.
    Paused,
    /// It waits for a migration, has been migrated, was stopped by an error, or the like.
    Other(String),
}

impl RunState {
    /// Reads the answer to `query-status`.
    ///
    /// # Errors
    /// [`Trouble::Nonsense`].
    pub fn read(answer: &Value) -> Result<Self, Trouble> {
        match answer["status"].as_str() {
            Some("running") => Ok(Self::Running),
            Some("paused") => Ok(Self::Paused),
            Some(other) => Ok(Self::Other(repeatable(other))),
            None => Err(nonsense("query-status", answer)),
        }
    }
}

impl Display for RunState {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Other(state) => state,
        })
    }
}

/// Whether a migration is under way, by the answer to `query-migrate`. A state that is not known
/// is one of its many phases.
pub fn is_migrating(answer: &Value) -> bool {
    let status = answer["status"].as_str();
    !matches!(status, None | Some("none" | "completed" | "failed" | "cancelled"))
}

/// The two sizes of a machine, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// All memory, what has been plugged included.
    pub all: u64,
    /// What `balloon` and `query-balloon` subtract the balloon from. It contains memory modules,
    /// but no virtio-mem, NVDIMM or the like (QEMU hw/virtio/virtio-balloon.c).
    pub of_balloon: u64,
}

impl Sizes {
    /// Reads the answers to `query-memory-size-summary` and `query-memory-devices`.
    ///
    /// # Errors
    /// [`Trouble::Nonsense`].
    pub fn read(summary: &Value, devices: &Value) -> Result<Self, Trouble> {
        let number = |value: &Value| value.as_u64();
        let base = number(&summary["base-memory"])
            .ok_or_else(|| nonsense("query-memory-size-summary", summary))?;
        let devices =
            devices.as_array().ok_or_else(|| nonsense("query-memory-devices", devices))?;
        let modules = devices.iter().filter(|device| device["type"] == "dimm");
        let modules = modules.filter_map(|device| number(&device["data"]["size"]));
        Ok(Self {
            all: base.saturating_add(number(&summary["plugged-memory"]).unwrap_or(0)),
            of_balloon: modules.fold(base, u64::saturating_add),
        })
    }
}

/// The path of a balloon among a container's children, by the answer to `qom-list`.
pub fn balloon_among(container: &str, children: &Value) -> Option<String> {
    let is_balloon = |child: &&Value| {
        let kind = child["type"].as_str();
        kind.is_some_and(|kind| kind.starts_with("child<virtio-balloon-"))
    };
    let name = children.as_array()?.iter().find(is_balloon)?["name"].as_str()?;
    Some(format!("{container}/{name}"))
}

/// The property `guest-stats` of a balloon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuestStats {
    /// When the driver has last answered, in seconds of the host's real-time clock; `None` if it
    /// has not since the machine's reset.
    pub last_update: Option<u64>,
    said: Statistics,
}

impl GuestStats {
    /// Reads the property.
    ///
    /// # Errors
    /// [`Trouble::Nonsense`].
    pub fn read(answer: &Value) -> Result<Self, Trouble> {
        let last_update =
            answer["last-update"].as_u64().ok_or_else(|| nonsense("guest-stats", answer))?;
        // What the driver does not report is -1, of either sign.
        let value = |name: &str| answer["stats"][name].as_u64().filter(|value| *value != u64::MAX);
        Ok(Self {
            last_update: Some(last_update).filter(|seconds| *seconds > 0),
            said: Statistics {
                taken_ms: 0,
                total_bytes: value("stat-total-memory"),
                available_bytes: value("stat-available-memory"),
                free_bytes: value("stat-free-memory"),
                caches_bytes: value("stat-disk-caches"),
                major_faults: value("stat-major-faults"),
                swap_out_bytes: value("stat-swap-out"),
                oom_kills: value("stat-oom-kills"),
            },
        })
    }

    /// The statistics, with their moment on the snapshot's clock.
    pub fn taken(self, taken_ms: u64) -> Statistics {
        Statistics { taken_ms, ..self.said }
    }
}

/// When statistics were taken, on the snapshot's clock. The real-time clock may be set at any
/// time: it is compared once per `last_update`, and the result is kept within what the looks show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment {
    last_update: u64,
    looked_ms: u64,
    /// `None` if it cannot be told: the first look found a time in the future.
    pub taken_ms: Option<u64>,
}

impl Moment {
    /// The moment for `last_update`, after an `earlier` look. `real_s` is the real-time clock and
    /// `now_ms` the snapshot's.
    pub fn of(last_update: u64, earlier: Option<Self>, real_s: u64, now_ms: u64) -> Self {
        let age_s = real_s.checked_sub(last_update);
        let by_clock = age_s.map(|age_s| now_ms.saturating_sub(age_s.saturating_mul(1000)));
        let taken_ms = match earlier {
            None => by_clock,
            Some(earlier) if earlier.last_update == last_update => earlier.taken_ms,
            // The driver has answered since.
            Some(Self { looked_ms, .. }) => {
                Some(by_clock.unwrap_or(looked_ms).max(looked_ms).min(now_ms))
            }
        };
        Self { last_update, looked_ms: now_ms, taken_ms }
    }
}

fn nonsense(command: &str, answer: &Value) -> Trouble {
    Trouble::Nonsense(format!("{command} answers '{}'", repeatable(&answer.to_string())))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn absent_statistics_are_not_numbers() {
        let document = json!({ "last-update": 1_795_818_748, "stats": {
            "stat-total-memory": 101_347_328,
            "stat-free-memory": 0,
            "stat-available-memory": u64::MAX,
            "stat-disk-caches": -1,
            "stat-swap-out": "many",
        } });
        let stats = GuestStats::read(&document).unwrap();
        assert_eq!(stats.last_update, Some(1_795_818_748));
        let expected = Statistics {
            taken_ms: 5,
            total_bytes: Some(101_347_328),
            available_bytes: None,
            free_bytes: Some(0),
            caches_bytes: None,
            major_faults: None,
            swap_out_bytes: None,
            oom_kills: None,
        };
        assert_eq!(stats.taken(5), expected);
        let never = json!({ "last-update": 0, "stats": {} });
        assert_eq!(GuestStats::read(&never).unwrap().last_update, None);
        assert!(GuestStats::read(&json!({ "stats": {} })).is_err());
        assert!(GuestStats::read(&json!({ "last-update": -1 })).is_err());
    }

    #[test]
    fn only_memory_modules_count_for_the_balloon() {
        let summary = json!({ "base-memory": 1000, "plugged-memory": 600 });
        let devices = json!([
            { "type": "virtio-mem", "data": { "size": 200, "max-size": 300 } },
            { "type": "dimm", "data": { "size": 400 } },
            { "type": "nvdimm", "data": { "size": 50 } },
        ]);
        let sizes = Sizes::read(&summary, &devices).unwrap();
        assert_eq!(sizes, Sizes { all: 1600, of_balloon: 1400 });
        assert!(Sizes::read(&json!({}), &devices).is_err());
        assert!(Sizes::read(&summary, &json!({})).is_err());
    }

    #[test]
    fn balloons_of_all_transports_are_found() {
        for kind in ["pci", "pci-transitional", "pci-non-transitional", "device", "ccw"] {
            let children = json!([
                { "name": "type", "type": "string" },
                { "name": "disk", "type": "child<virtio-blk-pci>" },
                { "name": "device[3]", "type": format!("child<virtio-balloon-{kind}>") },
            ]);
            assert_eq!(balloon_among("/m", &children).as_deref(), Some("/m/device[3]"));
        }
        assert_eq!(balloon_among("/m", &json!([{ "name": "x", "type": "child<y>" }])), None);
        assert_eq!(balloon_among("/m", &json!("x")), None);
    }

    #[test]
    fn phases_of_a_migration_are_one() {
        for status in ["setup", "active", "device", "postcopy-active", "cancelling", "new"] {
            assert!(is_migrating(&json!({ "status": status })), "{status}");
        }
        for answer in [json!({}), json!({ "status": "completed" }), json!({ "status": "failed" })] {
            assert!(!is_migrating(&answer), "{answer}");
        }
    }

    #[test]
    fn a_moment_is_on_the_snapshots_clock() {
        let moment = Moment::of(100, None, 103, 50_000);
        assert_eq!(moment.taken_ms, Some(47_000));
        // The same answer of the driver, although the real-time clock was set in between.
        let moment = Moment::of(100, Some(moment), 9_000, 51_000);
        assert_eq!(moment.taken_ms, Some(47_000));
        let moment = Moment::of(9_001, Some(moment), 9_001, 52_000);
        assert_eq!(moment.taken_ms, Some(52_000));
        // Older than the host.
        assert_eq!(Moment::of(1, None, 1_000, 50_000).taken_ms, Some(0));
    }

    #[test]
    fn a_clock_that_is_set_back_makes_no_statistics_new() {
        // At the first look the age cannot be told.
        let moment = Moment::of(200, None, 100, 50_000);
        assert_eq!(moment.taken_ms, None);
        assert_eq!(Moment::of(200, Some(moment), 101, 51_000).taken_ms, None);
        // A new answer came after the look before.
        let moment = Moment::of(102, Some(moment), 102, 52_000);
        assert_eq!(moment.taken_ms, Some(52_000));
        let moment = Moment::of(104, Some(moment), 90, 55_000);
        assert_eq!(moment.taken_ms, Some(52_000));
        // Set forward between the answer and the look.
        assert_eq!(Moment::of(106, Some(moment), 5_000, 57_000).taken_ms, Some(55_000));
    }
}

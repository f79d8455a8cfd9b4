//! What an operator decides.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

use crate::MIB;
use crate::snapshot::MOST;

/// The longest time of a setting.
const DAY_MS: u64 = 24 * 60 * 60 * 1000;
/// Leases that monitors take, and that end soon enough after a daemon's death.
const LEASES_MS: RangeInclusive<u64> = 1_000..=600_000;
/// The most shares of a profile.
const MOST_SHARES: u64 = 1_000_000;

/// Settings of a host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, expecting = "a table of settings")]
pub struct Settings {
    /// The host is tight while less than this percentage of its memory is available: memory that
    /// guests do not use is reclaimed.
    pub tight_percent: u64,
    /// The host is pressed below this percentage: balloons take memory by shares as well.
    pub pressed_percent: u64,
    /// Below this percentage it is an emergency.
    pub emergency_percent: u64,
    /// How long the host must be better than its level before the level falls.
    pub calm_ms: u64,
    /// Statistics older than this are not used.
    pub stale_ms: u64,
    /// A balloon that no decision has renewed for this time is released.
    pub lease_ms: u64,
    /// A machine that has done no work for this time is idle.
    pub idle_ms: u64,
    /// The longest pause of a machine at a time, in milliseconds; 0: machines are never paused.
    pub pause_ms: u64,
    /// The idle memory tax: 75 makes a page that is not used four times as expensive as one that
    /// is (Waldspurger, "Memory Resource Management in VMware ESX
    /// Server", OSDI 2002, section 5).
    pub idle_tax_percent: u64,
    /// Machines are admitted while the probability that the host has too little memory at a moment
    /// stays below this, in millionths. Machines that can be paused count with their mean needs,
    /// and the one with the largest claim with all that it can need.
    pub risk_ppm: u64,
    /// The same for the probability that a machine is delayed, because all together need more than
    /// there is.
    pub delay_ppm: u64,
    /// The profile of machines that have no other.
    pub default: Profile,
    /// Others, by name.
    pub profiles: BTreeMap<String, Profile>,
    /// The profiles of machines, by the machine's name or, with a `*` at the end, by how it begins.
    pub machines: BTreeMap<String, String>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            tight_percent: 35,
            pressed_percent: 18,
            emergency_percent: 5,
            calm_ms: 10_000,
            stale_ms: 15_000,
            lease_ms: 30_000,
            idle_ms: 10_000,
            pause_ms: 60_000,
            idle_tax_percent: 75,
            risk_ppm: 100,
            delay_ppm: 10_000,
            default: Profile::default(),
            profiles: BTreeMap::new(),
            machines: BTreeMap::new(),
        }
    }
}

/// What machines of one kind are entitled to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, expecting = "a table of a profile's settings")]
pub struct Profile {
    /// Memory that is never taken.
    pub floor_bytes: u64,
    /// The most memory that it may have; `None`: its size.
    pub ceiling_bytes: Option<u64>,
    /// Its weight when memory is distributed by shares.
    pub shares: u64,
    /// How it is used.
    pub class: Class,
    /// Memory that stays available to its programs.
    pub reserve_bytes: u64,
}

impl Default for Profile {
    fn default() -> Self {
        Self {
            floor_bytes: 0,
            ceiling_bytes: None,
            shares: 1000,
            class: Class::Batch,
            reserve_bytes: 128 * MIB,
        }
    }
}

/// How a machine is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    /// Delays matter: it is never paused, and memory is not taken from it before the host is
    /// pressed.
    Latency,
    /// Delays of seconds do not matter.
    #[default]
    Batch,
    /// It is not in use: its memory is reclaimed at any level.
    Parked,
}

/// Settings that contradict each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Contradiction(String);

impl fmt::Display for Contradiction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Contradiction {}

impl Settings {
    /// Checks them.
    ///
    /// # Errors
    /// The first contradiction, with both of its sides.
    pub fn check(&self) -> Result<(), Contradiction> {
        let fail = |text: String| Err(Contradiction(text));
        let (tight, pressed) = (self.tight_percent, self.pressed_percent);
        let emergency = self.emergency_percent;
        if !(emergency < pressed && pressed < tight && tight < 100) {
            return fail(format!(
                "emergency_percent ({emergency}) must be below pressed_percent ({pressed}), that \
                 below tight_percent ({tight}), and that below 100"
            ));
        }
        if self.idle_tax_percent >= 100 {
            let tax = self.idle_tax_percent;
            return fail(format!("idle_tax_percent is {tax}; give one below 100"));
        }
        let risks = [("risk_ppm", self.risk_ppm), ("delay_ppm", self.delay_ppm)];
        if let Some((name, ppm)) = risks.into_iter().find(|(_, it)| !(1..1_000_000).contains(it)) {
            return fail(format!("{name} is {ppm}; give one from 1 to 999999"));
        }
        let times = [
            ("calm_ms", self.calm_ms),
            ("stale_ms", self.stale_ms),
            ("lease_ms", self.lease_ms),
            ("idle_ms", self.idle_ms),
            ("pause_ms", self.pause_ms),
        ];
        if let Some((name, time)) = times.into_iter().find(|(_, time)| *time > DAY_MS) {
            return fail(format!("{name} is {time}; give at most a day, {DAY_MS}"));
        }
        if !LEASES_MS.contains(&self.lease_ms) {
            let (least, most) = (LEASES_MS.start(), LEASES_MS.end());
            let lease = self.lease_ms;
            return fail(format!("lease_ms is {lease}; give one from {least} to {most}"));
        }
        if self.stale_ms >= self.lease_ms {
            let (stale, lease) = (self.stale_ms, self.lease_ms);
            return fail(format!("stale_ms ({stale}) must be below lease_ms ({lease})"));
        }
        let named = self.profiles.iter().map(|(name, profile)| (name.as_str(), profile));
        for (name, profile) in named.chain([("default", &self.default)]) {
            let shares = profile.shares;
            if shares == 0 || shares > MOST_SHARES {
                return fail(format!(
                    "profile {name}: shares is {shares}; give one from 1 to {MOST_SHARES}"
                ));
            }
            let sizes = [
                ("floor_bytes", profile.floor_bytes),
                ("ceiling_bytes", profile.ceiling_bytes.unwrap_or(0)),
                ("reserve_bytes", profile.reserve_bytes),
            ];
            if let Some((size, bytes)) = sizes.into_iter().find(|(_, bytes)| *bytes > MOST) {
                return fail(format!("profile {name}: {size} is {bytes}; give at most {MOST}"));
            }
            if let Some(ceiling) = profile.ceiling_bytes.filter(|it| *it < profile.floor_bytes) {
                let floor = profile.floor_bytes;
                return fail(format!(
                    "profile {name}: floor_bytes ({floor}) is above ceiling_bytes ({ceiling})"
                ));
            }
            if let Some(ceiling) = profile.ceiling_bytes.filter(|it| *it < profile.reserve_bytes) {
                let reserve = profile.reserve_bytes;
                return fail(format!(
                    "profile {name}: reserve_bytes ({reserve}) is above ceiling_bytes ({ceiling}), \
                     which no machine could ever keep to"
                ));
            }
        }
        for (machine, profile) in &self.machines {
            if profile != "default" && !self.profiles.contains_key(profile) {
                return fail(format!("machine {machine}: there is no profile {profile}"));
            }
        }
        Ok(())
    }

    /// Whether machines with this profile may be paused.
    pub(crate) fn may_pause(&self, profile: &Profile) -> bool {
        self.pause_ms > 0 && profile.class != Class::Latency
    }

    /// The profile of a machine, with its name.
    pub fn profile(&self, machine: &str) -> (&str, &Profile) {
        let exact = self.machines.get(machine);
        let begins = || {
            let fits = |(pattern, profile)| {
                let begin: &str = String::as_str(pattern).strip_suffix('*')?;
                machine.starts_with(begin).then_some((begin.len(), profile))
            };
            self.machines.iter().filter_map(fits).max_by_key(|(length, _)| *length)
        };
        let name = exact.or_else(|| begins().map(|(_, profile)| profile));
        let found = name.and_then(|name| self.profiles.get_key_value(name));
        found.map_or(("default", &self.default), |(name, profile)| (name, profile))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_pattern_decides() {
        let profile = |shares| Profile { shares, ..Profile::default() };
        let settings = Settings {
            profiles: [("a".to_owned(), profile(1)), ("b".to_owned(), profile(2))].into(),
            machines: [("web*", "a"), ("web-1*", "b"), ("web-12", "a"), ("x", "default")]
                .map(|(machine, profile)| (machine.to_owned(), profile.to_owned()))
                .into(),
            ..Settings::default()
        };
        settings.check().unwrap();
        let names = ["web-2", "web-13", "web-12", "x", "web"].map(|name| settings.profile(name).0);
        assert_eq!(names, ["a", "b", "a", "default", "a"]);
    }

    #[test]
    fn contradictions_are_refused() {
        let refused = |change: fn(&mut Settings), word: &str| {
            let mut settings = Settings::default();
            change(&mut settings);
            let error = settings.check().unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        };
        Settings::default().check().unwrap();
        refused(|it| it.tight_percent = 100, "tight_percent");
        refused(|it| it.pressed_percent = 40, "pressed_percent (40)");
        refused(|it| it.emergency_percent = 18, "emergency_percent (18)");
        refused(|it| it.idle_tax_percent = 100, "idle_tax_percent");
        refused(|it| it.risk_ppm = 0, "risk_ppm");
        refused(|it| it.delay_ppm = 1_000_000, "delay_ppm");
        refused(|it| it.stale_ms = 30_000, "lease_ms (30000)");
        refused(|it| it.default.shares = 0, "profile default");
        refused(|it| it.default.shares = u64::MAX, "1 to 1000000");
        refused(|it| it.default.floor_bytes = u64::MAX, "floor_bytes");
        refused(|it| it.default.reserve_bytes = u64::MAX, "reserve_bytes");
        refused(|it| it.calm_ms = u64::MAX, "calm_ms");
        refused(|it| it.pause_ms = u64::MAX, "pause_ms");
        refused(
            |it| {
                it.default =
                    Profile { floor_bytes: 6, ceiling_bytes: Some(5), ..Profile::default() }
            },
            "ceiling_bytes (5)",
        );
        refused(|it| it.lease_ms = 600_001, "lease_ms is 600001");
        refused(|it| (it.lease_ms, it.stale_ms) = (99, 9), "from 1000 to 600000");
        refused(
            |it| {
                it.default =
                    Profile { reserve_bytes: 6, ceiling_bytes: Some(5), ..Profile::default() }
            },
            "reserve_bytes (6)",
        );
        refused(|it| drop(it.machines.insert("m".into(), "none".into())), "no profile none");
    }
}

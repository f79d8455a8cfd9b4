//! The host's level: four states with hysteresis.

use serde::{Deserialize, Serialize};

use crate::settings::Settings;
use crate::snapshot::{Host, Pressure};

/// How scarce a host's memory is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// Nothing is taken.
    #[default]
    Plenty,
    /// Memory that guests do not use is reclaimed.
    Tight,
    /// Balloons take memory by shares as well.
    Pressed,
    /// The same for machines that are not idle, and without waiting in between.
    Emergency,
}

/// Why a host has its level.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// The available memory.
    Available {
        /// Its size.
        available_bytes: u64,
        /// The level's limit.
        limit_bytes: u64,
    },
    /// It has swapped since the last decision.
    Swapped {
        /// The amount.
        out_bytes: u64,
    },
    /// All of its tasks have waited for memory since the last decision.
    Stalled {
        /// The duration, in microseconds.
        full_us: u64,
    },
    /// It was worse a moment ago.
    NotYetCalm {
        /// When it was, in milliseconds before this decision.
        worse_ms: u64,
    },
}

/// What is remembered of a host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LevelState {
    /// The level.
    pub level: Level,
    /// Since when.
    pub since_ms: u64,
    /// When the host was last as bad as its level.
    worse_at_ms: u64,
    /// When swap and pressure were last compared with the time before, and what they were.
    at_ms: u64,
    swap_out_bytes: Option<u64>,
    pressure: Option<Pressure>,
}

/// The part of an interval, in percent, that a stall of all tasks must fill to count.
const STALLED_PERCENT: u64 = 5;
/// Less is ignored: a kernel swaps small amounts without a shortage.
const SWAPPED_BYTES: u64 = 4 << 20;
/// Both are compared over this time at least.
const COMPARED_MS: u64 = 500;

impl LevelState {
    /// Judges the host. The level rises at once, and falls one state after the host was better than
    /// it for [`Settings::calm_ms`].
    pub(crate) fn judge(&mut self, at_ms: u64, host: &Host, settings: &Settings) -> Cause {
        let elapsed_ms = at_ms.saturating_sub(self.at_ms);
        let out = host.swap.map(|swap| swap.out_bytes);
        let swapped = delta(self.swap_out_bytes, out);
        let stalled = delta(self.pressure.map(|it| it.full_us), host.pressure.map(|it| it.full_us));
        // Decisions in quick succession look at the same time together.
        let is_first = self.swap_out_bytes.is_none() && self.pressure.is_none();
        if elapsed_ms >= COMPARED_MS || is_first {
            (self.swap_out_bytes, self.pressure, self.at_ms) = (out, host.pressure, at_ms);
        }
        let elapsed_ms = elapsed_ms.max(COMPARED_MS);
        let (mut now, mut cause) = by_available(host, settings, 100);
        // Only while memory is short: the limit of a cgroup causes both as well.
        if now >= Level::Tight && swapped > SWAPPED_BYTES && now < Level::Pressed {
            (now, cause) = (Level::Pressed, Cause::Swapped { out_bytes: swapped });
        }
        if now >= Level::Tight && stalled > 10 * STALLED_PERCENT * elapsed_ms {
            (now, cause) = (Level::Emergency, Cause::Stalled { full_us: stalled });
        }
        // Falling needs a margin.
        let nearly = now.max(by_available(host, settings, 115).0).min(self.level);
        if now >= self.level || nearly == self.level {
            self.worse_at_ms = at_ms;
        }
        if now > self.level {
            (self.level, self.since_ms) = (now, at_ms);
        } else if now < self.level {
            let worse_ms = at_ms.saturating_sub(self.worse_at_ms);
            cause = Cause::NotYetCalm { worse_ms };
            if worse_ms >= settings.calm_ms {
                self.level = match self.level {
                    Level::Emergency => Level::Pressed,
                    Level::Pressed => Level::Tight,
                    Level::Tight | Level::Plenty => Level::Plenty,
                };
                (self.since_ms, self.worse_at_ms) = (at_ms, at_ms);
            }
        }
        cause
    }

    /// Forgets times, after a clock has gone back.
    pub(crate) fn forget_times(&mut self, at_ms: u64) {
        (self.since_ms, self.worse_at_ms, self.at_ms) = (at_ms, at_ms, at_ms);
        (self.swap_out_bytes, self.pressure) = (None, None);
    }
}

fn delta(before: Option<u64>, now: Option<u64>) -> u64 {
    before.zip(now).map_or(0, |(before, now)| now.saturating_sub(before))
}

/// The level by available memory alone, with all limits scaled by this percentage.
fn by_available(host: &Host, settings: &Settings, limits_percent: u64) -> (Level, Cause) {
    let limits = [
        (Level::Emergency, settings.emergency_percent),
        (Level::Pressed, settings.pressed_percent),
        (Level::Tight, settings.tight_percent),
    ];
    let available_bytes = host.available_bytes;
    let limit = |percent| part(host.total_bytes, percent * limits_percent, 10_000);
    let reached = limits.into_iter().find(|(_, percent)| available_bytes < limit(*percent));
    let (level, percent) = reached.unwrap_or((Level::Plenty, settings.tight_percent));
    (level, Cause::Available { available_bytes, limit_bytes: limit(percent) })
}

/// A part of an amount.
pub(crate) fn part(amount: u64, numerator: u64, denominator: u64) -> u64 {
    let part = u128::from(amount) * u128::from(numerator) / u128::from(denominator.max(1));
    u64::try_from(part).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{GIB, MIB, Swap};

    fn settings() -> Settings {
        let (tight_percent, pressed_percent, emergency_percent) = (25, 12, 4);
        Settings { tight_percent, pressed_percent, emergency_percent, ..Settings::default() }
    }

    fn host(available_percent: u64) -> Host {
        let total_bytes = 100 * GIB;
        let available_bytes = available_percent * GIB;
        let swap = Some(Swap { total_bytes: GIB, used_bytes: 0, out_bytes: 0 });
        let pressure = Some(Pressure { some_us: 0, full_us: 0 });
        Host { total_bytes, available_bytes, swap, pressure }
    }

    #[test]
    fn it_rises_at_once_and_falls_slowly() {
        let (settings, mut state) = (settings(), LevelState::default());
        let mut at = |seconds: u64, percent| {
            state.judge(1000 * seconds, &host(percent), &settings);
            state.level
        };
        assert_eq!(at(0, 60), Level::Plenty);
        assert_eq!(at(1, 11), Level::Pressed);
        // Values on both sides of the limit do not change the level.
        for second in 2..100 {
            assert_eq!(at(second, 11 + second % 3), Level::Pressed, "{second}");
        }
        assert_eq!(at(100, 20), Level::Pressed);
        assert_eq!(at(107, 20), Level::Pressed);
        assert_eq!(at(110, 20), Level::Tight);
        assert_eq!(at(111, 90), Level::Tight);
        assert_eq!(at(121, 90), Level::Plenty);
        assert_eq!(at(122, 1), Level::Emergency);
        for (second, level) in [(131, Level::Emergency), (132, Level::Pressed)] {
            assert_eq!(at(second, 90), level);
        }
    }

    #[test]
    fn swapping_and_stalls_count_as_differences() {
        let settings = settings();
        let judge = |percents: [u64; 2], out_bytes, full_us| {
            let mut state = LevelState::default();
            let with = |percent, out_bytes, full_us| Host {
                swap: Some(Swap { total_bytes: GIB, used_bytes: GIB, out_bytes }),
                pressure: Some(Pressure { some_us: full_us, full_us }),
                ..host(percent)
            };
            // Large totals of the past do not count.
            state.judge(10_000, &with(percents[0], 50 * GIB, 1 << 40), &settings);
            let now = with(percents[1], 50 * GIB + out_bytes, (1_u64 << 40) + full_us);
            let cause = state.judge(11_000, &now, &settings);
            (state.level, cause)
        };
        assert_eq!(judge([60, 60], 0, 0).0, Level::Plenty);
        assert_eq!(judge([20, 20], 0, 0).0, Level::Tight);
        let (level, cause) = judge([20, 20], 100 * MIB, 0);
        assert_eq!((level, cause), (Level::Pressed, Cause::Swapped { out_bytes: 100 * MIB }));
        let (level, cause) = judge([20, 20], 0, 60_000);
        assert_eq!((level, cause), (Level::Emergency, Cause::Stalled { full_us: 60_000 }));
        assert_eq!(judge([20, 20], 0, 40_000).0, Level::Tight);
        // They are ignored while memory is available.
        assert_eq!(judge([60, 60], 100 * MIB, 900_000).0, Level::Plenty);
    }

    #[test]
    fn without_swap_and_pressure_what_is_available_decides() {
        let mut state = LevelState::default();
        let bare = Host { swap: None, pressure: None, ..host(3) };
        state.judge(0, &bare, &settings());
        assert_eq!(state.level, Level::Emergency);
    }
}

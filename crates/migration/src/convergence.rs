//! Convergence policy: decides after each round whether to send another one, throttle the guest,
//! switch over or fail. Pure, apart from the engine.

use std::time::Duration;

use crate::rate::Bandwidth;
use crate::{AtTimeLimit, AutoConverge, Config};

/// First throttling step in percent.
const FIRST_THROTTLE: u8 = 20;

/// Further throttling steps in percent.
const THROTTLE_STEP: u8 = 10;

/// Largest throttling in percent. At 100 % the guest could as well be paused.
const MAX_THROTTLE: u8 = 99;

/// Consecutive rounds without progress after which the guest is throttled.
const ROUNDS_WITHOUT_PROGRESS: u32 = 2;

/// Outcome of a round.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RoundOutcome {
    pub(crate) elapsed: Duration,
    pub(crate) sent_bytes: u64,
    /// Bytes of the pages that the guest wrote during the round.
    pub(crate) written_bytes: u64,
    /// Bytes left to send.
    pub(crate) remaining_bytes: u64,
}

/// Decision after a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Another round while the guest runs.
    Round,
    /// Another round with the guest throttled by this percentage.
    Throttle(u8),
    /// Pause the guest and send the rest.
    SwitchOver,
    /// The time limit has passed.
    GiveUp,
}

/// The policy with its state.
#[derive(Debug)]
pub(crate) struct Policy {
    config: Config,
    throttle_percent: u8,
    rounds_without_progress: u32,
}

impl Policy {
    pub(crate) fn new(config: Config) -> Self {
        Self { config, throttle_percent: 0, rounds_without_progress: 0 }
    }

    pub(crate) fn throttle_percent(&self) -> u8 {
        self.throttle_percent
    }

    pub(crate) fn after_round(&mut self, round: RoundOutcome, bandwidth: Bandwidth) -> Next {
        let downtime = bandwidth.time_for(round.remaining_bytes);
        if downtime.is_some_and(|downtime| downtime <= self.config.downtime_limit) {
            return Next::SwitchOver;
        }
        if let Some(limit) = self.config.time_limit
            && round.elapsed >= limit.after
        {
            return match limit.then {
                AtTimeLimit::Cancel => Next::GiveUp,
                AtTimeLimit::Force => Next::SwitchOver,
            };
        }
        // The guest has written at least half of the amount sent: the rest shrinks slowly or not at
        // all.
        if round.written_bytes > round.sent_bytes / 2 {
            self.rounds_without_progress += 1;
        } else {
            self.rounds_without_progress = 0;
        }
        if self.config.auto_converge == AutoConverge::On
            && self.rounds_without_progress >= ROUNDS_WITHOUT_PROGRESS
            && self.throttle_percent < MAX_THROTTLE
        {
            self.rounds_without_progress = 0;
            self.throttle_percent = match self.throttle_percent {
                0 => FIRST_THROTTLE,
                percent => percent.saturating_add(THROTTLE_STEP).min(MAX_THROTTLE),
            };
            return Next::Throttle(self.throttle_percent);
        }
        Next::Round
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TimeLimit;

    const MIB: u64 = 1 << 20;

    /// 100 MiB/s.
    fn bandwidth() -> Bandwidth {
        let mut bandwidth = Bandwidth::default();
        bandwidth.observe(100 * MIB, 100 * MIB, Duration::from_secs(1));
        bandwidth
    }

    fn round(sent: u64, written: u64) -> RoundOutcome {
        RoundOutcome {
            elapsed: Duration::from_secs(10),
            sent_bytes: sent * MIB,
            written_bytes: written * MIB,
            remaining_bytes: written * MIB,
        }
    }

    #[test]
    fn the_guest_is_paused_when_the_rest_fits_the_downtime() {
        let mut policy = Policy::new(Config::default());
        assert_eq!(policy.after_round(round(1000, 31), bandwidth()), Next::Round);
        assert_eq!(policy.after_round(round(1000, 30), bandwidth()), Next::SwitchOver);
        assert_eq!(policy.after_round(round(0, 0), Bandwidth::default()), Next::SwitchOver);
        assert_eq!(policy.after_round(round(0, 1), Bandwidth::default()), Next::Round);
    }

    #[test]
    fn a_busy_guest_is_throttled_step_by_step() {
        let config = Config { auto_converge: AutoConverge::On, ..Config::default() };
        let mut policy = Policy::new(config);
        let steps: Vec<_> =
            (0..24).map(|_| policy.after_round(round(100, 90), bandwidth())).collect();
        let expected: Vec<_> = [20, 30, 40, 50, 60, 70, 80, 90, 99]
            .into_iter()
            .flat_map(|percent| [Next::Round, Next::Throttle(percent)])
            .chain([Next::Round; 6])
            .collect();
        assert_eq!(steps, expected);
        let mut patient = Policy::new(Config::default());
        assert!((0..9).all(|_| patient.after_round(round(100, 90), bandwidth()) == Next::Round));
    }

    #[test]
    fn progress_resets_the_count_of_rounds() {
        let config = Config { auto_converge: AutoConverge::On, ..Config::default() };
        let mut policy = Policy::new(config);
        for _ in 0..5 {
            assert_eq!(policy.after_round(round(100, 90), bandwidth()), Next::Round);
            assert_eq!(policy.after_round(round(100, 50), bandwidth()), Next::Round);
        }
    }

    #[test]
    fn the_time_limit_cancels_or_forces() {
        for (then, next) in
            [(AtTimeLimit::Cancel, Next::GiveUp), (AtTimeLimit::Force, Next::SwitchOver)]
        {
            let limit = |seconds| Some(TimeLimit { after: Duration::from_secs(seconds), then });
            let policy =
                |seconds| Policy::new(Config { time_limit: limit(seconds), ..Config::default() });
            assert_eq!(policy(11).after_round(round(100, 90), bandwidth()), Next::Round);
            assert_eq!(policy(10).after_round(round(100, 90), bandwidth()), next);
            // A rest that fits the downtime is sent even after the limit.
            assert_eq!(policy(10).after_round(round(100, 1), bandwidth()), Next::SwitchOver);
        }
    }
}

//! Convergence of a guest that writes all the time.

use std::time::Duration;

use ebb_migration::testing::Activity;
use ebb_migration::{AtTimeLimit, AutoConverge, Config, MigrationError, TimeLimit};

use crate::move_it::Trial;

/// A guest that does not become idle.
fn busy(config: Config) -> Trial {
    Trial {
        config,
        activity: Activity { steps: u64::MAX, burst: 4, cancel_after: None },
        ..Trial::default()
    }
}

fn limit(then: AtTimeLimit) -> TimeLimit {
    TimeLimit { after: Duration::from_millis(20), then }
}

#[test]
fn it_continues_after_the_time_limit() {
    let config = Config { time_limit: Some(limit(AtTimeLimit::Cancel)), ..Trial::default().config };
    let outcome = busy(config).run();
    let failure = outcome.sent.as_ref().unwrap_err();
    assert!(matches!(failure.error, MigrationError::TimeLimit { .. }), "{failure}");
    assert!(failure.report.rounds > 0 || failure.report.bytes_sent > 0, "{:?}", failure.report);
    assert!(outcome.received.is_err());
    outcome.check_whole();
}

#[test]
fn it_is_paused_at_the_time_limit() {
    let config = Config { time_limit: Some(limit(AtTimeLimit::Force)), ..Trial::default().config };
    let outcome = busy(config).run();
    let report = outcome.sent.as_ref().unwrap();
    assert!(report.rounds_detail.last().unwrap().pages_to_send > 0, "{report:?}");
    outcome.check_moved();
}

/// The limit passes within the first round, which is ended early.
#[test]
fn a_slow_link_does_not_delay_the_time_limit() {
    let time_limit = Some(limit(AtTimeLimit::Force));
    let slow = Config { time_limit, bandwidth_limit: Some(2 << 20), ..Trial::default().config };
    let outcome = busy(slow).run();
    let report = outcome.sent.as_ref().unwrap();
    assert_eq!(report.rounds, 2, "{report:?}");
    assert!(report.rounds_detail[0].pages_to_send > report.rounds_detail[1].pages_to_send);
    outcome.check_moved();
}

#[test]
fn it_is_throttled_and_at_full_speed_again_after_a_failure() {
    let time_limit =
        Some(TimeLimit { after: Duration::from_millis(300), then: AtTimeLimit::Cancel });
    let config = Config { time_limit, auto_converge: AutoConverge::On, ..Trial::default().config };
    let outcome = busy(config).run();
    assert!(outcome.progress.iter().any(|step| step.throttle_percent >= 20));
    assert!(outcome.sent.is_err());
    outcome.check_whole();
}

#[test]
fn it_is_paused_when_the_rest_fits_the_downtime() {
    let config = Config { downtime_limit: Duration::from_secs(60), ..Trial::default().config };
    let outcome = busy(config).run();
    assert_eq!(outcome.sent.as_ref().unwrap().rounds, 2);
    outcome.check_moved();
}

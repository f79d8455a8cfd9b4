//! Statistics of the guest with the freshness that a client requests.

use std::time::{Duration, Instant};

use super::balloon::Statistics;
use super::control::{ControlError, Document, Outcome, TimeLeft, Wait};

/// Time limit for the guest to deliver statistics. The guest may be dead or paused by its own
/// debugger, and the client needs an answer in any case.
pub const STATISTICS_TIME_LIMIT: Duration = Duration::from_secs(1);

/// Answers with the statistics from `read` if they are at most `max_age` old. Otherwise requests
/// new ones from the guest with `ask`, and waits for them.
pub fn fresh_statistics(
    max_age: Option<Duration>,
    read: impl Fn() -> Result<Statistics, ControlError> + Send + 'static,
    ask: impl FnOnce() -> Result<(), ControlError>,
) -> Result<Outcome, ControlError> {
    fn stale(error: ControlError, last_known: &Statistics) -> ControlError {
        let last_known = Box::new((*last_known).into());
        ControlError::NoFreshStatistics { error: Box::new(error), last_known }
    }
    let document = |statistics: Statistics| Document::Statistics(statistics.into());
    let known = read()?;
    // An age in milliseconds is rounded down.
    let is_young = |age_ms| max_age.is_some_and(|max_age| Duration::from_millis(age_ms) < max_age);
    if known.age_ms.is_some_and(is_young) {
        return Ok(document(known).into());
    }
    ask().map_err(|error| stale(error, &known))?;
    let answer = move |left| match (read(), left) {
        (Ok(found), _) if found.updates != known.updates => Some(Ok(document(found))),
        (Ok(found), TimeLeft::None) => {
            Some(Err(stale(ControlError::NoAnswer { limit: STATISTICS_TIME_LIMIT }, &found)))
        }
        (Ok(_), TimeLeft::Some) => None,
        (Err(error), _) => Some(Err(error)),
    };
    Ok(Outcome::Await(Wait::until(Instant::now() + STATISTICS_TIME_LIMIT, answer)))
}

//! Statistics of the guest that are as fresh as a client wants them.

use std::time::{Duration, Instant};

use super::balloon::Statistics;
use super::control::{ControlError, Document, Outcome, TimeLeft, Wait};

/// How long a guest may take to deliver statistics. A guest may be dead or paused by its own
/// debugger, and the client wants an answer in any case.
pub const STATISTICS_TIME_LIMIT: Duration = Duration::from_secs(1);

/// Answers with the statistics that `read` has if they are at most `max_age` old; else lets `ask`
/// ask the guest for new ones, and waits for them.
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

//! Requests that take time. Each has a connection of its own, and a machine one at a time.

use std::time::{Duration, Instant};

use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::Trouble;

/// The longest time of a stop, which writes the machine's memory to a disk.
const STOP_LIMIT: Duration = Duration::from_secs(900);
/// After a stop, another one is not tried for this time.
const STOP_AGAIN: Duration = Duration::from_secs(600);

/// What a machine's monitor is at. It is given up when this is dropped.
#[derive(Debug, Default)]
pub(super) struct Job {
    task: Option<JoinHandle<()>>,
    /// Whether that is a stop.
    is_stop: bool,
    /// When the last stop began; it has failed if the machine is still there.
    stopped: Option<Instant>,
}

impl Job {
    /// Begins with `work`. Its failure is told in the log.
    ///
    /// # Errors
    /// [`Trouble::Refused`] while there is another one.
    pub(super) fn begin(
        &mut self,
        machine: String,
        limit: Duration,
        work: impl Future<Output = Result<(), Trouble>> + Send + 'static,
    ) -> Result<(), Trouble> {
        if self.is_busy() {
            return Err(Trouble::Refused("an earlier job has not ended".to_owned()));
        }
        self.is_stop = false;
        self.task = Some(tokio::spawn(async move {
            match timeout(limit, work).await {
                Ok(Ok(())) => {}
                Ok(Err(trouble)) => tracing::info!(machine, "{trouble}"),
                Err(_) => tracing::info!(machine, "no answer within {limit:?}"),
            }
        }));
        Ok(())
    }

    /// Begins with the work of a stop.
    ///
    /// # Errors
    /// As [`Self::begin`].
    pub(super) fn stop(
        &mut self,
        machine: String,
        work: impl Future<Output = Result<(), Trouble>> + Send + 'static,
    ) -> Result<(), Trouble> {
        self.begin(machine, STOP_LIMIT, work)?;
        (self.is_stop, self.stopped) = (true, Some(Instant::now()));
        Ok(())
    }

    /// Whether the machine is being stopped.
    pub(super) fn is_stopping(&self) -> bool {
        self.is_stop && self.is_busy()
    }

    /// Whether a stop may be tried.
    pub(super) fn may_stop(&self) -> bool {
        self.stopped.is_none_or(|at| at.elapsed() >= STOP_AGAIN)
    }

    fn is_busy(&self) -> bool {
        self.task.as_ref().is_some_and(|task| !task.is_finished())
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use super::*;

    #[tokio::test]
    async fn what_follows_a_failed_stop_is_none() {
        let mut job = Job::default();
        assert!(job.may_stop());
        job.stop("m".to_owned(), ready(Err(Trouble::Unable))).unwrap();
        while job.is_stopping() {
            tokio::task::yield_now().await;
        }
        assert!(!job.may_stop(), "it has just failed");
        job.begin("m".to_owned(), Duration::MAX, pending()).unwrap();
        assert!(!job.is_stopping());
    }

    #[tokio::test]
    async fn there_is_one_at_a_time() {
        let mut job = Job::default();
        job.stop("m".to_owned(), pending()).unwrap();
        let second = job.begin("m".to_owned(), Duration::MAX, ready(Ok(())));
        assert!(matches!(second, Err(Trouble::Refused(_))), "{second:?}");
        assert!(job.is_stopping(), "the second one changes nothing");
    }
}

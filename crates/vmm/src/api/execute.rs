//! Operations on a [`VmControl`], and the reply to each.

use std::borrow::Cow;
use std::time::{Duration, Instant};

use super::control::{StatisticsDocument, VmControl};
use super::free_pages::{FreePagesAnswer, FreePagesRequest};
use super::migration::MigrationStatus;
use super::prometheus;
use super::reply::{ContentType, Problem, Reply, Status};
use super::route::Operation;

/// How long a guest may take to deliver statistics. A guest may be dead or paused by its own
/// debugger, and the client wants an answer in any case.
pub const STATISTICS_TIME_LIMIT: Duration = Duration::from_secs(1);

/// What became of an operation.
pub enum Outcome {
    /// It is done.
    Done(Reply),
    /// The guest was asked for something.
    Await(Wait),
}

/// A question that the guest has not answered yet. Whoever loses interest drops it.
pub enum Wait {
    /// For statistics.
    Statistics {
        /// When it was asked.
        asked_at: Instant,
    },
    /// For the end of a migration, which is told as soon as it comes.
    Migration {
        /// When its state is told in any case.
        deadline: Instant,
    },
    /// For its free pages.
    FreePages {
        /// The question.
        answer: Box<dyn FreePagesAnswer>,
        /// When it is to be withdrawn.
        deadline: Instant,
    },
}

impl Wait {
    /// The reply, as soon as the guest has answered or its time is up; `None` before.
    pub fn poll(&self, vm: &dyn VmControl) -> Option<Reply> {
        match self {
            Self::Statistics { asked_at } => poll_statistics(*asked_at, vm),
            Self::Migration { deadline } => {
                let status = vm.migration();
                (status.phase.is_end() || Instant::now() >= *deadline)
                    .then(|| migration_reply(&status))
            }
            Self::FreePages { answer, deadline } => {
                let is_late = Instant::now() >= *deadline;
                let report = answer.report().or_else(|| is_late.then(|| answer.give_up()))?;
                Some(Reply::json(Status::Ok, &report))
            }
        }
    }
}

/// Carries out `operation` without waiting for the guest.
pub fn execute(operation: Operation, vm: &dyn VmControl) -> Outcome {
    match try_execute(operation, vm) {
        Ok(outcome) => outcome,
        Err(problem) => Outcome::Done(problem.into()),
    }
}

fn try_execute(operation: Operation, vm: &dyn VmControl) -> Result<Outcome, Problem> {
    let reply = match operation {
        Operation::OpenApi => fixed(ContentType::Json, super::OPENAPI_JSON),
        Operation::VmInfo => Reply::json(Status::Ok, &vm.info()),
        Operation::Pause => {
            vm.pause()?;
            Reply::json(Status::Ok, &vm.info())
        }
        Operation::Resume => {
            vm.resume()?;
            Reply::json(Status::Ok, &vm.info())
        }
        Operation::PowerButton => {
            vm.power_button()?;
            Reply::json(Status::Accepted, &vm.info())
        }
        Operation::Trim => Reply::json(Status::Ok, &vm.trim()?),
        Operation::Snapshot { path } => Reply::json(Status::Ok, &vm.snapshot(&path)?),
        Operation::Migrate(request) => {
            vm.migrate(*request)?;
            Reply::json(Status::Accepted, &vm.migration())
        }
        Operation::Migration { wait } => {
            let status = vm.migration();
            match wait {
                Some(wait) if status.phase.is_active() => {
                    let deadline = Instant::now() + wait;
                    return Ok(Outcome::Await(Wait::Migration { deadline }));
                }
                _ => migration_reply(&status),
            }
        }
        Operation::CancelMigration => {
            vm.cancel_migration()?;
            Reply::json(Status::Accepted, &vm.migration())
        }
        Operation::Kill => {
            vm.kill()?;
            Reply::json(Status::Accepted, &vm.info())
        }
        Operation::Balloon => Reply::json(Status::Ok, &vm.balloon()?),
        Operation::SetBalloon { target_bytes } => {
            vm.set_balloon_target(target_bytes)?;
            Reply::json(Status::Ok, &vm.balloon()?)
        }
        Operation::Statistics { max_age } => return statistics(max_age, vm),
        Operation::SetStatisticsInterval { interval } => {
            vm.set_statistics_interval(interval)?;
            Reply::json(Status::Ok, &vm.balloon()?)
        }
        Operation::FreePages { min_order, time_limit } => {
            let answer = vm.request_free_pages(FreePagesRequest { min_order })?;
            let deadline = Instant::now() + time_limit;
            return Ok(Outcome::Await(Wait::FreePages { answer, deadline }));
        }
        Operation::Merge => Reply::json(Status::Ok, &vm.merge()?),
        Operation::SetMerge(change) => {
            vm.set_merge(&change)?;
            Reply::json(Status::Ok, &vm.merge()?)
        }
        Operation::Metrics => Reply {
            status: Status::Ok,
            content_type: ContentType::Prometheus,
            body: Cow::Owned(prometheus::render(&vm.metrics())),
            allow: None,
        },
    };
    Ok(Outcome::Done(reply))
}

fn migration_reply(status: &MigrationStatus) -> Reply {
    Reply::json(Status::Ok, status)
}

fn fixed(content_type: ContentType, body: &'static str) -> Reply {
    Reply { status: Status::Ok, content_type, body: Cow::Borrowed(body), allow: None }
}

fn statistics(max_age: Option<Duration>, vm: &dyn VmControl) -> Result<Outcome, Problem> {
    let reading = vm.statistics()?;
    let young_enough = match (reading.age, max_age) {
        (Some(age), Some(max_age)) => age <= max_age,
        _ => false,
    };
    if young_enough {
        return Ok(Outcome::Done(Reply::json(Status::Ok, &StatisticsDocument::from(reading))));
    }
    // Before the question, so that an answer cannot be older.
    let asked_at = Instant::now();
    match vm.request_statistics() {
        Ok(()) => Ok(Outcome::Await(Wait::Statistics { asked_at })),
        Err(error) => Err(Problem::from(error).with_last_known(reading.into())),
    }
}

fn poll_statistics(asked_at: Instant, vm: &dyn VmControl) -> Option<Reply> {
    let reading = match vm.statistics() {
        Ok(reading) => reading,
        Err(error) => return Some(Problem::from(error).into()),
    };
    let waited = asked_at.elapsed();
    if reading.age.is_some_and(|age| age <= waited) {
        return Some(Reply::json(Status::Ok, &StatisticsDocument::from(reading)));
    }
    if waited < STATISTICS_TIME_LIMIT {
        return None;
    }
    let message = format!(
        "the guest did not deliver statistics within {} ms",
        STATISTICS_TIME_LIMIT.as_millis()
    );
    let problem = Problem::new(Status::GatewayTimeout, message)
        .with_remedy(
            "it may be busy or dead; 'last_known' has what it said before, and ?max_age_ms=N accepts such values at once",
        )
        .with_last_known(reading.into());
    Some(problem.into())
}

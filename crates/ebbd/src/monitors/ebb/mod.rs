//! Ebb's monitors, over their API (docs/openapi.json).
//!
//! A balloon and a pause get leases there: the monitor undoes them itself when they are not
//! renewed. What takes time (`park`, `trim`, `reclaim`, a stop) has a connection of its own.

mod stop;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ebb_host_policy::{Action, Balloon, Mean, Statistics};
use hyper::Method;
use serde::Deserialize;
use serde_json::{Value, json};

use stop::Stop;

use super::http::Http;
use super::job::Job;
use super::process::Process;
use super::{Seen, Trouble};

/// What costs the monitor more is asked for once in so many looks.
const RARELY: u64 = 5;
/// The longest time of a trim, a park or a reclaim.
const JOB_LIMIT: Duration = Duration::from_secs(60);

/// A connection with a monitor of this project.
#[derive(Debug)]
pub struct Ebb {
    http: Http,
    path: PathBuf,
    /// How often it was looked at.
    looks: u64,
    machine: Machine,
    statistics: Option<Statistics>,
    /// A park that is given up is cancelled, and the guest gets its memory back.
    job: Job,
    stop: Option<Stop>,
}

/// The part of `GET /vm` that is used.
#[derive(Debug, Default, Deserialize)]
struct Machine {
    state: String,
    memory_bytes: u64,
}

/// The part of `GET /balloon` that is used.
#[derive(Debug, Deserialize)]
struct BalloonInfo {
    target_bytes: u64,
    actual_bytes: u64,
    state: String,
    negotiated_features: Vec<String>,
}

/// `GET /balloon/statistics`.
#[derive(Debug, Deserialize)]
struct Said {
    age_ms: Option<u64>,
    statistics: SaidValues,
}

/// The refusal of a guest that has not answered in time.
#[derive(Debug, Deserialize)]
struct Outdated {
    error: LastKnown,
}

#[derive(Debug, Deserialize)]
struct LastKnown {
    last_known: Said,
}

#[derive(Debug, Deserialize)]
struct SaidValues {
    total_memory_bytes: Option<u64>,
    available_memory_bytes: Option<u64>,
    free_memory_bytes: Option<u64>,
    disk_caches_bytes: Option<u64>,
    major_faults: Option<u64>,
    swap_out_bytes: Option<u64>,
    oom_kills: Option<u64>,
}

impl Ebb {
    /// Uses a connection with the monitor behind the socket `path`.
    pub(super) fn new(http: Http, path: &Path) -> Self {
        let (path, machine) = (path.to_owned(), Machine::default());
        Self { http, path, looks: 0, machine, statistics: None, job: Job::default(), stop: None }
    }

    pub(super) fn process(&self) -> Arc<Process> {
        self.http.process()
    }

    /// Machines can be stopped, with their snapshots in this directory.
    pub(super) fn keep_in(&mut self, directory: &Path) {
        self.stop = Stop::new(&self.path, directory);
    }

    /// Whether it is being stopped.
    pub(super) fn is_stopping(&self) -> bool {
        self.job.is_stopping()
    }

    pub(super) async fn look(&mut self, now_ms: u64, fresh_ms: u64) -> Result<Seen, Trouble> {
        if self.looks.is_multiple_of(RARELY) || !self.is_running() {
            // It counts the resident pages, which takes milliseconds.
            self.machine = self.http.get("/vm").await?;
        }
        self.looks += 1;
        let answer = self.http.ask(Method::GET, "/balloon", None).await?;
        let balloon: Option<BalloonInfo> =
            if answer.status == 404 { None } else { Some(answer.document()?) };
        let balloon = balloon.filter(|balloon| balloon.state != "driver_absent");
        let is_old = |said: &Statistics| said.taken_ms + fresh_ms <= now_ms;
        if balloon.is_some() && self.is_running() && self.statistics.as_ref().is_none_or(is_old) {
            self.statistics = self.ask_statistics(now_ms, fresh_ms).await?;
        }
        let mut means = vec![Mean::Trim, Mean::Pause];
        let has = |name: &str| {
            let features = balloon.iter().flat_map(|balloon| &balloon.negotiated_features);
            features.into_iter().any(|feature| feature == name)
        };
        if balloon.is_some() {
            means.extend([Mean::Balloon, Mean::Park]);
        }
        if has("page_reporting") {
            means.push(Mean::Reporting);
        }
        if self.stop.is_some() && self.job.may_stop() {
            means.push(Mean::Stop);
        }
        if has("host_requests") {
            means.push(Mean::Reclaim);
        }
        Ok(Seen {
            size_bytes: self.machine.memory_bytes,
            is_paused: !self.is_running(),
            balloon: balloon.map(|BalloonInfo { target_bytes, actual_bytes, .. }| Balloon {
                target_bytes,
                actual_bytes,
            }),
            statistics: self.statistics,
            means: means.into_iter().collect(),
        })
    }

    fn is_running(&self) -> bool {
        self.machine.state == "running"
    }

    /// The guest's statistics; the old ones if it does not answer.
    async fn ask_statistics(
        &mut self,
        now_ms: u64,
        fresh_ms: u64,
    ) -> Result<Option<Statistics>, Trouble> {
        let target = format!("/balloon/statistics?max_age_ms={fresh_ms}");
        let answer = self.http.ask(Method::GET, &target, None).await?;
        let said = if answer.status == 200 {
            answer.body()?
        } else {
            match answer.body() {
                Ok(Outdated { error: LastKnown { last_known } }) => last_known,
                Err(_) => return Ok(self.statistics),
            }
        };
        let Said { age_ms, statistics: said } = said;
        Ok(age_ms.map(|age_ms| Statistics {
            taken_ms: now_ms.saturating_sub(age_ms),
            total_bytes: said.total_memory_bytes,
            available_bytes: said.available_memory_bytes,
            free_bytes: said.free_memory_bytes,
            caches_bytes: said.disk_caches_bytes,
            major_faults: said.major_faults,
            swap_out_bytes: said.swap_out_bytes,
            oom_kills: said.oom_kills,
        }))
    }

    pub(super) async fn act(&mut self, action: Action, lease: Duration) -> Result<(), Trouble> {
        let lease_ms = u64::try_from(lease.as_millis()).unwrap_or(u64::MAX);
        let (target, body) = match action {
            Action::Balloon { target_bytes: 0 } => ("/balloon", json!({ "target_bytes": 0 })),
            Action::Balloon { target_bytes } => {
                // A whole number of pages.
                let target_bytes = target_bytes & !0xfff;
                ("/balloon", json!({ "target_bytes": target_bytes, "lease_ms": lease_ms }))
            }
            Action::Pause { for_ms } => ("/vm/pause", json!({ "lease_ms": for_ms })),
            Action::Resume if self.is_stopping() => {
                return Err(Trouble::Refused("it is being stopped".to_owned()));
            }
            Action::Resume => ("/vm/resume", Value::Null),
            Action::Reclaim => return self.start("/balloon/reclaim", &Value::Null),
            Action::Trim => return self.start("/vm/trim", &Value::Null),
            Action::Park => return self.start("/vm/park", &json!({ "timeout_ms": 30_000 })),
            Action::Stop => return self.stop(),
        };
        let body = (!body.is_null()).then_some(&body);
        let answer = self.http.ask(Method::PUT, target, body).await?;
        // The state is asked for again with the next look.
        self.looks = 0;
        answer.accepted()
    }

    /// Begins a request that takes time.
    fn start(&mut self, target: &'static str, body: &Value) -> Result<(), Trouble> {
        let (path, body) = (self.path.clone(), body.clone());
        self.job.begin(self.name(), JOB_LIMIT, async move {
            let mut http = Http::connect(&path).await?;
            let body = (!body.is_null()).then_some(&body);
            http.ask(Method::PUT, target, body).await?.accepted()
        })
    }

    fn stop(&mut self) -> Result<(), Trouble> {
        let stop = self.stop.clone().ok_or(Trouble::Unable)?;
        let size_bytes = self.machine.memory_bytes;
        self.job.stop(self.name(), async move { stop.run(size_bytes).await })
    }

    fn name(&self) -> String {
        self.path.display().to_string()
    }
}

//! Cloud Hypervisor, over the HTTP API on its socket (`--api-socket PATH`).
//!
//! Facts of Cloud Hypervisor 53 (vmm/src/api/openapi/cloud-hypervisor.yaml, docs/balloon.md):
//!
//! - Nothing is undone when this program dies ([watchdog](crate::watchdog)).
//! - `desired_balloon` is the size of the balloon, in bytes. It is not compared with the machine's
//!   memory, and its pages are cut to 32 bits, so the limit is checked here. A reboot keeps it.
//! - There are no statistics of the balloon; `vm.counters` has none either. The
//!   [policy](ebb_host_policy) never inflates the balloon of a guest that says nothing, and it has
//!   no ceiling. What is left is to watch the machine, to count it in `fit`, and its guest's own
//!   reports of free pages (`free_page_reporting=on`). A balloon that was set when the machine was
//!   made is given back as any other whose lease nothing renews, unless the machine is held.
//! - `memory_actual_size` is what the balloon leaves of the memory, so the size that the balloon
//!   has reached is the difference. Memory that a guest has not plugged yet counts as taken.
//! - Whether the guest has a driver cannot be seen.
//! - A pause of a paused machine is refused, and so is everything while it migrates. A pause that
//!   another client has begun is not ended here, except by [`undo`](super::undo).
//! - Before `vm.create` there is no machine, and `vm.info` is refused.
//! - Connections stay open, ten at most. One more is answered with status 503 before it has asked.

use std::sync::Arc;

use ebb_host_policy::{Balloon, Mean, Means};
use hyper::Method;
use serde::Deserialize;
use serde_json::{Value, json};

use super::foreign::{Condition, Foreign, Pause};
use super::http::Http;
use super::process::Process;
use super::{Seen, Trouble};

/// Pages of the balloon (virtio 1.3 section 5.5.6).
const PAGE_BYTES: u64 = 4096;

/// A connection with a Cloud Hypervisor.
#[derive(Debug)]
pub struct CloudHypervisor {
    http: Http,
    pause: Pause,
}

/// The part of `vm.info` that is used: sizes in bytes.
#[derive(Debug, Deserialize)]
struct Info {
    config: Config,
    state: State,
    /// What the balloon leaves.
    memory_actual_size: u64,
}

#[derive(Debug, Deserialize)]
struct Config {
    memory: Memory,
    balloon: Option<BalloonConfig>,
}

#[derive(Debug, Deserialize)]
struct Memory {
    size: u64,
    hotplugged_size: Option<u64>,
    zones: Option<Vec<Zone>>,
}

#[derive(Debug, Deserialize)]
struct Zone {
    size: u64,
    hotplugged_size: Option<u64>,
}

#[derive(Debug, Deserialize)]
struct BalloonConfig {
    /// The target.
    size: u64,
    #[serde(default)]
    free_page_reporting: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
enum State {
    Running,
    Paused,
    /// Not started, ended, or in a debugger.
    #[serde(other)]
    Other,
}

impl Info {
    /// All memory, in bytes.
    fn size_bytes(&self) -> u64 {
        let Memory { size, hotplugged_size, zones } = &self.config.memory;
        let zones = zones.iter().flatten().map(|zone| (zone.size, zone.hotplugged_size));
        std::iter::once((*size, *hotplugged_size))
            .chain(zones)
            .flat_map(|(size, hotplugged_size)| [size, hotplugged_size.unwrap_or(0)])
            .fold(0, u64::saturating_add)
    }
}

impl CloudHypervisor {
    pub(super) fn new(http: Http) -> Self {
        Self { http, pause: Pause::default() }
    }

    pub(super) fn process(&self) -> Arc<Process> {
        self.http.process()
    }

    pub(super) async fn look(&mut self) -> Result<Seen, Trouble> {
        let info = self.info().await?;
        let size_bytes = info.size_bytes();
        let is_started = info.state != State::Other;
        let device = info.config.balloon.as_ref().filter(|_| is_started);
        let mut means = Vec::new();
        if is_started {
            means.push(Mean::Pause);
        }
        if let Some(device) = device {
            means.push(Mean::Balloon);
            if device.free_page_reporting {
                means.push(Mean::Reporting);
            }
        }
        Ok(Seen {
            size_bytes,
            is_paused: info.state != State::Running,
            balloon: device.map(|device| Balloon {
                target_bytes: device.size,
                actual_bytes: size_bytes.saturating_sub(info.memory_actual_size),
            }),
            statistics: None,
            means: means.into_iter().collect::<Means>(),
        })
    }

    async fn info(&mut self) -> Result<Info, Trouble> {
        self.http.get("/api/v1/vm.info").await
    }

    async fn put(&mut self, name: &str, body: Option<&Value>) -> Result<(), Trouble> {
        let target = format!("/api/v1/{name}");
        self.http.ask(Method::PUT, &target, body).await?.accepted()
    }
}

impl Foreign for CloudHypervisor {
    async fn condition(&mut self) -> Result<Condition, Trouble> {
        Ok(match self.info().await?.state {
            State::Running => Condition::Running,
            State::Paused => Condition::Paused,
            State::Other => Condition::Other(not_started()),
        })
    }

    async fn stand_still(&mut self) -> Result<(), Trouble> {
        self.put("vm.pause", None).await
    }

    async fn go_on(&mut self) -> Result<(), Trouble> {
        self.put("vm.resume", None).await
    }

    async fn set_balloon(&mut self, target_bytes: u64) -> Result<(), Trouble> {
        // It is deflated in every state: a machine that is shut down keeps the target.
        if target_bytes > 0 {
            let info = self.info().await?;
            if info.state == State::Other {
                return Err(not_started());
            }
            if target_bytes >= info.size_bytes() {
                return Err(Trouble::Refused("the machine is not that large".to_owned()));
            }
        }
        let desired = target_bytes / PAGE_BYTES * PAGE_BYTES;
        self.put("vm.resize", Some(&json!({ "desired_balloon": desired }))).await
    }

    fn pause(&mut self) -> &mut Pause {
        &mut self.pause
    }
}

fn not_started() -> Trouble {
    Trouble::Refused("the machine does not run".to_owned())
}

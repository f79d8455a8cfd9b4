//! Firecracker, over the HTTP API on its socket (`--api-sock PATH`), and this project's monitor
//! with the same API (`ebb firecracker`).
//!
//! Facts of Firecracker 1.17 (src/firecracker/swagger/firecracker.yaml, docs/ballooning.md):
//!
//! - Nothing is undone when this program dies ([watchdog](crate::watchdog)).
//! - `amount_mib` is the size of the balloon, in MiB. It is rounded down: no more is taken than was
//!   ordered. Memory that can be plugged counts for Firecracker's limit before it is plugged, so
//!   the limit is checked here.
//! - The guest is asked for statistics only if `stats_polling_interval_s` is above 0 at its start;
//!   they cannot be switched on later. Without them, neither the size that the balloon has reached
//!   nor a driver can be seen: such a machine is shown without a balloon, and its own is left
//!   alone. An interval of a few seconds is right; one above `stale_ms` makes statistics useless.
//! - Old statistics are kept, also in snapshots, and have no time. It is inferred (`record.rs`).
//! - `GET /balloon/statistics` has values of the guest once its driver has answered. A driver is
//!   there if it has, or if it has inflated the balloon. (Firecracker ends with its guest: there
//!   is no reset.)
//! - A pause is not counted: one client's `Resumed` ends that of another, too. A pause that another
//!   client has begun is not ended here, except by [`undo`](super::undo). But one that another
//!   client asks for while this program's lasts looks like this program's.
//! - Hints of free pages are not used: Firecracker's documentation warns that guests may reuse a
//!   page before it is discarded.
//! - Connections stay open, ten at most. One more is answered with status 503 before it has asked.
//! - Each request is written to the log, so what cannot change is asked for once.

mod record;

use std::sync::Arc;

use ebb_host_policy::{Balloon, Mean, Means, Statistics};
use hyper::Method;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::json;

use super::foreign::{Condition, Foreign, Pause};
use super::http::{Answer, Http};
use super::process::Process;
use super::{Seen, Trouble};
use record::{Look, Record};

const MIB: u64 = 1 << 20;
/// Pages of the balloon (virtio 1.3 section 5.5.6).
const PAGE_BYTES: u64 = 4096;

/// A connection with a Firecracker.
#[derive(Debug)]
pub struct Firecracker {
    http: Http,
    /// Known once the machine was started.
    fixed: Option<Fixed>,
    record: Option<Record>,
    pause: Pause,
}

/// What does not change after the start.
#[derive(Clone, Copy, Debug)]
struct Fixed {
    /// Memory that it was started with.
    boot_bytes: u64,
    hotplug: Hotplug,
    balloon: Option<Options>,
}

/// Whether memory can be plugged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hotplug {
    Offered,
    Absent,
}

/// `GET /`.
#[derive(Debug, Deserialize)]
struct Instance {
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
enum State {
    #[serde(rename = "Not started")]
    NotStarted,
    Running,
    Paused,
}

/// The part of `GET /machine-config` that is used.
#[derive(Debug, Deserialize)]
struct MachineConfig {
    mem_size_mib: u64,
}

/// The part of `GET /hotplug/memory` that is used.
#[derive(Debug, Deserialize)]
struct Plugged {
    plugged_size_mib: u64,
}

/// The part of `GET /balloon` that is used.
#[derive(Clone, Copy, Debug, Deserialize)]
struct Options {
    #[serde(default)]
    stats_polling_interval_s: u64,
    /// Since Firecracker 1.14.
    #[serde(default)]
    free_page_reporting: bool,
}

/// The sizes in `GET /balloon/statistics`.
#[derive(Clone, Copy, Debug, Deserialize)]
struct Pages {
    target_pages: u64,
    actual_pages: u64,
}

/// The rest of it: what the guest has said, each value at some time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
struct Values {
    swap_in: Option<u64>,
    swap_out: Option<u64>,
    major_faults: Option<u64>,
    minor_faults: Option<u64>,
    free_memory: Option<u64>,
    total_memory: Option<u64>,
    available_memory: Option<u64>,
    disk_caches: Option<u64>,
    oom_kill: Option<u64>,
}

/// Whether an answer to `GET /` describes a machine behind Firecracker's API.
pub(super) fn is_instance(answer: &Answer) -> bool {
    answer.document::<Instance>().is_ok()
}

impl Firecracker {
    pub(super) fn new(http: Http) -> Self {
        Self { http, fixed: None, record: None, pause: Pause::default() }
    }

    pub(super) fn process(&self) -> Arc<Process> {
        self.http.process()
    }

    pub(super) async fn look(&mut self, now_ms: u64) -> Result<Seen, Trouble> {
        let state = self.state().await?;
        if state == State::NotStarted {
            return Ok(Seen {
                size_bytes: self.boot_bytes().await?,
                is_paused: true,
                balloon: None,
                statistics: None,
                means: Means::default(),
            });
        }
        let fixed = self.fixed().await?;
        let size_bytes = self.size_bytes(fixed).await?;
        let said = match fixed.balloon {
            Some(Options { stats_polling_interval_s: 1.., .. }) => self.said().await?,
            _ => None,
        };
        if let Some((_, values)) = said {
            self.note(values, state, now_ms)?;
        }
        let mut means = vec![Mean::Pause];
        if said.is_some() {
            means.push(Mean::Balloon);
        }
        if fixed.balloon.is_some_and(|options| {
            options.free_page_reporting && (said.is_some() || options.stats_polling_interval_s == 0)
        }) {
            means.push(Mean::Reporting);
        }
        Ok(Seen {
            size_bytes,
            is_paused: state != State::Running,
            balloon: said.map(|(pages, _)| Balloon {
                target_bytes: pages.target_pages.saturating_mul(PAGE_BYTES),
                actual_bytes: pages.actual_pages.saturating_mul(PAGE_BYTES),
            }),
            statistics: said.and_then(|(_, values)| self.statistics(values)),
            means: means.into_iter().collect(),
        })
    }

    async fn state(&mut self) -> Result<State, Trouble> {
        let Instance { state } = self.http.get("/").await?;
        Ok(state)
    }

    async fn boot_bytes(&mut self) -> Result<u64, Trouble> {
        let MachineConfig { mem_size_mib } = self.http.get("/machine-config").await?;
        Ok(mem_size_mib.saturating_mul(MIB))
    }

    /// What does not change; only for a machine that was started.
    async fn fixed(&mut self) -> Result<Fixed, Trouble> {
        if let Some(fixed) = self.fixed {
            return Ok(fixed);
        }
        let boot_bytes = self.boot_bytes().await?;
        let balloon = self.device("/balloon").await?;
        let plugged: Option<Plugged> = self.device("/hotplug/memory").await?;
        let hotplug = if plugged.is_some() { Hotplug::Offered } else { Hotplug::Absent };
        Ok(*self.fixed.insert(Fixed { boot_bytes, hotplug, balloon }))
    }

    /// The document about a device; `None` without it, or if this version does not know its kind.
    async fn device<T: DeserializeOwned>(&mut self, target: &str) -> Result<Option<T>, Trouble> {
        let answer = self.http.ask(Method::GET, target, None).await?;
        if matches!(answer.status, 400 | 404) {
            return Ok(None);
        }
        answer.document().map(Some)
    }

    async fn size_bytes(&mut self, fixed: Fixed) -> Result<u64, Trouble> {
        if fixed.hotplug == Hotplug::Absent {
            return Ok(fixed.boot_bytes);
        }
        let Plugged { plugged_size_mib } = self.http.get("/hotplug/memory").await?;
        Ok(fixed.boot_bytes.saturating_add(plugged_size_mib.saturating_mul(MIB)))
    }

    /// What the device and the guest say; `None` without a driver.
    async fn said(&mut self) -> Result<Option<(Pages, Values)>, Trouble> {
        let answer = self.http.ask(Method::GET, "/balloon/statistics", None).await?;
        let (pages, values): (Pages, Values) = (answer.document()?, answer.document()?);
        let has_driver = pages.actual_pages > 0 || values != Values::default();
        Ok(has_driver.then_some((pages, values)))
    }

    fn note(&mut self, values: Values, state: State, now_ms: u64) -> Result<(), Trouble> {
        let usage = self.process().usage();
        let usage = usage.map_err(|error| Trouble::Gone(error.to_string()))?;
        let look = Look { at_ms: now_ms, state, processor_ms: usage.processor_ms };
        self.record = Some(match self.record.take() {
            Some(record) => record.next(values, look),
            None => Record::first(values, look),
        });
        Ok(())
    }

    /// The values, if their time is known.
    fn statistics(&self, values: Values) -> Option<Statistics> {
        Some(Statistics {
            taken_ms: self.record.as_ref()?.taken_ms?,
            total_bytes: values.total_memory,
            available_bytes: values.available_memory,
            free_bytes: values.free_memory,
            caches_bytes: values.disk_caches,
            major_faults: values.major_faults,
            swap_out_bytes: values.swap_out,
            oom_kills: values.oom_kill,
        })
    }

    async fn set_state(&mut self, state: &str) -> Result<(), Trouble> {
        let body = json!({ "state": state });
        self.http.ask(Method::PATCH, "/vm", Some(&body)).await?.accepted()
    }
}

impl Foreign for Firecracker {
    async fn condition(&mut self) -> Result<Condition, Trouble> {
        Ok(match self.state().await? {
            State::Running => Condition::Running,
            State::Paused => Condition::Paused,
            State::NotStarted => Condition::Other(not_started()),
        })
    }

    async fn stand_still(&mut self) -> Result<(), Trouble> {
        self.set_state("Paused").await
    }

    async fn go_on(&mut self) -> Result<(), Trouble> {
        self.set_state("Resumed").await
    }

    async fn set_balloon(&mut self, target_bytes: u64) -> Result<(), Trouble> {
        if target_bytes > 0 {
            if self.state().await? == State::NotStarted {
                return Err(not_started());
            }
            let fixed = self.fixed().await?;
            if target_bytes >= self.size_bytes(fixed).await? {
                return Err(Trouble::Refused("the machine is not that large".to_owned()));
            }
        }
        let body = json!({ "amount_mib": target_bytes / MIB });
        self.http.ask(Method::PATCH, "/balloon", Some(&body)).await?.accepted()
    }

    fn pause(&mut self) -> &mut Pause {
        &mut self.pause
    }
}

fn not_started() -> Trouble {
    Trouble::Refused("the machine is not started".to_owned())
}

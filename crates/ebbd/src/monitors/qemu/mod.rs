//! QEMU, over a QMP socket (`-qmp unix:PATH,server=on,wait=off`).
//!
//! A QMP socket serves one client at a time: the next one is greeted when the first has left. So
//! this program needs a socket of its own; one machine may have many. It has to be made by QEMU:
//! libvirt makes its own, and then the process behind a connection seems to be libvirt's.
//!
//! QEMU differs from other monitors:
//!
//! - Nothing is undone when this program dies ([watchdog](crate::watchdog)).
//! - `balloon` and `query-balloon` use the size of the rest, not of the balloon.
//! - The target cannot be read. The one that this connection has set last is reported, else the
//!   size that the balloon has reached.
//! - There is no stable way to ask whether the guest has a driver: without one, `query-balloon`
//!   answers as for an empty balloon, and a target is kept until a driver comes. A driver is there
//!   if it has sent statistics since the machine's reset, or has inflated the balloon. (QEMU keeps
//!   the size over a reset, until the next driver corrects it.)
//! - A stopped machine that migrates stays stopped at its destination. So it is not stopped while
//!   it migrates, and its balloon is only deflated.
//! - `cont` also starts machines that wait for a debugger, that had an error, or that run elsewhere
//!   after a migration. So it is used in the state `paused` only.

mod connection;
pub mod documents;
pub mod protocol;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ebb_host_policy::{Balloon, Mean, Statistics};
use serde_json::{Value, json};
use tokio::net::UnixStream;

use super::foreign::{Condition, Foreign, Pause};
use super::process::Process;
use super::{Seen, Trouble};
use connection::Connection;
use documents::{GuestStats, Moment, RunState, Sizes, balloon_among, is_migrating};

/// How long a server may take to greet.
const GREETING_LIMIT: Duration = Duration::from_millis(200);
/// How often QEMU asks the guest for statistics, unless it was told before.
const POLLING_S: u64 = 2;
/// Statistics of this age mean that QEMU may not be asking for them.
const OLD_MS: u64 = 10_000;
/// The containers of devices: those with names, and the others.
const CONTAINERS: [&str; 2] = ["/machine/peripheral", "/machine/peripheral-anon"];
/// Units of targets (QEMU hw/virtio/virtio-balloon.c).
const PAGE_BYTES: u64 = 4096;

/// A connection with a QEMU.
#[derive(Debug)]
pub struct Qemu {
    connection: Connection,
    process: Arc<Process>,
    /// The balloon, once it was found.
    device: Option<Device>,
    /// What this connection has set last.
    target_bytes: Option<u64>,
    moment: Option<Moment>,
    pause: Pause,
}

/// A virtio-balloon.
#[derive(Debug)]
struct Device {
    path: String,
    reporting: Reporting,
}

/// Whether a guest may report free pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reporting {
    Offered,
    Absent,
}

/// Whether a server speaks first, as QMP's do.
pub(super) async fn greets(stream: &UnixStream) -> bool {
    tokio::time::timeout(GREETING_LIMIT, stream.readable()).await.is_ok()
}

/// Whether a process calls itself QEMU, whatever it does with its socket.
pub(super) fn is_name(process: &Process) -> bool {
    process.name().starts_with("qemu")
}

/// Why there is no greeting.
pub(super) fn busy() -> Trouble {
    Trouble::Refused("no greeting: a QMP socket serves one client, and it has another".to_owned())
}

impl Qemu {
    /// Connects with the QEMU behind a socket.
    ///
    /// # Errors
    /// [`Trouble`], also if the server is something else or has another client.
    pub async fn connect(path: &Path) -> Result<Self, Trouble> {
        let (stream, process) = super::connect(path).await?;
        if !greets(&stream).await {
            return Err(busy());
        }
        Self::start(stream, process).await
    }

    /// Begins with the greeting.
    pub(super) async fn start(stream: UnixStream, process: Arc<Process>) -> Result<Self, Trouble> {
        let connection = Connection::start(stream).await?;
        Ok(Self {
            connection,
            process,
            device: None,
            target_bytes: None,
            moment: None,
            pause: Pause::default(),
        })
    }

    pub(super) fn process(&self) -> Arc<Process> {
        self.process.clone()
    }

    pub(super) async fn look(&mut self, now_ms: u64) -> Result<Seen, Trouble> {
        let state = self.state().await?;
        let sizes = self.sizes().await?;
        let inflated_bytes = self.inflated(sizes).await?;
        let said = match inflated_bytes {
            Some(_) => self.guest_stats().await?,
            None => None,
        };
        let statistics = said.and_then(|said| self.place(said, now_ms));
        let is_old = |said: Statistics| said.taken_ms.saturating_add(OLD_MS) <= now_ms;
        if state == RunState::Running && statistics.is_none_or(is_old) {
            self.poll_statistics().await?;
        }
        let has_answered = said.is_some_and(|said| said.last_update.is_some());
        let actual_bytes = inflated_bytes.filter(|bytes| has_answered || *bytes > 0);
        let mut means = Vec::new();
        if actual_bytes.is_some()
            && self.device.as_ref().is_some_and(|it| it.reporting == Reporting::Offered)
        {
            means.push(Mean::Reporting);
        }
        if !matches!(state, RunState::Other(_)) && !self.migrates().await? {
            means.push(Mean::Pause);
            if actual_bytes.is_some() {
                means.push(Mean::Balloon);
            }
        }
        Ok(Seen {
            size_bytes: sizes.all,
            is_paused: state != RunState::Running,
            balloon: actual_bytes.map(|actual_bytes| Balloon {
                target_bytes: self.target_bytes.unwrap_or(actual_bytes),
                actual_bytes,
            }),
            statistics,
            means: means.into_iter().collect(),
        })
    }

    /// The answer to a request; an error is [`Trouble::Refused`].
    async fn get(&mut self, command: &str) -> Result<Value, Trouble> {
        Ok(self.connection.ask(command, Value::Null).await??)
    }

    async fn state(&mut self) -> Result<RunState, Trouble> {
        RunState::read(&self.get("query-status").await?)
    }

    async fn migrates(&mut self) -> Result<bool, Trouble> {
        Ok(is_migrating(&self.get("query-migrate").await?))
    }

    async fn sizes(&mut self) -> Result<Sizes, Trouble> {
        let summary = self.get("query-memory-size-summary").await?;
        Sizes::read(&summary, &self.get("query-memory-devices").await?)
    }

    /// The size that the balloon has reached; `None` without a device.
    async fn inflated(&mut self, sizes: Sizes) -> Result<Option<u64>, Trouble> {
        let answer = self.connection.ask("query-balloon", Value::Null).await?;
        // Without a device it is refused.
        let Ok(answer) = answer else { return Ok(None) };
        let rest = answer["actual"].as_u64();
        let rest = rest.ok_or_else(|| Trouble::Nonsense("query-balloon has no size".to_owned()))?;
        Ok(Some(sizes.of_balloon.saturating_sub(rest)))
    }

    /// A property of the balloon; `None` if there is none.
    async fn property(&mut self, path: &str, name: &str) -> Result<Option<Value>, Trouble> {
        let arguments = json!({ "path": path, "property": name });
        Ok(self.connection.ask("qom-get", arguments).await?.ok())
    }

    /// What the guest has last said; `None` if the device is not found.
    async fn guest_stats(&mut self) -> Result<Option<GuestStats>, Trouble> {
        if self.device.is_none() {
            self.device = self.find().await?;
        }
        let Some(Device { path, .. }) = &self.device else { return Ok(None) };
        let path = path.clone();
        let Some(answer) = self.property(&path, "guest-stats").await? else {
            // It was unplugged.
            self.device = None;
            return Ok(None);
        };
        Ok(Some(GuestStats::read(&answer)?))
    }

    async fn find(&mut self) -> Result<Option<Device>, Trouble> {
        for container in CONTAINERS {
            let children = self.connection.ask("qom-list", json!({ "path": container })).await?;
            let Some(path) = balloon_among(container, &children?) else { continue };
            // Before QEMU 5.1 there is no such property.
            let reporting = match self.property(&path, "free-page-reporting").await? {
                Some(Value::Bool(true)) => Reporting::Offered,
                _ => Reporting::Absent,
            };
            return Ok(Some(Device { path, reporting }));
        }
        Ok(None)
    }

    /// Statistics with their moment, if that is known.
    fn place(&mut self, said: GuestStats, now_ms: u64) -> Option<Statistics> {
        let real = SystemTime::now().duration_since(UNIX_EPOCH);
        let real_s = real.map_or(0, |since| since.as_secs());
        let earlier = self.moment.take();
        self.moment = said.last_update.map(|last| Moment::of(last, earlier, real_s, now_ms));
        Some(said.taken(self.moment?.taken_ms?))
    }

    /// Makes QEMU ask the guest for statistics, unless it does.
    async fn poll_statistics(&mut self) -> Result<(), Trouble> {
        const PROPERTY: &str = "guest-stats-polling-interval";
        let Some(Device { path, .. }) = &self.device else { return Ok(()) };
        let path = path.clone();
        if self.property(&path, PROPERTY).await? == Some(json!(0)) {
            let arguments = json!({ "path": path, "property": PROPERTY, "value": POLLING_S });
            self.connection.ask("qom-set", arguments).await??;
        }
        Ok(())
    }

    /// What a balloon of this size leaves to a machine that may be inflated now.
    async fn rest(&mut self, target_bytes: u64) -> Result<u64, Trouble> {
        match self.state().await? {
            RunState::Running | RunState::Paused => {}
            state @ RunState::Other(_) => return Err(wrong(&state)),
        }
        if self.migrates().await? {
            return Err(migrating());
        }
        match self.sizes().await?.of_balloon.checked_sub(target_bytes) {
            None | Some(0) => Err(Trouble::Refused("the machine is not that large".to_owned())),
            Some(rest) => Ok(rest),
        }
    }
}

impl Foreign for Qemu {
    async fn condition(&mut self) -> Result<Condition, Trouble> {
        Ok(match self.state().await? {
            RunState::Running => Condition::Running,
            RunState::Paused => Condition::Paused,
            state @ RunState::Other(_) => Condition::Other(wrong(&state)),
        })
    }

    async fn stand_still(&mut self) -> Result<(), Trouble> {
        if self.migrates().await? {
            return Err(migrating());
        }
        self.get("stop").await.map(drop)
    }

    async fn go_on(&mut self) -> Result<(), Trouble> {
        self.get("cont").await.map(drop)
    }

    async fn set_balloon(&mut self, target_bytes: u64) -> Result<(), Trouble> {
        let target_bytes = target_bytes / PAGE_BYTES * PAGE_BYTES;
        let rest = match target_bytes {
            // In every state: it does no harm. QEMU reduces it to the machine's size, whatever that
            // is by then.
            0 => i64::MAX.unsigned_abs(),
            _ => self.rest(target_bytes).await?,
        };
        self.connection.ask("balloon", json!({ "value": rest })).await??;
        self.target_bytes = Some(target_bytes);
        Ok(())
    }

    fn pause(&mut self) -> &mut Pause {
        &mut self.pause
    }
}

fn wrong(state: &RunState) -> Trouble {
    Trouble::Refused(format!("the machine's state is '{state}'"))
}

fn migrating() -> Trouble {
    Trouble::Refused("the machine migrates".to_owned())
}

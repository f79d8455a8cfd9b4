//! Asks the daemon or monitors, each in a thread of its own: one that hangs delays no other, and no
//! key.

use std::path::Path;
use std::time::{Duration, Instant};

use ebb_host_policy::report::Status;
use ebb_host_policy::{Host, Swap};
use ebb_vmm::api::{BalloonInfo, Client, ClientError, StatisticsDocument, VmInfo};
use rustix::time::{ClockId, clock_gettime};

use super::documents::{Documents, Report};
use crate::host::of_the_daemon;

/// Time limit of an answer. A monitor takes up to a second for statistics.
const TIME_LIMIT: Duration = Duration::from_secs(3);

/// A client of a daemon or a monitor.
pub(super) fn client(socket: &Path) -> Client {
    Client::new(socket, TIME_LIMIT)
}

/// The daemon's status.
///
/// # Errors
/// Why there is none.
pub(super) fn daemon(client: &Client) -> anyhow::Result<Status> {
    client.get("/status").map_err(of_the_daemon)
}

/// A monitor's documents. Statistics up to this age are accepted.
///
/// # Errors
/// Why there are none.
pub(super) fn monitor(client: &Client, max_age: Duration) -> Result<Documents, ClientError> {
    let vm: VmInfo = client.get("/vm")?;
    let (balloon, statistics) = if vm.balloon.is_some() {
        let balloon: BalloonInfo = client.get("/balloon")?;
        (Some(balloon), statistics(client, max_age)?)
    } else {
        (None, None)
    };
    Ok(Documents { at_ms: now_ms(), vm, balloon, statistics })
}

/// What the guest says; the last that it said if it does not answer.
fn statistics(
    client: &Client,
    max_age: Duration,
) -> Result<Option<StatisticsDocument>, ClientError> {
    let max_age_ms = max_age.as_millis();
    match client.get(&format!("/balloon/statistics?max_age_ms={max_age_ms}")) {
        Ok(document) => Ok(Some(document)),
        Err(ClientError::Refused { detail, .. }) => Ok(detail.last_known.map(|known| *known)),
        Err(error) => Err(error),
    }
}

/// This host's memory; `None` if the kernel does not tell it.
pub(super) fn host() -> Option<Host> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let size = |name| ebb_program::of_meminfo(&text, name);
    let swap = size("SwapTotal").filter(|total| *total > 0).map(|total_bytes| Swap {
        total_bytes,
        used_bytes: total_bytes.saturating_sub(size("SwapFree").unwrap_or(0)),
        out_bytes: 0,
    });
    let (total_bytes, available_bytes) = (size("MemTotal")?, size("MemAvailable")?);
    Some(Host { total_bytes, available_bytes, swap, pressure: None })
}

/// Asks again and again, with so much time between the beginnings, until `send` fails.
pub(super) fn repeat(
    interval: Duration,
    ask: impl Fn() -> Option<Report>,
    send: impl Fn(Report) -> bool,
) {
    loop {
        let next = Instant::now() + interval;
        if let Some(report) = ask()
            && !send(report)
        {
            return;
        }
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
    }
}

/// The time since the host's start, as a daemon reports it.
fn now_ms() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    let ms = i128::from(now.tv_sec) * 1000 + i128::from(now.tv_nsec) / 1_000_000;
    u64::try_from(ms).unwrap_or(0)
}

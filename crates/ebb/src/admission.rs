//! Asks `ebbd` for room before a machine starts.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use ebb_host_policy::report::{Admission, Arrival};
use ebb_vmm::api::Client;

use crate::ctl::bytes;
use crate::host::{SOCKET, of_the_daemon};

/// Exit code of a machine that was not started because there is no room for it.
pub const NO_ROOM: u8 = 9;

/// Whether `ebbd` is asked before a machine starts.
#[derive(Debug, clap::Args)]
pub struct ViaArgs {
    /// Ask the `ebbd` behind this socket for room first; the word `ebbd` is /run/ebb/ebbd.sock. The
    /// machine's name is that of the file that --api names, in a directory that `ebbd` watches
    #[arg(long, value_name = "PATH", requires = "api")]
    via: Option<PathBuf>,
    /// How long to wait for room, if there is none
    #[arg(
        long,
        value_name = "SECONDS",
        requires = "via",
        default_value_t = 0,
        value_parser = clap::value_parser!(u64).range(0..=590)
    )]
    via_wait: u64,
}

impl ViaArgs {
    /// Asks for room for the machine whose API's socket will be `api`, if that is wanted.
    ///
    /// # Errors
    /// The daemon cannot be asked.
    pub fn ask(&self, api: Option<&Path>, memory_bytes: u64) -> anyhow::Result<Room> {
        match (&self.via, api) {
            (Some(via), Some(api)) => ask(via, api, memory_bytes, self.via_wait),
            _ => Ok(Room::Unasked),
        }
    }
}

/// What `ebbd` has said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    /// It was not asked.
    Unasked,
    /// There is room, which is kept for a while.
    Some,
    /// There is none; the reason was printed.
    None,
}

fn ask(via: &Path, api: &Path, memory_bytes: u64, wait_seconds: u64) -> anyhow::Result<Room> {
    let socket = if via == Path::new("ebbd") { PathBuf::from(SOCKET) } else { via.to_owned() };
    let name = api.file_stem().context("--api has no file name")?;
    let arrival = Arrival {
        machine: name.to_string_lossy().into_owned(),
        memory_bytes,
        wait_ms: 1000 * wait_seconds,
    };
    let client = Client::new(socket, Duration::from_secs(10 + wait_seconds));
    let admission: Admission = client.put_json("/admit", &arrival).map_err(of_the_daemon)?;
    if admission.is_admitted {
        return Ok(Room::Some);
    }
    eprintln!("ebb: {}", ebb_program::printable(&refusal(&arrival, &admission)));
    Ok(Room::None)
}

/// Why a machine is not admitted.
fn refusal(arrival: &Arrival, admission: &Admission) -> String {
    let Admission { before, fit, .. } = admission;
    let size = bytes(arrival.memory_bytes);
    let reason = match before {
        0 => format!(
            "machines need {} of {} on the mean, and {}",
            bytes(fit.needed_bytes),
            bytes(fit.capacity_bytes),
            fit.reason()
        ),
        1 => "another machine waits before it".to_owned(),
        before => format!("{before} machines wait before it"),
    };
    format!(
        "the host has no room for {:?} of {size}: {reason}; wait with --via-wait SECONDS, or see \
         `ebb host fit`",
        arrival.machine
    )
}

//! `ebb ctl SOCKET working-set`: records which parts of its snapshot a machine uses.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::bail;
use ebb_program::write_whole;
use ebb_vmm::api::{Client, VmInfo, WorkingSet};
use ebb_vmm::snapshot::working_set::Recorder;
use serde::Serialize;

use super::{Row, bytes, row};

/// Interval of looking, and so the precision of the order.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// Where to, and for how long.
#[derive(Debug, clap::Args)]
pub(super) struct WorkingSetArgs {
    /// The file; an existing one is replaced if it is that of a working set
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Look for so long, and note the order of the accesses: begin while the machine is paused
    /// (`ebb restore --paused`) [default: only what was accessed until now]
    #[arg(long = "for", value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(..=3600))]
    seconds: Option<u64>,
}

/// What was recorded.
#[derive(Debug, Serialize)]
pub(super) struct Recorded {
    /// The file.
    path: PathBuf,
    /// Memory that the next machine reads ahead.
    bytes: u64,
    /// Its parts.
    extents: usize,
}

/// Records, and writes the file.
pub(super) fn execute(args: &WorkingSetArgs, client: &Client) -> anyhow::Result<Recorded> {
    check_replaceable(&args.file)?;
    let end = Instant::now() + Duration::from_secs(args.seconds.unwrap_or(0));
    let mut recorder = Recorder::default();
    loop {
        recorder.add(client.get("/vm/working-set")?)?;
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break;
        }
        std::thread::sleep(left.min(LOOK_INTERVAL));
    }
    let vm: VmInfo = client.get("/vm")?;
    let set = recorder.finish(vm.memory_bytes)?;
    write_whole(&args.file, |file| Ok(serde_json::to_writer(file, &set)?))?;
    let (bytes, extents) = (set.size_bytes(), set.extents.len());
    Ok(Recorded { path: args.file.clone(), bytes, extents })
}

/// Refuses to replace a file that is not one of a working set.
fn check_replaceable(path: &Path) -> anyhow::Result<()> {
    match WorkingSet::read(path) {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(_) => bail!(
            "{} exists and is not the file of a working set, so it is not overwritten; choose \
             another name or remove it",
            path.display()
        ),
    }
}

pub(super) fn rows(recorded: &Recorded) -> Vec<Row> {
    vec![
        row("file", recorded.path.display().to_string()),
        row("memory", bytes(recorded.bytes)),
        row("parts", recorded.extents.to_string()),
    ]
}

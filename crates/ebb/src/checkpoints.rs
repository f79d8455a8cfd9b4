//! `ebb checkpoints`: the checkpoints that are kept in memory.

use std::fs::DirBuilder;
use std::io::{self, Write as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, UNIX_EPOCH};

use anyhow::{Context as _, bail};
use ebb_vmm::checkpoint::{CheckpointError, CheckpointInfo, Held};
use ebb_vmm::size::ByteSize;
use serde::Serialize;

use crate::columns::columns;

const AFTER_HELP: &str = "\
ALONE is memory that a checkpoint's process shares with no other process: what would be free without
it. It grows while the machine that it was made of, and those that were made from it, change their
memory. Only root learns it.

Checkpoints end when they are removed, with the host, and when a process is killed; machines that
were made from them go on.

Example: ebb ctl /run/ebb.sock checkpoint ready
         ebb checkpoints
         ebb checkpoints remove ready";

/// Lists the checkpoints of this user, or ends some.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER_HELP)]
pub struct Args {
    #[command(subcommand)]
    action: Option<Action>,
    /// Print one JSON document instead of a table
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Debug, clap::Subcommand)]
enum Action {
    /// List them
    List,
    /// End checkpoints; machines that were made from them go on
    Remove {
        /// Their names
        #[arg(value_name = "NAME", required = true)]
        names: Vec<String>,
    },
}

/// A line of the list.
#[derive(Debug, Serialize)]
struct Listed {
    #[serde(flatten)]
    info: CheckpointInfo,
    /// Its process.
    pid: Option<i32>,
    /// Memory that it shares with no other process, in bytes; `None` if this user may not know.
    alone_bytes: Option<u64>,
}

/// Ends the names of sockets in the directory.
const EXTENSION: &str = "sock";

/// The directory of this user's checkpoints.
fn directory() -> anyhow::Result<PathBuf> {
    let run = if rustix::process::geteuid().is_root() {
        PathBuf::from("/run")
    } else {
        let variable = std::env::var_os("XDG_RUNTIME_DIR").filter(|value| !value.is_empty());
        variable.map(PathBuf::from).context(
            "the environment variable XDG_RUNTIME_DIR, whose directory has the sockets of \
             checkpoints, is not set; set it to a directory of this user",
        )?
    };
    Ok(run.join("ebb/checkpoints"))
}

/// Path of the socket of a new checkpoint, in a directory that exists.
pub(crate) fn place(name: &str) -> anyhow::Result<PathBuf> {
    let directory = directory()?;
    let created = DirBuilder::new().recursive(true).mode(0o700).create(&directory);
    created.with_context(|| format!("cannot create {}", directory.display()))?;
    find_in(&directory, name)
}

/// Path of the socket of the checkpoint `name`.
pub(crate) fn find(name: &str) -> anyhow::Result<PathBuf> {
    find_in(&directory()?, name)
}

fn find_in(directory: &Path, name: &str) -> anyhow::Result<PathBuf> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    if name.is_empty() || name.len() > 64 || !name.bytes().all(is_plain) {
        bail!("{name:?} is no name of a checkpoint: use 1 to 64 letters, digits, `.`, `_` and `-`");
    }
    Ok(directory.join(format!("{name}.{EXTENSION}")))
}

/// Runs the command.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    match args.action {
        None | Some(Action::List) => {
            let listed = list()?;
            let mut out = io::stdout().lock();
            if args.json {
                serde_json::to_writer_pretty(&mut out, &listed)?;
                writeln!(out)?;
            } else {
                write!(out, "{}", table(&listed))?;
            }
        }
        Some(Action::Remove { names }) => {
            for name in names {
                let path = find(&name)?;
                Held::connect(&path).and_then(|held| held.end())?;
                remove_name(&path)?;
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn remove_name(path: &Path) -> anyhow::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

/// The checkpoints that answer. Names of those whose process has ended are removed.
fn list() -> anyhow::Result<Vec<Listed>> {
    let directory = directory()?;
    let entries = match std::fs::read_dir(&directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error).with_context(|| format!("{}", directory.display())),
    };
    let mut listed = Vec::new();
    for entry in entries {
        let path = entry.with_context(|| format!("{}", directory.display()))?.path();
        if path.extension().is_none_or(|extension| extension != EXTENSION) {
            continue;
        }
        match Held::connect(&path).and_then(|held| held.info()) {
            Ok((info, pid)) => {
                let pid = pid.map(rustix::process::Pid::as_raw_nonzero).map(i32::from);
                let alone_bytes = pid.and_then(alone_bytes);
                listed.push(Listed { info, pid, alone_bytes });
            }
            Err(CheckpointError::Connect { source, .. })
                if source.kind() == io::ErrorKind::ConnectionRefused =>
            {
                remove_name(&path)?;
            }
            Err(error) => tracing::warn!("{}: {error}", path.display()),
        }
    }
    listed.sort_by(|one, other| one.info.name.cmp(&other.info.name));
    Ok(listed)
}

/// `Private_Clean` and `Private_Dirty` in /proc/PID/smaps_rollup (Linux
/// Documentation/filesystems/proc.rst), in bytes.
fn alone_bytes(pid: i32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
    let kib = |name: &str| -> Option<u64> {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_ascii_whitespace().next()?.parse().ok()
    };
    Some((kib("Private_Clean:")? + kib("Private_Dirty:")?) << 10)
}

fn table(listed: &[Listed]) -> String {
    if listed.is_empty() {
        return "no checkpoints\n".to_owned();
    }
    let size = |bytes: u64| ByteSize::from_bytes(bytes).rounded().to_string();
    let mut lines = vec![["NAME", "PARENT", "AGE", "MEMORY", "ALONE", "FORKS"].map(str::to_owned)];
    for Listed { info, alone_bytes, .. } in listed {
        let created = UNIX_EPOCH + Duration::from_millis(info.created_unix_ms);
        let age = created.elapsed().unwrap_or_default().as_secs();
        lines.push([
            ebb_program::printable(&info.name),
            info.parent.as_deref().map_or("-".to_owned(), ebb_program::printable),
            format!("{age} s"),
            size(info.memory_bytes),
            alone_bytes.map_or("?".to_owned(), size),
            info.forks.to_string(),
        ]);
    }
    columns(&lines)
}

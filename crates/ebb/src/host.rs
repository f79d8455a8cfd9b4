//! `ebb host`: what `ebbd` does about the memory of a host's machines.

pub(crate) mod explain;

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use ebb_host_policy::report::{MachineStatus, Named, Status};
use ebb_host_policy::{Action, Cause, Fit, Host, Level};
use ebb_vmm::api::{Client, ClientError};
use ebb_vmm::size::ByteSize;
use serde::Serialize;
use serde_json::Value;

use crate::columns::columns;
use crate::ctl::{bytes, duration};

const AFTER_HELP: &str = "\
Example: ebb host status
         ebb host explain web-1
         ebb host fit --memory 5G --profile web";

/// Where the daemon's socket is, unless it is told.
pub(crate) const SOCKET: &str = "/run/ebb/ebbd.sock";
/// Time limit of the daemon's answer.
const TIME_LIMIT: Duration = Duration::from_secs(10);

/// Shows what `ebbd` does, and holds machines.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER_HELP)]
pub struct Args {
    /// The daemon's socket
    #[arg(long, global = true, value_name = "PATH", default_value = SOCKET)]
    socket: PathBuf,
    /// Print one JSON document instead of a table
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Show the host and its machines
    Status,
    /// Show why something is done to a machine, or nothing
    Explain {
        /// Its name
        machine: String,
    },
    /// Show what would be done now; nothing is done
    Plan,
    /// Show how many more machines fit
    Fit {
        /// Memory of one machine
        #[arg(long, value_name = "SIZE")]
        memory: ByteSize,
        /// Its profile
        #[arg(long, value_name = "NAME", default_value = "default")]
        profile: String,
    },
    /// Have nothing done to a machine
    Hold {
        /// Its name
        machine: String,
    },
    /// End a hold
    Release {
        /// Its name
        machine: String,
    },
    /// Show the daemon's configuration
    Settings {
        /// Have its file read again first; with a mistake in it, the old configuration stays
        #[arg(long)]
        reload: bool,
    },
}

/// Runs the command.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let client = Client::new(&args.socket, TIME_LIMIT);
    let text = execute(args.command.unwrap_or(Command::Status), args.json, &client)
        .map_err(|error| error.downcast().map_or_else(|other| other, of_the_daemon))?;
    std::io::stdout().lock().write_all(text.as_bytes()).context("cannot write")?;
    Ok(ExitCode::SUCCESS)
}

/// A client's error in terms of the daemon.
pub(crate) fn of_the_daemon(error: ClientError) -> anyhow::Error {
    let start = "start it (see `ebbd --help`), or give its --socket";
    match error {
        ClientError::NoSocket { path } | ClientError::NotListening { path } => {
            anyhow!("no ebbd serves {}: {start}", path.display())
        }
        ClientError::NotASocket { path } => anyhow!("{} is not a socket: {start}", path.display()),
        ClientError::PermissionDenied { path } => {
            let path = path.display();
            anyhow!("no permission to use {path}: only the daemon's user (and root) may")
        }
        ClientError::TimedOut { path, time_limit } => {
            let (path, seconds) = (path.display(), time_limit.as_secs());
            anyhow!("the ebbd of {path} did not answer within {seconds} s")
        }
        ClientError::NotEbb { path, found } | ClientError::Unexpected { path, found } => {
            anyhow!("the server on {} is no ebbd of this version: {found}", path.display())
        }
        other => other.into(),
    }
}

fn execute(command: Command, json: bool, client: &Client) -> anyhow::Result<String> {
    match command {
        Command::Status => show(json, &client.get("/status")?, status_text),
        Command::Plan => show(json, &client.get("/plan")?, plan_text),
        Command::Explain { machine } => {
            let status: Status = client.get("/status")?;
            let at_ms = status.at_ms;
            let mut machines = status.machines.into_iter();
            let found = machines.find(|status| status.name == machine);
            let found = found.with_context(|| {
                format!("there is no machine {machine:?}: ebb host status lists them")
            })?;
            show(json, &found, |found| explain::text(found, at_ms))
        }
        Command::Fit { memory, profile } => {
            let profile = encoded(&profile);
            let target = format!("/fit?memory_bytes={}&profile={profile}", memory.bytes());
            show(json, &client.get(&target)?, fit_text)
        }
        Command::Hold { machine } => show(json, &hold(client, "/hold", machine)?, hold_text),
        Command::Release { machine } => show(json, &hold(client, "/release", machine)?, hold_text),
        Command::Settings { reload } => {
            let config: Value =
                if reload { client.put("/config/reload")? } else { client.get("/config")? };
            show(json, &config, |config| {
                let mut lines = Vec::new();
                flatten("", config, &mut lines);
                columns(&lines)
            })
        }
    }
}

/// Holds a machine (`/hold`) or releases it (`/release`).
pub(crate) fn hold(
    client: &Client,
    target: &str,
    machine: String,
) -> Result<MachineStatus, ClientError> {
    client.put_json(target, &Named { machine })
}

pub(crate) fn hold_text(status: &MachineStatus) -> String {
    let held = if status.is_held { "held" } else { "no longer held" };
    format!("{}: {held}\n", ebb_program::printable(&status.name))
}

fn show<T: Serialize>(
    json: bool,
    document: &T,
    text: impl Fn(&T) -> String,
) -> anyhow::Result<String> {
    if json {
        return Ok(format!("{}\n", serde_json::to_string_pretty(document)?));
    }
    Ok(text(document))
}

/// A value in a query (RFC 3986 section 2.1).
fn encoded(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    text.bytes()
        .map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect()
}

fn cause_text(cause: Cause, level: Level) -> String {
    match cause {
        Cause::Available { limit_bytes, .. } if level == Level::Plenty => {
            format!("tight below {}", bytes(limit_bytes))
        }
        Cause::Available { limit_bytes, .. } => format!("{level} below {}", bytes(limit_bytes)),
        Cause::Swapped { out_bytes } => format!("{} were swapped out", bytes(out_bytes)),
        Cause::Stalled { full_us } => {
            format!("all tasks waited for memory for {}", duration(full_us / 1000))
        }
        Cause::NotYetCalm { worse_ms } => {
            format!("it was worse {} ago", duration(worse_ms))
        }
    }
}

/// A host's available memory, and its swap.
pub(crate) fn memory_text(host: &Host) -> (String, String) {
    let swap = host.swap.map_or_else(
        || "no swap".to_owned(),
        |swap| format!("swap {} of {}", bytes(swap.used_bytes), bytes(swap.total_bytes)),
    );
    let (available, total) = (bytes(host.available_bytes), bytes(host.total_bytes));
    (format!("{available} of {total} available"), swap)
}

/// The first line of a status.
pub(crate) fn level_text(status: &Status) -> String {
    let Status { level, cause, host, .. } = status;
    let (memory, swap) = memory_text(host);
    format!("host {level}: {memory} ({}), {swap}", cause_text(*cause, *level))
}

fn host_text(status: &Status) -> String {
    let mut text = level_text(status);
    text.push('\n');
    for problem in &status.problems {
        // Writing into a String cannot fail.
        let _ = writeln!(text, "problem: {}", ebb_program::printable(problem));
    }
    text
}

fn status_text(status: &Status) -> String {
    let mut text = host_text(status);
    if status.machines.is_empty() {
        text.push_str("no machines\n");
        return text;
    }
    let header = ["MACHINE", "MONITOR", "MEMORY", "RESIDENT", "IN USE", "BALLOON", "DECISION"];
    let mut lines = vec![header.map(str::to_owned)];
    for status in &status.machines {
        let machine = status.machine.as_ref();
        let size = |value: Option<u64>| value.map_or_else(|| "?".to_owned(), bytes);
        let balloon = machine.and_then(|machine| machine.balloon);
        lines.push([
            ebb_program::printable(&status.name),
            ebb_program::printable(status.monitor.as_deref().unwrap_or("?")),
            size(machine.map(|machine| machine.size_bytes)),
            size(machine.and_then(|machine| machine.resident_bytes)),
            size(machine.and_then(explain::used_bytes)),
            balloon.map_or_else(|| "-".to_owned(), |balloon| bytes(balloon.actual_bytes)),
            decision_text(status),
        ]);
    }
    text.push_str(&columns(&lines));
    text
}

/// What is decided about a machine, or what is wrong with it.
pub(crate) fn decision_text(status: &MachineStatus) -> String {
    if let Some(trouble) = &status.trouble {
        return ebb_program::printable(trouble);
    }
    let rule = status.explanation.as_ref().map(|why| why.rule.name().replace('_', " "));
    rule.unwrap_or_else(|| "none yet".to_owned())
}

/// An action, for people.
fn action_text(action: Action) -> String {
    match action {
        Action::Balloon { target_bytes: 0 } => "release its balloon".to_owned(),
        Action::Balloon { target_bytes } => format!("balloon to {}", bytes(target_bytes)),
        Action::Reclaim => "reclaim its free pages".to_owned(),
        Action::Trim => "discard its zero pages".to_owned(),
        Action::Park => "park it".to_owned(),
        Action::Pause { for_ms } => format!("pause it for {}", duration(for_ms)),
        Action::Resume => "resume it".to_owned(),
        Action::Stop => "save it to a file and stop it".to_owned(),
    }
}

fn plan_text(plan: &Status) -> String {
    let mut text = host_text(plan);
    let acted = plan.machines.iter().filter_map(|status| {
        let why = status.explanation.as_ref()?;
        Some((status, why, why.action?))
    });
    let mut lines = Vec::new();
    for (status, why, action) in acted {
        lines.push([
            ebb_program::printable(&status.name),
            action_text(action),
            why.rule.to_string(),
        ]);
    }
    if lines.is_empty() {
        text.push_str("nothing would be done\n");
    }
    text.push_str(&columns(&lines));
    text
}

fn fit_text(fit: &Fit) -> String {
    columns(&[
        ["more machines that fit".to_owned(), fit.machines.to_string()],
        ["why no more".to_owned(), fit.reason()],
        ["machines like it observed for".to_owned(), duration(fit.observed_seconds * 1000)],
        ["memory for machines".to_owned(), bytes(fit.capacity_bytes)],
        ["needed by those that run (mean)".to_owned(), bytes(fit.needed_bytes)],
        ["needed by a new one (mean)".to_owned(), bytes(fit.needed_by_one_bytes)],
        ["level".to_owned(), fit.level.to_string()],
    ])
}

/// All values of a document with their paths.
fn flatten(path: &str, value: &Value, lines: &mut Vec<[String; 2]>) {
    let Value::Object(members) = value else {
        lines.push([path.to_owned(), value.to_string()]);
        return;
    };
    for (name, member) in members {
        let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
        flatten(&path, member, lines);
    }
}

//! `ebb ctl`: inspects and changes a running machine through its API socket.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use ebb_vmm::api::{
    BalloonFeature, BalloonInfo, BalloonState, BalloonTarget, CheckpointReport, Client,
    ClientError, CopiedWhile, FreePagesRequest, LinkState, MAX_LEASE_MS,
    MAX_STATISTICS_INTERVAL_SECONDS, MIN_LEASE_MS, MergeSettings, PauseRequest, RateLimits,
    ReclaimRequest, SnapshotReport, StatisticsDocument, StatisticsInterval, TrimReport, VmInfo,
    VmState,
};
use ebb_vmm::checkpoint;
use ebb_vmm::config::{Backing, Switch};
use ebb_vmm::size::ByteSize;
use ebb_vmm::snapshot;
use serde::Serialize;

use crate::checkpoints;
use crate::flags::{Settings, word};
use crate::hooks;

mod disks;
mod free_pages;
mod limits;
mod merge;
mod metrics;
mod net;
mod park;
#[cfg(test)]
mod tests;
mod working_set;

const EXAMPLES: &str = "\
Examples:
  ebb ctl /tmp/vm.sock vm
  ebb ctl /tmp/vm.sock balloon set 1G
  ebb ctl /tmp/vm.sock statistics --json
  ebb ctl /tmp/vm.sock free-pages --min-order 9
  ebb ctl /tmp/vm.sock reclaim
  ebb ctl /tmp/vm.sock park --pause --snapshot /tmp/vm.snapshot
  ebb ctl /tmp/vm.sock disks resize disk0
  ebb ctl /tmp/vm.sock limits disk0 --bandwidth 50M --ops 1000
  ebb ctl /tmp/vm.sock merge --run unmerge
  ebb ctl /tmp/vm.sock snapshot /tmp/vm.snapshot
  ebb ctl /tmp/vm.sock working-set /tmp/vm.working-set --for 5
  ebb ctl /tmp/vm.sock checkpoint ready
The same with curl: curl --unix-socket /tmp/vm.sock http://localhost/vm
Description of the API: curl --unix-socket /tmp/vm.sock http://localhost/openapi.json";

/// Inspect and change a running virtual machine.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES, after_long_help = EXAMPLES)]
pub struct Args {
    /// Socket that the machine was started with (ebb run --api PATH)
    #[arg(value_name = "SOCKET")]
    socket: PathBuf,
    /// Print one JSON document instead of a table
    #[arg(long, global = true)]
    json: bool,
    /// Time limit for the monitor's answer [default: 5; 600 for snapshot, checkpoint and merge; 5
    /// more than the guest's for free-pages, reclaim and park]
    #[arg(
        long,
        global = true,
        value_name = "SECONDS",
        value_parser = clap::value_parser!(u64).range(1..=3600)
    )]
    timeout: Option<u64>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Show the machine
    Vm,
    /// Pause its vCPUs
    Pause(Settings<PauseRequest>),
    /// Resume its vCPUs
    Resume,
    /// Press its power button; the guest decides what to do
    PowerButton,
    /// Return guest memory that contains only zeros to the host; a running guest is paused for
    /// milliseconds at a time
    Trim,
    /// Make an idle guest small: free memory, cold file caches and zeros go back to the host; Ctrl-C
    /// cancels it
    Park(park::ParkArgs),
    /// Show what a parked guest has read again since; it needs nothing to go on
    Unpark,
    /// Write the machine to a file for `ebb restore`; a running guest is paused for some
    /// milliseconds, and runs while its memory is copied, where the host allows it; Ctrl-C cancels
    /// the snapshot
    Snapshot {
        /// Path of the file; an existing file is replaced if it is a snapshot
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
    /// Record which parts of its snapshot a restored machine has used, for `ebb restore
    /// --working-set FILE`, which reads them ahead of the guest
    WorkingSet(working_set::WorkingSetArgs),
    /// Keep the machine in memory for `ebb fork`, or write it to a file; a running guest stands
    /// still for milliseconds
    Checkpoint {
        /// A name of letters, digits, `.`, `_` and `-`: kept in memory until `ebb checkpoints
        /// remove NAME`. A path with a slash: a file, as `snapshot` writes it
        #[arg(value_name = "NAME|FILE")]
        target: String,
        /// Copy the disks that the guest writes to in the same moment, to files without names in
        /// this directory, for machines whose disks do not exist yet. On the file system of the
        /// disks, if its files can share blocks
        #[arg(long, value_name = "DIR")]
        copy_disks: Option<PathBuf>,
        /// Have the guest's agent run the scripts in /etc/ebb/fork.d before and after it
        #[arg(long, default_value = "on", value_parser = word::<Switch>())]
        hooks: Switch,
    },
    /// End it at once, like pulling the plug
    Kill,
    /// Show the balloon, or set its size
    Balloon(BalloonArgs),
    /// Show the guest's memory statistics
    Statistics {
        /// Accept values at most this old without asking the guest
        #[arg(long, value_name = "MILLISECONDS")]
        max_age: Option<u64>,
    },
    /// Request statistics from the guest periodically
    StatisticsInterval {
        /// Interval between requests, 0 for none
        #[arg(
            value_name = "SECONDS",
            value_parser = clap::value_parser!(u64).range(0..=MAX_STATISTICS_INTERVAL_SECONDS)
        )]
        seconds: u64,
    },
    /// Ask the guest which of its pages are free; its balloon driver must support Ebb's extension
    FreePages(Settings<FreePagesRequest>),
    /// Have the guest report all its free pages now, and wait until the host has their memory; its
    /// balloon driver must support Ebb's extension
    Reclaim(Settings<ReclaimRequest>),
    /// Show the disks, or change the size of one
    Disks(disks::DisksArgs),
    /// Show or change the limits of devices' requests
    Limits {
        /// The device to change: disk0 and further, rng, net0_rx, net0_tx and further
        #[arg(value_name = "DEVICE")]
        device: Option<String>,
        #[command(flatten)]
        change: Settings<RateLimits>,
    },
    /// Show the network devices, or take a link up or down
    Net {
        /// The device to change: net0 and further
        #[arg(value_name = "DEVICE", requires = "link")]
        device: Option<String>,
        /// Its link
        #[arg(value_parser = word::<LinkState>())]
        link: Option<LinkState>,
    },
    /// Show or change the merging of equal pages
    Merge(Settings<MergeSettings>),
    /// Show all counters
    Metrics,
}

#[derive(Debug, clap::Args)]
struct BalloonArgs {
    #[command(subcommand)]
    action: Option<BalloonAction>,
}

#[derive(Debug, clap::Subcommand)]
enum BalloonAction {
    /// Show the balloon
    Show,
    /// Set the balloon's target size; the guest follows at its own pace
    Set {
        /// Size, with K, M, G or T for powers of 1024
        size: ByteSize,
        /// The target becomes 0 after this time, unless it is set again before
        #[arg(
            long,
            value_name = "MILLISECONDS",
            value_parser = clap::value_parser!(u64).range(MIN_LEASE_MS..=MAX_LEASE_MS)
        )]
        lease_ms: Option<u64>,
    },
}

/// Carries out the command.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let mut text = Vec::new();
    let result = execute(args, &mut text);
    std::io::stdout().lock().write_all(&text).context("cannot write to standard output")?;
    result.map(|()| ExitCode::SUCCESS)
}

/// Output format.
#[derive(Clone, Copy)]
enum Form {
    Table,
    Json,
}

fn execute(args: Args, out: &mut Vec<u8>) -> anyhow::Result<()> {
    let usual = match &args.command {
        Command::Snapshot { .. } | Command::Checkpoint { .. } | Command::Merge(_) => 600,
        Command::FreePages(Settings(request)) => 5 + request.timeout_ms / 1000,
        Command::Reclaim(Settings(request)) => 5 + request.timeout_ms / 1000,
        Command::Park(args) => args.time_limit_seconds(),
        _ => 5,
    };
    let client = Client::new(&args.socket, Duration::from_secs(args.timeout.unwrap_or(usual)));
    let form = if args.json { Form::Json } else { Form::Table };
    match args.command {
        Command::Vm => show(out, form, &client.get("/vm")?, vm_rows),
        Command::Pause(Settings(request)) => {
            show(out, form, &client.put_json("/vm/pause", &request)?, state_row)
        }
        Command::Resume => show(out, form, &client.put("/vm/resume")?, state_row),
        Command::PowerButton => show(out, form, &client.put("/vm/power-button")?, state_row),
        Command::Trim => show(out, form, &trim(&client)?, trim_rows),
        Command::Park(park) => {
            show(out, form, &park::execute(&park, &args.socket, &client)?, park::rows)
        }
        Command::Unpark => show(out, form, &client.get("/vm/park")?, park::status_rows),
        Command::Snapshot { file } => {
            show(out, form, &take_snapshot(&client, &file)?, snapshot_rows)
        }
        Command::WorkingSet(args) => {
            show(out, form, &working_set::execute(&args, &client)?, working_set::rows)
        }
        Command::Checkpoint { target, .. } if target.contains('/') => {
            let file = Path::new(&target);
            show(out, form, &take_snapshot(&client, file)?, snapshot_rows)
        }
        Command::Checkpoint { target, copy_disks, hooks } => {
            let place = checkpoints::place(&target)?;
            let report = hooks::around(&client, hooks, || {
                Ok(checkpoint::keep(&client, &place, &target, copy_disks.as_deref())?)
            })?;
            show(out, form, &report, checkpoint_rows)
        }
        Command::Kill => show(out, form, &client.put("/vm/kill")?, state_row),
        Command::Balloon(BalloonArgs { action: None | Some(BalloonAction::Show) }) => {
            show(out, form, &client.get("/balloon")?, balloon_rows)
        }
        Command::Balloon(BalloonArgs { action: Some(BalloonAction::Set { size, lease_ms }) }) => {
            let body = BalloonTarget { target_bytes: size.bytes(), lease_ms };
            show(out, form, &client.put_json("/balloon", &body)?, balloon_rows)
        }
        Command::Statistics { max_age } => {
            let target = match max_age {
                Some(age) => format!("/balloon/statistics?max_age_ms={age}"),
                None => "/balloon/statistics".to_owned(),
            };
            let document = client.get::<StatisticsDocument>(&target).map_err(explain_statistics)?;
            show(out, form, &document, statistics_rows)
        }
        Command::StatisticsInterval { seconds } => {
            let body = StatisticsInterval { interval_seconds: seconds };
            show(out, form, &client.put_json("/balloon/statistics-interval", &body)?, interval_row)
        }
        Command::FreePages(Settings(request)) => {
            show(out, form, &client.put_json("/balloon/free-pages", &request)?, free_pages::rows)
        }
        Command::Reclaim(Settings(request)) => {
            let report = client.put_json("/balloon/reclaim", &request)?;
            show(out, form, &report, free_pages::reclaim_rows)
        }
        Command::Disks(args) => show(out, form, &disks::execute(args, &client)?, disks::rows),
        Command::Limits { device, change: Settings(limits) } => {
            show(out, form, &limits::execute(device, limits, &client)?, limits::rows)
        }
        Command::Net { device, link } => {
            show(out, form, &net::execute(device, link, &client)?, net::rows)
        }
        Command::Merge(Settings(change)) => {
            show(out, form, &merge::execute(&change, &client)?, merge::rows)
        }
        Command::Metrics => metrics::show(out, form, &client),
    }
}

/// Explains the error in terms of this program's options.
fn explain_statistics(error: ClientError) -> anyhow::Error {
    let age_ms = match &error {
        ClientError::Refused { detail, .. } => {
            detail.last_known.as_ref().and_then(|known| known.age_ms)
        }
        _ => None,
    };
    match (age_ms, error) {
        (Some(age_ms), ClientError::Refused { detail, .. }) => anyhow::anyhow!(
            "{}; its last answer is {} old (--max-age {} accepts it)",
            detail.message,
            duration(age_ms),
            age_ms.saturating_add(60_000).next_multiple_of(1000),
        ),
        (_, error) => error.into(),
    }
}

fn show<T: Serialize>(
    out: &mut Vec<u8>,
    form: Form,
    document: &T,
    rows: impl Fn(&T) -> Vec<Row>,
) -> anyhow::Result<()> {
    match form {
        Form::Json => {
            serde_json::to_writer_pretty(&mut *out, document)?;
            out.push(b'\n');
        }
        Form::Table => write_table(out, &rows(document))?,
    }
    Ok(())
}

/// A line of a table: a name and its value.
struct Row(String, String);

fn row(what: &str, value: impl Into<String>) -> Row {
    Row(what.to_owned(), value.into())
}

fn write_table(out: &mut Vec<u8>, rows: &[Row]) -> std::io::Result<()> {
    let width = rows.iter().map(|Row(what, _)| what.chars().count()).max().unwrap_or(0);
    for Row(what, value) in rows {
        writeln!(out, "{what:<width$}  {value}")?;
    }
    Ok(())
}

pub(crate) fn bytes(number: u64) -> String {
    ByteSize::from_bytes(number).rounded().to_string()
}

/// Formats milliseconds for people.
pub(crate) fn duration(ms: u64) -> String {
    let seconds = ms / 1000;
    match seconds {
        0 => format!("{ms} ms"),
        1..60 => format!("{}.{} s", seconds, ms % 1000 / 100),
        60..3600 => format!("{} min {} s", seconds / 60, seconds % 60),
        3600..86400 => format!("{} h {} min", seconds / 3600, seconds / 60 % 60),
        _ => format!("{} d {} h", seconds / 86400, seconds / 3600 % 24),
    }
}

pub(crate) fn vm_state(state: VmState) -> &'static str {
    match state {
        VmState::Starting => "starting",
        VmState::Receiving => "receiving",
        VmState::Running => "running",
        VmState::Paused => "paused",
        VmState::Saving => "writing a snapshot",
        VmState::Migrating => "migrating to another monitor",
        VmState::Stopping => "stopping",
    }
}

fn balloon_state(state: BalloonState) -> &'static str {
    match state {
        BalloonState::DriverAbsent => "no driver in the guest",
        BalloonState::Idle => "idle",
        BalloonState::Inflating => "inflating",
        BalloonState::Deflating => "deflating",
    }
}

/// Repeats the request until all guest memory has been scanned.
fn trim(client: &Client) -> anyhow::Result<TrimReport> {
    let mut total = TrimReport::default();
    while !total.complete {
        total.add(&client.put::<TrimReport>("/vm/trim")?);
    }
    Ok(total)
}

/// The file is created with the rights of this process; the monitor gets its descriptor.
fn take_snapshot(client: &Client, file: &Path) -> anyhow::Result<SnapshotReport> {
    let path = std::path::absolute(file)
        .with_context(|| format!("cannot use the path {}", file.display()))?;
    Ok(snapshot::take(client, &path)?)
}

fn snapshot_rows(report: &SnapshotReport) -> Vec<Row> {
    let seconds = |ms: u64| format!("{:.2} s", ms as f64 / 1000.0);
    vec![
        row("file", report.path.as_str()),
        row("guest memory", bytes(report.ram_bytes)),
        row("on disk", bytes(report.stored_bytes)),
        row("took", seconds(report.elapsed_ms)),
        row("guest paused for", format!("{} ms", report.paused_ms)),
        row("memory copied while", copied_while(report.copied)),
    ]
}

fn checkpoint_rows(report: &CheckpointReport) -> Vec<Row> {
    let ms = |us: u64| format!("{:.1} ms", us as f64 / 1000.0);
    vec![
        row("checkpoint", report.name.as_str()),
        row("process", report.pid.to_string()),
        row("guest stood still for", ms(report.paused_us)),
        row("of which for its memory", ms(report.forked_us)),
    ]
}

fn copied_while(copied: CopiedWhile) -> &'static str {
    match copied {
        CopiedWhile::Running => "the guest ran",
        CopiedWhile::Stopped => "the guest was paused",
    }
}

fn trim_rows(report: &TrimReport) -> Vec<Row> {
    vec![
        row("scanned", bytes(report.scanned_bytes)),
        row("returned", bytes(report.returned_bytes)),
        row("pauses", report.pauses.to_string()),
        row("longest pause", format!("{:.1} ms", report.longest_pause_us as f64 / 1000.0)),
    ]
}

fn state_row(info: &VmInfo) -> Vec<Row> {
    let resumed = info.pause_lease_ms.map(|lease_ms| row("resumed in", duration(lease_ms)));
    [row("state", vm_state(info.state))].into_iter().chain(resumed).collect()
}

fn vm_rows(info: &VmInfo) -> Vec<Row> {
    let backing = match info.backing {
        Backing::Anonymous => "anonymous",
        Backing::Memfd => "shared memfd",
        Backing::Hugetlb2M => "2 MiB huge pages",
    };
    let mut rows = state_row(info);
    rows.extend([
        row("vCPUs", info.cpus.to_string()),
        row("memory", format!("{}, {backing}", bytes(info.memory_bytes))),
        row("resident memory", bytes(info.resident_bytes)),
        row("uptime", duration(info.uptime_ms)),
        row("clock", format!("{} over pauses", info.clock.policy)),
        row("kernel", if info.kernel.is_empty() { "none" } else { info.kernel.as_str() }),
        row("monitor", format!("ebb {}, process {}", info.version, info.pid)),
    ]);
    if let Some(merged) = info.merged_bytes {
        rows.push(row("shared", bytes(merged)));
    }
    if let Some(read) = info.snapshot_bytes {
        rows.push(row("read from snapshot", bytes(read)));
    }
    rows.push(match &info.balloon {
        Some(balloon) => row(
            "balloon",
            format!(
                "{} of {}, {}",
                bytes(balloon.actual_bytes),
                bytes(balloon.target_bytes),
                balloon_state(balloon.state)
            ),
        ),
        None => row("balloon", "none"),
    });
    rows
}

fn feature(feature: BalloonFeature) -> &'static str {
    match feature {
        BalloonFeature::MustTellHost => "must tell host",
        BalloonFeature::StatisticsQueue => "statistics",
        BalloonFeature::DeflateOnOom => "deflate on OOM",
        BalloonFeature::FreePageHint => "free page hint",
        BalloonFeature::PagePoison => "page poison",
        BalloonFeature::PageReporting => "page reporting",
        BalloonFeature::DeviceInitReported => "init reported",
        BalloonFeature::DeviceInitOnInflate => "init on inflate",
        BalloonFeature::PageBitmap => "page bitmaps",
        BalloonFeature::PageRanges => "page ranges",
        BalloonFeature::HostRequest => "host requests",
        BalloonFeature::ReportRequest => "report requests",
        BalloonFeature::Version1 => "virtio 1",
    }
}

fn features(list: &[BalloonFeature]) -> String {
    if list.is_empty() {
        return "none".to_owned();
    }
    list.iter().copied().map(feature).collect::<Vec<_>>().join(", ")
}

fn interval(info: &BalloonInfo) -> String {
    match info.statistics_interval_seconds {
        0 => "on demand".to_owned(),
        seconds => format!("every {seconds} s"),
    }
}

fn interval_row(info: &BalloonInfo) -> Vec<Row> {
    vec![row("statistics", interval(info))]
}

fn balloon_rows(info: &BalloonInfo) -> Vec<Row> {
    let mut rows = vec![
        row("state", balloon_state(info.state)),
        row("target", bytes(info.target_bytes)),
        row("actual", bytes(info.actual_bytes)),
        row("offered", features(&info.offered_features)),
        row("negotiated", features(&info.negotiated_features)),
        row("statistics", interval(info)),
    ];
    if let Some(lease_ms) = info.lease_ms {
        rows.push(row("released in", duration(lease_ms)));
    }
    if let Some(poison) = info.poison {
        rows.push(row("poison", format!("{poison:#010x}")));
    }
    if let Some(reason) = &info.discard_inhibited {
        rows.push(row("memory is kept", reason.as_str()));
    }
    rows
}

fn statistics_rows(document: &StatisticsDocument) -> Vec<Row> {
    let values = &document.statistics;
    let size = |value: Option<u64>| value.map_or_else(|| "not reported".to_owned(), bytes);
    let count = |value: Option<u64>| {
        value.map_or_else(|| "not reported".to_owned(), |value| value.to_string())
    };
    vec![
        row("age", document.age_ms.map_or_else(|| "never received".to_owned(), duration)),
        row("total memory", size(values.total_memory_bytes)),
        row("free memory", size(values.free_memory_bytes)),
        row("available memory", size(values.available_memory_bytes)),
        row("disk caches", size(values.disk_caches_bytes)),
        row("swapped in", size(values.swap_in_bytes)),
        row("swapped out", size(values.swap_out_bytes)),
        row("major faults", count(values.major_faults)),
        row("minor faults", count(values.minor_faults)),
        row("huge page allocations", count(values.hugetlb_allocations)),
        row("huge page failures", count(values.hugetlb_failures)),
        row("OOM kills", count(values.oom_kills)),
        row("allocation stalls", count(values.allocation_stalls)),
        row("scanned in background", size(values.async_scan_bytes)),
        row("scanned directly", size(values.direct_scan_bytes)),
        row("reclaimed in background", size(values.async_reclaim_bytes)),
        row("reclaimed directly", size(values.direct_reclaim_bytes)),
    ]
}

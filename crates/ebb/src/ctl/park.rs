//! Parking an idle machine, and what has happened since.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use ebb_vmm::api::{
    Client, ParkReport, ParkRequest, ParkSince, ParkStage, ParkStageEnd, ParkStageName, ParkStatus,
    SnapshotReport, VmInfo,
};
use ebb_vmm::size::ByteSize;
use serde::Serialize;

use super::{Row, bytes, duration, row, snapshot_rows, take_snapshot};

mod agent;

/// How far to go, and what follows.
#[derive(Debug, clap::Args)]
pub(super) struct ParkArgs {
    /// Memory that stays available to the guest's programs throughout; with --agent, caches that
    /// stay [default: 24M]
    #[arg(long, value_name = "SIZE")]
    keep: Option<ByteSize>,
    /// Have the guest's kernel evict caches, through ebb-guest-agent, and not the balloon
    #[arg(long)]
    agent: bool,
    /// Time limit for the guest, in milliseconds
    #[arg(
        long,
        value_name = "N",
        default_value_t = ebb_vmm::api::PARK_TIME_LIMIT_MS,
        value_parser = clap::value_parser!(u64).range(100..=ebb_vmm::api::MAX_PARK_TIME_LIMIT_MS)
    )]
    timeout_ms: u64,
    /// Then pause its vCPUs
    #[arg(long)]
    pause: bool,
    /// Then write the machine to a file, as `snapshot` does
    #[arg(long, value_name = "FILE")]
    snapshot: Option<PathBuf>,
}

impl ParkArgs {
    /// How long the monitor may take for its answer.
    pub(super) fn time_limit_seconds(&self) -> u64 {
        let snapshot = if self.snapshot.is_some() { 600 } else { 0 };
        (5 + self.timeout_ms / 1000).max(snapshot)
    }
}

/// What was done.
#[derive(Serialize)]
pub(super) struct Parked {
    #[serde(flatten)]
    report: ParkReport,
    paused: bool,
    snapshot: Option<SnapshotReport>,
}

/// Parks the machine behind `socket`, pauses it and writes it to a file.
pub(super) fn execute(args: &ParkArgs, socket: &Path, client: &Client) -> anyhow::Result<Parked> {
    let default = ParkRequest::default();
    let keep_bytes = args.keep.map_or(default.keep_bytes, ByteSize::bytes);
    let request = ParkRequest { keep_bytes, evict: !args.agent, timeout_ms: args.timeout_ms };
    let report = if args.agent {
        let vm: VmInfo = client.get("/vm")?;
        let limit = Duration::from_millis(args.timeout_ms);
        let evicted = agent::evict(socket, keep_bytes, limit)?;
        let left_ms = args.timeout_ms.saturating_sub(evicted.elapsed_us / 1000).max(100);
        let mut report: ParkReport =
            client.put_json("/vm/park", &ParkRequest { timeout_ms: left_ms, ..request })?;
        report.resident_before_bytes = vm.resident_bytes;
        report.elapsed_us += evicted.elapsed_us;
        report.stages.retain(|stage| stage.stage != ParkStageName::Evict);
        report.stages.insert(0, evicted);
        report
    } else {
        client.put_json("/vm/park", &request)?
    };
    if args.pause {
        client.put::<VmInfo>("/vm/pause").context("the machine is parked, but not paused")?;
    }
    let snapshot = args.snapshot.as_deref().map(|file| take_snapshot(client, file)).transpose();
    let snapshot = snapshot.context("the machine is parked, but not in a file")?;
    Ok(Parked { report, paused: args.pause, snapshot })
}

/// Rows of the table.
pub(super) fn rows(parked: &Parked) -> Vec<Row> {
    let mut rows = report_rows(&parked.report);
    if parked.paused {
        rows.push(row("state", "paused"));
    }
    rows.extend(parked.snapshot.iter().flat_map(snapshot_rows));
    rows
}

fn report_rows(report: &ParkReport) -> Vec<Row> {
    let mut rows: Vec<_> = report.stages.iter().map(stage_row).collect();
    rows.push(row(
        "resident",
        format!("{}, before {}", bytes(report.resident_bytes), bytes(report.resident_before_bytes)),
    ));
    rows.push(row("took", duration(report.elapsed_us / 1000)));
    rows
}

fn stage_row(stage: &ParkStage) -> Row {
    let name = match stage.stage {
        ParkStageName::Evict => "evict",
        ParkStageName::Report => "report",
        ParkStageName::Trim => "trim",
    };
    let end = match stage.end {
        ParkStageEnd::Done => "done",
        ParkStageEnd::Stopped => "ended early",
        ParkStageEnd::Timeout => "ended at the time limit",
        ParkStageEnd::Skipped => "skipped",
    };
    let reason = stage.reason.as_ref().map_or_else(String::new, |reason| format!(" ({reason})"));
    let text = match stage.end {
        ParkStageEnd::Skipped => format!("{end}{reason}"),
        _ => format!(
            "{} in {}, {end}{reason}",
            bytes(stage.returned_bytes),
            duration(stage.elapsed_us / 1000)
        ),
    };
    row(name, text)
}

/// Rows of the table for what has happened since.
pub(super) fn status_rows(status: &ParkStatus) -> Vec<Row> {
    let (Some(report), Some(since)) = (&status.last, &status.since) else {
        return vec![row("parked", "never")];
    };
    let mut rows = vec![
        row("parked", format!("{} ago", duration(since.elapsed_ms))),
        row(
            "resident",
            format!(
                "{}, after parking {}",
                bytes(since.resident_bytes),
                bytes(report.resident_bytes)
            ),
        ),
    ];
    rows.extend(guest_rows(since));
    rows
}

fn guest_rows(since: &ParkSince) -> [Row; 3] {
    let unknown = || "not reported".to_owned();
    [
        row("caches grown", since.caches_grown_bytes.map_or_else(unknown, bytes)),
        row("swapped in", since.swapped_in_bytes.map_or_else(unknown, bytes)),
        row(
            "faults with I/O",
            since.major_faults.map_or_else(unknown, |faults| faults.to_string()),
        ),
    ]
}

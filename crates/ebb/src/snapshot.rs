//! `ebb snapshot`: describes a snapshot.

use std::io::IsTerminal;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use ebb_vmm::size::ByteSize;
use ebb_vmm::snapshot::{FORMAT_VERSION, MachineConfig, SnapshotFile};
use serde::Serialize;

/// Describes a snapshot and checks its integrity.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Snapshot written by `ebb ctl SOCKET snapshot FILE`
    #[arg(value_name = "FILE")]
    snapshot: PathBuf,
    /// Read all of its memory and compare it with its checksums
    #[arg(long)]
    verify: bool,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

/// The command's JSON output.
#[derive(Debug, Serialize)]
struct Description {
    path: PathBuf,
    format_version: u32,
    monitor: String,
    created_unix_ms: u64,
    file_bytes: u64,
    stored_bytes: u64,
    ram_bytes: u64,
    extents: usize,
    vendor: String,
    tsc_khz: u32,
    clock_ns: u64,
    machine: MachineConfig,
    /// Whether memory was compared with its checksums.
    verified: bool,
}

/// Opens, checks and describes the snapshot.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let Args { snapshot: path, verify: verified, json } = args;
    let snapshot = SnapshotFile::open(&path)?;
    if verified {
        verify(&snapshot)?;
    }
    let metadata = snapshot.file.metadata().context("cannot read the size of the snapshot")?;
    let state = snapshot.state;
    let description = Description {
        path: snapshot.path,
        format_version: FORMAT_VERSION,
        monitor: state.monitor,
        created_unix_ms: state.created_unix_ms,
        file_bytes: metadata.len(),
        stored_bytes: metadata.blocks() * 512,
        ram_bytes: snapshot.ram.data_bytes(),
        extents: snapshot.ram.extents().len(),
        vendor: state.processor.vendor(),
        tsc_khz: state.clock.tsc_khz.get(),
        clock_ns: state.clock.clock_ns,
        machine: state.machine,
        verified,
    };
    if json {
        println!("{}", serde_json::to_string_pretty(&description)?);
    } else {
        print(&description);
    }
    Ok(ExitCode::SUCCESS)
}

/// Compares the snapshot's memory with its checksums; shows the progress on a terminal.
pub fn verify(snapshot: &SnapshotFile) -> anyhow::Result<()> {
    let shows = std::io::stderr().is_terminal();
    let total = snapshot.header.ram_bytes.max(1);
    let result = snapshot.verify_ram(&mut |done| {
        if shows {
            eprint!("\rverifying memory: {:3} %", done.saturating_mul(100) / total);
        }
    });
    if shows {
        eprintln!();
    }
    result.with_context(|| format!("the snapshot {} is damaged", snapshot.path.display()))
}

/// Prints the description. Its text is controlled by the file's author.
fn print(description: &Description) {
    let size = |bytes| ByteSize::from_bytes(bytes).to_string();
    let machine = &description.machine;
    let seconds = description.clock_ns / 1_000_000_000;
    let mut rows = vec![
        ("written by", format!("ebb {} on {}", description.monitor, description.vendor)),
        ("vCPUs", machine.cpus.to_string()),
        (
            "memory",
            format!(
                "{}, of which {:.1} MiB are in the file, in {} parts",
                size(machine.memory_bytes),
                description.ram_bytes as f64 / f64::from(1 << 20),
                description.extents
            ),
        ),
        ("on disk", format!("{:.1} MiB", description.stored_bytes as f64 / f64::from(1 << 20))),
        (
            "guest's clock",
            format!(
                "{seconds} s since its start; TSC of {:.3} MHz",
                f64::from(description.tsc_khz) / 1000.0
            ),
        ),
        (
            "kernel",
            machine
                .kernel
                .as_ref()
                .map_or_else(|| "none".to_owned(), |path| path.display().to_string()),
        ),
    ];
    for disk in &machine.disks {
        let access = if disk.readonly.is_on() { "read only" } else { "writable" };
        rows.push(("disk", format!("{}, {access}", disk.path.display())));
    }
    let checked =
        if description.verified { "header, state and memory" } else { "header and state" };
    rows.push(("checked", checked.to_owned()));
    for (name, value) in rows {
        println!("{name:<14} {}", ebb_program::printable(&value));
    }
}

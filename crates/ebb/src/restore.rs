//! `ebb restore`: the virtual machine of a snapshot, in the foreground.

use std::path::PathBuf;
use std::process::ExitCode;

use ebb_vmm::snapshot::SnapshotFile;
use ebb_vmm::vm::{self, ChangedDisks, Start};

use crate::admission::{NO_ROOM, Room, ViaArgs};
use crate::overrides::OverrideArgs;
use crate::run::run_machine;

const AFTER_HELP: &str = "\
The machine has its former memory, vCPUs and devices. Its memory is read from the snapshot when the
guest touches it, and written to private memory, so that any number of machines can run from one
snapshot at a time; a writable disk belongs to only one of them, so give each machine its own copy
with --disk (cp --preserve=timestamps: an image that was written after the snapshot was taken is
refused). The file must not be changed while machines run from it; it may be renamed or removed.

The paths of kernel, initrd and disks in a snapshot are not trusted: name the files with --kernel,
--initrd and --disk, or give --trust-paths for a snapshot that you created yourself. With
--on-reboot exit, no kernel is needed. The backends of network devices are named with --net in the
same way, one for each; with mac=, a clone gets an address of its own.

Exit codes are those of `ebb run`.

Example: ebb ctl /run/ebb.sock snapshot /var/tmp/vm.snapshot
         ebb restore /var/tmp/vm.snapshot --on-reboot exit --disk path=copy.raw \\
             --api /run/ebb2.sock";

/// Runs the virtual machine of a snapshot until its guest ends.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER_HELP, next_line_help = true)]
pub struct Args {
    /// Snapshot written by `ebb ctl SOCKET snapshot FILE`
    #[arg(value_name = "FILE")]
    snapshot: PathBuf,
    #[command(flatten)]
    overrides: OverrideArgs,
    #[command(flatten)]
    via: ViaArgs,
    /// Stay paused until `ebb ctl SOCKET resume`
    #[arg(long, requires = "api")]
    paused: bool,
    /// Read all of the snapshot's memory first and compare it with its checksums
    #[arg(long)]
    verify: bool,
    /// Use a snapshot that belongs to another user or that others may write
    #[arg(long)]
    trust: bool,
    /// Read what this file names ahead of the guest: the parts of the snapshot that another
    /// machine has used at first, recorded by `ebb ctl SOCKET working-set FILE`
    #[arg(long, value_name = "FILE")]
    working_set: Option<PathBuf>,
    /// Continue although a disk was written after the snapshot was taken, or is a copy without the
    /// time of the original
    #[arg(long)]
    accept_changed_disks: bool,
}

/// Runs the guest; the exit code reports how it ended.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let mut snapshot = SnapshotFile::open(&args.snapshot)?;
    if !args.trust {
        snapshot.check_ownership()?;
    }
    if let Some(path) = &args.working_set {
        snapshot.use_working_set(path)?;
    }
    if args.verify {
        crate::snapshot::verify(&snapshot)?;
    }
    let memory_bytes = snapshot.state.machine.memory_bytes;
    if args.via.ask(args.overrides.host.api.as_deref(), memory_bytes)? == Room::None {
        return Ok(ExitCode::from(NO_ROOM));
    }
    let end = args.overrides.host.end;
    let overrides = args.overrides.into_overrides();
    let start = if args.paused { Start::Paused } else { Start::Running };
    let disks = if args.accept_changed_disks { ChangedDisks::Accept } else { ChangedDisks::Refuse };
    run_machine(end, || vm::restore(snapshot, overrides, disks, start))
}

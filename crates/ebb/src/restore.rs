//! `ebb restore`: the virtual machine of a snapshot, in the foreground.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;

use ebb_kvm_clock::ClockPolicy;
use ebb_vmm::config::merge::MERGE_FORM;
use ebb_vmm::config::options::{DISK_FORM, SERIAL_FORM};
use ebb_vmm::config::{DiskConfig, MergeOverrides, RebootAction, SerialConfig, Switch};
use ebb_vmm::snapshot::{Overrides, SnapshotFile};
use ebb_vmm::vm::{self, Start};

use crate::run::{CLOCK_FORM, EmulatedKvm, OnReboot, Toggle, run_machine};

const AFTER_HELP: &str = "\
The machine has the memory, vCPUs and devices that it had. Its memory is read from the snapshot when the guest touches it,
and written to memory of its own, so that any number of machines can run from one snapshot at a time; a disk that the guest
may write belongs to one of them only, so give each its own copy with --disk. The file must stay as it is meanwhile; it may
be renamed or removed.

Exit codes as those of `ebb run`.

Example: ebb ctl /run/ebb.sock snapshot /var/tmp/vm.snapshot && ebb restore /var/tmp/vm.snapshot --api /run/ebb2.sock";

/// Runs the virtual machine of a snapshot until its guest ends.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER_HELP, next_line_help = true)]
pub struct Args {
    /// Snapshot that `ebb ctl SOCKET snapshot FILE` has written
    #[arg(value_name = "FILE")]
    snapshot: PathBuf,
    /// The guest's first serial line [default: tty on a terminal, else stdio]
    #[arg(long, value_name = SERIAL_FORM)]
    serial: Option<SerialConfig>,
    /// Socket for `ebb ctl`
    #[arg(long, value_name = "PATH")]
    api: Option<PathBuf>,
    /// What the guest's clocks do over the time since the snapshot, and over later pauses [default: as before]
    #[arg(long, value_name = CLOCK_FORM)]
    clock: Option<ClockPolicy>,
    /// Another image for a disk of the machine; give all of them, in their order
    #[arg(long, value_name = DISK_FORM)]
    disk: Vec<DiskConfig>,
    /// How equal pages of guest memory are merged from now on [default: as before]
    #[arg(long, value_name = MERGE_FORM)]
    memory: Option<MergeOverrides>,
    /// Do not run before `ebb ctl SOCKET resume`
    #[arg(long, requires = "api")]
    paused: bool,
    /// Read all of the snapshot's memory first and compare it with its checksums
    #[arg(long)]
    verify: bool,
    /// What a reboot of the guest does: start it again, or end the monitor [default: as before]
    #[arg(long, value_enum)]
    on_reboot: Option<OnReboot>,
    /// System call filters
    #[arg(long, value_enum, default_value_t = Toggle::On)]
    seccomp: Toggle,
    /// A KVM that emulates each instruction of its guests: refuse it, or use it all the same
    #[arg(long, value_enum, default_value_t = EmulatedKvm::Refuse)]
    emulated_kvm: EmulatedKvm,
    /// Say how the guest ended as one JSON line on standard error (standard output may be the guest's console)
    #[arg(long)]
    json: bool,
}

/// Runs the guest; the exit code says how it ended.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let snapshot = SnapshotFile::open(&args.snapshot)?;
    if args.verify {
        crate::snapshot::verify(&snapshot)?;
    }
    let interactive = std::io::stdin().is_terminal();
    let overrides = Overrides {
        serial: args.serial.unwrap_or(if interactive { SerialConfig::Tty } else { SerialConfig::Stdio }),
        api: args.api,
        seccomp: if matches!(args.seccomp, Toggle::On) { Switch::On } else { Switch::Off },
        clock: args.clock,
        on_reboot: args.on_reboot.map(|action| match action {
            OnReboot::Reset => RebootAction::Reset,
            OnReboot::Exit => RebootAction::Exit,
        }),
        disks: args.disk,
        merge: args.memory.unwrap_or_default(),
    };
    let start = if args.paused { Start::Paused } else { Start::Running };
    run_machine(args.emulated_kvm, args.json, || vm::restore(snapshot, overrides, start))
}

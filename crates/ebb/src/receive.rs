//! `ebb receive`: waits for the machine of another monitor, and runs it in the foreground.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::ValueEnum;
use ebb_kvm_clock::ClockPolicy;
use ebb_migration::session::{Address, Security, TlsFiles};
use ebb_vmm::api::RamBacking;
use ebb_vmm::config::merge::MERGE_FORM;
use ebb_vmm::config::options::{DISK_FORM, SERIAL_FORM};
use ebb_vmm::config::{DiskConfig, MergeOverrides, RebootAction, SerialConfig, Switch};
use ebb_vmm::snapshot::Overrides;
use ebb_vmm::vm::{self, ReceiveConfig};

use crate::run::{CLOCK_FORM, EmulatedKvm, OnReboot, Toggle, run_machine};

const AFTER_HELP: &str = "\
Takes one machine, which `ebb migrate SOCKET --to ADDRESS` sends, and is its monitor from then on, as `ebb run` would be. It
says on standard error where it listens, \"listening on tcp:127.0.0.1:40321\" for example, when it can be called and its API
socket is there. Before any memory is sent, it looks whether it can provide what the machine has: processor, KVM, devices,
disks (under the same paths, or those given with --disk), memory. After any failure it ends, and the machine runs on where it
was.

Plain TCP is for this machine only, unless --insecure is given; over a network, both sides need certificates. At a unix
socket, the other monitor must be of the same user or root.

Exit codes as those of `ebb run`; 1 also if no machine has come.

Example: ebb receive --listen tcp:0.0.0.0:4444 --tls-cert me.pem --tls-key me.key --tls-ca ca.pem --api /run/b.sock";

/// Waits for a virtual machine that another monitor sends, and runs it until its guest ends.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER_HELP, next_line_help = true)]
pub struct Args {
    /// Where to wait for it; port 0 is any that is free
    #[arg(long, value_name = "tcp:HOST:PORT|unix:PATH")]
    listen: Address,
    /// How long to wait for it [default: for ever]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    timeout: Option<u64>,
    /// The guest's first serial line [default: tty on a terminal, else stdio]
    #[arg(long, value_name = SERIAL_FORM)]
    serial: Option<SerialConfig>,
    /// Socket for `ebb ctl` and `ebb migrate`
    #[arg(long, value_name = "PATH")]
    api: Option<PathBuf>,
    /// What the guest's clocks do over the time of the switch-over, and over later pauses [default: as before]
    #[arg(long, value_name = CLOCK_FORM)]
    clock: Option<ClockPolicy>,
    /// Another image for a disk of the machine; give all of them, in their order
    #[arg(long, value_name = DISK_FORM)]
    disk: Vec<DiskConfig>,
    /// How equal pages of guest memory are merged from now on [default: as before]
    #[arg(long, value_name = MERGE_FORM)]
    memory: Option<MergeOverrides>,
    /// What backs guest memory [default: as before]
    #[arg(long, value_enum)]
    backing: Option<MemoryBacking>,
    /// What a reboot of the guest does: start it again, or end the monitor [default: as before]
    #[arg(long, value_enum)]
    on_reboot: Option<OnReboot>,
    /// Our certificate (PEM), for TLS; `ebb migrate` needs one, too
    #[arg(long, value_name = "FILE", requires_all = ["tls_key", "tls_ca"])]
    tls_cert: Option<PathBuf>,
    /// Its private key (PEM)
    #[arg(long, value_name = "FILE", requires_all = ["tls_cert", "tls_ca"])]
    tls_key: Option<PathBuf>,
    /// Authorities (PEM) that the other side's certificate must come from
    #[arg(long, value_name = "FILE", requires_all = ["tls_cert", "tls_key"])]
    tls_ca: Option<PathBuf>,
    /// Take a machine from anybody who can reach the port, unencrypted
    #[arg(long, conflicts_with = "tls_cert")]
    insecure: bool,
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

/// What backs guest memory.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum MemoryBacking {
    /// Private anonymous memory.
    Anon,
    /// A memory file.
    Memfd,
    /// A memory file of 2 MiB pages from the host's pool.
    Hugetlb,
}

impl From<MemoryBacking> for RamBacking {
    fn from(backing: MemoryBacking) -> Self {
        match backing {
            MemoryBacking::Anon => Self::Anon,
            MemoryBacking::Memfd => Self::Memfd,
            MemoryBacking::Hugetlb => Self::Hugetlb,
        }
    }
}

/// Runs the guest; the exit code says how it ended.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
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
    let security = match (args.tls_cert, args.tls_key, args.tls_ca) {
        (Some(certificate), Some(key), Some(authorities)) => {
            Security::Tls(TlsFiles { certificate, key, authorities, server_name: None })
        }
        _ if args.insecure => Security::Insecure,
        _ => Security::Local,
    };
    let config = ReceiveConfig {
        listen: args.listen,
        security,
        time_limit: args.timeout.map(Duration::from_secs),
        overrides,
        backing: args.backing.map(|backing| RamBacking::from(backing).into()),
    };
    run_machine(args.emulated_kvm, args.json, || {
        vm::receive(config, |address| eprintln!("listening on {address}"))
    })
}

//! `ebb receive`: waits for the machine of another monitor, and runs it in the foreground.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use ebb_migration::session::{Address, Security, TlsFiles};
use ebb_vmm::config::Backing;
use ebb_vmm::vm::{self, ReceiveConfig};

use crate::flags::word;
use crate::overrides::OverrideArgs;
use crate::run::run_machine;

const AFTER_HELP: &str = "\
Takes one machine, which `ebb migrate SOCKET --to ADDRESS` sends, and is its monitor from then on, as `ebb run` would be. It
says on standard error where it listens, \"listening on tcp:127.0.0.1:40321\" for example, when it can be called and its API
socket is there. Before any memory is sent, it looks whether it can provide what the machine has: processor, KVM, devices,
disks, memory. After any failure it ends, and the machine runs on where it was.

The other monitor says which kernel, initrd and disks the machine has, and is not believed: name them with --kernel,
--initrd and --disk, or give --trust-paths if the other monitor may open any file of this host. With --on-reboot exit, no
kernel is needed.

Over TCP, on this machine too, both sides need certificates, and --peer-name says which name the other side's must have.
--insecure does without. At a unix socket, the other monitor must be of the same user or root.

Exit codes as those of `ebb run`; 1 also if no machine has come.

Example: ebb receive --listen tcp:0.0.0.0:4444 --tls-cert me.pem --tls-key me.key --tls-ca ca.pem --peer-name host-a \
             --disk path=/images/vm.raw --on-reboot exit --api /run/b.sock";

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
    #[command(flatten)]
    overrides: OverrideArgs,
    /// What backs guest memory [default: as before]
    #[arg(long, value_parser = word::<Backing>())]
    backing: Option<Backing>,
    /// Our certificate (PEM), for TLS; `ebb migrate` needs one, too
    #[arg(long, value_name = "FILE", requires_all = ["tls_key", "tls_ca", "peer_name"])]
    tls_cert: Option<PathBuf>,
    /// Its private key (PEM)
    #[arg(long, value_name = "FILE", requires_all = ["tls_cert", "tls_ca"])]
    tls_key: Option<PathBuf>,
    /// Authorities (PEM) that the other side's certificate must come from
    #[arg(long, value_name = "FILE", requires_all = ["tls_cert", "tls_key"])]
    tls_ca: Option<PathBuf>,
    /// Name (or address) that the other monitor's certificate must be for; several if any of them
    /// will do
    #[arg(long, value_name = "NAME", requires = "tls_cert")]
    peer_name: Vec<String>,
    /// Take a machine over TCP from anybody who can reach the port, unencrypted
    #[arg(long, conflicts_with = "tls_cert")]
    insecure: bool,
}

/// Runs the guest; the exit code says how it ended.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let end = args.overrides.host.end;
    let overrides = args.overrides.into_overrides();
    let security = match (args.tls_cert, args.tls_key, args.tls_ca) {
        (Some(certificate), Some(key), Some(authorities)) => {
            Security::Tls(TlsFiles { certificate, key, authorities, peer_names: args.peer_name })
        }
        _ if args.insecure => Security::Insecure,
        _ => Security::Local,
    };
    let config = ReceiveConfig {
        listen: args.listen,
        security,
        time_limit: args.timeout.map(Duration::from_secs),
        overrides,
        backing: args.backing,
    };
    run_machine(end, || vm::receive(config, |address| eprintln!("listening on {address}")))
}

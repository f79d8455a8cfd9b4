//! `ebb receive`: receives a machine from another monitor and runs it in the foreground.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use ebb_migration::session::{Address, Security, TlsFiles};
use ebb_vmm::config::Backing;
use ebb_vmm::log;
use ebb_vmm::vm::{self, ReceiveConfig};

use crate::flags::word;
use crate::overrides::OverrideArgs;
use crate::run::run_machine;

const AFTER_HELP: &str = "\
Receives one machine, sent by `ebb migrate SOCKET --to ADDRESS`, and is its monitor from then on,
like `ebb run`. When it accepts connections and its API socket exists, it prints its address on
standard error, for example \"listening on tcp:127.0.0.1:40321\". Before any memory is sent, it
checks that it can provide the machine's processor, KVM features, devices, disks and memory. After
any failure it ends, and the machine continues to run at the source.

The paths of kernel, initrd and disks in the source's description are not trusted: name the files
with --kernel, --initrd and --disk, or give --trust-paths if the source may open any file of this
host. With --on-reboot exit, no kernel is needed. The backends of network devices are named with
--net, one for each.

Over TCP, also within this machine, both sides need certificates, and --peer-name gives the name
that the other side's must have. With --insecure, none are needed. Over a unix socket, the other
monitor must run as the same user or root.

Exit codes are those of `ebb run`; 1 also if no machine arrived.

Example: ebb receive --listen tcp:0.0.0.0:4444 --tls-cert me.pem --tls-key me.key --tls-ca ca.pem \\
             --peer-name host-a --disk path=/images/vm.raw --on-reboot exit --api /run/b.sock";

/// Receives a virtual machine from another monitor and runs it until its guest ends.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER_HELP, next_line_help = true)]
pub struct Args {
    /// Address to listen at; port 0 selects a free port
    #[arg(long, value_name = "tcp:HOST:PORT|unix:PATH")]
    listen: Address,
    /// Time limit for the machine's arrival [default: none]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    timeout: Option<u64>,
    #[command(flatten)]
    overrides: OverrideArgs,
    /// What backs guest memory [default: as before]
    #[arg(long, value_parser = word::<Backing>())]
    backing: Option<Backing>,
    /// Certificate (PEM) of this side, for TLS; `ebb migrate` needs one, too
    #[arg(long, value_name = "FILE", requires_all = ["tls_key", "tls_ca", "peer_name"])]
    tls_cert: Option<PathBuf>,
    /// Its private key (PEM)
    #[arg(long, value_name = "FILE", requires_all = ["tls_cert", "tls_ca"])]
    tls_key: Option<PathBuf>,
    /// Authorities (PEM) that must have issued the other side's certificate
    #[arg(long, value_name = "FILE", requires_all = ["tls_cert", "tls_key"])]
    tls_ca: Option<PathBuf>,
    /// Name (or address) that the other monitor's certificate must be for; give several to accept
    /// any of them
    #[arg(long, value_name = "NAME", requires = "tls_cert")]
    peer_name: Vec<String>,
    /// Accept a machine over TCP from any process that can reach the port, unencrypted
    #[arg(long, conflicts_with = "tls_cert")]
    insecure: bool,
}

/// Runs the guest; the exit code reports how it ended.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let end = args.overrides.host.end;
    let overrides = args.overrides.into_overrides();
    let security = match (args.tls_cert, args.tls_key, args.tls_ca) {
        (Some(certificate), Some(key), Some(authorities)) => {
            Security::Tls(TlsFiles::open(&certificate, &key, &authorities, args.peer_name)?)
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
    run_machine(end, || {
        vm::receive(config, |address| log::line(&format!("listening on {address}")))
    })
}

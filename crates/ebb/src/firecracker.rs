//! `ebb firecracker`: the monitor behind Firecracker's API and with its options.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use ebb_program::LogArgs;
use ebb_vmm::config::Switch;
use ebb_vmm::firecracker::{self, MAX_PAYLOAD_BYTES, MOST_PAYLOAD_BYTES, Options, VERSION};
use ebb_vmm::isolation::{IsolationConfig, IsolationMode, UserChoice};
use ebb_vmm::snapshot::{FORMAT_VERSION, SnapshotFile};

use crate::flags::word;
use crate::host_options::{EndArgs, default_serial};
use crate::run::run_machine;

/// Name of the program that has these options without a subcommand.
const NAME: &str = "firecracker";
/// Longest name of a machine.
const MOST_ID_CHARACTERS: usize = 64;

const AFTER_HELP: &str = "\
Also available as a program of its own: a link named `firecracker` to `ebb`. What is served, and
what differs from Firecracker, is in docs/firecracker.md.

Exit codes are those of `ebb run`, but 0 if the guest rebooted: a guest of Firecracker powers off
in this way.

Example: ebb firecracker --api-sock /tmp/vm/api.sock
         curl --unix-socket /tmp/vm/api.sock -X PUT http://localhost/boot-source \\
             -d '{\"kernel_image_path\": \"vmlinux\", \"boot_args\": \"console=ttyS0\"}'";

/// Serves Firecracker's API and runs the machine that its clients configure.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER_HELP, next_line_help = true, disable_version_flag = true)]
pub struct Args {
    /// Socket of the API
    #[arg(long, value_name = "PATH", default_value = "/run/firecracker.socket")]
    api_sock: PathBuf,
    /// A machine's configuration as JSON (that of GET /vm/config): it is started at once
    #[arg(long, value_name = "FILE")]
    config_file: Option<PathBuf>,
    /// Serve no API
    #[arg(long, requires = "config_file")]
    no_api: bool,
    /// Name of the machine
    #[arg(long, value_name = "ID", default_value = "anonymous-instance", value_parser = parse_id)]
    id: String,
    /// First content of the metadata, as JSON
    #[arg(long, value_name = "FILE")]
    metadata: Option<PathBuf>,
    /// File or pipe of the log [default: standard error]
    #[arg(long, value_name = "PATH")]
    log_path: Option<PathBuf>,
    /// Level of the log: Off, Error, Warning, Info, Debug, Trace [default: that of --log]
    #[arg(long, value_name = "LEVEL", value_parser = parse_level)]
    level: Option<&'static str>,
    /// Accepted without effect, like --start-time-us and its kin: Ebb's lines always have the level
    #[arg(long)]
    show_level: bool,
    /// Accepted without effect
    #[arg(long)]
    show_log_origin: bool,
    /// Log only what this module and those below it say, if it is one of Ebb's: ebb_vmm::api; any
    /// other is accepted without effect
    #[arg(long, value_name = "MODULE")]
    module: Option<String>,
    /// File or pipe of the metrics
    #[arg(long, value_name = "PATH")]
    metrics_path: Option<PathBuf>,
    /// Accepted without effect: the machine has no boot timer
    #[arg(long)]
    boot_timer: bool,
    /// Filter no system calls
    #[arg(long, conflicts_with = "seccomp_filter")]
    no_seccomp: bool,
    /// Refused: Ebb has filters of its own, which cannot be replaced
    #[arg(long, value_name = "FILE")]
    seccomp_filter: Option<PathBuf>,
    /// Accepted: devices are announced by ACPI, and the kernel's command line has no pci=off
    #[arg(long)]
    enable_pci: bool,
    #[arg(long, hide = true, value_name = "US")]
    start_time_us: Option<u64>,
    #[arg(long, hide = true, value_name = "US")]
    start_time_cpu_us: Option<u64>,
    #[arg(long, hide = true, value_name = "US")]
    parent_cpu_time_us: Option<u64>,
    /// Longest body of a request, in bytes
    #[arg(long, value_name = "BYTES", default_value_t = MAX_PAYLOAD_BYTES)]
    http_api_max_payload_size: usize,
    /// Longest metadata, in bytes [default: the longest body]
    #[arg(long, value_name = "BYTES")]
    mmds_size_limit: Option<usize>,
    /// Print the version of Firecracker whose API this is
    #[arg(long)]
    version: bool,
    /// Print the version of the format of snapshots
    #[arg(long)]
    snapshot_version: bool,
    /// Print the version of the format of a snapshot's memory file
    #[arg(long, value_name = "FILE")]
    describe_snapshot: Option<PathBuf>,
    /// Ebb's: whether the monitor gives up the rights of the user who starts it
    #[arg(long, default_value = "auto", value_parser = word::<IsolationMode>())]
    isolate: IsolationMode,
    /// Ebb's: the user that a monitor started by root becomes: an account or UID:GID
    #[arg(long, value_name = "USER")]
    user: Option<String>,
    /// Ebb's: a directory below which clients may name snapshots, besides those of the API's socket
    /// and of writable images. May be given several times
    #[arg(long = "allow-dir", value_name = "PATH", env = "EBB_ALLOW_DIR", value_delimiter = ':')]
    allowed_directories: Vec<PathBuf>,
    #[command(flatten)]
    end: EndArgs,
}

fn parse_id(text: &str) -> Result<String, String> {
    let count = text.chars().count();
    if count == 0 || count > MOST_ID_CHARACTERS {
        return Err(format!("{count} characters; give 1 to {MOST_ID_CHARACTERS}"));
    }
    match text.chars().find(|letter| *letter != '-' && !letter.is_alphanumeric()) {
        Some(letter) => Err(format!("{letter:?} is neither a letter, a digit nor a hyphen")),
        None => Ok(text.to_owned()),
    }
}

fn parse_level(text: &str) -> Result<&'static str, String> {
    firecracker::log_level(&text.to_lowercase())
        .ok_or_else(|| "give Off, Error, Warning, Info, Debug or Trace".to_owned())
}

/// The arguments of `ebb` for a program that may have been called `firecracker`, or that a client
/// of Firecracker's starts by its own name because it resolves links first (smolvm).
pub fn arguments(given: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let mut given: Vec<_> = given.into_iter().collect();
    let is_named =
        given.first().is_some_and(|name| Path::new(name).file_name() == Some(NAME.as_ref()));
    let is_meant = given.get(1).is_some_and(|first| first == "--api-sock");
    if is_named || is_meant {
        given.insert(1, NAME.into());
    }
    given
}

impl Args {
    /// How much is logged: `--level` counts more than `general`.
    pub fn log(&self, general: LogArgs) -> LogArgs {
        let filter = firecracker::log_filter(self.level, self.module.as_deref());
        filter.map_or(general, |filter| LogArgs::at(&filter))
    }
}

/// Runs the machine; the exit code reports how its guest ended.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    if args.version {
        println!("Firecracker v{VERSION}\n\nserved by ebb {}", env!("CARGO_PKG_VERSION"));
        return Ok(ExitCode::SUCCESS);
    }
    if args.snapshot_version {
        println!("v{FORMAT_VERSION}.0.0");
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(path) = &args.describe_snapshot {
        SnapshotFile::open(path)?;
        println!("v{FORMAT_VERSION}.0.0");
        return Ok(ExitCode::SUCCESS);
    }
    if args.seccomp_filter.is_some() {
        eprintln!(
            "ebb: --seccomp-filter: Ebb has filters of its own for each of its threads, and none \
             can be replaced; omit the option"
        );
        return Ok(ExitCode::from(ebb_program::USAGE));
    }
    let max_payload_bytes = args.http_api_max_payload_size;
    if max_payload_bytes > MOST_PAYLOAD_BYTES {
        eprintln!("ebb: --http-api-max-payload-size: give at most {MOST_PAYLOAD_BYTES} bytes");
        return Ok(ExitCode::from(ebb_program::USAGE));
    }
    let options = Options {
        api_sock: (!args.no_api).then_some(args.api_sock),
        config_file: args.config_file,
        metadata: args.metadata,
        id: args.id,
        log_path: args.log_path,
        metrics_path: args.metrics_path,
        max_payload_bytes,
        mmds_bytes: args.mmds_size_limit.unwrap_or(max_payload_bytes).min(MOST_PAYLOAD_BYTES),
        pci: Switch::from_bool(args.enable_pci),
        serial: default_serial(),
        seccomp: Switch::from_bool(!args.no_seccomp),
        isolation: IsolationConfig {
            mode: args.isolate,
            user: args.user.map_or(UserChoice::Dynamic, UserChoice::Named),
            cgroup: None,
            allowed_directories: args.allowed_directories,
            image_directories: Vec::new(),
        },
        set_log_filter: ebb_program::set_log_filter,
    };
    let mut is_reboot = false;
    let code = run_machine(args.end, || {
        let exit = firecracker::run(options)?;
        is_reboot = exit == ebb_vmm::exit::GuestExit::Reboot;
        Ok::<_, firecracker::FirecrackerError>(exit)
    })?;
    Ok(if is_reboot { ExitCode::SUCCESS } else { code })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_the_program_selects_the_command() {
        let of = |words: &[&str]| arguments(words.iter().map(OsString::from)).len();
        assert_eq!(of(&["/usr/bin/firecracker", "--version"]), 3);
        assert_eq!(of(&["ebb", "firecracker"]), 2);
        assert_eq!(of(&["/usr/bin/ebb", "--api-sock", "/tmp/api"]), 4);
        assert_eq!(of(&[]), 0);
    }

    #[test]
    fn names_of_machines() {
        assert!(parse_id("my-vm-1").is_ok());
        for wrong in ["", "a_b", "a b", &"x".repeat(65)] {
            assert!(parse_id(wrong).is_err(), "{wrong}");
        }
    }
}

//! `ebb migrate`: moves a running machine to another monitor.

use std::fmt::Write as _;
use std::io::{IsTerminal, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use ebb_migration::session::{
    Address, CancelHandle, Security, SessionError, TimeLimits, TlsFiles, dial,
};
use ebb_vmm::api::{
    AtTimeLimit, Client, FreePageChoice, MAX_DOWNTIME_MS, MAX_MIGRATION_SECONDS,
    MAX_MIGRATION_STREAMS, MIN_BANDWIDTH_BYTES, MigrationPhase, MigrationReport, MigrationRequest,
    MigrationStatus,
};
use ebb_vmm::config::Switch;
use ebb_vmm::size::ByteSize;
use ebb_vmm::words::to_word;

use crate::flags::word;

const AFTER_HELP: &str = "\
The destination's monitor, `ebb receive`, must be waiting on this machine or on another one. Memory
is sent while the guest runs; then the guest is paused while the rest is sent, and resumes at the
destination. This machine's monitor then ends with exit code 8. After any failure before that, the
machine continues to run here.

Pages that the guest does not use are not sent: pages that it has never touched, that it has
returned by free page reporting or the balloon, and that its balloon driver names on request
(--free-pages). Both monitors need the same disks, which `ebb receive --disk` names there.

Over TCP, also within this machine, both sides need certificates, and the other side's must be for
the host in --to or for the name in --peer-name. With --insecure, none are needed.

Exit codes: 0 the machine runs at its destination, 1 it continues to run here, 2 wrong usage,
3 unknown: the connection broke at the moment of the hand-over, and the machine stays paused here.

Example: ebb receive --listen unix:/run/move.sock --on-reboot exit --api /run/b.sock &
         ebb migrate /run/a.sock --to unix:/run/move.sock";

/// Moves a running virtual machine to another monitor, which `ebb receive` runs.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER_HELP, next_line_help = true)]
pub struct Args {
    /// Socket that the machine was started with (ebb run --api PATH)
    #[arg(value_name = "SOCKET")]
    socket: PathBuf,
    /// Where `ebb receive` listens
    #[arg(
        long,
        value_name = "tcp:HOST:PORT|unix:PATH",
        required_unless_present_any = ["status", "cancel"]
    )]
    to: Option<Address>,
    /// Show the progress of a migration, or the result of the last one
    #[arg(long, conflicts_with_all = ["to", "cancel"])]
    status: bool,
    /// Cancel the current migration; the machine continues to run here
    #[arg(long, conflicts_with = "to")]
    cancel: bool,
    /// Data streams
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1,
        value_parser = clap::value_parser!(u16).range(1..=i64::from(MAX_MIGRATION_STREAMS))
    )]
    streams: u16,
    /// Target downtime; the guest is paused when the remaining memory can be sent in this time
    #[arg(
        long,
        value_name = "MILLISECONDS",
        default_value_t = MigrationRequest::default().downtime_ms,
        value_parser = clap::value_parser!(u64).range(1..=MAX_DOWNTIME_MS)
    )]
    downtime: u64,
    /// Maximum bytes per second while the guest runs, with K, M, G or T for powers of 1024
    /// [default: unlimited]
    #[arg(long, value_name = "SIZE")]
    bandwidth: Option<ByteSize>,
    /// Time until --on-timeout takes effect [default: none]
    #[arg(
        long,
        value_name = "SECONDS",
        value_parser = clap::value_parser!(u64).range(1..=MAX_MIGRATION_SECONDS)
    )]
    timeout: Option<u64>,
    /// Action at that time: cancel, or pause the guest for as long as sending the rest takes
    #[arg(long, default_value = "cancel", value_parser = word::<AtTimeLimit>())]
    on_timeout: AtTimeLimit,
    /// Slow the guest's vCPUs down when it writes faster than can be sent
    #[arg(long)]
    auto_converge: bool,
    /// How the guest's driver names free pages, which are not sent: by free page hinting, by a
    /// request of Ebb's extension, by the best that it supports, or not at all
    #[arg(long, default_value = "auto", value_parser = word::<FreePageChoice>())]
    free_pages: FreePageChoice,
    /// Whether to detect zero pages
    #[arg(long, default_value = "on", value_parser = word::<Switch>())]
    zero_pages: Switch,
    /// Whether to skip memory that is not populated on the host
    #[arg(long, default_value = "on", value_parser = word::<Switch>())]
    holes: Switch,
    /// Certificate (PEM) of this side, for TLS; `ebb receive` needs one, too
    #[arg(long, value_name = "FILE", requires_all = ["tls_key", "tls_ca"])]
    tls_cert: Option<PathBuf>,
    /// Its private key (PEM)
    #[arg(long, value_name = "FILE", requires_all = ["tls_cert", "tls_ca"])]
    tls_key: Option<PathBuf>,
    /// Authorities (PEM) that must have issued the other side's certificate
    #[arg(long, value_name = "FILE", requires_all = ["tls_cert", "tls_key"])]
    tls_ca: Option<PathBuf>,
    /// Name (or address) that the other monitor's certificate must be for [default: the host in
    /// --to]
    #[arg(long, value_name = "NAME", requires = "tls_cert")]
    peer_name: Option<String>,
    /// Send the guest's memory unencrypted over TCP; any process on the path, or one that listens
    /// there, can read and change it
    #[arg(long, conflicts_with = "tls_cert")]
    insecure: bool,
    /// Hand the memory over to a monitor on the same machine instead of copying it (backing=memfd
    /// or hugetlb, unix: address)
    #[arg(long)]
    share_memory: bool,
    /// Print the report as one JSON document
    #[arg(long)]
    json: bool,
}

/// Time limit for answers of the monitor.
const API_LIMIT: Duration = Duration::from_secs(15);
/// Time after which the monitor reports the progress if the migration has not ended.
const WAIT_MS: u64 = 500;
/// Exit code if it is unknown where the machine runs.
const UNKNOWN: u8 = 3;

/// Carries out the command.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let client = Client::new(&args.socket, API_LIMIT);
    let json = args.json;
    if args.status {
        return show(&client.get::<MigrationStatus>("/vm/migration")?, json);
    }
    if args.cancel {
        return show(&client.put::<MigrationStatus>("/vm/migration/cancel")?, json);
    }
    let order = args.into_order()?;
    let request = &order.request;
    let report = match order.open() {
        Ok(descriptors) => {
            let borrowed: Vec<_> = descriptors.iter().map(OwnedFd::as_fd).collect();
            let _: MigrationStatus = client.put_json_with("/vm/migrate", request, &borrowed)?;
            // The monitor has its own now, and decides how long each is open.
            drop(descriptors);
            watch(&client, &request.to).unwrap_or_else(|error| failed(format!("{error:#}")))
        }
        Err(error) => failed(error.to_string()),
    };
    if json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else if report.status == MigrationPhase::Completed {
        print(&request.to, &report);
    }
    let problem = report.error.as_deref().unwrap_or_default();
    Ok(match report.status {
        MigrationPhase::Completed => ExitCode::SUCCESS,
        MigrationPhase::Unknown => {
            eprintln!("ebb: {}", ebb_program::printable(problem));
            ExitCode::from(UNKNOWN)
        }
        status => {
            let problem = ebb_program::printable(problem);
            eprintln!("ebb: the migration was not completed ({}): {problem}", status.name());
            ExitCode::FAILURE
        }
    })
}

/// The report of a migration without a result from the monitor.
fn failed(problem: String) -> MigrationReport {
    MigrationReport {
        status: MigrationPhase::Failed,
        error: Some(problem),
        ..MigrationReport::default()
    }
}

/// A migration with what this process has to connect and to open for the monitor.
#[derive(Debug)]
struct Order {
    request: MigrationRequest,
    address: Address,
    /// Certificate, key and authorities.
    files: Option<[PathBuf; 3]>,
}

impl Order {
    /// Opens the files and connects to the receiver, with the rights of this process. Returns the
    /// descriptors for the monitor.
    fn open(&self) -> Result<Vec<OwnedFd>, SessionError> {
        let system = |what| move |source| SessionError::System { what, source };
        let names = self.request.tls_name.iter().cloned().collect();
        let security = match &self.files {
            Some([certificate, key, authorities]) => {
                Security::Tls(TlsFiles::open(certificate, key, authorities, names)?)
            }
            None if self.request.insecure => Security::Insecure,
            None => Security::Local,
        };
        security.check(&self.address)?;
        let cancel = CancelHandle::new().map_err(system("create an event"))?;
        let limits = TimeLimits::default();
        let mut descriptors = dial(&self.address, self.request.streams, &limits, &cancel)?;
        if let Security::Tls(files) = security {
            descriptors.extend(files.into_descriptors().map_err(system("duplicate a descriptor"))?);
        }
        Ok(descriptors)
    }
}

impl Args {
    fn into_order(self) -> anyhow::Result<Order> {
        let here = std::env::current_dir().context("cannot determine the current directory")?;
        let address = self.to.context("--to is missing")?.absolute(&here);
        if let Some(bandwidth) = self.bandwidth
            && bandwidth.bytes() < MIN_BANDWIDTH_BYTES
        {
            anyhow::bail!(
                "--bandwidth {bandwidth} a second is too little for a migration; use at least {}",
                ByteSize::from_bytes(MIN_BANDWIDTH_BYTES)
            );
        }
        let files = match (self.tls_cert, self.tls_key, self.tls_ca) {
            (Some(certificate), Some(key), Some(authorities)) => {
                Some([certificate, key, authorities])
            }
            _ => None,
        };
        let request = MigrationRequest {
            to: address.to_string(),
            streams: self.streams,
            downtime_ms: self.downtime,
            bandwidth_bytes_per_s: self.bandwidth.map(ByteSize::bytes),
            timeout_seconds: self.timeout,
            on_timeout: self.on_timeout,
            auto_converge: self.auto_converge,
            free_pages: self.free_pages,
            zero_pages: self.zero_pages.is_on(),
            holes: self.holes.is_on(),
            tls_name: self.peer_name,
            insecure: self.insecure,
            share_memory: self.share_memory,
        };
        Ok(Order { request, address, files })
    }
}

/// Waits for the end and shows the progress on a terminal.
fn watch(client: &Client, to: &str) -> anyhow::Result<MigrationReport> {
    let shows = std::io::stderr().is_terminal();
    loop {
        let status: MigrationStatus =
            client.get(&format!("/vm/migration?wait_ms={WAIT_MS}")).with_context(|| {
                format!("the machine's monitor has ended during the migration to {to}")
            })?;
        if let (true, Some(report)) = (status.phase.is_end(), &status.report) {
            if shows {
                eprint!("\r\x1b[K");
            }
            return Ok(report.clone());
        }
        if shows {
            eprint!("\r\x1b[K{}", progress(&status));
            // It is only shown.
            let _ = std::io::stderr().flush();
        }
    }
}

fn size(bytes: u64) -> String {
    ByteSize::from_bytes(bytes).rounded().to_string()
}

/// The progress in one line.
fn progress(status: &MigrationStatus) -> String {
    let mut text = match status.phase {
        MigrationPhase::Precopy => {
            format!(
                "round {}: {} left, {} sent",
                status.round,
                size(status.remaining_bytes),
                size(status.bytes_sent)
            )
        }
        MigrationPhase::SwitchOver => {
            format!("switching over: {} left", size(status.remaining_bytes))
        }
        phase => return phase.name(),
    };
    if status.rate_bytes_per_s > 0 {
        let _ = write!(text, ", {}/s", size(status.rate_bytes_per_s));
    }
    if let Some(ms) = status.expected_downtime_ms {
        let _ = write!(text, ", downtime would be {ms} ms");
    }
    if status.throttle_percent > 0 {
        let _ = write!(text, ", guest slowed down by {} %", status.throttle_percent);
    }
    text
}

fn show(status: &MigrationStatus, json: bool) -> anyhow::Result<ExitCode> {
    if json {
        println!("{}", serde_json::to_string_pretty(status)?);
        return Ok(ExitCode::SUCCESS);
    }
    match &status.report {
        Some(report) => {
            println!("{}", report.status.name());
            if let Some(problem) = &report.error {
                println!("{problem}");
            }
            print(status.to.as_deref().unwrap_or_default(), report);
        }
        None => println!("{}", progress(status)),
    }
    Ok(ExitCode::SUCCESS)
}

fn print(to: &str, report: &MigrationReport) {
    let pages = |pages: u64| size(pages.saturating_mul(4096));
    let rows = [
        ("to", to.to_owned()),
        ("took", format!("{:.2} s", report.total_ms as f64 / 1000.0)),
        ("downtime", format!("{} ms", report.downtime_ms)),
        ("sent", format!("{} in {} rounds", size(report.bytes_sent), report.rounds)),
        ("memory", size(report.memory_bytes)),
        ("  sent", pages(report.pages_data)),
        ("  zero", pages(report.pages_zero)),
        ("  not populated", pages(report.pages_discarded)),
        (
            "  free",
            format!("{} (requested: {})", pages(report.pages_skipped), to_word(report.free_pages)),
        ),
    ];
    for (name, value) in rows {
        println!("{name:<18} {value}");
    }
    if let Some(problem) = &report.free_pages_error {
        println!("{:<18} {problem}", "guest not queried");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    fn order(words: &str) -> Result<Order, String> {
        let words = ["migrate"].into_iter().chain(words.split_ascii_whitespace());
        let line = Line::try_parse_from(words).map_err(|error| error.to_string())?;
        line.args.into_order().map_err(|error| error.to_string())
    }

    fn parse(words: &str) -> Result<MigrationRequest, String> {
        order(words).map(|order| order.request)
    }

    #[test]
    fn a_plain_line_asks_for_the_defaults() {
        let request = parse("/run/a.sock --to tcp:127.0.0.1:4000").unwrap();
        assert_eq!(request, MigrationRequest::new("tcp:127.0.0.1:4000"));
    }

    #[test]
    fn every_option_reaches_the_request() {
        let request = parse(
            "/run/a.sock --to unix:/run/m --streams 4 --downtime 50 --bandwidth 1G --timeout 9 \
             --on-timeout force --auto-converge --free-pages query --zero-pages off --holes off \
             --insecure --share-memory",
        );
        let wanted = MigrationRequest {
            streams: 4,
            downtime_ms: 50,
            bandwidth_bytes_per_s: Some(1 << 30),
            timeout_seconds: Some(9),
            on_timeout: AtTimeLimit::Force,
            auto_converge: true,
            free_pages: FreePageChoice::Query,
            zero_pages: false,
            holes: false,
            insecure: true,
            share_memory: true,
            ..MigrationRequest::new("unix:/run/m")
        };
        assert_eq!(request, Ok(wanted));
    }

    #[test]
    fn the_monitor_gets_an_absolute_path_and_no_files() {
        let here = std::env::current_dir().unwrap();
        let tls = "--tls-cert c --tls-key k --tls-ca /a";
        let moved = order(&format!("a --to unix:move {tls}")).unwrap();
        assert_eq!(moved.request.to, format!("unix:{}", here.join("move").display()));
        assert_eq!(moved.files, Some(["c", "k", "/a"].map(PathBuf::from)));
        assert_eq!(moved.request.tls_name, None);
        let named = parse(&format!("a --to tcp:192.0.2.1:1 --peer-name b {tls}")).unwrap();
        assert_eq!(named.tls_name.as_deref(), Some("b"));
        // The receiver's certificate is for the name.
        assert_eq!(parse("a --to tcp:there.example:1").unwrap().to, "tcp:there.example:1");
    }

    #[test]
    fn the_monitor_gets_sockets_and_then_files() {
        use std::os::unix::fs::FileTypeExt as _;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let _listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let here = order(&format!("a --to unix:{} --streams 3", path.display())).unwrap();
        let descriptors = here.open().unwrap();
        assert_eq!(descriptors.len(), 4);
        for descriptor in descriptors {
            assert!(std::fs::File::from(descriptor).metadata().unwrap().file_type().is_socket());
        }
        // What is not allowed is found before anything connects.
        for (line, words) in [
            ("a --to tcp:127.0.0.1:1", "--insecure"),
            ("a --to unix:/nowhere/s", "ebb receive"),
            ("a --to tcp:127.0.0.1:1 --tls-cert /no --tls-key /no --tls-ca /no", "--tls-cert"),
        ] {
            let error = order(line).unwrap().open().unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn invalid_lines_are_refused_with_the_remedy() {
        for (line, words) in [
            ("/run/a.sock", "--to"),
            ("/run/a.sock --to 10.0.0.1:5", "tcp:HOST:PORT"),
            ("/run/a.sock --to tcp:10.0.0.1", "HOST:PORT"),
            ("/run/a.sock --to unix:/m --streams 17", "17"),
            ("/run/a.sock --to unix:/m --tls-cert c", "--tls-key"),
            ("/run/a.sock --to unix:/m --bandwidth 1K", "at least 64K"),
            ("/run/a.sock --to unix:/m --status", "--status"),
        ] {
            let error = parse(line).unwrap_err();
            assert!(error.contains(words), "{line}: {error}");
        }
    }
}

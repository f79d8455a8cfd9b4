//! `ebb migrate`: moves a running machine to another monitor.

use std::fmt::Write as _;
use std::io::{IsTerminal, Write as _};
use std::net::{IpAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use ebb_migration::session::Address;
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
The other monitor waits for the machine: `ebb receive`, on this machine or on another one. Memory is sent while the guest
runs; then it stands still while the rest is sent, and goes on there. This machine's monitor ends then, with exit code 8.
Whatever fails before that leaves the machine running here.

Pages that the guest does not use are not sent: those that it has never touched, given back by free page reporting or to
the balloon, and those that its balloon driver names when it is asked (--free-pages). Both monitors need the same disks, which
`ebb receive --disk` names there.

Over TCP, on this machine too, both sides need certificates, and the other side's must be for the host in --to or for the
name in --peer-name. --insecure does without.

Exit codes: 0 the machine runs at its destination, 1 it runs on here, 2 wrong usage, 3 nobody knows: the connection broke at
the moment of the hand-over, and the machine stays paused here.

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
    #[arg(long, value_name = "tcp:HOST:PORT|unix:PATH", required_unless_present_any = ["status", "cancel"])]
    to: Option<Address>,
    /// Show how far a migration is, or what the last one has come to
    #[arg(long, conflicts_with_all = ["to", "cancel"])]
    status: bool,
    /// Give up the migration under way; the machine runs on here
    #[arg(long, conflicts_with = "to")]
    cancel: bool,
    /// Data streams
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=i64::from(MAX_MIGRATION_STREAMS)))]
    streams: u16,
    /// How long the guest may stand still; it is stopped when what is left can be sent in this time
    #[arg(long, value_name = "MILLISECONDS", default_value_t = MigrationRequest::default().downtime_ms, value_parser = clap::value_parser!(u64).range(1..=MAX_DOWNTIME_MS))]
    downtime: u64,
    /// Most bytes a second while the guest runs, with K, M, G or T for powers of 1024 [default: as
    /// many as possible]
    #[arg(long, value_name = "SIZE")]
    bandwidth: Option<ByteSize>,
    /// When --on-timeout happens [default: never]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=MAX_MIGRATION_SECONDS))]
    timeout: Option<u64>,
    /// What to do then: give up, or stop the guest for as long as the rest takes
    #[arg(long, default_value = "cancel", value_parser = word::<AtTimeLimit>())]
    on_timeout: AtTimeLimit,
    /// Slow the guest's vCPUs down when it writes faster than can be sent
    #[arg(long)]
    auto_converge: bool,
    /// Who names pages that need not be sent: the guest's driver by free page hinting, by the
    /// question of Ebb's extension, by the best that it knows, or nobody
    #[arg(long, default_value = "auto", value_parser = word::<FreePageChoice>())]
    free_pages: FreePageChoice,
    /// Whether to look for pages that are zero
    #[arg(long, default_value = "on", value_parser = word::<Switch>())]
    zero_pages: Switch,
    /// Whether to leave out memory that the host does not hold
    #[arg(long, default_value = "on", value_parser = word::<Switch>())]
    holes: Switch,
    /// Our certificate (PEM), for TLS; `ebb receive` needs one, too
    #[arg(long, value_name = "FILE", requires_all = ["tls_key", "tls_ca"])]
    tls_cert: Option<PathBuf>,
    /// Its private key (PEM)
    #[arg(long, value_name = "FILE", requires_all = ["tls_cert", "tls_ca"])]
    tls_key: Option<PathBuf>,
    /// Authorities (PEM) that the other side's certificate must come from
    #[arg(long, value_name = "FILE", requires_all = ["tls_cert", "tls_key"])]
    tls_ca: Option<PathBuf>,
    /// Name (or address) that the other monitor's certificate must be for [default: the host in
    /// --to]
    #[arg(long, value_name = "NAME", requires = "tls_cert")]
    peer_name: Option<String>,
    /// Send the guest's memory unencrypted over TCP; any process on the way, or one that listens
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

/// For answers of the monitor.
const API_LIMIT: Duration = Duration::from_secs(15);
/// How long the monitor may wait for the end before it tells how far it is.
const WAIT_MS: u64 = 500;
/// Exit code if nobody knows where the machine runs.
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
    let request = args.into_request()?;
    let _: MigrationStatus = client.put_json("/vm/migrate", &request)?;
    let report = watch(&client, &request.to).unwrap_or_else(|error| MigrationReport {
        status: MigrationPhase::Failed,
        error: Some(format!("{error:#}")),
        ..MigrationReport::default()
    });
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

impl Args {
    fn into_request(self) -> anyhow::Result<MigrationRequest> {
        let here = std::env::current_dir().context("cannot find the present folder")?;
        let address = self.to.context("--to is missing")?.absolute(&here);
        let absolute = |path: PathBuf| here.join(path);
        let mut tls_name = self.peer_name;
        let encrypted = self.tls_cert.is_some();
        let to = in_numbers(address, encrypted.then_some(&mut tls_name))?;
        if let Some(bandwidth) = self.bandwidth
            && bandwidth.bytes() < MIN_BANDWIDTH_BYTES
        {
            anyhow::bail!(
                "--bandwidth {bandwidth} a second is too little to get a machine through; give at least {}",
                ByteSize::from_bytes(MIN_BANDWIDTH_BYTES)
            );
        }
        Ok(MigrationRequest {
            to: to.to_string(),
            streams: self.streams,
            downtime_ms: self.downtime,
            bandwidth_bytes_per_s: self.bandwidth.map(ByteSize::bytes),
            timeout_seconds: self.timeout,
            on_timeout: self.on_timeout,
            auto_converge: self.auto_converge,
            free_pages: self.free_pages,
            zero_pages: self.zero_pages.is_on(),
            holes: self.holes.is_on(),
            tls_cert: self.tls_cert.map(absolute),
            tls_key: self.tls_key.map(absolute),
            tls_ca: self.tls_ca.map(absolute),
            tls_name,
            insecure: self.insecure,
            share_memory: self.share_memory,
        })
    }
}

/// The address without a name: a monitor looks none up. The name stays the one that a certificate
/// must have.
fn in_numbers(address: Address, tls_name: Option<&mut Option<String>>) -> anyhow::Result<Address> {
    let Address::Tcp { host, port } = address else { return Ok(address) };
    if host.parse::<IpAddr>().is_ok() || host.eq_ignore_ascii_case("localhost") {
        return Ok(Address::Tcp { host, port });
    }
    let found = (host.as_str(), port)
        .to_socket_addrs()
        .with_context(|| {
            format!("cannot find the host {host}; check the name, or write its address in numbers")
        })?
        .next()
        .with_context(|| format!("the host {host} has no address; write its address in numbers"))?;
    if let Some(name) = tls_name {
        name.get_or_insert(host);
    }
    Ok(Address::Tcp { host: found.ip().to_string(), port })
}

/// Waits for the end, and shows on a terminal how far it is.
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

/// How far it is, in a line.
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
        ("guest stood still", format!("{} ms", report.downtime_ms)),
        ("sent", format!("{} in {} rounds", size(report.bytes_sent), report.rounds)),
        ("memory", size(report.memory_bytes)),
        ("  sent", pages(report.pages_data)),
        ("  zero", pages(report.pages_zero)),
        ("  not held", pages(report.pages_discarded)),
        (
            "  free",
            format!("{} (asked: {})", pages(report.pages_skipped), to_word(report.free_pages)),
        ),
    ];
    for (name, value) in rows {
        println!("{name:<18} {value}");
    }
    if let Some(problem) = &report.free_pages_error {
        println!("{:<18} {problem}", "guest not asked");
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

    fn parse(words: &str) -> Result<MigrationRequest, String> {
        let words = ["migrate"].into_iter().chain(words.split_ascii_whitespace());
        let line = Line::try_parse_from(words).map_err(|error| error.to_string())?;
        line.args.into_request().map_err(|error| error.to_string())
    }

    #[test]
    fn a_plain_line_asks_for_the_defaults() {
        let request = parse("/run/a.sock --to tcp:127.0.0.1:4000").unwrap();
        assert_eq!(request, MigrationRequest::new("tcp:127.0.0.1:4000"));
    }

    #[test]
    fn every_option_arrives() {
        let request = parse(
            "/run/a.sock --to unix:/run/m --streams 4 --downtime 50 --bandwidth 1G --timeout 9 --on-timeout force \
             --auto-converge --free-pages query --zero-pages off --holes off --insecure --share-memory",
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
    fn paths_become_absolute() {
        let here = std::env::current_dir().unwrap();
        let request = parse("a --to unix:move --tls-cert c --tls-key k --tls-ca /a").unwrap();
        assert_eq!(request.to, format!("unix:{}", here.join("move").display()));
        let files = [request.tls_cert, request.tls_key, request.tls_ca];
        assert_eq!(files, [here.join("c"), here.join("k"), "/a".into()].map(Some));
        assert_eq!(request.tls_name, None);
        let named =
            parse("a --to tcp:192.0.2.1:1 --peer-name b --tls-cert c --tls-key k --tls-ca /a")
                .unwrap();
        assert_eq!(named.tls_name.as_deref(), Some("b"));
    }

    #[test]
    fn wrong_lines_say_what_to_write() {
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

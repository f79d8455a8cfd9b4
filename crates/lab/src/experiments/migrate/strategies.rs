//! Ways of migrating a guest: `ebb migrate`, and QEMU's machine protocol. Both return the same
//! report.

use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use ebb_vmm::api::{MigrationPhase, MigrationReport, MigrationRound};
use serde_json::{Value, json};

use crate::harness::host;
use crate::harness::qmp::{Qmp, QmpError};
use crate::report::statistics::rounded;

/// Target downtime in ms; QEMU's default.
pub(super) const DOWNTIME_LIMIT_MS: u64 = 300;
/// Interval of status requests. QEMU answers in the thread that sends its pages.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);
/// No limit for QEMU, in bytes per second: more than any link here.
const QEMU_BANDWIDTH: u64 = 100_000_000_000;
/// The largest downtime that QEMU accepts, in ms, which makes it stop the guest at the next
/// opportunity.
const QEMU_ANY_DOWNTIME_MS: u64 = 2_000_000;
/// Time for the end of the migration after the guest was stopped.
const END_LIMIT: Duration = Duration::from_secs(120);

/// Options of `ebb migrate`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Settings {
    pub(super) zero_pages: &'static str,
    pub(super) holes: &'static str,
    pub(super) free_pages: &'static str,
}

impl Settings {
    fn options(self) -> [(&'static str, &'static str); 3] {
        [
            ("--zero-pages", self.zero_pages),
            ("--holes", self.holes),
            ("--free-pages", self.free_pages),
        ]
    }
}

/// How a guest is moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Strategy {
    Ebb(Settings),
    Qemu,
}

impl Strategy {
    /// Description that continues that of the guest.
    pub(super) fn describe(self) -> String {
        let Self::Ebb(settings) = self else {
            return "; migrate over QMP, one connection".to_owned();
        };
        let options = settings.options().map(|(option, value)| format!(" {option} {value}"));
        format!("; ebb migrate{}", options.concat())
    }
}

/// A migration to be made.
pub(super) struct Order<'a> {
    /// Process of the monitor.
    pub(super) pid: u32,
    /// Its control socket.
    pub(super) control: &'a Path,
    /// Address that the other monitor listens on.
    pub(super) address: &'a str,
    /// After this time, the guest is stopped at the next opportunity.
    pub(super) patience: Duration,
}

/// The source's report of a migration.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Report {
    pub(super) total_ms: f64,
    pub(super) downtime_ms: f64,
    pub(super) bytes_sent: u64,
    pub(super) rounds: u64,
    /// Pages not sent because the guest named them as free.
    pub(super) pages_skipped: Option<u64>,
    pub(super) pages_data: Option<u64>,
    pub(super) pages_zero: Option<u64>,
    /// Pages not sent because they are not populated.
    pub(super) pages_discarded: Option<u64>,
    pub(super) source_cpu_ms: Option<f64>,
    /// Whether the guest was stopped because it took too long.
    pub(super) forced: bool,
    /// Why the guest's free pages were not requested, if they should have been.
    pub(super) not_asked: Option<String>,
    /// The rounds; QEMU does not report them.
    pub(super) rounds_detail: Vec<MigrationRound>,
}

/// Migrates a guest; `ebb` is the program. An error is a message.
pub(super) fn run(strategy: Strategy, ebb: Command, order: &Order<'_>) -> Result<Report, String> {
    match strategy {
        Strategy::Ebb(settings) => by_ebb(settings, ebb, order),
        Strategy::Qemu => by_qemu(order),
    }
}

fn by_ebb(settings: Settings, mut ebb: Command, order: &Order<'_>) -> Result<Report, String> {
    let words = format!("to tcp:{}", order.address);
    ebb.arg("migrate").arg(order.control).args([
        "--to",
        &format!("tcp:{}", order.address),
        "--insecure",
    ]);
    ebb.args(["--json", "--downtime", &DOWNTIME_LIMIT_MS.to_string()]);
    ebb.args(["--timeout", &order.patience.as_secs().to_string(), "--on-timeout", "force"]);
    for (option, value) in settings.options() {
        ebb.args([option, value]);
    }
    let output = output(ebb, order.patience + END_LIMIT)
        .map_err(|error| format!("ebb migrate {words}: {error}"))?;
    let report: MigrationReport = serde_json::from_str(&output.stdout).map_err(|error| {
        format!("ebb migrate {words}: {error} in '{}'\n{}", output.stdout, output.stderr)
    })?;
    if report.status != MigrationPhase::Completed {
        let reason = report.error.unwrap_or(output.stderr);
        return Err(format!("ebb migrate {words}: {}: {reason}", report.status.name()));
    }
    let late = report.total_ms > order.patience.as_millis() as u64;
    Ok(Report {
        total_ms: report.total_ms as f64,
        downtime_ms: report.downtime_ms as f64,
        bytes_sent: report.bytes_sent,
        rounds: report.rounds,
        pages_skipped: Some(report.pages_skipped),
        pages_data: Some(report.pages_data),
        pages_zero: Some(report.pages_zero),
        pages_discarded: Some(report.pages_discarded),
        source_cpu_ms: Some(report.source_cpu_ms as f64),
        forced: late && report.downtime_ms > DOWNTIME_LIMIT_MS,
        not_asked: report.free_pages_error,
        rounds_detail: report.rounds_detail,
    })
}

/// Output of a program.
struct Printed {
    stdout: String,
    stderr: String,
}

/// Runs a program to its end or the time limit.
fn output(mut program: Command, limit: Duration) -> std::io::Result<Printed> {
    program.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = program.spawn()?;
    let begun = Instant::now();
    // Its output fits into the pipes.
    while child.try_wait()?.is_none() {
        if begun.elapsed() > limit {
            child.kill()?;
            child.wait()?;
            return Err(std::io::Error::new(
                std::io::ErrorKind::TimedOut,
                format!("no end within {limit:?}"),
            ));
        }
        thread::sleep(Duration::from_millis(5));
    }
    let output = child.wait_with_output()?;
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).trim().to_owned();
    Ok(Printed { stdout: text(output.stdout), stderr: text(output.stderr) })
}

fn by_qemu(order: &Order<'_>) -> Result<Report, String> {
    let mut qmp = Qmp::connect(order.control).map_err(|error| error.to_string())?;
    let cpu_before_ms = host::monitor_cpu_ms(order.pid);
    let (answer, forced) = qemu_migrate(&mut qmp, order).map_err(|error| error.to_string())?;
    let cpu_ms = host::monitor_cpu_ms(order.pid);
    let status = answer["status"].as_str().unwrap_or_default();
    if status != "completed" {
        return Err(format!("QEMU's migration to tcp:{}: {answer}", order.address));
    }
    let source_cpu_ms = cpu_ms.zip(cpu_before_ms).map(|(now, before)| rounded(now - before));
    Ok(Report { source_cpu_ms, forced, ..of_qemu(&answer) })
}

/// Migrates; returns QEMU's last answer, and whether the guest was stopped at the time limit.
fn qemu_migrate(qmp: &mut Qmp, order: &Order<'_>) -> Result<(Value, bool), QmpError> {
    const SET: &str = "migrate-set-parameters";
    qmp.call(
        SET,
        &json!({ "max-bandwidth": QEMU_BANDWIDTH, "downtime-limit": DOWNTIME_LIMIT_MS }),
    )?;
    qmp.call("migrate", &json!({ "uri": format!("tcp:{}", order.address) }))?;
    let begun = Instant::now();
    let mut forced = false;
    loop {
        thread::sleep(LOOK_INTERVAL);
        let answer = qmp.call("query-migrate", &json!({}))?;
        let over = matches!(answer["status"].as_str(), Some("completed" | "failed" | "cancelled"));
        if over || begun.elapsed() > order.patience + END_LIMIT {
            return Ok((answer, forced));
        }
        if !forced && begun.elapsed() > order.patience {
            qmp.call(SET, &json!({ "downtime-limit": QEMU_ANY_DOWNTIME_MS }))?;
            forced = true;
        }
    }
}

/// QEMU's `query-migrate` (qapi/migration.json, `MigrationInfo`).
fn of_qemu(answer: &Value) -> Report {
    let ram = |name: &str| answer["ram"][name].as_u64();
    Report {
        total_ms: answer["total-time"].as_f64().unwrap_or_default(),
        downtime_ms: answer["downtime"].as_f64().unwrap_or_default(),
        bytes_sent: ram("transferred").unwrap_or_default(),
        rounds: ram("dirty-sync-count").unwrap_or_default(),
        // It counts neither pages that the guest has named nor unpopulated ones.
        pages_data: ram("normal"),
        pages_zero: ram("duplicate"),
        ..Report::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::qmp::tests::peer;

    const COMPLETED: &str = "{\"return\": {\"status\": \"completed\", \"total-time\": 2400, \
                             \"downtime\": 12, \"ram\": {\"total\": 1073741824, \"page-size\": \
                             4096, \"normal\": 30000, \"duplicate\": 20000, \"transferred\": \
                             123456789, \"dirty-sync-count\": 3}}}\n";

    #[test]
    fn qemu_gets_the_limits_and_its_report_is_parsed() {
        let directory = tempfile::tempdir().unwrap();
        let control = directory.path().join("qmp");
        let active = "{\"return\": {\"status\": \"active\"}}\n";
        let nothing = "{\"return\": {}}\n";
        let peer = peer(&control, vec![nothing, nothing, nothing, active, nothing, COMPLETED]);
        let order = Order {
            pid: std::process::id(),
            control: &control,
            address: "198.18.0.2:4444",
            patience: Duration::ZERO,
        };
        let report = by_qemu(&order).unwrap();
        assert!(report.forced && report.source_cpu_ms.is_some());
        assert_eq!((report.rounds, report.bytes_sent), (3, 123_456_789));
        assert_eq!((report.pages_data, report.pages_zero), (Some(30_000), Some(20_000)));
        let sent = peer.join().unwrap();
        assert_eq!(sent[1]["arguments"]["downtime-limit"], 300);
        assert_eq!(sent[2]["arguments"]["uri"], "tcp:198.18.0.2:4444");
        assert_eq!(sent[4]["arguments"]["downtime-limit"], QEMU_ANY_DOWNTIME_MS);
    }

    fn script(text: &str) -> Result<Report, String> {
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", text, "ebb"]);
        let order = Order {
            pid: 1,
            control: Path::new("/tmp/c"),
            address: "198.18.0.2:4444",
            patience: Duration::from_secs(9),
        };
        let settings = Settings { zero_pages: "on", holes: "off", free_pages: "query" };
        by_ebb(settings, shell, &order)
    }

    #[test]
    fn ebb_gets_the_options_and_its_report_is_parsed() {
        let expected = "migrate /tmp/c --to tcp:198.18.0.2:4444 --insecure --json --downtime 300 \
                        --timeout 9 --on-timeout force --zero-pages on --holes off --free-pages \
                        query";
        let finished = MigrationReport {
            status: MigrationPhase::Completed,
            total_ms: 350,
            downtime_ms: 7,
            pages_skipped: 4,
            ..MigrationReport::default()
        };
        let finished = serde_json::to_string(&finished).unwrap();
        let report = script(&format!("test \"$*\" = '{expected}' && echo '{finished}'")).unwrap();
        assert_eq!((report.downtime_ms, report.pages_skipped), (7.0, Some(4)));
        assert!(!report.forced);
    }

    #[test]
    fn a_failed_migration_is_reported_with_its_reason() {
        let finished = MigrationReport {
            status: MigrationPhase::Failed,
            error: Some("connection refused".to_owned()),
            ..MigrationReport::default()
        };
        let text = script(&format!("echo '{}'; exit 1", serde_json::to_string(&finished).unwrap()))
            .unwrap_err();
        assert!(text.ends_with("failed: connection refused"), "{text}");
        let text = script("echo no such option >&2; exit 2").unwrap_err();
        assert!(text.contains("no such option"), "{text}");
    }
}

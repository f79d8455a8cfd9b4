//! `ebb doctor`: whether this machine can run guests, and what to do if not.

use std::fmt::Write as _;
use std::io::Write as _;
use std::process::ExitCode;

use anyhow::Context as _;
use serde::Serialize;

mod facts;
mod judge;
mod merging;

use facts::Facts;

/// Say whether this machine can run guests.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Args {
    /// Print one JSON document instead of a table
    #[arg(long)]
    json: bool,
}

/// How good a thing is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Grade {
    /// Nothing to do.
    Ok,
    /// Guests run, but something will be missing or slow.
    Warning,
    /// This stands in the way.
    Problem,
}

impl Grade {
    fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Problem => "problem",
        }
    }
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Check {
    /// What.
    name: &'static str,
    /// How good it is.
    grade: Grade,
    /// What was found.
    found: String,
    /// What to do, if anything.
    remedy: Option<String>,
}

/// Where guests run here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
enum Verdict {
    /// On this machine's own KVM.
    Direct,
    /// In the virtual host.
    VirtualHost,
    /// Nowhere.
    Cannot {
        /// Why.
        reasons: Vec<String>,
    },
}

impl Verdict {
    fn line(&self) -> String {
        match self {
            Self::Direct => "guests run directly on KVM".to_owned(),
            Self::VirtualHost => "guests run in the virtual host".to_owned(),
            Self::Cannot { reasons } => format!("cannot run, because {}", reasons.join("; ")),
        }
    }
}

/// Everything the doctor has to say.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Report {
    verdict: Verdict,
    /// The verdict in words.
    summary: String,
    checks: Vec<Check>,
    /// The run that the verdict on KVM rests on.
    kvm: ebb_vmm::probe::KvmProbe,
}

/// Examines the machine and prints what was found. Succeeds if guests run here one way or the
/// other.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let report = judge::judge(&Facts::collect());
    let text = if args.json {
        format!("{}\n", serde_json::to_string_pretty(&report)?)
    } else {
        table(&report)
    };
    std::io::stdout()
        .lock()
        .write_all(text.as_bytes())
        .context("cannot write to standard output")?;
    Ok(match report.verdict {
        Verdict::Direct | Verdict::VirtualHost => ExitCode::SUCCESS,
        Verdict::Cannot { .. } => ExitCode::FAILURE,
    })
}

fn table(report: &Report) -> String {
    let width = report.checks.iter().map(|check| check.name.len()).max().unwrap_or(0);
    let mut text = String::new();
    for Check { name, grade, found, remedy } in &report.checks {
        // Writing into a String cannot fail.
        let _ = writeln!(text, "{:<7}  {name:<width$}  {found}", grade.word());
        if let Some(remedy) = remedy {
            let _ = writeln!(text, "{:<7}  {:<width$}  -> {remedy}", "", "");
        }
    }
    let _ = writeln!(text, "\n{}", report.summary);
    text
}

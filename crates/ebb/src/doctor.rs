//! `ebb doctor`: whether this machine can run guests, and what to do if not.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use ebb_program::Check;
use serde::Serialize;

mod facts;
mod judge;
mod machine;
mod merging;

use facts::Facts;

const AFTER_HELP: &str = "\
With --vm, the command shows what the monitor of a running machine has given up, for the case that
its guest takes it over (docs/security.md), and fails if one of its threads has rights that it
should not have.";

/// Check whether this machine can run guests.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = AFTER_HELP)]
pub struct Args {
    /// Examine the isolation of a running machine instead
    #[arg(long, value_name = "SOCKET")]
    vm: Option<PathBuf>,
    /// Print one JSON document instead of a table
    #[arg(long)]
    json: bool,
}

/// Whether guests run here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
enum Verdict {
    /// On this machine's KVM.
    Direct,
    /// Not at all.
    Cannot {
        /// The reasons.
        reasons: Vec<String>,
    },
}

impl Verdict {
    fn line(&self) -> String {
        match self {
            Self::Direct => "guests run directly on KVM".to_owned(),
            Self::Cannot { reasons } => format!("cannot run, because {}", reasons.join("; ")),
        }
    }
}

/// The report of the doctor.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Report {
    verdict: Verdict,
    /// The verdict in words.
    summary: String,
    checks: Vec<Check>,
    /// The probe behind the verdict on KVM.
    kvm: ebb_vmm::probe::KvmProbe,
}

/// Examines the machine and prints the results. Succeeds if guests run here.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    if let Some(socket) = &args.vm {
        return machine::run(socket, args.json);
    }
    let report = judge::judge(&Facts::collect());
    let text = if args.json {
        format!("{}\n", serde_json::to_string_pretty(&report)?)
    } else {
        ebb_program::table(&report.checks, &report.summary)
    };
    std::io::stdout()
        .lock()
        .write_all(text.as_bytes())
        .context("cannot write to standard output")?;
    Ok(match report.verdict {
        Verdict::Direct => ExitCode::SUCCESS,
        Verdict::Cannot { .. } => ExitCode::FAILURE,
    })
}

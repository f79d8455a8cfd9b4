//! `ebb-lab list` and `ebb-lab run`: experiments on real guests.

use std::fmt::Write as _;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use ebb_lab::LabError;
use ebb_lab::experiments;
use ebb_lab::harness::all::{self, Ending};
use ebb_lab::harness::direct::{Chosen, Selection};
use ebb_lab::harness::experiment::{Experiment, Runs};
use ebb_lab::harness::run::{self, Request};
use ebb_lab::harness::size::RunSize;
use ebb_lab::harness::target::Wanted;
use ebb_lab::report::output::{OutputDirectory, REPORT_FILE, RESULTS_FILE};
use ebb_lab::report::progress::Progress;
use ebb_lab::report::results::Scale;
use ebb_lab::report::table;
use serde_json::json;

/// The name that selects every experiment.
const ALL: &str = "all";

#[derive(Debug, clap::Args)]
pub struct ListArgs {
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

#[derive(Debug, clap::Args)]
pub struct RunArgs {
    /// Experiment (see `ebb-lab list`), or `all`: each one writes NAME.json into one folder, and
    /// one that fails or cannot run here does not stop the others
    name: String,
    /// Size: demo takes minutes on two cores, full is that of the published experiment
    #[arg(long, value_enum, default_value = "demo")]
    scale: ScaleArg,
    /// Series to run instead of the default ones, separated by commas
    #[arg(long, value_name = "NAME,NAME", value_delimiter = ',')]
    series: Option<Vec<String>>,
    /// Number of guests in a series; the most, if it ends when the host is full
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    guests: Option<u32>,
    /// Directory for results.json and report.html, or for the documents of all experiments
    /// [default: lab-results/NAME-SCALE]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Print results.json on standard output instead of the table
    #[arg(long)]
    json: bool,
    /// Where the guests run: auto selects this machine if Linux guests run on its KVM, else the
    /// virtual host
    #[arg(long = "where", value_enum, default_value = "auto")]
    place: PlaceArg,
    /// Print events as JSON lines and write no files; a run inside the virtual host reports to the
    /// outer one in this way
    #[arg(long, hide = true, conflicts_with_all = ["json", "out"])]
    json_events: bool,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum ScaleArg {
    Demo,
    Full,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum PlaceArg {
    Auto,
    Direct,
    VirtualHost,
}

/// Runs an experiment.
///
/// # Errors
/// The cause, with a remedy.
pub fn run(args: &RunArgs) -> anyhow::Result<ExitCode> {
    if args.name == ALL {
        if args.series.is_some() || args.json || args.json_events {
            eprintln!(
                "ebb-lab: all runs the default series and writes files: leave out --series and \
                 --json"
            );
            return Ok(ExitCode::from(ebb_program::USAGE));
        }
        return run_all(args);
    }
    match request(args) {
        Ok(request) if args.json_events => {
            run::run_inside(&request, io::stdout())?;
            Ok(ExitCode::SUCCESS)
        }
        Ok(request) => run_and_report(&request, args),
        Err(error) => {
            eprintln!("ebb-lab: {error}");
            Ok(ExitCode::from(ebb_program::USAGE))
        }
    }
}

/// The request of the command line; an error is a usage error.
fn request(args: &RunArgs) -> Result<Request, LabError> {
    let experiment = experiments::find(&args.name)?;
    let chosen = if args.series.is_some() { Chosen::ByName } else { Chosen::ByDefault };
    let plans = experiment.choose(args.series.as_deref())?;
    let selection = Selection { plans, chosen };
    Ok(Request { experiment, size: args.size(), selection, place: args.place() })
}

impl RunArgs {
    fn size(&self) -> RunSize {
        let scale = match self.scale {
            ScaleArg::Demo => Scale::Demo,
            ScaleArg::Full => Scale::Full,
        };
        RunSize { scale, guests: self.guests }
    }

    fn place(&self) -> Wanted {
        match self.place {
            PlaceArg::Auto => Wanted::Auto,
            PlaceArg::Direct => Wanted::Direct,
            PlaceArg::VirtualHost => Wanted::VirtualHost,
        }
    }

    fn directory(&self) -> PathBuf {
        let name = || format!("{}-{}", self.name, self.size().scale);
        self.out.clone().unwrap_or_else(|| PathBuf::from("lab-results").join(name()))
    }
}

/// Runs every experiment.
fn run_all(args: &RunArgs) -> anyhow::Result<ExitCode> {
    let (folder, mut progress) = (args.directory(), Progress::on_stderr());
    let endings = all::run(&experiments::ALL, args.size(), args.place(), &folder, &mut progress)?;
    drop(progress);
    let lines = endings.iter().map(|(name, ending)| format!("{name}: {}\n", ending.describe()));
    let text: String = lines.collect();
    io::stdout().write_all(text.as_bytes()).context("cannot write to standard output")?;
    eprintln!("written: {}", folder.display());
    let failed = endings.iter().any(|(_, ending)| matches!(ending, Ending::Failed(_)));
    let any_done = endings.iter().any(|(_, ending)| *ending == Ending::Done);
    Ok(if failed || !any_done { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn run_and_report(request: &Request, args: &RunArgs) -> anyhow::Result<ExitCode> {
    let directory = args.directory();
    let output = OutputDirectory::check(&directory)?;
    let results = run::run(request, &mut Progress::on_stderr())?;
    output.write(&results)?;
    let text = if args.json {
        serde_json::to_string_pretty(&results).context("cannot write the results as JSON")? + "\n"
    } else {
        table::render(&results)
    };
    io::stdout().write_all(text.as_bytes()).context("cannot write to standard output")?;
    let directory = directory.display();
    eprintln!("written: {directory}/{RESULTS_FILE}, {directory}/{REPORT_FILE}");
    match results.first_error() {
        None => Ok(ExitCode::SUCCESS),
        Some((series, error)) => {
            eprintln!("ebb-lab: series {series} ended early: {error}");
            Ok(ExitCode::FAILURE)
        }
    }
}

/// Lists the experiments.
pub fn list(args: &ListArgs) -> anyhow::Result<ExitCode> {
    let text = if args.json {
        let all: Vec<_> = experiments::ALL.into_iter().map(describe).collect();
        serde_json::to_string_pretty(&json!({ "experiments": all })).context("cannot write JSON")?
            + "\n"
    } else {
        experiments::ALL.map(listing).join("\n")
    };
    io::stdout().write_all(text.as_bytes()).context("cannot write to standard output")?;
    Ok(ExitCode::SUCCESS)
}

fn describe(experiment: &Experiment) -> serde_json::Value {
    let series: Vec<_> = (experiment.series)()
        .into_iter()
        .map(|plan| {
            let is_default = plan.runs == Runs::ByDefault;
            json!({ "name": plan.name, "summary": plan.summary, "default": is_default })
        })
        .collect();
    json!({
        "name": experiment.name,
        "summary": experiment.summary,
        "series": series,
        "metrics": (experiment.metrics)(),
        "scales": {
            "demo": (experiment.parameters)(Scale::Demo),
            "full": (experiment.parameters)(Scale::Full),
        },
    })
}

fn listing(experiment: &Experiment) -> String {
    let mut text = format!("{}: {}\n", experiment.name, experiment.summary);
    for scale in [Scale::Demo, Scale::Full] {
        let parameters: Vec<String> = (experiment.parameters)(scale)
            .into_iter()
            .map(|(name, value)| format!("{name} {value}"))
            .collect();
        // Writing to a String cannot fail, here and below.
        let _ = writeln!(text, "  {:<6} {}", scale.name(), parameters.join(", "));
    }
    for plan in (experiment.series)() {
        let mark = if plan.runs == Runs::ByDefault { ' ' } else { '-' };
        let _ = writeln!(text, "  {mark} {:<18} {}", plan.name, plan.summary);
    }
    text.push_str("  (series with - run when named with --series)\n");
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser as _;

    #[derive(Debug, clap::Parser)]
    struct Cli {
        #[command(flatten)]
        args: RunArgs,
    }

    fn run_args(words: &str) -> Result<RunArgs, clap::Error> {
        let line = std::iter::once("run").chain(words.split_whitespace());
        Cli::try_parse_from(line).map(|cli| cli.args)
    }

    #[test]
    fn the_command_line_becomes_a_request() {
        let args =
            run_args("density --scale full --series reporting,no-reporting --guests 2").unwrap();
        let request = request(&args).unwrap();
        assert_eq!(request.experiment.name, "density");
        assert_eq!(request.size, RunSize { scale: Scale::Full, guests: Some(2) });
        assert_eq!(request.selection.chosen, Chosen::ByName);
        assert_eq!(request.selection.plans.len(), 2);
        assert_eq!(request.place, Wanted::Auto);
    }

    #[test]
    fn invalid_requests_are_refused_with_the_valid_values() {
        let message = |words: &str| request(&run_args(words).unwrap()).err().unwrap().to_string();
        assert!(message("densty").contains("available: density"));
        assert!(message("memhog --series fast").contains("available: no-reporting"));
        for words in ["", "density --scale huge", "density --guests 0", "density --where moon"] {
            assert!(run_args(words).is_err(), "{words}");
        }
    }

    #[test]
    fn the_list_has_every_experiment_with_its_series() {
        for experiment in experiments::ALL {
            let text = listing(experiment);
            let document = describe(experiment);
            assert!(text.starts_with(&format!("{}: ", experiment.name)));
            assert_eq!(document["name"], experiment.name);
            for plan in (experiment.series)() {
                assert!(text.contains(plan.name));
            }
            assert_eq!(document["series"].as_array().unwrap().len(), (experiment.series)().len());
            assert!(
                document["scales"]["demo"]["host_mib"].as_u64()
                    < document["scales"]["full"]["host_mib"].as_u64()
            );
        }
    }
}

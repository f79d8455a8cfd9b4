//! `ebb-lab results` and `ebb-lab report`: pages rendered from documents of earlier runs.

use std::fs;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use ebb_lab::report::{collection, page};

#[derive(Debug, clap::Args)]
pub struct ResultsArgs {
    /// Folder with one NAME.json for each experiment, as `ebb-lab run all` writes it
    folder: PathBuf,
    /// File for the page instead of standard output
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

#[derive(Debug, clap::Args)]
pub struct ReportArgs {
    /// Document of a run (results.json)
    results: PathBuf,
    /// File for the page instead of standard output
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// Renders a folder of results as one page of Markdown.
///
/// # Errors
/// What could not be read or written.
pub fn results(args: ResultsArgs) -> anyhow::Result<ExitCode> {
    print(&collection::render(&collection::read_all(&args.folder)?), args.out)
}

/// Renders one document as a page of HTML.
///
/// # Errors
/// What could not be read or written.
pub fn report(args: ReportArgs) -> anyhow::Result<ExitCode> {
    print(&page::render(&collection::read(&args.results)?), args.out)
}

fn print(text: &str, out: Option<PathBuf>) -> anyhow::Result<ExitCode> {
    match out {
        Some(path) => fs::write(&path, text).with_context(|| path.display().to_string()),
        None => io::stdout().write_all(text.as_bytes()).context("cannot write to standard output"),
    }?;
    Ok(ExitCode::SUCCESS)
}

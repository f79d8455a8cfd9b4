//! The command line of Ebb's laboratory.

mod command;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use ebb_lab::experiments::merge_speed::member;
use ebb_program::LogArgs;

use command::{debian, doctor, experiments, guest_image, results, virtual_host};

/// Measures what Ebb does, on real guests
#[derive(Debug, Parser)]
#[command(
    name = "ebb-lab",
    version,
    propagate_version = true,
    subcommand_required = true,
    arg_required_else_help = true
)]
struct Cli {
    #[command(flatten)]
    log: LogArgs,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List the experiments and their series
    List(experiments::ListArgs),
    /// Run an experiment; writes results.json and report.html, and prints a table
    Run(experiments::RunArgs),
    /// Render a page of Markdown from a folder of results
    Results(results::ResultsArgs),
    /// Render the page of one run (report.html) from its results.json
    Report(results::ReportArgs),
    /// Show where guests can run on this machine, and what is missing
    Doctor(doctor::Args),
    /// Run a command in a virtual KVM host, on machines whose KVM cannot run Linux
    VirtualHost(virtual_host::Args),
    /// Build the initial RAM file system of test guests
    GuestImage(guest_image::Args),
    /// Make Debian root file systems and a guest kernel, or show them in the cache
    Debian(debian::Args),
    /// Serve the experiment merge-speed as a process whose memory is merged
    #[command(name = member::COMMAND, hide = true)]
    MergeMember,
}

fn main() -> ExitCode {
    if std::process::id() == 1 {
        ebb_virtual_host::inside::init_main();
    }
    let cli = Cli::parse();
    ebb_program::run("ebb-lab", &cli.log, std::io::stderr, || match cli.command {
        Command::List(args) => experiments::list(&args),
        Command::Run(args) => experiments::run(&args),
        Command::Results(args) => results::results(args),
        Command::Report(args) => results::report(args),
        Command::Doctor(args) => doctor::run(args),
        Command::VirtualHost(args) => virtual_host::run(args),
        Command::GuestImage(args) => guest_image::run(args),
        Command::Debian(args) => debian::run(&args),
        Command::MergeMember => member::serve(std::io::stdin().lock(), std::io::stdout().lock())
            .map(|()| ExitCode::SUCCESS)
            .map_err(Into::into),
    })
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    /// Clap detects contradictions only when a command is first used.
    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }
}

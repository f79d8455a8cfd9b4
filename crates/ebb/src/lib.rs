//! The command line of Ebb. Its only users are the program `ebb`, and the program that writes its
//! man pages and completions (`crates/packages`).

mod admission;
mod checkpoints;
mod columns;
mod console;
mod cp;
mod ctl;
mod doctor;
mod exec;
mod extract_vmlinux;
mod firecracker;
mod flags;
mod fork;
mod guest;
mod hooks;
mod host;
mod host_options;
mod merge_broker;
mod migrate;
mod overrides;
mod receive;
mod restore;
mod run;
mod snapshot;
mod top;

use std::process::ExitCode;

use clap::{CommandFactory as _, Parser, Subcommand};
use ebb_program::LogArgs;
use ebb_vmm::isolation::{COMPANION_COMMAND, serve_companion};
use ebb_vmm::log::LogWriter;

/// Returns the memory that virtual machines do not use to their host, at once and safely
#[derive(Debug, Parser)]
#[command(
    name = "ebb",
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
    /// Run a virtual machine
    Run(Box<run::Args>),
    /// Serve Firecracker's API, for its clients, and run the virtual machine that they configure
    Firecracker(Box<firecracker::Args>),
    /// Run the virtual machine of a snapshot
    Restore(Box<restore::Args>),
    /// Move a running virtual machine to another monitor
    Migrate(Box<migrate::Args>),
    /// Receive a virtual machine from another monitor and run it
    Receive(Box<receive::Args>),
    /// Make virtual machines from a running one, or from a checkpoint in memory
    Fork(Box<fork::Args>),
    /// List the checkpoints in memory, or end some
    Checkpoints(checkpoints::Args),
    /// Describe a snapshot and check its integrity
    Snapshot(snapshot::Args),
    /// Inspect and change a running virtual machine through its API socket
    Ctl(ctl::Args),
    /// Run a command in a guest that has Ebb's agent
    Exec(exec::Args),
    /// Copy files between the host and a guest that has Ebb's agent
    Cp(cp::Args),
    /// Connect with the serial line of a running virtual machine
    Console(console::Args),
    /// Show what `ebbd` does about the memory of this host's machines, and why
    Host(host::Args),
    /// Watch a host's machines, and what their memory is used for
    Top(top::Args),
    /// Own the stable pages that machines of one trust domain share
    MergeBroker(merge_broker::Args),
    /// Check whether this machine can run guests, and what to do if not
    Doctor(doctor::Args),
    /// Extract the ELF kernel from a bzImage
    ExtractVmlinux(extract_vmlinux::Args),
    /// The process that a monitor starts beside it
    #[command(name = COMPANION_COMMAND, hide = true)]
    Companion,
}

/// The command line, for man pages and completions.
pub fn command() -> clap::Command {
    Cli::command()
}

/// The program: executes the command line of this process, and returns its exit code.
pub fn main() -> ExitCode {
    let cli = Cli::parse_from(firecracker::arguments(std::env::args_os()));
    let log = match &cli.command {
        Command::Firecracker(args) => args.log(cli.log),
        _ => cli.log,
    };
    let code = ebb_program::run(
        "ebb",
        &log,
        || LogWriter,
        || match cli.command {
            Command::Run(args) => run::run(*args),
            Command::Firecracker(args) => firecracker::run(*args),
            Command::Restore(args) => restore::run(*args),
            Command::Migrate(args) => migrate::run(*args),
            Command::Receive(args) => receive::run(*args),
            Command::Fork(args) => fork::run(&args),
            Command::Checkpoints(args) => checkpoints::run(args),
            Command::Snapshot(args) => snapshot::run(args),
            Command::Ctl(args) => ctl::run(args),
            Command::Exec(args) => Ok(exec::run(args)),
            Command::Cp(args) => cp::run(args),
            Command::Console(args) => console::run(&args),
            Command::Host(args) => host::run(args),
            Command::Top(args) => top::run(&args),
            Command::MergeBroker(args) => merge_broker::run(args),
            Command::Doctor(args) => doctor::run(&args),
            Command::ExtractVmlinux(args) => extract_vmlinux::run(args),
            Command::Companion => Ok(serve_companion().map(|()| ExitCode::SUCCESS)?),
        },
    );
    ebb_vmm::log::finish();
    code
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Clap detects contradictions only when a command is first used.
    #[test]
    fn the_command_line_is_sound() {
        command().debug_assert();
    }
}

//! The command line of Ebb.

mod ctl;
mod doctor;
mod extract_vmlinux;
mod guest_image;
mod lab;
mod merge_broker;
mod migrate;
mod overrides;
mod receive;
mod restore;
mod run;
mod snapshot;
mod virtual_host;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tracing_subscriber::EnvFilter;

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
    /// What to log on standard error: error, warn, info, debug, trace, or a filter such as
    /// ebb_vmm=debug
    #[arg(
        long,
        global = true,
        value_name = "FILTER",
        default_value = "warn",
        env = "EBB_LOG",
        hide_env_values = true
    )]
    log: String,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run a virtual machine
    Run(Box<run::Args>),
    /// Run the virtual machine of a snapshot
    Restore(Box<restore::Args>),
    /// Move a running virtual machine to another monitor
    Migrate(Box<migrate::Args>),
    /// Wait for the virtual machine of another monitor, and run it
    Receive(Box<receive::Args>),
    /// Say what is in a snapshot, and whether it is whole
    Snapshot(snapshot::Args),
    /// Look at and change a running virtual machine through its API socket
    Ctl(ctl::Args),
    /// Own the stable pages that machines of one trust domain share
    MergeBroker(merge_broker::Args),
    /// Say whether this machine can run guests, and what to do if not
    Doctor(doctor::Args),
    /// Run experiments on real guests
    Lab(lab::Args),
    /// Run a command in a KVM host of our own, on machines whose KVM cannot run Linux
    VirtualHost(virtual_host::Args),
    /// Build the initial RAM file system of test guests
    GuestImage(guest_image::Args),
    /// Unpack the ELF kernel out of a bzImage
    ExtractVmlinux(extract_vmlinux::Args),
}

fn main() -> ExitCode {
    if std::process::id() == 1 {
        ebb_virtual_host::inside::init_main();
    }
    let cli = Cli::parse();
    let filter = match EnvFilter::try_new(&cli.log) {
        Ok(filter) => filter,
        Err(error) => {
            eprintln!("ebb: --log {}: {error}; use a level such as info", cli.log);
            return ExitCode::from(2);
        }
    };
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .without_time()
        .finish();
    // Not `init`: depending on features that other crates choose, it would also print what
    // libraries say through the crate `log`. virtio-queue says a line there for each register that
    // a guest writes wrongly, without a limit.
    if let Err(error) = tracing::subscriber::set_global_default(subscriber) {
        eprintln!("ebb: cannot log: {error}");
    }
    let result = match cli.command {
        Command::Run(args) => run::run(*args),
        Command::Restore(args) => restore::run(*args),
        Command::Migrate(args) => migrate::run(*args),
        Command::Receive(args) => receive::run(*args),
        Command::Snapshot(args) => snapshot::run(args),
        Command::Ctl(args) => ctl::run(args),
        Command::MergeBroker(args) => merge_broker::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Lab(args) => lab::run(args),
        Command::VirtualHost(args) => virtual_host::run(args),
        Command::GuestImage(args) => guest_image::run(args),
        Command::ExtractVmlinux(args) => extract_vmlinux::run(args),
    };
    result.unwrap_or_else(|error| {
        eprintln!("ebb: {}", printable(&describe(&error)));
        ExitCode::FAILURE
    })
}

/// An error with its causes, each told once: many errors have their cause in their own words
/// already.
fn describe(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

/// Text for a terminal. Part of it can come from a guest, a peer or a file, and must not move the
/// cursor or fill the screen: control characters are escaped, and its length is bounded.
fn printable(message: &str) -> String {
    const MOST_CHARACTERS: usize = 4000;
    let mut text = String::new();
    for character in message.chars().take(MOST_CHARACTERS) {
        if character.is_control() && character != '\n' {
            text.extend(character.escape_default());
        } else {
            text.push(character);
        }
    }
    if message.chars().nth(MOST_CHARACTERS).is_some() {
        text.push('…');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;
    use clap::CommandFactory as _;

    /// Clap finds contradictions when a command is used first.
    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn messages_leave_the_terminal_alone() {
        assert_eq!(
            printable("no\nsuch file \u{1b}]0;x\u{7}\u{9b}2J"),
            "no\nsuch file \\u{1b}]0;x\\u{7}\\u{9b}2J"
        );
        assert_eq!(printable(&"x".repeat(1 << 20)).chars().count(), 4001);
    }

    #[test]
    fn causes_are_told_once() {
        let error =
            Err::<(), _>(anyhow::anyhow!("no such file")).context("cannot read x").unwrap_err();
        assert_eq!(describe(&error), "cannot read x: no such file");
        let error = Err::<(), _>(anyhow::anyhow!("no such file"))
            .context("cannot read x: no such file")
            .unwrap_err();
        assert_eq!(describe(&error), "cannot read x: no such file");
    }
}

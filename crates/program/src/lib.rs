//! What the programs `ebb` and `ebb-lab` share on their command lines: how they log, how an error
//! reaches the terminal, how checks of a machine are printed, and files that appear when they are
//! whole.

mod check;
mod file;

pub use check::{Check, Grade, table};
pub use file::write_whole;

use std::process::ExitCode;

use tracing_subscriber::EnvFilter;

/// Exit code for wrong usage, as clap has it.
pub const USAGE: u8 = 2;

/// The option that every program has.
#[derive(Debug, clap::Args)]
pub struct LogArgs {
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
}

/// Runs `command` with logging as asked for, and prints its error. `name` is the program's.
pub fn run(
    name: &str,
    log: &LogArgs,
    command: impl FnOnce() -> anyhow::Result<ExitCode>,
) -> ExitCode {
    let filter = match EnvFilter::try_new(&log.log) {
        Ok(filter) => filter,
        Err(error) => {
            eprintln!("{name}: --log {}: {error}; use a level such as info", log.log);
            return ExitCode::from(USAGE);
        }
    };
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .without_time()
        .finish();
    // Not `init`: depending on features that other crates choose, it would also print what
    // libraries log through the crate `log`. virtio-queue logs a line there for each register that
    // a guest writes wrongly, without a limit.
    if let Err(error) = tracing::subscriber::set_global_default(subscriber) {
        eprintln!("{name}: cannot log: {error}");
    }
    command().unwrap_or_else(|error| {
        eprintln!("{name}: {}", printable(&describe(&error)));
        ExitCode::FAILURE
    })
}

/// An error with its causes, each once: many errors have their cause in their own words already.
pub fn describe(error: &anyhow::Error) -> String {
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
pub fn printable(message: &str) -> String {
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
    use anyhow::Context;

    use super::*;

    #[test]
    fn messages_leave_the_terminal_alone() {
        assert_eq!(
            printable("no\nsuch file \u{1b}]0;x\u{7}\u{9b}2J"),
            "no\nsuch file \\u{1b}]0;x\\u{7}\\u{9b}2J"
        );
        assert_eq!(printable(&"x".repeat(1 << 20)).chars().count(), 4001);
    }

    #[test]
    fn each_cause_appears_once() {
        let error =
            Err::<(), _>(anyhow::anyhow!("no such file")).context("cannot read x").unwrap_err();
        assert_eq!(describe(&error), "cannot read x: no such file");
        let error = Err::<(), _>(anyhow::anyhow!("no such file"))
            .context("cannot read x: no such file")
            .unwrap_err();
        assert_eq!(describe(&error), "cannot read x: no such file");
    }
}

//! Command-line code shared by the programs `ebb` and `ebb-lab`: logging, error output, the table
//! of machine checks, and atomic file writes.

mod check;
mod file;
mod meminfo;

pub use check::{Check, Grade, table};
pub use file::write_whole;
pub use meminfo::of_meminfo;

use std::io::Write;
use std::process::ExitCode;
use std::sync::OnceLock;

use tracing_subscriber::EnvFilter;

/// Exit code for wrong usage, the same as clap's.
pub const USAGE: u8 = 2;

/// The logging option of every program.
#[derive(Clone, Debug, clap::Args)]
pub struct LogArgs {
    /// Log level for standard error: error, warn, info, debug, trace, or a filter such as
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

impl LogArgs {
    /// The filter `filter`, as if it were given.
    pub fn at(filter: &str) -> Self {
        Self { log: filter.to_owned() }
    }
}

/// Replaces the log's filter.
type SetFilter = Box<dyn Fn(EnvFilter) -> Result<(), String> + Send + Sync>;

static SET_FILTER: OnceLock<SetFilter> = OnceLock::new();

/// A library that logs each problem of an image, without a limit, and returns it as well, is left
/// out.
fn filter_of(text: &str) -> Result<EnvFilter, String> {
    EnvFilter::try_new(format!("{text},imago=off")).map_err(|error| error.to_string())
}

/// Logs what passes this filter from now on: a level, or one as in [`LogArgs`].
///
/// # Errors
/// It is no filter.
pub fn set_log_filter(text: &str) -> Result<(), String> {
    let filter = filter_of(text)?;
    SET_FILTER.get().map_or(Ok(()), |set| set(filter))
}

/// Sets up logging, runs `command` and prints its error. `name` is the program's name; what it logs
/// and the error are written to `output`, a line at a time.
pub fn run<W: Write>(
    name: &str,
    log: &LogArgs,
    output: impl Fn() -> W + Clone + Send + Sync + 'static,
    command: impl FnOnce() -> anyhow::Result<ExitCode>,
) -> ExitCode {
    let filter = match filter_of(&log.log) {
        Ok(filter) => filter,
        Err(error) => {
            eprintln!("{name}: --log {}: {error}; use a level such as info", log.log);
            return ExitCode::from(USAGE);
        }
    };
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(output.clone())
        // Plain text, also in files: another crate can select the feature that colours it.
        .with_ansi(false)
        .without_time()
        .with_filter_reloading();
    let handle = subscriber.reload_handle();
    let _ = SET_FILTER
        .set(Box::new(move |filter| handle.reload(filter).map_err(|error| error.to_string())));
    let subscriber = subscriber.finish();
    // Not `init`: depending on the features selected by other crates, it would also print the
    // output of libraries that use the crate `log`. virtio-queue logs a line there for each invalid
    // register write of a guest, without a limit.
    if let Err(error) = tracing::subscriber::set_global_default(subscriber) {
        eprintln!("{name}: cannot log: {error}");
    }
    command().unwrap_or_else(|error| {
        let line = format!("{name}: {}\n", printable(&describe(&error)));
        // Without a standard error, the line is lost.
        let _ = output().write_all(line.as_bytes());
        ExitCode::FAILURE
    })
}

/// Formats an error with its causes, each once: many errors already include their cause.
pub fn describe(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

/// Sanitizes text for a terminal. Parts of it can come from a guest, a peer or a file, and must not
/// move the cursor or fill the screen: control characters are escaped and the length is bounded. So
/// are those that change the direction of writing, which would move what follows on the line
/// (Unicode Standard Annex 9, table 3).
pub fn printable(message: &str) -> String {
    const MOST_CHARACTERS: usize = 4000;
    let mut text = String::new();
    for character in message.chars().take(MOST_CHARACTERS) {
        let turns = matches!(
            character,
            '\u{61c}'
                | '\u{200e}'
                | '\u{200f}'
                | '\u{202a}'..='\u{202e}'
                | '\u{2066}'..='\u{2069}'
        );
        if turns || character.is_control() && character != '\n' {
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
    fn control_characters_and_long_messages_are_defused() {
        assert_eq!(
            printable("no\nsuch file \u{1b}]0;x\u{7}\u{9b}2J"),
            "no\nsuch file \\u{1b}]0;x\\u{7}\\u{9b}2J"
        );
        assert_eq!(printable("a\u{202e}b\u{2069}ü"), "a\\u{202e}b\\u{2069}ü");
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

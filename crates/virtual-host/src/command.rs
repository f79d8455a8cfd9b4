//! Commands for a virtual host, and their output.

use std::time::Duration;

use crate::channel::{ExitStatus, Program};

/// A command to run in the host. Its standard input is empty.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Command {
    pub(crate) program: Program,
    pub(crate) time_limit: Option<Duration>,
}

impl Command {
    /// A command that runs `program`, which is searched in the host's `PATH`.
    pub fn new(program: impl Into<String>) -> Self {
        let program = Program { argv: vec![program.into()], ..Program::default() };
        Self { program, time_limit: None }
    }

    /// A command line for the host's shell.
    pub fn shell(line: impl Into<String>) -> Self {
        Self::new("/bin/sh").arg("-c").arg(line)
    }

    /// Adds an argument.
    #[must_use]
    pub fn arg(mut self, argument: impl Into<String>) -> Self {
        self.program.argv.push(argument.into());
        self
    }

    /// Adds arguments.
    #[must_use]
    pub fn args<I: IntoIterator<Item: Into<String>>>(mut self, arguments: I) -> Self {
        self.program.argv.extend(arguments.into_iter().map(Into::into));
        self
    }

    /// Sets a variable of its environment.
    #[must_use]
    pub fn env(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.program.environment.push((name.into(), value.into()));
        self
    }

    /// Sets its working directory (default: `/`).
    #[must_use]
    pub fn directory(mut self, path: impl Into<String>) -> Self {
        self.program.directory = Some(path.into());
        self
    }

    /// Limits its run time; by default only the host's own limit applies.
    #[must_use]
    pub fn time_limit(mut self, limit: Duration) -> Self {
        self.time_limit = Some(limit);
        self
    }
}

/// A piece of a command's output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Output<'bytes> {
    /// From its standard output.
    Stdout(&'bytes [u8]),
    /// From its standard error.
    Stderr(&'bytes [u8]),
}

/// A command's exit status and output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Captured {
    /// Its exit status.
    pub status: ExitStatus,
    /// Its standard output.
    pub stdout: Vec<u8>,
    /// Its standard error.
    pub stderr: Vec<u8>,
}

impl Captured {
    /// Standard output as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }
}

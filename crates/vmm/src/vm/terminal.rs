//! Raw mode of the terminal.

use std::io::{self, IsTerminal};
use std::os::fd::OwnedFd;

use rustix::termios::{OptionalActions, OutputModes, Termios, tcgetattr, tcsetattr};

/// A terminal in raw mode. Dropping it restores the previous mode.
#[derive(Debug)]
pub struct RawTerminal {
    terminal: OwnedFd,
    before: Termios,
}

/// Whether the terminal processes output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Output {
    /// As before, so that the program's own lines stay readable.
    Processed,
    /// Not at all: another terminal has processed it.
    Raw,
}

impl RawTerminal {
    /// Puts the terminal on standard input into raw mode.
    ///
    /// # Errors
    /// Standard input is not a terminal, or its mode cannot be changed.
    pub fn enter(output: Output) -> io::Result<Self> {
        let stdin = io::stdin();
        if !stdin.is_terminal() {
            return Err(io::Error::other(
                "standard input is no terminal; use --serial stdio for pipes",
            ));
        }
        let terminal = rustix::io::dup(&stdin)?;
        let before = tcgetattr(&terminal)?;
        let mut raw = before.clone();
        raw.make_raw();
        if output == Output::Processed {
            raw.output_modes |= before.output_modes & (OutputModes::OPOST | OutputModes::ONLCR);
        }
        tcsetattr(&terminal, OptionalActions::Now, &raw)?;
        Ok(Self { terminal, before })
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        // Ignored: the terminal is gone.
        let _ = tcsetattr(&self.terminal, OptionalActions::Now, &self.before);
    }
}

/// Detects the escape sequence in typed input: Ctrl-A x, as in QEMU; Ctrl-A twice is one Ctrl-A.
#[derive(Debug, Default)]
pub struct EscapeSequence {
    pending: bool,
}

/// Result of filtering typed bytes.
#[derive(Debug, PartialEq, Eq)]
pub enum Typed {
    /// Bytes for the guest.
    Input(Vec<u8>),
    /// The user wants to end the monitor.
    Quit,
}

const CTRL_A: u8 = 1;

impl EscapeSequence {
    /// Filters bytes as they were typed.
    pub fn filter(&mut self, bytes: &[u8]) -> Typed {
        let mut input = Vec::with_capacity(bytes.len());
        for &byte in bytes {
            match (std::mem::take(&mut self.pending), byte) {
                (false, CTRL_A) => self.pending = true,
                (true, b'x' | b'X') => return Typed::Quit,
                (true, CTRL_A) | (false, _) => input.push(byte),
                (true, _) => input.extend([CTRL_A, byte]),
            }
        }
        Typed::Input(input)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_escape_sequence_is_removed() {
        let mut escape = EscapeSequence::default();
        assert_eq!(escape.filter(b"ls\r"), Typed::Input(b"ls\r".to_vec()));
        assert_eq!(escape.filter(&[1, 1]), Typed::Input(vec![1]));
        assert_eq!(escape.filter(&[1, b'b']), Typed::Input(vec![1, b'b']));
        assert_eq!(escape.filter(&[1]), Typed::Input(Vec::new()));
        assert_eq!(escape.filter(b"x"), Typed::Quit);
    }
}

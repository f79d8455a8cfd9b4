//! The tail of a console's output, for error messages.

use std::collections::VecDeque;
use std::io::Read;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

/// Number of bytes kept.
const TAIL_BYTES: usize = 16 << 10;
/// Number of lines in an error message.
const TAIL_LINES: usize = 20;
/// QEMU's warning about each feature of the processor model that its emulator lacks; all of them
/// are irrelevant.
const NOISE: &str = "TCG doesn't support requested feature";
/// Start of Linux's panic message.
const PANIC: &str = "Kernel panic";

/// The tail of an output stream, written by one thread and read after a failure.
#[derive(Debug, Clone, Default)]
pub struct Tail(Arc<Mutex<VecDeque<u8>>>);

impl Tail {
    /// Appends output; the oldest bytes beyond the bound are dropped.
    pub fn push(&self, bytes: &[u8]) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = &bytes[bytes.len().saturating_sub(TAIL_BYTES)..];
        let excess = (kept.len() + bytes.len()).saturating_sub(TAIL_BYTES);
        kept.drain(..excess);
        kept.extend(bytes);
    }

    /// Collects the output of `source` in a thread until its end.
    pub fn collect(
        &self,
        mut source: impl Read + Send + 'static,
    ) -> std::io::Result<JoinHandle<()>> {
        let tail = self.clone();
        thread::Builder::new().name("console".to_owned()).spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(length @ 1..) = source.read(&mut buffer) {
                tail.push(&buffer[..length]);
            }
        })
    }

    /// The lines that best explain a failure, without control characters: those from a kernel panic
    /// on, else the last ones.
    pub fn lines(&self) -> Vec<String> {
        let bytes: Vec<u8> =
            self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().copied().collect();
        let text = String::from_utf8_lossy(&bytes);
        let lines: Vec<String> = text
            .lines()
            .map(|line| {
                line.chars()
                    .filter(|character| !character.is_control())
                    .collect::<String>()
                    .trim()
                    .to_owned()
            })
            .filter(|line| !line.is_empty() && !line.contains(NOISE))
            .collect();
        let panic = lines.iter().rposition(|line| line.contains(PANIC));
        let first = panic.unwrap_or_else(|| lines.len().saturating_sub(TAIL_LINES));
        lines.into_iter().skip(first).take(TAIL_LINES).collect()
    }

    /// The last lines as an addition to an error message; empty when there are none.
    pub fn describe(&self) -> String {
        let lines = self.lines();
        if lines.is_empty() {
            String::new()
        } else {
            format!("; last lines of its console:\n    {}", lines.join("\n    "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_lines_are_kept() {
        let tail = Tail::default();
        for number in 0..10_000 {
            tail.push(format!("line {number}\r\n").as_bytes());
        }
        let lines = tail.lines();
        assert_eq!(lines.len(), TAIL_LINES);
        assert_eq!(lines.last().map(String::as_str), Some("line 9999"));
        assert!(tail.0.lock().unwrap().len() <= TAIL_BYTES);
    }

    #[test]
    fn a_single_large_push_is_bounded() {
        let tail = Tail::default();
        tail.push(&vec![b'x'; 10 * TAIL_BYTES]);
        assert_eq!(tail.0.lock().unwrap().len(), TAIL_BYTES);
    }

    #[test]
    fn a_panic_is_shown_from_its_beginning_and_without_noise() {
        let tail = Tail::default();
        tail.push(b"boot\n[    3.1] Kernel panic - not syncing: why\n");
        for number in 0..100 {
            tail.push(format!("trace {number}\nqemu: warning: {NOISE}: x\n").as_bytes());
        }
        let lines = tail.lines();
        assert_eq!(lines.len(), TAIL_LINES);
        assert!(
            lines[0].ends_with("why") && lines[1] == "trace 0" && lines[2] == "trace 1",
            "{lines:?}"
        );
    }

    #[test]
    fn an_empty_console_has_no_description() {
        assert_eq!(Tail::default().describe(), "");
    }
}

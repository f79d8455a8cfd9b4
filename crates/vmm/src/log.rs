//! Log lines of a running machine: a thread writes them, so that a standard error that is not read
//! delays neither a vCPU nor the main thread, which handles signals.

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock, RwLockWriteGuard};
use std::time::Duration;

use crate::devices::console::ConsoleOutput;

/// Time that a slow reader has at the end.
const LAST_LINES: Duration = Duration::from_millis(500);

/// The queue, from the first machine of the process on.
static QUEUE: RwLock<Option<Queue>> = RwLock::new(None);

struct Queue {
    output: ConsoleOutput,
    dropped: AtomicU64,
}

/// Standard error, one line with each write: written directly until a machine runs, and then by a
/// thread. Lines that it has no room for are dropped and counted.
#[derive(Debug, Clone, Copy)]
pub struct LogWriter;

impl Write for LogWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        match &*QUEUE.read().unwrap_or_else(PoisonError::into_inner) {
            None => io::stderr().write_all(line)?,
            Some(queue) => queue.push(line),
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Queue {
    fn push(&self, line: &[u8]) {
        let dropped = self.dropped.swap(0, Ordering::Relaxed);
        let notice = match dropped {
            0 => String::new(),
            dropped => format!("{dropped} lines of the log were dropped\n"),
        };
        if !self.output.push_whole(&[notice.as_bytes(), line].concat()) {
            self.dropped.fetch_add(dropped + 1, Ordering::Relaxed);
        }
    }
}

/// Writes a line for the user, a newline added.
pub fn line(text: &str) {
    // Without a standard error, the line is lost.
    let _ = LogWriter.write(format!("{text}\n").as_bytes());
}

/// Starts the thread, which calls `restrict` first, unless the process has it already.
pub(crate) fn start(restrict: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let mut queue = QUEUE.write().unwrap_or_else(PoisonError::into_inner);
    if queue.is_some() {
        return Ok(());
    }
    let (output, writer) = ConsoleOutput::stream(io::stderr().as_fd().try_clone_to_owned()?);
    writer.spawn("log", restrict)?;
    *queue = Some(Queue { output, dropped: AtomicU64::new(0) });
    Ok(())
}

/// The log, in which no other thread is in the middle of anything.
pub(crate) struct Held(RwLockWriteGuard<'static, Option<Queue>>);

/// Holds the log while the process is forked; the other threads' lines wait.
pub(crate) fn hold() -> Held {
    Held(QUEUE.write().unwrap_or_else(PoisonError::into_inner))
}

impl Held {
    /// In the new process, which does not have the thread: lines are written directly again.
    pub(crate) fn forget_thread(mut self) {
        // Its locks may be held by threads that are not here.
        std::mem::forget(self.0.take());
    }
}

/// Gives the last lines a moment to be written. Call it at the end of the process.
pub fn finish() {
    if let Some(queue) = &*QUEUE.read().unwrap_or_else(PoisonError::into_inner) {
        queue.output.finish(LAST_LINES);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::fd::OwnedFd;

    use super::*;
    use crate::devices::console::BACKLOG_BYTES;

    #[test]
    fn whole_lines_are_dropped_and_counted() {
        let (mut reader, pipe) = io::pipe().unwrap();
        let (output, writer) = ConsoleOutput::stream(OwnedFd::from(pipe));
        let queue = Queue { output, dropped: AtomicU64::new(0) };
        // Before the thread is started nothing is written.
        let line = [&[b'x'; 99][..], b"\n"].concat();
        let room = BACKLOG_BYTES / line.len();
        for _ in 0..room + 7 {
            queue.push(&line);
        }
        assert_eq!(queue.dropped.load(Ordering::Relaxed), 7);
        writer.spawn("log", || {}).unwrap();
        let mut text = vec![0; room * line.len()];
        reader.read_exact(&mut text).unwrap();
        assert!(text == line.repeat(room));
        queue.push(b"last\n");
        queue.output.finish(Duration::from_secs(60));
        drop(queue);
        let mut rest = vec![0; 100];
        let length = reader.read(&mut rest).unwrap();
        assert_eq!(rest[..length], *b"7 lines of the log were dropped\nlast\n");
    }
}

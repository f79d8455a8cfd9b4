//! Output of a serial line: standard output, the terminal, a file or none.
//!
//! A reader that does not read must not stop the guest, and must not delay the pause of a vCPU.
//! Output is written only when the descriptor accepts it; up to [`BACKLOG_BYTES`] are kept, more is
//! dropped and counted.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::config::SerialConfig;

/// Most bytes of output kept for a slow reader.
pub const BACKLOG_BYTES: usize = 64 << 10;
/// A writable pipe accepts at least this much at once (POSIX `PIPE_BUF` on Linux), in bytes.
const CHUNK_BYTES: usize = 4096;

/// The output side of a console.
#[derive(Debug)]
pub struct ConsoleOutput {
    target: Option<OwnedFd>,
    backlog: VecDeque<u8>,
    dropped_bytes: u64,
}

impl ConsoleOutput {
    /// Opens the output that `config` names.
    pub fn open(config: &SerialConfig) -> io::Result<Self> {
        let target = match config {
            SerialConfig::Null => None,
            SerialConfig::Stdio | SerialConfig::Tty => {
                Some(io::stdout().as_fd().try_clone_to_owned()?)
            }
            SerialConfig::File(path) => Some(create(path)?.into()),
        };
        Ok(Self::new(target))
    }

    /// An output that discards everything.
    pub fn nowhere() -> Self {
        Self::new(None)
    }

    fn new(target: Option<OwnedFd>) -> Self {
        Self { target, backlog: VecDeque::new(), dropped_bytes: 0 }
    }

    /// Bytes dropped because they were not read in time.
    pub fn dropped_bytes(&self) -> u64 {
        self.dropped_bytes
    }

    /// Whether output is waiting for the reader.
    pub fn has_backlog(&self) -> bool {
        !self.backlog.is_empty()
    }

    /// Writes as much as the descriptor accepts without blocking.
    pub fn drain(&mut self) {
        let Some(target) = &self.target else {
            self.backlog.clear();
            return;
        };
        while !self.backlog.is_empty() {
            let mut ready = [PollFd::new(target, PollFlags::OUT)];
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            if !matches!(poll(&mut ready, Some(&now)), Ok(1..))
                || !ready[0].revents().contains(PollFlags::OUT)
            {
                return;
            }
            let (front, _) = self.backlog.as_slices();
            let chunk = &front[..front.len().min(CHUNK_BYTES)];
            match rustix::io::write(target, chunk) {
                Ok(written) => {
                    self.backlog.drain(..written);
                }
                Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => return,
                Err(_) => {
                    // The reader is gone or the disk is full: the guest continues without a
                    // console.
                    self.dropped_bytes += self.backlog.len() as u64;
                    self.backlog.clear();
                    self.target = None;
                    return;
                }
            }
        }
    }
}

fn create(path: &std::path::Path) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).open(path)
}

impl Write for ConsoleOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.target.is_none() {
            return Ok(bytes.len());
        }
        let room = BACKLOG_BYTES - self.backlog.len().min(BACKLOG_BYTES);
        let taken = bytes.len().min(room);
        self.backlog.extend(&bytes[..taken]);
        self.dropped_bytes += (bytes.len() - taken) as u64;
        self.drain();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.drain();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    #[test]
    fn a_stuck_reader_costs_only_output() {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let pipe_bytes = rustix::pipe::fcntl_getpipe_size(&writer).unwrap();
        let mut console = ConsoleOutput::new(Some(writer));
        let total = (pipe_bytes + 3 * BACKLOG_BYTES).next_multiple_of(1024);
        for _ in 0..total / 1024 {
            assert_eq!(console.write(&[b'x'; 1024]).unwrap(), 1024);
        }
        assert!(console.has_backlog());
        assert!(console.dropped_bytes() > 0);
        // Output that was not dropped arrives as the reader reads.
        let kept = total as u64 - console.dropped_bytes();
        let mut source = File::from(reader.try_clone().unwrap());
        let (mut received, mut buffer) = (0, [0; 4096]);
        while received < kept {
            received += source.read(&mut buffer).unwrap() as u64;
            console.drain();
        }
        assert_eq!(received, kept);
        assert!(!console.has_backlog());
        drop(reader);
        console.write_all(b"after the reader left").unwrap();
        assert!(!console.has_backlog());
    }

    #[test]
    fn a_file_receives_all_output() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("console");
        let mut console = ConsoleOutput::open(&SerialConfig::File(path.clone())).unwrap();
        console.write_all(&[b'y'; 10_000]).unwrap();
        assert_eq!(std::fs::read(path).unwrap(), vec![b'y'; 10_000]);
        assert_eq!(console.dropped_bytes(), 0);
    }
}

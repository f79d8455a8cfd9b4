//! Console output in two files in turn, so that it is bounded and the newest is always kept.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// The two files. Both are open from the start, since nothing is opened later.
#[derive(Debug)]
pub(super) struct Files {
    pair: [File; 2],
    /// The one that output goes to.
    current: usize,
    /// Room in it, in bytes.
    left_bytes: u64,
    max_bytes: u64,
}

impl Files {
    /// Opens `path` and `path` with `.1` appended, for the owner only if they are new. Output is
    /// appended to the one that was written last; when it has `max_bytes`, the other one is emptied
    /// and continues.
    pub(super) fn open(path: &Path, max_bytes: u64) -> io::Result<Self> {
        let mut other = path.as_os_str().to_owned();
        other.push(".1");
        let pair = [create(path)?, create(&PathBuf::from(other))?];
        let written = |file: &File| file.metadata().and_then(|data| written(&data));
        let times = (written(&pair[0])?, written(&pair[1])?);
        // Within the same tick of the clock, the full one was first.
        let is_full = || pair[0].metadata().map(|data| data.len() >= max_bytes);
        let second = times.1 > times.0 || times.0.is_some() && times.0 == times.1 && is_full()?;
        let current = usize::from(second);
        let used_bytes = pair[current].metadata()?.len();
        Ok(Self { current, left_bytes: max_bytes.saturating_sub(used_bytes), max_bytes, pair })
    }

    /// Writes `bytes`; returns how many of them are lost because the disk is full or fails. Later
    /// ones may find room.
    pub(super) fn write(&mut self, bytes: &[u8]) -> usize {
        let mut left = bytes;
        while !left.is_empty() {
            if self.left_bytes == 0 && self.change().is_err() {
                return left.len();
            }
            let length = left.len().min(usize::try_from(self.left_bytes).unwrap_or(usize::MAX));
            match self.pair[self.current].write(&left[..length]) {
                Ok(0) => return left.len(),
                Ok(written) => {
                    left = &left[written..];
                    self.left_bytes -= written as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return left.len(),
            }
        }
        0
    }

    fn change(&mut self) -> io::Result<()> {
        let other = 1 - self.current;
        self.pair[other].set_len(0)?;
        (self.current, self.left_bytes) = (other, self.max_bytes);
        Ok(())
    }
}

/// An empty file was not written.
fn written(data: &Metadata) -> io::Result<Option<std::time::SystemTime>> {
    if data.len() == 0 { Ok(None) } else { data.modified().map(Some) }
}

fn create(path: &Path) -> io::Result<File> {
    // Appending continues at the beginning after a truncation. A FIFO without a reader is refused
    // instead of waited for.
    let mut options = OpenOptions::new();
    options.create(true).append(true).mode(0o600).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY);
    let file = options.open(path)?;
    if file.metadata()?.is_file() {
        return Ok(file);
    }
    Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"))
}

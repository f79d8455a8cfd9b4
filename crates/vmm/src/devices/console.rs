//! Output of a serial line: standard output, the terminal, files or none; and that of the log.
//!
//! A thread of its own writes, so that a reader that does not read, a terminal that is stopped or a
//! disk that does not answer delays neither a vCPU nor a pause nor the end of the machine. Up to
//! [`BACKLOG_BYTES`] wait for it, or for the limits of the output; more is dropped and counted.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use vmm_sys_util::eventfd::EventFd;

use crate::config::{RateLimits, SerialConfig};
use crate::devices::throttle::{Admission, Throttle};

mod files;
mod recent;

use files::Files;
pub(crate) use recent::Recent;

/// Most bytes of output that wait for a slow reader.
pub const BACKLOG_BYTES: usize = 64 << 10;
/// Most bytes of a write.
const CHUNK_BYTES: usize = 4096;
/// How long the thread waits for more before it writes: a guest writes byte by byte, and to wake
/// the thread for each would take the vCPU more time than the byte.
const GATHER: Duration = Duration::from_millis(1);

/// The output side of a console. Clones are the same.
#[derive(Debug, Clone)]
pub struct ConsoleOutput {
    /// Nothing for an output that is discarded.
    writer: Option<Arc<Shared>>,
    /// Kept for a client of the API, also if the rest is discarded.
    recent: Option<Arc<Recent>>,
}

#[derive(Debug)]
struct Shared {
    /// A write is a request.
    throttle: Arc<Throttle>,
    state: Mutex<State>,
    /// Output has arrived or was written, or the output side is gone.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Output that is not written yet; the thread may be writing its beginning.
    backlog: VecDeque<u8>,
    dropped_bytes: u64,
    /// The reader is gone: everything is dropped.
    closed: bool,
    /// There will be no more output.
    ended: bool,
}

impl Shared {
    /// Waits until `bytes` may be written, or the output has ended.
    fn wait_for_tokens<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        bytes: u64,
    ) -> MutexGuard<'a, State> {
        loop {
            let now = Instant::now();
            if state.ended || self.throttle.admit(bytes, now) == Admission::Now {
                return state;
            }
            let wait = self
                .throttle
                .resume_at()
                .map_or(Duration::ZERO, |at| at.saturating_duration_since(now));
            let waited = self.changed.wait_timeout(state, wait);
            (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The thread that writes; its output side ends it.
#[derive(Debug)]
pub struct ConsoleWriter {
    shared: Arc<Shared>,
    target: Target,
}

#[derive(Debug)]
enum Target {
    /// Standard output or standard error, which other processes may share.
    Stream(OwnedFd),
    Files(Files),
}

impl ConsoleOutput {
    /// Opens the output that `config` names, and returns its [`ConsoleWriter`] if it needs one.
    pub fn open(config: &SerialConfig) -> io::Result<(Self, Option<ConsoleWriter>)> {
        let target = match config {
            SerialConfig::Null => return Ok((Self::nowhere(), None)),
            SerialConfig::Stdio | SerialConfig::Tty => {
                Target::Stream(io::stdout().as_fd().try_clone_to_owned()?)
            }
            SerialConfig::File { path, max, .. } => Target::Files(Files::open(path, max.bytes())?),
        };
        let limits = match config {
            SerialConfig::File { limits, .. } => *limits,
            _ => RateLimits::default(),
        };
        let (output, writer) = Self::to(target, limits);
        Ok((output, Some(writer)))
    }

    /// An output that discards everything.
    pub fn nowhere() -> Self {
        Self { writer: None, recent: None }
    }

    /// The same, which keeps recent output and signals `wake` when a client waits for more.
    #[must_use]
    pub fn keeping(mut self, wake: EventFd) -> Self {
        self.recent = Some(Arc::new(Recent::new(wake)));
        self
    }

    /// Recent output, if it is kept.
    pub(crate) fn recent(&self) -> Option<&Arc<Recent>> {
        self.recent.as_ref()
    }

    /// An output to `stream`, which other processes may share, and its thread.
    pub(crate) fn stream(stream: OwnedFd) -> (Self, ConsoleWriter) {
        Self::to(Target::Stream(stream), RateLimits::default())
    }

    /// Writes all of `bytes`, or nothing if there is no room for them; returns whether there was.
    pub(crate) fn push_whole(&self, bytes: &[u8]) -> bool {
        let Some(shared) = &self.writer else { return true };
        let mut state = shared.lock();
        let fits = !state.closed && bytes.len() <= BACKLOG_BYTES - state.backlog.len();
        if fits {
            state.backlog.extend(bytes);
            shared.changed.notify_all();
        }
        fits
    }

    fn to(target: Target, limits: RateLimits) -> (Self, ConsoleWriter) {
        let shared = Arc::new(Shared {
            throttle: Arc::new(Throttle::new(limits, Instant::now())),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let writer = ConsoleWriter { shared: Arc::clone(&shared), target };
        (Self { writer: Some(shared), recent: None }, writer)
    }

    /// Bytes dropped because they were not read in time, or could not be written.
    pub fn dropped_bytes(&self) -> u64 {
        self.writer.as_ref().map_or(0, |shared| shared.lock().dropped_bytes)
    }

    /// Its limits, unless it is discarded.
    pub fn throttle(&self) -> Option<&Arc<Throttle>> {
        self.writer.as_ref().map(|shared| &shared.throttle)
    }

    /// Makes the thread consider changed limits.
    pub fn wake(&self) {
        if let Some(shared) = &self.writer {
            let _state = shared.lock();
            shared.changed.notify_all();
        }
    }

    /// Ends the output: waits until everything is written, without its limits, at most for
    /// `limit`.
    pub fn finish(&self, limit: Duration) {
        let Some(shared) = &self.writer else { return };
        let mut state = shared.lock();
        state.ended = true;
        shared.changed.notify_all();
        let waits = |state: &mut State| !state.backlog.is_empty();
        // Whatever is left then is lost.
        let _ = shared
            .changed
            .wait_timeout_while(state, limit, waits)
            .unwrap_or_else(PoisonError::into_inner);
    }
}

impl Write for ConsoleOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Some(recent) = &self.recent {
            recent.add(bytes);
        }
        let Some(shared) = &self.writer else { return Ok(bytes.len()) };
        let mut state = shared.lock();
        let room = if state.closed { 0 } else { BACKLOG_BYTES - state.backlog.len() };
        let taken = bytes.len().min(room);
        let waits = state.backlog.is_empty();
        state.backlog.extend(&bytes[..taken]);
        state.dropped_bytes += (bytes.len() - taken) as u64;
        drop(state);
        if waits && taken > 0 {
            shared.changed.notify_all();
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl ConsoleWriter {
    /// Starts the thread `name`, which calls `restrict` first.
    pub fn spawn(mut self, name: &str, restrict: impl FnOnce() + Send + 'static) -> io::Result<()> {
        // Not joined: it may be in a write that does not return.
        thread::Builder::new().name(name.to_owned()).spawn(move || {
            restrict();
            self.run();
        })?;
        Ok(())
    }

    fn run(&mut self) {
        let mut chunk = Vec::with_capacity(CHUNK_BYTES);
        loop {
            let mut state = self.shared.lock();
            while state.backlog.is_empty() {
                if state.ended {
                    return;
                }
                state = self.shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            let gathers = |state: &mut State| !state.ended && state.backlog.len() < CHUNK_BYTES;
            let gathered = self.shared.changed.wait_timeout_while(state, GATHER, gathers);
            (state, _) = gathered.unwrap_or_else(PoisonError::into_inner);
            chunk.clear();
            chunk.extend(state.backlog.iter().take(CHUNK_BYTES));
            state = self.shared.wait_for_tokens(state, chunk.len() as u64);
            drop(state);
            let written = self.target.write(&chunk);
            let mut state = self.shared.lock();
            if let Ok(lost) = written {
                state.backlog.drain(..chunk.len());
                state.dropped_bytes += lost as u64;
            } else {
                state.dropped_bytes += state.backlog.len() as u64;
                state.backlog.clear();
                state.closed = true;
            }
            if state.backlog.is_empty() {
                self.shared.changed.notify_all();
            }
        }
    }
}

impl Target {
    /// Writes all of `bytes`; returns how many of them are lost. An error is for good.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Files(files) => Ok(files.write(bytes)),
            Self::Stream(stream) => {
                let mut left = bytes;
                while !left.is_empty() {
                    match rustix::io::write(&*stream, left) {
                        Ok(written) => left = &left[written..],
                        Err(rustix::io::Errno::INTR) => {}
                        // Another process has made the shared descriptor non-blocking.
                        Err(rustix::io::Errno::AGAIN) => wait_for_room(stream)?,
                        // A full disk: there may be room later.
                        Err(rustix::io::Errno::NOSPC | rustix::io::Errno::DQUOT) => {
                            return Ok(left.len());
                        }
                        Err(error) => return Err(error.into()),
                    }
                }
                Ok(0)
            }
        }
    }
}

fn wait_for_room(stream: &OwnedFd) -> io::Result<()> {
    use rustix::event::{PollFd, PollFlags, poll};
    match poll(&mut [PollFd::new(stream, PollFlags::OUT)], None) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests;

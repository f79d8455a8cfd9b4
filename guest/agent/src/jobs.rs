//! Commands that run in a process of their own.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::Instant;

use ebb_agent::child::Child;
use serde_json::Value;

/// A command that runs.
pub struct Job {
    /// Number of the command.
    pub id: u64,
    child: Child<Value>,
    started: Instant,
}

/// How a job ended.
pub struct JobEnd {
    /// Time from its start to the end of its process, in ms.
    pub elapsed_ms: u64,
    /// Its result, or why it failed.
    pub result: Result<Value, String>,
}

impl Job {
    /// Runs `work` in a child process. The agent itself has a single thread, as that requires.
    pub fn start(id: u64, work: impl FnOnce() -> Result<Value, String>) -> io::Result<Self> {
        let started = Instant::now();
        Ok(Self { id, child: Child::start(work)?, started })
    }

    /// Readable when the job is about to end.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.child.descriptor()
    }

    /// Kills the job's process.
    pub fn kill(&self) {
        self.child.kill();
    }

    /// Waits for the job's end.
    pub fn finish(self) -> JobEnd {
        let result = self.child.finish();
        JobEnd { elapsed_ms: self.started.elapsed().as_millis() as u64, result }
    }
}

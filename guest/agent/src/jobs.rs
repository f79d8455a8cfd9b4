//! Commands that run in separate processes.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::Instant;

use ebb_agent::child::Child;
use serde_json::Value;

/// A running command.
pub struct Job {
    /// Number of the command.
    pub id: u64,
    child: Child<Value>,
    started: Instant,
}

/// End of a job.
pub struct JobEnd {
    /// Time from the start to the end of its process, in ms.
    pub elapsed_ms: u64,
    /// Its result, or the reason of its failure.
    pub result: Result<Value, String>,
}

impl Job {
    /// Runs `work` in a child process, which requires that the agent has a single thread.
    pub fn start(id: u64, work: impl FnOnce() -> Result<Value, String>) -> io::Result<Self> {
        let started = Instant::now();
        Ok(Self { id, child: Child::start(work)?, started })
    }

    /// Descriptor that becomes readable when the job is about to end.
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

//! The agent's protocol: one JSON document per line over the serial console.
//!
//! The agent's lines begin with a record separator (RFC 7464), which distinguishes them from the
//! kernel's messages on the same console. Commands have no separator. Several commands may run at
//! the same time; events contain the number of their command.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::command_line::BalloonDriver;
use crate::disk_load::DiskLoad;
use crate::meminfo::MemInfo;
use crate::page_faults::instructions::FaultInstructions;
use crate::page_faults::{FaultKind, TaskKind};
use crate::trace_load::TraceLoad;
use crate::vsock::Service;

/// First byte of each event (RFC 7464, record separator).
pub const RECORD_SEPARATOR: u8 = 0x1e;
/// Maximum length of a command line in bytes, without its terminator.
pub const COMMAND_LIMIT_BYTES: usize = 64 << 10;
/// Maximum number of concurrent programs and workloads.
pub const JOB_LIMIT: usize = 16;

/// A command with its number.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// Number that the answers repeat; 0 means "unknown" in answers and should not be used.
    pub id: u64,
    /// The command.
    pub command: Command,
}

/// Commands of the agent. All but the last ones are answered by `Done` or `Failed`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Command {
    /// A process allocates memory, writes all of it and exits. Result: `touch_ms`, the time of the
    /// writes.
    AllocTouchExit {
        /// Bytes to allocate.
        bytes: u64,
    },
    /// numactl's memhog: maps private memory, fills it with 0xff in steps of 10 MiB and exits.
    /// Debian's program is used if it is in the image. Result: `program`, `touch_ms` (built-in
    /// workload only).
    Memhog {
        /// Bytes to map.
        bytes: u64,
    },
    /// Allocates memory, fills it with a pattern and keeps it in addition to memory already held.
    /// Result: `held_bytes`.
    Hold {
        /// Bytes to add.
        bytes: u64,
        /// Seed of the pattern.
        pattern: u64,
    },
    /// Frees all held memory. Result: `released_bytes`.
    Release,
    /// Reads all held memory. Result: `held_bytes`, `wrong_pages`.
    VerifyHeld,
    /// Measures reads of all held memory in random order: see [`crate::timed_reads`]. Result: a
    /// [`crate::timed_reads::ReadReport`].
    ReadHeld {
        /// Number of passes over all pages, without one warm-up pass.
        passes: u32,
        /// Seed of the order.
        seed: u64,
    },
    /// Reads and writes a disk: see [`crate::disk_load`]. Result: a
    /// [`crate::disk_load::LoadReport`].
    DiskLoad(DiskLoad),
    /// Work with a given need of memory over time: see [`crate::trace_load`]. Result: a
    /// [`crate::trace_load::TraceReport`].
    TraceLoad(TraceLoad),
    /// Reads `/proc/meminfo`. Result: all values by name, in KiB.
    MemInfo,
    /// Reads `/proc/vmstat`. Result: all values by name.
    VmStat,
    /// Serves connections to a port of AF_VSOCK until it is cancelled.
    VsockServe {
        /// The port.
        port: u32,
        /// What is done with each.
        service: Service,
    },
    /// Serves `ebb exec`, `ebb checkpoint` and `ebb fork` as `ebb-guest-agent` does, until it is
    /// cancelled.
    GuestAgent,
    /// Reads random numbers until it is cancelled, and sends them to clients of a port of AF_VSOCK:
    /// see [`crate::random_numbers`].
    RandomNumbers {
        /// The port.
        port: u32,
        /// Sleep between two numbers in µs.
        pause_us: u64,
    },
    /// Sends back what arrives on TCP connections to a port, until it is cancelled.
    TcpEcho {
        /// The port.
        port: u16,
    },
    /// Connects to a port of the host over AF_VSOCK, sends and reads to the end: see
    /// [`crate::vsock::exchange`]. Result: a [`crate::vsock::ClientReport`].
    VsockExchange {
        /// The port.
        port: u32,
        /// Number of connections, all open at the same time.
        connections: u32,
        /// Bytes sent on each.
        bytes: u64,
    },
    /// Sleeps.
    Sleep {
        /// Duration in ms.
        ms: u64,
    },
    /// Reads a file. Result: `text`, at most 64 KiB.
    ReadFile {
        /// Path in the guest.
        path: String,
        /// Only lines that contain one of these words, in any case; without words all lines.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        words: Vec<String>,
    },
    /// Writes a file, including those of `/proc` and `/sys`.
    WriteFile {
        /// Path in the guest.
        path: String,
        /// New content.
        text: String,
    },
    /// Loads a kernel module.
    LoadModule {
        /// Path of its file in the guest.
        path: String,
        /// Parameters, as on `insmod`'s command line.
        parameters: String,
    },
    /// Unloads a kernel module.
    UnloadModule {
        /// Its name.
        name: String,
    },
    /// A process allocates and writes memory until `MemAvailable` is below a limit, then exits. The
    /// OOM killer selects this process first. Result: `allocated_bytes`, or `Failed` if it was
    /// killed.
    FillUntilOom {
        /// Memory to leave available.
        leave_bytes: u64,
    },
    /// Measures the rate of page faults: see [`crate::page_faults`]. Result: a
    /// [`crate::page_faults::FaultReport`].
    PageFaults {
        /// Kind of the mapping.
        kind: FaultKind,
        /// Number of tasks.
        tasks: u32,
        /// Kind of the tasks.
        threads: TaskKind,
        /// Measured seconds; the run takes one more.
        seconds: u32,
        /// Size of each mapping; 128 MiB in will-it-scale.
        mapping_bytes: u64,
    },
    /// Counts instructions of page faults and frees: see [`crate::page_faults::instructions`].
    /// Result: a [`crate::page_faults::instructions::InstructionReport`].
    FaultInstructions(FaultInstructions),
    /// Maps, writes, checks and frees memory in many ways: see [`crate::churn`]. Ends after
    /// `operations` or `seconds`, whichever comes first; one of them must be given. Result: a
    /// [`crate::churn::ChurnReport`].
    Churn {
        /// Maximum total memory of all tasks.
        bytes: u64,
        /// Number of processes.
        tasks: u32,
        /// Seed of the sequence of operations.
        seed: u64,
        /// Total number of operations of all tasks.
        operations: Option<u64>,
        /// Time limit.
        seconds: Option<u64>,
    },
    /// Increments and checks counters in all pages: see [`crate::count`]. Result: a
    /// [`crate::count::CountReport`].
    Count {
        /// Total memory of all tasks.
        bytes: u64,
        /// Number of processes.
        tasks: u32,
        /// Number of different page contents.
        kinds: u32,
        /// Number of pages between two pauses.
        burst_pages: u32,
        /// Length of a pause in µs.
        pause_us: u64,
        /// Duration in seconds.
        seconds: u64,
    },
    /// Reads a file or block device into the page cache. Result: `read_bytes`.
    TouchFile {
        /// Path in the guest.
        path: String,
        /// Maximum number of bytes to read.
        bytes: u64,
    },
    /// Drops clean page cache, dentries and inodes.
    DropCaches,
    /// Compacts all memory.
    Compact,
    /// Runs a program of the image. Result: `code` or `signal`, `stdout`, `stderr` (at most 64 KiB
    /// each).
    Exec {
        /// Program and arguments.
        argv: Vec<String>,
    },
    /// Kills a command that runs as a process.
    Cancel {
        /// Number of that command.
        id: u64,
    },
    /// Sends a `Sample` at this interval; 0 stops the samples.
    Samples {
        /// Interval in ms.
        interval_ms: u64,
    },
    /// Reads all clocks once. Result: a [`crate::clock::ClockReading`].
    Clock,
    /// Starts one reader of the clocks on each processor. Only one such watch runs at a time; it
    /// runs until it is stopped, also over pauses, saves and restores of the guest. Result: `cpus`,
    /// the processors' numbers.
    ClockWatchStart {
        /// Number of successive readings.
        burst_readings: u32,
        /// Sleep between two bursts in µs.
        pause_us: u64,
    },
    /// Returns the readers' observations so far. Result: a [`crate::clock_watch::WatchReport`].
    ClockWatchRead,
    /// Stops the readers. Result: as for `ClockWatchRead`.
    ClockWatchStop,
    /// Reads lines of the kernel's ring buffer. Result: `text`, at most the last 64 KiB.
    KernelLog {
        /// Selects the lines that contain one of these, ignoring case; empty for all lines.
        words: Vec<String>,
    },
    /// Powers the guest off. Answered only if that fails.
    PowerOff,
    /// Restarts the guest. Answered only if that fails.
    Reboot,
    /// Starts another kernel in place of this one (kexec), with the same command line. Answered
    /// only if that fails.
    Kexec {
        /// File with a bzImage; zeros may follow it.
        kernel: String,
        /// File with an initramfs, likewise.
        initrd: String,
    },
    /// Crashes the guest. Answered only if that fails.
    Crash {
        /// Kind of the crash.
        how: Crash,
    },
}

impl Command {
    /// Reads a whole file.
    pub fn read_file(path: &str) -> Self {
        Self::ReadFile { path: path.to_owned(), words: Vec::new() }
    }
}

/// Kinds of crashes of a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Crash {
    /// Kernel panic.
    Panic,
    /// Fault during the delivery of a double fault: the processor shuts down.
    TripleFault,
}

/// Messages of the agent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Event {
    /// The guest is up: modules are loaded and commands are accepted.
    Ready {
        /// Time since the kernel's start in ms.
        uptime_ms: u64,
        /// Kernel release.
        kernel: String,
        /// Processors online.
        cpus: u32,
        /// Memory.
        memory: MemInfo,
        /// The balloon driver that was loaded; `none` in an ordinary process.
        balloon_driver: BalloonDriver,
        /// Failures of the set-up that left the guest usable.
        warnings: Vec<String>,
    },
    /// A command that runs in a process of its own has been started. What the agent does itself is
    /// only answered by its end: each byte interrupts a guest twice.
    Started {
        /// Its number.
        id: u64,
    },
    /// A command has succeeded.
    Done {
        /// Its number.
        id: u64,
        /// Time from its start to its end, including the end of its process, in ms
        /// (CLOCK_MONOTONIC).
        elapsed_ms: u64,
        /// Its result; see [`Command`].
        result: Value,
    },
    /// A command has failed.
    Failed {
        /// Its number, 0 if the line could not be parsed.
        id: u64,
        /// The reason.
        error: String,
    },
    /// State of the guest's memory; see [`Command::Samples`].
    Sample {
        /// Time since the kernel's start in ms.
        uptime_ms: u64,
        /// Memory.
        memory: MemInfo,
    },
}

impl Request {
    /// Encodes the command as a line, with its terminator.
    pub fn to_line(&self) -> Result<Vec<u8>, serde_json::Error> {
        let mut line = serde_json::to_vec(self)?;
        line.push(b'\n');
        Ok(line)
    }
}

impl Event {
    /// Encodes the event as a line, with its separator and terminator.
    pub fn to_line(&self) -> Result<Vec<u8>, serde_json::Error> {
        let mut line = vec![RECORD_SEPARATOR];
        serde_json::to_writer(&mut line, self)?;
        line.push(b'\n');
        Ok(line)
    }

    /// Decodes the event in a line of the console; `None` for the kernel's text and for events that
    /// it has damaged.
    ///
    /// Unterminated text may precede the event.
    pub fn from_line(line: &[u8]) -> Option<Self> {
        let at = line.iter().rposition(|byte| *byte == RECORD_SEPARATOR)?;
        serde_json::from_slice(&line[at + 1..]).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn commands_have_readable_encodings() {
        let request = Request { id: 3, command: Command::AllocTouchExit { bytes: 1024 } };
        let line = request.to_line().unwrap();
        assert_eq!(line, b"{\"id\":3,\"command\":{\"alloc_touch_exit\":{\"bytes\":1024}}}\n");
        let plain: Request = serde_json::from_str(r#"{"id":4,"command":"mem_info"}"#).unwrap();
        assert_eq!(plain.command, Command::MemInfo);
    }

    #[test]
    fn events_are_found_after_text() {
        let event = Event::Failed { id: 1, error: "no\nsuch \u{1e} \"file\"".to_owned() };
        let line = event.to_line().unwrap();
        assert_eq!(line.iter().position(|byte| *byte == b'\n'), Some(line.len() - 1), "one line");
        assert_eq!(Event::from_line(&line), Some(event.clone()));
        let behind = [b"[    1.0] half a li".as_slice(), &line].concat();
        assert_eq!(Event::from_line(&behind), Some(event));
        assert_eq!(Event::from_line(b"[    1.0] Linux"), None);
        assert_eq!(Event::from_line(b"\x1e{\"done\":{\"id\":1[    1.0] text"), None);
    }

    proptest! {
        #[test]
        fn any_text_survives(id: u64, path in ".*", text in ".*") {
            let request = Request { id, command: Command::WriteFile { path, text } };
            let line = request.to_line().unwrap();
            prop_assert_eq!(serde_json::from_slice::<Request>(&line).unwrap(), request);
        }

        #[test]
        fn any_line_is_parsed(line: Vec<u8>) {
            Event::from_line(&line);
        }
    }
}

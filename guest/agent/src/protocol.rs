//! The agent's protocol: one JSON document a line over the serial console.
//!
//! Lines of the agent begin with a record separator (RFC 7464), so that they are told from the
//! kernel's messages on the same console. Commands have no such mark. Several commands may run at
//! the same time; events name the command they belong to.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::command_line::BalloonDriver;
use crate::meminfo::MemInfo;
use crate::page_faults::{FaultKind, TaskKind};

/// First byte of each event (RFC 7464, record separator).
pub const RECORD_SEPARATOR: u8 = 0x1e;
/// Longest command line in bytes, without its end.
pub const COMMAND_LIMIT_BYTES: usize = 64 << 10;
/// Most programs and workloads that run at the same time.
pub const JOB_LIMIT: usize = 16;

/// A command with its number.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// Number that the answers carry; 0 stands for "unknown" in answers and should not be used.
    pub id: u64,
    /// What to do.
    pub command: Command,
}

/// What the agent can do. All but the last ones answer with `Done` or `Failed`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Command {
    /// A process allocates memory, writes all of it and exits. Result: `touch_ms`, time of the
    /// writing alone.
    AllocTouchExit {
        /// Bytes to allocate.
        bytes: u64,
    },
    /// memhog of numactl: one private mapping, filled with 0xff in steps of 10 MiB, then exit.
    /// Debian's real program is used if it is in the image. Result: `program`, `touch_ms` (own
    /// workload only).
    Memhog {
        /// Bytes to map.
        bytes: u64,
    },
    /// Allocates memory, fills it with a pattern and keeps it; more than once adds. Result:
    /// `held_bytes`.
    Hold {
        /// Bytes to add.
        bytes: u64,
        /// Seed of the pattern.
        pattern: u64,
    },
    /// Gives all held memory back. Result: `released_bytes`.
    Release,
    /// Reads all held memory. Result: `held_bytes`, `wrong_pages`.
    VerifyHeld,
    /// Reads all held memory in random order, timed: see [`crate::timed_reads`]. Result: a
    /// [`crate::timed_reads::ReadReport`].
    ReadHeld {
        /// How often all pages are read; one more pass before does not count.
        passes: u32,
        /// What the order depends on.
        seed: u64,
    },
    /// Result: all of `/proc/meminfo`, by name, in KiB.
    MemInfo,
    /// Result: all of `/proc/vmstat`, by name.
    VmStat,
    /// Waits.
    Sleep {
        /// How long.
        ms: u64,
    },
    /// Result: `text`, at most 64 KiB of the file.
    ReadFile {
        /// Path in the guest.
        path: String,
    },
    /// Writes a file, also one of `/proc` and `/sys`.
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
    /// out-of-memory killer takes this process first. Result: `allocated_bytes`, or `Failed` when
    /// it was killed.
    FillUntilOom {
        /// Memory to leave available.
        leave_bytes: u64,
    },
    /// Page faults as fast as they come, counted: see [`crate::page_faults`]. Result: a
    /// [`crate::page_faults::FaultReport`].
    PageFaults {
        /// What is mapped.
        kind: FaultKind,
        /// How many tasks.
        tasks: u32,
        /// What they are: processes or threads.
        threads: TaskKind,
        /// Seconds that count; the run takes one more.
        seconds: u32,
        /// Size of each mapping; 128 MiB in will-it-scale.
        mapping_bytes: u64,
    },
    /// Memory is mapped, written, checked and given back in many ways: see [`crate::churn`]. Ends
    /// after `operations` or `seconds`, whatever comes first; one of them must be given. Result: a
    /// [`crate::churn::ChurnReport`].
    Churn {
        /// Memory that all tasks together use at most.
        bytes: u64,
        /// Processes.
        tasks: u32,
        /// What the sequence of operations depends on.
        seed: u64,
        /// Operations of all tasks together.
        operations: Option<u64>,
        /// Time limit.
        seconds: Option<u64>,
    },
    /// Counters in all pages are counted up and checked: see [`crate::count`]. Result: a
    /// [`crate::count::CountReport`].
    Count {
        /// Memory of all tasks together.
        bytes: u64,
        /// Processes.
        tasks: u32,
        /// Different contents.
        kinds: u32,
        /// Pages between two pauses.
        burst_pages: u32,
        /// Length of a pause.
        pause_us: u64,
        /// How long it goes on.
        seconds: u64,
    },
    /// Reads a file or block device into the page cache. Result: `read_bytes`.
    TouchFile {
        /// Path in the guest.
        path: String,
        /// Bytes to read at most.
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
    /// Sends a `Sample` at this interval from now on; 0 stops it.
    Samples {
        /// Interval in ms.
        interval_ms: u64,
    },
    /// Reads all clocks once. Result: a [`crate::clock::ClockReading`].
    Clock,
    /// Starts one reader of the clocks on each processor. Only one such watch runs at a time; it
    /// goes on until it is stopped, also over a pause of the guest, and over its being saved and
    /// restored. Result: `cpus`, their numbers.
    ClockWatchStart {
        /// Readings in a row.
        burst_readings: u32,
        /// Sleep between two bursts in µs.
        pause_us: u64,
    },
    /// What the readers have seen; they go on. Result: a [`crate::clock_watch::WatchReport`].
    ClockWatchRead,
    /// Stops the readers. Result: what they have seen, as for `ClockWatchRead`.
    ClockWatchStop,
    /// Lines of the kernel's ring buffer, the last 64 KiB at most. Result: `text`.
    KernelLog {
        /// Only lines that hold one of these, in upper or lower case; empty for all lines.
        words: Vec<String>,
    },
    /// Powers the guest off. No answer but `Started`.
    PowerOff,
    /// Restarts the guest. No answer but `Started`.
    Reboot,
    /// Ends the guest the hard way. No answer but `Started`.
    Crash {
        /// How.
        how: Crash,
    },
}

/// Ways for a guest to end without its own doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Crash {
    /// Kernel panic.
    Panic,
    /// Fault while a fault of a fault is handled: the processor gives up.
    TripleFault,
}

/// What the agent says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Event {
    /// The guest is up: modules are loaded, commands are taken.
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
        /// What went wrong on the way without making the guest unusable.
        warnings: Vec<String>,
    },
    /// A command is being worked on.
    Started {
        /// Its number.
        id: u64,
    },
    /// A command has ended well.
    Done {
        /// Its number.
        id: u64,
        /// Time from its start to its end, the end of its process included, in ms
        /// (CLOCK_MONOTONIC).
        elapsed_ms: u64,
        /// What it gave; see [`Command`].
        result: Value,
    },
    /// A command has failed.
    Failed {
        /// Its number, 0 if the line could not be understood.
        id: u64,
        /// Why.
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
    /// The command's line, with its end.
    pub fn to_line(&self) -> Result<Vec<u8>, serde_json::Error> {
        let mut line = serde_json::to_vec(self)?;
        line.push(b'\n');
        Ok(line)
    }
}

impl Event {
    /// The event's line, with its mark and its end.
    pub fn to_line(&self) -> Result<Vec<u8>, serde_json::Error> {
        let mut line = vec![RECORD_SEPARATOR];
        serde_json::to_writer(&mut line, self)?;
        line.push(b'\n');
        Ok(line)
    }

    /// The event in a line of the console; `None` for text of the kernel and for events that were
    /// damaged by it.
    ///
    /// Text without an end of line may stand before the event.
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
    fn commands_read_well() {
        let request = Request { id: 3, command: Command::AllocTouchExit { bytes: 1024 } };
        let line = request.to_line().unwrap();
        assert_eq!(line, b"{\"id\":3,\"command\":{\"alloc_touch_exit\":{\"bytes\":1024}}}\n");
        let plain: Request = serde_json::from_str(r#"{"id":4,"command":"mem_info"}"#).unwrap();
        assert_eq!(plain.command, Command::MemInfo);
    }

    #[test]
    fn events_are_found_behind_text() {
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
        fn any_line_is_judged(line: Vec<u8>) {
            Event::from_line(&line);
        }
    }
}

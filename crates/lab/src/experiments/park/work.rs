//! The work of a Debian guest: building a package, and Python's tests.

use std::time::Duration;

use ebb_agent::protocol::Command;
use serde_json::Value;

use crate::LabError;
use crate::error::GuestProblem;
use crate::harness::testbed::Testbed;
use crate::report::figures::DataTable;

/// Time limit for a part of the work; an emulated host that is busy may be slow.
const LIMIT: Duration = Duration::from_secs(600);

/// The parts: name, and shell script, whose first argument is the compiler's level of optimization.
/// Each begins as the last one did, and leaves nothing behind.
const PARTS: [(&str, &str); 2] = [
    // Debian's package bzip2: its library, the program, and a file that it compresses.
    (
        "build, s",
        "cd /usr/src/bzip2 && make -s bzip2 CFLAGS=-O$0 >/dev/null && \
         ./bzip2 -k -c manual.xml | ./bzip2 -d | cmp - manual.xml && make -s clean",
    ),
    (
        "Python's tests, s",
        "cd /tmp && python3 -m test -q test_bisect test_heapq test_textwrap test_shlex >/dev/null",
    ),
];
/// Reads most files of the root once, by their bytes. The thousands of smaller ones would take an
/// emulated disk minutes, and little memory.
const READ_FILES: &str =
    "find /usr -xdev -type f -size +16k -size -1024k -exec cat {} + >/dev/null";

/// A work that was done.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Work {
    /// Time of each part, by the guest's clock, in seconds.
    parts_s: [f64; PARTS.len()],
    /// Read from the disk, in MiB.
    read_mib: f64,
    /// Pages of files that the guest had evicted and read again soon (`workingset_refault_file`).
    refaults: f64,
    /// Page faults of the monitor: memory that the host provided.
    host_faults: u64,
}

impl Work {
    /// Time of the whole work in seconds.
    pub(super) fn seconds(&self) -> f64 {
        self.parts_s.iter().sum()
    }

    /// What it read from the disk, in MiB.
    pub(super) fn read_mib(&self) -> f64 {
        self.read_mib
    }
}

/// Does the work once, with this level of optimization.
pub(super) fn run(
    testbed: &mut Testbed<'_>,
    guest: u32,
    optimization: u64,
) -> Result<Work, LabError> {
    testbed.events().step(guest, "works");
    let before = testbed.ask(guest, Command::VmStat)?;
    let faults = testbed.faults(guest)?;
    let mut parts_s = [0.0; PARTS.len()];
    for ((_, script), seconds) in PARTS.iter().zip(&mut parts_s) {
        *seconds = shell(testbed, guest, script, optimization)?.as_secs_f64();
    }
    let host_faults = testbed.faults(guest)? - faults;
    let after = testbed.ask(guest, Command::VmStat)?;
    let grown = |name: &str| number(&after, name) - number(&before, name);
    // In KiB (Linux mm/vmstat.c).
    let read_mib = grown("pgpgin") / 1024.0;
    Ok(Work { parts_s, read_mib, refaults: grown("workingset_refault_file"), host_faults })
}

/// Reads most files once.
pub(super) fn read_files(testbed: &mut Testbed<'_>, guest: u32) -> Result<(), LabError> {
    testbed.events().step(guest, "reads its files");
    shell(testbed, guest, READ_FILES, 0).map(drop)
}

/// Runs a script with an argument; returns its time by the guest's clock.
fn shell(
    testbed: &mut Testbed<'_>,
    guest: u32,
    script: &str,
    argument: u64,
) -> Result<Duration, LabError> {
    let argv = ["/bin/sh", "-c", script, &argument.to_string()].map(str::to_owned).to_vec();
    let answer = testbed.work_timed(guest, Command::Exec { argv }, LIMIT)?;
    if answer.result["code"] == 0 {
        return Ok(answer.elapsed);
    }
    let why = format!("{script}: {}", answer.result);
    Err(LabError::guest(guest, GuestProblem::Failed(why)))
}

fn number(counters: &Value, name: &str) -> f64 {
    counters[name].as_f64().unwrap_or(f64::NAN)
}

/// All works, each with what was before it.
pub(super) fn table(works: &[(&'static str, Work)]) -> Option<DataTable> {
    let mut columns = vec!["work after"];
    columns.extend(PARTS.map(|(name, _)| name));
    columns.extend([
        "together, s",
        "read from the disk, MiB",
        "pages of files read again",
        "page faults at the host",
    ]);
    let row = |(after, work): &(&'static str, Work)| {
        let mut row = vec![(*after).into()];
        row.extend(work.parts_s.map(Into::into));
        row.extend([work.seconds(), work.read_mib, work.refaults].map(Into::into));
        row.push(work.host_faults.into());
        row
    };
    (!works.is_empty()).then(|| DataTable::new("works", columns, works.iter().map(row)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_add_up() {
        let work = Work { parts_s: [2.5, 1.25], read_mib: 12.0, refaults: 40.0, host_faults: 7 };
        assert!((work.seconds() - 3.75).abs() < 1e-9);
        let table = table(&[("no park", work)]).unwrap();
        assert_eq!(table.columns.len(), table.rows[0].len());
        assert_eq!(table.rows[0][3], 3.75.into());
    }
}

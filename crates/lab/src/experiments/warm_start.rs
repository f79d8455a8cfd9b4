//! How soon a machine answers that is restored from a snapshot which the host has not in memory,
//! without and with its working set, and from one that is in memory.
//!
//! The snapshot is on a block device of the host in memory (Linux's null_blk) that behaves like a
//! disk on the network: each request takes a millisecond, and it transfers 125 MiB a second, as
//! much as Amazon's gp3 volumes do by default (EBS user guide, "General Purpose SSD volumes").

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command as Program, Stdio};
use std::time::Duration;

use ebb_agent::protocol::Command;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use serde::Serialize;
use tempfile::TempDir;

use crate::LabError;
use crate::harness::experiment::{Experiment, Needs, Run, SeriesPlan, parameters};
use crate::harness::forks::{Restored, SOCKET_MODULE, Snapshot, TEMPLATE, Template};
use crate::harness::monitor::Setup;
use crate::harness::size::{GuestSize, HostShape};
use crate::harness::testbed::Testbed;
use crate::harness::turns::in_turns;
use crate::report::figures::DataTable;
use crate::report::metrics::{self, Metric};
use crate::report::results::{Scale, Series};
use crate::report::statistics::rounded;

/// The experiment.
pub static WARM_START: Experiment = Experiment {
    name: "warm-start",
    summary: "How soon a machine restored from a slow disk answers and has done its first work, \
              without and with a working set that is read ahead",
    host: |scale, _| sizes(scale).host,
    parameters: |scale| parameters(&sizes(scale)),
    guests: |scale| sizes(scale).rounds * NAMES.len() as u32,
    needs: Needs {
        modules: &[
            "null_blk gb=1 memory_backed=1 irqmode=2 completion_nsec=1000000 mbps=125 max_sectors=256",
            "crc32c_generic",
            "ext4",
        ],
        guest_modules: &[SOCKET_MODULE],
        ..Experiment::DEFAULT.needs
    },
    metrics: || metrics::describe(metrics()),
    series: || {
        let plan =
            |(name, summary)| SeriesPlan::new(name, summary, Run::SameGuests(Setup::EBB, run));
        [
            (COLD, "the snapshot is not in the host's page cache"),
            (READ_AHEAD, "the same, with ebb restore --working-set"),
            (CACHED, "the snapshot is in the page cache"),
        ]
        .map(plan)
        .into()
    },
    compare: |all| metrics::mark_noise(&metrics(), all),
    ..Experiment::DEFAULT
};

const COLD: &str = "cold";
const READ_AHEAD: &str = "working-set";
const CACHED: &str = "cached";
const NAMES: [&str; 3] = [COLD, READ_AHEAD, CACHED];

/// The host's block device, and its counters (Linux Documentation/block/stat.rst).
const DEVICE: &str = "/dev/nullb0";
const COUNTERS: &str = "/sys/block/nullb0/stat";
const SECTOR_BYTES: u64 = 512;
const MIB: u64 = 1 << 20;
/// Number of the machine whose working set is recorded.
const RECORDED: u32 = TEMPLATE + 1;
/// Time limit for the first work of a guest.
const WORK_LIMIT: Duration = Duration::from_secs(120);
/// Duration of the recording in seconds, longer than the first work.
const RECORD_S: u64 = 10;

/// Sizes of one scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
struct Sizes {
    #[serde(flatten)]
    host: HostShape,
    #[serde(flatten)]
    guest: GuestSize,
    /// Memory of a program in the guest, which reads it as its first work.
    program_mib: u64,
    /// Restores of each series.
    rounds: u32,
}

fn sizes(scale: Scale) -> Sizes {
    let guest = GuestSize { memory_mib: 1024, cpus: 2 };
    match scale {
        Scale::Demo => Sizes {
            host: HostShape { memory_mib: 2816, swap_mib: 256, nodes: 1 },
            guest,
            program_mib: 64,
            rounds: 5,
        },
        Scale::Full => Sizes {
            host: HostShape { memory_mib: 3072, swap_mib: 512, nodes: 1 },
            guest,
            program_mib: 256,
            rounds: 20,
        },
    }
}

/// What one restored machine has shown.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Found {
    answer_ms: f64,
    work_ms: f64,
    major_faults: f64,
    reads: f64,
    read_mib: f64,
}

fn metrics() -> Vec<Metric<Vec<Found>>> {
    fn each(name: &str, title: &str, unit: &str, of: fn(&Found) -> f64) -> Metric<Vec<Found>> {
        Metric::median(name, title, unit, move |all: &Vec<Found>| all.iter().map(of).collect())
    }
    vec![
        each("answer_ms", "ebb restore until the guest answers", "ms", |it| it.answer_ms),
        each("work_ms", "until it has done its first work", "ms", |it| it.work_ms),
        each("major_faults", "Waits of the machine's threads for the disk", "", |it| {
            it.major_faults
        }),
        each("disk_reads", "Reads from the disk", "", |it| it.reads),
        each("disk_read_mib", "Read from the disk", "MiB", |it| it.read_mib),
    ]
}

fn run(testbed: &mut Testbed<'_>, all: &mut [Series]) -> Result<(), LabError> {
    let sizes = sizes(testbed.scale());
    let disk = SlowDisk::mount()?;
    let (snapshot, working_set) = prepare(testbed, &disk, &sizes)?;
    let mut number = RECORDED;
    let (found, outcome) = in_turns(sizes.rounds, all, |series| {
        number += 1;
        testbed.events().step(number, &series.name);
        testbed.drop_host_caches()?;
        if series.name == CACHED {
            SlowDisk::read_all(snapshot.path())?;
        }
        let with_set = [OsStr::new("--working-set"), working_set.as_os_str()];
        let options: &[&OsStr] = if series.name == READ_AHEAD { &with_set } else { &[] };
        let before = SlowDisk::counters()?;
        let mut restored = snapshot.start(testbed, number, options)?;
        restored.wait_answer()?;
        let answer_ms = ms(restored.elapsed());
        work(&mut restored)?;
        let work_ms = ms(restored.elapsed());
        let major_faults = restored.major_faults()? as f64;
        let (reads, sectors) = SlowDisk::counters()?;
        let read_mib = rounded(((sectors - before.1) * SECTOR_BYTES) as f64 / MIB as f64);
        Ok(Found { answer_ms, work_ms, major_faults, reads: (reads - before.0) as f64, read_mib })
    });
    for (series, found) in all.iter_mut().zip(&found) {
        metrics::measure(&metrics(), found, series);
        series.details.extend(table(found));
    }
    outcome
}

/// The snapshot of a guest with a program, and the working set of a machine that was restored from
/// it and has worked.
fn prepare(
    testbed: &Testbed<'_>,
    disk: &SlowDisk,
    sizes: &Sizes,
) -> Result<(Snapshot, PathBuf), LabError> {
    let mut template = Template::start(testbed, sizes.guest, None)?;
    let hold = Command::Hold { bytes: sizes.program_mib * MIB, pattern: 3 };
    template.guest.command(hold, WORK_LIMIT, &mut || {})?;
    let snapshot = template.snapshot_to(disk.path("vm.snapshot"))?;
    template.end();
    let working_set = disk.path("vm.working-set");
    testbed.events().step(RECORDED, "is restored, and its working set recorded");
    let mut restored = snapshot.start(testbed, RECORDED, &[OsStr::new("--paused")])?;
    restored.wait_paused()?;
    let mut recorder = testbed.ebb();
    recorder.arg("ctl").arg(restored.api()).arg("working-set").arg(&working_set);
    recorder.args(["--for", &RECORD_S.to_string()]).stdout(Stdio::null());
    let failed = |cause| LabError::StartMonitor { program: "ebb ctl".to_owned(), cause };
    let mut recorder = recorder.spawn().map_err(failed)?;
    restored.resume()?;
    restored.wait_answer()?;
    work(&mut restored)?;
    let ended = recorder.wait().map_err(failed)?;
    if !ended.success() {
        return Err(LabError::unexpected(RECORDED, "its working set could not be recorded"));
    }
    Ok((snapshot, working_set))
}

/// The first work of a guest: its program reads its memory, in random order.
fn work(restored: &mut Restored) -> Result<(), LabError> {
    let command = Command::ReadHeld { passes: 1, seed: 5 };
    restored.guest().command(command, WORK_LIMIT, &mut || {}).map(drop)
}

fn ms(time: Duration) -> f64 {
    rounded(time.as_secs_f64() * 1000.0)
}

/// A file system on the slow block device; unmounted when this is dropped.
struct SlowDisk(TempDir);

impl SlowDisk {
    /// Makes and mounts it.
    fn mount() -> Result<Self, LabError> {
        let device = Path::new(DEVICE);
        if !device.exists() {
            return Err(LabError::MissingFile {
                what: "a slow block device in memory",
                path: device.to_owned(),
                remedy: "modprobe null_blk gb=1 memory_backed=1 irqmode=2 \
                         completion_nsec=1000000 mbps=125 max_sectors=256",
            });
        }
        let make = Program::new("mke2fs").arg("-q").arg(device).stdout(Stdio::null()).status();
        let make =
            make.map_err(|cause| LabError::StartMonitor { program: "mke2fs".to_owned(), cause })?;
        let directory = tempfile::tempdir().map_err(LabError::of_file(std::env::temp_dir()))?;
        let made = make.success().then_some(()).ok_or(io::ErrorKind::InvalidInput.into());
        let mounted = made.and_then(|()| {
            mount(device, directory.path(), "ext4", MountFlags::empty(), None).map_err(Into::into)
        });
        mounted.map_err(LabError::of_file(device))?;
        Ok(Self(directory))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Reads a file of it into the page cache.
    fn read_all(path: &Path) -> Result<(), LabError> {
        let read = || io::copy(&mut File::open(path)?, &mut io::sink());
        read().map(drop).map_err(LabError::of_file(path))
    }

    /// Reads and sectors read until now.
    fn counters() -> Result<(u64, u64), LabError> {
        let text = fs::read_to_string(COUNTERS).map_err(LabError::of_file(COUNTERS))?;
        let mut numbers = text.split_ascii_whitespace().map(str::parse);
        let (reads, sectors) = (numbers.next(), numbers.nth(1));
        match (reads, sectors) {
            (Some(Ok(reads)), Some(Ok(sectors))) => Ok((reads, sectors)),
            _ => Err(LabError::of_file(COUNTERS)(io::ErrorKind::InvalidData.into())),
        }
    }
}

impl Drop for SlowDisk {
    fn drop(&mut self) {
        // A machine that has just been killed may still use it.
        let _ = unmount(self.0.path(), UnmountFlags::DETACH);
    }
}

/// The measurements of each machine.
fn table(found: &[Found]) -> Option<DataTable> {
    (!found.is_empty()).then(|| {
        DataTable::of(
            "restores, each row a machine",
            found,
            &[
                ("answer, ms", &|it| it.answer_ms.into()),
                ("work done, ms", &|it| it.work_ms.into()),
                ("waits for the disk", &|it| it.major_faults.into()),
                ("reads", &|it| it.reads.into()),
                ("read, MiB", &|it| it.read_mib.into()),
            ],
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_snapshot_fits_onto_the_disk_and_all_into_the_host() {
        for scale in [Scale::Demo, Scale::Full] {
            let sizes = sizes(scale);
            let used_mib = sizes.program_mib;
            assert!(used_mib + 256 < sizes.guest.memory_mib);
            assert!(used_mib + 256 < 1024, "the device has 1 GiB");
            // The device, the page cache, and a machine.
            assert!(3 * (used_mib + 256) + 512 < sizes.host.memory_mib);
        }
    }

    #[test]
    fn metrics_are_medians() {
        let found = |answer_ms| Found {
            answer_ms,
            work_ms: 2.0 * answer_ms,
            major_faults: 7.0,
            reads: 9.0,
            read_mib: 1.5,
        };
        let all = vec![found(30.0), found(10.0), found(20.0)];
        let mut series = Series::new(COLD, String::new());
        metrics::measure(&metrics(), &all, &mut series);
        assert_eq!(series.metrics["answer_ms"], Some(20.0));
        assert_eq!(series.metrics["work_ms"], Some(40.0));
        assert_eq!(series.metrics["disk_read_mib"], Some(1.5));
        assert_eq!(table(&all).unwrap().rows.len(), 3);
        assert!(table(&[]).is_none());
    }
}

//! Speed of a guest's disk: random reads with several in flight, large reads one after the other,
//! and writes that are each on the disk before the next one.
//!
//! The disk is a block device of the host in memory (Linux's null_blk), so that the monitor's own
//! work is most of the time. Debian's fio measures in the guest, past the guest's page cache, under
//! Ebb and QEMU in turns.

use std::path::Path;

use ebb_agent::protocol::Command;
use serde::Serialize;
use serde_json::Value;

use crate::LabError;
use crate::harness::devices::{Device, HostCache, QemuEngine};
use crate::harness::experiment::{Experiment, Needed, Needs, Run, Runs, SeriesPlan, parameters};
use crate::harness::monitor::{MonitorKind, Setup};
use crate::harness::size::{GuestSize, HostShape};
use crate::harness::testbed::Testbed;
use crate::harness::turns::in_turns;
use crate::report::figures::DataTable;
use crate::report::metrics::{self, Metric};
use crate::report::results::{Scale, Series};

/// The experiment.
pub static DISK: Experiment = Experiment {
    name: "disk",
    summary: "How fast a guest's disk is: random and sequential reads, and synchronous writes",
    host: |scale, _| sizes(scale).host,
    parameters: |scale| parameters(&sizes(scale)),
    guests: |scale| sizes(scale).rounds * rows().len() as u32,
    needs: Needs {
        modules: &["null_blk gb=1 memory_backed=1 irqmode=0"],
        guest_programs: &[Needed { path: FIO, remedy: "Debian: apt-get install fio" }],
        ..Experiment::DEFAULT.needs
    },
    metrics: || metrics::describe(metrics()),
    series: || {
        let plan = |(runs, name, summary, setup, ..): Row| SeriesPlan {
            runs,
            ..SeriesPlan::new(name, summary, Run::SameGuests(setup, run))
        };
        rows().map(plan).into()
    },
    compare: |all| metrics::mark_noise(&metrics(), all),
    ..Experiment::DEFAULT
};

const FIO: &str = "/usr/bin/fio";
/// The host's block device.
const DEVICE: &str = "/dev/nullb0";
/// The guest's disk.
const DISK_IN_GUEST: &str = "/dev/vda";

/// Sizes of one scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
struct Sizes {
    #[serde(flatten)]
    host: HostShape,
    #[serde(flatten)]
    guest: GuestSize,
    /// The part of the disk that is read and written.
    span_mib: u64,
    /// Duration of each job.
    seconds: u32,
    /// Number of guests of each series.
    rounds: u32,
}

fn sizes(scale: Scale) -> Sizes {
    match scale {
        Scale::Demo => Sizes {
            host: HostShape { memory_mib: 2560, swap_mib: 256, nodes: 1 },
            guest: GuestSize { memory_mib: 512, cpus: 1 },
            span_mib: 128,
            seconds: 2,
            rounds: 2,
        },
        Scale::Full => Sizes {
            host: HostShape { memory_mib: 4096, swap_mib: 512, nodes: 1 },
            guest: GuestSize { memory_mib: 1024, cpus: 1 },
            span_mib: 512,
            seconds: 10,
            rounds: 5,
        },
    }
}

/// A series: when it runs, its name, its summary, its setup and its disk.
type Row = (Runs, &'static str, &'static str, Setup, HostCache, QemuEngine);

fn rows() -> [Row; 6] {
    use HostCache::{Bypassed, Used};
    use QemuEngine::{IoUring, Threads};
    let ebb = Setup { lean: true, uncompressed_kernel: true, ..Setup::EBB };
    let qemu = Setup { monitor: MonitorKind::Qemu, ..ebb };
    let row = |name, summary, setup, cache, engine| {
        (Runs::ByDefault, name, summary, setup, cache, engine)
    };
    [
        row("ebb", "ebb run --disk path=DEVICE", ebb, Used, Threads),
        row("qemu", "virtio-blk-pci, cache=writeback,aio=threads", qemu, Used, Threads),
        row("qemu-io-uring", "virtio-blk-pci, cache=writeback,aio=io_uring", qemu, Used, IoUring),
        row("ebb-direct", "ebb run --disk path=DEVICE,direct=on", ebb, Bypassed, Threads),
        row("qemu-direct", "virtio-blk-pci, cache=none,aio=threads", qemu, Bypassed, Threads),
        row(
            "qemu-direct-io-uring",
            "virtio-blk-pci, cache=none,aio=io_uring",
            qemu,
            Bypassed,
            IoUring,
        ),
    ]
}

/// A job of fio: its name, its arguments, and whether it writes.
struct Job {
    name: &'static str,
    words: &'static str,
    side: &'static str,
}

/// The jobs, in the order of the metrics.
const JOBS: [Job; 3] = [
    Job {
        name: "random reads, 4 KiB, 16 in flight",
        words: "--rw=randread --bs=4k --ioengine=libaio --iodepth=16",
        side: "read",
    },
    Job {
        name: "sequential reads, 1 MiB, 4 in flight",
        words: "--rw=read --bs=1m --ioengine=libaio --iodepth=4",
        side: "read",
    },
    Job {
        name: "random writes, 4 KiB, each followed by fdatasync",
        words: "--rw=randwrite --bs=4k --ioengine=psync --fdatasync=1",
        side: "write",
    },
];

/// Result of a job.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Done {
    iops: f64,
    mib_s: f64,
    requests: f64,
    /// Times that a thread of the monitor has waited, vCPUs included.
    waits: f64,
}

/// Results of the jobs in one guest.
type Jobs = [Done; JOBS.len()];

fn metrics() -> Vec<Metric<Vec<Jobs>>> {
    let of = |job: usize, value: fn(&Done) -> f64| {
        move |all: &Vec<Jobs>| all.iter().map(|jobs| value(&jobs[job])).collect()
    };
    let metric = |name: &str, title: &str, unit: &str, job, value| {
        Metric::median(name, title, unit, of(job, value)).better_higher()
    };
    vec![
        metric("random_read_iops", "Random reads of 4 KiB, 16 in flight", "1/s", 0, |it| it.iops),
        metric("sequential_mib_s", "Sequential reads of 1 MiB", "MiB/s", 1, |it| it.mib_s),
        metric("sync_write_iops", "Writes of 4 KiB with fdatasync", "1/s", 2, |it| it.iops),
    ]
}

fn run(testbed: &mut Testbed<'_>, all: &mut [Series]) -> Result<(), LabError> {
    let sizes = sizes(testbed.scale());
    prepare(sizes.span_mib)?;
    let (found, outcome) =
        in_turns(sizes.rounds, all, |series| in_one_guest(testbed, series, &sizes));
    for (series, found) in all.iter_mut().zip(&found) {
        fill(found, series);
    }
    outcome
}

/// Writes to the part of the device that is used, so that its memory is there.
fn prepare(span_mib: u64) -> Result<(), LabError> {
    use std::io::Write as _;
    let path = Path::new(DEVICE);
    if !path.exists() {
        return Err(LabError::MissingFile {
            what: "a block device in memory",
            path: path.to_owned(),
            remedy: "modprobe null_blk gb=1 memory_backed=1 irqmode=0",
        });
    }
    let block = vec![0x5a; 1 << 20];
    let write = || {
        let mut device = std::fs::OpenOptions::new().write(true).open(path)?;
        (0..span_mib).try_for_each(|_| device.write_all(&block))?;
        device.sync_all()
    };
    write().map_err(LabError::of_file(path))
}

fn in_one_guest(
    testbed: &mut Testbed<'_>,
    series: &mut Series,
    sizes: &Sizes,
) -> Result<Jobs, LabError> {
    let row = rows().into_iter().find(|(_, name, ..)| *name == series.name);
    let (cache, engine) = row.map_or((HostCache::Used, QemuEngine::Threads), |row| {
        testbed.run_like(row.3);
        (row.4, row.5)
    });
    let device = Device::Disk { path: Path::new(DEVICE), cache, engine };
    let record = testbed.start_with(sizes.guest, &[device])?;
    let mut jobs = [Done { iops: 0.0, mib_s: 0.0, requests: 0.0, waits: 0.0 }; JOBS.len()];
    for (done, job) in jobs.iter_mut().zip(&JOBS) {
        testbed.events().step(record.guest, job.name);
        *done = fio(testbed, record.guest, job, sizes)?;
    }
    testbed.end_guest(record.guest);
    series.guests.push(record);
    Ok(jobs)
}

/// Runs a job in a guest.
fn fio(testbed: &mut Testbed<'_>, guest: u32, job: &Job, sizes: &Sizes) -> Result<Done, LabError> {
    let line = format!(
        "{FIO} --name=job --filename={DISK_IN_GUEST} --direct=1 --thread --size={}m --time_based \
         --runtime={} --randseed=1 --norandommap --output-format=json {}",
        sizes.span_mib, sizes.seconds, job.words
    );
    let argv = line.split_ascii_whitespace().map(str::to_owned).collect();
    let before = testbed.waits(guest)?;
    let limit = std::time::Duration::from_secs(u64::from(sizes.seconds) + 120);
    let result = testbed.work(guest, Command::Exec { argv }, limit)?;
    let waits = testbed.waits(guest)?.saturating_sub(before) as f64;
    parse(result["stdout"].as_str().unwrap_or_default(), job.side, waits)
        .ok_or_else(|| LabError::unexpected(guest, format!("fio's result: {result}")))
}

/// The result in fio's document, which lines of text may precede.
fn parse(text: &str, side: &str, waits: f64) -> Option<Done> {
    let document: Value = serde_json::from_str(&text[text.find('{')?..]).ok()?;
    let job = document["jobs"].get(0)?;
    let number = |name: &str| job[side][name].as_f64();
    let requests = number("total_ios")?;
    (job["error"].as_i64()? == 0 && requests > 0.0).then_some(())?;
    Some(Done { iops: number("iops")?, mib_s: number("bw_bytes")? / 1_048_576.0, requests, waits })
}

fn fill(found: &Vec<Jobs>, series: &mut Series) {
    metrics::measure(&metrics(), found, series);
    let rows = found.iter().flat_map(|jobs| {
        JOBS.iter().zip(jobs).map(|(job, done)| {
            let numbers = [done.iops, done.mib_s, done.waits / done.requests];
            [job.name.into()].into_iter().chain(numbers.map(Into::into)).collect()
        })
    });
    let columns = ["job", "requests/s", "MiB/s", "waits of the monitor's threads a request"];
    series.details.push(DataTable::new("jobs", columns, rows));
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "fio: a warning\n{\"fio version\": \"fio-3.33\", \"jobs\": [{\"error\": 0, \
                        \"read\": {\"iops\": 1500.5, \"bw_bytes\": 6291456, \"total_ios\": 3000}, \
                        \"write\": {\"iops\": 0.0, \"bw_bytes\": 0, \"total_ios\": 0}}]}";

    #[test]
    fn results_of_fio_are_read() {
        let done = parse(TEXT, "read", 6000.0).unwrap();
        assert_eq!(done, Done { iops: 1500.5, mib_s: 6.0, requests: 3000.0, waits: 6000.0 });
        assert_eq!(parse(TEXT, "write", 0.0), None, "nothing was written");
        assert_eq!(parse(&TEXT.replace("\"error\": 0", "\"error\": 5"), "read", 0.0), None);
        for text in ["", "fio: no such file", "{", "{\"jobs\": []}"] {
            assert_eq!(parse(text, "read", 0.0), None, "{text}");
        }
    }

    #[test]
    fn metrics_are_medians_of_the_guests() {
        let jobs = |factor: f64| {
            [1.0, 2.0, 3.0].map(|job| Done {
                iops: factor * job,
                mib_s: factor,
                requests: 10.0,
                waits: 5.0,
            })
        };
        let mut series = Series::new("ebb", String::new());
        fill(&vec![jobs(10.0), jobs(30.0), jobs(20.0)], &mut series);
        assert_eq!(series.metrics["random_read_iops"], Some(20.0));
        assert_eq!(series.metrics["sequential_mib_s"], Some(20.0));
        assert_eq!(series.metrics["sync_write_iops"], Some(60.0));
        assert_eq!(series.details[0].rows.len(), 9);
    }

    #[test]
    fn the_device_and_its_cache_fit_into_the_host() {
        for scale in [Scale::Demo, Scale::Full] {
            let sizes = sizes(scale);
            assert!(2 * sizes.span_mib + sizes.guest.memory_mib + 512 < sizes.host.memory_mib);
            assert!(sizes.span_mib <= 1024, "the device has 1 GiB");
        }
    }
}

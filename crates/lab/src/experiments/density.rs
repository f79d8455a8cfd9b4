//! Number of guests that fit on a host without swap, when each has used most of its memory once and
//! is then idle.
//!
//! The procedure of the page hinting series for Linux (v8 and v10, 2019): guests are started one
//! after another; in each a program allocates and writes four fifths of the guest's memory and
//! exits; the guest stays; the next one is started. It ends when the host swaps.

use ebb_agent::protocol::Command;
use ebb_vmm::api::{ParkReport, TrimReport};
use serde::Serialize;

use crate::LabError;
use crate::harness::counters::Counters;
use crate::harness::driver::{Driver, Tracker};
use crate::harness::experiment::{Experiment, Run, SeriesPlan, parameters};
use crate::harness::merging::{Merging, Nodes};
use crate::harness::monitor::{Idle, MonitorKind, Setup};
use crate::harness::size::{GuestSize, HostShape};
use crate::harness::testbed::Testbed;
use crate::report::figures::{DataTable, Value};
use crate::report::metrics::{self, Metric};
use crate::report::results::{GuestRecord, Scale, Series};
use crate::report::statistics::median;

/// The experiment.
pub static DENSITY: Experiment = Experiment {
    name: "density",
    summary: "How many guests fit on a host without swap when each has once used four fifths of \
              its memory and is idle since",
    host: |scale, _| sizes(scale).host,
    parameters: |scale| parameters(&sizes(scale)),
    guests: |scale| sizes(scale).most_guests,
    metrics: || metrics::describe(metrics()),
    series,
    ..Experiment::DEFAULT
};

/// Sizes of one scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(super) struct Sizes {
    #[serde(flatten)]
    pub(super) host: HostShape,
    #[serde(flatten)]
    pub(super) guest: GuestSize,
    pub(super) program_mib: u64,
    /// Maximum number of guests of a series, even if the host has room for more.
    most_guests: u32,
}

/// What a parked guest keeps available.
const KEEP_MIB: u64 = 24;

/// Pages scanned per second by each monitor, or by the kernel for all guests; an emulated processor
/// is slow.
const MERGED_PAGES_PER_SECOND: u64 = 200_000;

pub(super) fn sizes(scale: Scale) -> Sizes {
    match scale {
        Scale::Demo => Sizes {
            host: HostShape { memory_mib: 2048, swap_mib: 1024, nodes: 1 },
            guest: GuestSize { memory_mib: 512, cpus: 1 },
            program_mib: 400,
            most_guests: 6,
        },
        Scale::Full => Sizes {
            host: HostShape { memory_mib: 15 * 1024, swap_mib: 4096, nodes: 1 },
            guest: GuestSize { memory_mib: 5 * 1024, cpus: 1 },
            program_mib: 4096,
            most_guests: 32,
        },
    }
}

fn series() -> Vec<SeriesPlan> {
    let ebb = Setup::EBB;
    let tracking = |tracker| Setup { driver: Driver::tracking(tracker), ..ebb };
    let packed = Setup {
        lean: true,
        uncompressed_kernel: true,
        seldom_wakes: true,
        idle: Idle::Parked,
        merging: Merging::Owner(Nodes::Across),
        ..tracking(Tracker::Reporting)
    };
    let by_default = [
        (
            "no-reporting",
            "Ebb, the balloon offers no free page reporting",
            Setup { reporting: false, ..ebb },
        ),
        ("reporting", "Ebb with free page reporting", ebb),
        (
            "bitmap",
            "Ebb with its driver in the guest, which finds free blocks by a bitmap for each zone",
            tracking(Tracker::Bitmap),
        ),
        (
            "qemu-reporting",
            "the same guest under QEMU with free page reporting",
            Setup { monitor: MonitorKind::Qemu, ..ebb },
        ),
    ];
    let when_named = [
        (
            "merge",
            "reporting, and the monitors merge equal pages of all guests",
            Setup { merging: Merging::Owner(Nodes::Across), ..ebb },
        ),
        (
            "merge-alone",
            "reporting, and each monitor merges equal pages within its guest",
            Setup { merging: Merging::Alone, ..ebb },
        ),
        (
            "merge-kernel",
            "reporting, and the kernel merges equal pages of all guests",
            Setup { merging: Merging::Kernel(Nodes::Across), ..ebb },
        ),
        (
            "packed",
            "all that makes guests small and quiet: Ebb's driver, an uncompressed kernel with --lean \
             and the words with which it seldom wakes, each guest parked when it is idle, and equal \
             pages of all guests merged by the monitors",
            packed,
        ),
        (
            "packed-bzimage",
            "the same with a bzImage, whose kernel chooses random addresses",
            Setup { uncompressed_kernel: false, ..packed },
        ),
        (
            "packed-alone",
            "as packed, but each monitor merges equal pages within its guest only",
            Setup { merging: Merging::Alone, ..packed },
        ),
        (
            "percpu",
            "Ebb with its driver in the guest, which finds free pages by an array for each CPU",
            tracking(Tracker::Percpu),
        ),
        (
            "module-reporting",
            "Ebb with its driver in the guest, which reports through the kernel's own page \
             reporting",
            tracking(Tracker::Reporting),
        ),
        (
            "reporting-trim",
            "and the monitor trims zero pages once",
            Setup { idle: Idle::Trimmed, ..ebb },
        ),
        (
            "reporting-order-5",
            "the guest reports blocks of 128 KiB and up",
            Setup { reporting_order: Some(5), ..ebb },
        ),
        (
            "reporting-order-0",
            "the guest reports every free page",
            Setup { reporting_order: Some(0), ..ebb },
        ),
        (
            "no-thp",
            "guest memory without transparent huge pages",
            Setup { huge_pages: false, ..ebb },
        ),
        (
            "no-thp-order-0",
            "both: no huge pages, and every free page reported",
            Setup { huge_pages: false, reporting_order: Some(0), ..ebb },
        ),
        (
            "no-swiotlb",
            "the guest has no bounce buffer, which none of its devices needs",
            Setup { bounce_buffer: false, ..ebb },
        ),
        (
            "lean",
            "no bounce buffer, and blocks of 128 KiB and up reported",
            Setup { bounce_buffer: false, reporting_order: Some(5), ..ebb },
        ),
        (
            "vmlinux-pvh",
            "an uncompressed kernel, entered through its PVH note",
            Setup { uncompressed_kernel: true, ..ebb },
        ),
    ];
    let plan = |(name, summary, setup)| SeriesPlan::new(name, summary, Run::Guests(setup, run));
    let named = when_named.map(|row| plan(row).when_named());
    by_default.map(plan).into_iter().chain(named).collect()
}

/// Results of a series.
#[derive(Debug, Default)]
struct Found {
    guests: Vec<GuestRecord>,
    /// Swap in use up to which the host does not count as full.
    threshold_mib: f64,
    swap_used_mib: f64,
    /// Increase of the host's use since before the first guest, swap included.
    grown_mib: f64,
    merge_cpu_s: Option<f64>,
}

impl Found {
    /// The guests before the first one with which the host swapped.
    fn fitting(&self) -> impl Iterator<Item = &GuestRecord> {
        self.guests.iter().take_while(|guest| {
            guest.swap_used_mib.is_some_and(|swap_mib| swap_mib <= self.threshold_mib)
        })
    }
}

fn metrics() -> Vec<Metric<Found>> {
    fn each(
        name: &str,
        title: &str,
        unit: &str,
        value: fn(&GuestRecord) -> Option<f64>,
    ) -> Metric<Found> {
        Metric::median(name, title, unit, move |found: &Found| {
            found.guests.iter().filter_map(value).collect()
        })
    }
    vec![
        Metric::higher("guests_without_swap", "Guests without swap", "", |found: &Found| {
            Some(alive(found.fitting()) as f64)
        }),
        Metric::lower("swap_used_mib", "Swap used at the end", "MiB", |found: &Found| {
            Some(found.swap_used_mib)
        }),
        each("idle_guest_rss_mib", "Left at the host by an idle guest", "MiB", |g| g.idle_rss_mib),
        each(
            "idle_guest_pss_mib",
            "the same, shared pages divided among sharers",
            "MiB",
            |guest| guest.idle_pss_mib,
        ),
        Metric::lower(
            "host_per_guest_mib",
            "What the host has in use more, for each guest",
            "MiB",
            |found: &Found| {
                let guests = alive(found.guests.iter());
                (guests > 0).then(|| found.grown_mib / guests as f64)
            },
        ),
        each("guest_in_use_mib", "In use in an idle guest", "MiB", |guest| guest.guest_in_use_mib),
        each(
            "guest_fragments_mib",
            "Free in an idle guest, in pieces below 2 MiB",
            "MiB",
            |guest| guest.guest_fragments_mib,
        ),
        each(
            "uncaptured_mib",
            "Free in an idle guest, and still at the host",
            "MiB",
            uncaptured_mib,
        ),
        each("booted_rss_mib", "Memory of a guest after boot", "MiB", |guest| guest.booted_rss_mib),
        // A guest during whose program the host got full is not waited for. Others whose memory was
        // never returned are the slowest: without them a series would look faster the more often it
        // failed.
        Metric::median(
            "return_90_s",
            "90 % of the program's memory is back after",
            "s",
            |found: &Found| {
                let returned = |guest: &GuestRecord| guest.return_90_s.unwrap_or(f64::INFINITY);
                found.fitting().map(returned).collect()
            },
        ),
        each("start_to_init_s", "Start to the guest's init", "s", |guest| guest.start_to_init_s),
        each("program_s", "Program's run", "s", |guest| guest.program_s),
        each("monitor_rss_mib", "Monitor without guest RAM", "MiB", |guest| guest.monitor_rss_mib),
        Metric::lower("merge_cpu_s", "Processor time of merging", "s", |found: &Found| {
            found.merge_cpu_s
        }),
    ]
}

fn run(testbed: &mut Testbed<'_>, series: &mut Series) -> Result<(), LabError> {
    let sizes = sizes(testbed.scale());
    let merges = testbed.setup().merging != Merging::Off;
    let before_mib = testbed.usage()?.used_mib;
    let merge_cpu_before_s = testbed.merging_cpu_s()?;
    let filled = fill(testbed, series, sizes).and_then(|()| merge(testbed, series));
    let merge_cpu_s = testbed.merging_cpu_s().ok().filter(|_| merges);
    // Keep the measurements even if a guest has failed.
    let ended = testbed.find_ended(&mut series.guests);
    let measured = filled
        .and_then(|()| testbed.measure_idle(&mut series.guests, sizes.guest))
        .and_then(|()| testbed.ask_idle(&mut series.guests, sizes.guest))
        .and_then(|()| ask_drivers(testbed, series))
        .and(ended);
    let usage = testbed.usage()?;
    let found = Found {
        guests: series.guests.clone(),
        threshold_mib: testbed.swap_threshold_mib(),
        swap_used_mib: usage.swap_used_mib,
        grown_mib: usage.used_mib + usage.swap_used_mib - before_mib,
        merge_cpu_s: merge_cpu_s.map(|now_s| now_s - merge_cpu_before_s),
    };
    metrics::measure(&metrics(), &found, series);
    measured
}

/// Merges the idle guests' pages in series with merging, until no more pages are merged.
fn merge(testbed: &mut Testbed<'_>, series: &mut Series) -> Result<(), LabError> {
    if testbed.setup().merging == Merging::Off {
        return Ok(());
    }
    let guests: Vec<u32> = series.guests.iter().map(|record| record.guest).collect();
    testbed.events().step(0, "waits until nothing more is merged");
    let settled = testbed.wait_for_merging(&guests)?;
    let shared = testbed.shared(&guests)?;
    series.notes.push(format!(
        "{} pages are shared by {} further ones; nothing more was merged after {} s{}",
        shared.pages_shared,
        shared.pages_sharing,
        settled.elapsed_s,
        if settled.quiet { "" } else { ", which may be too early" }
    ));
    Ok(())
}

/// Records the counters of the guests' drivers, which explain what a tracker did not capture.
fn ask_drivers(testbed: &mut Testbed<'_>, series: &mut Series) -> Result<(), LabError> {
    let mut all = Vec::new();
    for record in series.guests.iter().filter(|record| record.ended.is_none()) {
        if let Some(counters) = testbed.driver_counters(record.guest)? {
            all.push((record.guest, counters));
        }
    }
    series.details.extend(counters_table(&all));
    Ok(())
}

/// The counters of each guest's driver: a row for each counter that is not zero in all guests.
fn counters_table(guests: &[(u32, Counters)]) -> Option<DataTable> {
    let mut names: Vec<&str> = guests
        .iter()
        .flat_map(|(_, counters)| {
            counters.iter().filter(|(_, value)| *value > 0.0).map(|(name, _)| name)
        })
        .collect();
    names.sort_unstable();
    names.dedup();
    let mut columns = vec!["counter".to_owned()];
    columns.extend(guests.iter().map(|(guest, _)| format!("guest {guest}")));
    let row = |name: &&str| {
        let values =
            guests.iter().map(|(_, counters)| Value::from(counters.get(name).unwrap_or(0.0)));
        std::iter::once(Value::from(*name)).chain(values).collect()
    };
    let rows: Vec<Vec<Value>> = names.iter().map(row).collect();
    (!rows.is_empty()).then(|| DataTable::new("what the guests' drivers counted", columns, rows))
}

/// Memory that is free in a guest and was not returned to the host: the footprint of its process
/// minus the monitor and the guest's memory in use. This is a lower bound, since the guest has not
/// touched all memory that it counts as in use.
fn uncaptured_mib(guest: &GuestRecord) -> Option<f64> {
    Some((guest.idle_rss_mib? - guest.monitor_rss_mib? - guest.guest_in_use_mib?).max(0.0))
}

/// Starts guests until the host swaps or the maximum is reached.
fn fill(testbed: &mut Testbed<'_>, series: &mut Series, sizes: Sizes) -> Result<(), LabError> {
    let threshold_mib = testbed.swap_threshold_mib();
    let most_guests = testbed.guests(sizes.most_guests);
    let mut shrunk = Shrunk::default();
    let mut unmerged = Vec::new();
    while (series.guests.len() as u32) < most_guests {
        // Merging takes longer than a start: it is waited for once its memory is needed.
        let merges = testbed.setup().merging != Merging::Off;
        let room_mib = testbed.usage()?.available_mib;
        if merges && !unmerged.is_empty() && room_mib < sizes.guest.memory_mib as f64 {
            testbed.events().step(0, "waits for merging, whose memory the next guest needs");
            testbed.wait_for_merging(&unmerged)?;
            unmerged.clear();
        }
        let mut record = testbed.start_guest(sizes.guest)?;
        if merges {
            // Also while its program runs, because the cost for the guest is part of the result.
            testbed.set_merging(&[record.guest], Some(MERGED_PAGES_PER_SECOND))?;
        }
        let command = Command::AllocTouchExit { bytes: sizes.program_mib << 20 };
        let ran = testbed.run_program(&mut record, command, sizes.program_mib);
        let full = record.swap_used_mib.is_some_and(|swap_mib| swap_mib > threshold_mib);
        // When the host swaps, the series is over: memory returned after that has no meaning.
        let settled = match ran {
            Ok(_) if !full => testbed.wait_for_return(&mut record, sizes.program_mib),
            Ok(_) => Ok(()),
            Err(error) => Err(error),
        };
        let guest = record.guest;
        series.guests.push(record);
        unmerged.push(guest);
        settled?;
        if full {
            series
                .notes
                .push(format!("ended when the host swapped while guest {guest} ran its program"));
            series.notes.extend(shrunk.notes());
            return Ok(());
        }
        match testbed.setup().idle {
            Idle::Left => {}
            Idle::Trimmed => shrunk.trims.push(testbed.trim(guest)?),
            Idle::Parked => shrunk.parks.push(testbed.park(guest, KEEP_MIB)?),
        }
    }
    series.notes.push(format!(
        "ended with {most_guests} guests, the most of this run; the host had not swapped"
    ));
    series.notes.extend(shrunk.notes());
    Ok(())
}

/// What was done with idle guests.
#[derive(Debug, Default)]
struct Shrunk {
    trims: Vec<TrimReport>,
    parks: Vec<ParkReport>,
}

impl Shrunk {
    /// Results and costs.
    fn notes(&self) -> Vec<String> {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let trimmed = median(self.trims.iter().map(|trim| mib(trim.returned_bytes)));
        let longest_us = self.trims.iter().map(|trim| trim.longest_pause_us).max().unwrap_or(0);
        let longest_ms = longest_us as f64 / 1000.0;
        let of_a_park =
            |park: &ParkReport| mib(park.resident_before_bytes.saturating_sub(park.resident_bytes));
        let parked = median(self.parks.iter().map(of_a_park));
        let park_s = median(self.parks.iter().map(|park| park.elapsed_us as f64 / 1e6));
        [
            trimmed.map(|mib| {
                format!(
                    "a trim returned {mib:.0} MiB (median); the longest pause of a guest was \
                     {longest_ms:.1} ms"
                )
            }),
            parked.zip(park_s).map(|(mib, s)| {
                format!("parking returned {mib:.0} MiB and took {s:.2} s (medians)")
            }),
        ]
        .into_iter()
        .flatten()
        .collect()
    }
}

/// Number of these guests that have not ended.
fn alive<'a>(guests: impl Iterator<Item = &'a GuestRecord>) -> usize {
    guests.filter(|guest| guest.ended.is_none()).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn guest(number: u32, swap_used_mib: Option<f64>, return_90_s: Option<f64>) -> GuestRecord {
        GuestRecord { guest: number, swap_used_mib, return_90_s, ..GuestRecord::default() }
    }

    fn summarized(guests: Vec<GuestRecord>) -> BTreeMap<String, Option<f64>> {
        let mut series = Series::new("reporting", String::new());
        let found = Found { guests, threshold_mib: 10.0, swap_used_mib: 321.0, ..Found::default() };
        metrics::measure(&metrics(), &found, &mut series);
        series.metrics
    }

    #[test]
    fn guests_count_until_the_host_swaps() {
        let metrics = summarized(vec![
            guest(1, Some(0.0), Some(4.0)),
            guest(2, Some(9.0), Some(6.0)),
            guest(3, Some(300.0), None),
        ]);
        assert_eq!(metrics["guests_without_swap"], Some(2.0));
        assert_eq!(metrics["return_90_s"], Some(5.0));
        assert_eq!(metrics["swap_used_mib"], Some(321.0));
        assert_eq!(metrics["monitor_rss_mib"], None);
    }

    #[test]
    fn a_guest_whose_program_failed_does_not_count() {
        let metrics = summarized(vec![guest(1, Some(0.0), None), guest(2, None, None)]);
        assert_eq!(metrics["guests_without_swap"], Some(1.0));
        assert_eq!(metrics["return_90_s"], None);
    }

    #[test]
    fn a_guest_that_ended_by_itself_does_not_count() {
        let ended = GuestRecord {
            ended: Some("triple fault".to_owned()),
            ..guest(2, Some(0.0), Some(1.0))
        };
        let metrics =
            summarized(vec![guest(1, Some(0.0), Some(1.0)), ended, guest(3, Some(0.0), Some(1.0))]);
        assert_eq!(metrics["guests_without_swap"], Some(2.0));
    }

    #[test]
    fn uncaptured_memory_is_neither_the_monitors_nor_in_use() {
        let record = GuestRecord {
            idle_rss_mib: Some(120.0),
            monitor_rss_mib: Some(5.0),
            guest_in_use_mib: Some(95.0),
            ..guest(1, Some(0.0), Some(1.0))
        };
        let more = GuestRecord { guest_in_use_mib: Some(130.0), ..record.clone() };
        assert_eq!(uncaptured_mib(&more), Some(0.0), "memory in use need not have been touched");
        let metrics = summarized(vec![record, guest(2, Some(0.0), None)]);
        assert_eq!(metrics["uncaptured_mib"], Some(20.0));
    }

    #[test]
    fn counters_are_listed_by_guest_and_unused_ones_left_out() {
        let guests = [
            (1, Counters::of_driver("captured 4\nlost 0\n")),
            (2, Counters::of_driver("captured 0\nlost 0\nframes 2\n")),
        ];
        let table = counters_table(&guests).unwrap();
        assert_eq!(table.columns, ["counter", "guest 1", "guest 2"]);
        assert_eq!(table.rows[0], [Value::from("captured"), Value::from(4.0), Value::from(0.0)]);
        assert_eq!(table.rows.len(), 2);
        assert_eq!(counters_table(&[]), None);
    }

    #[test]
    fn three_guests_fit_and_four_do_not() {
        for scale in [Scale::Demo, Scale::Full] {
            let sizes = sizes(scale);
            assert!(sizes.program_mib * 10 <= sizes.guest.memory_mib * 8);
            // Even the smaller guest occupies 100 MiB in addition to its program, and the host
            // needs memory, too.
            let with_guests = |count: u64| count * (sizes.program_mib + 100) + 256;
            assert!(
                with_guests(3) < sizes.host.memory_mib && sizes.host.memory_mib < with_guests(4)
            );
            assert!(sizes.most_guests > 4);
        }
    }
}

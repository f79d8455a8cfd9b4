//! What a guest's hunger for memory costs on a host that is too small for all guests at once.
//!
//! The second use case of the page hinting series v10 for Linux (2019): three guests, `memhog` in
//! one after the other. Without reporting the guests keep what they had, and the last one runs
//! against the host's swap.

use std::collections::BTreeMap;

use ebb_agent::protocol::Command;

use crate::LabError;
use crate::harness::driver::{Driver, Tracker};
use crate::harness::experiment::{Experiment, HostShape, NeedsMemhog, Runs, SeriesPlan, Subject};
use crate::harness::monitor::{GuestSize, MonitorKind, Reporting, Setup};
use crate::harness::testbed::Testbed;
use crate::report::results::{Better, GuestRecord, MetricInfo, Scale, Series, rounded};

/// The experiment.
#[derive(Debug, Clone, Copy)]
pub struct Memhog;

/// Guests of the published experiment.
const GUESTS: u32 = 3;

/// Sizes of one scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Sizes {
    host: HostShape,
    guest: GuestSize,
    /// What memhog takes: as much of the guest as is left beside its kernel. The guests have no
    /// swap of their own.
    memhog_mib: u64,
}

fn sizes(scale: Scale) -> Sizes {
    match scale {
        Scale::Demo => Sizes {
            host: HostShape { memory_mib: 1792, swap_mib: 1024, nodes: 1 },
            guest: GuestSize { memory_mib: 640, cpus: 1 },
            memhog_mib: 512,
        },
        Scale::Full => Sizes {
            host: HostShape { memory_mib: 15 * 1024, swap_mib: 4096, nodes: 1 },
            guest: GuestSize { memory_mib: 6 * 1024, cpus: 1 },
            memhog_mib: 5632,
        },
    }
}

impl Experiment for Memhog {
    fn name(&self) -> &'static str {
        "memhog"
    }

    fn summary(&self) -> &'static str {
        "How long memhog takes in each of three guests, one after the other, on a host too small for all three"
    }

    fn host(&self, scale: Scale) -> HostShape {
        sizes(scale).host
    }

    fn parameters(&self, scale: Scale) -> BTreeMap<String, u64> {
        let sizes = sizes(scale);
        BTreeMap::from([
            ("host_mib".to_owned(), sizes.host.memory_mib),
            ("swap_mib".to_owned(), sizes.host.swap_mib),
            ("guest_mib".to_owned(), sizes.guest.memory_mib),
            ("guest_cpus".to_owned(), u64::from(sizes.guest.cpus)),
            ("memhog_mib".to_owned(), sizes.memhog_mib),
        ])
    }

    fn metrics(&self) -> Vec<MetricInfo> {
        let mut metrics: Vec<MetricInfo> = (1..=GUESTS)
            .map(|guest| {
                MetricInfo::new(
                    &metric(guest),
                    &format!("memhog in guest {guest}"),
                    "s",
                    Better::Lower,
                )
            })
            .collect();
        metrics.push(MetricInfo::new(
            "swap_used_mib",
            "Swap used at the end",
            "MiB",
            Better::Lower,
        ));
        metrics
    }

    fn series(&self) -> Vec<SeriesPlan> {
        let plan = |name, summary, setup| SeriesPlan {
            name,
            summary,
            runs: Runs::ByDefault,
            subject: Subject::Guests(setup),
        };
        vec![
            plan(
                "no-reporting",
                "Ebb, the balloon offers no free page reporting",
                Setup { reporting: Reporting::Off, ..Setup::EBB },
            ),
            plan("reporting", "Ebb with free page reporting", Setup::EBB),
            plan(
                "bitmap",
                "Ebb with its driver in the guests, which finds free blocks by a bitmap for each zone",
                Setup { driver: Driver::tracking(Tracker::Bitmap), ..Setup::EBB },
            ),
            plan(
                "percpu",
                "Ebb with its driver in the guests, which finds free pages by an array for each CPU",
                Setup { driver: Driver::tracking(Tracker::Percpu), ..Setup::EBB },
            ),
            plan(
                "qemu-reporting",
                "the same guests under QEMU with free page reporting",
                Setup { monitor: MonitorKind::Qemu, ..Setup::EBB },
            ),
        ]
    }

    fn needs_memhog(&self) -> NeedsMemhog {
        NeedsMemhog::Yes
    }

    fn guests(&self, _scale: Scale) -> u32 {
        GUESTS
    }

    fn run(&self, testbed: &mut Testbed<'_>, series: &mut Series) -> Result<(), LabError> {
        let sizes = sizes(testbed.scale());
        series.metrics = metric_names().map(|name| (name, None)).collect();
        let mut records = Vec::new();
        for _ in 0..testbed.guests(GUESTS) {
            records.push(testbed.start_guest(sizes.guest)?);
        }
        let mut outcome = Ok(());
        for record in &mut records {
            if outcome.is_ok() {
                outcome = hog(testbed, series, record, sizes);
            }
        }
        let swap_used_mib = testbed.usage()?.swap_used_mib;
        series.metrics.insert("swap_used_mib".to_owned(), Some(rounded(swap_used_mib)));
        let ended = testbed.find_ended(&mut records);
        let measured =
            outcome.and_then(|()| testbed.measure_idle(&mut records, sizes.guest)).and(ended);
        series.guests = records;
        measured
    }
}

/// Runs memhog in one guest and waits for what comes back.
fn hog(
    testbed: &mut Testbed<'_>,
    series: &mut Series,
    record: &mut GuestRecord,
    sizes: Sizes,
) -> Result<(), LabError> {
    let command = Command::Memhog { bytes: sizes.memhog_mib << 20 };
    let answer = testbed.run_program(record, command, sizes.memhog_mib)?;
    // The host's clock: a guest that waits for its host's swap need not notice.
    series.metrics.insert(metric(record.guest), Some(rounded(answer.waited.as_secs_f64())));
    if let (1, Some(program)) = (record.guest, answer.result["program"].as_str()) {
        series.notes.push(format!("program: {program} {}m", sizes.memhog_mib));
    }
    testbed.wait_for_return(record, sizes.memhog_mib)
}

fn metric(guest: u32) -> String {
    format!("memhog_guest{guest}_s")
}

fn metric_names() -> impl Iterator<Item = String> {
    (1..=GUESTS).map(metric).chain(["swap_used_mib".to_owned()])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_metric_that_is_described_is_measured() {
        let described: Vec<String> = Memhog.metrics().into_iter().map(|info| info.name).collect();
        assert_eq!(described, metric_names().collect::<Vec<_>>());
    }

    #[test]
    fn two_guests_fit_and_three_do_not() {
        for scale in [Scale::Demo, Scale::Full] {
            let sizes = sizes(scale);
            // A guest occupies 100 MiB beside its program, and as much before it; the host needs
            // something itself.
            let with_programs = |count: u64| count * sizes.memhog_mib + 3 * 100 + 256;
            assert!(
                with_programs(2) < sizes.host.memory_mib
                    && sizes.host.memory_mib < with_programs(3)
            );
            assert!(with_programs(3) < sizes.host.memory_mib + sizes.host.swap_mib);
            assert!(sizes.memhog_mib < sizes.guest.memory_mib);
        }
    }
}

//! How fast a guest can be made smaller and larger again: the stock driver's inflation, page by page of 4 KiB.
//!
//! A guest fills its balloon to seven eighths of its memory, once fresh from its boot and then after a program has
//! used all of it, which is the case that gives memory back. The driver is Linux's own, which sends 256 page numbers
//! in a buffer and waits for each (drivers/virtio/virtio_balloon.c); what differs is what the monitor does with them.

use std::collections::BTreeMap;

use ebb_agent::protocol::Command;

use crate::LabError;
use crate::bench::Bench;
use crate::experiment::{Experiment, HostShape, Runs, SeriesPlan, Subject};
use crate::monitor::{GuestSize, HugePages, MonitorKind, Reporting, Setup};
use crate::results::{Better, GuestRecord, MetricInfo, Scale, Series, rounded};
use crate::statistics::median;

/// The experiment.
#[derive(Debug, Clone, Copy)]
pub struct Inflate;

/// Sizes of one scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Sizes {
    host: HostShape,
    guest: GuestSize,
    balloon_mib: u64,
    program_mib: u64,
    /// How often the balloon is inflated after the program.
    rounds: u32,
}

fn sizes(scale: Scale) -> Sizes {
    match scale {
        Scale::Demo => Sizes {
            host: HostShape { memory_mib: 1792, swap_mib: 512 },
            guest: GuestSize { memory_mib: 1024, cpus: 1 },
            balloon_mib: 768,
            program_mib: 768,
            rounds: 3,
        },
        Scale::Full => Sizes {
            host: HostShape { memory_mib: 10 * 1024, swap_mib: 1024 },
            guest: GuestSize { memory_mib: 8 * 1024, cpus: 1 },
            balloon_mib: 7 * 1024,
            program_mib: 7 * 1024,
            rounds: 3,
        },
    }
}

impl Experiment for Inflate {
    fn name(&self) -> &'static str {
        "inflate"
    }

    fn summary(&self) -> &'static str {
        "How fast the balloon of a guest inflates to most of its memory and deflates again, with Linux's own driver"
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
            ("balloon_mib".to_owned(), sizes.balloon_mib),
            ("program_mib".to_owned(), sizes.program_mib),
            ("rounds".to_owned(), u64::from(sizes.rounds)),
        ])
    }

    fn metrics(&self) -> Vec<MetricInfo> {
        vec![
            MetricInfo::new("inflate_s", "Inflate, memory used before", "s", Better::Lower),
            MetricInfo::new("inflate_fresh_s", "Inflate, guest fresh from boot", "s", Better::Lower),
            MetricInfo::new("deflate_s", "Deflate", "s", Better::Lower),
            MetricInfo::new("returned_mib", "Back at the host after inflating", "MiB", Better::Higher),
            MetricInfo::new("left_mib", "Left with the inflated guest", "MiB", Better::Lower),
        ]
    }

    fn series(&self) -> Vec<SeriesPlan> {
        let quiet = Setup { reporting: Reporting::Off, ..Setup::EBB };
        let plan =
            |name, summary, runs, setup| SeriesPlan { name, summary, runs, subject: Subject::Guests(setup) };
        vec![
            plan("ebb", "Ebb", Runs::ByDefault, quiet),
            plan(
                "qemu",
                "the same guest under QEMU",
                Runs::ByDefault,
                Setup { monitor: MonitorKind::Qemu, ..quiet },
            ),
            plan(
                "ebb-no-thp",
                "Ebb, guest memory without transparent huge pages",
                Runs::WhenNamed,
                Setup { huge_pages: HugePages::Off, ..quiet },
            ),
        ]
    }

    fn guests(&self, _scale: Scale) -> u32 {
        1
    }

    fn run(&self, bench: &mut Bench<'_>, series: &mut Series) -> Result<(), LabError> {
        let sizes = sizes(bench.scale());
        let mut record = bench.start_controlled_guest(sizes.guest)?;
        let mut found = Found::default();
        let outcome = measure(bench, &mut record, sizes, &mut found);
        found.summarize(series);
        series.guests.push(record);
        outcome
    }
}

/// What was measured.
#[derive(Debug, Default)]
struct Found {
    fresh_s: Option<f64>,
    inflate_s: Vec<f64>,
    deflate_s: Vec<f64>,
    returned_mib: Vec<f64>,
    left_mib: Vec<f64>,
}

impl Found {
    fn summarize(&self, series: &mut Series) {
        let middle = |values: &[f64]| median(values.iter().copied()).map(rounded);
        let metrics = [
            ("inflate_s", middle(&self.inflate_s)),
            ("inflate_fresh_s", self.fresh_s.map(rounded)),
            ("deflate_s", middle(&self.deflate_s)),
            ("returned_mib", middle(&self.returned_mib)),
            ("left_mib", middle(&self.left_mib)),
        ];
        series.metrics = metrics.map(|(name, value)| (name.to_owned(), value)).into();
        let list =
            |values: &[f64]| values.iter().map(|value| format!("{value:.2}")).collect::<Vec<_>>().join(", ");
        series.notes.push(format!(
            "medians of rounds: inflate {} s; deflate (the first one fresh from boot) {} s",
            list(&self.inflate_s),
            list(&self.deflate_s)
        ));
    }
}

fn measure(
    bench: &mut Bench<'_>,
    record: &mut GuestRecord,
    sizes: Sizes,
    found: &mut Found,
) -> Result<(), LabError> {
    let target_mib = sizes.balloon_mib;
    found.fresh_s = Some(bench.balloon_to(record.guest, target_mib, "inflates, fresh from boot")?);
    found.deflate_s.push(bench.balloon_to(record.guest, 0, "deflates")?);
    for _ in 0..sizes.rounds {
        let command = Command::AllocTouchExit { bytes: sizes.program_mib << 20 };
        bench.run_program(record, command, sizes.program_mib)?;
        let before_mib = bench.footprint_mib(record.guest)?;
        found.inflate_s.push(bench.balloon_to(record.guest, target_mib, "inflates")?);
        let after_mib = bench.footprint_mib(record.guest)?;
        found.returned_mib.push(before_mib - after_mib);
        found.left_mib.push(after_mib);
        record.idle_rss_mib = Some(rounded(after_mib));
        found.deflate_s.push(bench.balloon_to(record.guest, 0, "deflates")?);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_metric_that_is_described_is_measured() {
        let mut series = Series::new("ebb", String::new());
        let found = Found { inflate_s: vec![3.0, 1.0, 2.0], ..Found::default() };
        found.summarize(&mut series);
        let described: Vec<String> = Inflate.metrics().into_iter().map(|info| info.name).collect();
        assert_eq!(series.metrics.len(), described.len());
        assert!(described.iter().all(|name| series.metrics.contains_key(name)));
        assert_eq!(series.metrics["inflate_s"], Some(2.0));
        assert!(series.notes[0].contains("3.00, 1.00, 2.00"), "{}", series.notes[0]);
    }

    #[test]
    fn the_balloon_leaves_the_guest_room_to_live() {
        for scale in [Scale::Demo, Scale::Full] {
            let sizes = sizes(scale);
            assert!(sizes.balloon_mib + 256 <= sizes.guest.memory_mib);
            assert!(sizes.guest.memory_mib + 512 < sizes.host.memory_mib, "no swap shall disturb");
        }
    }
}

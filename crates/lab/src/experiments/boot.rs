//! Time from the start of a monitor to its guest's init, and where it goes.
//!
//! A guest of 5 GiB is started again and again, under Ebb and QEMU in turns, since a machine's speed
//! varies over time. The stages follow from three clocks: the laboratory's, the monitor's own
//! (`ebb_start_microseconds`), and the time stamps of the guest's kernel log, which are related to
//! the laboratory's clock by a line that the guest writes into that log. Of a Debian guest with
//! systemd, the time until its ssh server answers is measured.

use serde::Serialize;

use ebb_agent::protocol::Command;

use crate::LabError;
use crate::harness::counters::Counters;
use crate::harness::experiment::{Experiment, Needs, Run, Runs, SeriesPlan, parameters};
use crate::harness::monitor::{MonitorKind, Setup, System};
use crate::harness::size::{GuestSize, HostShape};
use crate::harness::testbed::Testbed;
use crate::harness::turns::in_turns;
use crate::report::figures::DataTable;
use crate::report::metrics::{self, Metric};
use crate::report::results::{GuestRecord, Scale, Series};
use crate::report::statistics::median;
use stages::{LOG_WORDS, MARK, Stage, Times};

mod debian;
mod stages;

/// The experiment.
pub static BOOT: Experiment = Experiment {
    name: "boot",
    summary: "How long a guest takes from the start of its monitor to its init, and where the time \
              goes",
    host: |scale, _| sizes(scale).host,
    parameters: |scale| parameters(&sizes(scale)),
    guests: |scale| sizes(scale).rounds * rows().len() as u32,
    // For the guests that answer ssh.
    needs: Needs { network: true, ..Experiment::DEFAULT.needs },
    metrics: || metrics::describe(metrics()),
    series: || {
        let plan = |(runs, name, summary, setup)| SeriesPlan {
            runs,
            ..SeriesPlan::new(name, summary, Run::SameGuests(setup, run))
        };
        rows().map(plan).into()
    },
    compare: |all| metrics::mark_noise(&metrics(), all),
    ..Experiment::DEFAULT
};

/// Sizes of one scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
struct Sizes {
    #[serde(flatten)]
    host: HostShape,
    #[serde(flatten)]
    guest: GuestSize,
    /// Number of boots of each series.
    rounds: u32,
}

fn sizes(scale: Scale) -> Sizes {
    match scale {
        Scale::Demo => Sizes {
            host: HostShape { memory_mib: 1792, swap_mib: 256, nodes: 1 },
            guest: GuestSize { memory_mib: 768, cpus: 1 },
            rounds: 2,
        },
        Scale::Full => Sizes {
            host: HostShape { memory_mib: 7 * 1024, swap_mib: 512, nodes: 1 },
            guest: GuestSize { memory_mib: 5 * 1024, cpus: 1 },
            rounds: 5,
        },
    }
}

/// A series: when it runs, its name, its summary and its setup.
type Row = (Runs, &'static str, &'static str, Setup);

fn rows() -> [Row; 8] {
    let elf = Setup { uncompressed_kernel: true, ..Setup::EBB };
    let debian = Setup { system: System::DebianWithSsh, ..elf };
    let qemu = |setup| Setup { monitor: MonitorKind::Qemu, ..setup };
    let lean = |setup| Setup { lean: true, ..setup };
    let row = |name, summary, setup| (Runs::ByDefault, name, summary, setup);
    [
        row("ebb", "uncompressed kernel, ebb run --lean", lean(elf)),
        row("qemu", "the same kernel with the same words under QEMU", qemu(lean(elf))),
        row("ebb-plain", "uncompressed kernel without the words of --lean", elf),
        row("qemu-plain", "the same under QEMU", qemu(elf)),
        row("ebb-bzimage", "compressed kernel, ebb run --lean", lean(Setup::EBB)),
        row("qemu-bzimage", "the same under QEMU", qemu(lean(Setup::EBB))),
        row("ebb-debian", "Debian with systemd and ssh, ebb run --lean", lean(debian)),
        row("qemu-debian", "the same under QEMU", qemu(lean(debian))),
    ]
}

/// One boot.
#[derive(Debug, Clone, PartialEq)]
struct Boot {
    /// Its stages; `None` of a guest without an agent.
    times: Option<Times>,
    /// From the start of the monitor to the answer of a Debian guest's ssh server, in seconds.
    ssh_s: Option<f64>,
    /// Memory of the guest's process after the boot, in MiB.
    booted_mib: Option<f64>,
    /// Exits of vCPUs to the monitor; Ebb only.
    exits: Option<f64>,
}

impl Boot {
    fn init_s(&self) -> Option<f64> {
        self.times.as_ref().map(|times| times.init_s)
    }

    fn seconds(&self, stage: Stage) -> Option<f64> {
        self.times.as_ref()?.seconds(stage)
    }
}

fn metrics() -> Vec<Metric<Vec<Boot>>> {
    let times = |boots: &Vec<Boot>, time: fn(&Boot) -> Option<f64>| {
        boots.iter().filter_map(time).collect::<Vec<_>>()
    };
    vec![
        Metric::median(
            "start_to_init_s",
            "Start of the monitor to the guest's init",
            "s",
            move |boots| times(boots, Boot::init_s),
        ),
        Metric::median(
            "start_to_ssh_s",
            "Start of the monitor to the answer of a Debian guest's ssh server",
            "s",
            move |boots| times(boots, |boot| boot.ssh_s),
        ),
    ]
}

fn run(testbed: &mut Testbed<'_>, all: &mut [Series]) -> Result<(), LabError> {
    let sizes = sizes(testbed.scale());
    let (boots, outcome) = in_turns(sizes.rounds, all, |series| boot(testbed, series, sizes.guest));
    for (series, boots) in all.iter_mut().zip(&boots) {
        fill(boots, series);
    }
    outcome
}

/// Boots a guest of this series once.
fn boot(testbed: &mut Testbed<'_>, series: &mut Series, size: GuestSize) -> Result<Boot, LabError> {
    if let Some((.., setup)) = rows().into_iter().find(|(_, name, ..)| *name == series.name) {
        testbed.run_like(setup);
    }
    if testbed.setup().system == System::DebianWithSsh {
        let (record, ssh_s) = debian::boot(testbed, size)?;
        let booted_mib = record.booted_rss_mib;
        series.guests.push(record);
        return Ok(Boot { times: None, ssh_s: Some(ssh_s), booted_mib, exits: None });
    }
    let record = testbed.start_controlled_guest(size)?;
    let found = look(testbed, &record);
    testbed.end_guest(record.guest);
    series.guests.push(record);
    found
}

/// Reads the clocks of a guest that has just booted.
fn look(testbed: &mut Testbed<'_>, record: &GuestRecord) -> Result<Boot, LabError> {
    let guest = record.guest;
    // A line without its end is not in the log yet.
    let mark = Command::WriteFile { path: "/dev/kmsg".to_owned(), text: format!("{MARK}\n") };
    let (_, marked) = testbed.ask_when(guest, mark)?;
    let words = LOG_WORDS.map(str::to_owned).to_vec();
    let log = testbed.ask(guest, Command::KernelLog { words })?;
    let log = log["text"].as_str().unwrap_or_default();
    let counters = testbed.monitor_counters(guest)?;
    let init_s = record.start_to_init_s.unwrap_or(f64::NAN);
    let times = Times::new(init_s, marked.as_secs_f64(), log, counters.as_ref())
        .ok_or_else(|| LabError::unexpected(guest, format!("no times in its log: {log}")))?;
    Ok(Boot {
        times: Some(times),
        ssh_s: None,
        booted_mib: record.booted_rss_mib,
        exits: counters.map(|it| exits(&it)),
    })
}

/// All exits of the vCPUs to the monitor.
fn exits(counters: &Counters) -> f64 {
    let all = counters.iter().filter(|(name, _)| name.starts_with("ebb_vcpu_exits_total"));
    all.map(|(_, count)| count).sum()
}

fn fill(boots: &Vec<Boot>, series: &mut Series) {
    metrics::measure(&metrics(), boots, series);
    let middle = |stage: Stage| median(boots.iter().filter_map(|boot| boot.seconds(stage)));
    let rows = Stage::ALL.into_iter().filter_map(|stage| Some((stage, middle(stage)?)));
    let rows: Vec<_> = rows.collect();
    if !rows.is_empty() {
        series.tables.push(stages_table(&rows));
    }
    let mut columns = vec!["start to init, s", "start to ssh, s"];
    columns.extend(Stage::ALL.map(Stage::title));
    columns.extend(["after boot, MiB", "exits to the monitor"]);
    let rows = boots.iter().map(|boot| {
        let stages = Stage::ALL.map(|stage| boot.seconds(stage));
        let (first, last) = ([boot.init_s(), boot.ssh_s], [boot.booted_mib, boot.exits]);
        first.into_iter().chain(stages).chain(last).map(Into::into).collect()
    });
    series.details.push(DataTable::new("boots", columns, rows));
}

fn stages_table(rows: &[(Stage, f64)]) -> DataTable {
    DataTable::of(
        "where the time goes, medians of all boots",
        rows,
        &[("stage", &|(stage, _)| stage.title().into()), ("s", &|(_, seconds)| (*seconds).into())],
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_and_stages_follow_from_the_boots() {
        let times = |init_s| {
            let log = "<6>[    0.40] Run /init as init process\n<12>[    0.60] ebb-lab: mark\n";
            Times::new(init_s, init_s + 0.1, log, None).unwrap()
        };
        let boots = [2.0, 1.5, 1.75].map(|init_s| Boot {
            times: Some(times(init_s)),
            ssh_s: None,
            booted_mib: Some(180.0),
            exits: Some(900.0),
        });
        let mut series = Series::new("ebb", String::new());
        fill(&boots.to_vec(), &mut series);
        assert_eq!(series.metrics["start_to_init_s"], Some(1.75));
        assert_eq!(series.metrics["start_to_ssh_s"], None);
        assert_eq!(series.details[0].rows.len(), 3);
        // Stages that are not known are left out.
        assert_eq!(series.tables[0].rows.len(), 2, "{:?}", series.tables);
    }

    #[test]
    fn a_debian_guest_has_no_stages() {
        let boot = Boot { times: None, ssh_s: Some(6.5), booted_mib: None, exits: None };
        let mut series = Series::new("ebb-debian", String::new());
        fill(&vec![boot], &mut series);
        assert_eq!(series.metrics["start_to_init_s"], None);
        assert_eq!(series.metrics["start_to_ssh_s"], Some(6.5));
        assert!(series.tables.is_empty());
    }

    #[test]
    fn exits_of_all_kinds_count() {
        let text = "ebb_vcpu_exits_total{kind=\"port_in\"} 3\nebb_vcpu_exits_total{kind=\"kicked\"} \
                    4\nebb_uptime_seconds 9\n";
        assert!((exits(&Counters::of_monitor(text)) - 7.0).abs() < 1e-9);
    }

    #[test]
    fn one_guest_at_a_time_fits() {
        for scale in [Scale::Demo, Scale::Full] {
            let sizes = sizes(scale);
            assert!(sizes.guest.memory_mib + 512 < sizes.host.memory_mib);
        }
    }
}

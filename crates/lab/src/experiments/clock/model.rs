//! Weeks of a host's uptime in a model, in the kernel that mixed its clocks and in the one that
//! does not.

use ebb_kvm_clock::Kilohertz;
use ebb_kvm_clock::model::{KernelMode, Machine, VcpuTscs};

use super::metrics::Found;
use crate::report::figures::{Curve, DataTable, Drawing, Value};
use crate::report::results::Series;

const SECOND_NS: u64 = 1_000_000_000;
const HOUR_NS: u64 = 3600 * SECOND_NS;
const DAY_NS: u64 = 24 * HOUR_NS;
const PPB_PER_PPM: i64 = 1000;

/// The published case occurred after almost two weeks, where the values are densest.
const UPTIMES_NS: [u64; 9] = [
    HOUR_NS,
    DAY_NS,
    7 * DAY_NS,
    11 * DAY_NS,
    12 * DAY_NS,
    13 * DAY_NS,
    14 * DAY_NS,
    30 * DAY_NS,
    60 * DAY_NS,
];
/// Slews in parts per million: small ones as NTP uses in the long run, and one of a bad crystal.
const SLEWS_PPM: [i64; 7] = [-100, -5, -1, 0, 1, 5, 100];
/// The slews that fit one drawing.
const DRAWN_PPM: [i64; 5] = [-5, -1, 0, 1, 5];
/// The time after its creation at which a guest is read first.
const AGE_NS: u64 = SECOND_NS;
/// How long the master clock stays off.
const OFF_NS: u64 = HOUR_NS;
/// Frequency of the host's TSC.
const TSC_KHZ: u32 = 2_600_000;

/// Results of one host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Case {
    uptime_ns: u64,
    slew_ppm: i64,
    /// D: how far the slewed clock is ahead of the raw one at the guest's creation.
    drift_ns: i64,
    /// The time that a guest one second old reads, as a signed number.
    time_ns: i64,
    /// The same as an unsigned number, as the guest sees it.
    seen_ns: u64,
    /// Jump of KVM's clock when the master clock goes off, and on again an hour later.
    off_jump_ns: i64,
    on_jump_ns: i64,
    /// Error of the guest's real time right after its creation.
    wall_error_ns: i64,
}

/// Runs one host: boots, creates a guest after `uptime_ns`, reads it, and flips its master clock.
fn case(mode: KernelMode, uptime_ns: u64, slew_ppm: i64) -> Option<Case> {
    let mut machine = Machine::new(mode, Kilohertz::new(TSC_KHZ)?);
    machine.set_slew_ppb(slew_ppm * PPB_PER_PPM);
    machine.advance(uptime_ns);
    let drift_ns = machine.host().drift_ns();
    let vm = machine.create_vm();
    let wall_error_ns = machine.wall_error_ns(vm);
    machine.advance(AGE_NS);
    let seen_ns = machine.guest_time(vm)?.time_ns;
    let mut flip = |tscs| {
        // The jump of the flip alone, without the rounding error of the page's factor since it was
        // written.
        machine.renew_clock(vm);
        let before_ns = machine.clock(vm).clock_ns;
        machine.set_vcpu_tscs(vm, tscs);
        let jump_ns = machine.clock(vm).clock_ns - before_ns;
        machine.advance(OFF_NS);
        jump_ns
    };
    Some(Case {
        uptime_ns,
        slew_ppm,
        drift_ns,
        time_ns: seen_ns.cast_signed(),
        seen_ns,
        off_jump_ns: flip(VcpuTscs::Unmatched),
        on_jump_ns: flip(VcpuTscs::Matched),
        wall_error_ns,
    })
}

/// All cases of a mode.
#[derive(Debug)]
pub(super) struct Sweep {
    mode: KernelMode,
    cases: Vec<Case>,
    /// By slew, the time of a fresh guest by uptime in days.
    curves: Vec<Curve>,
}

/// Runs all uptimes and slews.
pub(super) fn sweep(mode: KernelMode, uptime_days: u64) -> Sweep {
    let pairs = UPTIMES_NS
        .into_iter()
        .flat_map(|uptime| SLEWS_PPM.into_iter().map(move |slew| (uptime, slew)));
    let cases = pairs.filter_map(|(uptime_ns, slew_ppm)| case(mode, uptime_ns, slew_ppm)).collect();
    let curve = |slew_ppm: i64| Curve {
        name: slew(slew_ppm),
        points: (0..=uptime_days)
            .filter_map(|days| {
                Some((days as f64, seconds(case(mode, days * DAY_NS, slew_ppm)?.time_ns)))
            })
            .collect(),
    };
    Sweep { mode, cases, curves: DRAWN_PPM.into_iter().map(curve).collect() }
}

fn seconds(ns: i64) -> f64 {
    ns as f64 / SECOND_NS as f64
}

fn slew(ppm: i64) -> String {
    if ppm == 0 { "0 ppm".to_owned() } else { format!("{ppm:+} ppm") }
}

fn uptime(ns: u64) -> String {
    if ns < DAY_NS { format!("{} h", ns / HOUR_NS) } else { format!("{} d", ns / DAY_NS) }
}

/// Formats a time to the millisecond, like the published numbers.
fn milliseconds(ns: i64) -> String {
    format!("{:+.3}", seconds(ns))
}

impl Sweep {
    /// Adds metrics, tables, curves and a summary to the document.
    pub(super) fn show(self, found: &mut Found, series: &mut Series) {
        let largest = |of: fn(&Case) -> u64| self.cases.iter().map(of).max().map(|ns| ns as f64);
        found.min_system_time = self.cases.iter().map(|case| case.time_ns as f64).reduce(f64::min);
        found.max_jump =
            largest(|case| case.off_jump_ns.unsigned_abs().max(case.on_jump_ns.unsigned_abs()));
        found.wall_error = largest(|case| case.wall_error_ns.unsigned_abs());
        let negative = self.cases.iter().filter(|case| case.time_ns < 0).count();
        series.notes.push(format!(
            "{negative} of {} fresh guests read a negative time one second after their creation{}",
            self.cases.len(),
            self.cases
                .iter()
                .filter(|case| case.time_ns < 0)
                .max_by_key(|case| case.time_ns)
                .map_or_else(String::new, |case| format!(
                    "; the one closest to zero {} s, which it sees as {} ns",
                    milliseconds(case.time_ns),
                    case.seen_ns
                )),
        ));
        series.tables.push(self.matrix("time of a guest one second old, s", |case| case.time_ns));
        if self.mode == KernelMode::Mixed {
            series.tables.push(
                self.matrix("jump when its master clock goes off, s", |case| case.off_jump_ns),
            );
        }
        series.details.push(self.list());
        series.drawings.push(Drawing {
            title: "time of a guest one second old".to_owned(),
            x: "uptime of the host, days".to_owned(),
            y: "s".to_owned(),
            curves: self.curves,
        });
    }

    /// Uptimes as rows, slews as columns.
    fn matrix(&self, title: &str, of: fn(&Case) -> i64) -> DataTable {
        let mut columns = vec!["uptime".to_owned()];
        columns.extend(SLEWS_PPM.map(slew));
        let rows = self.cases.chunks(SLEWS_PPM.len()).map(|row| {
            let name = row.first().map_or_else(String::new, |case| uptime(case.uptime_ns));
            [name]
                .into_iter()
                .chain(row.iter().map(|case| milliseconds(of(case))))
                .map(Value::Text)
                .collect()
        });
        DataTable::new(title, columns, rows)
    }

    /// Everything, in nanoseconds.
    fn list(&self) -> DataTable {
        DataTable::of(
            "all cases, in nanoseconds",
            &self.cases,
            &[
                ("uptime_s", &|case| (case.uptime_ns / SECOND_NS).into()),
                ("slew_ppm", &|case| case.slew_ppm.into()),
                ("drift_ns", &|case| case.drift_ns.into()),
                ("system_time_ns", &|case| case.time_ns.into()),
                ("system_time_seen_ns", &|case| case.seen_ns.into()),
                ("master_clock_off_jump_ns", &|case| case.off_jump_ns.into()),
                ("master_clock_on_jump_ns", &|case| case.on_jump_ns.into()),
                ("wall_error_ns", &|case| case.wall_error_ns.into()),
            ],
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cases(mode: KernelMode) -> Vec<Case> {
        sweep(mode, 1).cases
    }

    #[test]
    fn every_uptime_meets_every_slew() {
        for mode in KernelMode::ALL {
            assert_eq!(cases(mode).len(), UPTIMES_NS.len() * SLEWS_PPM.len());
        }
    }

    #[test]
    fn raw_clocks_have_neither_negative_times_nor_jumps_nor_errors() {
        for case in cases(KernelMode::Raw) {
            assert_eq!(case.time_ns, SECOND_NS as i64 - 1, "{case:?}");
            assert_eq!(
                (case.off_jump_ns, case.on_jump_ns, case.wall_error_ns),
                (0, 0, 0),
                "{case:?}"
            );
        }
    }

    #[test]
    fn mixed_clocks_are_off_by_the_drift() {
        for case in cases(KernelMode::Mixed) {
            assert_eq!(case.drift_ns, case.slew_ppm * (case.uptime_ns / SECOND_NS) as i64 * 1000);
            assert_eq!(case.time_ns, SECOND_NS as i64 - 1 - case.drift_ns, "{case:?}");
            assert_eq!(case.seen_ns, case.time_ns as u64);
            // By then the drift has grown by that of a second and of an hour.
            assert_eq!(case.off_jump_ns, case.drift_ns + case.slew_ppm * 1000, "{case:?}");
            assert_eq!(case.on_jump_ns, -(case.drift_ns + case.slew_ppm * 1000 * 3601), "{case:?}");
            assert_eq!(case.wall_error_ns, -case.drift_ns);
        }
    }

    #[test]
    fn the_table_has_the_published_numbers() {
        let matrix = sweep(KernelMode::Mixed, 1).matrix("", |case| case.time_ns);
        let cell = |row: &str, column: &str| {
            let column = matrix.columns.iter().position(|name| name == column).unwrap();
            let row = matrix.rows.iter().find(|cells| cells[0].shown() == row).unwrap();
            row[column].shown()
        };
        for (uptime, slew, expected) in [
            ("7 d", "+1 ppm", "+0.395"),
            ("13 d", "+1 ppm", "-0.123"),
            ("14 d", "+1 ppm", "-0.210"),
            ("14 d", "+5 ppm", "-5.048"),
            ("14 d", "-5 ppm", "+7.048"),
            ("60 d", "0 ppm", "+1.000"),
        ] {
            assert_eq!(cell(uptime, slew), expected, "{uptime} {slew}");
        }
    }
}

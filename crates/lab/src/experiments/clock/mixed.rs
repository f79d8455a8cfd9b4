//! Signs that distinguish a kernel that mixes its clocks from one that does not, on a host whose
//! clocks have drifted apart: three values that are off by the drift in the former and right in the
//! latter.
//!
//! Unlike the rates of the clocks, they are visible at once, whatever the current slew is.

use kvm_bindings::KVM_CLOCK_TSC_STABLE;
use kvm_ioctls::Kvm;

use super::host_clock::{Ahead, HostClock};
use super::kvm::{ClockGuest, MasterClock};
use super::metrics::Found;
use crate::LabError;
use crate::report::figures::{DataTable, Value};
use crate::report::results::Series;

/// Number of times that the master clock is switched off and on.
const FLIPS: u32 = 5;

/// The observed values, to be compared with those of a mixed kernel.
#[derive(Debug)]
pub(super) struct Signs {
    drift: Ahead,
    /// A fresh guest's time less its age.
    fresh: Ahead,
    /// Jumps of the clock when the master clock goes off and on; none if KVM did not switch it.
    off_jumps: Vec<Ahead>,
    on_jumps: Vec<Ahead>,
    /// The guest's real time less the host's.
    wall: Ahead,
}

/// Creates a guest, reads it, and flips its master clock.
///
/// # Errors
/// [`LabError::Kvm`] and [`LabError::TestGuest`].
pub(super) fn look(kvm: &Kvm) -> Result<Signs, LabError> {
    let begin_ns = HostClock::Raw.now_ns();
    let mut guest = ClockGuest::new(kvm, None)?;
    let created_ns = HostClock::Raw.now_ns();
    guest.run()?;
    let before_ns = HostClock::Raw.now_ns();
    let time_ns = time_ns(&mut guest)?;
    let after_ns = HostClock::Raw.now_ns();
    // Its age lies between those at the beginning and at the end of the reading.
    let fresh = Ahead::between(before_ns - created_ns, time_ns, after_ns - begin_ns);
    let drift = Ahead::of_monotonic();
    let before_ns = HostClock::Realtime.now_ns();
    let wall_ns = guest.wall_clock()?.ns().cast_signed() + self::time_ns(&mut guest)?;
    let wall = Ahead::between(before_ns, wall_ns, HostClock::Realtime.now_ns());
    let mut signs = Signs { drift, fresh, off_jumps: Vec::new(), on_jumps: Vec::new(), wall };
    for _ in 0..FLIPS {
        for clock in [MasterClock::Refused, MasterClock::Allowed] {
            let was_on = has_master_clock(&guest)?;
            let before = ahead_of_raw(&guest)?;
            guest.set_master_clock(clock)?;
            let jump = ahead_of_raw(&guest)?.since(before);
            match (was_on, has_master_clock(&guest)?) {
                (true, false) => signs.off_jumps.push(jump),
                (false, true) => signs.on_jumps.push(jump),
                _ => {}
            }
        }
    }
    Ok(signs)
}

fn time_ns(guest: &mut ClockGuest) -> Result<i64, LabError> {
    let tsc = guest.run()?;
    Ok(guest.reading(tsc)?.time_ns.cast_signed())
}

fn ahead_of_raw(guest: &ClockGuest) -> Result<Ahead, LabError> {
    Ahead::of(HostClock::Raw, || guest.clock().map(|clock| clock.clock.cast_signed()))
}

fn has_master_clock(guest: &ClockGuest) -> Result<bool, LabError> {
    Ok(guest.clock()?.flags & KVM_CLOCK_TSC_STABLE != 0)
}

/// The jump furthest from zero.
fn largest(jumps: &[Ahead]) -> Option<Ahead> {
    jumps.iter().copied().max_by_key(|jump| jump.ns.abs())
}

impl Signs {
    /// Adds metrics, a table and a verdict to the document.
    pub(super) fn show(self, found: &mut Found, series: &mut Series) {
        let off = largest(&self.off_jumps);
        let on = largest(&self.on_jumps);
        let jump = largest(&off.into_iter().chain(on).collect::<Vec<_>>());
        found.max_jump = jump.map(|jump| jump.ns.abs() as f64);
        found.wall_error = Some(self.wall.ns.abs() as f64);
        if jump.is_none() {
            series.notes.push(
                "KVM did not switch its master clock, so that no jump can be observed".to_owned(),
            );
        }
        let drift_ns = self.drift.ns;
        let signs = [
            ("a fresh guest's time less its age", Some(self.fresh), -drift_ns),
            ("jump when the master clock goes off", off, drift_ns),
            ("jump when the master clock goes on", on, -drift_ns),
            ("the guest's real time less the host's", Some(self.wall), -drift_ns),
        ];
        series.notes.push(verdict(&signs));
        let rows = signs.iter().filter_map(|(name, seen, mixed_ns)| {
            let seen = (*seen)?;
            Some(vec![
                Value::from(*name),
                Value::from(seen.ns),
                Value::from(seen.uncertainty_ns),
                Value::from(*mixed_ns),
            ])
        });
        let columns = ["sign", "seen, ns", "known to within, ns", "with mixed clocks, ns"];
        series.tables.push(DataTable::new("signs of mixed clocks", columns, rows));
    }
}

/// Whether the observed values are nearer to those of raw clocks, which are zero, or to those of
/// mixed ones.
fn verdict(signs: &[(&str, Option<Ahead>, i64)]) -> String {
    let (mut raw, mut mixed) = (0, 0);
    for (_, seen, mixed_ns) in signs {
        let Some(seen) = seen else { continue };
        // Only clearly different values count.
        if mixed_ns.abs() <= 4 * seen.uncertainty_ns {
            continue;
        }
        if seen.ns.abs() < (seen.ns - mixed_ns).abs() {
            raw += 1;
        } else {
            mixed += 1;
        }
    }
    match (raw, mixed) {
        (0, 0) => {
            "this host's clocks are too close to each other to distinguish those that KVM's clock \
             is derived from"
                .to_owned()
        }
        (signs, 0) => {
            format!(
                "{signs} of {signs} signs show that this kernel derives KVM's clock from raw \
                 clocks only"
            )
        }
        (0, signs) => {
            format!("{signs} of {signs} signs show that this kernel mixes raw and slewed clocks")
        }
        (raw, mixed) => {
            format!(
                "{raw} signs are those of raw clocks, {mixed} those of mixed ones: see the \
                 table"
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DRIFT_NS: i64 = 248_000_000;

    fn ahead(ns: i64) -> Ahead {
        Ahead { ns, uncertainty_ns: 300_000 }
    }

    #[test]
    fn observed_values_decide() {
        let raw = [
            ("fresh", Some(ahead(-200_000)), -DRIFT_NS),
            ("off", Some(ahead(500)), DRIFT_NS),
            ("on", None, -DRIFT_NS),
        ];
        assert!(
            verdict(&raw)
                .starts_with("2 of 2 signs show that this kernel derives KVM's clock from raw")
        );
        let mixed = [
            ("fresh", Some(ahead(-DRIFT_NS)), -DRIFT_NS),
            ("off", Some(ahead(DRIFT_NS - 7)), DRIFT_NS),
        ];
        assert!(verdict(&mixed).ends_with("mixes raw and slewed clocks"));
    }

    #[test]
    fn without_drift_there_is_no_verdict() {
        assert!(
            verdict(&[("fresh", Some(ahead(0)), 0), ("off", Some(ahead(0)), 900_000)])
                .contains("too close")
        );
    }

    /// The signs themselves on a host with KVM: kernels since Linux 5.6 do not mix clocks.
    #[test]
    fn this_machines_kvm_does_not_mix_its_clocks() {
        let Ok(kvm) = Kvm::new() else {
            eprintln!("skipped: /dev/kvm cannot be opened");
            return;
        };
        let mut series = Series::new("kvm", String::new());
        let mut found = Found::default();
        look(&kvm).unwrap().show(&mut found, &mut series);
        assert!(found.wall_error.is_some());
        assert!(!series.notes.iter().any(|note| note.contains("mix")), "{:?}", series.notes);
    }

    #[test]
    fn the_largest_jump_counts_in_either_direction() {
        let jumps = [5, -900, 30].map(|ns| Ahead { ns, uncertainty_ns: 1 });
        assert_eq!(largest(&jumps).map(|jump| jump.ns), Some(-900));
        assert_eq!(largest(&[]), None);
    }
}

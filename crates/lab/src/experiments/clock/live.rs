//! The clock of this machine's KVM against the machine's own, and the values that a kernel that
//! mixes them would show here now.

use std::fmt::Write as _;
use std::thread;
use std::time::Duration;

use kvm_bindings::KVM_CLOCK_TSC_STABLE;
use kvm_ioctls::Kvm;

use super::host_clock::{Ahead, HostClock};
use super::kvm::{ClockGuest, MasterClock};
use super::metrics::Found;
use super::{checks, mixed};
use crate::LabError;
use crate::report::event::Events;
use crate::report::figures::{Curve, DataTable, Drawing};
use crate::report::results::Series;

/// Time between two samples.
const INTERVAL: Duration = Duration::from_millis(500);
const NS_PER_SECOND: f64 = 1e9;

/// Two guests: one with KVM's master clock, if there is one, and one without.
struct Guests {
    master: ClockGuest,
    plain: ClockGuest,
}

impl Guests {
    fn new(kvm: &Kvm) -> Result<Self, LabError> {
        let mut guests =
            Self { master: ClockGuest::new(kvm, None)?, plain: ClockGuest::new(kvm, None)? };
        guests.master.run()?;
        guests.plain.set_master_clock(MasterClock::Refused)?;
        Ok(guests)
    }
}

/// One sample of all clocks.
#[derive(Debug, Clone, Copy)]
struct Sample {
    raw_ns: i64,
    /// How far KVM's clock is ahead of each of the host's, with the master clock and without.
    master: [Ahead; 3],
    plain: [Ahead; 3],
    /// `CLOCK_MONOTONIC` ahead of `CLOCK_MONOTONIC_RAW`.
    drift: Ahead,
}

impl Sample {
    fn take(guests: &Guests) -> Result<Self, LabError> {
        let all = |guest: &ClockGuest| -> Result<[Ahead; 3], LabError> {
            let look =
                |clock| Ahead::of(clock, || guest.clock().map(|clock| clock.clock.cast_signed()));
            Ok([look(HostClock::Raw)?, look(HostClock::Monotonic)?, look(HostClock::Boottime)?])
        };
        let (master, plain) = (all(&guests.master)?, all(&guests.plain)?);
        let drift = Ahead::of_monotonic();
        Ok(Self { raw_ns: HostClock::Raw.now_ns(), master, plain, drift })
    }
}

/// Samples KVM's clock for `watch_s` seconds and checks its page. Without a usable KVM it adds a
/// note and measures only the host's clocks.
///
/// # Errors
/// [`LabError::Kvm`] and [`LabError::TestGuest`] when KVM exists but fails,
/// [`LabError::ChecksFailed`] when all has been measured and its clock has failed checks.
pub(super) fn run(
    watch_s: u64,
    events: &Events,
    found: &mut Found,
    series: &mut Series,
) -> Result<(), LabError> {
    mixed_kernel(found, series);
    let kvm = match Kvm::new() {
        Ok(kvm) => kvm,
        Err(cause) => {
            series.notes.push(format!(
                "KVM's clock was not measured: /dev/kvm cannot be opened ({cause}); `ebb doctor` \
                 says what to do, and --where virtual-host measures the virtual host's"
            ));
            return Ok(());
        }
    };
    events.step(0, "checks the clock page of a small guest");
    let checks = checks::run(&kvm)?;
    checks.show(found, series);
    events.step(0, "checks for signs of a mixed kernel");
    mixed::look(&kvm)?.show(found, series);
    events.step(0, format!("samples KVM's clock for {watch_s} s"));
    let guests = Guests::new(&kvm)?;
    let stable = guests.master.clock()?.flags & KVM_CLOCK_TSC_STABLE != 0;
    series.notes.push(format!(
        "the host's clock source is {}; KVM's master clock is {}",
        clock_source(),
        if stable { "on" } else { "off" }
    ));
    let rounds = Duration::from_secs(watch_s).as_millis() / INTERVAL.as_millis();
    let mut samples = vec![Sample::take(&guests)?];
    for _ in 0..rounds {
        thread::sleep(INTERVAL);
        samples.push(Sample::take(&guests)?);
    }
    show(&samples, found, series);
    checks.verdict()
}

fn clock_source() -> String {
    let path = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
    std::fs::read_to_string(path)
        .map_or_else(|_| "unknown".to_owned(), |name| name.trim().to_owned())
}

/// Values that a kernel that mixes raw and slewed clocks would show on this host now.
fn mixed_kernel(found: &mut Found, series: &mut Series) {
    let drift = Ahead::of_monotonic();
    found.drift = Some(drift.ns as f64);
    series.notes.push(error_now(drift, HostClock::Raw.now_ns()));
}

/// Describes the error of a mixed kernel now.
fn error_now(drift: Ahead, host_age_ns: i64) -> String {
    let drift_s = seconds(drift.ns);
    format!(
        "{} is {} ahead of raw on this host, which is {:.0} s old: a mixed kernel would now give a \
         guest that is one second old {:.3} s{}, jump by {drift_s:+.3} s when the master clock \
         goes off, and be {:+.3} s off with the wall clock",
        HostClock::Monotonic.name(),
        drift.shown(),
        seconds(host_age_ns),
        1.0 - drift_s,
        if drift.ns > NS_PER_SECOND as i64 { ", which is negative" } else { "" },
        -drift_s,
    )
}

/// Describes the slew now, and the age of the host at which a guest that is one second old gets a
/// negative time from a mixed kernel.
fn forecast(drift: Ahead, slewed: Ahead, elapsed_ns: i64, host_age_ns: i64) -> String {
    let slew = slewed.ns as f64 / elapsed_ns.max(1) as f64;
    let mut text = format!(
        "{} gained {} on raw in {:.1} s: {:+.3} ppm now",
        HostClock::Monotonic.name(),
        slewed.shown(),
        seconds(elapsed_ns),
        slew * 1e6,
    );
    // Writing to a String cannot fail, here and below.
    let _ = if slewed.ns.abs() <= slewed.uncertainty_ns {
        write!(text, ", which is not measurable: the error stays constant")
    } else if drift.ns > NS_PER_SECOND as i64 {
        write!(text, "; the guest's time is negative already")
    } else if slew < 0.0 {
        write!(text, "; at this rate the guest's time never becomes negative")
    } else {
        let days = (seconds(host_age_ns) + (1.0 - seconds(drift.ns)) / slew) / 86_400.0;
        write!(
            text,
            "; at this rate the guest's time is negative on this host from an age of {days:.1} \
             days on"
        )
    };
    text
}

fn seconds(ns: i64) -> f64 {
    ns as f64 / NS_PER_SECOND
}

fn show(samples: &[Sample], found: &mut Found, series: &mut Series) {
    /// With the master clock or without: a clock and the gain on it.
    type Row<'a> = (&'static str, &'a (HostClock, Ahead));
    let (Some(first), Some(last)) = (samples.first(), samples.last()) else { return };
    let elapsed_ns = last.raw_ns - first.raw_ns;
    let gained = |of: fn(&Sample) -> [Ahead; 3]| -> Vec<(HostClock, Ahead)> {
        let pairs = of(last).into_iter().zip(of(first)).map(|(last, first)| last.since(first));
        HostClock::ALL.into_iter().zip(pairs).collect()
    };
    let plain = gained(|sample| sample.plain);
    let master = gained(|sample| sample.master);
    for (metric, (_, deviation)) in found.deviations.iter_mut().zip(&plain) {
        *metric = Some(deviation.ns.unsigned_abs() as f64);
    }
    series.notes.push(judged(&plain, elapsed_ns));
    let slewed = last.drift.since(first.drift);
    series.notes.push(forecast(last.drift, slewed, elapsed_ns, last.raw_ns));
    let rows = plain.iter().map(|pair| ("off", pair)).chain(master.iter().map(|pair| ("on", pair)));
    let ppb = |ahead: Ahead| ahead.ns * NS_PER_SECOND as i64 / elapsed_ns.max(1);
    series.tables.push(DataTable::of(
        format!("what KVM's clock gained in {:.1} s", seconds(elapsed_ns)),
        &rows.collect::<Vec<Row<'_>>>(),
        &[
            ("master clock", &|(kind, _)| (*kind).into()),
            ("on", &|(_, (clock, _))| clock.name().into()),
            ("ns", &|(_, (_, ahead))| ahead.ns.into()),
            ("known to within, ns", &|(_, (_, ahead))| ahead.uncertainty_ns.into()),
            ("ppb", &|(_, (_, ahead))| ppb(*ahead).into()),
        ],
    ));
    let curve = |name: String, of: &dyn Fn(&Sample) -> Ahead| Curve {
        name,
        points: samples
            .iter()
            .map(|sample| {
                let x = seconds(sample.raw_ns - first.raw_ns);
                (x, of(sample).since(of(first)).ns as f64 / 1e3)
            })
            .collect(),
    };
    let mut curves: Vec<Curve> = HostClock::ALL
        .into_iter()
        .enumerate()
        .map(|(index, clock)| curve(format!("on {}", clock.name()), &|sample| sample.plain[index]))
        .collect();
    curves.push(curve(format!("on {}, master clock", HostClock::Raw.name()), &|sample| {
        sample.master[0]
    }));
    series.drawings.push(Drawing {
        title: "what KVM's clock gains on the host's clocks".to_owned(),
        x: "s".to_owned(),
        y: "us".to_owned(),
        curves,
    });
}

/// The clocks that KVM's clock advances with: the one with the least deviation, and those that
/// cannot be distinguished from it.
fn judged(deviations: &[(HostClock, Ahead)], elapsed_ns: i64) -> String {
    let Some((_, least)) = deviations.iter().min_by_key(|(_, deviation)| deviation.ns.abs()) else {
        return "nothing was measured".to_owned();
    };
    let (near, far): (Vec<_>, Vec<_>) = deviations.iter().partition(|(_, deviation)| {
        deviation.ns.abs() - least.ns.abs() <= deviation.uncertainty_ns + least.uncertainty_ns
    });
    let list = |clocks: &[&(HostClock, Ahead)], and: &str| {
        clocks
            .iter()
            .map(|(clock, deviation)| format!("{}: {}", clock.name(), deviation.shown()))
            .collect::<Vec<_>>()
            .join(and)
    };
    let mut text = format!(
        "over {:.1} s KVM's clock advances with {}",
        seconds(elapsed_ns),
        list(&near, ", or with ")
    );
    if far.is_empty() {
        text.push_str("; the rates of the host's clocks are too similar now to distinguish them");
    } else {
        let _ = write!(text, "; not with {}", list(&far, ", nor with "));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ahead(ns: i64, uncertainty_ns: i64) -> Ahead {
        Ahead { ns, uncertainty_ns }
    }

    #[test]
    fn the_clock_with_the_least_deviation_is_named_and_others_excluded() {
        let text = judged(
            &[
                (HostClock::Raw, ahead(-120, 300)),
                (HostClock::Monotonic, ahead(-17_000, 300)),
                (HostClock::Boottime, ahead(-17_050, 300)),
            ],
            10_000_000_000,
        );
        assert!(
            text.starts_with("over 10.0 s KVM's clock advances with CLOCK_MONOTONIC_RAW: -120 ns"),
            "{text}"
        );
        assert!(text.contains("; not with CLOCK_MONOTONIC: -17000 ns"), "{text}");
        assert!(text.contains("nor with CLOCK_BOOTTIME"), "{text}");
    }

    #[test]
    fn clocks_with_similar_rates_are_not_distinguished() {
        let same = HostClock::ALL.map(|clock| (clock, ahead(100, 300)));
        assert!(judged(&same, 1).ends_with("too similar now to distinguish them"));
    }

    #[test]
    fn the_error_is_the_drift() {
        let young = error_now(ahead(86_400_000, 100), 86_400 * NS_PER_SECOND as i64);
        assert!(young.contains("one second old 0.914 s, jump by +0.086 s"), "{young}");
        let old = error_now(ahead(1_209_600_000, 100), 14 * 86_400 * NS_PER_SECOND as i64);
        assert!(old.contains("old -0.210 s, which is negative, jump by +1.210 s"), "{old}");
        assert!(old.ends_with("-1.210 s off with the wall clock"), "{old}");
    }

    #[test]
    fn the_forecast_follows_the_current_slew() {
        let (day_ns, second_ns) = (86_400 * NS_PER_SECOND as i64, NS_PER_SECOND as i64);
        let says = |drift_ns, slewed_ns| {
            forecast(ahead(drift_ns, 50), ahead(slewed_ns, 100), 10 * second_ns, day_ns)
        };
        // 1 ppm since boot and now: a second after 11.6 days.
        assert!(says(86_400_000, 10_000).ends_with("from an age of 11.6 days on"));
        // The drift may exist since boot and not grow.
        assert!(says(248_000_000, 40).ends_with("the error stays constant"));
        assert!(says(86_400_000, -10_000).ends_with("never becomes negative"));
        assert!(says(1_500_000_000, 10_000).ends_with("negative already"));
    }

    #[test]
    fn the_drift_of_this_machine_can_be_read() {
        let mut series = Series::new("kvm", String::new());
        let mut found = Found::default();
        mixed_kernel(&mut found, &mut series);
        assert!(found.drift.is_some() && series.notes.len() == 1);
    }
}

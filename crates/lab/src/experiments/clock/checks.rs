//! Checks of KVM's clock on a real `/dev/kvm`, those of Linux's selftest `kvm_clock_test`, and of
//! the notice that a guest was stopped.
//!
//! They need a KVM that gives each vCPU a clock page; its speed does not matter.

use std::time::{SystemTime, UNIX_EPOCH};

use ebb_kvm_clock::Kilohertz;
use ebb_kvm_clock::page::TimeFlags;
use ebb_kvm_clock::protocol::Stability;
use kvm_bindings::{KVM_CLOCK_REALTIME, kvm_clock_data};
use kvm_ioctls::{Cap, Kvm};

use super::kvm::{ClockGuest, MasterClock, clock_flags};
use super::metrics::Found;
use crate::LabError;
use crate::report::figures::DataTable;
use crate::report::results::Series;

/// Number of readings of a check that compares the page with KVM's clock.
const READINGS: u32 = 50;
/// Number of times that a clock is read and set again.
const CONTINUATIONS: u32 = 20;
const SECOND_NS: i64 = 1_000_000_000;
/// Base of the clock and offset of the real time given with it, in seconds; `None` without one.
const SETTINGS_S: [(i64, Option<i64>); 5] =
    [(0, None), (180, None), (0, Some(0)), (0, Some(-180)), (0, Some(180))];
/// TSC frequencies to be tried.
const TSC_KHZ: [u32; 5] = [1_000_000, 2_000_000, 3_000_000, 4_000_000, 5_000_000];

/// Outcome of a check.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Outcome {
    /// Passed, with the observation.
    Passed(String),
    /// Failed, with the observation.
    Failed(String),
    /// Not possible here, with the reason.
    Skipped(String),
}

/// A check with its outcome.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Check {
    name: String,
    outcome: Outcome,
}

/// All checks.
#[derive(Debug, Default)]
pub(super) struct Checks {
    all: Vec<Check>,
    /// The smallest time that a fresh guest has read.
    smallest_ns: Option<u64>,
}

/// Runs all checks on `kvm`.
///
/// # Errors
/// [`LabError::Kvm`] and [`LabError::TestGuest`] when a guest cannot be run at all. A failed check
/// is not an error here.
pub(super) fn run(kvm: &Kvm) -> Result<Checks, LabError> {
    let mut checks = Checks::default();
    let mut guest = ClockGuest::new(kvm, None)?;
    let between = between_two_clocks(&mut guest, &mut checks.smallest_ns)?;
    checks.add("the page is between two KVM_GET_CLOCKs".to_owned(), between);
    for (base_s, realtime_s) in SETTINGS_S {
        let name = match realtime_s {
            None => format!("KVM_SET_CLOCK to {base_s} s"),
            Some(offset_s) => format!("KVM_SET_CLOCK to {base_s} s, real time {offset_s:+} s"),
        };
        let can = clock_flags(kvm) & KVM_CLOCK_REALTIME != 0;
        let outcome = if realtime_s.is_some() && !can {
            Outcome::Skipped("this kernel has no KVM_CLOCK_REALTIME (Linux 5.16 has)".to_owned())
        } else {
            set_clock(&mut guest, base_s, realtime_s)?
        };
        checks.add(name, outcome);
    }
    guest.set_master_clock(MasterClock::Refused)?;
    let without = between_two_clocks(&mut guest, &mut None)?;
    checks.add("the page is between two KVM_GET_CLOCKs without master clock".to_owned(), without);
    guest.set_master_clock(MasterClock::Allowed)?;
    checks.add("a clock read and set again continues".to_owned(), continuation(&mut guest)?);
    checks.add("a stop notice stays until it is taken".to_owned(), stop_notice(&mut guest)?);
    for khz in TSC_KHZ {
        let name = format!("the page is between two KVM_GET_CLOCKs at {} GHz", khz / 1_000_000);
        checks.add(name, other_frequency(kvm, khz)?);
    }
    Ok(checks)
}

impl Checks {
    fn add(&mut self, name: String, outcome: Outcome) {
        self.all.push(Check { name, outcome });
    }

    /// Names of the failed checks.
    fn failed(&self) -> Vec<&str> {
        let failed = self.all.iter().filter(|check| matches!(check.outcome, Outcome::Failed(_)));
        failed.map(|check| check.name.as_str()).collect()
    }

    /// An error with the names of the failed checks, if any.
    pub(super) fn verdict(&self) -> Result<(), LabError> {
        let failed = self.failed();
        if failed.is_empty() { Ok(()) } else { Err(LabError::ChecksFailed(failed.join("; "))) }
    }

    /// Adds them to the document.
    pub(super) fn show(&self, found: &mut Found, series: &mut Series) {
        found.failed_checks = Some(self.failed().len() as f64);
        found.min_system_time = self.smallest_ns.map(|ns| ns.cast_signed() as f64);
        let outcome = |check: &Check| match &check.outcome {
            Outcome::Passed(seen) => ("passed", seen.clone()),
            Outcome::Failed(seen) => ("FAILED", seen.clone()),
            Outcome::Skipped(why) => ("skipped", why.clone()),
        };
        series.tables.push(DataTable::of(
            "checks of KVM's clock",
            &self.all,
            &[
                ("check", &|check| check.name.as_str().into()),
                ("outcome", &|check| outcome(check).0.into()),
                ("seen", &|check| outcome(check).1.into()),
            ],
        ));
    }
}

/// Reads the guest's time between two `KVM_GET_CLOCK`s; returns all three values.
fn bracketed(guest: &mut ClockGuest) -> Result<(u64, u64, u64), LabError> {
    let before_ns = guest.clock()?.clock;
    let tsc = guest.run()?;
    let time_ns = guest.reading(tsc)?.time_ns;
    Ok((before_ns, time_ns, guest.clock()?.clock))
}

fn between_two_clocks(
    guest: &mut ClockGuest,
    smallest_ns: &mut Option<u64>,
) -> Result<Outcome, LabError> {
    let (mut latest_ns, mut widest_ns) = (0, 0);
    for _ in 0..READINGS {
        let (before_ns, time_ns, after_ns) = bracketed(guest)?;
        *smallest_ns = Some(smallest_ns.map_or(time_ns, |least: u64| least.min(time_ns)));
        if !(before_ns..=after_ns).contains(&time_ns) {
            return Ok(Outcome::Failed(format!(
                "{time_ns} ns, between {before_ns} and {after_ns}"
            )));
        }
        if time_ns < latest_ns {
            return Ok(Outcome::Failed(format!("{time_ns} ns after {latest_ns} ns: backwards")));
        }
        latest_ns = time_ns;
        widest_ns = widest_ns.max(after_ns - before_ns);
    }
    let stability = match guest.reading(0)?.stability {
        Stability::Stable => "TSC_STABLE",
        Stability::Unstable => "not TSC_STABLE",
    };
    Ok(Outcome::Passed(format!(
        "{READINGS} readings, {stability}; brackets up to {} us",
        widest_ns / 1000
    )))
}

fn realtime_ns() -> i64 {
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since_1970.as_nanos()).unwrap_or(i64::MAX)
}

fn set_clock(
    guest: &mut ClockGuest,
    base_s: i64,
    realtime_s: Option<i64>,
) -> Result<Outcome, LabError> {
    let begin_ns = realtime_ns();
    let given_ns = begin_ns + realtime_s.unwrap_or(0) * SECOND_NS;
    let mut wanted =
        kvm_clock_data { clock: (base_s * SECOND_NS).cast_unsigned(), ..kvm_clock_data::default() };
    if realtime_s.is_some() {
        wanted.flags = KVM_CLOCK_REALTIME;
        wanted.realtime = given_ns.cast_unsigned();
    }
    let call_ns = realtime_ns();
    guest.set_clock(&wanted)?;
    let call_ns = realtime_ns() - call_ns;
    let (before_ns, time_ns, after_ns) = bracketed(guest)?;
    let end_ns = realtime_ns();
    // The kernel adds the real time since the given one, or nothing if that is in the future.
    let added_ns = if realtime_s.is_some() { (begin_ns - given_ns).max(0) } else { 0 };
    let lowest_ns = base_s * SECOND_NS + added_ns;
    // Real time is slewed, by 1 in 1000 at most, and KVM's clock is not. KVM also takes the start
    // instant of its clock a little before it reads the real time (kvm_vm_ioctl_set_clock): the
    // clock is ahead by up to the time of the call.
    let elapsed_ns = end_ns - begin_ns;
    let highest_ns = lowest_ns + elapsed_ns + elapsed_ns / 1000 + call_ns + 1000;
    let expected = lowest_ns.cast_unsigned()..=highest_ns.cast_unsigned();
    if !(before_ns..=after_ns).contains(&time_ns) {
        return Ok(Outcome::Failed(format!("{time_ns} ns, between {before_ns} and {after_ns}")));
    }
    if !expected.contains(&before_ns) || !expected.contains(&after_ns) {
        return Ok(Outcome::Failed(format!(
            "{before_ns} to {after_ns} ns, expected {lowest_ns} to {highest_ns}; real time may \
             have been set meanwhile"
        )));
    }
    Ok(Outcome::Passed(format!("{:.6} s", time_ns as f64 / SECOND_NS as f64)))
}

/// The steps of a monitor over a pause: the guest must not see time go back.
fn continuation(guest: &mut ClockGuest) -> Result<Outcome, LabError> {
    let mut largest_ns = 0;
    for _ in 0..CONTINUATIONS {
        let tsc = guest.run()?;
        let before_ns = guest.reading(tsc)?.time_ns;
        let saved = kvm_clock_data { clock: guest.clock()?.clock, ..kvm_clock_data::default() };
        guest.set_clock(&saved)?;
        let tsc = guest.run()?;
        let after_ns = guest.reading(tsc)?.time_ns;
        if after_ns < before_ns {
            return Ok(Outcome::Failed(format!("{after_ns} ns after {before_ns} ns: backwards")));
        }
        largest_ns = largest_ns.max(after_ns - before_ns);
    }
    Ok(Outcome::Passed(format!("{CONTINUATIONS} times; steps up to {} us", largest_ns / 1000)))
}

fn stop_notice(guest: &mut ClockGuest) -> Result<Outcome, LabError> {
    let failed = |what: &str| Ok(Outcome::Failed(what.to_owned()));
    guest.run()?;
    if guest.take_stop_notice()? {
        return failed("there was a notice before it was given");
    }
    guest.give_stop_notice()?;
    for _ in 0..2 {
        // Each makes KVM write the page.
        let clock = kvm_clock_data { clock: guest.clock()?.clock, ..kvm_clock_data::default() };
        guest.set_clock(&clock)?;
        guest.run()?;
        if !guest.info()?.flags.contains(TimeFlags::GUEST_STOPPED) {
            return failed("it was given but is not in the page");
        }
    }
    if !guest.take_stop_notice()? {
        return failed("it could not be taken");
    }
    let clock = kvm_clock_data { clock: guest.clock()?.clock, ..kvm_clock_data::default() };
    guest.set_clock(&clock)?;
    guest.run()?;
    if guest.info()?.flags.contains(TimeFlags::GUEST_STOPPED) {
        return failed("it reappeared after it was taken");
    }
    Ok(Outcome::Passed("given, kept over two writes of the page, taken, gone".to_owned()))
}

fn other_frequency(kvm: &Kvm, khz: u32) -> Result<Outcome, LabError> {
    let scales = kvm.check_extension(Cap::TscControl);
    let mut guest = match ClockGuest::new(kvm, Some(khz)) {
        Ok(guest) => guest,
        Err(LabError::Kvm { cause, .. }) if !scales => {
            return Ok(Outcome::Skipped(format!("this KVM has no TSC scaling ({cause})")));
        }
        Err(error) => return Err(error),
    };
    let outcome = between_two_clocks(&mut guest, &mut None)?;
    let Outcome::Passed(seen) = outcome else { return Ok(outcome) };
    let in_page = guest.info()?.scale().kilohertz().map_or(0, Kilohertz::get);
    if !scales {
        // Without scaling KVM takes frequencies above the host's, and moves the TSC on at each
        // entry instead.
        return Ok(Outcome::Passed(format!(
            "{seen}; without TSC scaling, factor of {in_page} kHz"
        )));
    }
    // KVM cuts the scaled frequency to kilohertz.
    if in_page.abs_diff(guest.tsc_khz()?) > 1 {
        return Ok(Outcome::Failed(format!("the page's factor is that of {in_page} kHz")));
    }
    Ok(Outcome::Passed(seen))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_checks_are_counted_and_skipped_ones_are_not() {
        let mut checks = Checks { smallest_ns: Some(17), ..Checks::default() };
        checks.add("a".to_owned(), Outcome::Passed("well".to_owned()));
        checks.add("b".to_owned(), Outcome::Failed("badly".to_owned()));
        checks.add("c".to_owned(), Outcome::Skipped("no scaling".to_owned()));
        let mut series = Series::new("kvm", String::new());
        assert!(checks.verdict().is_err_and(|error| error.to_string().ends_with("failed: b")));
        let mut found = Found::default();
        checks.show(&mut found, &mut series);
        assert_eq!((found.failed_checks, found.min_system_time), (Some(1.0), Some(17.0)));
        let outcomes: Vec<String> =
            series.tables[0].rows.iter().map(|row| row[1].shown()).collect();
        assert_eq!(outcomes, ["passed", "FAILED", "skipped"]);
    }

    /// The checks themselves on a host with KVM, where none fails.
    #[test]
    fn this_machines_kvm_passes() {
        let Ok(kvm) = Kvm::new() else {
            eprintln!("skipped: /dev/kvm cannot be opened");
            return;
        };
        let checks = run(&kvm).unwrap();
        assert!(checks.verdict().is_ok(), "{:?}", checks.all);
        assert!(checks.smallest_ns.unwrap() < 1 << 62, "negative: {:?}", checks.smallest_ns);
    }
}

//! Readings of the guest's clocks.

use std::fs;
use std::sync::atomic::{Ordering, compiler_fence};

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use crate::kernel_log;

/// Directory of Linux's clock source attributes.
const CLOCKSOURCE: &str = "/sys/devices/system/clocksource/clocksource0";
/// Number of readings over which the cost of one is averaged.
const COST_READINGS: u32 = 64;
/// Linux's log messages with the frequency of the time stamp counter (arch/x86/kernel/tsc.c); later
/// ones are more exact.
const FREQUENCY_WORDS: [&str; 2] = ["tsc: Detected ", "tsc: Refined TSC clocksource calibration: "];

/// All clocks, read in turn.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClockReading {
    /// CLOCK_MONOTONIC in ns.
    pub monotonic_ns: u64,
    /// CLOCK_MONOTONIC_RAW in ns.
    pub monotonic_raw_ns: u64,
    /// CLOCK_BOOTTIME in ns.
    pub boottime_ns: u64,
    /// CLOCK_REALTIME in ns since 1970.
    pub realtime_ns: u64,
    /// Time stamp counter before the other clocks were read.
    pub tsc: u64,
    /// Time stamp counter after the other clocks were read.
    pub tsc_after: u64,
    /// First number of `/proc/uptime`, in ms.
    pub uptime_ms: u64,
    /// The current clock source, for example `kvm-clock`.
    pub clocksource: String,
    /// The available clock sources.
    pub available_clocksources: Vec<String>,
    /// Frequency of the time stamp counter in kHz from the kernel's log; `None` if the log lacks it
    /// or cannot be read.
    pub tsc_khz: Option<u64>,
    /// Time of one reading of CLOCK_MONOTONIC through the vDSO, in ns. Close to `system_call_ns` if
    /// the vDSO falls back to the system call because user space cannot read the clock source.
    pub read_ns: u64,
    /// Time of one reading of CLOCK_MONOTONIC through a system call, in ns.
    pub system_call_ns: u64,
}

impl ClockReading {
    /// Reads all clocks now.
    pub fn take() -> Self {
        let tsc = tsc();
        let monotonic_ns = read(ClockId::Monotonic);
        let monotonic_raw_ns = read(ClockId::MonotonicRaw);
        let boottime_ns = read(ClockId::Boottime);
        let realtime_ns = read(ClockId::Realtime);
        let tsc_after = self::tsc();
        let source =
            |name: &str| fs::read_to_string(format!("{CLOCKSOURCE}/{name}")).unwrap_or_default();
        Self {
            monotonic_ns,
            monotonic_raw_ns,
            boottime_ns,
            realtime_ns,
            tsc,
            tsc_after,
            uptime_ms: uptime_ms(&fs::read_to_string("/proc/uptime").unwrap_or_default()),
            clocksource: source("current_clocksource").trim().to_owned(),
            available_clocksources: source("available_clocksource")
                .split_ascii_whitespace()
                .map(str::to_owned)
                .collect(),
            tsc_khz: kernel_log::read().ok().and_then(|text| tsc_khz(&text)),
            read_ns: cost_ns(|| read(ClockId::Monotonic)),
            system_call_ns: cost_ns(monotonic_by_system_call),
        }
    }
}

/// Reads a clock in ns, through the vDSO if possible.
pub fn read(clock: ClockId) -> u64 {
    let now = clock_gettime(clock);
    (now.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec as u64)
}

/// Reads the time stamp counter after all earlier loads and before all later ones.
#[cfg(target_arch = "x86_64")]
pub fn tsc() -> u64 {
    use std::arch::x86_64::{_mm_lfence, _rdtsc};
    compiler_fence(Ordering::SeqCst);
    // SAFETY: LFENCE is part of SSE2, which every x86-64 processor has.
    unsafe { _mm_lfence() };
    // SAFETY: Linux allows RDTSC in user mode, unless a program disables it (prctl PR_SET_TSC),
    // which this one does not.
    let now = unsafe { _rdtsc() };
    // SAFETY: as above.
    unsafe { _mm_lfence() };
    compiler_fence(Ordering::SeqCst);
    now
}

fn monotonic_by_system_call() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: clock_gettime(2) writes one timespec to `now`, which lives until the call returns.
    unsafe { libc::syscall(libc::SYS_clock_gettime, libc::CLOCK_MONOTONIC, &raw mut now) };
    (now.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec as u64)
}

fn cost_ns(mut reading: impl FnMut() -> u64) -> u64 {
    let start = reading();
    let last = (0..COST_READINGS).fold(start, |_, _| reading());
    last.saturating_sub(start) / u64::from(COST_READINGS)
}

/// First number of `/proc/uptime` (seconds with two decimals) in ms; 0 for anything else.
fn uptime_ms(text: &str) -> u64 {
    let seconds: f64 =
        text.split_ascii_whitespace().next().and_then(|word| word.parse().ok()).unwrap_or_default();
    (seconds * 1000.0).round() as u64
}

/// The last frequency in the log, for example `2445.404 MHz`.
fn tsc_khz(log: &str) -> Option<u64> {
    let megahertz = |line: &str| {
        let rest = FREQUENCY_WORDS
            .iter()
            .find_map(|words| line.split_once(words).map(|(_, rest)| rest))?;
        rest.split_once(" MHz")?.0.parse::<f64>().ok()
    };
    log.lines().rev().find_map(megahertz).map(|megahertz| (megahertz * 1000.0).round() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_clocks_advance() {
        let (first, second) = (ClockReading::take(), ClockReading::take());
        for (before, after) in [
            (first.monotonic_ns, second.monotonic_ns),
            (first.monotonic_raw_ns, second.monotonic_raw_ns),
            (first.boottime_ns, second.boottime_ns),
            (first.tsc, first.tsc_after),
            (first.tsc_after, second.tsc),
        ] {
            assert!(0 < before && before < after, "{first:?} {second:?}");
        }
        // Boot time includes suspended time, so that it is never behind.
        assert!(first.boottime_ns >= first.monotonic_ns);
        assert!(first.available_clocksources.contains(&first.clocksource), "{first:?}");
        assert!(first.system_call_ns > 0);
    }

    #[test]
    fn uptime_is_in_milliseconds() {
        assert_eq!(uptime_ms("12.34 20.00\n"), 12_340);
        assert_eq!(uptime_ms(""), 0);
        assert_eq!(uptime_ms("x y"), 0);
    }

    #[test]
    fn the_last_frequency_counts() {
        let log = "<6>[    0.000000] tsc: Fast TSC calibration using PIT\n\
                   <6>[    0.000000] tsc: Detected 2445.403 MHz processor\n\
                   <6>[    0.000000] tsc: Detected 2445.404 MHz TSC\n";
        assert_eq!(tsc_khz(log), Some(2_445_404));
        let refined =
            format!("{log}<6>[    1.5] tsc: Refined TSC clocksource calibration: 2445.5 MHz\n");
        assert_eq!(tsc_khz(&refined), Some(2_445_500));
        assert_eq!(tsc_khz("tsc: Detected no MHz"), None);
        assert_eq!(tsc_khz(""), None);
    }
}

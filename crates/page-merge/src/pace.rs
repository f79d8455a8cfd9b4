//! Length of the sleep between two steps, and between two passes.

use std::time::Duration;

use crate::settings::Settings;
use crate::statistics::Statistics;

/// Cost of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Effort {
    /// Pages scanned.
    pub pages: u64,
    /// Of these, pages that may have been written to.
    pub written: u64,
    /// Processor time.
    pub cpu: Duration,
    /// Elapsed time.
    pub elapsed: Duration,
}

/// Maximum number of pages between two sleeps, so that the limits of processor time hold for a
/// memory of any size.
const MOST_AT_A_TIME: u64 = 1 << 15;

impl Settings {
    /// Pages to scan per second, in a memory of `pages` pages, if configured.
    fn rate(&self, pages: u64) -> Option<u64> {
        let for_target = self.target_scan_seconds.map(|seconds| pages.div_ceil(seconds.max(1)));
        [self.pages_per_second, for_target].into_iter().flatten().min()
    }

    /// Number of pages to scan between two sleeps, in a memory of `pages` pages.
    pub fn pages_at_a_time(&self, pages: u64) -> u64 {
        let at_rate = |rate: u64| rate.saturating_mul(self.sleep_millisecs.max(1)) / 1000;
        self.rate(pages).map_or(self.pages_to_scan, at_rate).clamp(1, MOST_AT_A_TIME)
    }

    /// The sleep after a step, in a memory of `pages` pages: at least the configured one, and long
    /// enough to stay below `max_written_per_second` and `max_cpu_percent`.
    pub fn sleep_after(&self, effort: Effort, pages: u64) -> Duration {
        let percent = self.max_cpu_percent.clamp(1, 100);
        let rate = self.rate(pages);
        let least = [
            rate.map_or(Duration::ZERO, |rate| time_for(effort.pages, rate)),
            time_for(effort.written, self.max_written_per_second),
            effort.cpu.saturating_mul(100) / percent,
        ];
        let least = least.into_iter().max().unwrap_or_default().saturating_sub(effort.elapsed);
        match rate {
            Some(_) => least,
            None => least.max(Duration::from_millis(self.sleep_millisecs)),
        }
    }
}

/// Calm passes at the ordinary intervals: in these, huge pages that were found at last are read
/// twice.
const CALM_AT_FIRST: u32 = 8;
/// How often the interval doubles after these at most.
const MOST_DOUBLINGS: u32 = 4;
/// A pass with this number of changes is calm, however small the memory is: guests are never
/// completely idle.
const FEW_CHANGES: u64 = 256;

/// How long a memory has hardly changed. While it does not, a pass finds little to do, and costs
/// nearly as much as another one: the intervals grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Calm {
    /// Pages found written to until the end of the last pass.
    written: u64,
    /// Pages found until then, each time that they were there.
    found: u64,
    /// Pages found by the last pass.
    present: u64,
    /// Pages that were merged at its end.
    merged: u64,
    /// Calm passes since the last one that was not.
    passes: u32,
    /// Intervals to let pass before the next pass.
    left: u32,
}

impl Calm {
    /// Notes the end of a pass. It was calm if no more than a 32nd of the memory was merged or
    /// unmerged, was written to, appeared or disappeared.
    pub fn note_pass(&mut self, now: &Statistics) {
        let (written, merged) = (now.written_pages, now.merged_pages);
        let found = now.clean_pages + written + now.untracked_pages;
        let present = found - self.found;
        let changes =
            written - self.written + merged.abs_diff(self.merged) + present.abs_diff(self.present);
        let is_calm = changes <= FEW_CHANGES.max(present / 32);
        self.passes = if is_calm { self.passes.saturating_add(1) } else { 0 };
        (self.written, self.found, self.present, self.merged) = (written, found, present, merged);
        self.left = (1 << self.passes.saturating_sub(CALM_AT_FIRST).min(MOST_DOUBLINGS)) - 1;
    }

    /// Whether one more interval passes before the next pass.
    pub fn waits(&mut self) -> bool {
        let waits = self.left > 0;
        self.left = self.left.saturating_sub(1);
        waits
    }

    /// Ends it.
    pub fn end(&mut self) {
        (self.passes, self.left) = (0, 0);
    }
}

/// Time for `count` items at `per_second`.
fn time_for(count: u64, per_second: u64) -> Duration {
    let nanos = u128::from(count) * 1_000_000_000 / u128::from(per_second.max(1));
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn each_limit_makes_the_sleep_longer() {
        let settings =
            Settings { sleep_millisecs: 20, max_cpu_percent: 100, ..Settings::default() };
        let effort = Effort { pages: 5000, written: 100, cpu: 10 * MS, elapsed: 10 * MS };
        assert_eq!(settings.sleep_after(effort, 1 << 20), 20 * MS);
        let half = Settings { max_cpu_percent: 25, ..settings.clone() };
        assert_eq!(half.sleep_after(effort, 1 << 20), 30 * MS);
        let slow = Settings { pages_per_second: Some(50_000), ..settings.clone() };
        assert_eq!(slow.sleep_after(effort, 1 << 20), 90 * MS);
        let busy = Settings { max_written_per_second: 1000, ..settings.clone() };
        assert_eq!(busy.sleep_after(effort, 1 << 20), 90 * MS);
        let both = Settings { pages_per_second: Some(50_000), max_cpu_percent: 10, ..settings };
        assert_eq!(both.sleep_after(effort, 1 << 20), 90 * MS);
    }

    /// The number of intervals until the next pass.
    fn interval(calm: &mut Calm, statistics: &Statistics) -> u32 {
        calm.note_pass(statistics);
        1 + std::iter::repeat_with(|| calm.waits()).take_while(|waits| *waits).count() as u32
    }

    #[test]
    fn intervals_grow_while_memory_does_not_change() {
        let mut calm = Calm::default();
        let mut statistics = Statistics::default();
        let mut pass = |written: u64, clean: u64, calm: &mut Calm| {
            statistics.written_pages += written;
            statistics.clean_pages += clean;
            interval(calm, &statistics)
        };
        // The first pass finds everything anew. Then a hundredth is written to.
        let of_idle: Vec<u32> = (0..16).map(|_| pass(1_000, 99_000, &mut calm)).collect();
        assert_eq!(of_idle, [1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 4, 8, 16, 16, 16, 16]);
        // Much is written, and much more is there: either ends it.
        assert_eq!(pass(50_000, 50_000, &mut calm), 1);
        assert!((0..8).all(|_| pass(1_000, 99_000, &mut calm) == 1));
        assert_eq!(pass(1_000, 99_000, &mut calm), 2);
        assert_eq!(pass(1_000, 149_000, &mut calm), 1);
        assert!((0..8).all(|_| pass(1_000, 149_000, &mut calm) == 1));
        assert_eq!(pass(1_000, 149_000, &mut calm), 2);
        calm.end();
        assert!(!calm.waits());
        assert_eq!(pass(1_000, 149_000, &mut calm), 1);
    }

    #[test]
    fn a_small_memory_is_calm_with_few_changes() {
        let mut calm = Calm::default();
        let mut statistics = Statistics::default();
        for _ in 0..20 {
            (statistics.written_pages, statistics.merged_pages) =
                (statistics.written_pages + 200, statistics.merged_pages + 56);
            statistics.clean_pages += 300;
            calm.note_pass(&statistics);
        }
        assert!(calm.waits());
        // Pages that are merged no longer count, too.
        for merged_pages in [statistics.merged_pages + 257, 0] {
            statistics.merged_pages = merged_pages;
            calm.note_pass(&statistics);
            assert!(!calm.waits());
        }
    }

    #[test]
    fn a_pass_takes_as_long_as_it_should() {
        let settings =
            Settings { target_scan_seconds: Some(60), max_cpu_percent: 100, ..Settings::default() };
        for pages in [1 << 12, 1 << 20, 1 << 26] {
            let at_a_time = settings.pages_at_a_time(pages);
            let elapsed = Duration::from_nanos(at_a_time);
            let effort = Effort { pages: at_a_time, written: 0, cpu: elapsed, elapsed };
            let turn = elapsed + settings.sleep_after(effort, pages);
            let pass = turn.as_secs_f64() * pages as f64 / at_a_time as f64;
            assert!((59.0..=61.0).contains(&pass), "{pages} pages take {pass} s");
        }
        // The upper limit takes precedence.
        let slower = Settings { pages_per_second: Some(1000), ..settings };
        assert_eq!(slower.pages_at_a_time(1 << 26), 20);
    }

    #[test]
    fn processor_share_and_rate_hold_over_many_steps() {
        let settings = Settings {
            sleep_millisecs: 0,
            max_cpu_percent: 20,
            pages_per_second: Some(1_000_000),
            ..Settings::default()
        };
        let (mut cpu, mut now, mut pages) = (Duration::ZERO, Duration::ZERO, 0);
        for step in 0..1000 {
            let effort = Effort {
                pages: 1000 + step,
                written: 0,
                cpu: Duration::from_micros(200 + step),
                elapsed: Duration::from_micros(250 + step),
            };
            (cpu, pages) = (cpu + effort.cpu, pages + effort.pages);
            now += effort.elapsed + settings.sleep_after(effort, 1 << 20);
        }
        assert!(cpu.as_secs_f64() / now.as_secs_f64() <= 0.2001);
        assert!(pages as f64 / now.as_secs_f64() <= 1_000_100.0);
    }
}

//! Tracking the return of a guest's memory to the host after its program has ended.

/// The part of the program's memory that counts as "returned".
const RETURNED_PART: f64 = 0.9;
/// A decrease by less than this fraction of the program's memory is not progress.
const STEP_PART: f64 = 0.005;
/// With a decrease by less than this fraction, no memory counts as returned.
const BEGINNING_PART: f64 = 0.02;

/// Time limits in seconds since the program's end.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Patience {
    /// Limit if no memory has been returned.
    pub beginning_s: f64,
    /// Limit without further progress.
    pub quiet_s: f64,
    /// Limit in any case.
    pub whole_s: f64,
    /// Action once 90 % are returned.
    pub after_return: AfterReturn,
}

/// Action of a watch once 90 % of the memory are returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AfterReturn {
    /// End the watch.
    Stop,
    /// Continue until no more memory is returned.
    UntilQuiet,
}

/// Whether a watch continues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Continue.
    Continue,
    /// End.
    Over,
}

/// The watch over one program's memory.
#[derive(Debug, Clone, Copy)]
pub struct ReturnWatch {
    peak_mib: f64,
    program_mib: f64,
    patience: Patience,
    lowest_mib: f64,
    lowest_at_s: f64,
    return_90_s: Option<f64>,
}

impl ReturnWatch {
    /// Starts when a program that used `program_mib` ends; `peak_mib` is the guest's peak.
    pub fn new(peak_mib: f64, program_mib: f64, patience: Patience) -> Self {
        Self {
            peak_mib,
            program_mib,
            patience,
            lowest_mib: peak_mib,
            lowest_at_s: 0.0,
            return_90_s: None,
        }
    }

    /// Adds the guest's footprint `at_s` seconds after the program's end.
    pub fn observe(&mut self, at_s: f64, footprint_mib: f64) -> Verdict {
        if self.return_90_s.is_none()
            && self.peak_mib - footprint_mib >= RETURNED_PART * self.program_mib
        {
            self.return_90_s = Some(at_s);
        }
        if self.lowest_mib - footprint_mib >= STEP_PART * self.program_mib {
            self.lowest_mib = footprint_mib;
            self.lowest_at_s = at_s;
        }
        let begun = self.peak_mib - self.lowest_mib >= BEGINNING_PART * self.program_mib;
        let satisfied =
            self.return_90_s.is_some() && self.patience.after_return == AfterReturn::Stop;
        let idle = if begun {
            at_s - self.lowest_at_s >= self.patience.quiet_s
        } else {
            at_s >= self.patience.beginning_s
        };
        if satisfied || idle || at_s >= self.patience.whole_s {
            Verdict::Over
        } else {
            Verdict::Continue
        }
    }

    /// Seconds until 90 % of the program's memory were returned; `None` if they never were.
    pub fn return_90_s(&self) -> Option<f64> {
        self.return_90_s
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PATIENCE: Patience = Patience {
        beginning_s: 6.0,
        quiet_s: 4.0,
        whole_s: 30.0,
        after_return: AfterReturn::UntilQuiet,
    };

    /// Watches a guest of 500 MiB after a program of 400 MiB, with one observation per second;
    /// returns the end of the watch and the time of return.
    fn watch(patience: Patience, footprint: impl Fn(f64) -> f64) -> (f64, Option<f64>) {
        let mut watch = ReturnWatch::new(500.0, 400.0, patience);
        let mut at_s = 0.0;
        while watch.observe(at_s, footprint(at_s)) == Verdict::Continue {
            at_s += 1.0;
        }
        (at_s, watch.return_90_s())
    }

    #[test]
    fn memory_that_stays_ends_the_watch_early() {
        assert_eq!(watch(PATIENCE, |_| 499.0), (6.0, None));
    }

    #[test]
    fn returned_memory_is_timed_and_awaited() {
        // 100 MiB a second from second 2 on, down to 90 MiB at second 6.
        let falling = |at_s: f64| (500.0 - 100.0 * (at_s - 2.0).max(0.0)).max(90.0);
        assert_eq!(watch(PATIENCE, falling), (11.0, Some(6.0)));
        let hurried = Patience { after_return: AfterReturn::Stop, ..PATIENCE };
        assert_eq!(watch(hurried, falling), (6.0, Some(6.0)));
    }

    #[test]
    fn a_return_that_stops_half_way_never_reached_90_percent() {
        assert_eq!(watch(PATIENCE, |at_s| if at_s < 2.0 { 500.0 } else { 300.0 }), (6.0, None));
    }

    #[test]
    fn a_slow_return_ends_at_the_limit() {
        assert_eq!(watch(PATIENCE, |at_s| 500.0 - 5.0 * at_s), (30.0, None));
    }

    proptest! {
        #[test]
        fn a_watch_ends_in_time_and_reports_only_observed_times(
            footprints in prop::collection::vec(0.0..600.0f64, 31),
        ) {
            let (end_s, returned) = watch(PATIENCE, |at_s| footprints[at_s as usize]);
            prop_assert!(end_s <= PATIENCE.whole_s);
            let first = footprints.iter().position(|footprint| 500.0 - footprint >= 360.0);
            match returned {
                Some(at_s) => prop_assert_eq!(first, Some(at_s as usize)),
                None => prop_assert!(first.is_none_or(|at| at as f64 > end_s)),
            }
        }
    }
}

//! The readers' board in the guest's memory, where the host sees each reading of the guest's clock
//! as it is made.
//!
//! Over the console a reading comes with the delays of commands and answers, tens of milliseconds
//! in an emulated host. The readers of the clock watch write each reading to memory; the host polls
//! it as fast as it can.

use std::io;
use std::thread;
use std::time::{Duration, Instant};

use ebb_agent::clock_watch::WatchReport;

use super::interval::{Interval, Known, ns_between};
use super::memory::GuestMemory;

/// Minimum time for which the board is polled.
const LOOK: Duration = Duration::from_millis(50);
/// Maximum time for which it is polled: a busy host seldom runs a reader and the lab at the same
/// time.
const LONG_LOOK: Duration = Duration::from_secs(3);
/// Sufficient precision.
const WELL_KNOWN_NS: i64 = 40_000;
/// Interval of checks of words that may be readings.
const ADVANCE: Duration = Duration::from_millis(50);
/// Number of these checks: readers may wait for their processors.
const ADVANCES: u32 = 10;
/// Smaller gaps occur in too many pages: the readers have only just started.
const LEAST_MARK_NS: u64 = 50_000;
/// Maximum number of candidates: the board, and copies of reports in the agent's memory.
const MOST_PAGES: usize = 8;
/// Tolerance for readings ahead of the host's time, because its clock and the guest's differ.
const SLACK_NS: u64 = 100_000_000;

/// Places in guest memory where two readers write their last readings of `CLOCK_MONOTONIC`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Board {
    words: [u64; 2],
}

impl Board {
    /// Searches for the board of the readers that made this report, which was requested at `asked`;
    /// `None` if it cannot be identified with certainty.
    pub(super) fn find(
        memory: &GuestMemory,
        report: &WatchReport,
        asked: Instant,
    ) -> io::Result<Option<Self>> {
        let [first, second, ..] = report.cpus.as_slice() else { return Ok(None) };
        let marks = [first, second].map(|cpu| [cpu.largest_burst_gap_ns, cpu.largest_gap_ns]);
        if marks.iter().flatten().any(|mark| *mark < LEAST_MARK_NS) {
            return Ok(None);
        }
        let from_ns = first.monotonic_ns.min(second.monotonic_ns);
        let latest_ns = first.monotonic_ns.max(second.monotonic_ns);
        let pages = memory.find(&marks)?;
        let pages = pages.into_iter().take(MOST_PAGES).map(|at| Ok((at, memory.page(at)?)));
        let pages: Vec<(u64, Vec<u64>)> = pages.collect::<io::Result<_>>()?;
        for _ in 0..ADVANCES {
            thread::sleep(ADVANCE);
            for (at, before) in &pages {
                let after = memory.page(*at)?;
                let elapsed_ns = ns_between(asked, Instant::now()).unsigned_abs();
                let readings = from_ns..latest_ns + elapsed_ns + SLACK_NS;
                if let Some(words) = readers(before, &after, marks, readings) {
                    return Ok(Some(Self { words: words.map(|word| at + 8 * word as u64) }));
                }
            }
        }
        Ok(None)
    }

    /// Polls the readings as they are made; returns how far the guest's clock is ahead of the time
    /// since `base`, or `None` if the readers do not advance.
    pub(super) fn look(self, memory: &GuestMemory, base: Instant) -> io::Result<Option<Interval>> {
        let begin = Instant::now();
        let mut sightings = [Sightings::default(); 2];
        let mut known = Known::default();
        let well_known = |known: Known| {
            known.interval().is_some_and(|interval| interval.uncertainty_ns() <= WELL_KNOWN_NS)
        };
        while begin.elapsed() < if well_known(known) { LOOK } else { LONG_LOOK } {
            for (word, sightings) in self.words.iter().zip(&mut sightings) {
                let before_ns = ns_between(base, Instant::now());
                let value = memory.word(*word)?;
                let after_ns = ns_between(base, Instant::now());
                if let Some(seen) = sightings.see(value.cast_signed(), before_ns, after_ns) {
                    known.add(seen);
                }
            }
        }
        Ok(known.interval())
    }
}

/// The words of a page that are the last readings of two readers. Their records are alike, so their
/// distance equals that of the gaps that the readers have reported, of which one may have grown
/// since; of the matching pairs, the one next to the gaps is chosen.
fn readers(
    before: &[u64],
    after: &[u64],
    marks: [[u64; 2]; 2],
    readings: std::ops::Range<u64>,
) -> Option<[usize; 2]> {
    let places = |mark| (0..before.len()).filter(move |word| before[*word] == mark);
    let advances = |word: usize| match (before.get(word), after.get(word)) {
        (Some(before), Some(after)) => {
            readings.contains(before) && readings.contains(after) && before < after
        }
        _ => false,
    };
    // A number may occur twice: as the largest gap of all and as that since the last report.
    let aparts = (0..2).flat_map(|mark| {
        let seconds = move |first| {
            places(marks[1][mark])
                .filter_map(move |second: usize| Some((first, second.checked_sub(first)?)))
        };
        places(marks[0][mark]).flat_map(seconds)
    });
    let pairs = aparts.filter(|(_, apart)| *apart > 0).flat_map(|(first, apart)| {
        let words = (0..before.len()).filter(move |word| advances(*word) && advances(word + apart));
        words.map(move |word| (word.abs_diff(first), [word, word + apart]))
    });
    pairs.min().map(|(_, words)| words)
}

/// Observations of one reader.
#[derive(Debug, Clone, Copy, Default)]
struct Sightings {
    /// The last observed value, and a time at which it was not yet replaced.
    last: Option<(i64, i64)>,
    /// The same of the value before it.
    earlier: Option<(i64, i64)>,
}

impl Sightings {
    /// Adds a value that was present at some time between `before_ns` and `after_ns`; returns the
    /// resulting bounds of the clock.
    ///
    /// A reader reads its clock, stores the value, and begins anew. When the value u was seen, the
    /// next one that was seen, v, had not been stored; the one seen after v was therefore read
    /// after that time, and before it was seen itself.
    fn see(&mut self, value_ns: i64, before_ns: i64, after_ns: i64) -> Option<Interval> {
        match self.last {
            Some((last, _)) if last == value_ns => {
                self.last = Some((value_ns, before_ns));
                None
            }
            last => {
                let since = self.earlier;
                self.earlier = last;
                self.last = Some((value_ns, before_ns));
                since.map(|(_, since_ns)| {
                    Interval::between(value_ns - after_ns, value_ns - since_ns)
                })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Gaps in bursts, of which one has grown, and gaps.
    const MARKS: [[u64; 2]; 2] = [[7, 90], [8, 91]];

    /// A page with two records: gap, burst gap, reading; and the largest of all readings before
    /// them.
    fn page(readings: [u64; 2]) -> Vec<u64> {
        let mut words = vec![0; 512];
        words[16] = readings[0].max(readings[1]);
        for (record, reading) in readings.into_iter().enumerate() {
            let at = 48 + 32 * record;
            words[at] = 1_000 + reading;
            words[at + 1] = reading;
            words[at + 12] = 90 + record as u64;
        }
        words
    }

    #[test]
    fn the_readers_words_are_distinguished_from_others_that_advance() {
        let find = |before: Vec<u64>, after: Vec<u64>| readers(&before, &after, MARKS, 500..600);
        assert_eq!(find(page([500, 501]), page([510, 511])), Some([49, 81]));
        assert_eq!(find(page([500, 501]), page([510, 501])), None, "a stopped reader");
        assert_eq!(find(page([500, 501]), page([510, 700])), None, "a value that is not a reading");
        assert_eq!(
            readers(&page([500, 501]), &page([510, 511]), [[7, 90], [8, 93]], 500..600),
            None
        );
    }

    #[test]
    fn a_reading_lies_between_two_observations() {
        let mut sightings = Sightings::default();
        assert_eq!(sightings.see(1_000, 10, 12), None);
        assert_eq!(sightings.see(1_000, 20, 22), None);
        assert_eq!(sightings.see(1_025, 30, 32), None);
        // Read after 20, when 1025 was not yet stored, and before 42.
        assert_eq!(sightings.see(1_035, 40, 42), Some(Interval { low_ns: 993, high_ns: 1_015 }));
    }

    proptest! {
        /// The reader reads and stores at any time, and the host polls at any time.
        #[test]
        fn the_bounds_contain_the_clock(
            ahead_ns in -1_000_000_i64..1_000_000,
            reader in prop::collection::vec((1_i64..100, 1_i64..100), 1..200),
            looks in prop::collection::vec((1_i64..60, 0_i64..30, 0_i64..30), 1..300),
        ) {
            let (mut now, mut stores) = (0, vec![(0, ahead_ns)]);
            for (to_reading, to_store) in reader {
                let value_ns = now + to_reading + ahead_ns;
                now += to_reading + to_store;
                stores.push((now, value_ns));
            }
            let (mut sightings, mut now) = (Sightings::default(), 0);
            for (to_look, to_load, to_end) in looks {
                let (before_ns, load_ns) = (now + to_look, now + to_look + to_load);
                now = load_ns + to_end;
                let stored = stores.iter().rev().find(|(at, _)| *at <= load_ns);
                let Some((_, value_ns)) = stored else { continue };
                if let Some(seen) = sightings.see(*value_ns, before_ns, now) {
                    prop_assert!(
                        seen.low_ns <= ahead_ns && ahead_ns <= seen.high_ns,
                        "{seen:?} {ahead_ns}"
                    );
                }
            }
        }
    }
}

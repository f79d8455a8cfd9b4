//! Results of the rounds of a series, as metrics and a table, and the comparison of series.

use super::rounds::{Direction, Memory, Round};
use crate::report::figures::{DataTable, Value};
use crate::report::metrics::{self, Metric};
use crate::report::results::{MetricInfo, Series};
use crate::report::table::heading;

/// The series that the others are compared with: the standard's arrays of page numbers.
pub(super) const PFN: &str = "pfn";
/// The substitute where it was not run.
const STOCK: &str = "stock";

/// A column of the table of rounds, and of the metrics of idle inflation: name, title, unit, value.
type Stage = (&'static str, &'static str, &'static str, fn(&Round) -> Option<f64>);

const NS_PER_MS: f64 = 1e6;

/// Components of a round's time, and its cost.
const STAGES: [Stage; 7] = [
    ("allocate_ms", "guest: taking pages", "ms", |round| {
        Some(round.driver("allocate_ns")? / NS_PER_MS)
    }),
    ("send_ms", "guest: waiting for the host", "ms", |round| {
        Some(round.driver("send_ns")? / NS_PER_MS)
    }),
    ("translate_ms", "host: reading and finding ranges", "ms", |round| {
        Some(round.queue("ebb_balloon_translate_nanoseconds_total")? / NS_PER_MS)
    }),
    ("discard_ms", "host: discarding", "ms", |round| {
        Some(round.monitor("ebb_balloon_discard_nanoseconds_total")? / NS_PER_MS)
    }),
    ("host_syscalls", "system calls that discard", "", |round| {
        round.monitor("ebb_balloon_discard_syscalls_total")
    }),
    ("buffers", "buffers on the queue", "", |round| round.queue("ebb_balloon_queue_buffers_total")),
    ("queue_kib", "page names on the queue", "KiB", |round| {
        Some(round.queue("ebb_balloon_queue_bytes_total")? / 1024.0)
    }),
];

/// All metrics.
fn metrics() -> Vec<Metric<Vec<Round>>> {
    /// The median of the rounds of a direction, with this memory or any.
    fn middle(
        name: &str,
        title: &str,
        unit: &str,
        (direction, memory): (Direction, Option<Memory>),
        value: fn(&Round) -> Option<f64>,
    ) -> Metric<Vec<Round>> {
        Metric::median(name, title, unit, move |rounds: &Vec<Round>| {
            let those = rounds.iter().filter(|round| {
                round.direction == direction && memory.is_none_or(|memory| round.memory == memory)
            });
            those.filter_map(value).collect()
        })
    }
    let idle = (Direction::Inflate, Some(Memory::Idle));
    let used = (Direction::Inflate, Some(Memory::Used));
    let deflate = (Direction::Deflate, None);
    let elapsed = |round: &Round| Some(round.elapsed_ms);
    let settled = "the same until the memory is back at the host";
    let returned = "Back at the host after inflating, used before";
    let times = |what| format!("Times as fast as pfn: {what}");
    let mut metrics = vec![
        middle("inflate_ms", "Inflate, guest idle", "ms", idle, elapsed),
        middle("inflate_used_ms", "Inflate, memory used before", "ms", used, elapsed),
        middle("settled_used_ms", settled, "ms", used, |round| Some(round.settled_ms)),
        middle("deflate_ms", "Deflate", "ms", deflate, elapsed),
        Metric::ratio("inflate_speedup", times("inflate, idle"), "inflate_ms"),
        Metric::ratio("inflate_used_speedup", times("inflate, used before"), "inflate_used_ms"),
        Metric::ratio("deflate_speedup", times("deflate"), "deflate_ms"),
    ];
    metrics.extend(STAGES.map(|(name, title, unit, value)| {
        middle(name, &format!("Inflate, idle: {title}"), unit, idle, value)
    }));
    metrics.extend([
        middle("returned_mib", returned, "MiB", used, |round| Some(round.returned_mib))
            .better_higher(),
        middle("left_mib", "Left with the inflated guest", "MiB", used, |round| {
            Some(round.left_mib)
        }),
    ]);
    metrics
}

/// Descriptions of the metrics.
pub(super) fn describe() -> Vec<MetricInfo> {
    metrics::describe(metrics())
}

/// Fills in the results that do not depend on other series.
pub(super) fn fill(rounds: &Vec<Round>, series: &mut Series) {
    metrics::measure(&metrics(), rounds, series);
    series.details.push(table(rounds));
    series.details.extend(blocks(rounds));
}

/// All rounds.
fn table(rounds: &[Round]) -> DataTable {
    let mut columns =
        ["", "memory", "ms", "settled, ms", "returned, MiB"].map(str::to_owned).to_vec();
    columns.extend(STAGES.map(|(_, title, unit, _)| heading(title, unit)));
    let rows = rounds.iter().map(|round| {
        let direction = match round.direction {
            Direction::Inflate => "inflate",
            Direction::Deflate => "deflate",
        };
        let memory = match round.memory {
            Memory::Idle => "idle",
            Memory::Used => "used before",
        };
        let times = [round.elapsed_ms, round.settled_ms, round.returned_mib].map(Value::from);
        let stages = STAGES.map(|(.., value)| Value::from(value(round)));
        [direction, memory].map(Value::from).into_iter().chain(times).chain(stages).collect()
    });
    DataTable::new("rounds", columns, rows)
}

/// The blocks that the driver took in each inflation, by order, if it counts them.
fn blocks(rounds: &[Round]) -> Option<DataTable> {
    const MARK: &str = "order_";
    let inflations: Vec<&Round> =
        rounds.iter().filter(|round| round.direction == Direction::Inflate).collect();
    let mut orders: Vec<u32> = inflations
        .iter()
        .filter_map(|round| round.driver.as_ref())
        .flat_map(|counters| counters.iter().filter(|(_, count)| *count > 0.0))
        .filter_map(|(name, _)| name.strip_prefix(MARK)?.parse().ok())
        .collect();
    orders.sort_unstable();
    orders.dedup();
    if orders.is_empty() {
        return None;
    }
    let row = |round: &&Round| {
        let count = |order: &u32| round.driver(&format!("{MARK}{order}")).unwrap_or(0.0);
        orders.iter().map(|order| Value::from(count(order))).collect()
    };
    let columns = orders.iter().map(|order| format!("order {order}"));
    let title = "blocks taken in each inflation, by order";
    Some(DataTable::new(title, columns, inflations.iter().map(row)))
}

/// Compares the speed of each series with that of the standard's arrays.
pub(super) fn compare(all: &mut [Series]) {
    let is_there = |name: &&str| all.iter().any(|series| series.name == *name);
    let Some(base) = [PFN, STOCK].into_iter().find(is_there) else { return };
    metrics::compare(&metrics(), base, all);
    for series in all.iter_mut().filter(|series| base != PFN && series.name != base) {
        series.notes.push(format!("compared with {base}, since {PFN} was not run"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::counters::Counters;

    fn round(memory: Memory, direction: Direction, elapsed_ms: f64) -> Round {
        Round {
            memory,
            direction,
            elapsed_ms,
            settled_ms: elapsed_ms + 10.0,
            returned_mib: 700.0,
            left_mib: 80.0,
            driver: Some(Counters::of_driver(
                "allocate_ns 2000000\norder_0 3\norder_10 5\norder_4 0\n",
            )),
            monitor: Some(Counters::of_monitor(
                "ebb_balloon_queue_bytes_total{kind=\"inflate\"} 2048\n",
            )),
        }
    }

    fn filled(inflate_ms: f64) -> Series {
        let mut filled = Series::new(PFN, String::new());
        let rounds = [
            round(Memory::Idle, Direction::Inflate, inflate_ms),
            round(Memory::Idle, Direction::Deflate, 5.0),
            round(Memory::Used, Direction::Inflate, 2.0 * inflate_ms),
            round(Memory::Used, Direction::Deflate, 7.0),
        ];
        fill(&rounds.to_vec(), &mut filled);
        filled
    }

    #[test]
    fn metrics_follow_from_the_rounds() {
        let filled = filled(100.0);
        assert_eq!(filled.metrics["inflate_ms"], Some(100.0));
        assert_eq!(filled.metrics["inflate_used_ms"], Some(200.0));
        assert_eq!(filled.metrics["settled_used_ms"], Some(210.0));
        assert_eq!(filled.metrics["deflate_ms"], Some(6.0));
        assert_eq!(filled.metrics["allocate_ms"], Some(2.0));
        assert_eq!(filled.metrics["queue_kib"], Some(2.0));
        assert_eq!(filled.metrics["discard_ms"], None, "missing counts are not zero");
    }

    #[test]
    fn blocks_are_listed_by_the_orders_that_were_taken() {
        let filled = filled(100.0);
        let blocks = &filled.details[1];
        assert_eq!(blocks.columns, ["order 0", "order 10"]);
        assert_eq!(blocks.rows, vec![vec![Value::from(3.0), Value::from(5.0)]; 2]);
    }

    #[test]
    fn series_are_compared_with_the_arrays_of_the_standard() {
        let ranges = Series { name: "ranges".to_owned(), ..filled(2.0) };
        let mut all = [filled(100.0), ranges];
        compare(&mut all);
        assert_eq!(all[0].metrics["inflate_speedup"], Some(1.0));
        assert_eq!(all[1].metrics["inflate_speedup"], Some(50.0));
        assert_eq!(all[1].metrics["deflate_speedup"], Some(1.0));
        assert!(all[1].notes.is_empty());
    }

    #[test]
    fn another_base_is_named() {
        let stock = Series { name: STOCK.to_owned(), ..filled(50.0) };
        let ranges = Series { name: "ranges".to_owned(), ..filled(5.0) };
        let mut all = [stock, ranges];
        compare(&mut all);
        assert_eq!(all[1].metrics["inflate_used_speedup"], Some(10.0));
        assert!(all[1].notes[0].contains("stock"));
        let mut alone = [Series { name: "ranges".to_owned(), ..filled(5.0) }];
        compare(&mut alone);
        assert_eq!(alone[0].metrics["inflate_speedup"], None);
    }
}

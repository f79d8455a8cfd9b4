//! What the rounds of a series come to, as metrics and a table, and how the series compare.

use super::rounds::{Direction, Memory, Round};
use crate::report::figures::{DataTable, Value};
use crate::report::results::{Better, MetricInfo, Series, rounded};
use crate::report::statistics::median;

/// The series that the others are compared with: the standard's arrays of page numbers.
pub(super) const PFN: &str = "pfn";
/// And what stands for it where it was not run.
const STOCK: &str = "stock";

/// Times, each by the metric that says how many times as fast as the standard's arrays that is.
const SPEEDUPS: [(&str, &str); 3] = [
    ("inflate_ms", "inflate_speedup"),
    ("inflate_used_ms", "inflate_used_speedup"),
    ("deflate_ms", "deflate_speedup"),
];

/// A column of the table of rounds, and of the metrics of idle inflation.
struct Stage {
    name: &'static str,
    title: &'static str,
    unit: &'static str,
    of: fn(&Round) -> Option<f64>,
}

const NS_PER_MS: f64 = 1e6;

/// What a round's time consists of, and what it cost.
const STAGES: [Stage; 7] = [
    Stage {
        name: "allocate_ms",
        title: "guest: taking pages",
        unit: "ms",
        of: |round| Some(round.driver("allocate_ns")? / NS_PER_MS),
    },
    Stage {
        name: "send_ms",
        title: "guest: waiting for the host",
        unit: "ms",
        of: |round| Some(round.driver("send_ns")? / NS_PER_MS),
    },
    Stage {
        name: "translate_ms",
        title: "host: reading and finding ranges",
        unit: "ms",
        of: |round| Some(round.queue("ebb_balloon_translate_nanoseconds_total")? / NS_PER_MS),
    },
    Stage {
        name: "discard_ms",
        title: "host: discarding",
        unit: "ms",
        of: |round| Some(round.monitor("ebb_balloon_discard_nanoseconds_total")? / NS_PER_MS),
    },
    Stage {
        name: "host_syscalls",
        title: "system calls that discard",
        unit: "",
        of: |round| round.monitor("ebb_balloon_discard_syscalls_total"),
    },
    Stage {
        name: "buffers",
        title: "buffers on the queue",
        unit: "",
        of: |round| round.queue("ebb_balloon_queue_buffers_total"),
    },
    Stage {
        name: "queue_kib",
        title: "page names on the queue",
        unit: "KiB",
        of: |round| Some(round.queue("ebb_balloon_queue_bytes_total")? / 1024.0),
    },
];

/// All metrics.
pub(super) fn metrics() -> Vec<MetricInfo> {
    let lower =
        |name: &str, title: &str, unit: &str| MetricInfo::new(name, title, unit, Better::Lower);
    let higher =
        |name: &str, title: &str, unit: &str| MetricInfo::new(name, title, unit, Better::Higher);
    let mut metrics = vec![
        lower("inflate_ms", "Inflate, guest idle", "ms"),
        lower("inflate_used_ms", "Inflate, memory used before", "ms"),
        lower("settled_used_ms", "the same until the memory is back at the host", "ms"),
        lower("deflate_ms", "Deflate", "ms"),
        higher("inflate_speedup", "Times as fast as pfn: inflate, idle", ""),
        higher("inflate_used_speedup", "Times as fast as pfn: inflate, used before", ""),
        higher("deflate_speedup", "Times as fast as pfn: deflate", ""),
    ];
    metrics
        .extend(STAGES.map(|stage| {
            lower(stage.name, &format!("Inflate, idle: {}", stage.title), stage.unit)
        }));
    metrics.extend([
        higher("returned_mib", "Back at the host after inflating, used before", "MiB"),
        lower("left_mib", "Left with the inflated guest", "MiB"),
    ]);
    metrics
}

/// Fills in what is known without the other series.
pub(super) fn series(rounds: &[Round], series: &mut Series) {
    let middle =
        |memory: Option<Memory>, direction: Direction, value: &dyn Fn(&Round) -> Option<f64>| {
            let those = rounds.iter().filter(|round| {
                round.direction == direction && memory.is_none_or(|memory| round.memory == memory)
            });
            median(those.filter_map(value)).map(rounded)
        };
    let (idle, used) = (Some(Memory::Idle), Some(Memory::Used));
    let elapsed = |round: &Round| Some(round.elapsed_ms);
    let mut metrics = vec![
        ("inflate_ms", middle(idle, Direction::Inflate, &elapsed)),
        ("inflate_used_ms", middle(used, Direction::Inflate, &elapsed)),
        ("settled_used_ms", middle(used, Direction::Inflate, &|round| Some(round.settled_ms))),
        ("deflate_ms", middle(None, Direction::Deflate, &elapsed)),
        ("returned_mib", middle(used, Direction::Inflate, &|round| Some(round.returned_mib))),
        ("left_mib", middle(used, Direction::Inflate, &|round| Some(round.left_mib))),
    ];
    metrics.extend(SPEEDUPS.map(|(_, speedup)| (speedup, None)));
    metrics.extend(STAGES.map(|stage| (stage.name, middle(idle, Direction::Inflate, &stage.of))));
    series.metrics = metrics.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    series.details.push(table(rounds));
    series.details.extend(blocks(rounds));
}

/// Every round by itself.
fn table(rounds: &[Round]) -> DataTable {
    let mut columns: Vec<String> =
        ["", "memory", "ms", "settled, ms", "returned, MiB"].map(str::to_owned).into();
    columns.extend(STAGES.map(|stage| crate::report::table::heading(stage.title, stage.unit)));
    let rows = rounds.iter().map(|round| {
        let mut row = vec![
            Value::from(match round.direction {
                Direction::Inflate => "inflate",
                Direction::Deflate => "deflate",
            }),
            Value::from(match round.memory {
                Memory::Idle => "idle",
                Memory::Used => "used before",
            }),
            Value::from(round.elapsed_ms),
            Value::from(round.settled_ms),
            Value::from(round.returned_mib),
        ];
        row.extend(STAGES.map(|stage| match (stage.of)(round) {
            Some(value) => Value::from(rounded(value)),
            None => Value::from("-"),
        }));
        row
    });
    DataTable { title: "rounds".to_owned(), columns, rows: rows.collect() }
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
    Some(DataTable {
        title: "blocks taken in each inflation, by order".to_owned(),
        columns: orders.iter().map(|order| format!("order {order}")).collect(),
        rows: inflations.iter().map(row).collect(),
    })
}

/// Says how many times as fast as the standard's arrays each series is.
pub(super) fn compare(all: &mut [Series]) {
    let named = |name: &str| all.iter().position(|series| series.name == name);
    let Some(base) = named(PFN).or_else(|| named(STOCK)) else { return };
    let (base_name, base) = (all[base].name.clone(), all[base].metrics.clone());
    for series in all.iter_mut() {
        for (time, speedup) in SPEEDUPS {
            let value = |metrics: &std::collections::BTreeMap<String, Option<f64>>| {
                metrics.get(time).copied().flatten().filter(|time| *time > 0.0)
            };
            let ratio =
                value(&base).zip(value(&series.metrics)).map(|(base, this)| rounded(base / this));
            series.metrics.insert(speedup.to_owned(), ratio);
        }
        if base_name != PFN && series.name != base_name {
            series.notes.push(format!("compared with {base_name}, since {PFN} was not run"));
        }
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

    fn told(inflate_ms: f64) -> Series {
        let mut told = Series::new(PFN, String::new());
        let rounds = [
            round(Memory::Idle, Direction::Inflate, inflate_ms),
            round(Memory::Idle, Direction::Deflate, 5.0),
            round(Memory::Used, Direction::Inflate, 2.0 * inflate_ms),
            round(Memory::Used, Direction::Deflate, 7.0),
        ];
        series(&rounds, &mut told);
        told
    }

    #[test]
    fn every_metric_that_is_described_is_there() {
        let described: Vec<String> = metrics().into_iter().map(|info| info.name).collect();
        let told = told(100.0);
        assert_eq!(told.metrics.len(), described.len());
        assert!(described.iter().all(|name| told.metrics.contains_key(name)));
        assert_eq!(told.metrics["inflate_ms"], Some(100.0));
        assert_eq!(told.metrics["inflate_used_ms"], Some(200.0));
        assert_eq!(told.metrics["settled_used_ms"], Some(210.0));
        assert_eq!(told.metrics["deflate_ms"], Some(6.0));
        assert_eq!(told.metrics["allocate_ms"], Some(2.0));
        assert_eq!(told.metrics["queue_kib"], Some(2.0));
        assert_eq!(told.metrics["discard_ms"], None, "what nobody counted is not zero");
    }

    #[test]
    fn blocks_are_told_by_the_orders_that_were_taken() {
        let told = told(100.0);
        let blocks = &told.details[1];
        assert_eq!(blocks.columns, ["order 0", "order 10"]);
        assert_eq!(blocks.rows, vec![vec![Value::from(3.0), Value::from(5.0)]; 2]);
    }

    #[test]
    fn series_are_compared_with_the_arrays_of_the_standard() {
        let ranges = Series { name: "ranges".to_owned(), ..told(2.0) };
        let mut all = [told(100.0), ranges];
        compare(&mut all);
        assert_eq!(all[0].metrics["inflate_speedup"], Some(1.0));
        assert_eq!(all[1].metrics["inflate_speedup"], Some(50.0));
        assert_eq!(all[1].metrics["deflate_speedup"], Some(1.0));
        assert!(all[1].notes.is_empty());
    }

    #[test]
    fn another_base_is_named() {
        let stock = Series { name: STOCK.to_owned(), ..told(50.0) };
        let ranges = Series { name: "ranges".to_owned(), ..told(5.0) };
        let mut all = [stock, ranges];
        compare(&mut all);
        assert_eq!(all[1].metrics["inflate_used_speedup"], Some(10.0));
        assert!(all[1].notes[0].contains("stock"));
        let mut alone = [Series { name: "ranges".to_owned(), ..told(5.0) }];
        compare(&mut alone);
        assert_eq!(alone[0].metrics["inflate_speedup"], None);
    }
}

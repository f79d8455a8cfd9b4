//! Pages per second through the device, from a driver's buffers to discarded memory, and system
//! calls per GiB.
//!
//! Each iteration first touches the pages (not timed), so that every discard frees memory. The
//! driver imitates Linux's: 256 page frame numbers per buffer, one buffer at a time; reports of 32
//! ranges. For comparison, a driver with the extension sends the same pages in messages of each
//! encoding.

#![allow(clippy::unwrap_used, missing_docs, reason = "a benchmark")]

use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use ebb_abi::balloon::extension::{Encoding, Purpose};
use ebb_abi::balloon::{Feature, Features, LINUX_PFNS_PER_BUFFER, QueueKind};
use ebb_abi::{HUGE_PAGE_SIZE_BYTES, Order, PAGE_SIZE_BYTES, PageRange, Pfn};
use ebb_balloon::testing::{Buffer, DRIVER_BYTES, Discards, Guest, Setup, message};
use ebb_guest_ram::HugePages;
use rustix::mm::{Advice, madvise};

/// Size of each of the guest's regions; the first one is used.
const REGION_BYTES: u64 = 258 << 20;

/// Pages per iteration: 256 MiB.
const PAGES: u32 = 64 << 10;

/// First page of an iteration.
const FIRST: u32 = (DRIVER_BYTES / PAGE_SIZE_BYTES) as u32;

fn guest(negotiated: Features, huge_pages: HugePages) -> Guest {
    let offered = Features::ALL_WITH_EXTENSION;
    let setup =
        Setup { offered, negotiated, region_bytes: REGION_BYTES, huge_pages, ..Setup::default() };
    Guest::new(Setup { discards: Discards::WhenDue, ..setup })
}

/// Makes the pages of an iteration resident.
fn touch(guest: &Guest) {
    let address = guest.ram.regions()[0].host_address + DRIVER_BYTES;
    let size_bytes = PAGES as usize * PAGE_SIZE_BYTES as usize;
    // SAFETY: the range lies within the first region, which lives as long as `guest`; populating
    // changes no content.
    unsafe { madvise(address as *mut _, size_bytes, Advice::LinuxPopulateWrite) }.unwrap();
}

/// The page numbers of an iteration in the given order.
fn numbers(order: &str) -> Vec<u32> {
    let all = FIRST..FIRST + PAGES;
    match order {
        // Every other page first, then those between.
        "strided" => all.clone().step_by(2).chain(all.skip(1).step_by(2)).collect(),
        // A fixed permutation: neighbours land far apart.
        "random" => {
            (0..PAGES).map(|index| FIRST + (index.wrapping_mul(40503) ^ 0x5a5a) % PAGES).collect()
        }
        _ => all.collect(),
    }
}

/// Sends the numbers as Linux does; returns the time the device took.
fn inflate(guest: &mut Guest, numbers: &[u32]) -> Duration {
    let mut elapsed = Duration::ZERO;
    for chunk in numbers.chunks(LINUX_PFNS_PER_BUFFER) {
        let buffer = guest.pfns(chunk.iter().copied());
        guest.offer(QueueKind::Inflate, &[buffer]);
        let start = Instant::now();
        let _ = guest.kick(QueueKind::Inflate);
        elapsed += start.elapsed();
    }
    let start = Instant::now();
    guest.balloon.flush();
    elapsed + start.elapsed()
}

/// Reports blocks, 32 per chain; returns the time the device took.
fn report(guest: &mut Guest, block_bytes: u64) -> Duration {
    let mut elapsed = Duration::ZERO;
    let end = DRIVER_BYTES + u64::from(PAGES) * PAGE_SIZE_BYTES;
    // Every other block first, as fragments of free memory are.
    let blocks = (DRIVER_BYTES..end).step_by(2 * block_bytes as usize);
    let blocks: Vec<u64> =
        blocks.clone().chain(blocks.map(|address| address + block_bytes)).collect();
    for chunk in blocks.chunks(32) {
        let chain: Vec<_> = chunk
            .iter()
            .map(|address| Buffer { address: *address, length: block_bytes as u32, writable: true })
            .collect();
        guest.offer(QueueKind::Reporting, &chain);
        let start = Instant::now();
        let _ = guest.kick(QueueKind::Reporting);
        elapsed += start.elapsed();
    }
    elapsed
}

/// Times `work` on freshly touched pages and prints the number of system calls.
fn measure(
    criterion: &mut Criterion,
    group: &str,
    id: &str,
    guest: &mut Guest,
    mut work: impl FnMut(&mut Guest) -> Duration,
) {
    let mut group = criterion.benchmark_group(group);
    group
        .sample_size(10)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(2));
    group.throughput(Throughput::Elements(u64::from(PAGES)));
    group.bench_function(BenchmarkId::from_parameter(id), |bencher| {
        bencher.iter_custom(|iterations| {
            (0..iterations)
                .map(|_| {
                    touch(guest);
                    work(guest)
                })
                .sum()
        });
    });
    let discard = guest.balloon.counters().discard;
    let gib = discard.bytes as f64 / f64::from(1 << 30);
    println!(
        "{id}: {:.1} system calls, {:.1} ranges per GiB",
        discard.syscalls as f64 / gib,
        discard.ranges as f64 / gib
    );
}

fn inflation(criterion: &mut Criterion) {
    for (backing, huge_pages) in [("4k", HugePages::Off), ("thp", HugePages::On)] {
        for (mode, features) in [
            ("ack_first", Features::ALL_BALLOON),
            ("ack_last", Features::ALL_BALLOON.without(Feature::MustTellHost)),
        ] {
            for order in ["contiguous", "strided", "random"] {
                let numbers = numbers(order);
                let mut guest = guest(features, huge_pages);
                let id = format!("{order}/{mode}/{backing}");
                measure(criterion, "inflate_pages", &id, &mut guest, |guest| {
                    inflate(guest, &numbers)
                });
            }
        }
    }
}

fn reports(criterion: &mut Criterion) {
    for (backing, huge_pages) in [("4k", HugePages::Off), ("thp", HugePages::On)] {
        for block_bytes in [64 << 10, HUGE_PAGE_SIZE_BYTES, 2 * HUGE_PAGE_SIZE_BYTES] {
            let mut guest = guest(Features::ALL_BALLOON, huge_pages);
            let id = format!("{}KiB/{backing}", block_bytes >> 10);
            measure(criterion, "report_pages", &id, &mut guest, |guest| report(guest, block_bytes));
        }
    }
}

/// How the driver names pages.
#[derive(Clone, Copy)]
enum Naming {
    /// As Linux does: bare arrays of 256 numbers.
    Arrays,
    /// In messages of up to this many blocks.
    Messages(Encoding, usize),
}

/// Sends blocks; returns the time the device took.
fn inflate_blocks(guest: &mut Guest, naming: Naming, blocks: &[PageRange]) -> Duration {
    let Naming::Messages(encoding, blocks_each) = naming else {
        let pages: Vec<u32> = blocks
            .iter()
            .flat_map(|block| block.start.0..block.end().0)
            .map(|page| page as u32)
            .collect();
        return inflate(guest, &pages);
    };
    let mut elapsed = Duration::ZERO;
    for chunk in blocks.chunks(blocks_each) {
        let bytes = message(Purpose::Inflate, encoding, chunk);
        let buffer = guest.buffer(&bytes);
        guest.offer(QueueKind::Inflate, &[buffer]);
        let start = Instant::now();
        let _ = guest.kick(QueueKind::Inflate);
        elapsed += start.elapsed();
    }
    let start = Instant::now();
    guest.balloon.flush();
    elapsed + start.elapsed()
}

/// Blocks of one order: every other one first, then those in between, as an allocator may return
/// them.
fn blocks(order: Order) -> Vec<PageRange> {
    let all = (FIRST..FIRST + PAGES).step_by(order.pages() as usize);
    let all: Vec<_> = all.map(|start| PageRange::new(Pfn::from(start), order.pages())).collect();
    all.iter().step_by(2).chain(all.iter().skip(1).step_by(2)).copied().collect()
}

fn encodings(criterion: &mut Criterion) {
    for order in [Order::PAGE, Order(4), Order::HUGE] {
        let blocks = blocks(order);
        // 64 MiB per message, or as many blocks as fit into one.
        let each = (16 << 10) / order.pages() as usize;
        for (name, naming) in [
            ("arrays", Naming::Arrays),
            ("pfns", Naming::Messages(Encoding::Pfns, each)),
            ("bitmap", Naming::Messages(Encoding::Bitmap, each)),
            ("ranges", Naming::Messages(Encoding::Ranges, each)),
        ] {
            let negotiated = match naming {
                Naming::Arrays => Features::ALL_BALLOON,
                Naming::Messages(..) => Features::ALL_WITH_EXTENSION,
            };
            let mut guest = guest(negotiated, HugePages::On);
            let id = format!("{}KiB/{name}/thp", order.bytes() >> 10);
            measure(criterion, "encoded_pages", &id, &mut guest, |guest| {
                inflate_blocks(guest, naming, &blocks)
            });
            let counters = guest.balloon.counters();
            let gib = counters.inflate.bytes as f64 / f64::from(1 << 30);
            println!(
                "{id}: {:.0} buffers, {:.0} KiB on the queue per GiB; translate {:.2} ms, \
                 discard {:.2} ms per GiB",
                counters.inflate.buffers as f64 / gib,
                counters.inflate.message_bytes as f64 / 1024.0 / gib,
                counters.inflate.translate_ns as f64 / 1e6 / gib,
                counters.discard.elapsed_ns as f64 / 1e6 / gib,
            );
        }
    }
}

/// The core alone: from page numbers to ranges, without memory.
fn core_only(criterion: &mut Criterion) {
    for order in ["contiguous", "strided", "random"] {
        let numbers = numbers(order);
        let mut guest = guest(Features::ALL_BALLOON, HugePages::Off);
        let _guard = guest.ram.inhibit_discard(ebb_guest_ram::InhibitReason::Operator);
        let mut group = criterion.benchmark_group("core_pages");
        group
            .sample_size(10)
            .warm_up_time(Duration::from_millis(300))
            .measurement_time(Duration::from_secs(1));
        group.throughput(Throughput::Elements(u64::from(PAGES)));
        group.bench_function(order, |bencher| {
            bencher.iter_custom(|iterations| {
                (0..iterations).map(|_| inflate(&mut guest, &numbers)).sum()
            });
        });
    }
    let last = Pfn::from(FIRST + PAGES - 1);
    println!(
        "pages {} to {}, {} bytes per iteration",
        Pfn::from(FIRST),
        last,
        u64::from(PAGES) * PAGE_SIZE_BYTES
    );
}

criterion_group!(benches, core_only, inflation, encodings, reports);
criterion_main!(benches);

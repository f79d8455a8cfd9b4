//! Cost of sets of pages, of the write log, and of reading and writing whole pages.

#![allow(clippy::unwrap_used, missing_docs, reason = "a benchmark")]

use std::hint::black_box;
use std::time::Duration;

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use ebb_abi::{PAGE_SIZE_BYTES, Pfn};
use ebb_guest_ram::{Backing, GuestRam, GuestRange, HugePages, PageBitmap, Populate, RegionSpec};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap, GuestRegionMmap, MmapRegion};

/// Pages of 8 GiB.
const SET_PAGES: u64 = (8 << 30) / PAGE_SIZE_BYTES;
/// Memory read and written, in bytes.
const RAM_BYTES: u64 = 256 << 20;
/// Pages read or written per call: 2 MiB.
const CALL_PAGES: u64 = 512;

fn all() -> [GuestRange; 1] {
    [GuestRange::new(Pfn(0), SET_PAGES)]
}

/// A set with `pages` of every `step` pages.
fn set(step: u64, pages: u64) -> PageBitmap {
    let mut set = PageBitmap::new(&all());
    for first in (0..SET_PAGES).step_by(step as usize) {
        set.insert(GuestRange::new(Pfn(first), pages));
    }
    set
}

fn sets(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("set of 8 GiB");
    group.warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_secs(1));
    let sets = [
        ("empty", PageBitmap::new(&all())),
        ("1 page of 100", set(100, 1)),
        ("every other page", set(2, 1)),
        ("2 MiB of 4", set(1024, 512)),
        ("full", PageBitmap::full(&all())),
    ];
    for (name, set) in &sets {
        group.bench_function(format!("ranges/{name}"), |bencher| {
            bencher.iter(|| set.ranges().count());
        });
    }
    let (sparse, dense) = (&sets[1].1, &sets[3].1);
    group.bench_function("count", |bencher| bencher.iter(|| sparse.count()));
    group.bench_function("insert 2 MiB of 4", |bencher| bencher.iter(|| set(1024, 512)));
    let mut sum = dense.clone();
    group.bench_function("union", |bencher| bencher.iter(|| black_box(&mut sum).union(sparse)));
    let words = vec![0x0100_0000_0000_1000; (SET_PAGES / 64) as usize];
    group.bench_function("insert_words", |bencher| {
        bencher.iter(|| sum.insert_words(Pfn(0), words.iter().copied()));
    });
}

fn ram(backing: Backing, populate: Populate) -> GuestRam {
    let region = RegionSpec { start: GuestAddress(0), size_bytes: RAM_BYTES, host_node: None };
    GuestRam::new(&[region], backing, HugePages::On, populate).unwrap()
}

/// Writes to all pages in turn, one at a time.
fn write_all(criterion: &mut Criterion, name: &str, mut write: impl FnMut(GuestAddress)) {
    let mut group = criterion.benchmark_group("write of 8 bytes");
    group.warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_secs(1));
    group.throughput(Throughput::Elements(1));
    let mut page = 0;
    group.bench_function(name, |bencher| {
        bencher.iter(|| {
            page = (page + 1) % 4096;
            write(GuestAddress(page * PAGE_SIZE_BYTES));
        });
    });
}

fn write_log(criterion: &mut Criterion) {
    let ram = ram(Backing::Anonymous, Populate::Prealloc);
    // The same memory without a log.
    let (address, size_bytes) = (ram.regions()[0].host_address as *mut u8, RAM_BYTES as usize);
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: the region is mapped as long as `ram` lives, which is dropped after this.
    let region: MmapRegion =
        unsafe { MmapRegion::build_raw(address, size_bytes, protection, 0) }.unwrap();
    let region = GuestRegionMmap::new(region, GuestAddress(0)).unwrap();
    let plain = GuestMemoryMmap::from_regions(vec![region]).unwrap();
    let memory = ram.memory();
    write_all(criterion, "no log", |address| plain.write_obj(7_u64, address).unwrap());
    write_all(criterion, "log off", |address| memory.write_obj(7_u64, address).unwrap());
    ram.start_write_log().unwrap();
    write_all(criterion, "log on", |address| memory.write_obj(7_u64, address).unwrap());

    let mut group = criterion.benchmark_group("write log of 256 MiB");
    group.warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_secs(1));
    let mut pages = PageBitmap::new(&ram.page_ranges());
    group.bench_function("start", |bencher| bencher.iter(|| ram.start_write_log().unwrap()));
    group.bench_function("take", |bencher| bencher.iter(|| ram.take_write_log(&mut pages)));
}

fn whole_pages(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("2 MiB");
    group.warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_secs(1));
    group.throughput(Throughput::Bytes(CALL_PAGES * PAGE_SIZE_BYTES));
    let calls = RAM_BYTES / PAGE_SIZE_BYTES / CALL_PAGES;
    let range = |call: u64| GuestRange::new(Pfn(call % calls * CALL_PAGES), CALL_PAGES);
    let mut content = vec![0xa5; (CALL_PAGES * PAGE_SIZE_BYTES) as usize];
    for backing in [Backing::Anonymous, Backing::Memfd] {
        let name = if backing == Backing::Memfd { "memfd" } else { "anonymous" };
        let fresh = ram(backing, Populate::Lazy);
        let full = ram(backing, Populate::Prealloc);
        let mut call = 0;
        let mut held = Vec::new();
        for (state, ram) in [("populated", &full), ("never touched", &fresh)] {
            group.bench_function(format!("populated_ranges/{name}, {state}"), |bencher| {
                bencher.iter(|| {
                    call += 1;
                    held.clear();
                    ram.populated_ranges(range(call), &mut held).unwrap();
                });
            });
        }
        group.bench_function(format!("read_pages/{name}"), |bencher| {
            bencher.iter(|| {
                call += 1;
                full.read_pages(range(call), &mut content).unwrap();
            });
        });
        group.bench_function(format!("write_pages/{name}, populated"), |bencher| {
            bencher.iter(|| {
                call += 1;
                full.write_pages(range(call), &content).unwrap();
            });
        });
        group.bench_function(format!("write_pages/{name}, not populated"), |bencher| {
            bencher.iter_batched(
                || {
                    call += 1;
                    full.discard(&[range(call)]).unwrap();
                    range(call)
                },
                |range| full.write_pages(range, &content).unwrap(),
                BatchSize::PerIteration,
            );
        });
    }
}

criterion_group!(benches, sets, write_log, whole_pages);
criterion_main!(benches);

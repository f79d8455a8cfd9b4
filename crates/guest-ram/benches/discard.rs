//! Cost of a discard by backing, size of a range, and number of ranges per system call.

#![allow(clippy::unwrap_used, missing_docs, reason = "a benchmark")]

use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use ebb_abi::{PAGE_SIZE_BYTES, Pfn};
use ebb_guest_ram::{Backing, GuestRam, GuestRange, HugePages, Populate, RegionSpec};
use rustix::mm::{Advice, madvise};
use vm_memory::GuestAddress;

/// Memory discarded per iteration, in bytes: every other block of twice as much.
const BYTES: u64 = 128 << 20;

fn ram(backing: Backing, huge_pages: HugePages) -> GuestRam {
    let region = RegionSpec { start: GuestAddress(0), size_bytes: 2 * BYTES, host_node: None };
    GuestRam::new(&[region], backing, huge_pages, Populate::Lazy).unwrap()
}

fn touch(ram: &GuestRam) {
    let region = ram.regions()[0];
    // SAFETY: the range is the region's, which lives as long as `ram`; populating changes no
    // content.
    unsafe {
        madvise(
            region.host_address as *mut _,
            region.size_bytes as usize,
            Advice::LinuxPopulateWrite,
        )
    }
    .unwrap();
}

fn discard(criterion: &mut Criterion) {
    let cases = [
        ("anonymous/vectored/4k", ram(Backing::Anonymous, HugePages::Off)),
        ("anonymous/single/4k", ram(Backing::Anonymous, HugePages::Off).with_single_discards()),
        ("anonymous/vectored/thp", ram(Backing::Anonymous, HugePages::On)),
        ("anonymous/single/thp", ram(Backing::Anonymous, HugePages::On).with_single_discards()),
        ("memfd/4k", ram(Backing::Memfd, HugePages::Off)),
    ];
    for (name, ram) in cases {
        println!("{name}: {:?}", ram.discard_method());
        let mut group = criterion.benchmark_group(name);
        group
            .sample_size(10)
            .warm_up_time(Duration::from_millis(200))
            .measurement_time(Duration::from_secs(1));
        for range_pages in [1, 16, 512] {
            let ranges: Vec<_> = (0..BYTES / PAGE_SIZE_BYTES / range_pages)
                .map(|index| GuestRange::new(Pfn(2 * index * range_pages), range_pages))
                .collect();
            group.throughput(Throughput::Bytes(BYTES));
            group.bench_with_input(
                BenchmarkId::from_parameter(range_pages),
                &ranges,
                |bencher, ranges| {
                    bencher.iter_custom(|iterations| {
                        (0..iterations)
                            .map(|_| {
                                touch(&ram);
                                let start = Instant::now();
                                ram.discard(ranges).unwrap();
                                start.elapsed()
                            })
                            .sum()
                    });
                },
            );
        }
    }
}

criterion_group!(benches, discard);
criterion_main!(benches);

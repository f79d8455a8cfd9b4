//! Cost of saving memory, of restoring it, and of the first access to it.

#![allow(clippy::unwrap_used, missing_docs, reason = "a benchmark")]

use std::fs::File;
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use ebb_abi::{PAGE_SIZE_BYTES, PageRange, Pfn};
use ebb_guest_ram::{Backing, GuestRam, HugePages, Populate, RamImage, RegionSpec};
use rustix::fs::{MemfdFlags, memfd_create};
use vm_memory::{Bytes, GuestAddress};

const BYTES: u64 = 256 << 20;

/// Content of the guest's memory.
#[derive(Clone, Copy)]
enum Content {
    /// Data in every page.
    Full,
    /// Every page was written, and is zero again.
    Zeros,
    /// Data in one page of 16; the others were never touched.
    Sparse,
}

/// Creates memory to be accessed.
type Maker<'a> = Box<dyn Fn() -> GuestRam + 'a>;

fn spec() -> RegionSpec {
    RegionSpec { start: GuestAddress(0), size_bytes: BYTES, host_node: None }
}

fn fresh(backing: Backing, huge_pages: HugePages) -> GuestRam {
    GuestRam::new(&[spec()], backing, huge_pages, Populate::Lazy).unwrap()
}

fn fill(ram: &GuestRam, content: Content) {
    let step = if matches!(content, Content::Sparse) { 16 } else { 1 };
    for address in (0..BYTES).step_by((step * PAGE_SIZE_BYTES) as usize) {
        let value = if matches!(content, Content::Zeros) { 0 } else { address + 1 };
        ram.memory().write_obj(value, GuestAddress(address)).unwrap();
    }
}

/// Files in memory, to exclude the cost of a disk.
fn target() -> File {
    memfd_create("ebb-bench", MemfdFlags::CLOEXEC).unwrap().into()
}

fn restore(file: &File, image: &RamImage) -> GuestRam {
    GuestRam::restore(&[spec()], HugePages::On, file.try_clone().unwrap(), 0, image).unwrap()
}

fn time(total: u64, mut once: impl FnMut() -> Duration) -> Duration {
    (0..total).map(|_| once()).sum()
}

fn save(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("save");
    group
        .sample_size(10)
        .warm_up_time(Duration::from_millis(200))
        .throughput(Throughput::Bytes(BYTES));
    let cases = [
        ("anonymous/full/4k", Backing::Anonymous, HugePages::Off, Content::Full),
        ("anonymous/full/thp", Backing::Anonymous, HugePages::On, Content::Full),
        ("anonymous/zeros/4k", Backing::Anonymous, HugePages::Off, Content::Zeros),
        ("anonymous/sparse/4k", Backing::Anonymous, HugePages::Off, Content::Sparse),
        ("memfd/full/4k", Backing::Memfd, HugePages::Off, Content::Full),
        ("memfd/sparse/4k", Backing::Memfd, HugePages::Off, Content::Sparse),
    ];
    for (name, backing, huge_pages, content) in cases {
        let ram = fresh(backing, huge_pages);
        fill(&ram, content);
        // A new file each time, since saving begins with discarding the file's old content.
        let file = target();
        group.bench_function(name, |bencher| {
            bencher.iter_custom(|iterations| {
                time(iterations, || {
                    let start = Instant::now();
                    ram.save(&file, 0, &mut |_| {}).unwrap();
                    start.elapsed()
                })
            });
        });
    }
    let ram = fresh(Backing::Anonymous, HugePages::Off);
    fill(&ram, Content::Full);
    let file = target();
    let image = ram.save(&file, 0, &mut |_| {}).unwrap();
    group.bench_function("verify/full", |bencher| {
        bencher.iter(|| image.verify(&file, 0, &mut |_| {}).unwrap());
    });
    let restored = restore(&file, &image);
    let again = target();
    group.bench_function("restored/untouched", |bencher| {
        bencher.iter(|| restored.save(&again, 0, &mut |_| {}).unwrap());
    });
}

fn first_touch(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("first_touch");
    group
        .sample_size(10)
        .warm_up_time(Duration::from_millis(200))
        .throughput(Throughput::Bytes(BYTES));
    let ram = fresh(Backing::Anonymous, HugePages::Off);
    fill(&ram, Content::Full);
    let file = target();
    let image = ram.save(&file, 0, &mut |_| {}).unwrap();
    drop(ram);
    let read = |ram: &GuestRam| {
        let address = |page| GuestAddress(page * PAGE_SIZE_BYTES);
        (0..BYTES / PAGE_SIZE_BYTES)
            .map(|page| ram.memory().read_obj::<u8>(address(page)).unwrap())
            .fold(0, u8::wrapping_add)
    };
    let cases: [(&str, Maker<'_>); 3] = [
        ("new/4k", Box::new(|| fresh(Backing::Anonymous, HugePages::Off))),
        ("new/thp", Box::new(|| fresh(Backing::Anonymous, HugePages::On))),
        ("restored", Box::new(|| restore(&file, &image))),
    ];
    for (name, make) in &cases {
        group.bench_function(format!("{name}/write"), |bencher| {
            bencher.iter_custom(|iterations| {
                time(iterations, || {
                    let ram = make();
                    let start = Instant::now();
                    fill(&ram, Content::Full);
                    start.elapsed()
                })
            });
        });
    }
    group.bench_function("restored/read", |bencher| {
        bencher.iter_custom(|iterations| {
            time(iterations, || {
                let ram = restore(&file, &image);
                let start = Instant::now();
                std::hint::black_box(read(&ram));
                start.elapsed()
            })
        });
    });
}

/// Maps a file of many extents, and discards its pages one block at a time.
fn restore_and_discard(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("restore");
    group.sample_size(10).warm_up_time(Duration::from_millis(200));
    let ram = fresh(Backing::Anonymous, HugePages::Off);
    fill(&ram, Content::Sparse);
    let file = target();
    let image = ram.save(&file, 0, &mut |_| {}).unwrap();
    group.bench_function(format!("{}_extents", image.extents().len()), |bencher| {
        bencher.iter(|| restore(&file, &image));
    });
    fill(&ram, Content::Full);
    let file = target();
    let image = ram.save(&file, 0, &mut |_| {}).unwrap();
    for range_pages in [16, 512] {
        let ranges: Vec<_> = (0..BYTES / PAGE_SIZE_BYTES / range_pages / 2)
            .map(|index| PageRange::new(Pfn(2 * index * range_pages), range_pages))
            .collect();
        group.bench_function(
            format!("discard_of_file/{}x{range_pages}", ranges.len()),
            |bencher| {
                bencher.iter_custom(|iterations| {
                    time(iterations, || {
                        let ram = restore(&file, &image);
                        fill(&ram, Content::Full);
                        let start = Instant::now();
                        ram.discard(&ranges).unwrap();
                        start.elapsed()
                    })
                });
            },
        );
    }
}

criterion_group!(benches, save, first_touch, restore_and_discard);
criterion_main!(benches);

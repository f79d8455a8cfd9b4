//! Cost of merging memory of this process: scattered single pages, and runs, from the first scan
//! until all is merged.

use std::sync::Arc;
use std::time::Duration;

use criterion::{Criterion, Throughput};
use ebb_abi::{PAGE_SIZE_BYTES, PageRange, Pfn};
use ebb_guest_ram::{
    Backing, GuestRam, HugePages, MergeSession, Populate, RegionSpec, StableMemory, StableSegments,
};
use ebb_page_merge::{Merger, Run, Secret, Settings, StablePages};
use rustix::time::{ClockId, clock_gettime};
use vm_memory::GuestAddress;

const PAGES: usize = 1 << 14;
/// Number of occurrences of a duplicate content; half of the pages have such contents.
const COPIES: usize = 4;
/// Passes until all is merged: one that sees the pages for the first time, and one that finds them
/// unchanged.
const PASSES: u32 = 2;
/// Pages written at a time.
const CHUNK_PAGES: usize = 256;

type Owner = Merger<MergeSession, StablePages<StableMemory>>;

/// Processor time of the calling thread.
fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Random numbers with a fixed seed (G. Marsaglia, "Xorshift RNGs", 2003).
struct Random(u64);

impl Random {
    fn draw(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

/// Numbers of the pages' contents: half of the runs of `run_pages` occur [`COPIES`] times, in
/// random order.
fn contents(run_pages: usize, seed: u64) -> Vec<u64> {
    let runs = PAGES / run_pages;
    let alike = runs / 2;
    let mut order: Vec<usize> =
        (0..runs).map(|run| if run < alike { run % (alike / COPIES) } else { run }).collect();
    let mut random = Random(seed);
    for place in (1..order.len()).rev() {
        order.swap(place, random.draw() as usize % (place + 1));
    }
    order
        .into_iter()
        .flat_map(|run| (run * run_pages) as u64..((run + 1) * run_pages) as u64)
        .collect()
}

fn page(content: u64) -> impl Iterator<Item = u8> {
    let mut random = Random((content + 1).wrapping_mul(0x9fb2_1c65_1e98_df25));
    (0..PAGE_SIZE_BYTES / 8).flat_map(move |_| random.draw().to_ne_bytes())
}

/// Memory of small pages with these contents, and its merger.
fn owner(contents: &[u64]) -> Option<(Owner, Arc<GuestRam>)> {
    let segments = StableSegments::new();
    let size_bytes = contents.len() as u64 * PAGE_SIZE_BYTES;
    let region = RegionSpec { start: GuestAddress(0), size_bytes, host_node: None };
    let ram = GuestRam::new(&[region], Backing::Anonymous, HugePages::Off, Populate::Lazy).ok()?;
    if let Err(error) = ram.enable_merging(Arc::clone(&segments)) {
        eprintln!("not measured: {error}");
        return None;
    }
    for (chunk, contents) in contents.chunks(CHUNK_PAGES).enumerate() {
        let bytes: Vec<u8> = contents.iter().flat_map(|content| page(*content)).collect();
        let first = Pfn((chunk * CHUNK_PAGES) as u64);
        ram.write_pages(PageRange::new(first, contents.len() as u64), &bytes).ok()?;
    }
    let ram = Arc::new(ram);
    let settings = Settings { run: Run::Merge, clean_passes: 1, ..Settings::default() };
    let store = StablePages::new(StableMemory::own(segments));
    let memory = MergeSession::new(Arc::clone(&ram)).ok()?;
    let merger = Merger::new(memory, store, Secret([1; 32]), settings).ok()?;
    Some((merger, ram))
}

fn merging(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("merging half of 16,384 pages, four alike, CPU time");
    let freed = PAGES / 2 / COPIES * (COPIES - 1);
    group.throughput(Throughput::Elements(freed as u64));
    group.sample_size(10).measurement_time(Duration::from_secs(2));
    for (name, run_pages) in [("scattered", 1), ("runs of 64", 64)] {
        let mut seed = 1;
        group.bench_function(name, |bencher| {
            bencher.iter_custom(|rounds| {
                let mut spent = Duration::ZERO;
                for _ in 0..rounds {
                    seed += 1;
                    let Some((mut merger, _ram)) = owner(&contents(run_pages, seed)) else {
                        return Duration::from_secs(1);
                    };
                    let begin = cpu_time();
                    for _ in 0..PASSES {
                        while !merger.scan(2048).finished_pass {}
                    }
                    spent += cpu_time().saturating_sub(begin);
                    let sharing = merger.statistics().pages_sharing;
                    assert_eq!(sharing, freed as u64, "all of them are merged");
                }
                spent
            });
        });
    }
    group.finish();
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    merging(&mut criterion);
    criterion.final_summary();
}

//! Cost of the core per page, without the cost of the memory: hashing, the first pass, the steady
//! state, merging.

use std::time::{Duration, Instant};

use criterion::{BatchSize, Criterion, Throughput};
use ebb_abi::{PageRange, Pfn};
use ebb_page_merge::{
    Answer, Merger, Node, PageHash, PageHasher, Run, Secret, Settings, StablePages, StableStore,
    testing::{Guest, SimMemory, SimSlots, World},
};

const PAGES: u64 = 1 << 16;

type Sim = Merger<SimMemory, StablePages<SimSlots>>;

fn merger(content: impl Fn(u64) -> u64) -> (Sim, Guest, World) {
    let world = World::new();
    let guest = world.guest(&[PageRange::new(Pfn(0), PAGES)]);
    (0..PAGES).for_each(|pfn| guest.write(pfn, content(pfn)));
    let settings = Settings { run: Run::Merge, clean_passes: 1, ..Settings::default() };
    let store = StablePages::new(world.slots(0));
    let Ok(merger) = Merger::new(guest.memory(), store, Secret([1; 32]), settings) else {
        unreachable!("the settings are the default, and there is room for one machine")
    };
    (merger, guest, world)
}

fn hashing(criterion: &mut Criterion) {
    let hasher = PageHasher::new(&Secret([1; 32]));
    let mut group = criterion.benchmark_group("hash");
    group.throughput(Throughput::Elements(1));
    let page: Vec<u8> = (0..4096_u32).map(|byte| (byte * 7 + byte / 256) as u8).collect();
    group.bench_function("a page", |bencher| {
        bencher.iter(|| hasher.content(std::hint::black_box(&page)));
    });
    let zeros = vec![0; 4096];
    group.bench_function("zeros", |bencher| {
        bencher.iter(|| hasher.content(std::hint::black_box(&zeros)));
    });
    group.finish();
}

fn passes(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("pass over 65,536 simulated pages");
    group.throughput(Throughput::Elements(PAGES));
    group.sample_size(10).measurement_time(Duration::from_secs(3));
    group.bench_function("first scan", |bencher| {
        bencher.iter_batched(
            || merger(|pfn| 1 + pfn),
            |mut sim| sim.0.scan(u64::MAX),
            BatchSize::PerIteration,
        );
    });
    group.bench_function("unique pages, hash and index", |bencher| {
        bencher.iter_batched(
            || {
                let mut sim = merger(|pfn| 1 + pfn);
                sim.0.scan(u64::MAX);
                sim
            },
            |mut sim| sim.0.scan(u64::MAX),
            BatchSize::PerIteration,
        );
    });
    group.bench_function("pairs, merged", |bencher| {
        bencher.iter_batched(
            || {
                let mut sim = merger(|pfn| 1 + pfn % (PAGES / 2));
                sim.0.scan(u64::MAX);
                sim
            },
            |mut sim| sim.0.scan(u64::MAX),
            BatchSize::PerIteration,
        );
    });
    let (mut steady, _guest, _world) = merger(|pfn| 1 + pfn);
    (0..3).for_each(|_| {
        steady.scan(u64::MAX);
    });
    group.bench_function("steady, unique pages", |bencher| bencher.iter(|| steady.scan(u64::MAX)));
    let bytes = steady.statistics().metadata_bytes as f64 / PAGES as f64;
    println!("metadata of unique pages: {bytes:.2} bytes per page");
    group.finish();
}

fn store(criterion: &mut Criterion) {
    let world = World::new();
    let mut store = StablePages::new(world.slots(0));
    let hash = |number: u64| PageHash::new(number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 8);
    let hashes: Vec<PageHash> = (0..PAGES).map(hash).collect();
    let mut slots = Vec::new();
    for part in hashes.chunks(512) {
        if store.publish(Node::ANY, part, &vec![7; part.len() * 4096], &mut slots).is_err() {
            unreachable!("the simulation has room");
        }
    }
    let mut group = criterion.benchmark_group("local store of 65,536 pages");
    group.throughput(Throughput::Elements(512));
    let mut answers: Vec<Answer> = Vec::new();
    let mut round = 0;
    group.bench_function("512 queries and releases", |bencher| {
        bencher.iter_custom(|rounds| {
            let begin = Instant::now();
            for _ in 0..rounds {
                round = (round + 1) % (hashes.len() / 512);
                answers.clear();
                let part = &hashes[round * 512..(round + 1) * 512];
                if store.query(Node::ANY, part, &mut answers).is_err() {
                    unreachable!("the store is local");
                }
                for answer in &answers {
                    if let Answer::Stable(slot) = answer {
                        store.unused(*slot);
                    }
                }
            }
            begin.elapsed()
        });
    });
    group.finish();
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    hashing(&mut criterion);
    passes(&mut criterion);
    store(&mut criterion);
    criterion.final_summary();
}

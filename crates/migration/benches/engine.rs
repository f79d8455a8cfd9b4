//! Throughput of the engine: zero detection alone, and memory sent from a simulated source over
//! loopback TCP to a target, with 1, 2 and 4 streams.
//!
//! Each iteration is a whole migration of 512 MiB: source, checksums, sockets, receiver and the
//! copy into the target's memory run on the same processors, so the cost in cores is the printed
//! processor time.

#![allow(clippy::unwrap_used, missing_docs, reason = "a benchmark")]

use std::hash::Hasher;
use std::hint::black_box;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use ebb_abi::{PAGE_SIZE_BYTES, PageRange, Pfn};
use ebb_guest_ram::{Backing, GuestRam, HugePages, Populate, RegionSpec};
use ebb_migration::testing::NoWrites;
use ebb_migration::{
    BoxError, Cancel, Config, Guest, Precopy, Receiver, RoundSync, SourceMemory, ZeroPages,
    is_zero_page,
};
use rustix::time::{ClockId, clock_gettime};
use twox_hash::XxHash3_64;
use vm_memory::GuestAddress;

const PAGE: usize = PAGE_SIZE_BYTES as usize;

/// Size of the memory that is migrated.
const MEMORY_BYTES: u64 = 512 << 20;

fn zero_detection(criterion: &mut Criterion) {
    const PAGES: usize = 64;
    let mut group = criterion.benchmark_group("zero_detection");
    group.throughput(Throughput::Bytes((PAGES * PAGE) as u64));
    for (name, place) in [
        ("all zero", None),
        ("first byte", Some(0)),
        ("last byte", Some(PAGE - 1)),
        ("middle", Some(PAGE / 2)),
    ] {
        let mut pages = vec![0_u8; PAGES * PAGE];
        if let Some(place) = place {
            pages.chunks_exact_mut(PAGE).for_each(|page| page[place] = 1);
        }
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                black_box(&pages).chunks_exact(PAGE).filter(|page| is_zero_page(page)).count()
            });
        });
    }
    group.finish();
}

/// The work per byte at the source, step by step, and the socket without the engine.
fn parts(criterion: &mut Criterion) {
    const PIECE: usize = 256 << 10;
    let mut group = criterion.benchmark_group("parts");
    group.throughput(Throughput::Bytes(MEMORY_BYTES)).sample_size(10);
    let source: Vec<u8> = (0..MEMORY_BYTES).map(|byte| (byte / 7 % 251) as u8).collect();
    let mut buffer = vec![0; PIECE];
    group.bench_function("copy to a buffer", |bencher| {
        bencher.iter_custom(|iterations| {
            processor_time(|| {
                for _ in 0..iterations {
                    for piece in source.chunks(PIECE) {
                        buffer.copy_from_slice(piece);
                        black_box(&mut buffer);
                    }
                }
            })
        });
    });
    group.bench_function("copy and hash", |bencher| {
        bencher.iter_custom(|iterations| {
            processor_time(|| {
                for _ in 0..iterations {
                    let mut hasher = XxHash3_64::with_seed(0);
                    for piece in source.chunks(PIECE) {
                        buffer.copy_from_slice(piece);
                        hasher.write(black_box(&buffer));
                    }
                    black_box(hasher.finish());
                }
            })
        });
    });
    group.bench_function("socket, both ends", |bencher| {
        bencher.iter_custom(|iterations| {
            let (mut from, mut to) = pair();
            processor_time(|| {
                std::thread::scope(|scope| {
                    scope.spawn(move || {
                        let mut buffer = vec![0; 512 << 10];
                        while to.read(&mut buffer).unwrap() > 0 {}
                    });
                    for _ in 0..iterations * (MEMORY_BYTES / PIECE as u64) {
                        from.write_all(&buffer).unwrap();
                    }
                    drop(from);
                });
            })
        });
    });
    group.finish();
}

/// Processor time that this process spends in `work`, including system time.
fn processor_time(work: impl FnOnce()) -> Duration {
    let now = || {
        let time = clock_gettime(ClockId::ProcessCPUTime);
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    };
    let start = now();
    work();
    now().saturating_sub(start)
}

/// Content of the source's memory.
#[derive(Clone, Copy)]
enum Content {
    Data,
    Zeros,
}

struct Source(Vec<u8>);

impl SourceMemory for Source {
    fn regions(&self) -> Vec<PageRange> {
        vec![PageRange::new(Pfn(0), MEMORY_BYTES / PAGE_SIZE_BYTES)]
    }

    fn held(&self, range: PageRange, held: &mut Vec<PageRange>) -> Result<(), BoxError> {
        held.push(range);
        Ok(())
    }

    fn read(&self, range: PageRange, bytes: &mut [u8]) -> Result<(), BoxError> {
        let start = range.start.address() as usize;
        bytes.copy_from_slice(&self.0[start..start + bytes.len()]);
        Ok(())
    }
}

/// A guest that does nothing.
struct Idle;

impl Guest for Idle {
    fn flush(&mut self) -> Result<(), BoxError> {
        Ok(())
    }

    fn pause_and_save(&mut self) -> Result<(), BoxError> {
        Ok(())
    }

    fn resume(&mut self) -> Result<(), BoxError> {
        Ok(())
    }

    fn throttle(&mut self, _percent: u8) -> Result<(), BoxError> {
        Ok(())
    }
}

struct Confirmed(TcpStream);

impl RoundSync for Confirmed {
    fn wait_round_done(&mut self, _round: u32) -> Result<(), BoxError> {
        Ok(self.0.read_exact(&mut [0])?)
    }
}

/// A connection over the loopback device.
fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let from = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (to, _) = listener.accept().unwrap();
    from.set_nodelay(true).unwrap();
    to.set_nodelay(true).unwrap();
    (from, to)
}

/// Migrates the source's memory; returns the time it took.
fn migrate(source: &Source, target: &GuestRam, streams: usize, config: Config) -> Duration {
    let (send, receive): (Vec<_>, Vec<_>) = (0..streams).map(|_| pair()).unzip();
    let (rounds, mut confirm) = pair();
    let start = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let receiver = Receiver {
                memory: target,
                streams: receive
                    .into_iter()
                    .map(|stream| Box::new(stream) as Box<dyn Read + Send>)
                    .collect(),
                round_done: &mut |_| Ok(confirm.write_all(&[1])?),
                cancel: Cancel::new(),
            };
            receiver.run().unwrap();
        });
        let precopy = Precopy {
            config,
            memory: source,
            dirty: &mut NoWrites,
            guest: &mut Idle,
            free_pages: None,
            streams: send
                .into_iter()
                .map(|stream| Box::new(stream) as Box<dyn Write + Send>)
                .collect(),
            round_sync: &mut Confirmed(rounds),
            observer: &mut |_| {},
            cancel: Cancel::new(),
        };
        precopy.run().unwrap().complete();
    });
    start.elapsed()
}

fn engine(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("engine");
    group.throughput(Throughput::Bytes(MEMORY_BYTES)).sample_size(10);
    let spec =
        RegionSpec { start: GuestAddress::default(), size_bytes: MEMORY_BYTES, host_node: None };
    // Populated, so that the host's page faults are not measured.
    let target =
        GuestRam::new(&[spec], Backing::Anonymous, HugePages::On, Populate::Prealloc).unwrap();
    for (name, content, zero_pages) in [
        ("data", Content::Data, ZeroPages::Detect),
        ("data, no zero detection", Content::Data, ZeroPages::Send),
        ("zeros", Content::Zeros, ZeroPages::Detect),
    ] {
        let source = Source(match content {
            Content::Data => (0..MEMORY_BYTES).map(|byte| (byte / 7 % 251) as u8).collect(),
            Content::Zeros => {
                let mut zeros = vec![1; MEMORY_BYTES as usize];
                zeros.fill(0);
                zeros
            }
        });
        let config = Config { zero_pages, ..Config::default() };
        for streams in [1, 2, 4] {
            group.bench_function(BenchmarkId::new(name, streams), |bencher| {
                bencher.iter_custom(|iterations| {
                    (0..iterations).map(|_| migrate(&source, &target, streams, config)).sum()
                });
            });
            group.bench_function(
                BenchmarkId::new(format!("{name}, processor time of both ends"), streams),
                |bencher| {
                    bencher.iter_custom(|iterations| {
                        processor_time(|| {
                            for _ in 0..iterations {
                                migrate(&source, &target, streams, config);
                            }
                        })
                    });
                },
            );
        }
    }
    group.finish();
}

criterion_group!(benches, zero_detection, parts, engine);
criterion_main!(benches);

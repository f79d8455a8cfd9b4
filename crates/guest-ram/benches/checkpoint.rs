//! Cost of making memory copy-on-write: fork(2) against write protection by userfaultfd, the pause
//! of a checkpoint; and of a write to memory afterwards.
//!
//! `EBB_BENCH_MIB` sets the size of the memory, 256 MiB by default.

#![allow(clippy::unwrap_used, missing_docs, reason = "a benchmark")]

use std::fs::File;
use std::hint::black_box;
use std::io::Read;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use ebb_abi::{HUGE_PAGE_SIZE_BYTES, PAGE_SIZE_BYTES};
use ebb_guest_ram::{Backing, GuestRam, HugePages, Populate, RegionSpec};
use vm_memory::{Bytes, GuestAddress};

const MIB: u64 = 1 << 20;
/// Writes that are timed together, each to another 2 MiB.
const WRITES: u64 = 64;

const PAGES: [(&str, HugePages); 2] = [("4k", HugePages::Off), ("thp", HugePages::On)];

/// Memory with data in every page.
fn ram(huge_pages: HugePages) -> GuestRam {
    let size = std::env::var("EBB_BENCH_MIB").map_or(256, |size| size.parse().unwrap());
    let spec = RegionSpec { start: GuestAddress(0), size_bytes: size * MIB, host_node: None };
    let ram = GuestRam::new(&[spec], Backing::Anonymous, huge_pages, Populate::Lazy).unwrap();
    fill(&ram);
    ram
}

fn fill(ram: &GuestRam) {
    for address in (0..ram.size_bytes()).step_by(PAGE_SIZE_BYTES as usize) {
        ram.memory().write_obj(address + 1, GuestAddress(address)).unwrap();
    }
}

/// A child that ends when it is told to.
struct Child {
    pid: libc::pid_t,
    /// Closed to end it.
    until: Option<OwnedFd>,
}

impl Child {
    /// Forks; returns how long the call took.
    fn fork() -> (Self, Duration) {
        let mut ends = [0; 2];
        // SAFETY: pipe writes two descriptors into the array.
        assert_eq!(unsafe { libc::pipe(ends.as_mut_ptr()) }, 0);
        // SAFETY: both are open and owned by nothing else.
        let [reader, writer] = ends.map(|end| unsafe { OwnedFd::from_raw_fd(end) });
        let start = Instant::now();
        // SAFETY: the child only closes, reads and exits.
        let pid = unsafe { libc::fork() };
        let elapsed = start.elapsed();
        if pid == 0 {
            drop(writer);
            let _ = File::from(reader).read(&mut [0]);
            // SAFETY: ends the child without running the parent's cleanup.
            unsafe { libc::_exit(0) };
        }
        assert!(pid > 0);
        (Self { pid, until: Some(writer) }, elapsed)
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.until = None;
        // SAFETY: the child is this process's, and its status is not wanted.
        unsafe { libc::waitpid(self.pid, ptr::null_mut(), 0) };
    }
}

/// A userfaultfd with write protection of one memory (include/uapi/linux/userfaultfd.h), apart from
/// the crate's own, which releases blocks of one size only.
struct Protection<'a> {
    descriptor: OwnedFd,
    ram: &'a GuestRam,
}

impl<'a> Protection<'a> {
    fn new(ram: &'a GuestRam) -> Self {
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
        // SAFETY: the call creates a new descriptor and touches no memory.
        let descriptor = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
        assert!(descriptor >= 0, "userfaultfd(2): {}", std::io::Error::last_os_error());
        // SAFETY: the call has just returned this descriptor, which nothing else owns.
        let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor as i32) };
        let this = Self { descriptor, ram };
        let region = &ram.regions()[0];
        this.ioctl(0xc018_aa3f, &mut [0xaa, 1, 0]);
        this.ioctl(0xc020_aa00, &mut [region.host_address, region.size_bytes, 1 << 1, 0]);
        this
    }

    fn ioctl<const N: usize>(&self, request: libc::Ioctl, argument: &mut [u64; N]) {
        // SAFETY: the requests used read and write structures of as many 64-bit numbers.
        let result =
            unsafe { libc::ioctl(self.descriptor.as_raw_fd(), request, argument.as_mut_ptr()) };
        assert!(result >= 0, "{request:#x}: {}", std::io::Error::last_os_error());
    }

    fn protect(&self) {
        let region = &self.ram.regions()[0];
        self.ioctl(0xc018_aa06, &mut [region.host_address, region.size_bytes, 1]);
    }

    fn release(&self, address: u64, size_bytes: u64) {
        self.ioctl(0xc018_aa06, &mut [address, size_bytes, 0]);
    }

    /// Copies and releases the block of each page that a thread waits to write to, until `stop`.
    fn answer(&self, block_bytes: u64, stop: &AtomicBool) {
        let mut file = File::from(self.descriptor.try_clone().unwrap());
        let mut copy = vec![0_u8; block_bytes as usize];
        let mut message = [0; 32];
        while !stop.load(Ordering::Relaxed) {
            if file.read(&mut message).is_err() {
                continue;
            }
            let address = u64::from_ne_bytes(message[16..24].try_into().unwrap());
            let address = address - address % block_bytes;
            let guest = address - self.ram.regions()[0].host_address;
            self.ram.memory().read_slice(&mut copy, GuestAddress(guest)).unwrap();
            self.release(address, block_bytes);
        }
    }
}

/// Writes to one page of each of some blocks of 2 MiB; returns how long that took.
fn write_some(ram: &GuestRam) -> Duration {
    let start = Instant::now();
    for index in 0..WRITES {
        let block = index * (ram.size_bytes() / HUGE_PAGE_SIZE_BYTES) / WRITES;
        let address = block * HUGE_PAGE_SIZE_BYTES + 5 * PAGE_SIZE_BYTES;
        ram.memory().write_obj(index, GuestAddress(address)).unwrap();
    }
    start.elapsed()
}

fn time(total: u64, mut once: impl FnMut() -> Duration) -> Duration {
    (0..total).map(|_| once()).sum()
}

/// The pause: everything is writable before, as after a checkpoint.
fn pause(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("pause");
    group.sample_size(10).warm_up_time(Duration::from_millis(100));
    group.measurement_time(Duration::from_secs(2));
    for (name, huge_pages) in PAGES {
        let memory = ram(huge_pages);
        group.bench_function(format!("fork/{name}"), |bencher| {
            bencher.iter_custom(|iterations| {
                time(iterations, || {
                    let (child, elapsed) = Child::fork();
                    drop(child);
                    fill(&memory);
                    elapsed
                })
            });
        });
        drop(memory);
        let memory = ram(huge_pages);
        memory.enable_background_saves().unwrap();
        group.bench_function(format!("userfaultfd/{name}"), |bencher| {
            bencher.iter_custom(|iterations| {
                time(iterations, || {
                    let prepared = memory.prepare_background_save().unwrap();
                    let start = Instant::now();
                    let protected = prepared.protect().unwrap();
                    let elapsed = start.elapsed();
                    drop(protected);
                    fill(&memory);
                    elapsed
                })
            });
        });
    }
}

/// Writes to copy-on-write memory; the time is that of one of them.
fn write(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("write");
    group.sample_size(10).warm_up_time(Duration::from_millis(100));
    group.measurement_time(Duration::from_secs(2));
    for (name, huge_pages) in PAGES {
        group.bench_function(format!("fork/{name}"), |bencher| {
            bencher.iter_custom(|iterations| {
                time(iterations.div_ceil(8), || {
                    // New each time: a write after a fork splits a huge page for good.
                    let memory = ram(huge_pages);
                    let (child, _) = Child::fork();
                    let elapsed = write_some(&memory);
                    drop(child);
                    elapsed
                }) * 8
                    / WRITES as u32
            });
        });
        let blocks: &[(&str, u64)] = match huge_pages {
            HugePages::Off => &[("4k", 4 << 10), ("64k", 64 << 10), ("2m", 2 << 20)],
            HugePages::On => &[("2m", 2 << 20)],
        };
        let memory = ram(huge_pages);
        let protection = Protection::new(&memory);
        for (block, block_bytes) in blocks {
            group.bench_function(format!("userfaultfd/{name}/{block}"), |bencher| {
                bencher.iter_custom(|iterations| {
                    let stop = AtomicBool::new(false);
                    std::thread::scope(|scope| {
                        scope.spawn(|| protection.answer(*block_bytes, &stop));
                        let elapsed = time(iterations, || {
                            protection.protect();
                            write_some(&memory)
                        });
                        stop.store(true, Ordering::Relaxed);
                        let region = &memory.regions()[0];
                        protection.release(region.host_address, region.size_bytes);
                        elapsed / WRITES as u32
                    })
                });
            });
        }
        black_box(&memory);
    }
}

criterion_group!(benches, pause, write);
criterion_main!(benches);

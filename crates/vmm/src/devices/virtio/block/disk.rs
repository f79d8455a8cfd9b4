//! Execution of requests, by any thread of a disk and without the transport's lock.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ebb_guest_ram::GuestMemory;
use virtio_bindings::virtio_blk as blk;

use super::SECTOR_BYTES;
use super::guest_io::{Piece, scatter, split, total_bytes};
use super::image::Image;
use super::request::{Request, Status, Task, answer};
use crate::api::disks::DiskRequests;

/// What the threads of a disk share.
pub(super) struct Disk {
    pub image: Image,
    pub memory: GuestMemory,
    /// Size that the guest knows.
    sectors: AtomicU64,
    name: [u8; blk::VIRTIO_BLK_ID_BYTES as usize],
    pub counters: Arc<Counters>,
}

/// Counts of completed requests.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub reads: AtomicU64,
    pub writes: AtomicU64,
    pub flushes: AtomicU64,
    pub discards: AtomicU64,
    pub zeroes: AtomicU64,
    pub errors: AtomicU64,
    pub read_bytes: AtomicU64,
    pub written_bytes: AtomicU64,
    pub discarded_bytes: AtomicU64,
    pub zeroed_bytes: AtomicU64,
}

/// When a write is completed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Durability {
    /// When a flush after it is.
    Flush,
    /// When it is on the disk: the driver cannot flush (section 5.2.6.2).
    Write,
}

/// A request that is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Done {
    /// Index of the chain.
    pub head: u16,
    /// Bytes that the device has written to guest memory.
    pub written: u32,
}

impl Disk {
    pub fn new(image: Image, memory: GuestMemory, sectors: u64, index: usize) -> Self {
        let mut name = [0; blk::VIRTIO_BLK_ID_BYTES as usize];
        let text = format!("ebb-disk-{index}");
        name.iter_mut().zip(text.bytes()).for_each(|(to, from)| *to = from);
        let sectors = AtomicU64::new(sectors);
        Self { image, memory, sectors, name, counters: Arc::default() }
    }

    /// The same disk with another image.
    pub fn with_image(&self, image: Image, sectors: u64) -> Self {
        Self {
            image,
            memory: self.memory.clone(),
            sectors: AtomicU64::new(sectors),
            name: self.name,
            counters: self.counters.clone(),
        }
    }

    pub fn sectors(&self) -> u64 {
        self.sectors.load(Ordering::Relaxed)
    }

    pub fn set_sectors(&self, sectors: u64) {
        self.sectors.store(sectors, Ordering::Relaxed);
    }

    /// Executes a request and writes its answer.
    pub fn execute(&self, request: &Request, durability: Durability) -> Done {
        let result = self.perform(&request.task, durability);
        self.complete(request, result)
    }

    /// Executes a request if it need not wait for the disk.
    pub fn execute_at_once(&self, request: &Request, durability: Durability) -> Option<Done> {
        let failed = |_| Status::IoError;
        let result = match &request.task {
            Task::Read { offset, into } => {
                self.image.read_at_once(&self.memory, into, *offset)?.map_err(failed)
            }
            Task::Write { offset, from } if durability == Durability::Flush => {
                self.image.write_at_once(&self.memory, from, *offset)?.map_err(failed)
            }
            Task::Name(_) | Task::Refuse(_) => self.perform(&request.task, Durability::Flush),
            _ => return None,
        };
        Some(self.complete(request, result))
    }

    fn complete(&self, request: &Request, result: Result<(), Status>) -> Done {
        let mut written = 0;
        match (&result, &request.task) {
            (Ok(()), Task::Read { into, .. }) => written = total_bytes(into) as u32,
            (Ok(()), Task::Name(into)) => {
                written = total_bytes(into).min(self.name.len() as u64) as u32;
            }
            _ => {}
        }
        let status = result.err().unwrap_or(Status::Ok);
        self.counters.count(&request.task, status);
        written += answer(&self.memory, request.status, status);
        Done { head: request.head, written }
    }

    fn perform(&self, task: &Task, durability: Durability) -> Result<(), Status> {
        let result = match task {
            Task::Read { offset, into } => self.image.read(&self.memory, into, *offset),
            Task::Write { offset, from } => {
                self.image.write(&self.memory, from, *offset).and_then(|()| self.sync(durability))
            }
            Task::Flush => self.image.flush(),
            Task::Discard(ranges) => {
                ranges.iter().try_for_each(|range| self.image.discard(range.offset, range.bytes))
            }
            Task::Zero(ranges) => ranges
                .iter()
                .try_for_each(|(range, unmap)| self.image.zero(range.offset, range.bytes, *unmap))
                .and_then(|()| self.sync(durability)),
            Task::Name(into) => self.write_name(into),
            Task::Refuse(status) => return Err(*status),
        };
        // The guest gets no more than this; the kernel has logged the disk's own errors.
        result.map_err(|error| {
            tracing::debug!("a request of the guest failed: {error}");
            Status::IoError
        })
    }

    fn sync(&self, durability: Durability) -> io::Result<()> {
        match durability {
            Durability::Flush => Ok(()),
            Durability::Write => self.image.flush(),
        }
    }

    fn write_name(&self, into: &[Piece]) -> io::Result<()> {
        let bytes = total_bytes(into).min(self.name.len() as u64);
        let (into, _) = split(into, bytes).ok_or(io::ErrorKind::InvalidInput)?;
        scatter(&self.memory, &into, &self.name[..bytes as usize])
    }
}

impl Counters {
    pub fn requests(&self) -> DiskRequests {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        DiskRequests {
            reads: get(&self.reads),
            read_bytes: get(&self.read_bytes),
            writes: get(&self.writes),
            written_bytes: get(&self.written_bytes),
            flushes: get(&self.flushes),
            discards: get(&self.discards),
            discarded_bytes: get(&self.discarded_bytes),
            zeroes: get(&self.zeroes),
            zeroed_bytes: get(&self.zeroed_bytes),
            errors: get(&self.errors),
        }
    }

    fn count(&self, task: &Task, status: Status) {
        let add = |counter: &AtomicU64, number| {
            counter.fetch_add(number, Ordering::Relaxed);
        };
        if status != Status::Ok {
            return add(&self.errors, 1);
        }
        match task {
            Task::Read { into, .. } => {
                add(&self.reads, 1);
                add(&self.read_bytes, total_bytes(into));
            }
            Task::Write { from, .. } => {
                add(&self.writes, 1);
                add(&self.written_bytes, total_bytes(from));
            }
            Task::Flush => add(&self.flushes, 1),
            Task::Discard(ranges) => {
                add(&self.discards, 1);
                add(&self.discarded_bytes, ranges.iter().map(|range| range.bytes).sum());
            }
            Task::Zero(ranges) => {
                add(&self.zeroes, 1);
                add(&self.zeroed_bytes, ranges.iter().map(|(range, _)| range.bytes).sum());
            }
            Task::Name(_) | Task::Refuse(_) => {}
        }
    }
}

/// Sectors of a size in bytes.
pub(super) fn to_sectors(bytes: u64) -> u64 {
    bytes / SECTOR_BYTES
}

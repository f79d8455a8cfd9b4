//! Block device (virtio 1.3 section 5.2).
//!
//! The device's thread takes requests from the queue (`request`), and threads of a pool (`pool`)
//! execute them side by side on the image (`disk`, `image`); without a pool, the device's thread
//! executes them itself.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use ebb_guest_ram::GuestMemory;
use rustix::event::PollFlags;
use rustix::fs::{Advice, FileType, FlockOperation};
use virtio_bindings::virtio_blk as blk;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use virtio_queue::{Queue, QueueState, QueueT};

use super::state::DeviceState;
use super::{HostEvents, VirtioDevice, Work, is_refused, ring};
use crate::api::disks::{DiskInfo, MOST_BYTES};
use crate::config::{DiskConfig, DiskFormat, Switch};
use crate::devices::throttle::{Admission, Throttle};
use crate::exit::ExitSignal;
use crate::seccomp::{Filters, ThreadKind};

mod check;
mod disk;
#[cfg(any(test, feature = "testing"))]
mod fuzzing;
mod guest_io;
mod header;
mod image;
mod open;
mod pool;
mod qcow2;
mod raw;
mod request;

use disk::{Disk, Done, Durability, to_sectors};
#[cfg(any(test, feature = "testing"))]
pub use fuzzing::fuzz_qcow2_images;
pub use open::{DiskError, DiskFiles, DiskLock, ReplaceError, ResizeError, modified_unix_ns};
use open::{Opened, lock};
use pool::Pool;
pub(crate) use raw::BLKDISCARD;
use request::{Bounds, DISCARD_BYTES, DISCARD_RANGES, Request, Task, ZERO_BYTES, ZERO_RANGES};

const DEVICE_ID: u32 = 2;
const QUEUE_SIZE: u16 = 128;
const SECTOR_BYTES: u64 = 512;
/// Most requests processed in one call, which holds the transport's lock.
const REQUESTS_A_CALL: usize = 16;
/// Bytes transferred after which a call ends.
const BYTES_A_CALL: u64 = 4 << 20;
/// Largest transfer that the device's thread tries by itself, in bytes: what the page cache can
/// serve takes less time than handing it to another thread.
const BYTES_AT_ONCE: u64 = 64 << 10;
/// Requests in flight, from which on the queue waits. A guest that names a chain again before it
/// was returned can have more requests than the queue has entries.
const MOST_IN_FLIGHT: usize = QUEUE_SIZE as usize;
/// Threads of a disk, besides the one of its queue.
pub const THREADS: usize = 4;
/// How many times larger a disk can become while its machine runs.
const MOST_GROWTH: u64 = 16;
/// Size that any disk can reach, in bytes.
const LEAST_GROWTH_BYTES: u64 = 64 << 30;
/// Descriptors for data in one request: header and status take two (`seg_max`).
const MAX_SEGMENTS: u16 = QUEUE_SIZE - 2;
/// Largest length of one of them, in bytes (`size_max`); that of Linux (`BLK_MAX_SEGMENT_SIZE`).
const MAX_SEGMENT_BYTES: u32 = 64 << 10;
/// Largest transfer of one request, in bytes.
const MAX_TRANSFER_BYTES: u64 = MAX_SEGMENTS as u64 * MAX_SEGMENT_BYTES as u64;
/// Sectors to which discarded ranges should be aligned, for the guest's file systems: holes of
/// files on the host consist of pages.
const DISCARD_ALIGNMENT_SECTORS: u32 = 8;
/// Size of the configuration space (section 5.2.4), up to `write_zeroes_may_unmap` and its padding.
const CONFIG_BYTES: usize = 60;

/// The device.
pub struct Block {
    disk: Arc<Disk>,
    pool: Option<Pool>,
    readonly: bool,
    path: PathBuf,
    /// Path of the image that this one is an overlay of, if it is one.
    base_path: PathBuf,
    queue: Option<Queue>,
    /// Whether the driver may use indirect tables (section 2.7.5.3).
    has_indirect: bool,
    durability: Durability,
    /// Largest size that the disk can get, in bytes: the monitor limits the sizes of its files
    /// (RLIMIT_FSIZE) when it starts.
    most_bytes: u64,
    /// The same image, opened once more for [`VirtioDevice::written_file`]; none if it is
    /// read-only. Linux reports a failed write-back once for each open file (errseq_t): what the
    /// other one reports must not be missing from the guest's flush or from the hand-over.
    writeback: Option<File>,
    throttle: Arc<Throttle>,
}

impl Block {
    /// Opens the image; requests are in `memory`.
    pub fn open(
        config: &DiskConfig,
        index: usize,
        memory: GuestMemory,
        when: DiskLock,
    ) -> Result<Self, DiskError> {
        Self::of(config, DiskFiles::open(config, when)?, index, memory, when)
    }

    /// The disk in open files, which are locked or not yet.
    ///
    /// # Errors
    /// [`DiskError`]
    pub fn of(
        config: &DiskConfig,
        files: DiskFiles,
        index: usize,
        memory: GuestMemory,
        when: DiskLock,
    ) -> Result<Self, DiskError> {
        let Opened { image, writeback, bytes } = Opened::new(config, files, when)?;
        Ok(Self {
            disk: Arc::new(Disk::new(image, memory, to_sectors(bytes), index)),
            pool: None,
            readonly: config.readonly.is_on(),
            path: std::path::absolute(config.top()).unwrap_or_else(|_| config.top().to_owned()),
            base_path: config.path.clone(),
            queue: None,
            has_indirect: false,
            durability: Durability::Flush,
            most_bytes: bytes.saturating_mul(MOST_GROWTH).clamp(LEAST_GROWTH_BYTES, MOST_BYTES),
            writeback,
            throttle: Arc::new(Throttle::new(config.limits, Instant::now())),
        })
    }

    /// Executes requests in threads from now on, side by side. Without this the device's thread
    /// executes one after the other.
    ///
    /// # Errors
    /// A thread could not be started.
    pub fn start_threads(
        &mut self,
        name: &str,
        filters: &Filters,
        exit: &Arc<ExitSignal>,
    ) -> io::Result<()> {
        self.pool = Some(Pool::start(name, THREADS, filters, exit)?);
        Ok(())
    }

    /// The disk for the API, apart from its name.
    pub fn info(&self) -> DiskInfo {
        let disk = &self.disk;
        DiskInfo {
            device: String::new(),
            path: self.path.clone(),
            format: disk.image.format(),
            size_bytes: disk.sectors() * SECTOR_BYTES,
            readonly: self.readonly,
            direct: disk.image.is_direct(),
            requests: disk.counters.requests(),
        }
    }

    /// Largest size that its file can get, in bytes.
    pub fn most_file_bytes(&self) -> u64 {
        match (self.readonly, self.disk.image.format()) {
            (true, _) => 0,
            (false, DiskFormat::Raw) => self.most_bytes,
            // With its tables, and what is in the file already.
            (false, DiskFormat::Qcow2) => self.most_bytes.saturating_mul(2),
        }
    }

    /// Gives the disk the size of its image, or its image a new size if the format has one of its
    /// own. Returns the size in bytes; the caller notifies the driver.
    ///
    /// # Errors
    /// The size cannot be used; the disk is unchanged.
    pub fn resize(&mut self, size_bytes: Option<u64>) -> Result<u64, ResizeError> {
        let image = &self.disk.image;
        let known_bytes = self.disk.sectors() * SECTOR_BYTES;
        let bytes = match (image.format(), size_bytes) {
            (DiskFormat::Raw, Some(_)) => return Err(ResizeError::SizeOfRaw),
            (DiskFormat::Raw, None) => image.size_bytes().map_err(ResizeError::Image)?,
            (DiskFormat::Qcow2, None) => return Err(ResizeError::NoSize),
            (DiskFormat::Qcow2, Some(bytes)) => bytes,
        };
        let block_bytes = image.block_bytes();
        if !bytes.is_multiple_of(u64::from(block_bytes)) {
            return Err(ResizeError::OddSize { bytes, block_bytes });
        }
        if bytes < known_bytes {
            return Err(ResizeError::Shrinks { bytes, known_bytes });
        }
        if bytes > self.most_bytes {
            return Err(ResizeError::TooLarge { bytes, most_bytes: self.most_bytes });
        }
        image.grow(bytes).map_err(ResizeError::Image)?;
        self.disk.set_sectors(to_sectors(bytes));
        Ok(bytes)
    }

    /// Path of its image, or of the one that it is an overlay of.
    pub fn base_path(&self) -> &Path {
        &self.base_path
    }

    /// The file that the guest's writes go to, or that it reads, for reading by way of the page
    /// cache.
    pub fn file(&self) -> &File {
        self.writeback.as_ref().unwrap_or(self.disk.image.file())
    }

    /// Whether the guest's writes are refused.
    pub fn readonly(&self) -> Switch {
        if self.readonly { Switch::On } else { Switch::Off }
    }

    /// Gives the disk another image, or its own with another size: `files` are open for it, two for
    /// a disk that is written to. No request is in flight; the caller notifies the driver.
    ///
    /// # Errors
    /// The image cannot be used; the disk is unchanged.
    pub fn replace(&mut self, path: &Path, files: Vec<File>) -> Result<(), ReplaceError> {
        let old = &self.disk.image;
        if old.base_file().is_some() {
            return Err(ReplaceError::Option { option: "overlay" });
        }
        if old.is_direct() {
            return Err(ReplaceError::Option { option: "direct=on" });
        }
        let mut files = files.into_iter();
        let (file, writeback) = match (files.next(), files.next(), files.next()) {
            (Some(file), None, None) if self.readonly => (file, None),
            (Some(file), Some(again), None) if !self.readonly => (file, Some(again)),
            _ if self.readonly => return Err(ReplaceError::Files("one open file is needed")),
            _ => return Err(ReplaceError::Files("two open files of the image are needed")),
        };
        let identity = |file: &File| {
            let stat = rustix::fs::fstat(file).ok()?;
            let kind = FileType::from_raw_mode(stat.st_mode);
            let is_image = matches!(kind, FileType::RegularFile | FileType::BlockDevice);
            is_image.then_some((stat.st_dev, stat.st_ino))
        };
        let id = identity(&file)
            .ok_or(ReplaceError::Files("it is neither a file nor a block device"))?;
        if writeback.as_ref().is_some_and(|again| identity(again) != Some(id)) {
            return Err(ReplaceError::Files("the two open files are not the same"));
        }
        let (most_bytes, format) = (self.most_bytes, old.format());
        let fitting = |bytes: u64| {
            let error = ResizeError::TooLarge { bytes, most_bytes };
            if bytes > most_bytes { Err(ReplaceError::Size(error)) } else { Ok(()) }
        };
        if identity(old.file()) == Some(id) {
            // It is locked already.
            let failed = |source| DiskError::Open { path: path.to_owned(), source };
            let bytes = old.size_bytes().map_err(failed)?;
            fitting(bytes)?;
            self.disk.set_sectors(to_sectors(bytes));
            return Ok(());
        }
        // Refused with EBADF if it is open for reading only (pwrite(2)).
        if !self.readonly && rustix::io::pwrite(&file, &[], 0).is_err() {
            return Err(ReplaceError::Files("the first file is not open for writing"));
        }
        let opened = Opened::replacing(file, writeback, path, format, self.readonly())?;
        fitting(opened.bytes)?;
        old.write_tables().map_err(ReplaceError::Tables)?;
        if format == DiskFormat::Raw {
            // What is still to be written back is in the page cache, for every reader. After an
            // error, the lock stays until it is written.
            let _ = rustix::fs::flock(old.file(), FlockOperation::Unlock);
        }
        let disk = self.disk.with_image(opened.image, to_sectors(opened.bytes));
        let old = std::mem::replace(&mut self.disk, Arc::new(disk));
        // The calling thread may not sync files.
        if let Some(pool) = self.pool.as_ref().filter(|_| !self.readonly) {
            pool.write_back(old);
        }
        self.writeback = opened.writeback;
        (self.path, self.base_path) = (path.to_owned(), path.to_owned());
        Ok(())
    }

    fn bounds(&self) -> Bounds {
        Bounds {
            sectors: self.disk.sectors(),
            block_bytes: self.disk.image.block_bytes(),
            transfer_bytes: MAX_TRANSFER_BYTES,
            readonly: self.readonly,
        }
    }

    /// Puts requests on the used ring; returns whether the driver must be interrupted.
    fn put_used(&self, queue: &mut Queue, done: &[Done]) -> bool {
        let before = queue.next_used();
        let used: Vec<_> = done.iter().map(|done| (done.head, done.written)).collect();
        if ring::publish(queue, &self.disk.memory, &used).is_err() {
            crate::devices::guest_log!("virtio-blk: the used ring cannot be written");
            return false;
        }
        ring::wants_interrupt(queue, &self.disk.memory, before)
    }

    /// Executes a request or gives it to a thread, which returns `None`.
    fn dispatch(&self, request: Request) -> Option<Done> {
        let Some(pool) = &self.pool else {
            return Some(self.disk.execute(&request, self.durability));
        };
        let at_once = if request.limited_bytes() <= BYTES_AT_ONCE {
            self.disk.execute_at_once(&request, self.durability)
        } else {
            None
        };
        if at_once.is_none() {
            pool.submit(&self.disk, request, self.durability);
        }
        at_once
    }
}

impl VirtioDevice for Block {
    fn device_id(&self) -> u32 {
        DEVICE_ID
    }

    fn thread_kind(&self) -> ThreadKind {
        ThreadKind::Disk
    }

    fn features(&self) -> u64 {
        let mut features = 1 << VIRTIO_RING_F_EVENT_IDX
            | 1 << VIRTIO_RING_F_INDIRECT_DESC
            | 1 << blk::VIRTIO_BLK_F_FLUSH
            | 1 << blk::VIRTIO_BLK_F_SEG_MAX
            | 1 << blk::VIRTIO_BLK_F_SIZE_MAX;
        if self.readonly {
            features |= 1 << blk::VIRTIO_BLK_F_RO;
        } else {
            features |= 1 << blk::VIRTIO_BLK_F_DISCARD | 1 << blk::VIRTIO_BLK_F_WRITE_ZEROES;
        }
        if u64::from(self.disk.image.block_bytes()) != SECTOR_BYTES {
            features |= 1 << blk::VIRTIO_BLK_F_BLK_SIZE;
        }
        features
    }

    fn queue_sizes(&self) -> Vec<u16> {
        vec![QUEUE_SIZE]
    }

    fn throttle(&self) -> Option<&Arc<Throttle>> {
        Some(&self.throttle)
    }

    fn disk_bytes(&self) -> Option<u64> {
        Some(self.disk.sectors() * SECTOR_BYTES)
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let mut config = [0u8; CONFIG_BYTES];
        let mut set = |at: usize, bytes: &[u8]| {
            config[at..at + bytes.len()].copy_from_slice(bytes);
        };
        let sectors = |bytes: u64| (bytes / SECTOR_BYTES) as u32;
        // capacity, size_max, seg_max, blk_size.
        set(0, &self.disk.sectors().to_le_bytes());
        set(8, &MAX_SEGMENT_BYTES.to_le_bytes());
        set(12, &u32::from(MAX_SEGMENTS).to_le_bytes());
        set(20, &self.disk.image.block_bytes().to_le_bytes());
        if !self.readonly {
            // max_discard_sectors, max_discard_seg, discard_sector_alignment,
            // max_write_zeroes_sectors, max_write_zeroes_seg, write_zeroes_may_unmap.
            set(36, &sectors(DISCARD_BYTES).to_le_bytes());
            set(40, &DISCARD_RANGES.to_le_bytes());
            set(44, &DISCARD_ALIGNMENT_SECTORS.to_le_bytes());
            set(48, &sectors(ZERO_BYTES).to_le_bytes());
            set(52, &ZERO_RANGES.to_le_bytes());
            set(56, &[1]);
        }
        for (index, byte) in data.iter_mut().enumerate() {
            let position =
                usize::try_from(offset).ok().and_then(|offset| offset.checked_add(index));
            *byte = position.and_then(|position| config.get(position)).copied().unwrap_or(0);
        }
    }

    fn write_config(&mut self, _offset: u64, _data: &[u8]) {}

    fn activate(&mut self, features: u64, queues: Vec<Queue>) -> Result<(), String> {
        self.durability = if features & 1 << blk::VIRTIO_BLK_F_FLUSH == 0 {
            Durability::Write
        } else {
            Durability::Flush
        };
        self.has_indirect = features & 1 << VIRTIO_RING_F_INDIRECT_DESC != 0;
        self.queue = queues.into_iter().next().filter(Queue::ready);
        if let Some(queue) = &mut self.queue {
            queue.set_event_idx(features & 1 << VIRTIO_RING_F_EVENT_IDX != 0);
        }
        self.queue.as_ref().map(|_| ()).ok_or_else(|| "the request queue is not ready".to_owned())
    }

    fn process_queue(&mut self, _index: usize) -> Work {
        let mut work = Work::default();
        let Some(mut queue) = self.queue.take() else { return work };
        let memory = self.disk.memory.clone();
        let bounds = self.bounds();
        let in_flight = self.pool.as_ref().map_or(0, Pool::in_flight);
        // When they are done, the queue is looked at again.
        let room = MOST_IN_FLIGHT.saturating_sub(in_flight);
        work.more = room > 0;
        let mut transferred = 0;
        let mut all_done = Vec::new();
        for _ in 0..REQUESTS_A_CALL.min(room) {
            let Some(chain) = ring::pop(&mut queue, &memory) else {
                work.more = false;
                break;
            };
            let head = chain.head_index();
            let mut ends = false;
            let done = if !self.has_indirect && is_refused(&queue, &memory, head) {
                Some(Done { head, written: 0 })
            } else if let Some(request) = Request::parse(chain, &memory, &bounds) {
                let bytes = request.limited_bytes();
                if self.throttle.admit(bytes, Instant::now()) == Admission::Later {
                    ring::unpop(&mut queue, 1);
                    work.more = false;
                    break;
                }
                transferred += bytes;
                let synced = match request.task {
                    Task::Flush => true,
                    Task::Write { .. } | Task::Zero(_) => self.durability == Durability::Write,
                    _ => false,
                };
                let done = self.dispatch(request);
                // What a thread does takes no time here.
                ends = done.is_some() && (synced || transferred >= BYTES_A_CALL);
                done
            } else {
                Some(Done { head, written: 0 })
            };
            work.served = true;
            all_done.extend(done);
            if ends {
                break;
            }
        }
        work.interrupt = self.put_used(&mut queue, &all_done);
        self.queue = Some(queue);
        work
    }

    fn host_events(&self) -> Option<HostEvents> {
        self.pool.as_ref().map(Pool::host_events)
    }

    fn on_host_events(&mut self, _ready: PollFlags) -> Work {
        let Some(pool) = &self.pool else { return Work::default() };
        let was_full = pool.in_flight() >= MOST_IN_FLIGHT;
        let done = pool.take_done();
        let Some(mut queue) = self.queue.take() else { return Work::default() };
        let interrupt = self.put_used(&mut queue, &done);
        self.queue = Some(queue);
        Work { interrupt, more: was_full, served: !done.is_empty(), ..Work::default() }
    }

    fn finish_requests(&mut self) -> Work {
        let Some(pool) = &self.pool else { return Work::default() };
        pool.drain();
        self.on_host_events(PollFlags::IN)
    }

    fn reset(&mut self) {
        if let Some(pool) = &self.pool {
            pool.forget();
        }
        self.queue = None;
    }

    fn queue_states(&self) -> Vec<QueueState> {
        self.queue.iter().map(Queue::state).collect()
    }

    fn save(&mut self) -> DeviceState {
        // For those who copy the image along with the snapshot.
        if let Err(error) = self.disk.image.write_tables() {
            tracing::warn!("the disk {}: {error}", self.path.display());
        }
        let stat = rustix::fs::fstat(self.disk.image.file());
        let modified_unix_ns = stat.ok().and_then(|stat| modified_unix_ns(&stat));
        DeviceState::Disk { sectors: self.disk.sectors(), modified_unix_ns }
    }

    fn written_file(&self) -> io::Result<Option<File>> {
        self.writeback.as_ref().map(File::try_clone).transpose()
    }

    fn release_exclusive(&mut self) -> Result<(), String> {
        let failed =
            |error: &dyn std::fmt::Display| format!("the disk {}: {error}", self.path.display());
        if !self.readonly {
            self.disk.image.flush().map_err(|error| failed(&error))?;
        }
        let image = &self.disk.image;
        for file in [image.file()].into_iter().chain(image.base_file()) {
            rustix::fs::flock(file, FlockOperation::Unlock).map_err(|error| failed(&error))?;
        }
        Ok(())
    }

    fn acquire_exclusive(&mut self) -> Result<(), String> {
        let readonly = self.readonly();
        let image = &self.disk.image;
        let file = image.file();
        if let Some(base) = image.base_file() {
            lock(base, &self.base_path, Switch::On).map_err(|error| error.to_string())?;
        }
        lock(file, &self.path, readonly).map_err(|error| error.to_string())?;
        // Another host may have written to a shared device since this one read from it. Drops
        // clean pages only, and there are no others.
        rustix::fs::fadvise(file, 0, None, Advice::DontNeed)
            .map_err(io::Error::from)
            .and_then(|()| image.load())
            .map_err(|error| format!("the disk {}: {error}", self.path.display()))
    }

    fn restore(
        &mut self,
        state: &DeviceState,
        driver: Option<(u64, Vec<Queue>)>,
    ) -> Result<(), String> {
        let known = self.disk.sectors();
        match state {
            DeviceState::Disk { sectors, .. } if *sectors == known => {
                driver.map_or(Ok(()), |(features, queues)| self.activate(features, queues))
            }
            DeviceState::Disk { sectors, .. } => Err(format!(
                "the disk has {} bytes, but had {} when the snapshot was taken; \
                 use the image that belongs to the snapshot",
                known * SECTOR_BYTES,
                sectors.saturating_mul(SECTOR_BYTES)
            )),
            _ => Err("its state belongs to another device".to_owned()),
        }
    }
}

#[cfg(test)]
mod driver;
#[cfg(test)]
mod full;
#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;

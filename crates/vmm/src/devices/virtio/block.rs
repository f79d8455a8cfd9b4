//! Block device over a raw file (virtio 1.3 section 5.2).

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ebb_guest_ram::{GuestMemory, WriteLogSlice};
use rustix::fs::{Advice, FileType, FlockOperation, Stat};
use thiserror::Error;
use virtio_bindings::virtio_blk as blk;
use virtio_queue::{DescriptorChain, Queue, QueueOwnedT, QueueState, QueueT, Reader, Writer};
use vm_memory::ByteValued;

use super::state::DeviceState;
use super::{VirtioDevice, Work, is_refused};
use crate::config::{DiskConfig, Switch};
use crate::devices::throttle::{Admission, Throttle};
use crate::file::{Access, open_image};

const DEVICE_ID: u32 = 2;
const QUEUE_SIZE: u16 = 128;
const SECTOR_BYTES: u64 = 512;
/// Most requests processed in one call, which holds the transport's lock.
const REQUESTS_A_CALL: usize = 16;
/// Bytes transferred after which a call ends.
const BYTES_A_CALL: usize = 4 << 20;
/// Descriptors for data in one request: header and status take two (`seg_max`).
const MAX_SEGMENTS: u16 = QUEUE_SIZE - 2;
/// Largest length of one of them, in bytes (`size_max`); that of Linux (`BLK_MAX_SEGMENT_SIZE`).
const MAX_SEGMENT_BYTES: u32 = 64 << 10;
/// Largest transfer of one request, in bytes.
const MAX_TRANSFER_BYTES: usize = MAX_SEGMENTS as usize * MAX_SEGMENT_BYTES as usize;
/// Time for which a block device that another process has locked is tried again: udev locks each
/// one for a moment while it reads its tables (systemd's "Locking Block Device Access").
const LOCK_PATIENCE: Duration = Duration::from_secs(2);
/// Time between two attempts.
const LOCK_RETRY: Duration = Duration::from_millis(20);
/// Size of the buffer that data passes through, in bytes: guest memory is never borrowed.
const COPY_BYTES: usize = 64 << 10;

/// Why a disk cannot be used.
#[derive(Debug, Error)]
pub enum DiskError {
    /// It cannot be opened.
    #[error(
        "cannot open the disk {}: {source}; check the path and its permissions, \
         or add readonly=on",
        path.display()
    )]
    Open {
        /// The image.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Another process has the disk locked.
    #[error(
        "the disk {} is in use by another process; stop that process, \
         or use readonly=on in both",
        path.display()
    )]
    InUse {
        /// The image.
        path: PathBuf,
    },
    /// The size is not a whole number of sectors.
    #[error(
        "the disk {} has {bytes} bytes, which is not a multiple of 512; \
         use `truncate` to enlarge it",
        path.display()
    )]
    OddSize {
        /// The image.
        path: PathBuf,
        /// Its size in bytes.
        bytes: u64,
    },
}

/// When a disk is locked against other processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskLock {
    /// When it is opened.
    Now,
    /// When the machine [acquires it](VirtioDevice::acquire_exclusive): until then it belongs to
    /// the monitor that sends the machine.
    Later,
}

/// The device.
pub struct Block {
    file: File,
    sectors: u64,
    readonly: bool,
    path: PathBuf,
    serial: [u8; blk::VIRTIO_BLK_ID_BYTES as usize],
    memory: GuestMemory,
    queue: Option<Queue>,
    /// The driver cannot flush, so that each write must be on the disk before it is completed
    /// (section 5.2.6.2).
    write_through: bool,
    /// The same image, opened once more for [`VirtioDevice::written_file`]; none if it is
    /// read-only. Linux reports a failed write-back once for each open file (errseq_t): what the
    /// other one reports must not be missing from the guest's flush or from the hand-over.
    writeback: Option<File>,
    throttle: Arc<Throttle>,
}

/// A processed request.
#[derive(Default)]
struct Served {
    /// Bytes that the device has written to guest memory.
    written: u32,
    /// Bytes read from the disk or written to it.
    transferred: usize,
    /// The request waited for the disk.
    synced: bool,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct RequestHeader {
    kind: u32,
    reserved: u32,
    sector: u64,
}

// SAFETY: three integers without padding; every bit pattern is a valid value.
unsafe impl ByteValued for RequestHeader {}

/// Result of a request; the numbers are the status bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Status {
    Ok = blk::VIRTIO_BLK_S_OK as u8,
    IoError = blk::VIRTIO_BLK_S_IOERR as u8,
    Unsupported = blk::VIRTIO_BLK_S_UNSUPP as u8,
}

impl Block {
    /// Opens the image; requests are in `memory`.
    pub fn open(
        config: &DiskConfig,
        index: usize,
        memory: GuestMemory,
        when: DiskLock,
    ) -> Result<Self, DiskError> {
        let readonly = config.readonly.is_on();
        let path = &config.path;
        let open = |source| DiskError::Open { path: path.clone(), source };
        let access = if readonly { Access::Read } else { Access::ReadWrite };
        let file = open_image(path, access).map_err(open)?;
        if when == DiskLock::Now {
            lock(&file, path, config.readonly)?;
        }
        // Seeking to the end also works for block devices, whose metadata report size 0.
        let bytes = rustix::fs::seek(&file, rustix::fs::SeekFrom::End(0))
            .map_err(|error| open(error.into()))?;
        if !bytes.is_multiple_of(SECTOR_BYTES) {
            return Err(DiskError::OddSize { path: path.clone(), bytes });
        }
        let again = format!("/proc/self/fd/{}", file.as_raw_fd());
        let writeback = if readonly {
            None
        } else {
            Some(open_image(again.as_ref(), Access::Read).map_err(open)?)
        };
        let mut serial = [0; blk::VIRTIO_BLK_ID_BYTES as usize];
        let name = format!("ebb-disk-{index}");
        serial[..name.len().min(20)].copy_from_slice(&name.as_bytes()[..name.len().min(20)]);
        let (sectors, path) = (bytes / SECTOR_BYTES, path.clone());
        Ok(Self {
            file,
            sectors,
            readonly,
            path,
            serial,
            memory,
            queue: None,
            write_through: false,
            writeback,
            throttle: Arc::new(Throttle::new(config.limits, Instant::now())),
        })
    }

    /// Processes a request; `None` if it must wait for the limits.
    fn serve(&self, chain: &DescriptorChain<&GuestMemory>) -> Option<Served> {
        let mut served = Served::default();
        let (Ok(mut reader), Ok(mut writer)) =
            (chain.clone().reader(&self.memory), chain.clone().writer(&self.memory))
        else {
            return Some(served);
        };
        // The status byte is the last byte that the device may write.
        let Some(data_bytes) = writer.available_bytes().checked_sub(1) else {
            return Some(served);
        };
        let Ok(mut status_writer) = writer.split_at(data_bytes) else { return Some(served) };
        let payload = reader.available_bytes().saturating_sub(size_of::<RequestHeader>());
        let bytes = payload.saturating_add(data_bytes).min(MAX_TRANSFER_BYTES) as u64;
        if self.throttle.admit(bytes, Instant::now()) == Admission::Later {
            return None;
        }
        let status = match reader.read_obj::<RequestHeader>() {
            Ok(header) => {
                let writes = header.kind == blk::VIRTIO_BLK_T_OUT;
                served.synced =
                    header.kind == blk::VIRTIO_BLK_T_FLUSH || writes && self.write_through;
                self.transfer(header, &mut reader, &mut writer)
            }
            Err(_) => Status::IoError,
        };
        served.transferred = reader.bytes_read() + writer.bytes_written();
        served.written = writer.bytes_written() as u32;
        if status_writer.write_all(&[status as u8]).is_ok() {
            served.written += 1;
        }
        Some(served)
    }

    fn transfer<'a>(
        &self,
        header: RequestHeader,
        reader: &mut Reader<'a, WriteLogSlice<'a>>,
        writer: &mut Writer<'a, WriteLogSlice<'a>>,
    ) -> Status {
        let result = match header.kind {
            blk::VIRTIO_BLK_T_IN => {
                self.position(header.sector, writer.available_bytes()).map(|start| {
                    copy(writer.available_bytes(), |done, buffer| {
                        self.file.read_exact_at(buffer, start + done)?;
                        writer.write_all(buffer)
                    })
                })
            }
            blk::VIRTIO_BLK_T_OUT if self.readonly => None,
            blk::VIRTIO_BLK_T_OUT => {
                self.position(header.sector, reader.available_bytes()).map(|start| {
                    copy(reader.available_bytes(), |done, buffer| {
                        reader.read_exact(buffer)?;
                        self.file.write_all_at(buffer, start + done)
                    })?;
                    if self.write_through { self.file.sync_data() } else { Ok(()) }
                })
            }
            blk::VIRTIO_BLK_T_FLUSH => Some(self.file.sync_data()),
            blk::VIRTIO_BLK_T_GET_ID => {
                let length = writer.available_bytes().min(self.serial.len());
                Some(writer.write_all(&self.serial[..length]))
            }
            _ => return Status::Unsupported,
        };
        match result {
            Some(Ok(())) => Status::Ok,
            Some(Err(_)) | None => Status::IoError,
        }
    }

    /// Byte position of a transfer, if it is inside the disk and consists of whole sectors.
    fn position(&self, sector: u64, bytes: usize) -> Option<u64> {
        let count = bytes as u64 / SECTOR_BYTES;
        let inside = sector.checked_add(count).is_some_and(|end| end <= self.sectors);
        let whole = (bytes as u64).is_multiple_of(SECTOR_BYTES);
        (inside && whole && bytes <= MAX_TRANSFER_BYTES).then(|| sector * SECTOR_BYTES)
    }
}

/// Time of the last write to an image that is a regular file, in nanoseconds since 1970. Block
/// devices have none.
pub fn modified_unix_ns(stat: &Stat) -> Option<u64> {
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return None;
    }
    let seconds = u64::try_from(stat.st_mtime).ok()?;
    seconds.checked_mul(1_000_000_000)?.checked_add(stat.st_mtime_nsec)
}

/// Locks an image, so that no two machines write to it, and none writes while another reads.
fn lock(file: &File, path: &Path, readonly: Switch) -> Result<(), DiskError> {
    let operation = match readonly {
        Switch::On => FlockOperation::NonBlockingLockShared,
        Switch::Off => FlockOperation::NonBlockingLockExclusive,
    };
    let is_block_device = rustix::fs::fstat(file)
        .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice);
    let patience = if is_block_device { LOCK_PATIENCE } else { Duration::ZERO };
    match patiently(patience, || rustix::fs::flock(file, operation)) {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(DiskError::InUse { path: path.to_owned() }),
        Err(error) => Err(DiskError::Open { path: path.to_owned(), source: error.into() }),
    }
}

/// Calls `attempt` until another process does not hold the lock, for `patience` at most.
fn patiently(
    patience: Duration,
    mut attempt: impl FnMut() -> rustix::io::Result<()>,
) -> rustix::io::Result<()> {
    let begin = Instant::now();
    loop {
        match attempt() {
            Err(rustix::io::Errno::WOULDBLOCK) if begin.elapsed() < patience => {
                std::thread::park_timeout(LOCK_RETRY);
            }
            result => return result,
        }
    }
}

/// Moves `bytes` in pieces: `step` gets the number of bytes done and a buffer for the next piece.
fn copy(bytes: usize, mut step: impl FnMut(u64, &mut [u8]) -> io::Result<()>) -> io::Result<()> {
    let mut buffer = vec![0; bytes.min(COPY_BYTES)];
    let mut done = 0;
    while done < bytes {
        let length = (bytes - done).min(COPY_BYTES);
        step(done as u64, &mut buffer[..length])?;
        done += length;
    }
    Ok(())
}

impl VirtioDevice for Block {
    fn device_id(&self) -> u32 {
        DEVICE_ID
    }

    fn features(&self) -> u64 {
        let mut features = 1 << blk::VIRTIO_BLK_F_FLUSH
            | 1 << blk::VIRTIO_BLK_F_SEG_MAX
            | 1 << blk::VIRTIO_BLK_F_SIZE_MAX;
        if self.readonly {
            features |= 1 << blk::VIRTIO_BLK_F_RO;
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
        Some(self.sectors * SECTOR_BYTES)
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        // capacity u64, size_max u32, seg_max u32 (section 5.2.4).
        let mut config = [0u8; 16];
        config[..8].copy_from_slice(&self.sectors.to_le_bytes());
        config[8..12].copy_from_slice(&MAX_SEGMENT_BYTES.to_le_bytes());
        config[12..].copy_from_slice(&u32::from(MAX_SEGMENTS).to_le_bytes());
        for (index, byte) in data.iter_mut().enumerate() {
            let position =
                usize::try_from(offset).ok().and_then(|offset| offset.checked_add(index));
            *byte = position.and_then(|position| config.get(position)).copied().unwrap_or(0);
        }
    }

    fn write_config(&mut self, _offset: u64, _data: &[u8]) {}

    fn activate(&mut self, features: u64, queues: Vec<Queue>) -> Result<(), String> {
        self.write_through = features & 1 << blk::VIRTIO_BLK_F_FLUSH == 0;
        self.queue = queues.into_iter().next().filter(Queue::ready);
        self.queue.as_ref().map(|_| ()).ok_or_else(|| "the request queue is not ready".to_owned())
    }

    fn process_queue(&mut self, _index: usize) -> Work {
        let mut work = Work::default();
        let Some(mut queue) = self.queue.take() else { return work };
        work.more = true;
        let mut transferred = 0;
        for _ in 0..REQUESTS_A_CALL {
            let Some(chain) = queue.pop_descriptor_chain(&self.memory) else {
                work.more = false;
                break;
            };
            let served = if is_refused(&queue, &self.memory, chain.head_index()) {
                Some(Served::default())
            } else {
                self.serve(&chain)
            };
            let Some(served) = served else {
                queue.go_to_previous_position();
                work.more = false;
                break;
            };
            if queue.add_used(&self.memory, chain.head_index(), served.written).is_err() {
                crate::devices::guest_log!("virtio-blk: the used ring cannot be written");
                work.more = false;
                break;
            }
            work.interrupt = true;
            transferred += served.transferred;
            if served.synced || transferred >= BYTES_A_CALL {
                break;
            }
        }
        self.queue = Some(queue);
        work
    }

    fn reset(&mut self) {
        self.queue = None;
    }

    fn queue_states(&self) -> Vec<QueueState> {
        self.queue.iter().map(Queue::state).collect()
    }

    fn save(&mut self) -> DeviceState {
        let modified_unix_ns =
            rustix::fs::fstat(&self.file).ok().and_then(|stat| modified_unix_ns(&stat));
        DeviceState::Disk { sectors: self.sectors, modified_unix_ns }
    }

    fn written_file(&self) -> io::Result<Option<File>> {
        self.writeback.as_ref().map(File::try_clone).transpose()
    }

    fn release_exclusive(&mut self) -> Result<(), String> {
        let failed =
            |error: &dyn std::fmt::Display| format!("the disk {}: {error}", self.path.display());
        if !self.readonly {
            self.file.sync_data().map_err(|error| failed(&error))?;
        }
        rustix::fs::flock(&self.file, FlockOperation::Unlock).map_err(|error| failed(&error))
    }

    fn acquire_exclusive(&mut self) -> Result<(), String> {
        let readonly = if self.readonly { Switch::On } else { Switch::Off };
        lock(&self.file, &self.path, readonly).map_err(|error| error.to_string())?;
        // Another host may have written to a shared device since this one read from it. Drops
        // clean pages only, and there are no others.
        rustix::fs::fadvise(&self.file, 0, None, Advice::DontNeed)
            .map_err(|error| format!("the disk {}: {error}", self.path.display()))
    }

    fn restore(
        &mut self,
        state: &DeviceState,
        driver: Option<(u64, Vec<Queue>)>,
    ) -> Result<(), String> {
        match state {
            DeviceState::Disk { sectors, .. } if *sectors == self.sectors => {
                driver.map_or(Ok(()), |(features, queues)| self.activate(features, queues))
            }
            DeviceState::Disk { sectors, .. } => Err(format!(
                "the disk has {} bytes, but had {} when the snapshot was taken; \
                 use the image that belongs to the snapshot",
                self.sectors * SECTOR_BYTES,
                sectors.saturating_mul(SECTOR_BYTES)
            )),
            _ => Err("its state belongs to another device".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests;

//! Block device over a raw file (virtio 1.3 section 5.2).

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use ebb_guest_ram::{GuestMemory, WriteLogSlice};
use rustix::fs::FlockOperation;
use thiserror::Error;
use virtio_bindings::virtio_blk as blk;
use virtio_queue::{DescriptorChain, Queue, QueueState, QueueT, Reader, Writer};
use vm_memory::ByteValued;

use super::state::DeviceState;
use super::{VirtioDevice, Work};
use crate::config::{DiskConfig, Switch};
use crate::file::{Access, open_image};

const DEVICE_ID: u32 = 2;
const QUEUE_SIZE: u16 = 128;
const SECTOR_BYTES: u64 = 512;
/// Most requests processed in one call.
const REQUESTS_A_CALL: usize = 16;
/// Largest transfer of one request, in bytes. Linux sends 1280 KiB at most (`BLK_DEF_MAX_SECTORS`).
const MAX_TRANSFER_BYTES: usize = 4 << 20;
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
        let mut serial = [0; blk::VIRTIO_BLK_ID_BYTES as usize];
        let name = format!("ebb-disk-{index}");
        serial[..name.len().min(20)].copy_from_slice(&name.as_bytes()[..name.len().min(20)]);
        let (sectors, path) = (bytes / SECTOR_BYTES, path.clone());
        Ok(Self { file, sectors, readonly, path, serial, memory, queue: None })
    }

    fn serve(&self, chain: &DescriptorChain<&GuestMemory>) -> u32 {
        let (Ok(mut reader), Ok(mut writer)) =
            (chain.clone().reader(&self.memory), chain.clone().writer(&self.memory))
        else {
            return 0;
        };
        // The status byte is the last byte that the device may write.
        let Some(data_bytes) = writer.available_bytes().checked_sub(1) else { return 0 };
        let Ok(mut status_writer) = writer.split_at(data_bytes) else { return 0 };
        let status = match reader.read_obj::<RequestHeader>() {
            Ok(header) => self.transfer(header, &mut reader, &mut writer),
            Err(_) => Status::IoError,
        };
        let written = writer.bytes_written() as u32;
        match status_writer.write_all(&[status as u8]) {
            Ok(()) => written + 1,
            Err(_) => written,
        }
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
                    })
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

/// Locks an image, so that no two machines write to it, and none writes while another reads.
fn lock(file: &File, path: &Path, readonly: Switch) -> Result<(), DiskError> {
    let operation = match readonly {
        Switch::On => FlockOperation::NonBlockingLockShared,
        Switch::Off => FlockOperation::NonBlockingLockExclusive,
    };
    match rustix::fs::flock(file, operation) {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(DiskError::InUse { path: path.to_owned() }),
        Err(error) => Err(DiskError::Open { path: path.to_owned(), source: error.into() }),
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
        let mut features = 1 << blk::VIRTIO_BLK_F_FLUSH | 1 << blk::VIRTIO_BLK_F_SEG_MAX;
        if self.readonly {
            features |= 1 << blk::VIRTIO_BLK_F_RO;
        }
        features
    }

    fn queue_sizes(&self) -> Vec<u16> {
        vec![QUEUE_SIZE]
    }

    fn disk_bytes(&self) -> Option<u64> {
        Some(self.sectors * SECTOR_BYTES)
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        // capacity u64, size_max u32, seg_max u32 (section 5.2.4): header and status take two
        // descriptors.
        let mut config = [0u8; 16];
        config[..8].copy_from_slice(&self.sectors.to_le_bytes());
        config[12..].copy_from_slice(&u32::from(QUEUE_SIZE - 2).to_le_bytes());
        for (index, byte) in data.iter_mut().enumerate() {
            let position =
                usize::try_from(offset).ok().and_then(|offset| offset.checked_add(index));
            *byte = position.and_then(|position| config.get(position)).copied().unwrap_or(0);
        }
    }

    fn write_config(&mut self, _offset: u64, _data: &[u8]) {}

    fn activate(&mut self, _features: u64, queues: Vec<Queue>) -> Result<(), String> {
        self.queue = queues.into_iter().next().filter(Queue::ready);
        self.queue.as_ref().map(|_| ()).ok_or_else(|| "the request queue is not ready".to_owned())
    }

    fn process_queue(&mut self, _index: usize) -> Work {
        let mut work = Work::default();
        let Some(mut queue) = self.queue.take() else { return work };
        work.more = true;
        for _ in 0..REQUESTS_A_CALL {
            let Some(chain) = queue.pop_descriptor_chain(&self.memory) else {
                work.more = false;
                break;
            };
            let written = self.serve(&chain);
            if queue.add_used(&self.memory, chain.head_index(), written).is_err() {
                crate::devices::guest_log!("virtio-blk: the used ring cannot be written");
                work.more = false;
                break;
            }
            work.interrupt = true;
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
        DeviceState::Disk { sectors: self.sectors }
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
        lock(&self.file, &self.path, readonly).map_err(|error| error.to_string())
    }

    fn restore(
        &mut self,
        state: &DeviceState,
        driver: Option<(u64, Vec<Queue>)>,
    ) -> Result<(), String> {
        match state {
            DeviceState::Disk { sectors } if *sectors == self.sectors => {
                driver.map_or(Ok(()), |(features, queues)| self.activate(features, queues))
            }
            DeviceState::Disk { sectors } => Err(format!(
                "the disk has {} bytes, but had {} when the snapshot was taken; \
                 use the image that belongs to the snapshot",
                self.sectors * SECTOR_BYTES,
                sectors.saturating_mul(SECTOR_BYTES)
            )),
            _ => Err("its state belongs to another device".to_owned()),
        }
    }
}

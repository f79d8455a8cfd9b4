//! Requests of the driver (virtio 1.3 section 5.2.6): reading them from a chain, and checking them
//! before any of their work is done.

use ebb_guest_ram::GuestMemory;
use virtio_bindings::virtio_blk as blk;
use virtio_queue::DescriptorChain;
use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes as _, GuestAddress};

use super::guest_io::{Piece, gather, is_inside, split, total_bytes};
use super::raw::Unmap;
use super::{QUEUE_SIZE, SECTOR_BYTES};

/// Most ranges in one request to discard.
pub(super) const DISCARD_RANGES: u32 = 16;
/// Largest of them, in bytes: a file system takes long to free what is in very many pieces.
pub(super) const DISCARD_BYTES: u64 = 1 << 30;
/// Most ranges in one request to write zeros.
pub(super) const ZERO_RANGES: u32 = 4;
/// Largest of them, in bytes: at worst, zeros are written.
pub(super) const ZERO_BYTES: u64 = 16 << 20;

/// Result of a request; the numbers are the status bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Status {
    Ok = blk::VIRTIO_BLK_S_OK as u8,
    IoError = blk::VIRTIO_BLK_S_IOERR as u8,
    Unsupported = blk::VIRTIO_BLK_S_UNSUPP as u8,
}

/// Bytes of the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Range {
    pub offset: u64,
    pub bytes: u64,
}

/// What a request asks for. All of it is inside of the disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Task {
    Read {
        offset: u64,
        into: Vec<Piece>,
    },
    Write {
        offset: u64,
        from: Vec<Piece>,
    },
    Flush,
    Discard(Vec<Range>),
    Zero(Vec<(Range, Unmap)>),
    /// The disk's name.
    Name(Vec<Piece>),
    /// Nothing: the answer is known.
    Refuse(Status),
}

/// A request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Request {
    /// Index of the chain.
    pub head: u16,
    pub task: Task,
    /// Where its status byte belongs.
    pub status: GuestAddress,
}

/// What a request is checked against.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bounds {
    /// Size of the disk.
    pub sectors: u64,
    /// Size of a block, to which requests must be aligned.
    pub block_bytes: u32,
    /// Largest transfer.
    pub transfer_bytes: u64,
    /// The guest may not write.
    pub readonly: bool,
}

impl Request {
    /// Reads the request in `chain`; `None` if it has no place for a status.
    pub fn parse(
        chain: DescriptorChain<&GuestMemory>,
        memory: &GuestMemory,
        bounds: &Bounds,
    ) -> Option<Self> {
        let head = chain.head_index();
        let (mut readable, mut writable) = (Vec::new(), Vec::new());
        for (index, descriptor) in chain.enumerate() {
            // An indirect table must not be longer than the queue (section 2.7.5.3.1).
            if index >= usize::from(QUEUE_SIZE) {
                return None;
            }
            let piece = piece(&descriptor);
            if descriptor.is_write_only() { &mut writable } else { &mut readable }.push(piece);
        }
        if !is_inside(memory, &readable) || !is_inside(memory, &writable) {
            return None;
        }
        // The status byte is the last byte that the device may write.
        let data_bytes = total_bytes(&writable).checked_sub(1)?;
        let (into, status) = split(&writable, data_bytes)?;
        let status = status.first()?.address;
        let task = Self::task(&readable, into, memory, bounds).unwrap_or_else(Task::Refuse);
        Some(Self { head, task, status })
    }

    fn task(
        readable: &[Piece],
        into: Vec<Piece>,
        memory: &GuestMemory,
        bounds: &Bounds,
    ) -> Result<Task, Status> {
        // Type u32, reserved u32, sector u64.
        const HEADER_BYTES: u64 = 16;
        let (header, from) = split(readable, HEADER_BYTES).ok_or(Status::IoError)?;
        let mut bytes = [0; HEADER_BYTES as usize];
        gather(memory, &header, &mut bytes).map_err(|_| Status::IoError)?;
        let [kind, _, low, high] = words(&bytes);
        let sector = u64::from(low) | u64::from(high) << 32;
        let offset = |pieces: &[Piece]| {
            let bytes = total_bytes(pieces);
            bounds.offset(sector, bytes).filter(|_| bytes <= bounds.transfer_bytes)
        };
        let writes = matches!(
            kind,
            blk::VIRTIO_BLK_T_OUT | blk::VIRTIO_BLK_T_DISCARD | blk::VIRTIO_BLK_T_WRITE_ZEROES
        );
        if writes && bounds.readonly {
            return Err(Status::IoError);
        }
        match kind {
            blk::VIRTIO_BLK_T_IN => {
                Ok(Task::Read { offset: offset(&into).ok_or(Status::IoError)?, into })
            }
            blk::VIRTIO_BLK_T_OUT => {
                Ok(Task::Write { offset: offset(&from).ok_or(Status::IoError)?, from })
            }
            blk::VIRTIO_BLK_T_FLUSH => Ok(Task::Flush),
            blk::VIRTIO_BLK_T_GET_ID => Ok(Task::Name(into)),
            blk::VIRTIO_BLK_T_DISCARD => {
                let ranges = ranges(&from, memory, bounds, DISCARD_RANGES, DISCARD_BYTES)?;
                // No flag is defined for it (section 5.2.6.2).
                if ranges.iter().any(|(_, flags)| *flags != 0) {
                    return Err(Status::Unsupported);
                }
                Ok(Task::Discard(ranges.into_iter().map(|(range, _)| range).collect()))
            }
            blk::VIRTIO_BLK_T_WRITE_ZEROES => {
                let unmap = |flags| match flags {
                    0 => Ok(Unmap::No),
                    blk::VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP => Ok(Unmap::Yes),
                    _ => Err(Status::Unsupported),
                };
                let ranges = ranges(&from, memory, bounds, ZERO_RANGES, ZERO_BYTES)?;
                let ranges = ranges.into_iter().map(|(range, flags)| Ok((range, unmap(flags)?)));
                Ok(Task::Zero(ranges.collect::<Result<_, _>>()?))
            }
            _ => Err(Status::Unsupported),
        }
    }

    /// Bytes that count against the limits: those read or written, also as zeros. Discarding is
    /// one request without bytes: otherwise it would take a limited guest longer than writing.
    pub fn limited_bytes(&self) -> u64 {
        match &self.task {
            Task::Read { into: pieces, .. } | Task::Write { from: pieces, .. } => {
                total_bytes(pieces)
            }
            Task::Zero(ranges) => ranges.iter().map(|(range, _)| range.bytes).sum(),
            Task::Flush | Task::Discard(_) | Task::Name(_) | Task::Refuse(_) => 0,
        }
    }
}

impl Bounds {
    /// Byte position of a range, if it is inside the disk and consists of whole sectors.
    fn offset(&self, sector: u64, bytes: u64) -> Option<u64> {
        let inside =
            sector.checked_add(bytes / SECTOR_BYTES).is_some_and(|end| end <= self.sectors);
        let whole = bytes.is_multiple_of(SECTOR_BYTES);
        let offset = sector.checked_mul(SECTOR_BYTES)?;
        let block = u64::from(self.block_bytes);
        let aligned = offset.is_multiple_of(block) && bytes.is_multiple_of(block);
        (inside && whole && aligned).then_some(offset)
    }
}

/// The ranges of a request to discard or to write zeros, with their flags.
fn ranges(
    pieces: &[Piece],
    memory: &GuestMemory,
    bounds: &Bounds,
    most: u32,
    most_bytes: u64,
) -> Result<Vec<(Range, u32)>, Status> {
    // struct virtio_blk_discard_write_zeroes: sector u64, num_sectors u32, flags u32.
    const RANGE_BYTES: u64 = 16;
    let bytes = total_bytes(pieces);
    let count = bytes / RANGE_BYTES;
    if count == 0 || count > u64::from(most) || !bytes.is_multiple_of(RANGE_BYTES) {
        return Err(Status::IoError);
    }
    let mut buffer = vec![0; bytes as usize];
    gather(memory, pieces, &mut buffer).map_err(|_| Status::IoError)?;
    buffer
        .as_chunks()
        .0
        .iter()
        .map(|chunk| {
            let [low, high, sectors, flags] = words(chunk);
            let sector = u64::from(low) | u64::from(high) << 32;
            let bytes = u64::from(sectors) * SECTOR_BYTES;
            let offset = bounds.offset(sector, bytes).filter(|_| bytes <= most_bytes);
            offset.map(|offset| (Range { offset, bytes }, flags)).ok_or(Status::IoError)
        })
        .collect()
}

/// The little-endian numbers in 16 bytes.
fn words(bytes: &[u8; 16]) -> [u32; 4] {
    let mut words = [0; 4];
    for (word, bytes) in words.iter_mut().zip(bytes.as_chunks().0) {
        *word = u32::from_le_bytes(*bytes);
    }
    words
}

fn piece(descriptor: &Descriptor) -> Piece {
    Piece { address: descriptor.addr(), bytes: descriptor.len() }
}

/// Writes a request's status.
pub(super) fn answer(memory: &GuestMemory, at: GuestAddress, status: Status) -> u32 {
    memory.write_obj(status as u8, at).map_or(0, |()| 1)
}

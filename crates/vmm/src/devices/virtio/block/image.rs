//! The images that a disk can have.

use std::fs::File;
use std::io;

use ebb_guest_ram::GuestMemory;

use super::SECTOR_BYTES;
use super::guest_io::Piece;
use super::qcow2::Qcow2;
use super::raw::{Raw, Unmap};
use crate::config::DiskFormat;

/// A disk's image.
#[derive(Debug)]
pub(super) enum Image {
    Raw(Raw),
    Qcow2(Qcow2),
}

impl Image {
    /// The file that is locked, and written to if the disk is.
    pub fn file(&self) -> &File {
        match self {
            Self::Raw(raw) => raw.file(),
            Self::Qcow2(qcow2) => qcow2.file(),
        }
    }

    /// The file of the image that this one is an overlay of.
    pub fn base_file(&self) -> Option<&File> {
        match self {
            Self::Raw(_) => None,
            Self::Qcow2(qcow2) => qcow2.base_file(),
        }
    }

    pub fn format(&self) -> DiskFormat {
        match self {
            Self::Raw(_) => DiskFormat::Raw,
            Self::Qcow2(_) => DiskFormat::Qcow2,
        }
    }

    /// Whether the host's page cache is bypassed.
    pub fn is_direct(&self) -> bool {
        match self {
            Self::Raw(raw) => raw.is_direct(),
            Self::Qcow2(_) => false,
        }
    }

    /// Prepares the image, which belongs to this monitor from now on.
    pub fn load(&self) -> io::Result<()> {
        match self {
            Self::Raw(_) => Ok(()),
            Self::Qcow2(qcow2) => qcow2.load(),
        }
    }

    /// Writes to the file what only this monitor knows, without waiting for the disk.
    pub fn write_tables(&self) -> io::Result<()> {
        match self {
            Self::Raw(_) => Ok(()),
            Self::Qcow2(qcow2) => qcow2.write_tables(),
        }
    }

    /// Enlarges the image, if its format has a size of its own.
    pub fn grow(&self, bytes: u64) -> io::Result<()> {
        match self {
            Self::Raw(_) => Ok(()),
            Self::Qcow2(qcow2) => qcow2.grow(bytes),
        }
    }

    /// Size of a block, in bytes: what requests must be multiples of.
    pub fn block_bytes(&self) -> u32 {
        match self {
            Self::Raw(raw) => raw.block_bytes(),
            Self::Qcow2(_) => SECTOR_BYTES as u32,
        }
    }

    /// The current size of the disk, in bytes.
    pub fn size_bytes(&self) -> io::Result<u64> {
        match self {
            Self::Raw(raw) => raw.size_bytes(),
            Self::Qcow2(qcow2) => Ok(qcow2.size_bytes()),
        }
    }

    pub fn read(&self, memory: &GuestMemory, pieces: &[Piece], offset: u64) -> io::Result<()> {
        match self {
            Self::Raw(raw) => raw.read(memory, pieces, offset),
            Self::Qcow2(qcow2) => qcow2.read(memory, pieces, offset),
        }
    }

    /// Reads what is in memory; `None` if it must wait for a disk.
    pub fn read_at_once(
        &self,
        memory: &GuestMemory,
        pieces: &[Piece],
        offset: u64,
    ) -> Option<io::Result<()>> {
        match self {
            Self::Raw(raw) => raw.read_at_once(memory, pieces, offset),
            Self::Qcow2(_) => None,
        }
    }

    /// Writes to memory; `None` if it must wait for a disk, where a part may be written.
    pub fn write_at_once(
        &self,
        memory: &GuestMemory,
        pieces: &[Piece],
        offset: u64,
    ) -> Option<io::Result<()>> {
        match self {
            Self::Raw(raw) => raw.write_at_once(memory, pieces, offset),
            Self::Qcow2(_) => None,
        }
    }

    pub fn write(&self, memory: &GuestMemory, pieces: &[Piece], offset: u64) -> io::Result<()> {
        match self {
            Self::Raw(raw) => raw.write(memory, pieces, offset),
            Self::Qcow2(qcow2) => qcow2.write(memory, pieces, offset),
        }
    }

    /// Completed writes are on the disk when this returns.
    pub fn flush(&self) -> io::Result<()> {
        match self {
            Self::Raw(raw) => raw.flush(),
            Self::Qcow2(qcow2) => qcow2.flush(),
        }
    }

    pub fn discard(&self, offset: u64, bytes: u64) -> io::Result<()> {
        match self {
            Self::Raw(raw) => raw.discard(offset, bytes),
            Self::Qcow2(qcow2) => qcow2.discard(offset, bytes),
        }
    }

    pub fn zero(&self, offset: u64, bytes: u64, unmap: Unmap) -> io::Result<()> {
        match self {
            Self::Raw(raw) => raw.zero(offset, bytes, unmap),
            Self::Qcow2(qcow2) => qcow2.zero(offset, bytes, unmap),
        }
    }
}

//! The images that a disk can have.

use std::fs::File;
use std::io;

use ebb_guest_ram::GuestMemory;

use super::guest_io::Piece;
use super::raw::{Raw, Unmap};

/// A disk's image.
#[derive(Debug)]
pub(super) enum Image {
    Raw(Raw),
}

impl Image {
    /// The file that is locked, and written to if the disk is.
    pub fn file(&self) -> &File {
        match self {
            Self::Raw(raw) => raw.file(),
        }
    }

    /// Size of a block, in bytes: what requests must be multiples of.
    pub fn block_bytes(&self) -> u32 {
        match self {
            Self::Raw(raw) => raw.block_bytes(),
        }
    }

    /// The current size of the disk, in bytes.
    pub fn size_bytes(&self) -> io::Result<u64> {
        match self {
            Self::Raw(raw) => raw.size_bytes(),
        }
    }

    pub fn read(&self, memory: &GuestMemory, pieces: &[Piece], offset: u64) -> io::Result<()> {
        match self {
            Self::Raw(raw) => raw.read(memory, pieces, offset),
        }
    }

    /// Reads what is in memory; `None` if it must wait for a disk.
    pub fn read_cached(
        &self,
        memory: &GuestMemory,
        pieces: &[Piece],
        offset: u64,
    ) -> Option<io::Result<()>> {
        match self {
            Self::Raw(raw) => raw.read_cached(memory, pieces, offset),
        }
    }

    pub fn write(&self, memory: &GuestMemory, pieces: &[Piece], offset: u64) -> io::Result<()> {
        match self {
            Self::Raw(raw) => raw.write(memory, pieces, offset),
        }
    }

    /// Completed writes are on the disk when this returns.
    pub fn flush(&self) -> io::Result<()> {
        match self {
            Self::Raw(raw) => raw.flush(),
        }
    }

    pub fn discard(&self, offset: u64, bytes: u64) -> io::Result<()> {
        match self {
            Self::Raw(raw) => raw.discard(offset, bytes),
        }
    }

    pub fn zero(&self, offset: u64, bytes: u64, unmap: Unmap) -> io::Result<()> {
        match self {
            Self::Raw(raw) => raw.zero(offset, bytes, unmap),
        }
    }
}

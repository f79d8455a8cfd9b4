//! The header of a qcow2 image (QEMU docs/interop/qcow2.txt), as far as a hostile one could make
//! the monitor allocate much memory or search for very long.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use super::check::Tables;
use crate::api::disks::MOST_BYTES;

const MAGIC: u32 = 0x5146_49fb;
/// Size of a cluster: what qemu-img makes. imago keeps 160 of them in memory.
pub(super) const CLUSTER_BYTES: u64 = 1 << CLUSTER_BITS;
const CLUSTER_BITS: u32 = 16;
/// Largest file. A free cluster is searched for one by one, and the check counts the references to
/// each with two bytes.
const MOST_FILE_BYTES: u64 = 4 << 40;
/// Largest table of either kind: imago has all of it in memory.
const MOST_TABLE_BYTES: u64 = 1 << 20;
const HEADER_BYTES: usize = 104;

/// What the monitor reads of a header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    /// Size of the disk.
    pub size_bytes: u64,
    /// Whether it names an image that it is an overlay of.
    names_base: bool,
}

impl Header {
    fn with_tables(file: &File) -> io::Result<(Self, Tables)> {
        let mut header = [0; HEADER_BYTES];
        let mut known = 0;
        // Version 2 has 72 bytes; a new image may be that short.
        while known < HEADER_BYTES {
            match file.read_at(&mut header[known..], known as u64)? {
                0 => break,
                bytes => known += bytes,
            }
        }
        let file_bytes = rustix::fs::seek(file, rustix::fs::SeekFrom::End(0))?;
        let header = Fields(&header);
        if header.u32(0) != MAGIC {
            return Err(invalid("it is not a qcow2 image"));
        }
        let version = header.u32(4);
        if !matches!(version, 2 | 3) {
            return Err(invalid(format!("qcow2 version {version} is not supported")));
        }
        if header.u32(20) != CLUSTER_BITS {
            return Err(invalid(
                "its clusters do not have 64 KiB; convert it with \
                 `qemu-img convert -O qcow2 -o cluster_size=64k`",
            ));
        }
        if header.u32(32) != 0 {
            return Err(invalid("it is encrypted"));
        }
        if version == 3 && header.u64(72) != 0 {
            return Err(invalid(
                "it needs features that are not supported, or was not closed; see \
                 `qemu-img check` and `qemu-img info`",
            ));
        }
        let size_bytes = header.u64(24);
        if size_bytes > MOST_BYTES
            || !size_bytes.is_multiple_of(512)
            || file_bytes > MOST_FILE_BYTES
        {
            return Err(invalid(format!("{size_bytes} bytes in {file_bytes} are not supported")));
        }
        let first_level = Table { offset: header.u64(40), bytes: u64::from(header.u32(36)) * 8 };
        let refcounts =
            Table { offset: header.u64(48), bytes: u64::from(header.u32(56)) * CLUSTER_BYTES };
        for table in [&first_level, &refcounts] {
            let end = table.offset.checked_add(table.bytes);
            // The last cluster of a file may be incomplete.
            let is_inside =
                end.is_some_and(|end| end <= file_bytes.next_multiple_of(CLUSTER_BYTES));
            if !is_inside || table.bytes > MOST_TABLE_BYTES {
                return Err(invalid("its tables are larger than its file, or than 1 MiB"));
            }
        }
        let refcount_bits = if version == 2 { 16 } else { 1 << header.u32(96).min(6) };
        if header.u32(60) != 0 {
            return Err(invalid(
                "it has snapshots of its own; remove them with `qemu-img snapshot`",
            ));
        }
        let tables = Tables { first_level, refcounts, refcount_bits, file_bytes };
        Ok((Self { size_bytes, names_base: header.u64(8) != 0 }, tables))
    }

    /// Reads and checks the header of an image that is only read.
    pub fn read(file: &File) -> io::Result<Self> {
        Self::with_tables(file).map(|(header, _)| header)
    }

    /// The same for one that is written to: its tables are checked as well.
    pub fn read_for_writing(file: &File) -> io::Result<Self> {
        let (header, tables) = Self::with_tables(file)?;
        tables.check(file)?;
        Ok(header)
    }

    /// Checks that the image has a base if and only if it is an overlay.
    pub fn check_base(&self, has_base: bool) -> io::Result<()> {
        match (self.names_base, has_base) {
            (true, false) => Err(invalid(
                "it is an overlay of another image; name that with path= and this one with \
                 overlay=",
            )),
            (false, true) => Err(invalid("it is not an overlay; name it with path=")),
            _ => Ok(()),
        }
    }
}

/// A table in the file.
pub(super) struct Table {
    pub offset: u64,
    pub bytes: u64,
}

struct Fields<'a>(&'a [u8; HEADER_BYTES]);

impl Fields<'_> {
    fn u32(&self, at: usize) -> u32 {
        self.0[at..at + 4].iter().fold(0, |number, byte| number << 8 | u32::from(*byte))
    }

    fn u64(&self, at: usize) -> u64 {
        u64::from(self.u32(at)) << 32 | u64::from(self.u32(at + 4))
    }
}

pub(super) fn invalid(problem: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, problem.into())
}

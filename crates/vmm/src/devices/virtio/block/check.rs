//! Consistency of a qcow2 image (QEMU docs/interop/qcow2.txt), before it is written to.
//!
//! imago trusts the counts of references: a table whose cluster counts as free would be overwritten
//! by the guest's data and then be the guest's. So each cluster must count at least as many
//! references as it has, and only parts of compressed clusters share one. Afterwards the guest's
//! data never becomes a table.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use super::header::{CLUSTER_BYTES, Table, invalid};

/// Offset in an entry of the first or second level.
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
/// The cluster is compressed.
const COMPRESSED: u64 = 1 << 62;
/// Bits of a compressed cluster's offset; above them is the number of further sectors.
const COMPRESSED_OFFSET_BITS: u32 = 62 - (CLUSTER_BYTES.trailing_zeros() - 8);
const FURTHER_SECTORS: u64 = 0xff;

/// The parts of an image that are checked.
pub(super) struct Tables {
    pub first_level: Table,
    pub refcounts: Table,
    pub refcount_bits: u64,
    pub file_bytes: u64,
}

impl Tables {
    /// Checks the image.
    pub fn check(&self, file: &File) -> io::Result<()> {
        let mut references = References::new(self.file_bytes);
        references.add(0)?;
        references.add_table(&self.first_level)?;
        references.add_table(&self.refcounts)?;
        let blocks = self.refcount_blocks(file, &mut references)?;
        let mut entries = Vec::new();
        read_entries(file, &self.first_level, &mut entries)?;
        let second_level: Vec<u64> =
            entries.iter().map(|entry| entry & OFFSET).filter(|offset| *offset != 0).collect();
        for offset in &second_level {
            references.add(*offset)?;
        }
        for offset in second_level {
            let table = Table { offset, bytes: CLUSTER_BYTES };
            read_entries(file, &table, &mut entries)?;
            for entry in &entries {
                references.add_data(*entry)?;
            }
        }
        self.compare(file, &blocks, &references)
    }

    /// The blocks of reference counts: one for each part of the file, and no other.
    fn refcount_blocks(&self, file: &File, references: &mut References) -> io::Result<Vec<u64>> {
        let mut entries = Vec::new();
        read_entries(file, &self.refcounts, &mut entries)?;
        let needed = self.file_bytes.div_ceil(self.entries_a_block() * CLUSTER_BYTES) as usize;
        let blocks: Vec<u64> = entries.iter().map(|entry| entry & !511).collect();
        let complete = blocks.iter().take_while(|offset| **offset != 0).count();
        // Others would be made one inside of the other.
        if complete < needed || blocks[complete..].iter().any(|offset| *offset != 0) {
            return Err(inconsistent());
        }
        for offset in &blocks[..complete] {
            references.add(*offset)?;
        }
        Ok(blocks[..complete].to_vec())
    }

    fn entries_a_block(&self) -> u64 {
        CLUSTER_BYTES * 8 / self.refcount_bits
    }

    fn compare(&self, file: &File, blocks: &[u64], references: &References) -> io::Result<()> {
        let mut block = vec![0; CLUSTER_BYTES as usize];
        let counts = references.counts.chunks(self.entries_a_block() as usize);
        for (counts, offset) in counts.zip(blocks) {
            read(file, *offset, &mut block)?;
            for (index, references) in counts.iter().enumerate() {
                let counted = self.count(&block, index as u64);
                if counted < u64::from(references & !SHARED) {
                    return Err(inconsistent());
                }
            }
        }
        Ok(())
    }

    /// A count of a block. Those of less than a byte begin at its lowest bits.
    fn count(&self, block: &[u8], index: u64) -> u64 {
        let bit = index * self.refcount_bits;
        let at = (bit / 8) as usize;
        if self.refcount_bits < 8 {
            let mask = (1 << self.refcount_bits) - 1;
            return u64::from(block[at] >> (bit % 8)) & mask;
        }
        let bytes = &block[at..at + (self.refcount_bits / 8) as usize];
        bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
    }
}

/// Mark of a cluster with compressed data.
const SHARED: u16 = 1 << 15;

/// Number of references to each cluster.
struct References {
    counts: Vec<u16>,
}

impl References {
    fn new(file_bytes: u64) -> Self {
        Self { counts: vec![0; file_bytes.div_ceil(CLUSTER_BYTES) as usize] }
    }

    /// A cluster that has one reference.
    fn add(&mut self, offset: u64) -> io::Result<()> {
        let count = self.counts.get_mut((offset / CLUSTER_BYTES) as usize);
        match count {
            Some(count) if *count == 0 && offset.is_multiple_of(CLUSTER_BYTES) => {
                *count = 1;
                Ok(())
            }
            _ => Err(inconsistent()),
        }
    }

    fn add_table(&mut self, table: &Table) -> io::Result<()> {
        let clusters = table.bytes.div_ceil(CLUSTER_BYTES);
        (0..clusters).try_for_each(|cluster| self.add(table.offset + cluster * CLUSTER_BYTES))
    }

    /// An entry of the second level.
    fn add_data(&mut self, entry: u64) -> io::Result<()> {
        if entry & COMPRESSED == 0 {
            return match entry & OFFSET {
                0 => Ok(()),
                offset => self.add(offset),
            };
        }
        let offset = entry & ((1 << COMPRESSED_OFFSET_BITS) - 1);
        let sectors = 1 + (entry >> COMPRESSED_OFFSET_BITS & FURTHER_SECTORS);
        let end = offset / 512 * 512 + sectors * 512;
        for cluster in offset / CLUSTER_BYTES..end.div_ceil(CLUSTER_BYTES) {
            // The last sectors need not exist.
            let Some(count) = self.counts.get_mut(cluster as usize) else {
                return Err(inconsistent());
            };
            if *count != 0 && *count & SHARED == 0 || *count == u16::MAX {
                return Err(inconsistent());
            }
            *count = (*count + 1) | SHARED;
        }
        Ok(())
    }
}

fn read_entries(file: &File, table: &Table, entries: &mut Vec<u64>) -> io::Result<()> {
    let mut bytes = vec![0; table.bytes as usize];
    read(file, table.offset, &mut bytes)?;
    entries.clear();
    entries.extend(bytes.as_chunks().0.iter().map(|entry| u64::from_be_bytes(*entry)));
    Ok(())
}

/// Reads a part of a file; behind its end there are zeros.
fn read(file: &File, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
    let mut done = 0;
    while done < buffer.len() {
        match file.read_at(&mut buffer[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(bytes) => done += bytes,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    buffer[done..].fill(0);
    Ok(())
}

fn inconsistent() -> io::Error {
    invalid("its tables contradict each other; `qemu-img check -r all` may repair it")
}

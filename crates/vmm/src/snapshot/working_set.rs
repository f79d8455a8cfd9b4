//! Working sets: files that name the parts of a snapshot which are accessed in the first seconds
//! after a restore, in the order in which they should be read.
//!
//! A client records one of a restored machine ([`Recorder`]), whose monitor only answers which
//! parts were accessed until now (`GET /vm/working-set`). `ebb restore` reads the parts ahead of
//! the guest (`ReadAhead`). The file is one JSON document, the same as the monitor's answer.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read as _};
use std::ops::Range;
use std::path::Path;

use ebb_guest_ram::{Extent, MAX_WORKING_SET_EXTENTS, WORKING_SET_BLOCK_BYTES, read_ahead};
use thiserror::Error;

use super::file::{RAM_OFFSET_BYTES, open_to_read};
use super::{SnapshotError, SnapshotFile};
use crate::api::{WorkingSet, WorkingSetExtent};

impl WorkingSet {
    /// Of the snapshot with this checksum of its state.
    pub(crate) fn new(state_checksum: u64, extents: &[Extent]) -> Self {
        let extents = extents.iter().map(|&Extent { offset_bytes, size_bytes }| WorkingSetExtent {
            offset_bytes,
            size_bytes,
        });
        Self { snapshot: name(state_checksum), extents: extents.collect() }
    }

    /// Reads a file.
    ///
    /// # Errors
    /// Those of open(2) and read(2), and [`InvalidData`](io::ErrorKind::InvalidData) for
    /// another file.
    pub fn read(path: &Path) -> io::Result<Self> {
        let mut text = Vec::new();
        open_to_read(path)?.take(MAX_FILE_BYTES + 1).read_to_end(&mut text)?;
        let is_too_large = text.len() as u64 > MAX_FILE_BYTES;
        let set = serde_json::from_slice(&text).ok().filter(|_| !is_too_large);
        set.ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidData, "this is not the file of a working set")
        })
    }

    /// The parts, if they are of the snapshot of this name with so much memory, and of no more than
    /// that, so that reading them ends.
    fn extents_of(&self, snapshot: &str, ram_bytes: u64) -> Result<Vec<Extent>, String> {
        if self.snapshot != snapshot {
            return Err("it belongs to another snapshot".to_owned());
        }
        let is_inside = |extent: &WorkingSetExtent| {
            extent.offset_bytes.checked_add(extent.size_bytes).is_some_and(|end| end <= ram_bytes)
        };
        if self.extents.len() > MAX_WORKING_SET_EXTENTS
            || self.size_bytes() > ram_bytes
            || !self.extents.iter().all(is_inside)
        {
            return Err(format!("it names other memory than the snapshot's {ram_bytes} bytes"));
        }
        let extent =
            |&WorkingSetExtent { offset_bytes, size_bytes }| Extent { offset_bytes, size_bytes };
        Ok(self.extents.iter().map(extent).collect())
    }
}

fn name(state_checksum: u64) -> String {
    format!("{state_checksum:016x}")
}

/// Largest file of a working set in bytes: the most extents, with long numbers.
const MAX_FILE_BYTES: u64 = 4 << 20;

/// Parts of a snapshot to be read ahead.
#[derive(Debug)]
pub(crate) struct ReadAhead {
    file: File,
    extents: Vec<Extent>,
}

impl ReadAhead {
    /// Begins to read all of them.
    pub(crate) fn carry_out(&self) -> io::Result<()> {
        read_ahead(&self.file, RAM_OFFSET_BYTES, &self.extents)
    }
}

impl SnapshotFile {
    /// Reads the file of a working set, whose parts a machine that is restored from this snapshot
    /// reads ahead of its guest.
    ///
    /// # Errors
    /// [`SnapshotError::WorkingSet`] if the file is not one of this snapshot.
    pub fn use_working_set(&mut self, path: &Path) -> Result<(), SnapshotError> {
        let wrong = |problem: String| SnapshotError::WorkingSet { path: path.to_owned(), problem };
        let set = WorkingSet::read(path).map_err(|error| wrong(error.to_string()))?;
        let snapshot = name(self.header.state_checksum);
        let extents = set.extents_of(&snapshot, self.header.ram_bytes).map_err(wrong)?;
        let file = self.file.try_clone();
        let file =
            file.map_err(|source| SnapshotError::Read { path: self.path.clone(), source })?;
        self.read_ahead = Some(ReadAhead { file, extents });
        Ok(())
    }
}

/// Uses `bytes` as the file of a working set, and as a monitor's answer: entry point for fuzzing.
pub(super) fn fuzz(bytes: &[u8]) {
    const RAM_BYTES: u64 = 1 << 30;
    let Ok(set) = serde_json::from_slice::<WorkingSet>(bytes) else { return };
    if let Ok(extents) = set.extents_of(&set.snapshot, RAM_BYTES) {
        assert!(extents.iter().all(|extent| extent.end_bytes() <= RAM_BYTES));
    }
    let mut recorder = Recorder::default();
    if set.size_bytes() <= RAM_BYTES && recorder.add(set).is_ok() {
        assert!(recorder.size_bytes() <= 2 * RAM_BYTES);
        let _ = recorder.finish(RAM_BYTES);
    }
}

/// Largest working set that is recorded: reading more ahead would keep the guest from its disk for
/// long.
const MAX_RECORDED_BYTES: u64 = 64 << 30;

/// The answers of a monitor cannot be recorded.
#[derive(Debug, Error)]
pub enum RecordError {
    /// They are about two snapshots.
    #[error("the machine of this socket is another one now; record again")]
    OtherSnapshot,
    /// They name more memory than is worth to be read ahead.
    #[error(
        "the machine has accessed more than {} GiB of its snapshot; record for a shorter time",
        MAX_RECORDED_BYTES >> 30
    )]
    TooLarge,
    /// The machine has accessed nothing.
    #[error(
        "the machine has accessed nothing of its snapshot; record while it runs, before its guest \
         is started again"
    )]
    Empty,
}

/// Largest gap between two parts that is read with them, in blocks. On a disk that transfers
/// 125 MiB/s, it takes as long as a further request does that is answered after a millisecond.
const GAP_BLOCKS: u64 = 2;

/// Puts the answers of a monitor, one after the other, into the order of the accesses.
///
/// What was accessed in one period of time is read in ascending order, to make large reads of
/// neighbours. The first period ends with the first answer, and each further one is as long as all
/// before: what the guest needs at once comes first, and later the order matters less.
#[derive(Debug, Default)]
pub struct Recorder {
    last: Option<WorkingSet>,
    answers: u64,
    seen: BTreeSet<u64>,
    /// Blocks of this period, of `seen`.
    new: BTreeSet<u64>,
    /// Runs of blocks of earlier periods, in order.
    runs: Vec<Range<u64>>,
}

impl Recorder {
    /// Adds what the monitor says.
    ///
    /// # Errors
    /// [`RecordError`].
    pub fn add(&mut self, now: WorkingSet) -> Result<(), RecordError> {
        if self.last.as_ref().is_some_and(|last| last.snapshot != now.snapshot) {
            return Err(RecordError::OtherSnapshot);
        }
        if now.size_bytes() > MAX_RECORDED_BYTES {
            return Err(RecordError::TooLarge);
        }
        for extent in &now.extents {
            let end_bytes = extent.offset_bytes.saturating_add(extent.size_bytes);
            let first = extent.offset_bytes / WORKING_SET_BLOCK_BYTES;
            let blocks = first..end_bytes.div_ceil(WORKING_SET_BLOCK_BYTES);
            self.new.extend(blocks.filter(|block| self.seen.insert(*block)));
        }
        self.last = Some(now);
        self.answers += 1;
        if self.answers.is_power_of_two() {
            self.end_period();
        }
        if self.size_bytes() > MAX_RECORDED_BYTES { Err(RecordError::TooLarge) } else { Ok(()) }
    }

    fn end_period(&mut self) {
        let mut run: Option<Range<u64>> = None;
        for block in std::mem::take(&mut self.new) {
            match &mut run {
                Some(run)
                    if block - run.end <= GAP_BLOCKS
                        && self.seen.range(run.end..block).next().is_none() =>
                {
                    self.seen.extend(run.end..block);
                    run.end = block + 1;
                }
                _ => self.runs.extend(run.replace(block..block + 1)),
            }
        }
        self.runs.extend(run);
    }

    /// Bytes of the blocks that were accessed.
    fn size_bytes(&self) -> u64 {
        self.seen.len() as u64 * WORKING_SET_BLOCK_BYTES
    }

    /// All that was accessed, in order, of a memory of `ram_bytes`; if that has too many parts, what
    /// the monitor has said last.
    ///
    /// # Errors
    /// [`RecordError::Empty`].
    pub fn finish(mut self, ram_bytes: u64) -> Result<WorkingSet, RecordError> {
        self.end_period();
        let last = self.last.filter(|_| !self.seen.is_empty()).ok_or(RecordError::Empty)?;
        if self.runs.len() > MAX_WORKING_SET_EXTENTS {
            return Ok(last);
        }
        let extent = |run: &Range<u64>| {
            let [offset_bytes, end_bytes] = [run.start, run.end]
                .map(|block| block.saturating_mul(WORKING_SET_BLOCK_BYTES).min(ram_bytes));
            WorkingSetExtent { offset_bytes, size_bytes: end_bytes - offset_bytes }
        };
        Ok(WorkingSet { extents: self.runs.iter().map(extent).collect(), ..last })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: u64 = WORKING_SET_BLOCK_BYTES;

    fn set(blocks: &[(u64, u64)]) -> WorkingSet {
        let extents: Vec<_> = blocks
            .iter()
            .map(|(first, count)| Extent { offset_bytes: first * BLOCK, size_bytes: count * BLOCK })
            .collect();
        WorkingSet::new(7, &extents)
    }

    #[test]
    fn parts_are_recorded_in_the_order_of_their_first_access() {
        let mut recorder = Recorder::default();
        recorder.add(set(&[(80, 2), (90, 1)])).unwrap();
        recorder.add(set(&[(10, 1), (79, 4)])).unwrap();
        // What was discarded stays recorded. The third and the fourth answer are one period, and
        // small gaps are read, too.
        recorder.add(set(&[(50, 3)])).unwrap();
        recorder.add(set(&[(20, 1), (50, 3), (55, 2), (60, 1)])).unwrap();
        recorder.add(set(&[(54, 1), (0, 1)])).unwrap();
        let expected =
            [(80, 2), (90, 1), (10, 1), (79, 1), (82, 1), (20, 1), (50, 7), (60, 1), (0, 1)];
        assert_eq!(recorder.finish(u64::MAX).unwrap(), set(&expected));
    }

    #[test]
    fn a_set_ends_with_the_memory() {
        let mut recorder = Recorder::default();
        recorder.add(set(&[(3, 2)])).unwrap();
        let set = recorder.finish(4 * BLOCK + 4096).unwrap();
        let WorkingSetExtent { offset_bytes, size_bytes } = set.extents[0];
        assert_eq!((offset_bytes, size_bytes), (3 * BLOCK, BLOCK + 4096));
    }

    #[test]
    fn answers_about_another_machine_or_about_nothing_are_refused() {
        let mut recorder = Recorder::default();
        recorder.add(set(&[])).unwrap();
        let other = WorkingSet { snapshot: "f".repeat(16), ..set(&[(1, 1)]) };
        assert!(matches!(recorder.add(other), Err(RecordError::OtherSnapshot)));
        assert!(matches!(recorder.finish(1 << 30), Err(RecordError::Empty)));
        // A monitor that is captured can say anything.
        for (offset_bytes, size_bytes) in [(0, u64::MAX), (u64::MAX, u64::MAX), (1, 65 << 30)] {
            let mut recorder = Recorder::default();
            let extents = vec![WorkingSetExtent { offset_bytes, size_bytes }];
            let said = WorkingSet { extents, ..set(&[]) };
            assert!(matches!(recorder.add(said), Err(RecordError::TooLarge)));
        }
        let last = WorkingSetExtent { offset_bytes: u64::MAX - 1, size_bytes: 1 << 30 };
        let mut recorder = Recorder::default();
        recorder.add(WorkingSet { extents: vec![last], ..set(&[]) }).unwrap();
        assert_eq!(recorder.finish(1 << 30).unwrap().extents.len(), 1);
    }

    #[test]
    fn too_many_parts_are_replaced_by_the_last_answer() {
        let mut recorder = Recorder::default();
        let blocks: Vec<_> =
            (0..=MAX_WORKING_SET_EXTENTS as u64).map(|block| (4 * block, 1)).collect();
        recorder.add(set(&blocks)).unwrap();
        recorder.add(set(&[(0, 100_000)])).unwrap();
        recorder.add(set(&[(1, 2)])).unwrap();
        assert_eq!(recorder.finish(u64::MAX).unwrap(), set(&[(1, 2)]));
    }
}

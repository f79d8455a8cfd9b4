//! Reads and writes of a disk by several threads at a time, past the guest's page cache.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::random::{Random, mix};

/// Most threads.
pub const THREADS_LIMIT: u32 = 64;
/// Largest block, in bytes.
pub const BLOCK_LIMIT_BYTES: u64 = 4 << 20;
/// Alignment that direct transfers need.
const ALIGNMENT: usize = 4096;

/// Kind of a load.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LoadKind {
    /// Blocks at random places are read.
    RandomRead,
    /// Blocks are read one after the other, by each thread in its own part of the disk.
    SequentialRead,
    /// Blocks at random places of each thread's own part are written, read back and compared.
    WriteAndCheck,
}

/// A load.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskLoad {
    /// The disk.
    pub path: String,
    /// Kind of the load.
    pub kind: LoadKind,
    /// Number of threads, each with one request at a time.
    pub threads: u32,
    /// Size of a block.
    pub block_bytes: u64,
    /// Size of the part of the disk that is used.
    pub span_bytes: u64,
    /// Most blocks for each thread.
    pub blocks: u32,
    /// Path of a file whose existence ends the load; it is looked for before each block.
    pub until: Option<String>,
}

/// Result of a load.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LoadReport {
    /// Blocks of all threads.
    pub blocks: u64,
    /// Blocks that did not have the content that was written.
    pub wrong_blocks: u64,
    /// Time from the first to the last request.
    pub seconds: f64,
}

/// Carries out a load.
///
/// # Errors
/// Parameters out of range, and errors of the disk.
pub fn run(load: &DiskLoad) -> Result<LoadReport, String> {
    let whole = ALIGNMENT as u64;
    let part_bytes = load.span_bytes / u64::from(load.threads.max(1));
    if load.threads == 0
        || load.threads > THREADS_LIMIT
        || !load.block_bytes.is_multiple_of(whole)
        || load.block_bytes == 0
        || load.block_bytes > BLOCK_LIMIT_BYTES
        || part_bytes < load.block_bytes
    {
        return Err(format!("invalid load: {load:?}"));
    }
    let file = OpenOptions::new()
        .read(true)
        .write(load.kind == LoadKind::WriteAndCheck)
        .custom_flags(libc::O_DIRECT)
        .open(&load.path)
        .map_err(|error| format!("{}: {error}", load.path))?;
    let begin = Instant::now();
    let results = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..load.threads)
            .map(|thread| {
                scope.spawn({
                    let file = &file;
                    move || one(load, file, thread)
                })
            })
            .collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, _>| thread.join();
        threads.into_iter().map(join).collect::<Vec<_>>()
    });
    let seconds = begin.elapsed().as_secs_f64();
    let mut report = LoadReport { blocks: 0, wrong_blocks: 0, seconds };
    for result in results {
        let result = result.map_err(|_| "a thread has panicked".to_owned())?;
        let (blocks, wrong) = result.map_err(|error| format!("{}: {error}", load.path))?;
        report.blocks += blocks;
        report.wrong_blocks += wrong;
    }
    Ok(report)
}

/// The part of one thread: the numbers of blocks, and of wrong ones among them.
fn one(load: &DiskLoad, file: &File, thread: u32) -> io::Result<(u64, u64)> {
    let bytes = load.block_bytes as usize;
    let mut memory = vec![0_u8; bytes + ALIGNMENT];
    let start = memory.as_ptr().align_offset(ALIGNMENT);
    let buffer = &mut memory[start..start + bytes];
    let blocks = load.span_bytes / load.block_bytes;
    let own = blocks / u64::from(load.threads);
    let first = own * u64::from(thread);
    let mut random = Random::new(u64::from(thread) + 1);
    let mut wrong = 0;
    for index in 0..u64::from(load.blocks) {
        if load.until.as_ref().is_some_and(|path| Path::new(path).exists()) {
            return Ok((index, wrong));
        }
        let block = match load.kind {
            LoadKind::RandomRead => random.below(blocks as usize) as u64,
            LoadKind::SequentialRead => first + index % own,
            LoadKind::WriteAndCheck => first + random.below(own as usize) as u64,
        };
        let offset = block * load.block_bytes;
        if load.kind == LoadKind::WriteAndCheck {
            let seed = mix(block ^ index << 32);
            for (word, bytes) in buffer.chunks_exact_mut(8).enumerate() {
                bytes.copy_from_slice(&mix(seed + word as u64).to_le_bytes());
            }
            file.write_all_at(buffer, offset)?;
            buffer.fill(0);
            file.read_exact_at(buffer, offset)?;
            let is_right = buffer
                .chunks_exact(8)
                .enumerate()
                .all(|(word, bytes)| *bytes == mix(seed + word as u64).to_le_bytes());
            wrong += u64::from(!is_right);
        } else {
            file.read_exact_at(buffer, offset)?;
        }
    }
    Ok((u64::from(load.blocks), wrong))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(kind: LoadKind) -> (tempfile::TempDir, DiskLoad) {
        // /tmp may be in memory, which has no direct transfers.
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = folder.path().join("disk");
        File::create(&path).unwrap().set_len(1 << 20).unwrap();
        let path = path.display().to_string();
        let (block_bytes, span_bytes) = (4096, 1 << 20);
        let until = None;
        (folder, DiskLoad { path, kind, threads: 3, block_bytes, span_bytes, blocks: 20, until })
    }

    #[test]
    fn all_kinds_do_all_blocks() {
        for kind in [LoadKind::RandomRead, LoadKind::SequentialRead, LoadKind::WriteAndCheck] {
            let (_folder, load) = load(kind);
            let report = run(&load).unwrap();
            assert_eq!((report.blocks, report.wrong_blocks), (60, 0), "{kind:?}");
        }
    }

    #[test]
    fn a_file_ends_it() {
        let (folder, load) = load(LoadKind::WriteAndCheck);
        let end = folder.path().join("end");
        let until = Some(end.display().to_string());
        let endless = DiskLoad { blocks: u32::MAX, until, ..load };
        let load = std::thread::spawn(move || run(&endless).unwrap());
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert!(!load.is_finished());
        std::fs::write(end, "").unwrap();
        assert_eq!(load.join().unwrap().wrong_blocks, 0);
    }

    #[test]
    fn invalid_loads_are_refused() {
        let (_folder, good) = load(LoadKind::RandomRead);
        for bad in [
            DiskLoad { threads: 0, ..good.clone() },
            DiskLoad { threads: THREADS_LIMIT + 1, ..good.clone() },
            DiskLoad { block_bytes: 512, ..good.clone() },
            DiskLoad { block_bytes: 8 << 20, ..good.clone() },
            DiskLoad { span_bytes: 8192, ..good.clone() },
            DiskLoad { path: "/nothing".to_owned(), ..good },
        ] {
            assert!(run(&bad).is_err(), "{bad:?}");
        }
    }
}

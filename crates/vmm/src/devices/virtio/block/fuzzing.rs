//! Fuzzing of images: whatever a qcow2 image has in its tables, the monitor goes on.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use ebb_guest_ram::GuestMemory;
use vm_memory::GuestAddress;

use super::guest_io::Piece;
use super::header::CLUSTER_BYTES;
use super::qcow2::{Base, Qcow2};
use super::raw::Unmap;
use crate::fuzzing::{Input, prepared};

const DISK_BYTES: u64 = 20 * CLUSTER_BYTES;
const MEMORY_BYTES: usize = 4 * CLUSTER_BYTES as usize;

/// A qcow2 image with some content, of which the input changes header and tables, and then requests
/// of a guest. Panics if the file grows beyond what the disk may need.
pub fn fuzz_qcow2_images(data: &[u8]) {
    prepared(run(&mut Input::new(data)));
}

fn run(input: &mut Input<'_>) -> io::Result<()> {
    let file = tempfile::tempfile()?;
    let base = input.rarely().then(tempfile::tempfile).transpose()?;
    let base = base.map(|file| file.set_len(DISK_BYTES / 2).map(|()| Base::Raw(Arc::new(file))));
    let base = base.transpose()?;
    let named = base.as_ref().map(|base| ("/nothing".as_ref(), base));
    Qcow2::create(file.try_clone()?, DISK_BYTES, named)?;
    let memory =
        GuestMemory::from_ranges(&[(GuestAddress(0), MEMORY_BYTES)]).map_err(io::Error::other)?;
    {
        let image = Qcow2::new(file.try_clone()?, base.clone(), false)?;
        image.load()?;
        for cluster in 0..6 {
            let piece = Piece { address: GuestAddress(0), bytes: CLUSTER_BYTES as u32 };
            image.write(&memory, &[piece], cluster * 3 * CLUSTER_BYTES)?;
        }
        image.discard(3 * CLUSTER_BYTES, CLUSTER_BYTES)?;
        image.flush()?;
    }
    let clusters = file.metadata()?.len() / CLUSTER_BYTES;
    for _ in 0..=input.below(12) {
        damage(input, &file, clusters)?;
    }
    let begin_bytes = file.metadata()?.len();
    let Ok(image) = Qcow2::new(file.try_clone()?, base, input.rarely()) else { return Ok(()) };
    if image.load().is_err() {
        return Ok(());
    }
    let most_bytes = image.size_bytes();
    while !input.is_empty() {
        // Their results are of no interest: errors are the guest's.
        let _ = request(input, &image, &memory);
        let bytes = file.metadata()?.len();
        let bound = begin_bytes + most_bytes.saturating_mul(2) + (16 << 20);
        assert!(bytes <= bound, "{begin_bytes} -> {bytes}");
    }
    Ok(())
}

/// Changes a number: of the header, of the first entries of a cluster, or anywhere.
fn damage(input: &mut Input<'_>, file: &File, clusters: u64) -> io::Result<()> {
    let cluster = input.below(clusters.clamp(1, 255) as usize) as u64 * CLUSTER_BYTES;
    let place = match input.below(4) {
        0 => u64::from(input.byte()) % 112,
        1 | 2 => cluster + u64::from(input.byte()) % 32 * 8,
        _ => cluster + input.number() % CLUSTER_BYTES,
    };
    let number = match input.below(4) {
        // Where another cluster is, as used, shared or compressed.
        0 => (input.below(64) as u64 * CLUSTER_BYTES) | 1 << 63,
        1 => input.below(64) as u64 * CLUSTER_BYTES,
        2 => input.number() | 1 << 62,
        _ => input.number(),
    };
    match input.below(3) {
        0 => file.write_all_at(&number.to_be_bytes(), place),
        1 => file.write_all_at(&(number as u32).to_be_bytes(), place),
        _ => file.write_all_at(&[number as u8], place),
    }
}

fn request(input: &mut Input<'_>, image: &Qcow2, memory: &GuestMemory) -> io::Result<()> {
    let sectors = (image.size_bytes() / 512).max(1);
    let sector = if input.rarely() {
        input.number() % sectors
    } else {
        input.number() % sectors.min(DISK_BYTES / 512)
    };
    let count = (1 + u64::from(input.byte())).min(sectors - sector);
    let (offset, bytes) = (sector * 512, count * 512);
    let piece = [Piece { address: GuestAddress(0), bytes: bytes as u32 }];
    match input.below(7) {
        0 | 1 => image.read(memory, &piece, offset),
        2 | 3 => image.write(memory, &piece, offset),
        4 => image.discard(offset, (bytes * 8).min(sectors * 512 - offset)),
        5 => image.zero(offset, bytes, if input.rarely() { Unmap::Yes } else { Unmap::No }),
        _ => image.flush(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn damaged_images_do_no_harm(data in prop::collection::vec(any::<u8>(), 0..200)) {
            fuzz_qcow2_images(&data);
        }
    }
}

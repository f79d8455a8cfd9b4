//! A disk whose host has no space left.

use std::fs::File;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use virtio_bindings::virtio_blk as blk;

use super::driver::Driver;
use super::model::{SECTORS, image, start};
use super::*;

const OK: u32 = blk::VIRTIO_BLK_S_OK;
const ERROR: u32 = blk::VIRTIO_BLK_S_IOERR;
const IN: u32 = blk::VIRTIO_BLK_T_IN;
const OUT: u32 = blk::VIRTIO_BLK_T_OUT;
const FLUSH: u32 = blk::VIRTIO_BLK_T_FLUSH;
/// The sectors of one cluster.
const CLUSTER: u64 = 128;

fn contents(disk: &mut Block, driver: &mut Driver, sector: u64) -> u8 {
    let slot = driver.submit(IN, sector, &[0; 4096]);
    driver.complete(disk);
    assert_eq!(driver.status(slot), OK);
    let data = driver.data(slot, 4096);
    assert!(data.iter().all(|byte| *byte == data[0]), "a mixture at {sector}");
    data[0]
}

/// What needs space fails, and everything else goes on. The overlay is a file in memory that is
/// sealed against growth: the kernel refuses to extend it, as on a full file system.
#[test]
fn a_full_host_disk_fails_only_what_needs_space() {
    for threads in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let (path, base) = image(&directory);
        base.write_all_at(&vec![7; (SECTORS * 512) as usize], 0).unwrap();
        let (first, second) = (0, 2 * CLUSTER);
        let overlay = directory.path().join("overlay");
        let mut config = DiskConfig { path, overlay: Some(overlay), ..DiskConfig::default() };
        {
            let mut driver = Driver::new();
            let mut disk = Block::open(&config, 0, driver.memory.clone(), DiskLock::Now).unwrap();
            start(&mut disk, threads);
            assert_eq!(driver.request(&mut disk, OUT, first, &[1; 4096]), OK);
            assert_eq!(driver.request(&mut disk, FLUSH, 0, &[]), OK);
            disk.release_exclusive().unwrap();
        }
        let content = std::fs::read(config.overlay.as_ref().unwrap()).unwrap();
        let full: OwnedFd =
            memfd_create("full", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        let full = File::from(full);
        full.write_all_at(&content, 0).unwrap();
        fcntl_add_seals(&full, SealFlags::GROW).unwrap();
        config.overlay = Some(format!("/proc/self/fd/{}", full.as_raw_fd()).into());

        let mut driver = Driver::new();
        let mut disk = Block::open(&config, 0, driver.memory.clone(), DiskLock::Now).unwrap();
        start(&mut disk, threads);
        for _ in 0..3 {
            assert_eq!(driver.request(&mut disk, OUT, second, &[2; 4096]), ERROR);
            // What was there, and what has a place already.
            assert_eq!(contents(&mut disk, &mut driver, second), 7);
            assert_eq!(driver.request(&mut disk, OUT, first, &[3; 4096]), OK);
            assert_eq!(contents(&mut disk, &mut driver, first), 3);
            assert_eq!(driver.request(&mut disk, FLUSH, 0, &[]), OK);
        }
        disk.release_exclusive().unwrap();
        drop(disk);

        // The image is sound, and takes more when there is space again.
        let mut content = vec![0; full.metadata().unwrap().len() as usize];
        full.read_exact_at(&mut content, 0).unwrap();
        let overlay = directory.path().join("overlay");
        std::fs::write(&overlay, content).unwrap();
        config.overlay = Some(overlay);
        let mut driver = Driver::new();
        let mut disk = Block::open(&config, 0, driver.memory.clone(), DiskLock::Now).unwrap();
        start(&mut disk, threads);
        assert_eq!(driver.request(&mut disk, OUT, second, &[2; 4096]), OK);
        assert_eq!(contents(&mut disk, &mut driver, second), 2);
        assert_eq!(contents(&mut disk, &mut driver, first), 3);
        assert_eq!(contents(&mut disk, &mut driver, CLUSTER), 7);
    }
}

//! A disk beside a model: an array of bytes.

use std::fs::File;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};

use proptest::prelude::*;
use virtio_bindings::virtio_blk as blk;

use std::path::Path;

use super::driver::{Driver, ranges};
use super::qcow2::Qcow2;
use super::*;
use crate::exit::ExitSignal;

pub(super) const SECTORS: u64 = 600;
const FLUSH: u64 = 1 << blk::VIRTIO_BLK_F_FLUSH;

#[derive(Debug, Clone)]
enum Step {
    Read { sector: u64, sectors: u64 },
    Write { sector: u64, sectors: u64, fill: u8 },
    Discard { sector: u64, sectors: u64 },
    Zero { sector: u64, sectors: u64, unmap: bool },
    Flush,
}

fn step() -> impl Strategy<Value = Step> {
    let range = || (0..SECTORS, prop_oneof![1u64..9, 1u64..400]);
    prop_oneof![
        3 => range().prop_map(|(sector, sectors)| Step::Read { sector, sectors }),
        4 => (range(), 1u8..).prop_map(|((sector, sectors), fill)| {
            Step::Write { sector, sectors, fill }
        }),
        1 => range().prop_map(|(sector, sectors)| Step::Discard { sector, sectors }),
        2 => (range(), any::<bool>()).prop_map(|((sector, sectors), unmap)| {
            Step::Zero { sector, sectors, unmap }
        }),
        1 => Just(Step::Flush),
    ]
}

/// Carries out the steps on the disk and on the model, in batches whose requests may overtake each
/// other. A batch ends where two requests overlap, whose order is not defined.
fn agree(disk: &mut Block, driver: &mut Driver, model: &mut [u8], steps: &[Step]) {
    let mut batch: Vec<(driver::Slot, Step)> = Vec::new();
    for step in steps {
        let (sector, sectors) = extent(step);
        let overlaps = batch.iter().any(|(_, other)| {
            let (start, count) = extent(other);
            sector < start + count && start < sector + sectors
        });
        if overlaps || batch.len() == 16 {
            finish(disk, driver, model, &mut batch);
        }
        let slot = submit(driver, step);
        batch.push((slot, step.clone()));
    }
    finish(disk, driver, model, &mut batch);
}

fn extent(step: &Step) -> (u64, u64) {
    match *step {
        Step::Read { sector, sectors }
        | Step::Write { sector, sectors, .. }
        | Step::Discard { sector, sectors }
        | Step::Zero { sector, sectors, .. } => (sector, sectors),
        Step::Flush => (0, 0),
    }
}

fn submit(driver: &mut Driver, step: &Step) -> driver::Slot {
    match *step {
        Step::Read { sector, sectors } => {
            driver.submit(blk::VIRTIO_BLK_T_IN, sector, &vec![0xdd; sectors as usize * 512])
        }
        Step::Write { sector, sectors, fill } => {
            driver.submit(blk::VIRTIO_BLK_T_OUT, sector, &content(sector, sectors, fill))
        }
        Step::Discard { sector, sectors } => {
            let range = ranges(&[(sector, sectors as u32, 0)]);
            driver.submit(blk::VIRTIO_BLK_T_DISCARD, 0, &range)
        }
        Step::Zero { sector, sectors, unmap } => {
            let range = ranges(&[(sector, sectors as u32, u32::from(unmap))]);
            driver.submit(blk::VIRTIO_BLK_T_WRITE_ZEROES, 0, &range)
        }
        Step::Flush => driver.submit(blk::VIRTIO_BLK_T_FLUSH, 0, &[]),
    }
}

/// Differs in each sector.
fn content(sector: u64, sectors: u64, fill: u8) -> Vec<u8> {
    (sector..sector + sectors).flat_map(|sector| [fill ^ sector as u8; 512]).collect()
}

fn finish(
    disk: &mut Block,
    driver: &mut Driver,
    model: &mut [u8],
    batch: &mut Vec<(driver::Slot, Step)>,
) {
    driver.complete(disk);
    for (slot, step) in batch.drain(..) {
        let (sector, sectors) = extent(&step);
        let expected = (sector as usize * 512).checked_add(sectors as usize * 512);
        let Some(part) = expected.and_then(|end| model.get_mut(sector as usize * 512..end)) else {
            assert_eq!(driver.status(slot), blk::VIRTIO_BLK_S_IOERR, "{step:?}");
            continue;
        };
        assert_eq!(driver.status(slot), blk::VIRTIO_BLK_S_OK, "{step:?}");
        match step {
            Step::Read { .. } => assert!(driver.data(slot, part.len()) == part, "{step:?}"),
            Step::Write { fill, .. } => part.copy_from_slice(&content(sector, sectors, fill)),
            // Whole clusters only.
            Step::Discard { .. } if disk.disk.image.format() == DiskFormat::Qcow2 => {
                let cluster = header::CLUSTER_BYTES as usize;
                let start = sector as usize * 512;
                let begin = start.next_multiple_of(cluster);
                let end = match start + part.len() {
                    end if end == SECTORS as usize * 512 => end,
                    end => end / cluster * cluster,
                };
                if begin < end {
                    part[begin - start..end - start].fill(0);
                }
            }
            Step::Discard { .. } | Step::Zero { .. } => part.fill(0),
            Step::Flush => {}
        }
    }
}

/// The whole content, as the guest reads it.
fn read_all(disk: &mut Block, driver: &mut Driver, bytes: usize) -> Vec<u8> {
    let mut all = Vec::new();
    while all.len() < bytes {
        let sectors = ((bytes - all.len()) as u64 / 512).min(256);
        let sector = all.len() as u64 / 512;
        let slot = submit(driver, &Step::Read { sector, sectors });
        driver.complete(disk);
        assert_eq!(driver.status(slot), blk::VIRTIO_BLK_S_OK);
        all.extend(driver.data(slot, sectors as usize * 512));
    }
    all
}

pub(super) fn start(disk: &mut Block, threads: bool) {
    if threads {
        let filters = Filters::new(Switch::Off).unwrap();
        disk.start_threads("test", &filters, &Arc::new(ExitSignal::new().unwrap())).unwrap();
    }
    disk.activate(FLUSH, vec![Driver::queue()]).unwrap();
}

fn check(config: &DiskConfig, threads: bool, steps: &[Step]) {
    let mut driver = Driver::new();
    let memory = driver.memory.clone();
    let mut disk = Block::open(config, 0, memory, DiskLock::Now).unwrap();
    start(&mut disk, threads);
    let mut model = vec![0; (SECTORS * 512) as usize];
    agree(&mut disk, &mut driver, &mut model, steps);
    assert_content(&read_all(&mut disk, &mut driver, model.len()), &model);
}

/// Fails with the sectors that are different.
#[track_caller]
fn assert_content(found: &[u8], model: &[u8]) {
    let sectors = found.chunks(512).zip(model.chunks(512)).enumerate();
    let wrong: Vec<_> = sectors
        .filter(|(_, (found, model))| found != model)
        .map(|(sector, (found, model))| (sector, found[0], model[0]))
        .collect();
    assert!(wrong.is_empty(), "sector, found, expected: {wrong:?}");
}

pub(super) fn image(directory: &tempfile::TempDir) -> (PathBuf, File) {
    let path = directory.path().join("image");
    let file =
        File::options().read(true).write(true).create(true).truncate(false).open(&path).unwrap();
    file.set_len(SECTORS * 512).unwrap();
    (path, file)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn a_raw_disk_is_an_array_of_bytes(
        steps in prop::collection::vec(step(), 1..60),
        threads: bool,
        direct: bool,
    ) {
        // /tmp may be in memory, which has no direct transfers.
        let directory = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let (path, file) = image(&directory);
        let direct = Switch::from_bool(direct);
        check(&DiskConfig { path, direct, ..DiskConfig::default() }, threads, &steps);
        prop_assert_eq!(file.metadata().unwrap().len(), SECTORS * 512);
    }
}

/// What is under an overlay: none, a raw image, another qcow2 image.
fn bases() -> impl Strategy<Value = Option<DiskFormat>> {
    prop_oneof![Just(None), Just(Some(DiskFormat::Raw)), Just(Some(DiskFormat::Qcow2))]
}

fn new_qcow2(path: &Path) {
    let file = File::create_new(path).unwrap();
    drop(file);
    let file = File::options().read(true).write(true).open(path).unwrap();
    Qcow2::create(file, SECTORS * 512, None).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn a_qcow2_disk_is_an_array_of_bytes(
        base in bases(),
        before in prop::collection::vec(step(), 0..20),
        steps in prop::collection::vec(step(), 1..60),
        threads: bool,
    ) {
        let directory = tempfile::tempdir().unwrap();
        let (path, file) = image(&directory);
        let mut model = vec![0; (SECTORS * 512) as usize];
        if base != Some(DiskFormat::Raw) {
            std::fs::remove_file(&path).unwrap();
            new_qcow2(&path);
        }
        let format = base.unwrap_or(DiskFormat::Qcow2);
        let mut config = DiskConfig { path: path.clone(), format, ..DiskConfig::default() };
        let run = |config: &DiskConfig, model: &mut [u8], steps: &[Step]| {
            let mut driver = Driver::new();
            let mut disk = Block::open(config, 0, driver.memory.clone(), DiskLock::Now).unwrap();
            start(&mut disk, threads);
            agree(&mut disk, &mut driver, model, steps);
            assert_content(&read_all(&mut disk, &mut driver, model.len()), model);
            // The file has everything, without the end of the device.
            disk.save();
            disk.release_exclusive().unwrap();
        };
        run(&config, &mut model, &before);
        let below = std::fs::read(&path).unwrap();
        if base.is_some() {
            config.overlay = Some(directory.path().join("overlay"));
        }
        run(&config, &mut model, &steps);
        // Another device finds the same.
        run(&config, &mut model, &[]);
        if base.is_some() {
            prop_assert!(std::fs::read(&path).unwrap() == below, "the base has changed");
        }
        drop(file);
    }
}

/// Zeros and a write in the same unused cluster, side by side.
#[test]
fn zeros_beside_a_write_keep_it() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("image");
    new_qcow2(&path);
    let config = DiskConfig { path, format: DiskFormat::Qcow2, ..DiskConfig::default() };
    let sectors = header::CLUSTER_BYTES / 512;
    let clusters = || (0..SECTORS / sectors).map(|cluster| cluster * sectors);
    let mut steps = Vec::new();
    for fill in 1..100 {
        steps.push(Step::Discard { sector: 0, sectors: SECTORS });
        for sector in clusters() {
            steps.push(Step::Write { sector: sector + 48, sectors: 3, fill });
            steps.push(Step::Zero { sector: sector + 3, sectors: 6, unmap: false });
        }
        steps.extend(clusters().map(|sector| Step::Read { sector, sectors: 64 }));
    }
    check(&config, true, &steps);
}

/// The clusters that a guest discards are holes, and are used again.
#[test]
fn discarded_clusters_are_holes() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("image");
    new_qcow2(&path);
    let mut driver = Driver::new();
    let config =
        DiskConfig { path: path.clone(), format: DiskFormat::Qcow2, ..DiskConfig::default() };
    let mut disk = Block::open(&config, 0, driver.memory.clone(), DiskLock::Now).unwrap();
    start(&mut disk, true);
    let blocks = || path.metadata().unwrap().blocks();
    let empty = blocks();
    for round in 0..3 {
        let status = driver.request(&mut disk, blk::VIRTIO_BLK_T_OUT, 0, &vec![7; 256 << 10]);
        assert_eq!(status, blk::VIRTIO_BLK_S_OK);
        assert_eq!(driver.request(&mut disk, blk::VIRTIO_BLK_T_FLUSH, 0, &[]), 0);
        assert!(blocks() >= empty + 512, "{empty} {}", blocks());
        let all = ranges(&[(0, 512, 0)]);
        assert_eq!(driver.request(&mut disk, blk::VIRTIO_BLK_T_DISCARD, 0, &all), 0);
        assert_eq!(driver.request(&mut disk, blk::VIRTIO_BLK_T_FLUSH, 0, &[]), 0);
        assert!(blocks() < empty + 512, "round {round}: {empty} {}", blocks());
    }
    assert!(path.metadata().unwrap().len() < 2 << 20);
}

#[test]
fn images_are_locked_in_all_formats_and_shared_read_only() {
    let directory = tempfile::tempdir().unwrap();
    let (base, _file) = image(&directory);
    let memory = Driver::new().memory;
    let open = |text: String| {
        let config: DiskConfig = text.parse().unwrap();
        Block::open(&config, 0, memory.clone(), DiskLock::Now)
    };
    let base = base.display();
    let overlay = |name: &str| directory.path().join(name).display().to_string();
    let error = |text: String| open(text).err().unwrap().to_string();
    // Two overlays share their base, which has no writer meanwhile.
    let first = open(format!("path={base},overlay={}", overlay("one"))).unwrap();
    let second = open(format!("path={base},overlay={}", overlay("two"))).unwrap();
    assert!(error(format!("path={base}")).contains("in use"));
    assert!(error(format!("path={base},overlay={}", overlay("two"))).contains("in use"));
    let again = format!("path={base},overlay={},readonly=on", overlay("two"));
    assert!(error(again.clone()).contains("in use"));
    drop((first, second));
    let _readers = [open(again.clone()).unwrap(), open(again).unwrap()];
    // An overlay is not a disk of its own, and its base is not opened because it names it.
    let alone = format!("path={},format=qcow2", overlay("one"));
    assert!(error(alone).contains("overlay of another image"));
    // Formats are not guessed.
    let raw = open(format!("path={}", overlay("one"))).unwrap();
    assert_eq!(raw.info().format, DiskFormat::Raw);
    assert!(error(format!("path={base},format=qcow2,readonly=on")).contains("not a qcow2"));
    drop(raw);
    let plain = overlay("plain");
    new_qcow2(Path::new(&plain));
    let wrong = format!("path={base},overlay={plain}");
    assert!(error(wrong).contains("not an overlay"));
    let missing = overlay("missing");
    assert!(!Path::new(&missing).exists());
    let nothing = format!("path=/nothing,overlay={missing}");
    assert!(error(nothing).contains("/nothing") && !Path::new(&missing).exists());
}

/// The monitor of the source writes to the image until this one acquires it.
#[test]
fn an_acquired_qcow2_image_is_read_again() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("image");
    new_qcow2(&path);
    let config = DiskConfig { path, format: DiskFormat::Qcow2, ..DiskConfig::default() };
    let (mut there, mut here) = (Driver::new(), Driver::new());
    let mut source = Block::open(&config, 0, there.memory.clone(), DiskLock::Now).unwrap();
    let mut destination = Block::open(&config, 0, here.memory.clone(), DiskLock::Later).unwrap();
    assert_eq!(destination.disk_bytes(), source.disk_bytes());
    start(&mut source, true);
    start(&mut destination, true);
    for round in 0..3_u8 {
        let sector = u64::from(round) * 128;
        let kind = blk::VIRTIO_BLK_T_OUT;
        assert_eq!(there.request(&mut source, kind, sector, &[round + 1; 4096]), 0);
    }
    let error = here.request(&mut destination, blk::VIRTIO_BLK_T_IN, 0, &[0; 512]);
    assert_eq!(error, blk::VIRTIO_BLK_S_IOERR);
    assert!(destination.acquire_exclusive().unwrap_err().contains("in use"));
    source.release_exclusive().unwrap();
    destination.acquire_exclusive().unwrap();
    for round in 0..3_u8 {
        let slot = here.submit(blk::VIRTIO_BLK_T_IN, u64::from(round) * 128, &[0; 4096]);
        here.complete(&mut destination);
        assert_eq!(here.data(slot, 4096), [round + 1; 4096]);
    }
}

#[test]
fn disks_grow_with_their_images() {
    let directory = tempfile::tempdir().unwrap();
    let (path, file) = image(&directory);
    let mut driver = Driver::new();
    let config = DiskConfig { path, ..DiskConfig::default() };
    let mut disk = Block::open(&config, 0, driver.memory.clone(), DiskLock::Now).unwrap();
    start(&mut disk, true);
    let old = SECTORS * 512;
    assert_eq!(disk.resize(None).unwrap(), old);
    assert!(matches!(disk.resize(Some(old * 2)), Err(ResizeError::SizeOfRaw)));
    file.set_len(old * 2 + 100).unwrap();
    assert!(matches!(disk.resize(None), Err(ResizeError::OddSize { .. })));
    file.set_len(old - 512).unwrap();
    assert!(matches!(disk.resize(None), Err(ResizeError::Shrinks { .. })));
    file.set_len(old * 2).unwrap();
    let last = old * 2 / 512 - 1;
    let kind = blk::VIRTIO_BLK_T_OUT;
    assert_eq!(driver.request(&mut disk, kind, last, &[1; 512]), blk::VIRTIO_BLK_S_IOERR);
    assert_eq!(disk.resize(None).unwrap(), old * 2);
    assert_eq!(driver.request(&mut disk, kind, last, &[1; 512]), blk::VIRTIO_BLK_S_OK);
    let mut capacity = [0; 8];
    disk.read_config(0, &mut capacity);
    assert_eq!(u64::from_le_bytes(capacity), last + 1);

    let path = directory.path().join("qcow2");
    new_qcow2(&path);
    let config = DiskConfig { path, format: DiskFormat::Qcow2, ..DiskConfig::default() };
    let mut disk = Block::open(&config, 0, driver.memory.clone(), DiskLock::Now).unwrap();
    assert!(matches!(disk.resize(None), Err(ResizeError::NoSize)));
    assert!(matches!(disk.resize(Some(512)), Err(ResizeError::Shrinks { .. })));
    let large = 48 << 30;
    assert!(matches!(disk.resize(Some(large * 2)), Err(ResizeError::TooLarge { .. })));
    assert_eq!(disk.resize(Some(large)).unwrap(), large);
    drop(disk);
    let mut driver = Driver::new();
    let mut disk = Block::open(&config, 0, driver.memory.clone(), DiskLock::Now).unwrap();
    assert_eq!(disk.disk_bytes(), Some(large));
    start(&mut disk, false);
    assert_eq!(driver.request(&mut disk, kind, large / 512 - 1, &[1; 512]), 0);
}

#[test]
fn discarded_ranges_are_holes_in_the_image() {
    let directory = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    let (path, file) = image(&directory);
    file.write_all_at(&vec![7; (SECTORS * 512) as usize], 0).unwrap();
    file.sync_all().unwrap();
    let full = file.metadata().unwrap().blocks();
    assert!(full >= SECTORS);
    let mut driver = Driver::new();
    let config = DiskConfig { path, ..DiskConfig::default() };
    let mut disk = Block::open(&config, 0, driver.memory.clone(), DiskLock::Now).unwrap();
    start(&mut disk, true);
    let most = ranges(&[(0, 80, 0), (80, 0, 0), (160, 440, 0)]);
    assert_eq!(driver.request(&mut disk, blk::VIRTIO_BLK_T_DISCARD, 0, &most), 0);
    assert_eq!(file.metadata().unwrap().blocks(), 80);
    let unmap = ranges(&[(80, 80, 1)]);
    assert_eq!(driver.request(&mut disk, blk::VIRTIO_BLK_T_WRITE_ZEROES, 0, &unmap), 0);
    assert_eq!(file.metadata().unwrap().blocks(), 0);
    // Without the flag, the blocks belong to the image.
    let keep = ranges(&[(0, 80, 0)]);
    assert_eq!(driver.request(&mut disk, blk::VIRTIO_BLK_T_WRITE_ZEROES, 0, &keep), 0);
    assert!(file.metadata().unwrap().blocks() >= 80);
    assert_eq!(
        disk.disk.counters.discarded_bytes.load(std::sync::atomic::Ordering::Relaxed),
        520 * 512
    );
}

/// All ranges are checked before the first one is touched.
/// A kind of request, its ranges (sector, sectors, flags), and the status.
type Case<'a> = (u32, &'a [(u64, u32, u32)], u32);

#[test]
fn invalid_ranges_leave_the_disk_unchanged() {
    let directory = tempfile::tempdir().unwrap();
    let (path, file) = image(&directory);
    file.write_all_at(&vec![7; (SECTORS * 512) as usize], 0).unwrap();
    let mut driver = Driver::new();
    let config = DiskConfig { path: path.clone(), ..DiskConfig::default() };
    let mut disk = Block::open(&config, 0, driver.memory.clone(), DiskLock::Now).unwrap();
    start(&mut disk, false);
    let (discard, zero) = (blk::VIRTIO_BLK_T_DISCARD, blk::VIRTIO_BLK_T_WRITE_ZEROES);
    let (error, unsupported) = (blk::VIRTIO_BLK_S_IOERR, blk::VIRTIO_BLK_S_UNSUPP);
    let good = (0, 8, 0);
    let too_large = (ZERO_BYTES / 512) as u32 + 1;
    let cases: [Case<'_>; 11] = [
        (discard, &[good, (SECTORS, 1, 0)], error),
        (discard, &[good, (SECTORS - 1, 2, 0)], error),
        (discard, &[good, (u64::MAX, 1, 0)], error),
        (discard, &[good, (u64::MAX / 512, u32::MAX, 0)], error),
        (discard, &[good, (0, 8, 1)], unsupported),
        (discard, &[], error),
        (discard, &[good; DISCARD_RANGES as usize + 1], error),
        (zero, &[good, (0, too_large, 0)], error),
        (zero, &[good, (0, 8, 2)], unsupported),
        (zero, &[good; ZERO_RANGES as usize + 1], error),
        (zero, &[], error),
    ];
    for (kind, segments, expected) in cases {
        let status = driver.request(&mut disk, kind, 0, &ranges(segments));
        assert_eq!(status, expected, "{kind} {segments:?}");
    }
    // Half a range.
    assert_eq!(driver.request(&mut disk, discard, 0, &ranges(&[good])[..8]), error);
    assert!(std::fs::read(&path).unwrap().iter().all(|byte| *byte == 7));
    drop(disk);

    let config = DiskConfig { path: path.clone(), readonly: Switch::On, ..DiskConfig::default() };
    let mut driver = Driver::new();
    let mut disk = Block::open(&config, 0, driver.memory.clone(), DiskLock::Now).unwrap();
    assert_eq!(disk.features() & 1 << blk::VIRTIO_BLK_F_DISCARD, 0);
    start(&mut disk, false);
    for kind in [discard, zero] {
        assert_eq!(driver.request(&mut disk, kind, 0, &ranges(&[good])), error);
    }
    assert!(std::fs::read(&path).unwrap().iter().all(|byte| *byte == 7));
}

/// An image that another process truncates: errors for what is missing, data for the rest.
#[test]
fn a_disk_that_shrinks_answers_with_errors() {
    for threads in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let (path, file) = image(&directory);
        let mut driver = Driver::new();
        let config = DiskConfig { path, ..DiskConfig::default() };
        let mut disk = Block::open(&config, 0, driver.memory.clone(), DiskLock::Now).unwrap();
        start(&mut disk, threads);
        file.set_len(512 * 100).unwrap();
        let mut read = |sector| driver.request(&mut disk, blk::VIRTIO_BLK_T_IN, sector, &[0; 4096]);
        assert_eq!(read(0), blk::VIRTIO_BLK_S_OK);
        assert_eq!(read(96), blk::VIRTIO_BLK_S_IOERR);
        assert_eq!(read(300), blk::VIRTIO_BLK_S_IOERR);
        assert_eq!(read(92), blk::VIRTIO_BLK_S_OK);
    }
}

/// Requests that threads execute belong to the driver that is gone.
#[test]
fn a_reset_forgets_requests_in_flight() {
    let directory = tempfile::tempdir().unwrap();
    let (path, _file) = image(&directory);
    let mut driver = Driver::new();
    let config = DiskConfig { path, ..DiskConfig::default() };
    let mut disk = Block::open(&config, 0, driver.memory.clone(), DiskLock::Now).unwrap();
    start(&mut disk, true);
    for request in 0..16 {
        driver.submit(blk::VIRTIO_BLK_T_OUT, request, &[1; 512]);
    }
    disk.process_queue(0);
    disk.reset();
    assert_eq!(disk.pool.as_ref().unwrap().in_flight(), 0);
    disk.activate(FLUSH, vec![Driver::queue()]).unwrap();
    assert_eq!(disk.finish_requests(), Work::default());
}

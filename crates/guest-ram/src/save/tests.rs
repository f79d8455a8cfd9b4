use super::*;
use crate::{Backing, HugePages, Populate, RegionSpec};
use rustix::mm::{Advice, madvise};
use std::os::unix::fs::MetadataExt;

const PAGE: u64 = PAGE_SIZE_BYTES;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const OFFSET: u64 = 2 * PAGE;

/// Memory of two regions of `size_bytes`; `None` for hugetlb on a machine without a pool of huge
/// pages.
fn ram_of(backing: Backing, size_bytes: u64) -> Option<GuestRam> {
    let spec = |start| RegionSpec { start: GuestAddress(start), size_bytes, host_node: None };
    match GuestRam::new(&[spec(0), spec(4 * GIB)], backing, HugePages::Off, Populate::Lazy) {
        Ok(ram) => Some(ram),
        Err(RamError::TooFewHugePages { .. }) if backing == Backing::Hugetlb2M => None,
        Err(error) => panic!("{error}"),
    }
}

fn ram() -> GuestRam {
    ram_of(Backing::Anonymous, 4 * MIB).unwrap()
}

fn specs(ram: &GuestRam) -> Vec<RegionSpec> {
    let spec = |region: &crate::Region| RegionSpec {
        start: region.start,
        size_bytes: region.size_bytes,
        host_node: None,
    };
    ram.regions().iter().map(spec).collect()
}

fn write(ram: &GuestRam, address: u64, pages: u64) {
    let content: Vec<u8> =
        (0..pages * PAGE).map(|index| (address / PAGE + index % 251) as u8 | 1).collect();
    ram.memory().write_slice(&content, GuestAddress(address)).unwrap();
}

fn save(ram: &GuestRam, file: &File) -> RamImage {
    ram.save(file, OFFSET, &mut |_| {}).unwrap()
}

fn content(ram: &GuestRam) -> Vec<u8> {
    let mut all = Vec::new();
    for region in ram.regions() {
        let mut content = vec![0; region.size_bytes as usize];
        ram.memory().read_slice(&mut content, region.start).unwrap();
        all.append(&mut content);
    }
    all
}

/// The memory part of a file.
fn content_of(file: &File, ram: &GuestRam) -> Vec<u8> {
    let mut content = vec![0; ram.size_bytes() as usize];
    file.read_exact_at(&mut content, OFFSET).unwrap();
    content
}

#[test]
fn only_pages_with_data_take_room_in_the_file() {
    for backing in [Backing::Anonymous, Backing::Memfd, Backing::Hugetlb2M] {
        let Some(ram) = ram_of(backing, 4 * MIB) else { continue };
        write(&ram, 2 * MIB, 16);
        write(&ram, 4 * GIB + 4 * MIB - PAGE, 1);
        // Accessed, and zero.
        ram.memory().write_slice(&vec![0; 65536], GuestAddress(0)).unwrap();
        let file = tempfile::tempfile().unwrap();
        let image = save(&ram, &file);
        assert_eq!(image.data_bytes(), 17 * PAGE, "{backing}");
        assert_eq!(image.extents().len(), 2);
        let metadata = file.metadata().unwrap();
        assert_eq!(metadata.len(), OFFSET + 8 * MIB);
        assert!(metadata.blocks() * 512 <= 64 * PAGE, "{backing}: {} blocks", metadata.blocks());
        assert!(content_of(&file, &ram) == content(&ram));
        image.verify(&file, OFFSET, &mut |_| {}).unwrap();
    }
}

#[test]
fn the_former_content_of_the_file_is_discarded() {
    let ram = ram();
    write(&ram, MIB, 1);
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(&vec![7; 9 << 20], 0).unwrap();
    let image = save(&ram, &file);
    assert!(content_of(&file, &ram) == content(&ram));
    image.verify(&file, OFFSET, &mut |_| {}).unwrap();
    // Parts of the file outside the memory stay unchanged.
    let mut around = [0; 2];
    file.read_exact_at(&mut around[..1], OFFSET - 1).unwrap();
    file.read_exact_at(&mut around[1..], OFFSET + 8 * MIB).unwrap();
    assert_eq!(around, [7, 7]);
    assert_eq!(file.metadata().unwrap().len(), 9 * MIB);
}

#[test]
fn memory_that_was_only_read_is_not_scanned() {
    let ram = ram();
    assert!(content(&ram).iter().all(|byte| *byte == 0));
    let file = tempfile::tempfile().unwrap();
    let image = save(&ram, &file);
    assert_eq!((image.data_bytes(), image.extents()), (0, &[][..]));
    assert_eq!(file.metadata().unwrap().blocks(), 0);
}

/// Moves all memory to swap space, if available; checks that it is there.
fn page_out(ram: &GuestRam, held_pages: usize) {
    let region = ram.regions()[0];
    // SAFETY: the range is the region's, which lives as long as `ram`; paging out changes no
    // content.
    unsafe {
        madvise(region.host_address as *mut _, region.size_bytes as usize, Advice::LinuxPageOut)
    }
    .unwrap();
    let pages = (region.size_bytes / PAGE) as usize;
    let states = ram.pagemap.as_ref().unwrap().read(region.host_address as usize, pages).unwrap();
    let private = states.iter().filter(|state| state.is_private()).count();
    let in_memory = states.iter().filter(|state| state.is_private_in_memory()).count();
    assert_eq!(private, held_pages);
    let swaps = std::fs::read_to_string("/proc/swaps").unwrap_or_default();
    assert!(
        swaps.lines().count() < 2 || in_memory < held_pages,
        "{in_memory} of {held_pages} in memory"
    );
}

#[test]
fn pages_are_saved_wherever_the_host_keeps_them() {
    let ram = ram();
    write(&ram, MIB, 256);
    page_out(&ram, 256);
    let file = tempfile::tempfile().unwrap();
    let image = save(&ram, &file);
    assert_eq!(image.data_bytes(), MIB);
    assert!(content_of(&file, &ram) == content(&ram));

    // The same for copies of pages of a file.
    let restored = GuestRam::restore(&specs(&ram), HugePages::Off, file, OFFSET, &image).unwrap();
    write(&restored, MIB + PAGE, 100);
    page_out(&restored, 100);
    let file = tempfile::tempfile().unwrap();
    assert_eq!(save(&restored, &file).data_bytes(), MIB);
    assert!(content_of(&file, &restored) == content(&restored));
}

#[test]
fn without_a_pagemap_everything_is_scanned_and_the_result_is_the_same() {
    let mut ram = ram();
    write(&ram, MIB, 3);
    write(&ram, 4 * GIB, 300);
    let images = [true, false].map(|with_pagemap| {
        if !with_pagemap {
            ram.pagemap = None;
        }
        let file = tempfile::tempfile().unwrap();
        let image = save(&ram, &file);
        assert!(content_of(&file, &ram) == content(&ram));
        (image, file)
    });
    assert_eq!(images[0].0, images[1].0);

    // The same for memory that is still mapped from the file.
    let [(image, file), _] = images;
    let mut restored =
        GuestRam::restore(&specs(&ram), HugePages::Off, file, OFFSET, &image).unwrap();
    write(&restored, MIB + PAGE, 1);
    let with = save(&restored, &tempfile::tempfile().unwrap());
    restored.pagemap = None;
    assert_eq!(save(&restored, &tempfile::tempfile().unwrap()), with);
    assert_eq!(with.data_bytes(), 303 * PAGE);
}

#[test]
fn progress_is_reported_for_each_chunk() {
    let ram = ram_of(Backing::Anonymous, 66 * MIB).unwrap();
    write(&ram, 64 * MIB - PAGE, 3);
    write(&ram, 4 * GIB, 1);
    let file = tempfile::tempfile().unwrap();
    let mut done = Vec::new();
    let image = ram.save(&file, OFFSET, &mut |bytes| done.push(bytes)).unwrap();
    assert_eq!(done, [64 * MIB, 128 * MIB, 132 * MIB]);
    assert_eq!(image.extents().len(), 2);
    image.verify(&file, OFFSET, &mut |_| {}).unwrap();
}

#[test]
fn fragmented_memory_has_a_short_list_of_extents() {
    let ram = ram_of(Backing::Anonymous, 40 * MIB).unwrap();
    let mut pages = 0;
    for page in (0..10 * 1024).step_by(2) {
        write(&ram, page * PAGE, 1);
        pages += 1;
    }
    write(&ram, 4 * GIB + 30 * MIB, 1);
    let file = tempfile::tempfile().unwrap();
    let image = save(&ram, &file);
    assert_eq!(image.extents().len(), crate::MAX_EXTENTS);
    assert_eq!(image.data_bytes(), (pages + 1) * PAGE);
    // No data was written into the gaps.
    assert!(file.metadata().unwrap().blocks() * 512 < image.data_bytes() + MIB);
    image.verify(&file, OFFSET, &mut |_| {}).unwrap();
    assert!(content_of(&file, &ram) == content(&ram));
}

fn expect_disk_full(error: &RamError) -> (u64, u64) {
    let text = error.to_string();
    assert!(
        text.contains("no room to save guest memory") && text.contains("free at least"),
        "{text}"
    );
    let RamError::DiskFull { written_bytes, needed_bytes, .. } = error else { panic!("{error:?}") };
    (*written_bytes, *needed_bytes)
}

#[test]
fn a_full_disk_is_reported_with_the_required_room() {
    let ram = ram();
    write(&ram, 3 * MIB, 256);
    write(&ram, 4 * GIB, 1);
    let file = File::options().write(true).open("/dev/full").unwrap();
    let error = ram.save(&file, OFFSET, &mut |_| {}).unwrap_err();
    assert_eq!(expect_disk_full(&error), (0, MIB + PAGE));
}

#[test]
fn a_disk_that_fills_up_during_a_save_is_reported_too() {
    // A small file system in a thread's own mount namespace: not every test environment allows
    // that.
    let result = std::thread::spawn(|| {
        // SAFETY: this thread's root and working directory are its own from now on, and no other
        // code uses the thread.
        unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNS) }?;
        let directory = tempfile::tempdir().unwrap();
        rustix::mount::mount_change(
            "/",
            rustix::mount::MountPropagationFlags::PRIVATE
                | rustix::mount::MountPropagationFlags::REC,
        )?;
        let flags = rustix::mount::MountFlags::empty();
        rustix::mount::mount("none", directory.path(), "tmpfs", flags, c"size=2m")?;
        let file = File::options()
            .create_new(true)
            .read(true)
            .write(true)
            .open(directory.path().join("ram"))
            .unwrap();
        let ram = ram();
        write(&ram, 0, 768);
        let error = ram.save(&file, OFFSET, &mut |_| {}).unwrap_err();
        let (written, needed) = expect_disk_full(&error);
        assert!(written <= 2 * MIB && needed == 3 * MIB, "{error}");
        // The memory is unchanged, and can be saved elsewhere.
        let elsewhere = tempfile::tempfile_in("/dev/shm").unwrap();
        assert_eq!(save(&ram, &elsewhere).data_bytes(), 3 * MIB);
        rustix::mount::unmount(directory.path(), rustix::mount::UnmountFlags::DETACH)
    })
    .join()
    .unwrap();
    assert!(
        matches!(result, Ok(()) | Err(rustix::io::Errno::PERM | rustix::io::Errno::ACCESS)),
        "{result:?}"
    );
}

#[test]
fn an_unwritable_file_is_reported() {
    let ram = ram();
    write(&ram, 0, 1);
    let path = tempfile::NamedTempFile::new().unwrap();
    let read_only = File::open(path.path()).unwrap();
    let error = ram.save(&read_only, OFFSET, &mut |_| {}).unwrap_err();
    assert!(matches!(error, RamError::WriteImage { offset_bytes: OFFSET, .. }), "{error}");
}

#[test]
fn a_cancelled_save_ends_within_a_buffer() {
    let ram = ram();
    write(&ram, 0, 512);
    write(&ram, 4 * GIB, 512);
    let file = tempfile::tempfile().unwrap();
    for patience in 0..8_u32 {
        let asked = std::cell::Cell::new(0);
        let is_cancelled = || {
            asked.set(asked.get() + 1);
            asked.get() > patience
        };
        let result = ram.save_unless(&file, OFFSET, &mut |_| {}, &is_cancelled);
        assert!(matches!(result, Err(RamError::SaveCancelled)), "{patience}: {result:?}");
        assert_eq!(asked.get(), patience + 1, "nothing is done after the cancellation");
    }
}

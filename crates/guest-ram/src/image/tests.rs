use super::*;
use crate::{Backing, GuestRam, HugePages, Populate};
use std::os::unix::fs::FileExt;
use vm_memory::{Bytes, GuestAddress};

const PAGE: u64 = PAGE_SIZE_BYTES;
const MIB: u64 = 1 << 20;
const FILE_OFFSET: u64 = PAGE;

fn specs() -> [RegionSpec; 2] {
    [(0, 65 * MIB), (1 << 32, MIB)].map(|(start, size_bytes)| RegionSpec {
        start: GuestAddress(start),
        size_bytes,
        host_node: None,
    })
}

/// Memory of two chunks with data in both, saved.
fn saved() -> (File, RamImage) {
    let ram = GuestRam::new(&specs(), Backing::Anonymous, HugePages::Off, Populate::Lazy).unwrap();
    for (address, size_bytes) in
        [(2 * PAGE, 3 * PAGE), (64 * MIB + PAGE, PAGE), ((1 << 32) + MIB - PAGE, PAGE)]
    {
        ram.memory().write_slice(&vec![0x5a; size_bytes as usize], GuestAddress(address)).unwrap();
    }
    let file = tempfile::tempfile().unwrap();
    let image = ram.save(&file, FILE_OFFSET, &mut |_| {}).unwrap();
    (file, image)
}

fn verify(image: &RamImage, file: &File) -> Result<(), ImageError> {
    match image.verify(file, FILE_OFFSET, &mut |_| {}) {
        Err(RamError::Image(error)) => Err(error),
        other => {
            other.unwrap();
            Ok(())
        }
    }
}

fn restore(image: &RamImage, file: &File) -> Result<GuestRam, RamError> {
    GuestRam::restore(&specs(), HugePages::Off, file.try_clone().unwrap(), FILE_OFFSET, image)
}

#[test]
fn an_image_describes_its_content() {
    let (file, image) = saved();
    assert_eq!(image.ram_bytes(), 66 * MIB);
    assert_eq!(image.data_bytes(), 5 * PAGE);
    assert_eq!(image.regions()[1], ImageRegion { start: 1 << 32, size_bytes: MIB });
    let extents: Vec<_> =
        image.extents().iter().map(|extent| (extent.offset_bytes, extent.size_bytes)).collect();
    assert_eq!(extents, [(2 * PAGE, 3 * PAGE), (64 * MIB + PAGE, PAGE), (66 * MIB - PAGE, PAGE)]);
    verify(&image, &file).unwrap();
    let mut done = Vec::new();
    image.verify(&file, FILE_OFFSET, &mut |bytes| done.push(bytes)).unwrap();
    assert_eq!(done, [64 * MIB, 66 * MIB]);
}

/// A change to an image.
type Damage = fn(&mut RamImage);

#[test]
fn damaged_descriptions_are_refused_with_a_reason() {
    let (file, good) = saved();
    let damages: &[(&str, Damage)] = &[
        ("version 2", |image| image.version = 2),
        ("0 regions", |image| image.regions.clear()),
        ("0 regions", |image| {
            image.regions.clear();
            image.extents.clear();
            image.checksums.clear();
            image.data_bytes = 0;
        }),
        ("1025 regions", |image| image.regions = vec![image.regions[0]; 1025]),
        ("region at 0x0 of 0 bytes", |image| image.regions[0].size_bytes = 0),
        ("region at 0x0 of 4097 bytes", |image| image.regions[0].size_bytes = PAGE + 1),
        ("region at 0x1 ", |image| image.regions[0].start = 1),
        ("not behind its predecessor", |image| image.regions.swap(0, 1)),
        ("region at 0x100000000", |image| image.regions[1].size_bytes = 0u64.wrapping_sub(PAGE)),
        ("whole pages", |image| image.extents[0].offset_bytes += 1),
        ("whole pages", |image| image.extents[2].size_bytes -= 512),
        ("empty", |image| image.extents[1].size_bytes = 0),
        ("overlaps", |image| image.extents[0].size_bytes = 65 * MIB),
        ("lies before", |image| image.extents.swap(0, 1)),
        ("outside", |image| image.extents[2].size_bytes += PAGE),
        ("outside", |image| image.extents[2].offset_bytes = 0u64.wrapping_sub(PAGE)),
        ("outside", |image| image.regions[1].size_bytes = MIB / 2),
        ("4097 extents", |image| image.extents = vec![image.extents[0]; MAX_EXTENTS + 1]),
        ("claims 24576 bytes of data in extents of 20480", |image| image.data_bytes += PAGE),
        ("claims 20479 bytes", |image| image.data_bytes -= 1),
        ("1 checksums and needs 2", |image| image.checksums.truncate(1)),
        ("3 checksums", |image| image.checksums.push(0)),
        ("checksums", |image| image.chunk_bytes /= 2),
    ];
    for (reason, damage) in damages {
        let mut image = good.clone();
        damage(&mut image);
        let error = image.validate().unwrap_err();
        assert!(error.to_string().contains(reason), "{error}, not {reason}");
        assert_eq!(verify(&image, &file).unwrap_err(), error);
        let refused = restore(&image, &file).unwrap_err();
        assert!(matches!(&refused, RamError::Image(reason) if *reason == error), "{refused}");
    }
}

#[test]
fn unknown_fields_are_refused() {
    let (_, image) = saved();
    let text = serde_json::to_string(&image).unwrap();
    assert_eq!(serde_json::from_str::<RamImage>(&text).unwrap(), image);
    for (from, to) in
        [("\"version\"", "\"flavour\":1,\"version\""), ("\"data_bytes\"", "\"bytes\"")]
    {
        assert!(serde_json::from_str::<RamImage>(&text.replace(from, to)).is_err());
    }
}

#[test]
fn memory_of_another_machine_is_refused() {
    let (file, image) = saved();
    let mut specs = specs();
    specs[1].size_bytes *= 2;
    let error =
        GuestRam::restore(&specs, HugePages::Off, file.try_clone().unwrap(), FILE_OFFSET, &image)
            .unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains(
            "0x100000000+0x100000, and 0x0+0x4100000, 0x100000000+0x200000 are requested"
        ),
        "{text}"
    );
}

#[test]
fn a_file_that_was_cut_short_is_refused() {
    let (file, image) = saved();
    file.set_len(FILE_OFFSET + 66 * MIB - 1).unwrap();
    let short =
        ImageError::FileTooShort { file_bytes: 66 * MIB + PAGE - 1, needed_bytes: 66 * MIB + PAGE };
    assert_eq!(verify(&image, &file).unwrap_err(), short);
    assert!(
        matches!(restore(&image, &file).unwrap_err(), RamError::Image(error) if error == short)
    );
}

#[test]
fn offsets_that_cannot_be_mapped_are_refused() {
    let (file, image) = saved();
    for offset in [1, PAGE / 2, 0u64.wrapping_sub(PAGE), i64::MAX as u64 / PAGE * PAGE] {
        let error = image.validate_file(&file, offset).unwrap_err();
        assert!(matches!(error, RamError::Image(ImageError::BadFileOffset { .. })), "{error}");
        let ram =
            GuestRam::new(&specs(), Backing::Anonymous, HugePages::Off, Populate::Lazy).unwrap();
        let error = ram.save(&file, offset, &mut |_| {}).unwrap_err();
        assert!(matches!(error, RamError::Image(ImageError::BadFileOffset { .. })), "{error}");
    }
}

#[test]
fn damaged_content_is_located() {
    let first = ImageError::WrongChecksum { offset_bytes: 0, end_bytes: 64 * MIB };
    let second = ImageError::WrongChecksum { offset_bytes: 64 * MIB, end_bytes: 66 * MIB };
    let damages: [(u64, &[u8], &ImageError); 4] = [
        (2 * PAGE, &[0x5b], &first),
        (4 * PAGE + 4095, &[0], &first),
        (3 * PAGE, &[0; 4096], &first),
        (66 * MIB - 1, &[1], &second),
    ];
    for (offset, bytes, expected) in damages {
        let (file, image) = saved();
        file.write_all_at(bytes, FILE_OFFSET + offset).unwrap();
        assert_eq!(verify(&image, &file).unwrap_err(), *expected);
    }
    // A page that was moved.
    let (file, mut image) = saved();
    file.write_all_at(&[0; 4096], FILE_OFFSET + 2 * PAGE).unwrap();
    file.write_all_at(&[0x5a; 4096], FILE_OFFSET + 5 * PAGE).unwrap();
    image.extents[0].offset_bytes += PAGE;
    assert_eq!(verify(&image, &file).unwrap_err(), first);
    // A missing extent, and a wrong amount.
    let (file, mut image) = saved();
    image.data_bytes -= PAGE;
    assert!(matches!(
        verify(&image, &file).unwrap_err(),
        ImageError::WrongDataBytes { found_bytes: 20480, .. }
    ));
    image.extents.remove(2);
    assert_eq!(verify(&image, &file).unwrap_err(), second);
}

#[test]
fn zeros_written_into_the_file_change_nothing() {
    let (file, mut image) = saved();
    file.write_all_at(&vec![0; 65536], FILE_OFFSET + 8 * PAGE).unwrap();
    image.extents[0].size_bytes = 16 * PAGE;
    verify(&image, &file).unwrap();
}

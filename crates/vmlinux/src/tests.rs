use std::io::Write;

use proptest::prelude::*;

use super::*;

/// A bzImage with one setup sector, and the payload after a gap of 16 bytes.
fn image(payload: &[u8]) -> Vec<u8> {
    let mut image = vec![0_u8; 2 * SECTOR_BYTES];
    image[SETUP_SECTORS] = 1;
    image[HEADER_MAGIC..HEADER_MAGIC + 4].copy_from_slice(b"HdrS");
    image[PROTOCOL_VERSION..PROTOCOL_VERSION + 2].copy_from_slice(&0x20f_u16.to_le_bytes());
    image[PAYLOAD_OFFSET..PAYLOAD_OFFSET + 4].copy_from_slice(&16_u32.to_le_bytes());
    image[PAYLOAD_LENGTH..PAYLOAD_LENGTH + 4]
        .copy_from_slice(&(payload.len() as u32).to_le_bytes());
    image.extend_from_slice(&[0; 16]);
    image.extend_from_slice(payload);
    image
}

fn kernel(length: usize) -> Vec<u8> {
    let mut kernel = ELF_MAGIC.to_vec();
    kernel.extend((4..length).map(|index| (index / 7) as u8));
    kernel
}

fn with_size(mut data: Vec<u8>, size: usize) -> Vec<u8> {
    data.extend_from_slice(&(size as u32).to_le_bytes());
    data
}

fn lz4(kernel: &[u8], block_bytes: usize) -> Vec<u8> {
    let mut data = vec![0x02, 0x21, 0x4c, 0x18];
    for chunk in kernel.chunks(block_bytes) {
        let block = lz4_flex::block::compress(chunk);
        data.extend_from_slice(&(block.len() as u32).to_le_bytes());
        data.extend_from_slice(&block);
    }
    with_size(data, kernel.len())
}

fn gzip(kernel: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(kernel).unwrap();
    encoder.finish().unwrap()
}

fn xz(kernel: &[u8]) -> Vec<u8> {
    let options = lzma_rust2::XzOptions::with_preset(1);
    let mut encoder = lzma_rust2::XzWriter::new(Vec::new(), options).unwrap();
    encoder.write_all(kernel).unwrap();
    with_size(encoder.finish().unwrap(), kernel.len())
}

fn zstd(kernel: &[u8]) -> Vec<u8> {
    let level = ruzstd::encoding::CompressionLevel::Fastest;
    with_size(ruzstd::encoding::compress_to_vec(kernel, level), kernel.len())
}

#[test]
fn all_formats_are_decompressed() {
    let kernel = kernel(100_000);
    for (name, payload) in [
        ("lz4", lz4(&kernel, LZ4_BLOCK_BYTES)),
        ("lz4 in blocks", lz4(&kernel, 4096)),
        ("gzip", gzip(&kernel)),
        ("xz", xz(&kernel)),
        ("zstd", zstd(&kernel)),
    ] {
        assert!(extract_vmlinux(&image(&payload)).as_ref() == Ok(&kernel), "{name}");
    }
}

#[test]
fn an_elf_kernel_is_returned_unchanged() {
    let kernel = kernel(64);
    assert_eq!(extract_vmlinux(&kernel), Ok(kernel));
}

#[test]
fn errors_are_distinguished() {
    let kernel = kernel(1000);
    assert!(matches!(extract_vmlinux(b"MZ"), Err(ExtractError::NotBzImage(_))));
    assert!(matches!(extract_vmlinux(&[0; 4096]), Err(ExtractError::NotBzImage(_))));

    let mut old = image(&lz4(&kernel, 4096));
    old[PROTOCOL_VERSION] = 7;
    assert_eq!(extract_vmlinux(&old), Err(ExtractError::OldProtocol(0x207)));
    assert!(ExtractError::OldProtocol(0x207).to_string().contains("2.07"));

    let mut cut = image(&lz4(&kernel, 4096));
    cut.pop();
    assert!(matches!(extract_vmlinux(&cut), Err(ExtractError::PayloadOutside { .. })));

    assert_eq!(
        extract_vmlinux(&image(b"BZh9 and so on")),
        Err(ExtractError::UnknownCompression(*b"BZh9"))
    );
    let text = lz4(b"not an elf file", 4096);
    assert_eq!(extract_vmlinux(&image(&text)), Err(ExtractError::NotElf));

    let mut claims = lz4(&kernel, 4096);
    let at = claims.len() - 4;
    claims[at..].copy_from_slice(&u32::MAX.to_le_bytes());
    assert!(matches!(extract_vmlinux(&image(&claims)), Err(ExtractError::TooLarge { .. })));
    for size in [999_u32, 1001] {
        claims[at..].copy_from_slice(&size.to_le_bytes());
        assert!(
            matches!(extract_vmlinux(&image(&claims)), Err(ExtractError::Damaged { .. })),
            "{size}"
        );
    }
}

#[test]
fn a_bomb_stops_at_the_claimed_size() {
    let zeros = vec![0_u8; 64 << 20];
    let mut payload = gzip(&zeros);
    let at = payload.len() - 4;
    payload[at..].copy_from_slice(&1000_u32.to_le_bytes());
    assert!(matches!(extract_vmlinux(&image(&payload)), Err(ExtractError::Damaged { .. })));
}

#[test]
fn the_release_is_read_from_the_header() {
    let mut image = image(&lz4(&kernel(10), 4096));
    image[KERNEL_VERSION..KERNEL_VERSION + 2].copy_from_slice(&0x100_u16.to_le_bytes());
    let text = b"6.1.0-56-cloud-amd64 (debian-kernel@lists.debian.org) #1\0";
    image[0x300..0x300 + text.len()].copy_from_slice(text);
    assert_eq!(kernel_release(&image).as_deref(), Ok("6.1.0-56-cloud-amd64"));
    image[KERNEL_VERSION..KERNEL_VERSION + 2].copy_from_slice(&u16::MAX.to_le_bytes());
    assert!(kernel_release(&image).is_err());
}

proptest! {
    /// Substitute for a fuzzer in every test run: damaged images cause errors, in bounded memory,
    /// and never a panic.
    #[test]
    fn damage_never_panics(
        format in 0..4,
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        keep in any::<prop::sample::Index>(),
    ) {
        let kernel = kernel(3000);
        let payload = match format {
            0 => lz4(&kernel, 1000),
            1 => gzip(&kernel),
            2 => xz(&kernel),
            _ => zstd(&kernel),
        };
        let mut image = image(&payload);
        for (at, value) in changes {
            let at = at.index(image.len());
            image[at] = value;
        }
        // A changed image may still be valid (a byte of the gap); the output is then a kernel.
        if let Ok(out) = extract_vmlinux(&image) {
            prop_assert!(out.starts_with(&ELF_MAGIC));
        }
        let _ = kernel_release(&image);
        image.truncate(keep.index(image.len()));
        let _ = extract_vmlinux(&image);
    }
}

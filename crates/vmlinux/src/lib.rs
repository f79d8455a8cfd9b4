//! Extracts the ELF kernel (`vmlinux`) from a bzImage, as a pure function over bytes.
//!
//! The setup header (Linux Documentation/arch/x86/boot.rst) locates the compressed payload. Linux's
//! build appends the size of the decompressed kernel to the payload as a little-endian u32 (gzip
//! ends with its own), so that the output's size is known before decompression and bounds it.

use std::io::Read;

#[cfg(test)]
mod tests;

/// Maximum accepted size of a decompressed kernel, in bytes.
pub const KERNEL_LIMIT_BYTES: usize = 512 << 20;

const SETUP_SECTORS: usize = 0x1f1;
const HEADER_MAGIC: usize = 0x202;
const PROTOCOL_VERSION: usize = 0x206;
const KERNEL_VERSION: usize = 0x20e;
const PAYLOAD_OFFSET: usize = 0x248;
const PAYLOAD_LENGTH: usize = 0x24c;
/// First protocol version with the payload's location in the header.
const PROTOCOL_2_08: u16 = 0x208;
const SECTOR_BYTES: usize = 512;
/// Block size of LZ4's legacy format, decompressed.
const LZ4_BLOCK_BYTES: usize = 8 << 20;
const ELF_MAGIC: [u8; 4] = [0x7f, b'E', b'L', b'F'];

/// Reason why no kernel could be extracted from an image.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ExtractError {
    /// Not a bzImage.
    #[error("not a bzImage: {0}")]
    NotBzImage(&'static str),
    /// The boot protocol is too old.
    #[error(
        "boot protocol {major}.{minor:02} of the image is older than 2.08, which added the \
         location of the payload",
        major = .0 >> 8, minor = .0 & 0xff
    )]
    OldProtocol(u16),
    /// The payload lies outside the file.
    #[error(
        "the payload (offset {offset}, {length} bytes) is not within the image of {image} bytes: \
         the image is truncated"
    )]
    PayloadOutside {
        /// Offset in the file.
        offset: usize,
        /// Length of the payload.
        length: usize,
        /// Length of the file.
        image: usize,
    },
    /// The compression is unknown.
    #[error("the payload's compression (first bytes {0:02x?}) is none of gzip, xz, LZ4 and zstd")]
    UnknownCompression([u8; 4]),
    /// The kernel is larger than accepted.
    #[error(
        "the image claims a kernel of {claimed} bytes; at most {limit} are accepted",
        limit = KERNEL_LIMIT_BYTES
    )]
    TooLarge {
        /// Size claimed by the image.
        claimed: usize,
    },
    /// The data are damaged.
    #[error("the payload does not decompress ({format}): {reason}")]
    Damaged {
        /// Compression.
        format: &'static str,
        /// Error of the decompressor.
        reason: String,
    },
    /// The content is not an ELF file.
    #[error("the decompressed payload is not an ELF kernel")]
    NotElf,
}

/// Extracts the ELF kernel from `image`. An ELF file is returned unchanged.
pub fn extract_vmlinux(image: &[u8]) -> Result<Vec<u8>, ExtractError> {
    if image.starts_with(&ELF_MAGIC) {
        return Ok(image.to_vec());
    }
    let kernel = decompress(payload(image)?)?;
    if kernel.starts_with(&ELF_MAGIC) { Ok(kernel) } else { Err(ExtractError::NotElf) }
}

/// The kernel's version string, as `uname -r` prints it, from a bzImage's setup header.
pub fn kernel_release(image: &[u8]) -> Result<String, ExtractError> {
    check_magic(image)?;
    let cut = ExtractError::NotBzImage("it has no version string");
    let start = match read_u16(image, KERNEL_VERSION) {
        Some(offset) if offset != 0 => usize::from(offset) + SECTOR_BYTES,
        _ => return Err(cut),
    };
    let text: Vec<u8> = image
        .get(start..)
        .unwrap_or_default()
        .iter()
        .copied()
        .take(256)
        .take_while(u8::is_ascii_graphic)
        .collect();
    if text.is_empty() { Err(cut) } else { Ok(String::from_utf8_lossy(&text).into_owned()) }
}

fn check_magic(image: &[u8]) -> Result<(), ExtractError> {
    match image.get(HEADER_MAGIC..HEADER_MAGIC + 4) {
        Some(b"HdrS") => Ok(()),
        Some(_) => Err(ExtractError::NotBzImage("the magic number `HdrS` at 0x202 is missing")),
        None => Err(ExtractError::NotBzImage("it is too short for a setup header")),
    }
}

fn payload(image: &[u8]) -> Result<&[u8], ExtractError> {
    check_magic(image)?;
    let short = ExtractError::NotBzImage("it is too short for a setup header");
    let version = read_u16(image, PROTOCOL_VERSION).ok_or(short)?;
    if version < PROTOCOL_2_08 {
        return Err(ExtractError::OldProtocol(version));
    }
    let field =
        |at| read_u32(image, at).ok_or(ExtractError::NotBzImage("its setup header is truncated"));
    // 0 means 4, for compatibility with old loaders.
    let sectors = match image[SETUP_SECTORS] {
        0 => 4,
        sectors => usize::from(sectors),
    };
    let offset = (sectors + 1) * SECTOR_BYTES + field(PAYLOAD_OFFSET)?;
    let length = field(PAYLOAD_LENGTH)?;
    let outside = ExtractError::PayloadOutside { offset, length, image: image.len() };
    let end = offset.checked_add(length).ok_or(outside)?;
    match image.get(offset..end) {
        Some(payload) if length > 8 => Ok(payload),
        _ => Err(ExtractError::PayloadOutside { offset, length, image: image.len() }),
    }
}

/// The compressions of Linux's build that distributions use.
#[derive(Debug, Clone, Copy)]
enum Format {
    Gzip,
    Xz,
    Zstd,
    Lz4,
}

impl Format {
    fn of(payload: &[u8]) -> Result<Self, ExtractError> {
        match *payload {
            [0x1f, 0x8b, ..] => Ok(Self::Gzip),
            [0xfd, b'7', b'z', b'X', ..] => Ok(Self::Xz),
            [0x28, 0xb5, 0x2f, 0xfd, ..] => Ok(Self::Zstd),
            [0x02, 0x21, 0x4c, 0x18, ..] => Ok(Self::Lz4),
            _ => Err(ExtractError::UnknownCompression(
                payload.first_chunk().copied().unwrap_or_default(),
            )),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Gzip => "gzip",
            Self::Xz => "xz",
            Self::Zstd => "zstd",
            Self::Lz4 => "LZ4",
        }
    }
}

fn decompress(payload: &[u8]) -> Result<Vec<u8>, ExtractError> {
    let format = Format::of(payload)?;
    let (data, size) = payload.split_at(payload.len() - 4);
    let claimed = read_u32(size, 0).unwrap_or(0);
    if claimed > KERNEL_LIMIT_BYTES {
        return Err(ExtractError::TooLarge { claimed });
    }
    let result = match format {
        // The size at the end is part of the gzip format, so the decoder needs it.
        Format::Gzip => bounded(flate2::read::GzDecoder::new(payload), claimed),
        Format::Xz => bounded(lzma_rust2::XzReader::new(data, false), claimed),
        Format::Zstd => ruzstd::decoding::StreamingDecoder::new(data)
            .map_err(|error| error.to_string())
            .and_then(|decoder| bounded(decoder, claimed)),
        Format::Lz4 => lz4_legacy(&data[4..], claimed),
    };
    let damaged = |reason| ExtractError::Damaged { format: format.name(), reason };
    match result {
        Ok(kernel) if kernel.len() == claimed => Ok(kernel),
        Ok(kernel) => {
            Err(damaged(format!("{} bytes decompressed, {claimed} expected", kernel.len())))
        }
        Err(reason) => Err(damaged(reason)),
    }
}

/// Reads at most one byte more than claimed. Memory is allocated for actual and not for claimed
/// bytes.
fn bounded(reader: impl Read, claimed: usize) -> Result<Vec<u8>, String> {
    let mut kernel = Vec::new();
    reader.take(claimed as u64 + 1).read_to_end(&mut kernel).map_err(|error| error.to_string())?;
    Ok(kernel)
}

/// LZ4's legacy frame: blocks of a u32 length and that many bytes, each at most 8 MiB decompressed.
fn lz4_legacy(mut data: &[u8], claimed: usize) -> Result<Vec<u8>, String> {
    let mut kernel: Vec<u8> = Vec::new();
    while let Some((length, rest)) = data.split_first_chunk::<4>() {
        let length = u32::from_le_bytes(*length) as usize;
        let block = rest.get(..length).ok_or("a block is truncated")?;
        // An LZ4 block grows at most 255-fold, which bounds the memory that a small file can
        // request.
        let room = (claimed - kernel.len()).min(LZ4_BLOCK_BYTES).min(length.saturating_mul(255));
        let start = kernel.len();
        kernel.resize(start + room, 0);
        let written = lz4_flex::block::decompress_into(block, &mut kernel[start..]);
        kernel.truncate(start + written.map_err(|error| error.to_string())?);
        data = &rest[length..];
    }
    if data.is_empty() { Ok(kernel) } else { Err("trailing bytes".to_owned()) }
}

fn read_u16(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..)?.first_chunk().map(|raw| u16::from_le_bytes(*raw))
}

fn read_u32(bytes: &[u8], at: usize) -> Option<usize> {
    bytes.get(at..)?.first_chunk().map(|raw| u32::from_le_bytes(*raw) as usize)
}

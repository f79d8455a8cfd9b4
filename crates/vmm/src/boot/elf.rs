//! Distinguishes programs from kernels: both are ELF files.

use std::io::{self, Read, Seek, SeekFrom};

/// Length of the file header and of a program header (ELF-64 object file format, figures 2 and 7).
const FILE_HEADER_BYTES: usize = 64;
const PROGRAM_HEADER_BYTES: usize = 56;
/// Offsets in the file header.
const PROGRAM_HEADERS: usize = 32;
const PROGRAM_HEADER_COUNT: usize = 56;
/// Segment types that need an operating system: a dynamic loader, and thread-local storage.
const PT_INTERP: u32 = 3;
const PT_TLS: u32 = 7;

/// Whether the file is a program for an operating system; `false` for files that are not ELF-64.
/// Rewinds the file.
pub(super) fn is_program(file: &mut (impl Read + Seek)) -> io::Result<bool> {
    let mut header = [0; FILE_HEADER_BYTES];
    let found = match file.read_exact(&mut header) {
        Ok(()) => {
            let offset = u64_at(&header, PROGRAM_HEADERS);
            let count = u16::from_le_bytes([
                header[PROGRAM_HEADER_COUNT],
                header[PROGRAM_HEADER_COUNT + 1],
            ]);
            file.seek(SeekFrom::Start(offset.min(i64::MAX as u64)))?;
            let mut headers = Vec::new();
            file.by_ref()
                .take(u64::from(count) * PROGRAM_HEADER_BYTES as u64)
                .read_to_end(&mut headers)?;
            let mut kinds =
                headers.chunks_exact(PROGRAM_HEADER_BYTES).map(|header| u64_at(header, 0) as u32);
            kinds.any(|kind| matches!(kind, PT_INTERP | PT_TLS))
        }
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => false,
        Err(error) => return Err(error),
    };
    file.rewind()?;
    Ok(found)
}

fn u64_at(bytes: &[u8], offset: usize) -> u64 {
    bytes
        .get(offset..)
        .and_then(|rest| rest.first_chunk())
        .map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::io::Cursor;

    #[test]
    fn this_test_is_a_program() {
        let mut file = std::fs::File::open(std::env::current_exe().unwrap()).unwrap();
        assert!(is_program(&mut file).unwrap());
        assert_eq!(file.stream_position().unwrap(), 0);
    }

    proptest! {
        #[test]
        fn any_bytes_are_judged(bytes: Vec<u8>) {
            let mut file = Cursor::new(bytes);
            is_program(&mut file).unwrap();
            prop_assert_eq!(file.position(), 0);
        }
    }
}

//! Bodies of fuzz targets.

use std::ffi::OsStr;

use crate::archive::Place;
use crate::wire::Decoder;

/// Arbitrary bytes as frames.
pub fn frames(bytes: &[u8]) {
    let mut decoder = Decoder::default();
    for piece in bytes.chunks(7) {
        decoder.push(piece);
        loop {
            match decoder.next_frame() {
                Ok(Some(_)) => {}
                Ok(None) => break,
                Err(_) => return,
            }
        }
    }
}

/// Arbitrary bytes as an archive, unpacked below `directory`: nothing else may appear there.
///
/// # Panics
/// Something else did.
pub fn archive(directory: &std::path::Path, bytes: &[u8]) {
    let Ok(place) = Place::find(directory, Some(OsStr::new("copy"))) else { return };
    let _ = place.unpack(bytes, &mut |_| {});
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    for entry in entries {
        assert_eq!(entry.file_name(), "copy");
    }
}

//! Bodies of fuzz targets: a hostile agent, or a hostile host.

use std::ffi::OsStr;

use crate::archive::Place;
use crate::wire::Decoder;

/// A fuzz target.
pub type Target = (&'static str, fn(&[u8]));

/// All of them.
pub const TARGETS: [Target; 2] = [("exec_archive", archive), ("exec_frames", frames)];

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

/// Arbitrary bytes as an archive: nothing but what was asked for may appear.
///
/// # Panics
/// Something else has appeared.
pub fn archive(bytes: &[u8]) {
    let Ok(outer) = tempfile::tempdir() else { return };
    let inner = outer.path().join("inner");
    if std::fs::create_dir(&inner).is_err() {
        return;
    }
    let Ok(place) = Place::find(&inner, Some(OsStr::new("copy"))) else { return };
    // The checksum of a header keeps most random bytes from being read.
    let mut archive = bytes.to_vec();
    for header in archive.chunks_exact_mut(512).step_by(2) {
        header[148..156].fill(b' ');
        let sum: u32 = header.iter().copied().map(u32::from).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    }
    let _ = place.unpack(&archive[..], &mut |_| {});
    let names = |path| {
        std::fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.file_name())
    };
    assert!(names(outer.path()).eq(["inner"]));
    assert!(names(&inner).all(|name| name == "copy"));
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A header with a name of few characters, which lead upwards often, and content.
    fn entry() -> impl Strategy<Value = Vec<u8>> {
        let name = proptest::sample::select(vec![
            "a",
            "a/b",
            "a/b/c",
            "../x",
            "a/../../x",
            "/tmp/ebb-x",
            "a/",
            "a/b/",
            "",
            "b",
        ]);
        let kind = proptest::sample::select(b"0125xgLK7".to_vec());
        let target = proptest::sample::select(vec!["..", "/", "a", "../..", "../x"]);
        (name, kind, target, any::<u8>()).prop_map(|(name, kind, target, fill)| {
            let mut block = vec![0; 1024];
            block[..name.len()].copy_from_slice(name.as_bytes());
            block[100..107].copy_from_slice(b"0004777");
            block[124..135].copy_from_slice(b"00000000010");
            block[136..147].copy_from_slice(b"00000000000");
            block[156] = kind;
            block[157..157 + target.len()].copy_from_slice(target.as_bytes());
            block[257..265].copy_from_slice(b"ustar  \0");
            block[512..].fill(fill);
            block
        })
    }

    proptest! {
        #[test]
        fn hostile_archives(entries in proptest::collection::vec(entry(), 1..8)) {
            archive(&entries.concat());
        }

        #[test]
        fn any_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..4096)) {
            for (_, target) in TARGETS {
                target(&bytes);
            }
        }
    }
}

//! As much of ELF as is needed to say whether an executable is static.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use crate::error::HostError;

/// Program header type of an interpreter (the dynamic loader).
const PT_INTERP: u32 = 3;
/// Program headers lie within this many bytes of the start in all that linkers write.
const HEAD_BYTES: u64 = 64 << 10;

/// What kind of executable a file is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Linkage {
    /// Runs by itself.
    Static,
    /// Needs a dynamic loader.
    Dynamic,
    /// Not a 64-bit little-endian ELF executable.
    NotElf,
}

/// The linkage of the executable whose first bytes are `head`.
pub fn linkage(head: &[u8]) -> Linkage {
    let number = |at: usize, length: usize| -> Option<usize> {
        let bytes = head.get(at..at.checked_add(length)?)?;
        Some(bytes.iter().rev().fold(0, |value, byte| (value << 8) | usize::from(*byte)))
    };
    // EI_CLASS 2 is 64 bits, EI_DATA 1 is little-endian.
    if head.get(..6) != Some(&[0x7f, b'E', b'L', b'F', 2, 1]) {
        return Linkage::NotElf;
    }
    let (Some(table), Some(size), Some(count)) = (number(0x20, 8), number(0x36, 2), number(0x38, 2)) else {
        return Linkage::NotElf;
    };
    let kind = |index: usize| table.checked_add(index * size).and_then(|at| number(at, 4));
    let interpreted = (0..count).any(|index| kind(index) == Some(PT_INTERP as usize));
    if interpreted { Linkage::Dynamic } else { Linkage::Static }
}

/// Checks that `path` can be an init: a static executable.
pub fn require_static(path: &Path) -> Result<(), HostError> {
    let unusable = |reason: String| HostError::InitUnusable { path: path.to_owned(), reason };
    let mut head = Vec::new();
    File::open(path)
        .and_then(|file| file.take(HEAD_BYTES).read_to_end(&mut head))
        .map_err(|error| unusable(error.to_string()))?;
    match linkage(&head) {
        Linkage::Static => Ok(()),
        Linkage::Dynamic => Err(unusable("it is linked dynamically".to_owned())),
        Linkage::NotElf => Err(unusable("it is no x86-64 ELF executable".to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn real_programs() {
        assert!(require_static(&std::env::current_exe().unwrap()).is_ok());
        let dynamic = require_static(Path::new("/bin/sh")).unwrap_err().to_string();
        assert!(dynamic.contains("dynamically") && dynamic.contains("/bin/sh"), "{dynamic}");
        let text = require_static(Path::new("/etc/passwd")).unwrap_err().to_string();
        assert!(text.contains("no x86-64 ELF"), "{text}");
    }

    proptest! {
        #[test]
        fn any_bytes_are_judged(tail: Vec<u8>) {
            let mut head = vec![0x7f, b'E', b'L', b'F', 2, 1];
            head.extend(tail);
            linkage(&head);
        }
    }
}

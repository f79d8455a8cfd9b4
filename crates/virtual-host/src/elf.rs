//! Minimal ELF parser: whether an executable is static, and whether a kernel has a PVH entry.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use crate::error::HostError;

/// Program header type of an interpreter (the dynamic loader).
const PT_INTERP: u32 = 3;
/// Program header type of notes.
const PT_NOTE: u32 = 4;
/// Type of the "Xen" note with the 32-bit PVH entry point (Xen public/elfnote.h,
/// XEN_ELFNOTE_PHYS32_ENTRY).
const PHYS32_ENTRY: usize = 18;
/// Size of the head of a file, which contains the program headers in the output of all linkers.
const HEAD_BYTES: u64 = 64 << 10;

/// Kind of an executable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Linkage {
    /// Statically linked.
    Static,
    /// Needs a dynamic loader.
    Dynamic,
    /// Not a 64-bit little-endian ELF executable.
    NotElf,
}

/// The little-endian number of `length` bytes at `at`.
fn number(bytes: &[u8], at: usize, length: usize) -> Option<usize> {
    let bytes = bytes.get(at..at.checked_add(length)?)?;
    Some(bytes.iter().rev().fold(0, |value, byte| (value << 8) | usize::from(*byte)))
}

/// Offsets of the program headers of type `kind`; `None` if `file` is not a 64-bit little-endian
/// ELF file.
fn program_headers(file: &[u8], kind: u32) -> Option<Vec<usize>> {
    // EI_CLASS 2 is 64 bits, EI_DATA 1 is little-endian.
    if file.get(..6) != Some(&[0x7f, b'E', b'L', b'F', 2, 1]) {
        return None;
    }
    let (table, size, count) =
        (number(file, 0x20, 8)?, number(file, 0x36, 2)?, number(file, 0x38, 2)?);
    let places = (0..count).filter_map(|index| table.checked_add(index * size));
    Some(places.filter(|at| number(file, *at, 4) == Some(kind as usize)).collect())
}

/// The linkage of the executable whose first bytes are `head`.
pub fn linkage(head: &[u8]) -> Linkage {
    match program_headers(head, PT_INTERP) {
        None => Linkage::NotElf,
        Some(interpreters) if interpreters.is_empty() => Linkage::Static,
        Some(_) => Linkage::Dynamic,
    }
}

/// Whether the ELF kernel `file` has a PVH entry, with which the machine does not decompress it.
pub fn has_pvh_entry(file: &[u8]) -> bool {
    let notes = |header: usize| {
        let (offset, length) = (number(file, header + 8, 8)?, number(file, header + 32, 8)?);
        file.get(offset..offset.checked_add(length)?)
    };
    let headers = program_headers(file, PT_NOTE).unwrap_or_default();
    headers.into_iter().filter_map(notes).any(|notes| notes_have_pvh_entry(notes).is_some())
}

/// Walks the notes: lengths of name and content, type, then name and content, padded to 4 bytes.
fn notes_have_pvh_entry(mut notes: &[u8]) -> Option<()> {
    loop {
        let (name, content, kind) =
            (number(notes, 0, 4)?, number(notes, 4, 4)?, number(notes, 8, 4)?);
        if kind == PHYS32_ENTRY && notes.get(12..16) == Some(b"Xen\0") {
            return Some(());
        }
        let length = 12 + name.next_multiple_of(4) + content.next_multiple_of(4);
        notes = notes.get(length..)?;
    }
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
        Linkage::Dynamic => Err(unusable("it is dynamically linked".to_owned())),
        Linkage::NotElf => Err(unusable("it is not an x86-64 ELF executable".to_owned())),
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
        assert!(text.contains("not an x86-64 ELF"), "{text}");
    }

    /// An ELF file with one program header of type notes at 64, and the notes at 120.
    fn with_notes(notes: &[u8]) -> Vec<u8> {
        let mut file = vec![0; 120];
        file[..6].copy_from_slice(&[0x7f, b'E', b'L', b'F', 2, 1]);
        (file[0x20], file[0x36], file[0x38]) = (64, 56, 1);
        (file[64], file[64 + 8], file[64 + 32]) = (PT_NOTE as u8, 120, notes.len() as u8);
        file.extend_from_slice(notes);
        file
    }

    #[test]
    fn the_entry_is_found_after_other_notes() {
        let note = |kind: u8, name: &[u8]| {
            [&[4, 0, 0, 0, 5, 0, 0, 0, kind, 0, 0, 0], name, &[0; 8]].concat()
        };
        let entry = note(18, b"Xen\0");
        assert!(has_pvh_entry(&with_notes(&entry)));
        assert!(has_pvh_entry(&with_notes(
            &[note(18, b"GNU\0"), note(6, b"Xen\0"), entry.clone()].concat()
        )));
        assert!(!has_pvh_entry(&with_notes(&note(6, b"Xen\0"))));
        assert!(!has_pvh_entry(&with_notes(&entry[..11])));
        assert!(!has_pvh_entry(b"no kernel"));
    }

    proptest! {
        #[test]
        fn any_bytes_are_parsed(
            tail: Vec<u8>,
            notes in proptest::collection::vec(any::<u8>(), 0..100),
        ) {
            let mut head = vec![0x7f, b'E', b'L', b'F', 2, 1];
            head.extend(tail);
            linkage(&head);
            has_pvh_entry(&head);
            has_pvh_entry(&with_notes(&notes));
        }
    }
}

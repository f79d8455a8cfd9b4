//! Mappings of a kind, one after another.

use std::fs::File;
use std::io;

use rustix::mm::Advice;

use super::FaultKind;
use crate::memory::{HUGE_PAGE_BYTES, Mapping, PAGE_BYTES, Sharing, unnamed_file};

/// Makes mappings of a kind; those of a file are all of the same file.
pub struct Mapper {
    kind: FaultKind,
    bytes: u64,
    file: Option<File>,
}

impl Mapper {
    /// Creates the file, if the kind needs one.
    pub fn new(kind: FaultKind, bytes: u64) -> io::Result<Self> {
        let file = match kind {
            FaultKind::Fault2 | FaultKind::Fault3 => Some(unnamed_file(bytes)?),
            FaultKind::Fault1 | FaultKind::Fault1Huge => None,
        };
        Ok(Self { kind, bytes, file })
    }

    /// The next mapping.
    pub fn map(&self) -> io::Result<Mapping> {
        match (self.kind, &self.file) {
            (FaultKind::Fault2, Some(file)) => Mapping::of_file(file, self.bytes, Sharing::Private),
            (FaultKind::Fault3, Some(file)) => Mapping::of_file(file, self.bytes, Sharing::Shared),
            (FaultKind::Fault1Huge, _) => Mapping::huge(self.bytes),
            _ => {
                let mut mapping = Mapping::new(self.bytes)?;
                mapping.advise(0..mapping.pages(), Advice::LinuxNoHugepage)?;
                Ok(mapping)
            }
        }
    }
}

/// Checks that mappings of this size consist of whole pages of their kind.
pub fn check_size(kind: FaultKind, bytes: u64) -> Result<(), String> {
    let unit = if kind == FaultKind::Fault1Huge { HUGE_PAGE_BYTES } else { PAGE_BYTES } as u64;
    match bytes {
        bytes if bytes > 0 && bytes.is_multiple_of(unit) => Ok(()),
        bytes => Err(format!("mapping_bytes: {bytes} is not a multiple of {unit}")),
    }
}

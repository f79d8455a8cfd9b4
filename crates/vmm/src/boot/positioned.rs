//! A file that is read at a position of its own.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;

use vm_memory::bitmap::BitmapSlice;
use vm_memory::{ReadVolatile, VolatileMemoryError, VolatileSlice};

/// Reads a file from a position that no other reader has: forked monitors share the position of the
/// file itself (fork(2)), and their guests may reboot at the same time.
pub(super) struct Positioned<'a> {
    file: &'a File,
    position: u64,
}

impl<'a> Positioned<'a> {
    /// From the beginning.
    pub(super) fn new(file: &'a File) -> Self {
        Self { file, position: 0 }
    }
}

impl Read for Positioned<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read_at(buffer, self.position)?;
        self.position += read as u64;
        Ok(read)
    }
}

impl Seek for Positioned<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let (base, offset) = match to {
            SeekFrom::Start(position) => (position, 0),
            // The file's own position is used for nothing else. A block device has no size in
            // fstat(2).
            SeekFrom::End(offset) => ((&*self.file).seek(SeekFrom::End(0))?, offset),
            SeekFrom::Current(offset) => (self.position, offset),
        };
        self.position = base.checked_add_signed(offset).ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.position)
    }
}

impl ReadVolatile for Positioned<'_> {
    fn read_volatile<B: BitmapSlice>(
        &mut self,
        buffer: &mut VolatileSlice<'_, B>,
    ) -> Result<usize, VolatileMemoryError> {
        let guard = buffer.ptr_guard_mut();
        let position = i64::try_from(self.position)
            .map_err(|_| VolatileMemoryError::IOError(io::ErrorKind::InvalidInput.into()))?;
        // SAFETY: the slice is memory of this length that may be written to while it is borrowed;
        // the kernel writes there, so that no Rust reference to it exists.
        let read = unsafe {
            libc::pread(self.file.as_raw_fd(), guard.as_ptr().cast(), buffer.len(), position)
        };
        let read = usize::try_from(read)
            .map_err(|_| VolatileMemoryError::IOError(io::Error::last_os_error()))?;
        buffer.bitmap().mark_dirty(0, read);
        self.position += read as u64;
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;

    #[test]
    fn readers_of_one_file_do_not_disturb_each_other() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&(0..=255).collect::<Vec<u8>>()).unwrap();
        let (mut one, mut other) = (Positioned::new(&file), Positioned::new(&file));
        let mut byte = [0];
        for expected in 0..=255 {
            one.read_exact(&mut byte).unwrap();
            assert_eq!(byte, [expected]);
            other.seek(SeekFrom::Start(u64::from(255 - expected))).unwrap();
            let mut memory = [0_u8; 2];
            let read = other.read_volatile(&mut VolatileSlice::from(&mut memory[..])).unwrap();
            assert_eq!((read, memory[0]), (1 + usize::from(expected > 0), 255 - expected));
        }
        assert_eq!(one.seek(SeekFrom::End(-1)).unwrap(), 255);
        assert_eq!(one.read(&mut [0; 8]).unwrap(), 1);
        assert!(one.seek(SeekFrom::Current(-257)).is_err());
    }
}

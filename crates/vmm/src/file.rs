//! Descriptors: opens files named by the user, and makes eventfds of vmm-sys-util, which the KVM
//! bindings require, usable with poll.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::{FileExt as _, FileTypeExt as _, OpenOptionsExt as _};
use std::path::Path;

use rustix::event::{PollFd, PollFlags};
use rustix::fs::SeekFrom;
use rustix::io::Errno;
use vmm_sys_util::eventfd::EventFd;

/// Whether a file is opened for writing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    ReadWrite,
}

/// Opens a regular file or a block device.
///
/// # Errors
/// The errors of open(2), and [`io::ErrorKind::InvalidInput`] for any other type of file. Opening a
/// FIFO without a writer does not block, and terminals are not read.
pub(crate) fn open_image(path: &Path, access: Access) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options
        .read(true)
        .write(access == Access::ReadWrite)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY);
    let file = options.open(path)?;
    let kind = file.metadata()?.file_type();
    if kind.is_file() || kind.is_block_device() {
        return Ok(file);
    }
    let found = if kind.is_dir() {
        "a directory"
    } else if kind.is_fifo() {
        "a FIFO"
    } else {
        "a device or socket"
    };
    let problem = format!("it is {found}, not a regular file or block device");
    Err(io::Error::new(io::ErrorKind::InvalidInput, problem))
}

/// Bytes copied between two looks for a cancellation.
const COPY_BYTES: u64 = 4 << 20;
/// The same where the kernel cannot copy: bytes read at a time.
const BUFFER_BYTES: usize = 256 << 10;

/// Copies `from` to the empty file `to`, without its holes; a file system that can lets both share
/// their blocks (copy_file_range(2)). Moves the position of `from`.
///
/// # Errors
/// Those of lseek(2), copy_file_range(2), pread(2), pwrite(2) and ftruncate(2).
pub(crate) fn copy_data(
    from: &File,
    to: &File,
    is_cancelled: &dyn Fn() -> bool,
) -> io::Result<Completion> {
    // Not the size in fstat(2), which is zero for a block device.
    let end = rustix::fs::seek(from, SeekFrom::End(0))?;
    to.set_len(end)?;
    let mut next = 0;
    while next < end {
        let data = match rustix::fs::seek(from, SeekFrom::Data(next)) {
            Ok(data) => data,
            // No data up to the end.
            Err(Errno::NXIO) => break,
            Err(Errno::INVAL | Errno::OPNOTSUPP) => next,
            Err(errno) => return Err(errno.into()),
        };
        let hole = match rustix::fs::seek(from, SeekFrom::Hole(data)) {
            Ok(hole) => hole.min(end),
            Err(Errno::INVAL | Errno::OPNOTSUPP) => end,
            Err(errno) => return Err(errno.into()),
        };
        next = data;
        while next < hole {
            if is_cancelled() {
                return Ok(Completion::Cancelled);
            }
            match copy_some(from, to, next, (hole - next).min(COPY_BYTES))? {
                // The file is shorter now.
                0 => return Ok(Completion::Done),
                bytes => next += bytes,
            }
        }
    }
    Ok(Completion::Done)
}

fn copy_some(from: &File, to: &File, offset: u64, bytes: u64) -> io::Result<u64> {
    let (mut source, mut target) = (offset, offset);
    let copied = rustix::fs::copy_file_range(
        from,
        Some(&mut source),
        to,
        Some(&mut target),
        usize::try_from(bytes).unwrap_or(BUFFER_BYTES),
    );
    match copied {
        Ok(bytes) => Ok(bytes as u64),
        Err(Errno::XDEV | Errno::INVAL | Errno::OPNOTSUPP | Errno::NOSYS) => {
            let mut buffer =
                vec![0; BUFFER_BYTES.min(usize::try_from(bytes).unwrap_or(usize::MAX))];
            let read = from.read_at(&mut buffer, offset)?;
            to.write_all_at(&buffer[..read], offset)?;
            Ok(read as u64)
        }
        Err(errno) => Err(errno.into()),
    }
}

/// Bytes written back at a time.
const WRITE_BACK_BYTES: u64 = 16 << 20;

/// Whether an operation was completed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub(crate) enum Completion {
    Done,
    Cancelled,
}

/// Writes the page cache of `file` to the disk, in pieces, and gives up between two of them if
/// `is_cancelled`: a slow disk may take long for all of it, and `fdatasync` cannot be interrupted.
///
/// # Errors
/// Those of sync_file_range(2) and fdatasync(2).
pub(crate) fn write_back(file: &File, is_cancelled: &dyn Fn() -> bool) -> io::Result<Completion> {
    // Not the size in fstat(2), which is zero for a block device.
    let end_bytes = rustix::fs::seek(file, SeekFrom::End(0))?;
    let mut offset_bytes = 0;
    while offset_bytes < end_bytes {
        if is_cancelled() {
            return Ok(Completion::Cancelled);
        }
        sync_range(file, offset_bytes, WRITE_BACK_BYTES)?;
        offset_bytes += WRITE_BACK_BYTES;
    }
    if is_cancelled() {
        return Ok(Completion::Cancelled);
    }
    rustix::fs::fdatasync(file)?;
    Ok(Completion::Done)
}

fn sync_range(file: &File, offset_bytes: u64, size_bytes: u64) -> io::Result<()> {
    let flags = libc::SYNC_FILE_RANGE_WAIT_BEFORE
        | libc::SYNC_FILE_RANGE_WRITE
        | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    // Sizes of files are below the largest signed number.
    let (offset, size) = (offset_bytes as libc::off64_t, size_bytes as libc::off64_t);
    // SAFETY: the call takes an open descriptor and numbers, and accesses no memory of this process.
    match unsafe { libc::sync_file_range(file.as_raw_fd(), offset, size, flags) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Polls `event` for readability.
pub fn readable(event: &EventFd) -> PollFd<'_> {
    // SAFETY: the descriptor stays open as long as `event`, whose borrow the returned lifetime is
    // bound to.
    let fd = unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) };
    PollFd::from_borrowed_fd(fd, PollFlags::IN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cancelled_write_back_ends_after_its_piece() {
        let file = tempfile::tempfile().unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, b"x", 5 * WRITE_BACK_BYTES).unwrap();
        // Six pieces, and the end.
        for patience in 0..7_u32 {
            let asked = std::cell::Cell::new(0);
            let is_cancelled = || {
                asked.set(asked.get() + 1);
                asked.get() > patience
            };
            assert_eq!(write_back(&file, &is_cancelled).unwrap(), Completion::Cancelled);
            assert_eq!(asked.get(), patience + 1);
        }
        assert_eq!(write_back(&file, &|| false).unwrap(), Completion::Done);
        let (pipe, _end) = io::pipe().unwrap();
        let pipe = File::from(std::os::fd::OwnedFd::from(pipe));
        assert!(write_back(&pipe, &|| false).is_err());
    }

    /// From the same file system, and from another, where the kernel may refuse to copy.
    #[test]
    fn copies_have_the_data_and_the_holes() {
        let memory = rustix::fs::memfd_create("image", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        for from in [tempfile::tempfile().unwrap(), memory.into()] {
            for (offset, byte) in [(0, 1), (COPY_BYTES + 12_345, 2), (3 * COPY_BYTES, 3)] {
                from.write_all_at(&vec![byte; 300 << 10], offset).unwrap();
            }
            let end = 4 * COPY_BYTES + 1;
            from.set_len(end).unwrap();
            let to = tempfile::tempfile().unwrap();
            assert_eq!(copy_data(&from, &to, &|| false).unwrap(), Completion::Done);
            let content = |file: &File| {
                let mut bytes = vec![0; end as usize];
                file.read_exact_at(&mut bytes, 0).unwrap();
                bytes
            };
            assert!(content(&from) == content(&to));
            let stat = rustix::fs::fstat(&to).unwrap();
            assert_eq!(stat.st_size.unsigned_abs(), end);
            assert!(stat.st_blocks < 4 << 10, "{}", stat.st_blocks);
            let to = tempfile::tempfile().unwrap();
            assert_eq!(copy_data(&from, &to, &|| true).unwrap(), Completion::Cancelled);
        }
    }

    #[test]
    fn files_that_are_not_images_are_refused_without_blocking() {
        let directory = tempfile::tempdir().unwrap();
        let fifo = directory.path().join("fifo");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &fifo,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
            0,
        )
        .unwrap();
        for (path, found) in [
            (fifo.as_path(), "FIFO"),
            (Path::new("/dev/null"), "device"),
            (directory.path(), "irector"),
        ] {
            let error = open_image(path, Access::Read).unwrap_err();
            assert!(error.to_string().contains(found), "{error}");
        }
        let file = directory.path().join("file");
        std::fs::write(&file, "image").unwrap();
        open_image(&file, Access::ReadWrite).unwrap();
    }
}

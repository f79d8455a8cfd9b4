//! Images in QEMU's format (docs/interop/qcow2.txt there), by the crate imago.
//!
//! The monitor opens the files, before its filters, and imago gets their descriptors only: what a
//! header names is never opened. [`Header`] refuses images whose tables would make imago allocate
//! much memory or search for very long, or contradict each other, and [`Part`] bounds the growth of a file.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use ebb_guest_ram::GuestMemory;
use imago::format::PreallocateMode;
use imago::io_buffers::{IoVector, IoVectorMut};
use imago::qcow2::Qcow2 as Format;
use imago::storage::{self, Storage, StorageOpenOptions, drivers::CommonStorageHelper};
use imago::{FormatAccess, FormatCreateBuilder as _, Mapping};
use rustix::fs::FallocateFlags;

use super::guest_io::{self, Piece};
use super::header::{CLUSTER_BYTES, Header};
use super::raw::{Unmap, buffered};

/// An image, on top of the one that it is an overlay of.
pub(super) struct Qcow2 {
    file: Arc<File>,
    base: Option<Base>,
    readonly: bool,
    /// `None` until the image belongs to this monitor: tables in memory would become stale, and
    /// imago writes to the header when it opens an image.
    access: RwLock<Option<Access>>,
    size_bytes: AtomicU64,
    /// No write may reach beyond this in the file.
    most_bytes: Arc<AtomicU64>,
}

type Access = FormatAccess<Part>;

/// What an overlay is on top of. It is only read.
#[derive(Debug, Clone)]
pub(super) enum Base {
    Raw(Arc<File>),
    Qcow2(Arc<File>),
}

impl Base {
    pub fn file(&self) -> &File {
        match self {
            Self::Raw(file) | Self::Qcow2(file) => file,
        }
    }

    /// Size of the disk in it.
    pub fn size_bytes(&self) -> io::Result<u64> {
        match self {
            Self::Raw(file) => end_of(file),
            Self::Qcow2(file) => Ok(Header::read(file)?.size_bytes),
        }
    }

    fn access(&self) -> io::Result<Access> {
        match self {
            Self::Raw(file) => {
                let part = Part::readonly(file.clone());
                Ok(FormatAccess::new(imago::raw::Raw::open_image(part, false)?))
            }
            Self::Qcow2(file) => {
                Header::read(file)?.check_base(false)?;
                let mut format: Format<Part> =
                    Format::open_image(Part::readonly(file.clone()), false)?;
                format.set_backing(None);
                format.set_data_file(None);
                Ok(FormatAccess::new(format))
            }
        }
    }
}

impl Qcow2 {
    /// Checks an image. It is [opened](Self::load) when it belongs to this monitor.
    pub fn new(file: File, base: Option<Base>, readonly: bool) -> io::Result<Self> {
        let header = Header::read(&file)?;
        header.check_base(base.is_some())?;
        let size_bytes = AtomicU64::new(header.size_bytes);
        let (file, access) = (Arc::new(file), RwLock::new(None));
        Ok(Self { file, base, readonly, access, size_bytes, most_bytes: Arc::default() })
    }

    /// Writes an empty image to a new file: an overlay of the base at the path, or one without a
    /// base.
    pub fn create(file: File, size_bytes: u64, base: Option<(&Path, &Base)>) -> io::Result<()> {
        let part = Part::new(Arc::new(file), Arc::new(AtomicU64::new(u64::MAX)));
        let mut builder = Format::<Part>::create_builder(part)
            .size(size_bytes)
            .preallocate(PreallocateMode::None);
        if let Some((path, base)) = base {
            let format = match base {
                Base::Raw(_) => "raw",
                Base::Qcow2(_) => "qcow2",
            };
            builder = builder.backing(path.display().to_string(), format.to_owned());
        }
        builder.create()
    }

    /// Reads the tables of the image, which belongs to this monitor now.
    pub fn load(&self) -> io::Result<()> {
        let mut access = self.write_lock();
        // What is in memory is older.
        *access = None;
        let header = if self.readonly {
            Header::read(&self.file)?
        } else {
            Header::read_for_writing(&self.file)?
        };
        header.check_base(self.base.is_some())?;
        let most_bytes =
            if self.readonly { 0 } else { most_file_bytes(&self.file, header.size_bytes)? };
        self.most_bytes.store(most_bytes, Ordering::Relaxed);
        let part = Part::new(self.file.clone(), self.most_bytes.clone());
        let mut format: Format<Part> = Format::open_image(part, !self.readonly)?;
        format.set_data_file(None);
        format.set_backing(self.base.as_ref().map(Base::access).transpose()?);
        *access = Some(FormatAccess::new(format));
        self.size_bytes.store(header.size_bytes, Ordering::Relaxed);
        Ok(())
    }

    pub fn file(&self) -> &File {
        &self.file
    }

    pub fn base_file(&self) -> Option<&File> {
        self.base.as_ref().map(Base::file)
    }

    pub fn size_bytes(&self) -> u64 {
        self.size_bytes.load(Ordering::Relaxed)
    }

    pub fn read(&self, memory: &GuestMemory, pieces: &[Piece], offset: u64) -> io::Result<()> {
        let access = self.read_lock();
        let access = access.as_ref().ok_or_else(not_loaded)?;
        buffered(pieces, |pieces, done, buffer| {
            access.read(&mut *buffer, offset + done)?;
            guest_io::scatter(memory, pieces, buffer)
        })
    }

    pub fn write(&self, memory: &GuestMemory, pieces: &[Piece], offset: u64) -> io::Result<()> {
        let access = self.read_lock();
        let access = access.as_ref().ok_or_else(not_loaded)?;
        buffered(pieces, |pieces, done, buffer| {
            guest_io::gather(memory, pieces, buffer)?;
            access.write(&*buffer, offset + done)
        })
    }

    /// Writes the tables and all data to the disk.
    pub fn flush(&self) -> io::Result<()> {
        self.write_tables()?;
        self.file.sync_data()
    }

    /// Writes the tables to the file, for those who copy it.
    pub fn write_tables(&self) -> io::Result<()> {
        match self.read_lock().as_ref() {
            Some(access) if !self.readonly => access.flush(),
            _ => Ok(()),
        }
    }

    /// Frees the clusters in the range. Parts of clusters keep their content.
    pub fn discard(&self, offset: u64, bytes: u64) -> io::Result<()> {
        let begin = offset.next_multiple_of(CLUSTER_BYTES);
        // The last cluster may be incomplete.
        let end = match offset + bytes {
            end if end == self.size_bytes() => end,
            end => end / CLUSTER_BYTES * CLUSTER_BYTES,
        };
        let mut access = self.write_lock();
        let access = access.as_mut().ok_or_else(not_loaded)?;
        if begin >= end {
            return Ok(());
        }
        self.punch(access, begin, end)?;
        access.discard_to_zero(begin, end - begin)
    }

    /// Makes the range zero; whole clusters are freed if `unmap`.
    pub fn zero(&self, offset: u64, bytes: u64, unmap: Unmap) -> io::Result<()> {
        if unmap == Unmap::Yes {
            self.discard(offset, bytes)?;
        }
        // imago makes a whole cluster zero if its other parts are, and does not notice a write to
        // them in between (0.2.6, `soft_ensure_zero`).
        let access = self.write_lock();
        let access = access.as_ref().ok_or_else(not_loaded)?;
        access.write_zeroes(offset, bytes)
    }

    /// Enlarges the image.
    pub fn grow(&self, bytes: u64) -> io::Result<()> {
        let access = self.write_lock();
        let access = access.as_ref().ok_or_else(not_loaded)?;
        if bytes == self.size_bytes() {
            return Ok(());
        }
        if self.readonly {
            return Err(io::ErrorKind::ReadOnlyFilesystem.into());
        }
        self.most_bytes.store(most_file_bytes(&self.file, bytes)?, Ordering::Relaxed);
        access.resize_grow(bytes, PreallocateMode::None)?;
        access.flush()?;
        self.size_bytes.store(bytes, Ordering::Relaxed);
        Ok(())
    }

    /// Returns the clusters of the range to the host, before they are freed: no other request sees
    /// them meanwhile, and no table can take their place. Clusters that a snapshot in the image
    /// shares are not writable, and are kept.
    fn punch(&self, access: &Access, begin: u64, end: u64) -> io::Result<()> {
        let mut offset = begin;
        while offset < end {
            let (mapping, bytes) = access.get_mapping(offset, end - offset)?;
            if let Mapping::Raw { offset: place, writable: true, .. } = mapping {
                let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                // A file system without holes keeps them.
                let _ = rustix::fs::fallocate(&*self.file, flags, place, bytes);
            }
            if bytes == 0 {
                break;
            }
            offset += bytes;
        }
        Ok(())
    }

    fn read_lock(&self) -> RwLockReadGuard<'_, Option<Access>> {
        self.access.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write_lock(&self) -> RwLockWriteGuard<'_, Option<Access>> {
        self.access.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Qcow2 {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Qcow2").field("file", &self.file).finish_non_exhaustive()
    }
}

fn not_loaded() -> io::Error {
    io::Error::other("the image does not belong to this monitor yet")
}

/// Most bytes that the file of an image may have: what exists, each cluster of the disk once, and
/// its tables, which take less than an eighth.
fn most_file_bytes(file: &File, size_bytes: u64) -> io::Result<u64> {
    const AT_LEAST: u64 = 16 << 20;
    let grown = size_bytes.saturating_add(size_bytes / 8).saturating_add(AT_LEAST);
    Ok(end_of(file)?.saturating_add(grown))
}

fn end_of(file: &File) -> io::Result<u64> {
    Ok(rustix::fs::seek(file, rustix::fs::SeekFrom::End(0))?)
}

/// A file that imago reads and writes.
#[derive(Debug)]
struct Part {
    file: Arc<File>,
    /// No write may reach beyond this; a new file has no such limit.
    most_bytes: Arc<AtomicU64>,
    helper: CommonStorageHelper,
}

impl Part {
    fn new(file: Arc<File>, most_bytes: Arc<AtomicU64>) -> Self {
        Self { file, most_bytes, helper: CommonStorageHelper::default() }
    }

    fn readonly(file: Arc<File>) -> Self {
        Self::new(file, Arc::default())
    }

    fn check(&self, offset: u64, bytes: u64) -> io::Result<()> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.most_bytes.load(Ordering::Relaxed) => Ok(()),
            _ => Err(io::ErrorKind::StorageFull.into()),
        }
    }
}

impl fmt::Display for Part {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("the image")
    }
}

impl Storage for Part {
    fn open(_options: StorageOpenOptions) -> io::Result<Self> {
        Err(io::ErrorKind::PermissionDenied.into())
    }

    fn size(&self) -> io::Result<u64> {
        end_of(&self.file)
    }

    unsafe fn pure_readv(&self, parts: IoVectorMut<'_>, offset: u64) -> io::Result<()> {
        let mut offset = offset;
        for mut part in parts.into_inner() {
            let mut buffer = &mut *part;
            while !buffer.is_empty() {
                match self.file.read_at(buffer, offset) {
                    // Behind the end there are zeros.
                    Ok(0) => {
                        offset = offset.saturating_add(buffer.len() as u64);
                        buffer.fill(0);
                        break;
                    }
                    Ok(bytes) => {
                        offset += bytes as u64;
                        buffer = &mut buffer[bytes..];
                    }
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(())
    }

    unsafe fn pure_writev(&self, parts: IoVector<'_>, offset: u64) -> io::Result<()> {
        self.check(offset, parts.len())?;
        let mut offset = offset;
        for part in parts.into_inner() {
            self.file.write_all_at(&part, offset)?;
            offset += part.len() as u64;
        }
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    unsafe fn invalidate_cache(&self) -> io::Result<()> {
        Ok(())
    }

    fn get_storage_helper(&self) -> &CommonStorageHelper {
        &self.helper
    }

    /// Only new files are resized: the filters have no such call.
    fn resize(&self, bytes: u64, _mode: storage::PreallocateMode) -> io::Result<()> {
        match self.most_bytes.load(Ordering::Relaxed) {
            u64::MAX => self.file.set_len(bytes),
            _ => Err(io::ErrorKind::Unsupported.into()),
        }
    }
}

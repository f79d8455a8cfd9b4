//! Parts of guest memory for one system call: frames go between it and the backend without a copy.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use ebb_guest_ram::GuestMemory;
use vm_memory::bitmap::Bitmap;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend as _};

/// Most parts: a system call takes 1024 (`UIO_MAXIOV`), of which one is kept for
/// [`Parts::read`]'s spill.
pub(super) const MAX_PARTS: usize = 1023;
/// Most frames in one system call.
pub(super) const MAX_PREFIXES: usize = 32;
/// Bytes of a prefix.
const PREFIX_BYTES: usize = 4;
/// Where the prefixes have their addresses, which is never guest memory.
const PREFIX: u64 = u64::MAX - (PREFIX_BYTES * MAX_PREFIXES) as u64;

/// Where frames come from and go to.
pub(super) enum Port {
    /// A descriptor that does not block.
    Open(Arc<OwnedFd>),
    /// Takes every frame, and has frames of these lengths: for fuzzing, without system calls.
    #[cfg(any(test, feature = "testing"))]
    Scripted(Vec<usize>),
}

impl Port {
    /// The descriptor, if there is one.
    #[cfg_attr(
        not(any(test, feature = "testing")),
        expect(clippy::unnecessary_wraps, reason = "tests have a port without one")
    )]
    pub(super) fn fd(&self) -> Option<&Arc<OwnedFd>> {
        match self {
            Self::Open(fd) => Some(fd),
            #[cfg(any(test, feature = "testing"))]
            Self::Scripted(_) => None,
        }
    }
}

/// One part, as readv(2) takes it. The calls here are preadv2(2) and pwritev2(2) without an offset,
/// which disks need as well: the system call filters have no others.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct Vector(libc::iovec);

// SAFETY: it is an address and a length; all threads may access what it names, see `Parts`.
unsafe impl Send for Vector {}

/// Parts of guest memory in order, and between them length prefixes.
///
/// Invariant: each vector lies in `memory`, which stays mapped as long as this holds it, or in
/// `prefixes`, which does not move. Guest memory is accessed by the kernel only, never as a Rust
/// reference.
pub(super) struct Parts {
    memory: GuestMemory,
    vectors: Vec<Vector>,
    /// Guest address of each vector.
    addresses: Vec<GuestAddress>,
    /// Vectors before this one are no longer in use.
    first: usize,
    /// Length of those in use, in bytes.
    bytes: usize,
    prefixes: Box<[[u8; PREFIX_BYTES]; MAX_PREFIXES]>,
    used_prefixes: usize,
}

impl Parts {
    /// No parts of `memory`.
    pub(super) fn new(memory: GuestMemory) -> Self {
        Self {
            memory,
            vectors: Vec::new(),
            addresses: Vec::new(),
            first: 0,
            bytes: 0,
            prefixes: Box::new([[0; PREFIX_BYTES]; MAX_PREFIXES]),
            used_prefixes: 0,
        }
    }

    /// Length in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Number of parts.
    pub(super) fn count(&self) -> usize {
        self.vectors.len() - self.first
    }

    /// Removes all parts.
    pub(super) fn clear(&mut self) {
        self.vectors.clear();
        self.addresses.clear();
        (self.first, self.bytes, self.used_prefixes) = (0, 0, 0);
    }

    /// Appends guest memory. Returns the number of parts that it took, or `None` if it is not
    /// memory or there are too many parts: then a part of it may have been appended, see
    /// [`truncate`](Self::truncate).
    pub(super) fn push(&mut self, address: GuestAddress, length: usize) -> Option<usize> {
        let before = self.vectors.len();
        let mut at = address;
        for slice in self.memory.get_slices(address, length) {
            let slice = slice.ok()?;
            if self.vectors.len() - self.first >= MAX_PARTS {
                return None;
            }
            let base = slice.ptr_guard_mut().as_ptr().cast();
            self.vectors.push(Vector(libc::iovec { iov_base: base, iov_len: slice.len() }));
            self.addresses.push(at);
            self.bytes += slice.len();
            at = GuestAddress(at.0.wrapping_add(slice.len() as u64));
        }
        Some(self.vectors.len() - before)
    }

    /// Removes the last parts, so that `count` are left.
    pub(super) fn truncate(&mut self, count: usize) {
        let end = self.first + count;
        self.bytes -= length(self.vectors.get(end..).unwrap_or_default());
        self.vectors.truncate(end);
        self.addresses.truncate(end);
    }

    /// Inserts the length of a frame before part `at`, in the byte order of the network.
    pub(super) fn insert_prefix(&mut self, at: usize, length: u32) {
        let index = self.used_prefixes;
        let Some(prefix) = self.prefixes.get_mut(index) else { return };
        *prefix = length.to_be_bytes();
        let iovec = libc::iovec { iov_base: prefix.as_mut_ptr().cast(), iov_len: prefix.len() };
        let at = (self.first + at).min(self.vectors.len());
        self.vectors.insert(at, Vector(iovec));
        self.addresses.insert(at, GuestAddress(PREFIX + (PREFIX_BYTES * index) as u64));
        self.bytes += PREFIX_BYTES;
        self.used_prefixes += 1;
    }

    /// Removes the first `count` parts.
    pub(super) fn consume(&mut self, count: usize) {
        let end = (self.first + count).min(self.vectors.len());
        self.bytes -= length(&self.vectors[self.first..end]);
        self.first = end;
        if self.first == self.vectors.len() {
            self.clear();
        } else if self.first >= MAX_PARTS {
            self.vectors.drain(..self.first);
            self.addresses.drain(..self.first);
            self.first = 0;
        }
    }

    /// Reads a frame into the first `count` parts, and what does not fit into `spill`. Returns the
    /// frame's length. The pages are logged as written.
    pub(super) fn read(
        &mut self,
        port: &mut Port,
        count: usize,
        spill: &mut [u8],
    ) -> io::Result<usize> {
        let end = (self.first + count).min(self.vectors.len());
        #[cfg(any(test, feature = "testing"))]
        if let Port::Scripted(lengths) = port {
            let next = lengths.pop().ok_or(io::ErrorKind::WouldBlock)?;
            let read = next.min(length(&self.vectors[self.first..end]) + spill.len());
            self.log_written(read, end);
            return Ok(read);
        }
        let fd = port.fd().ok_or(io::ErrorKind::Unsupported)?;
        let iovec = libc::iovec { iov_base: spill.as_mut_ptr().cast(), iov_len: spill.len() };
        // In place of the vector behind the last one, for the time of the call.
        let replaced = self.vectors.get(end).copied();
        match self.vectors.get_mut(end) {
            Some(vector) => *vector = Vector(iovec),
            None => self.vectors.push(Vector(iovec)),
        }
        let vectors = &self.vectors[self.first..=end];
        let count = vectors.len() as libc::c_int;
        // SAFETY: the vectors lie in guest memory, which is mapped (see `Parts`), and the last one
        // is `spill`, which is borrowed for writing. `Vector` is an iovec.
        let read = unsafe { libc::preadv2(fd.as_raw_fd(), vectors.as_ptr().cast(), count, -1, 0) };
        let error = io::Error::last_os_error();
        match replaced {
            Some(replaced) => self.vectors[end] = replaced,
            None => self.vectors.truncate(end),
        }
        let read = usize::try_from(read).map_err(|_| error)?;
        self.log_written(read, end);
        Ok(read)
    }

    /// Records that `bytes` were written to the first parts, up to part `end`.
    fn log_written(&self, bytes: usize, end: usize) {
        let mut left = bytes;
        for index in self.first..end {
            let length = self.vectors[index].0.iov_len.min(left);
            if length == 0 {
                return;
            }
            // Within the region in which `push` has found it.
            if let Ok(slice) = self.memory.get_slice(self.addresses[index], length) {
                slice.bitmap().mark_dirty(0, length);
            }
            left -= length;
        }
    }

    /// Writes all parts. Returns the number of bytes written.
    pub(super) fn write(&self, port: &Port) -> io::Result<usize> {
        let Some(fd) = port.fd() else { return Ok(self.bytes) };
        let vectors = &self.vectors[self.first..];
        let count = vectors.len() as libc::c_int;
        // SAFETY: the vectors lie in guest memory, which is mapped, or in the prefixes (see
        // `Parts`), and are only read. `Vector` is an iovec.
        let written =
            unsafe { libc::pwritev2(fd.as_raw_fd(), vectors.as_ptr().cast(), count, -1, 0) };
        usize::try_from(written).map_err(|_| io::Error::last_os_error())
    }

    /// Copies `bytes` to the parts, from byte `offset` on.
    pub(super) fn copy_in(&self, offset: usize, bytes: &[u8]) {
        let mut left = bytes;
        for (address, length) in self.ranges(offset, bytes.len()) {
            let (now, later) = left.split_at(length);
            // Cannot fail: `push` has found the memory.
            let _ = self.memory.write_slice(now, address);
            left = later;
        }
    }

    /// The bytes of the parts from `offset` on, `count` of them.
    pub(super) fn copy_out(&self, offset: usize, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        self.copy_to(offset, &mut bytes);
        bytes
    }

    /// Copies the bytes of the parts from `offset` on.
    pub(super) fn copy_to(&self, offset: usize, bytes: &mut [u8]) {
        let count = bytes.len();
        let mut left = bytes;
        for (address, length) in self.ranges(offset, count) {
            let (now, later) = left.split_at_mut(length);
            if let Some(position) = address.0.checked_sub(PREFIX) {
                let position = position as usize;
                let (index, byte) = (position / PREFIX_BYTES, position % PREFIX_BYTES);
                now.copy_from_slice(&self.prefixes[index][byte..byte + length]);
            } else {
                let _ = self.memory.read_slice(now, address);
            }
            left = later;
        }
    }

    /// Addresses and lengths of the bytes from `offset` on.
    fn ranges(&self, offset: usize, count: usize) -> impl Iterator<Item = (GuestAddress, usize)> {
        let (mut skip, mut left) = (offset, count);
        let parts = self.vectors[self.first..].iter().zip(&self.addresses[self.first..]);
        parts.filter_map(move |(vector, address)| {
            let length = vector.0.iov_len;
            let skipped = skip.min(length);
            skip -= skipped;
            let taken = (length - skipped).min(left);
            left -= taken;
            (taken > 0).then(|| (GuestAddress(address.0.wrapping_add(skipped as u64)), taken))
        })
    }
}

fn length(vectors: &[Vector]) -> usize {
    vectors.iter().map(|vector| vector.0.iov_len).sum()
}

//! A client's access to a segment is limited to reading.

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::ptr;

use ebb_page_merge::broker::Limits;
use rustix::fs::{
    FallocateFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals, ftruncate,
};
use rustix::io::Errno;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap, mprotect, munmap};

use crate::support::{PAGE, Running, page};

#[test]
fn clients_cannot_change_a_segment() {
    let broker = Running::new(Limits::default());
    let (mut owner, mut hostile) = (broker.member("web"), broker.member("web"));
    let slot = owner.make(&[1])[0];
    hostile.share(1);
    let files = hostile.segments.files.lock().unwrap();
    let file = &files[&slot.segment];
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
    assert_eq!(fcntl_get_seals(file).unwrap(), seals);
    // As received, and reopened: even root gets no write access.
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let reopened = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let offset = u64::from(slot.index) * PAGE as u64;
    for (name, file, write, change) in [
        ("as received", file, Errno::BADF, Errno::BADF),
        ("reopened", &reopened, Errno::PERM, Errno::PERM),
    ] {
        let error = file.write_at(&[0], offset).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(write.raw_os_error()), "{name}: write");
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        assert_eq!(fallocate(file, punch, offset, PAGE as u64), Err(change), "{name}: hole");
        let shrunk = ftruncate(file, 0).unwrap_err();
        assert!([Errno::PERM, Errno::INVAL, Errno::BADF].contains(&shrunk), "{name}: {shrunk}");
        let sealed = fcntl_add_seals(file, SealFlags::WRITE).unwrap_err();
        assert_eq!(sealed, Errno::PERM, "{name}: one more seal");
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: without MAP_FIXED no existing mapping is touched.
        let mapped =
            unsafe { mmap(ptr::null_mut(), PAGE, protection, MapFlags::SHARED, file, offset) };
        assert!(mapped.is_err(), "{name}: mapped for writing");
        assert_not_made_writable(file, offset);
    }
    drop(files);
    assert_eq!(owner.read(slot), page(1));
    assert_eq!(hostile.read(slot), page(1));
}

/// A mapping for reading cannot be made writable.
fn assert_not_made_writable(file: &File, offset: u64) {
    // SAFETY: without MAP_FIXED no existing mapping is touched.
    let address =
        unsafe { mmap(ptr::null_mut(), PAGE, ProtFlags::READ, MapFlags::SHARED, file, offset) };
    let address = address.unwrap();
    // SAFETY: the page is the mapping just made, to which no reference exists.
    let result = unsafe { mprotect(address, PAGE, MprotectFlags::READ | MprotectFlags::WRITE) };
    assert_eq!(result, Err(Errno::ACCESS));
    // SAFETY: the page is the mapping just made, to which no reference exists.
    unsafe { munmap(address, PAGE) }.unwrap();
}

//! Pages that a device may write to without the processor's page tables.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};

use ebb_abi::Pfn;
use ebb_guest_ram::merge::{MergeOutcome, PageLook};
use ebb_guest_ram::{GuestRange, HugePages, InhibitReason};

use crate::common::{PAGE, are_coalesced, mappings_of, setup};

// include/uapi/linux/io_uring.h
const SETUP: libc::c_long = 425;
const ENTER: libc::c_long = 426;
const REGISTER: libc::c_long = 427;
const REGISTER_BUFFERS: u32 = 0;
const UNREGISTER_BUFFERS: u32 = 1;
const ENTER_GETEVENTS: u32 = 1;
const OP_READ_FIXED: u8 = 4;
const OFF_SQES: i64 = 0x1000_0000;

/// `struct io_uring_params` as words: sizes and flags first, then the offsets of the submission
/// queue's fields (from word 10 on), and of the completion queue's (from word 20 on).
type Params = [u32; 30];

/// A minimal io_uring: one entry, one registered buffer.
struct Ring {
    descriptor: OwnedFd,
    queues: usize,
    entries: usize,
    params: Params,
}

impl Ring {
    fn new() -> io::Result<Self> {
        let mut params: Params = [0; 30];
        // SAFETY: the call writes one `struct io_uring_params`, which has 120 bytes.
        let result = unsafe { libc::syscall(SETUP, 1, params.as_mut_ptr()) };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the call has just returned this descriptor.
        let descriptor = unsafe { OwnedFd::from_raw_fd(result as i32) };
        let map = |offset| {
            // SAFETY: a new mapping at an address chosen by the kernel.
            let address = unsafe {
                libc::mmap(
                    ptr::null_mut(),
                    PAGE,
                    libc::PROT_READ | libc::PROT_WRITE,
                    libc::MAP_SHARED,
                    descriptor.as_raw_fd(),
                    offset,
                )
            };
            if address == libc::MAP_FAILED {
                Err(io::Error::last_os_error())
            } else {
                Ok(address as usize)
            }
        };
        let (queues, entries) = (map(0)?, map(OFF_SQES)?);
        Ok(Self { descriptor, queues, entries, params })
    }

    fn register(&self, operation: u32, buffer: Option<libc::iovec>) -> io::Result<()> {
        let (pointer, count) =
            buffer.as_ref().map_or((ptr::null(), 0), |buffer| (ptr::from_ref(buffer), 1));
        // SAFETY: the call reads one iovec, or none; the buffer is guest memory, which outlives the
        // ring.
        let result = unsafe {
            libc::syscall(REGISTER, self.descriptor.as_raw_fd(), operation, pointer, count)
        };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    fn word(&self, offset: u32) -> &AtomicU32 {
        // SAFETY: the kernel reports this offset of a word in the ring, which is mapped.
        unsafe { AtomicU32::from_ptr((self.queues + offset as usize) as *mut u32) }
    }

    /// Starts to read a page from `file` into the registered buffer.
    fn start_read(&self, file: &impl AsRawFd, address: usize) {
        let mut entry = [0_u8; 64];
        entry[0] = OP_READ_FIXED;
        entry[4..8].copy_from_slice(&file.as_raw_fd().to_ne_bytes());
        entry[8..16].copy_from_slice(&u64::MAX.to_ne_bytes());
        entry[16..24].copy_from_slice(&(address as u64).to_ne_bytes());
        entry[24..28].copy_from_slice(&(PAGE as u32).to_ne_bytes());
        // SAFETY: the first entry of the mapped array, which no other code uses.
        unsafe { ptr::copy_nonoverlapping(entry.as_ptr(), self.entries as *mut u8, 64) };
        let (tail, array) = (self.params[11], self.params[16]);
        self.word(array).store(0, Ordering::Relaxed);
        self.word(tail).fetch_add(1, Ordering::Release);
        self.enter(1, 0);
    }

    /// Waits until it is done; returns the number of bytes.
    fn finish_read(&self) -> i32 {
        self.enter(0, 1);
        let (head, events) = (self.params[20], self.params[25]);
        let result = self.word(events + 8).load(Ordering::Acquire);
        self.word(head).fetch_add(1, Ordering::Release);
        result as i32
    }

    fn enter(&self, submit: u32, wait: u32) {
        let flags = if wait > 0 { ENTER_GETEVENTS } else { 0 };
        // SAFETY: submits the entries in the ring, and waits.
        let result = unsafe {
            libc::syscall(
                ENTER,
                self.descriptor.as_raw_fd(),
                submit,
                wait,
                flags,
                ptr::null::<u8>(),
                0,
            )
        };
        assert!(result >= 0, "io_uring_enter: {}", io::Error::last_os_error());
    }
}

/// `None` where io_uring is unavailable.
fn ring() -> Option<Ring> {
    Ring::new().inspect_err(|error| eprintln!("not tested: no io_uring: {error}")).ok()
}

#[test]
fn a_pinned_page_is_busy_and_writes_of_a_device_are_kept() {
    let Some(mut setup) = setup(512, HugePages::Off) else { return };
    let Some(ring) = ring() else { return };
    (0..16).for_each(|page| setup.fill(page, 7));
    let slot = setup.publish(&[7])[0];
    setup.look(0, 16);
    let address = setup.address(5);
    ring.register(
        REGISTER_BUFFERS,
        Some(libc::iovec { iov_base: address as *mut _, iov_len: PAGE }),
    )
    .unwrap();
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    ring.start_read(&reader, address);
    // The device is active: it may write at any moment.
    let pages: Vec<_> = (0..16).map(|page| (page, slot)).collect();
    let outcomes = setup.replace(&pages);
    assert_eq!(outcomes[5], MergeOutcome::Busy);
    assert!((0..16).filter(|page| *page != 5).all(|page| outcomes[page] == MergeOutcome::Done));
    File::from(writer).write_all(&[9; PAGE]).unwrap();
    assert_eq!(ring.finish_read(), PAGE as i32);
    assert!(setup.is_full_of(5, 9), "the device's write is lost");
    assert!(setup.is_full_of(4, 7) && setup.is_full_of(6, 7));
    // Released, it is an ordinary page.
    ring.register(UNREGISTER_BUFFERS, None).unwrap();
    setup.fill(5, 7);
    assert_eq!(setup.look(5, 1), [PageLook::Written]);
    assert_eq!(setup.replace(&[(5, slot)]), [MergeOutcome::Done]);
}

/// Whether the monitor has declared that a device pins memory.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Said {
    Yes,
    No,
}

/// Whether a device's write to page 5 is present, although the page was merged and broken, and
/// scans continued while the device was active.
fn keeps_writes_of_a_device(said: Said) -> Option<bool> {
    let mut setup = setup(512, HugePages::Off)?;
    let ring = ring()?;
    (0..16).for_each(|page| setup.fill(page, 7));
    let slot = setup.publish(&[7])[0];
    let pages: Vec<_> = (0..16).map(|page| (page, slot)).collect();
    assert_eq!(setup.replace(&pages), [MergeOutcome::Done; 16]);
    let guard = (said == Said::Yes).then(|| setup.ram.inhibit_discard(InhibitReason::PinnedMemory));
    // Pinning breaks the page, since the device may write.
    let address = setup.address(5);
    ring.register(
        REGISTER_BUFFERS,
        Some(libc::iovec { iov_base: address as *mut _, iov_len: PAGE }),
    )
    .unwrap();
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    ring.start_read(&reader, address);
    assert_eq!(setup.look(0, 16)[5], PageLook::Broken(slot));
    (0..50).for_each(|_| drop(setup.look(0, 16)));
    assert_eq!(setup.ram.broken_cow_stats().brought_back_pages, u64::from(said == Said::No));
    File::from(writer).write_all(&[9; PAGE]).unwrap();
    assert_eq!(ring.finish_read(), PAGE as i32);
    let is_there = setup.is_full_of(5, 9);
    // Released, it is an ordinary page.
    ring.register(UNREGISTER_BUFFERS, None).unwrap();
    drop(guard);
    setup.fill(5, 7);
    (0..50).for_each(|_| drop(setup.look(0, 16)));
    assert_eq!(setup.look(5, 1), [PageLook::Clean]);
    assert_eq!(setup.replace(&[(5, slot)]), [MergeOutcome::Done]);
    Some(is_there)
}

#[test]
fn a_pinned_copy_is_not_reanonymized_while_discards_are_inhibited() {
    assert_ne!(keeps_writes_of_a_device(Said::Yes), Some(false));
}

/// Shows that the kernel does not detect this by itself, so that the other test is effective.
#[test]
fn undeclared_pinning_loses_writes() {
    assert_ne!(keeps_writes_of_a_device(Said::No), Some(true));
}

#[test]
fn mappings_with_a_pinned_page_are_not_coalesced() {
    let Some(mut setup) = setup(512, HugePages::Off) else { return };
    let Some(ring) = ring() else { return };
    (0..512).for_each(|page| setup.fill(page, 7));
    let slot = setup.publish(&[7])[0];
    let pages: Vec<_> = (100..200).step_by(4).map(|page| (page, slot)).collect();
    assert!(setup.replace(&pages).iter().all(|outcome| *outcome == MergeOutcome::Done));
    for (page, _) in &pages {
        setup.ram.discard(&[GuestRange::new(Pfn(*page), 1)]).unwrap();
        setup.fill(*page, 7);
    }
    let mappings = mappings_of(&setup);
    let address = setup.address(150);
    ring.register(
        REGISTER_BUFFERS,
        Some(libc::iovec { iov_base: address as *mut _, iov_len: PAGE }),
    )
    .unwrap();
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    ring.start_read(&reader, address);
    (0..1000).for_each(|_| drop(setup.look(0, 512)));
    assert_eq!((mappings_of(&setup), setup.ram.broken_cow_stats().joined_mappings), (mappings, 0));
    File::from(writer).write_all(&[9; PAGE]).unwrap();
    assert_eq!(ring.finish_read(), PAGE as i32);
    assert!((0..512).all(|page| setup.is_full_of(page, if page == 150 { 9 } else { 7 })));
    ring.register(UNREGISTER_BUFFERS, None).unwrap();
    let pages: Vec<_> = (0..512).map(|page| (page, if page == 150 { 9 } else { 7 })).collect();
    assert!(are_coalesced(&mut setup, &pages, 10));
    assert!((0..512).all(|page| setup.is_full_of(page, if page == 150 { 9 } else { 7 })));
}

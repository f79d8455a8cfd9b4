//! The purpose of a log: a copy of the memory that is right in the end, made while the guest keeps
//! writing.

use std::sync::mpsc::{TryRecvError, channel};
use std::thread;

use ebb_abi::{PAGE_SIZE_BYTES, Pfn};
use ebb_guest_ram::{GuestRam, GuestRange, PageBitmap};
use kvm_ioctls::VcpuFd;

use crate::guest::{Guest, REGIONS, Stop, create_vcpu, kvm, prepare, resume};
use crate::ring::AT_ONCE;
use crate::{bitmap, ring};

/// Rounds in which the guest writes to each page.
const ROUNDS: u32 = 30;
/// Calls that must have found something, so that the guest has written during the copying.
const LOOKS: u32 = 3;

/// Far more stops with a full ring than necessary.
const MAX_STOPS: u32 = 100_000;

/// A copy of the memory's last region.
struct Copy<'a> {
    ram: &'a GuestRam,
    region: GuestRange,
    content: Vec<u8>,
}

impl<'a> Copy<'a> {
    fn new(ram: &'a GuestRam) -> Self {
        let region = ram.page_ranges()[2];
        let mut copy = Self { ram, region, content: vec![0xff; region.size_bytes() as usize] };
        copy.renew(&PageBitmap::full(&[region]));
        copy
    }

    /// Copies these pages again.
    fn renew(&mut self, pages: &PageBitmap) {
        for range in pages.ranges_in(self.region) {
            let first = ((range.start.0 - self.region.start.0) * PAGE_SIZE_BYTES) as usize;
            let content = &mut self.content[first..first + range.size_bytes() as usize];
            self.ram.read_pages(range, content).unwrap();
        }
    }

    /// Pages that differ from memory.
    fn wrong_pages(&self) -> Vec<Pfn> {
        let mut content = vec![0; self.content.len()];
        self.ram.read_pages(self.region, &mut content).unwrap();
        let pages = self
            .content
            .chunks(PAGE_SIZE_BYTES as usize)
            .zip(content.chunks(PAGE_SIZE_BYTES as usize));
        let wrong = (self.region.start.0..).zip(pages).filter(|(_, (copy, memory))| copy != memory);
        wrong.map(|(page, _)| Pfn(page)).collect()
    }
}

/// Copies the pages that `look` finds, as long as the guest runs and once more. The guest writes to
/// all pages at least `ROUNDS` times, and until some calls have found something.
fn follow(
    mut vcpu: VcpuFd,
    ram: &GuestRam,
    ring_is_full: impl Fn() + Send,
    mut look: impl FnMut() -> PageBitmap,
) {
    let (first, pages) = REGIONS[2];
    let mut copy = Copy::new(ram);
    thread::scope(|scope| {
        let (stopped, has_stopped) = channel::<()>();
        let (enough, is_enough) = channel::<()>();
        scope.spawn(move || {
            // Dropped at the end, also on failure.
            let _stopped = stopped;
            let mut stops = 0;
            for round in 1.. {
                for first in (first..first + pages).step_by(AT_ONCE as usize) {
                    prepare(&vcpu, first, 1, AT_ONCE, 1);
                    while resume(&mut vcpu) == Stop::RingFull {
                        stops += 1;
                        assert!(stops < MAX_STOPS, "the ring stays full");
                        ring_is_full();
                    }
                }
                if round >= ROUNDS && is_enough.try_recv() == Err(TryRecvError::Disconnected) {
                    return;
                }
            }
        });
        let mut looks = 0;
        let mut enough = Some(enough);
        loop {
            let last = has_stopped.try_recv() == Err(TryRecvError::Disconnected);
            let found = look();
            copy.renew(&found);
            looks += u32::from(!found.is_empty());
            if looks >= LOOKS {
                enough = None;
            }
            if last {
                break;
            }
        }
        assert!(enough.is_none());
    });
    assert_eq!(copy.wrong_pages(), []);
}

#[test]
fn with_the_bitmap_a_copy_is_right_in_the_end() {
    let Some(kvm) = kvm() else { return };
    let guest = Guest::new(&kvm, |_| ());
    let mut log = bitmap::log(&guest);
    log.enable().unwrap();
    let vcpu = create_vcpu(&guest.vm, 1);
    follow(
        vcpu,
        &guest.ram,
        || panic!("there is no ring"),
        || {
            let mut found = guest.no_pages();
            log.get(&mut found).unwrap();
            log.clear_all(&found).unwrap();
            found
        },
    );
}

#[test]
fn with_rings_a_copy_is_right_in_the_end() {
    let Some((guest, log)) = ring::guest() else { return };
    let vcpu = create_vcpu(&guest.vm, 1);
    log.add_vcpu(&vcpu).unwrap();
    ring::start(&guest, &log);
    // Calls of several threads may coincide: entries that another one has harvested count as well.
    let harvest = || {
        log.harvest(&guest.vm).unwrap();
    };
    follow(vcpu, &guest.ram, harvest, || {
        let mut found = guest.no_pages();
        log.take(&guest.vm, &mut found).unwrap();
        found
    });
}

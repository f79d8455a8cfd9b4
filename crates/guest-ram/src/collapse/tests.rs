use std::thread;
use std::time::Duration;

use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::{InhibitReason, Populate, RegionSpec};

const MIB: u64 = 1 << 20;
const PAGE: u64 = PAGE_SIZE_BYTES;
const BLOCK: u64 = HUGE_PAGE_SIZE_BYTES;
/// The region begins and ends in the middle of a block.
const START: u64 = MIB;
const SIZE: u64 = MIB + 6 * BLOCK + MIB;

fn ram(backing: Backing, huge_pages: HugePages) -> GuestRam {
    let spec = RegionSpec { start: GuestAddress(START), size_bytes: SIZE, host_node: None };
    GuestRam::new(&[spec], backing, huge_pages, Populate::Lazy).unwrap()
}

/// Address of a page of a whole block, from 0 on.
fn page(block: u64, page: u64) -> GuestAddress {
    GuestAddress(START + MIB + block * BLOCK + page * PAGE)
}

fn write(ram: &GuestRam, block: u64, pages: impl Iterator<Item = u64>, content: u8) {
    for number in pages {
        ram.memory().write_obj(content, page(block, number)).unwrap();
    }
}

fn read(ram: &GuestRam, block: u64, number: u64) -> u8 {
    ram.memory().read_obj(page(block, number)).unwrap()
}

/// Bytes of the memory in huge pages, as the kernel counts them.
fn huge_bytes(ram: &GuestRam) -> u64 {
    let region = ram.regions()[0];
    let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
    let (mut is_ours, mut sum_kib) = (false, 0);
    for line in smaps.lines() {
        if let Some(kib) = line.strip_prefix("AnonHugePages:").filter(|_| is_ours) {
            sum_kib += kib.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap();
        } else if let Some((start, _)) = line.split_once('-') {
            let Ok(start) = u64::from_str_radix(start, 16) else { continue };
            is_ours = (region.host_address..region.host_address + SIZE).contains(&start);
        }
    }
    sum_kib << 10
}

/// A process that has the memory as it was when it was forked, until this is dropped.
struct Relative {
    pid: libc::pid_t,
    /// Closing it ends the process.
    alive: Option<std::io::PipeWriter>,
}

impl Relative {
    /// It compares some pages with what they were.
    fn fork(ram: &GuestRam) -> Self {
        let (wait, alive) = std::io::pipe().unwrap();
        let looked_at: Vec<(*const u8, u8)> = (0..4)
            .flat_map(|block| [0, 1, 300, 511].map(|number| (block, number)))
            .map(|(block, number)| {
                let offset = page(block, number).0 - START;
                let address = ram.regions()[0].host_address + offset;
                (address as *const u8, read(ram, block, number))
            })
            .collect();
        // SAFETY: the new process only makes system calls and reads memory that it has.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0);
        if pid == 0 {
            drop(alive);
            let _ = rustix::io::read(&wait, &mut [0_u8]);
            let is_old = looked_at.iter().all(|(address, old)| {
                // SAFETY: guest memory, of which the process has a copy.
                let content = unsafe { address.read_volatile() };
                content == *old
            });
            // SAFETY: ends the process without running any more of its code.
            unsafe { libc::_exit(i32::from(!is_old)) };
        }
        Self { pid, alive: Some(alive) }
    }

    /// Ends it; its memory is as it was.
    fn end(mut self) {
        drop(self.alive.take());
        let mut status = 1;
        // SAFETY: waits for the child, and `status` is valid for the result.
        let waited = unsafe { libc::waitpid(self.pid, &raw mut status, 0) };
        assert_eq!((waited, status), (self.pid, 0));
    }
}

/// Passes until `left` blocks are left: the kernel may refuse a block at first. Returns how many
/// were made huge.
#[track_caller]
fn passes(collapse: &mut Collapse<'_>, left: usize) -> usize {
    let mut huge = 0;
    for _ in 0..100 {
        let pass = collapse.pass(&|| false);
        huge += pass.huge;
        if collapse.left() <= left {
            break;
        }
        thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(collapse.left(), left);
    huge
}

#[test]
fn blocks_that_are_mostly_private_become_huge_and_others_stay() {
    let ram = ram(Backing::Anonymous, HugePages::On);
    if !allowed_by_host() || advise_collapse(ram.regions()[0].host_address as usize, 0).is_err() {
        assert!(ram.collapse().is_err());
        return;
    }
    let all = || 0..HUGE_PAGE_SIZE_PAGES;
    for block in 0..5 {
        write(&ram, block, all(), 1);
    }
    let relative = Relative::fork(&ram);
    write(&ram, 0, all(), 2);
    write(&ram, 1, all().step_by(2), 2);
    write(&ram, 2, all().step_by(2).skip(1), 2);
    write(&ram, 3, all(), 2);
    ram.discard(&[GuestRange::new(Pfn(page(3, 7).0 / PAGE), 1)]).unwrap();
    // Block 4 is shared with the other process, and block 5 was never touched.
    let before = huge_bytes(&ram);
    let check = || {
        for number in all() {
            assert_eq!(read(&ram, 0, number), 2);
            assert_eq!(read(&ram, 1, number), if number % 2 == 0 { 2 } else { 1 });
            let is_written = number % 2 == 0 && number > 0;
            assert_eq!(read(&ram, 2, number), if is_written { 2 } else { 1 });
            // To read the page that was discarded would map the page of zeros.
            assert!(number == 7 || read(&ram, 3, number) == 2);
            assert_eq!(read(&ram, 4, number), 1);
        }
    };

    let mut collapse = ram.collapse().unwrap();
    assert_eq!(collapse.left(), 6);
    assert_eq!(collapse.pass(&|| true).end, PassEnd::Stopped);
    let inhibited = ram.inhibit_discard(InhibitReason::BackgroundSnapshot);
    let held = collapse.pass(&|| false);
    assert_eq!((held.huge, held.end), (0, PassEnd::Held));
    drop(inhibited);
    assert_eq!((huge_bytes(&ram), collapse.left()), (before, 6));

    assert_eq!(passes(&mut collapse, 4), 2);
    assert_eq!(huge_bytes(&ram), before + 2 * BLOCK);
    let resident = ram.resident_bytes().unwrap();
    let rest = collapse.pass(&|| false);
    assert_eq!(rest, CollapsePass { huge: 0, refused: 0, end: PassEnd::Round });
    assert_eq!(ram.resident_bytes().unwrap(), resident);
    assert_eq!(resident, 5 * BLOCK - PAGE);
    check();
    // As soon as the other process has ended, nothing is shared.
    relative.end();
    assert_eq!(passes(&mut collapse, 2), 2);
    assert_eq!(huge_bytes(&ram), 4 * BLOCK);
    check();
    assert_eq!(ram.resident_bytes().unwrap(), resident);
    assert_eq!(read(&ram, 3, 7), 0);
}

#[test]
fn memory_that_should_have_no_huge_pages_gets_none() {
    for (backing, huge_pages) in
        [(Backing::Anonymous, HugePages::Off), (Backing::Memfd, HugePages::On)]
    {
        assert!(ram(backing, huge_pages).collapse().is_err());
    }
    let mut forbidden = ram(Backing::Anonymous, HugePages::On);
    forbidden.huge_allowed = false;
    assert_eq!(forbidden.collapse().unwrap_err(), "the host's setting is `never`");
}

#[test]
fn settings_of_the_host() {
    let allowed = |settings: &[&str]| allowed_by(settings.iter().map(|text| (*text).to_owned()));
    assert!(allowed(&["always [madvise] never\n"]));
    assert!(!allowed(&["always madvise [never]\n"]));
    assert!(!allowed(&["always [inherit] madvise never\n", "always madvise [never]\n"]));
    assert!(allowed(&["always inherit [madvise] never\n", "always madvise [never]\n"]));
    assert!(!allowed(&["always inherit madvise [never]\n", "[always] madvise never\n"]));
    // Without any, the kernel answers.
    assert!(allowed(&[]));
}

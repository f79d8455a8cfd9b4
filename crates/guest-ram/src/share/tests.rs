use std::os::fd::AsRawFd;
use std::process::Command;

use ebb_abi::{PAGE_SIZE_BYTES, Pfn};
use rustix::fs::{MemfdFlags, fcntl_add_seals, ftruncate, memfd_create};
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::{GuestRange, Populate};

const MIB: u64 = 1 << 20;
/// Passes the first process's ID and its descriptors to the test's second process.
const ORIGIN: &str = "EBB_TEST_SHARED_RAM_OF";

fn specs() -> [RegionSpec; 2] {
    let region =
        |start, size_bytes| RegionSpec { start: GuestAddress(start), size_bytes, host_node: None };
    [region(0, 4 * MIB), region(1 << 32, 2 * MIB)]
}

fn ram(backing: Backing) -> Result<GuestRam, RamError> {
    GuestRam::new(&specs(), backing, HugePages::Off, Populate::Lazy)
}

fn shared() -> SharedRam {
    ram(Backing::Memfd).unwrap().share().unwrap().unwrap()
}

fn problem(result: Result<GuestRam, RamError>) -> String {
    match result {
        Err(RamError::Adopt { problem }) => problem,
        other => panic!("{other:?}"),
    }
}

#[test]
fn both_have_the_same_memory_and_dropping_one_leaves_the_other() {
    for backing in [Backing::Memfd, Backing::Hugetlb2M] {
        let origin = match ram(backing) {
            Err(RamError::TooFewHugePages { .. }) => continue,
            other => other.unwrap(),
        };
        origin.memory().write_obj(7_u64, GuestAddress(MIB)).unwrap();
        origin.memory().write_obj(8_u64, GuestAddress(1 << 32)).unwrap();
        let held_bytes = origin.resident_bytes().unwrap();
        let adopt =
            || GuestRam::adopt(&specs(), HugePages::Off, origin.share().unwrap().unwrap()).unwrap();
        drop(adopt());
        assert_eq!(origin.resident_bytes().unwrap(), held_bytes);
        let successor = adopt();
        assert_eq!(successor.backing(), backing);
        assert_eq!(successor.resident_bytes().unwrap(), held_bytes);
        drop(origin);
        assert_eq!(successor.memory().read_obj::<u64>(GuestAddress(MIB)).unwrap(), 7);
        assert_eq!(successor.memory().read_obj::<u64>(GuestAddress(1 << 32)).unwrap(), 8);
        // The successor can discard the memory like its own.
        let all: Vec<_> = successor.page_ranges();
        successor.discard(&all).unwrap();
        assert_eq!(successor.resident_bytes().unwrap(), 0);
    }
}

#[test]
fn another_process_can_continue_with_the_memory() {
    const PAGE: GuestAddress = GuestAddress((1 << 32) + PAGE_SIZE_BYTES);
    if let Ok(origin) = std::env::var(ORIGIN) {
        let mut parts = origin.split(' ');
        let process = parts.next().unwrap();
        // Memory files have no path, except in /proc.
        let open = |descriptor| {
            let path = format!("/proc/{process}/fd/{descriptor}");
            OwnedFd::from(File::options().read(true).write(true).open(path).unwrap())
        };
        let files = parts.by_ref().take(2).map(open).collect();
        let layout = serde_json::from_str(parts.next().unwrap()).unwrap();
        let ram = GuestRam::adopt(&specs(), HugePages::Off, SharedRam { layout, files }).unwrap();
        assert_eq!(ram.memory().read_obj::<u64>(PAGE).unwrap(), 0x5eed);
        ram.memory().write_obj(0xfeed_u64, PAGE).unwrap();
        ram.discard(&[GuestRange::new(Pfn(3), 1)]).unwrap();
        return;
    }
    let ram = ram(Backing::Memfd).unwrap();
    ram.memory().write_obj(0x5eed_u64, PAGE).unwrap();
    ram.memory().write_obj(9_u64, GuestAddress(3 * PAGE_SIZE_BYTES)).unwrap();
    let shared = ram.share().unwrap().unwrap();
    let layout = serde_json::to_string(&shared.layout).unwrap();
    let descriptors: Vec<String> =
        shared.files.iter().map(|file| file.as_raw_fd().to_string()).collect();
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "share::tests::another_process_can_continue_with_the_memory"])
        .env(ORIGIN, format!("{} {} {layout}", std::process::id(), descriptors.join(" ")))
        .status()
        .unwrap();
    assert!(status.success());
    assert_eq!(ram.memory().read_obj::<u64>(PAGE).unwrap(), 0xfeed);
    let mut populated = Vec::new();
    ram.populated_ranges(GuestRange::new(Pfn(3), 1), &mut populated).unwrap();
    assert_eq!(populated, []);
}

#[test]
fn private_memory_is_not_shared() {
    assert!(ram(Backing::Anonymous).unwrap().share().unwrap().is_none());
}

#[test]
fn other_memory_is_refused_with_the_reason() {
    let adopt = |shared| GuestRam::adopt(&specs(), HugePages::Off, shared);

    let mut wrong = shared();
    wrong.layout.version = 2;
    assert!(problem(adopt(wrong)).contains("version 2"));

    let mut wrong = shared();
    wrong.layout.backing = Backing::Anonymous;
    assert!(problem(adopt(wrong)).contains("anonymous memory"));

    let mut wrong = shared();
    wrong.layout.backing = Backing::Hugetlb2M;
    assert!(problem(adopt(wrong)).contains("at 0x0 is not hugetlb memory"));

    let mut wrong = shared();
    wrong.files.pop();
    assert!(problem(adopt(wrong)).contains("1 files for 2 regions"));

    let mut wrong = shared();
    wrong.layout.regions[1].size_bytes += PAGE_SIZE_BYTES;
    assert!(problem(adopt(wrong)).contains("its regions are"));

    let mut wrong = shared();
    wrong.files.swap(0, 1);
    assert!(problem(adopt(wrong)).contains("has 2097152 bytes instead of 4194304"));

    let mut wrong = shared();
    wrong.files[0] = File::open("/proc/self/status").unwrap().into();
    assert!(problem(adopt(wrong)).contains("is not memfd"));

    let memory_file = |seals| {
        let file = memfd_create("test", MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&file, 4 * MIB).unwrap();
        fcntl_add_seals(&file, seals).unwrap();
        file
    };
    let mut wrong = shared();
    wrong.files[0] = memory_file(SealFlags::GROW);
    assert!(problem(adopt(wrong)).contains("could be made shorter"));

    let mut right = shared();
    right.files[0] = memory_file(SealFlags::SHRINK);
    adopt(right).unwrap();
}

#[test]
fn two_regions_cannot_have_the_same_file() {
    let region =
        |start| RegionSpec { start: GuestAddress(start), size_bytes: MIB, host_node: None };
    let specs = [region(0), region(1 << 32)];
    let ram = GuestRam::new(&specs, Backing::Memfd, HugePages::Off, Populate::Lazy).unwrap();
    let mut shared = ram.share().unwrap().unwrap();
    shared.files[1] = shared.files[0].try_clone().unwrap();
    assert!(problem(GuestRam::adopt(&specs, HugePages::Off, shared)).contains("the same file"));
}

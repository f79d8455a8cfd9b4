//! Backings of guest memory.

use std::fs;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ebb_agent::protocol::Command;

use crate::guest::{Guest, MIB};
use crate::harness::{Scene, Test, counts, eventually, when};
use crate::setup::Setup;

/// The tests.
pub const TESTS: &[Test] = &[
    Test::new("backing::anonymous_with_huge_pages", 240, anonymous_with_huge_pages),
    Test::new("backing::anonymous_without_huge_pages", 240, anonymous_without_huge_pages),
    Test::new("backing::memfd", 240, memfd),
    Test::new("backing::hugetlb", 300, hugetlb),
    Test::new("backing::preallocated", 240, preallocated),
];

/// Sizes of a guest's memory and of its uses.
struct Bytes {
    /// The guest's memory.
    ram: u64,
    /// Memory held by a program.
    held: u64,
    /// Memory touched by a program that then ends.
    touched: u64,
    /// Target of the balloon.
    balloon: u64,
}

/// Sizes for huge pages.
const LARGE: Bytes =
    Bytes { ram: 512 * MIB, held: 48 * MIB, touched: 360 * MIB, balloon: 320 * MIB };
/// Sizes for 4 KiB pages, which are slow to touch in an emulated host: smaller unless in a long
/// run.
fn small() -> Bytes {
    const SMALL: Bytes =
        Bytes { ram: 192 * MIB, held: 12 * MIB, touched: 100 * MIB, balloon: 80 * MIB };
    counts(SMALL, LARGE)
}

/// Inflates, deflates and reports on a guest with all of its free memory touched, and checks the
/// content throughout.
///
/// At least `at_least` bytes of the balloon must be returned to the host.
fn check_balloon(guest: &Guest, sizes: &Bytes, at_least: u64) {
    guest.run(Command::Hold { bytes: sizes.held, pattern: 11 });
    guest.run(Command::AllocTouchExit { bytes: sizes.touched });
    let (resident, process) = (guest.resident(), guest.process_bytes());
    let must_fall = at_least.saturating_sub(sizes.ram - resident);
    assert!(must_fall >= at_least / 2, "only {resident} bytes were touched");
    guest.inflate_to(sizes.balloon);
    eventually("the balloon's pages are returned to the host", 20, || {
        let (now, process_now) = (guest.resident(), guest.process_bytes());
        when(now + must_fall <= resident && process_now + must_fall <= process + 4 * MIB, || {
            format!(
                "{resident} -> {now}, process {process} -> {process_now}, must fall by {must_fall}"
            )
        })
    });
    assert_eq!(guest.wrong_pages(), 0);
    guest.inflate_to(0);
    guest.run(Command::AllocTouchExit { bytes: sizes.balloon - 20 * MIB });
    assert_eq!(guest.wrong_pages(), 0);
    assert_eq!(guest.metric("ebb_balloon_errors_total{kind=\"discard_failed\"}"), 0);
}

fn anonymous_with_huge_pages(scene: &Scene) {
    let guest = Setup::new(scene).memory("size=512M,backing=anon,thp=on").start();
    let policy =
        fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    if !policy.contains("[never]") {
        assert!(guest.huge_bytes() > 0);
    }
    check_balloon(&guest, &LARGE, LARGE.balloon);
}

fn anonymous_without_huge_pages(scene: &Scene) {
    let sizes = small();
    let memory = format!("size={},backing=anon,thp=off", sizes.ram);
    let guest = Setup::new(scene).memory(&memory).start();
    check_balloon(&guest, &sizes, sizes.balloon);
    assert_eq!(guest.huge_bytes(), 0);
}

fn memfd(scene: &Scene) {
    let sizes = small();
    let guest = Setup::new(scene).memory(&format!("size={},backing=memfd", sizes.ram)).start();
    check_balloon(&guest, &sizes, sizes.balloon);
}

/// Locked by a test that uses huge pages of the pool, which suffice for one guest.
static POOL: Mutex<()> = Mutex::new(());

/// Waits for exclusive use of the pool of huge pages.
pub fn use_pool() -> MutexGuard<'static, ()> {
    POOL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Free huge pages in the pool.
pub fn pool_free() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap();
    ebb_lab::harness::proc::meminfo(&text)["HugePages_Free"]
}

fn hugetlb(scene: &Scene) {
    let _pool = use_pool();
    let before = pool_free();
    let setup = Setup::new(scene).memory("size=512M,backing=hugetlb");
    if before < LARGE.ram / (2 * MIB) {
        // A machine without a pool: the monitor must report it.
        let mut guest = setup.spawn();
        let (code, log) = guest.wait_end();
        assert_eq!(code, Some(1), "{log}");
        assert!(log.contains("huge"), "{log}");
        return;
    }
    let guest = setup.start();
    // Only whole huge pages are returned: the driver allocates single pages, and some of its huge
    // pages also contain pages of other owners.
    check_balloon(&guest, &LARGE, LARGE.balloon / 10 * 8);
    drop(guest);
    assert_eq!(pool_free(), before, "all pages are returned to the pool");
}

fn preallocated(scene: &Scene) {
    for backing in ["anon", "memfd"] {
        let sizes = small();
        let memory = format!("size={},backing={backing},prealloc=on", sizes.ram);
        let guest = Setup::new(scene).memory(&memory).balloon("reporting=off").start();
        assert!(guest.resident() >= sizes.ram - 2 * MIB, "{backing}: {}", guest.resident());
        check_balloon(&guest, &sizes, sizes.balloon);
    }
}

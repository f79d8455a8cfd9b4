//! SIGKILL at random moments of a snapshot, a restore, a migration and of merging through a broker:
//! nothing is lost, and nothing is left behind.

mod broker;
mod migration;
mod restore;
mod snapshot;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use ebb_agent::protocol::Command;
use ebb_agent::random::Random;
use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, Signal, kill_process};

use crate::guest::{Guest, MIB};
use crate::harness::{Machine, Scene, Test, counts, eventually, when};
use crate::setup::Setup;

/// The tests.
pub const TESTS: &[Test] = &[
    Test::new("kills::snapshot", 300, snapshot::in_a_snapshot),
    Test::new("kills::restore", 200, restore::in_a_restore),
    Test::new("kills::migration", 300, migration::in_a_migration),
    Test::new("kills::broker", 300, broker::of_broker_and_clients).merging(),
];

/// Number of kills of each test.
fn kills(short: usize) -> usize {
    counts(short, 50)
}

/// Memory that guests of these tests hold, in bytes.
const HELD: u64 = 32 * MIB;

/// The cgroup of monitors that are killed, where there is version 2.
const CGROUP: &str = "/sys/fs/cgroup/ebb-kills/vm";

/// Name of the socket of a broker, which a killed one leaves to the next.
const BROKER: &str = "broker";

/// A number generator for the moments, whose seed is printed.
pub fn moments(scene: &Scene) -> Random {
    let mut seed = [0; 8];
    rustix::rand::getrandom(&mut seed, rustix::rand::GetRandomFlags::empty()).unwrap();
    let seed = u64::from_ne_bytes(seed);
    println!("    seed of the moments: {seed:#x}");
    scene.guests().report(&format!("\nseed of the moments: {seed:#x}"));
    Random::new(seed)
}

/// Sleeps for a random part of `limit`.
fn a_part_of(random: &mut Random, limit: Duration) {
    let limit_us = usize::try_from(limit.as_micros()).unwrap();
    sleep(Duration::from_micros(random.below(limit_us) as u64));
}

fn signal(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid.cast_signed()).unwrap(), signal).unwrap();
}

/// Snapshot of a guest with held memory, from which others start faster than by booting.
fn base(scene: &Scene, setup: Setup<'_>) -> PathBuf {
    let file = scene.path("base");
    let guest = setup.memory("size=192M").start();
    guest.run(Command::Hold { bytes: HELD, pattern: 91 });
    guest.save_and_end(&file);
    file
}

/// A disk image, and the value of `--disk` for it.
fn disk(scene: &Scene) -> (PathBuf, String) {
    let path = scene.path("disk");
    fs::write(&path, b"on the disk\n".repeat(4096)).unwrap();
    let option = format!("path={}", path.display());
    (path, option)
}

/// Checks that the disk's content reaches the guest.
#[track_caller]
fn check_disk(guest: &Guest) {
    let script = "dd if=/dev/vda bs=4096 count=1 iflag=direct 2>/dev/null | head -n 1";
    let argv = ["/bin/busybox", "sh", "-c", script].map(str::to_owned).to_vec();
    assert_eq!(guest.run(Command::Exec { argv })["stdout"], "on the disk\n");
}

/// Whether a machine writes to the image.
fn is_locked(image: &Path) -> bool {
    let file = File::open(image).unwrap();
    flock(&file, FlockOperation::NonBlockingLockShared).is_err()
}

/// Companions of all monitors on this host, also of those that have ended.
fn companions() -> BTreeSet<u32> {
    let processes = fs::read_dir("/proc").unwrap().filter_map(|entry| {
        let pid = entry.ok()?.file_name().to_str()?.parse().ok()?;
        // A process that has ended has no command line.
        let words = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        words.starts_with(b"ebb\0companion").then_some(pid)
    });
    processes.collect()
}

/// The companion of a monitor.
fn companion_of(monitor: u32) -> Option<u32> {
    let children = fs::read_to_string(format!("/proc/{monitor}/task/{monitor}/children")).ok()?;
    let children = children.split_ascii_whitespace().filter_map(|pid| pid.parse().ok());
    children.into_iter().find(|pid| companions().contains(pid))
}

/// Ids of users that monitors have locked.
fn locked_users() -> BTreeSet<String> {
    let entries = fs::read_dir("/run/ebb/users").into_iter().flatten().flatten();
    let locked = entries.filter(|entry| {
        let file = File::open(entry.path()).unwrap();
        flock(&file, FlockOperation::NonBlockingLockShared).is_err()
    });
    locked.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// Checks that nothing is left of other monitors than these: no socket in the test's directory, no
/// companion, no locked user id, and no cgroup.
#[track_caller]
fn check_nothing_left(scene: &Scene, alive: &[&Guest]) {
    let pids: BTreeSet<_> = alive.iter().map(|guest| guest.pid()).collect();
    eventually("nothing is left", 20, || {
        let mut left = String::new();
        let sockets: BTreeSet<_> = alive.iter().map(|guest| guest.socket().clone()).collect();
        for entry in fs::read_dir(scene.path("")).unwrap().flatten() {
            use std::os::unix::fs::FileTypeExt as _;
            let is_socket = entry.file_type().is_ok_and(|kind| kind.is_socket());
            let is_known = sockets.contains(&entry.path()) || entry.file_name() == BROKER;
            if is_socket && !is_known {
                let _ = writeln!(left, "socket {}", entry.path().display());
            }
        }
        if alive.is_empty() && Path::new(CGROUP).exists() {
            let _ = writeln!(left, "{CGROUP}");
        }
        // On another machine, there may be other monitors.
        if matches!(scene.world.machine, Machine::Emulated(_)) {
            let kept: BTreeSet<_> = pids.iter().filter_map(|pid| companion_of(*pid)).collect();
            let more: Vec<_> = companions().difference(&kept).copied().collect();
            if !more.is_empty() {
                let _ = writeln!(left, "companions {more:?}");
            }
            let users = locked_users();
            if users.len() > alive.len() {
                let _ = writeln!(left, "users {users:?} are locked");
            }
        }
        when(left.is_empty(), || left)
    });
}

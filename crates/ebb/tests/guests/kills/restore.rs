//! Kills of monitors that restore a snapshot.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::time::Instant;

use rustix::process::Signal;

use super::{a_part_of, base, check_disk, check_nothing_left, disk, is_locked, kills, moments};
use crate::harness::{Scene, WRONG_CONTENT};
use crate::saved::{Restore, describe};
use crate::setup::Setup;

pub(super) fn in_a_restore(scene: &Scene) {
    let (image, option) = disk(scene);
    let file = base(scene, Setup::new(scene).args(["--disk", &option]));
    let identity = || {
        let found = fs::metadata(&file).unwrap();
        (found.ino(), found.len(), found.modified().unwrap(), found.blocks())
    };
    let before = identity();
    let restore =
        |arguments: &[&str]| Restore::new(scene, &file).args(["--disk", &option]).args(arguments);
    let mut random = moments(scene);
    // `--verify` reads the file before the machine is built.
    let ways: [&[&str]; 2] = [&[], &["--verify"]];
    let whole = ways.map(|arguments| {
        let started = Instant::now();
        let guest = restore(arguments).start();
        let elapsed = started.elapsed();
        assert_eq!(guest.wrong_pages(), 0, "{WRONG_CONTENT}");
        check_disk(&guest);
        guest.end();
        elapsed
    });
    let (mut early, mut late) = (0, 0);
    for round in 0..kills(4) {
        let mut guest = restore(ways[round % ways.len()]).spawn();
        a_part_of(&mut random, whole[round % ways.len()]);
        assert!(guest.is_running(), "{:?}", guest.wait_end());
        *(if guest.client().request("GET", "/vm", "").is_ok() { &mut late } else { &mut early }) +=
            1;
        guest.signal(Signal::KILL);
        guest.wait_end();
        check_nothing_left(scene, &[]);
        assert!(!is_locked(&image), "the image is locked");
        assert_eq!(identity(), before, "the snapshot has changed");
    }
    println!("    restores: {early} killed before the API has answered, {late} after");
    // The checksums of everything.
    describe(scene, &file);
    let guest = restore(&["--verify"]).start();
    assert_eq!(guest.wrong_pages(), 0, "{WRONG_CONTENT}");
    check_disk(&guest);
    assert!(is_locked(&image));
    guest.end();
    check_nothing_left(scene, &[]);
}

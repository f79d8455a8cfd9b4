//! Kills of both sides of a migration, and of the command that has requested it.

use std::fs;
use std::path::Path;
use std::process::Child;
use std::time::{Duration, Instant};

use ebb_agent::random::Random;
use ebb_vmm::api::{MigrationPhase, MigrationStatus, VmInfo, VmState};
use rustix::process::Signal;

use super::{a_part_of, base, check_disk, check_nothing_left, disk, is_locked, kills, moments};
use crate::guest::Guest;
use crate::harness::{Scene, WRONG_CONTENT, eventually, when};
use crate::moved::{MIGRATED, Migrate, Receive, Route};
use crate::saved::Restore;
use crate::setup::Setup;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    Source,
    Destination,
    Client,
}

const VICTIMS: [Victim; 5] =
    [Victim::Source, Victim::Destination, Victim::Source, Victim::Destination, Victim::Client];

/// About the time from the end of the rounds to the end of the migration, in an emulated host.
const SWITCH_OVER: Duration = Duration::from_millis(80);

/// Outcomes, with their numbers.
#[derive(Debug, Default)]
struct Tally {
    /// The machine runs at the source.
    stayed: u32,
    /// It runs at the destination.
    moved: u32,
    /// It was killed with its monitor, the destination's.
    ended: u32,
    /// The source could not know, and the machine was resumed there.
    unknown: u32,
    /// It runs at the source, and the receiver waited for another one.
    waited: u32,
}

/// State of the machine according to a monitor that may end.
fn state(guest: &Guest) -> Option<VmState> {
    guest.client().get::<VmInfo>("/vm").ok().map(|info| info.state)
}

/// Checks that the machine is whole, and that it has locked its disk.
#[track_caller]
fn check_whole(guest: &Guest, image: &Path) {
    assert_eq!(guest.wrong_pages(), 0, "{WRONG_CONTENT}");
    check_disk(guest);
    assert!(is_locked(image), "the image is not locked");
}

/// Waits for a random moment: of the whole migration, or of its end.
fn a_moment(random: &mut Random, guest: &Guest, client: &mut Child, whole: Duration) {
    if random.chance(1, 2) {
        a_part_of(random, whole);
        return;
    }
    let is_before_end = || {
        let status = guest.client().get::<MigrationStatus>("/vm/migration");
        status.is_ok_and(|status| status.phase != MigrationPhase::SwitchOver)
    };
    while is_before_end() && client.try_wait().unwrap().is_none() {}
    a_part_of(random, SWITCH_OVER);
}

/// What has become of a receiver whose source or client was killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Received {
    /// It runs the machine.
    Machine,
    /// It has ended.
    Nothing,
    /// It waits for another source: this one was killed before it had said what it sends.
    NoSource,
}

/// Looks in a row at which a receiver has no connection until it counts as waiting. A machine has
/// its receiver end, or run, at once after its connection has ended.
const LOOKS: u32 = 40;

/// Sockets that a monitor has open.
fn sockets(guest: &Guest) -> usize {
    let files = fs::read_dir(format!("/proc/{}/fd", guest.pid())).into_iter().flatten().flatten();
    let links = files.filter_map(|file| fs::read_link(file.path()).ok());
    links.filter(|link| link.to_string_lossy().starts_with("socket:")).count()
}

/// `idle` is how many sockets the receiver has without a source.
#[track_caller]
fn received(receiver: &mut Guest, idle: usize) -> Received {
    let mut looks = 0;
    eventually("the receiver has the machine, ends, or waits for another source", 60, || {
        if !receiver.is_running() {
            return Ok(Received::Nothing);
        }
        let state = state(receiver);
        match state {
            Some(VmState::Running) => return Ok(Received::Machine),
            Some(VmState::Receiving) if sockets(receiver) <= idle => looks += 1,
            _ => {}
        }
        when(looks >= LOOKS, || format!("{state:?}")).map(|()| Received::NoSource)
    })
}

/// Moves the machine to a receiver that waits for it.
#[track_caller]
fn take(scene: &Scene, mut guest: Guest, receiver: Guest, address: &str) -> Guest {
    assert_eq!(Migrate::new(scene, &guest, address).run().0, Some(0), "{}", receiver.log());
    assert_eq!(guest.wait_end().0, Some(MIGRATED), "{}", guest.log());
    receiver
}

pub(super) fn in_a_migration(scene: &Scene) {
    let (image, option) = disk(scene);
    let file = base(scene, Setup::new(scene).args(["--disk", &option]));
    let mut number = 0;
    let mut receive = || {
        number += 1;
        let name = format!("receiver{number}");
        Receive::new(scene, &name, [Route::Unix, Route::Tcp][number % 2]).args(["--disk", &option])
    };
    let start = || Restore::new(scene, &file).args(["--disk", &option]).start();
    let mut random = moments(scene);
    let (source, (mut guest, address)) = (start(), receive().start());
    let started = Instant::now();
    assert_eq!(Migrate::new(scene, &source, &address).run().0, Some(0));
    let whole = started.elapsed();
    drop(source);
    let mut tally = Tally::default();
    for round in 0..kills(3) {
        let victim = VICTIMS[round % VICTIMS.len()];
        let (mut receiver, address) = receive().start();
        let idle = sockets(&receiver);
        let mut client = Migrate::new(scene, &guest, &address).spawn();
        a_moment(&mut random, &guest, &mut client, whole);
        scene.guests().report(&format!("\nround {round}: {victim:?}"));
        guest = match victim {
            Victim::Source => {
                // It may have ended because the machine has moved.
                if guest.is_running() {
                    guest.signal(Signal::KILL);
                }
                guest.wait_end();
                client.wait().unwrap();
                match received(&mut receiver, idle) {
                    Received::Machine => {
                        tally.moved += 1;
                        check_nothing_left(scene, &[&receiver]);
                        receiver
                    }
                    Received::Nothing => {
                        let (code, log) = receiver.wait_end();
                        assert_eq!(code, Some(1), "{log}");
                        tally.stayed += 1;
                        check_nothing_left(scene, &[]);
                        assert!(!is_locked(&image), "the image is locked");
                        start()
                    }
                    Received::NoSource => {
                        tally.waited += 1;
                        take(scene, start(), receiver, &address)
                    }
                }
            }
            Victim::Destination => {
                receiver.signal(Signal::KILL);
                receiver.wait_end();
                let code = client.wait().unwrap().code();
                match code {
                    Some(0) => {
                        assert_eq!(guest.wait_end().0, Some(MIGRATED), "{}", guest.log());
                        tally.ended += 1;
                        check_nothing_left(scene, &[]);
                        assert!(!is_locked(&image), "the image is locked");
                        start()
                    }
                    Some(1) => {
                        assert_eq!(guest.vm().state, VmState::Running);
                        tally.stayed += 1;
                        check_nothing_left(scene, &[&guest]);
                        guest
                    }
                    Some(3) => {
                        assert_eq!(guest.vm().state, VmState::Paused);
                        guest.put("/vm/resume");
                        tally.unknown += 1;
                        check_nothing_left(scene, &[&guest]);
                        guest
                    }
                    other => panic!("the client has ended with {other:?}"),
                }
            }
            Victim::Client => {
                client.kill().unwrap();
                client.wait().unwrap();
                let runs_at_the_source = || {
                    eventually("the machine runs at the source", 30, || {
                        let state = state(&guest);
                        when(state == Some(VmState::Running), || format!("{state:?}"))
                    });
                };
                match received(&mut receiver, idle) {
                    Received::Machine => {
                        assert_eq!(guest.wait_end().0, Some(MIGRATED), "{}", guest.log());
                        tally.moved += 1;
                        check_nothing_left(scene, &[&receiver]);
                        receiver
                    }
                    Received::Nothing => {
                        runs_at_the_source();
                        tally.stayed += 1;
                        check_nothing_left(scene, &[&guest]);
                        guest
                    }
                    Received::NoSource => {
                        runs_at_the_source();
                        tally.waited += 1;
                        take(scene, guest, receiver, &address)
                    }
                }
            }
        };
        check_whole(&guest, &image);
    }
    println!("    migrations, of {whole:?} if not cut short: {tally:?}");
    guest.end();
    check_nothing_left(scene, &[]);
    assert!(!is_locked(&image), "the image is locked");
}

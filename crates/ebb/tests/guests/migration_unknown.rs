//! Migrations whose connection breaks at the moment of the decision: never two machines run, and
//! the disk belongs to the one that runs.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use ebb_agent::protocol::Command;
use ebb_vmm::api::{MigrationPhase, MigrationStatus, VmState};

use crate::guest::{Guest, MIB};
use crate::harness::{Scene, Test, WRONG_CONTENT};
use crate::moved::{Migrate, Receive, Route, move_to};
use crate::setup::Setup;

/// The tests.
pub const TESTS: &[Test] = &[
    Test::new("migration::unknown_and_not_moved", 240, unknown_and_not_moved),
    Test::new("migration::unknown_and_moved", 240, unknown_and_moved),
];

/// The commit message: length and kind. The source sends it alone.
const COMMIT: [u8; 5] = [0, 0, 0, 0, 9];

/// What happens to the commit message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Decision {
    /// The connection breaks before it.
    Lost,
    /// The destination gets it, but its answer is lost.
    Arrives,
}

/// Address of a network in front of the receiver at `address`, which breaks at the decision.
fn network(address: &str, decision: Decision) -> String {
    let receiver = address.strip_prefix("tcp:").unwrap().to_owned();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = listener.local_addr().unwrap();
    thread::spawn(move || {
        for source in listener.incoming().map_while(Result::ok) {
            let Ok(destination) = TcpStream::connect(&receiver) else { return };
            let decided = Arc::new(AtomicBool::new(false));
            let [to, from] = [source, destination].map(Arc::new);
            let (answers, questions) = ((from.clone(), to.clone()), (to, from));
            let is_decided = decided.clone();
            thread::spawn(move || {
                pass_on(&answers.0, &answers.1, |_| is_decided.load(Ordering::Acquire));
            });
            thread::spawn(move || {
                pass_on(&questions.0, &questions.1, |bytes| {
                    let is_commit = bytes == COMMIT;
                    if is_commit {
                        decided.store(true, Ordering::Release);
                    }
                    if is_commit && decision == Decision::Arrives {
                        let _ = (&*questions.1).write_all(bytes);
                    }
                    is_commit
                });
            });
        }
    });
    format!("tcp:{near}")
}

/// Copies bytes until the end, or until `breaks` says so of some of them, which are lost.
fn pass_on(mut from: &TcpStream, mut to: &TcpStream, mut breaks: impl FnMut(&[u8]) -> bool) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(length @ 1..) = from.read(&mut buffer) {
        if breaks(&buffer[..length]) || to.write_all(&buffer[..length]).is_err() {
            break;
        }
    }
    for end in [from, to] {
        let _ = end.shutdown(Shutdown::Both);
    }
}

/// The content that guests write to their disk, and where it is.
fn written(image: &Path) -> Vec<u8> {
    std::fs::read(image).unwrap()[..6].to_vec()
}

#[track_caller]
fn write(guest: &Guest, text: &str) {
    assert_eq!(text.len(), 6);
    let script = format!("printf {text} | dd of=/dev/vda conv=notrunc,fsync");
    let argv = ["/bin/busybox", "sh", "-c", &script].map(str::to_owned).to_vec();
    assert_eq!(guest.run(Command::Exec { argv })["code"], 0);
}

#[track_caller]
fn check(guest: &Guest) {
    assert_eq!(guest.wrong_pages(), 0, "{WRONG_CONTENT}");
}

/// Whether a machine writes to the image.
fn is_locked(image: &Path) -> bool {
    use rustix::fs::{FlockOperation, flock};
    let file = std::fs::File::open(image).unwrap();
    flock(&file, FlockOperation::NonBlockingLockShared).is_err()
}

/// Migrates a guest with a disk over a network that breaks; returns source and destination.
#[track_caller]
fn migrate(scene: &Scene, image: &Path, decision: Decision) -> (Guest, Guest) {
    std::fs::write(image, vec![0; 1 << 20]).unwrap();
    let disk = format!("path={}", image.display());
    let guest = Setup::new(scene).memory("size=256M").args(["--disk", &disk]).start();
    guest.run(Command::Hold { bytes: 32 * MIB, pattern: 56 });
    write(&guest, "before");
    let receive = Receive::new(scene, "second", Route::Tcp).args(["--disk", &disk]);
    let (receiver, address) = receive.start();
    let (code, report, said) = Migrate::new(scene, &guest, &network(&address, decision)).run();
    assert_eq!(code, Some(3), "{report} {said}");
    assert_eq!(guest.vm().state, VmState::Paused);
    let status: MigrationStatus = guest.client().get("/vm/migration").unwrap();
    assert_eq!(status.phase, MigrationPhase::Unknown);
    (guest, receiver)
}

fn unknown_and_not_moved(scene: &Scene) {
    let image = scene.path("disk");
    let (guest, mut receiver) = migrate(scene, &image, Decision::Lost);
    let (code, log) = receiver.wait_end();
    assert_eq!(code, Some(1), "{log}");
    assert!(!receiver.socket().exists(), "the socket is left behind");
    // No machine has the disk until a user decides.
    assert!(!is_locked(&image));
    guest.put("/vm/resume");
    assert!(is_locked(&image));
    check(&guest);
    write(&guest, "after1");
    assert_eq!(written(&image), b"after1");
    // It can be migrated again.
    let disk = format!("path={}", image.display());
    let third = Receive::new(scene, "third", Route::Unix).args(["--disk", &disk]);
    let (guest, _) = move_to(third, guest, [""; 0]);
    check(&guest);
    write(&guest, "after2");
    assert_eq!(written(&image), b"after2");
}

fn unknown_and_moved(scene: &Scene) {
    let image = scene.path("disk");
    let (mut guest, moved) = migrate(scene, &image, Decision::Arrives);
    crate::harness::eventually("the machine runs at the destination", 30, || {
        let state = moved.vm().state;
        crate::harness::when(state == VmState::Running, || format!("{state:?}"))
    });
    check(&moved);
    assert!(is_locked(&image));
    write(&moved, "after1");
    // The lock of the disk keeps a second one from running.
    let (status, said) = guest.refused("PUT", "/vm/resume", "");
    assert!(status == 409 && said.contains("disk"), "{status} {said}");
    assert_eq!(guest.vm().state, VmState::Paused);
    guest.put("/vm/kill");
    guest.wait_end();
    check(&moved);
    write(&moved, "after2");
    assert_eq!(written(&image), b"after2");
}

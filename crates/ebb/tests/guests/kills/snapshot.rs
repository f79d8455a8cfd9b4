//! Kills while a snapshot is written, by all who take part.

use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command as Program, Stdio};
use std::time::{Duration, Instant};

use ebb_vmm::api::VmState;
use rustix::process::Signal;

use super::{CGROUP, a_part_of, base, check_nothing_left, companion_of, kills, moments, signal};
use crate::guest::Guest;
use crate::harness::{Machine, Scene, WRONG_CONTENT, eventually, when};
use crate::saved::{Restore, describe};
use crate::setup::Setup;

/// Who creates the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// The client.
    Ctl,
    /// The companion.
    Http,
}

/// Who is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    Monitor,
    Companion,
    Client,
}

/// All kinds of kills; the first four are those of an ordinary run.
const KINDS: [(Way, Victim); 6] = [
    (Way::Ctl, Victim::Monitor),
    (Way::Http, Victim::Monitor),
    (Way::Http, Victim::Companion),
    (Way::Ctl, Victim::Client),
    (Way::Http, Victim::Client),
    (Way::Ctl, Victim::Companion),
];

/// A client that waits for its snapshot.
enum Client {
    Ctl(Child),
    Http(UnixStream),
}

impl Client {
    fn start(scene: &Scene, guest: &Guest, file: &Path, way: Way) -> Self {
        match way {
            Way::Ctl => {
                let mut program = Program::new(&scene.world.ebb);
                program.arg("ctl").arg(guest.socket()).arg("snapshot").arg(file);
                Self::Ctl(program.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
            }
            Way::Http => {
                let body = serde_json::json!({ "path": file }).to_string();
                let mut stream = UnixStream::connect(guest.socket()).unwrap();
                write!(
                    stream,
                    "PUT /vm/snapshot HTTP/1.1\r\nHost: ebb\r\nContent-Type: application/json\r\n\
                     Content-Length: {}\r\nConnection: close\r\n\r\n{body}",
                    body.len()
                )
                .unwrap();
                Self::Http(stream)
            }
        }
    }

    fn kill(self) {
        match self {
            Self::Ctl(mut child) => {
                child.kill().unwrap();
                child.wait().unwrap();
            }
            // A process that is killed closes it, too.
            Self::Http(stream) => drop(stream),
        }
    }

    /// Whether it was told that the snapshot is complete.
    fn succeeds(self) -> bool {
        match self {
            Self::Ctl(mut child) => child.wait().unwrap().success(),
            Self::Http(mut stream) => {
                let mut answer = String::new();
                stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
                // Cut short if the monitor was killed.
                let _ = stream.read_to_string(&mut answer);
                answer.starts_with("HTTP/1.1 200")
            }
        }
    }
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap();
    entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect()
}

pub(super) fn in_a_snapshot(scene: &Scene) {
    let snapshots = scene.path("snapshots");
    fs::create_dir(&snapshots).unwrap();
    let file = snapshots.join("vm.snapshot");
    let has_cgroups = matches!(scene.world.machine, Machine::Emulated(_));
    let parent = Path::new(CGROUP).parent().unwrap();
    if has_cgroups {
        fs::create_dir_all(parent).unwrap();
    }
    let start = |from: &PathBuf| {
        let restore = Restore::new(scene, from).arg_os("--allow-dir", &snapshots);
        let option = format!("path={CGROUP}");
        let cgroup: &[_] = if has_cgroups { &["--cgroup", &option] } else { &[] };
        restore.args(cgroup).start()
    };

    let base = base(scene, Setup::new(scene));
    let mut random = moments(scene);
    let mut guest = start(&base);
    // Time of a snapshot by each way.
    let [by_ctl, by_http] = [Way::Ctl, Way::Http].map(|way| {
        let started = Instant::now();
        assert!(Client::start(scene, &guest, &file, way).succeeds(), "{way:?}");
        started.elapsed()
    });
    let (mut complete, mut cut_short) = (0, 0);
    for round in 0..kills(4) {
        let (way, victim) = KINDS[round % KINDS.len()];
        // Half of the snapshots replace another one.
        let replaces = random.chance(1, 2) && file.exists();
        if !replaces {
            let _ = fs::remove_file(&file);
        }
        let before = fs::metadata(&file).and_then(|file| file.modified()).ok();
        let companion = companion_of(guest.pid()).expect("a companion");
        let client = Client::start(scene, &guest, &file, way);
        a_part_of(
            &mut random,
            match way {
                Way::Ctl => by_ctl,
                Way::Http => by_http,
            },
        );
        let mut told = None;
        match victim {
            Victim::Monitor => {
                guest.signal(Signal::KILL);
                guest.wait_end();
                told = Some(client.succeeds());
                check_nothing_left(scene, &[]);
            }
            Victim::Companion => {
                signal(companion, Signal::KILL);
                told = Some(client.succeeds());
                // It is not needed for a file that the client has created.
                assert!(way == Way::Http || told == Some(true), "a snapshot by ctl has failed");
            }
            Victim::Client => client.kill(),
        }
        if victim != Victim::Monitor {
            eventually("the machine runs", 30, || {
                let state = guest.vm().state;
                when(state == VmState::Running, || format!("{state:?}"))
            });
        }
        // A companion may have been about to give the file its name.
        if victim != Victim::Companion {
            let companion = companion_of(guest.pid());
            assert!(victim == Victim::Monitor || companion.is_some(), "the companion has ended");
        }

        let after = fs::metadata(&file).and_then(|file| file.modified()).ok();
        let is_new = after.is_some() && (before.is_none() || after > before);
        let context = || format!("round {round}: {way:?} {victim:?}, replaces: {replaces}");
        let expected: &[&str] = if after.is_some() { &["vm.snapshot"] } else { &[] };
        assert_eq!(names(&snapshots), expected, "{}", context());
        assert!(after.is_some() || !replaces, "a snapshot is lost: {}", context());
        assert!(told != Some(true) || is_new, "a complete snapshot is missing: {}", context());
        if after.is_some() {
            describe(scene, &file);
        }
        *(if is_new { &mut complete } else { &mut cut_short }) += 1;

        match victim {
            // From what is there.
            Victim::Monitor => guest = start(if after.is_some() { &file } else { &base }),
            // The next monitor takes over the socket; the cgroup may be in use by others.
            Victim::Companion => {
                assert_eq!(guest.wrong_pages(), 0, "{WRONG_CONTENT}");
                guest.end();
                // The kernel may still be about to empty it.
                if has_cgroups {
                    eventually("the cgroup is removed", 20, || {
                        fs::remove_dir(CGROUP).map_err(|error| error.to_string())
                    });
                }
                guest = start(&base);
            }
            Victim::Client => {}
        }
        assert_eq!(guest.wrong_pages(), 0, "{WRONG_CONTENT}: {}", context());
    }
    println!("    snapshots: {complete} complete, {cut_short} cut short by kills");
    guest.end();
    check_nothing_left(scene, &[]);
    if has_cgroups {
        fs::remove_dir(parent).unwrap();
    }
}

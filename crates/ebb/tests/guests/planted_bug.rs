//! A guest that has taken over a thread of its monitor reaches nothing outside of its machine.
//!
//! The monitor is a build with a planted bug; the attacker runs in the guest
//! ([`hostile_driver::attacker`](crate::hostile_driver::attacker)). Beside it, the host has files
//! of its user, and another machine that shares a read-only disk with it.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ebb_agent::protocol::Command;
use ebb_vmm::seccomp::EXIT_CODE;
use serde::de::DeserializeOwned;

use crate::guest::{Guest, MIB};
use crate::harness::{Scene, Test, World, eventually, when};
use crate::hostile_driver::attacker::{ARGUMENT, FATAL, Found};
use crate::place::PROGRAM_IN_GUEST;
use crate::saved::Restore;
use crate::setup::Setup;

/// The tests.
pub const TESTS: &[Test] = &[
    Test::new("planted_bug::every_way_out_ends_the_monitor", 300, every_way_out_ends_the_monitor),
    Test::new("planted_bug::descriptors_lead_nowhere", 240, descriptors_lead_nowhere),
    Test::new("planted_bug::the_companion_does_no_more", 240, the_companion_does_no_more),
];

const SECRET: &str = "the host's secret";
/// How long an attack may go on that destroys its own machine.
const STREAMS_LIMIT: Duration = Duration::from_secs(20);
/// Files of one machine.
const OWN_DISK: &str = "own-disk";
const SNAPSHOT: &str = "snapshot";
/// A directory for it alone, below which it may create files.
const ALLOWED: &str = "allowed";

/// The host as it must remain, and the machine with the bug.
struct Stage<'a> {
    scene: &'a Scene,
    world: World,
    other: Guest,
    before: BTreeMap<PathBuf, Vec<u8>>,
}

/// Contents of all files below a directory that are not the attacker's.
fn contents(directory: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut all = BTreeMap::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let kind = fs::symlink_metadata(&path).unwrap().file_type();
        let name = path.file_name().unwrap().to_str().unwrap();
        if kind.is_dir() {
            all.extend(contents(&path));
        } else if kind.is_file() && name != OWN_DISK && !name.starts_with(SNAPSHOT) {
            all.insert(path.clone(), fs::read(&path).unwrap());
        } else if kind.is_symlink() {
            all.insert(path, Vec::new());
        }
    }
    all
}

impl<'a> Stage<'a> {
    fn new(scene: &'a Scene) -> Self {
        let world = World { ebb: scene.world.planted_ebb.clone(), ..scene.world.clone() };
        assert!(
            world.ebb.is_file(),
            "there is no monitor with a planted bug at {}; build it with `make planted-bug`",
            world.ebb.display()
        );
        for (name, mode) in [("secret", 0o600), ("public", 0o666), ("program", 0o777)] {
            fs::write(scene.path(name), SECRET).unwrap();
            fs::set_permissions(scene.path(name), fs::Permissions::from_mode(mode)).unwrap();
        }
        fs::set_permissions(scene.path(""), fs::Permissions::from_mode(0o777)).unwrap();
        for name in ["base", OWN_DISK, "other-disk"] {
            fs::write(scene.path(name), vec![b'.'; MIB as usize]).unwrap();
        }
        let other = Setup::new(scene).socket("other-api").args(["--cpus", "1", "--disk"]);
        let other = other.args([Self::base(scene).as_str(), "--disk"]);
        let other = other.args([format!("path={}", scene.path("other-disk").display())]).start();
        other.run(Command::Hold { bytes: 16 * MIB, pattern: 8 });
        let before = contents(&scene.path(""));
        assert!(before.len() >= 5, "{:?}", before.keys());
        Self { scene, world, other, before }
    }

    fn base(scene: &Scene) -> String {
        format!("path={},readonly=on", scene.path("base").display())
    }

    /// Disks of the machine with the bug.
    fn disks(&self) -> [String; 4] {
        let own = format!("path={}", self.scene.path(OWN_DISK).display());
        ["--disk".to_owned(), own, "--disk".to_owned(), Self::base(self.scene)]
    }

    /// Starts the machine with the bug.
    fn start(&self, options: &[&str]) -> Guest {
        let setup = Setup::new(self.scene)
            .initrd(&self.scene.world.hostile_initrd)
            .words("iomem=relaxed")
            .args(["--rng"])
            .args(self.disks())
            .args(options);
        let mut program = setup.program();
        program = with_program(&program, &self.world.ebb);
        let guest = Guest::spawn(program, self.scene.path("api"), &self.scene.guests());
        guest.wait_ready(1);
        guest
    }

    /// Continues it from its snapshot.
    fn restore(&self) -> Guest {
        let restore = Restore::new(self.scene, &self.scene.path(SNAPSHOT))
            .args(self.disks())
            .args(["--accept-changed-disks"]);
        let program = with_program(&restore.program(), &self.world.ebb);
        let mut guest = Guest::spawn(program, self.scene.path("api"), &self.scene.guests());
        guest.wait_api();
        guest
    }

    /// Everything outside of the machine is as before.
    #[track_caller]
    fn check(&mut self, attack: &str) {
        let after = contents(&self.scene.path(""));
        for (path, content) in &self.before {
            assert!(after.get(path) == Some(content), "{attack}: {} changed", path.display());
        }
        assert_eq!(after.len(), self.before.len(), "{attack}: {:?}", after.keys());
        let mode = fs::metadata(self.scene.path("secret")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{attack}");
        assert!(self.other.is_running(), "{attack}: the other machine has ended");
        assert_eq!(self.other.wrong_pages(), 0, "{attack}");
    }
}

/// The same command line for another program.
fn with_program(command: &std::process::Command, program: &Path) -> std::process::Command {
    let mut other = std::process::Command::new(program);
    other.args(command.get_args());
    other
}

/// Begins an attack in the guest.
fn begin(guest: &Guest, name: &str, words: &[String]) -> u64 {
    let argv = [PROGRAM_IN_GUEST, ARGUMENT, name].map(str::to_owned).to_vec();
    guest.send(Command::Exec { argv: [argv, words.to_vec()].concat() })
}

/// Makes an attack that its machine survives.
#[track_caller]
fn attack<T: DeserializeOwned>(guest: &Guest, name: &str, words: &[String]) -> T {
    let id = begin(guest, name, words);
    let result = guest.outcome(id).unwrap();
    assert_eq!(result["code"], 0, "{name}: {result}");
    serde_json::from_str(result["stdout"].as_str().unwrap_or_default())
        .unwrap_or_else(|error| panic!("{name}: {error}: {result}"))
}

fn paths(scene: &Scene) -> Vec<String> {
    ["secret", "created"].map(|name| scene.path(name).display().to_string()).to_vec()
}

fn every_way_out_ends_the_monitor(scene: &Scene) {
    let mut stage = Stage::new(scene);
    let guest = stage.start(&[]);
    let failed: Vec<i64> = attack(&guest, "missing", &paths(scene));
    let missing = -i64::from(libc::ENOSYS);
    assert_eq!(failed, [missing; 3]);
    guest.save_and_end(&scene.path(SNAPSHOT));
    // Each attack from another thread, in turns.
    for (turn, fatal) in FATAL.iter().enumerate() {
        let mut guest = stage.restore();
        let threads = threads(&guest);
        assert!(threads.len() >= 8, "{threads:?}");
        let (id, name) = &threads[turn % threads.len()];
        begin(&guest, fatal.name, &[paths(scene), vec![id.clone()]].concat());
        let (code, log) = guest.wait_end();
        assert_eq!(code, Some(EXIT_CODE), "{name}: {}: {log}", fatal.name);
        let expected = format!("thread `{name}` refused system call {};", fatal.number);
        assert!(log.contains(&expected), "{expected} {}: {log}", fatal.name);
        drop(guest);
    }
    stage.check("system calls");
}

/// Ids and names of the monitor's threads. A new thread has the program's name until it runs and
/// gives itself its own.
fn threads(guest: &Guest) -> Vec<(String, String)> {
    let main = guest.pid().to_string();
    eventually("all threads have names", 60, || {
        let tasks = fs::read_dir(format!("/proc/{main}/task")).unwrap();
        let mut threads: Vec<_> = tasks
            .map(|task| task.unwrap().path())
            .map(|task| {
                let name = fs::read_to_string(task.join("comm")).unwrap().trim().to_owned();
                (task.file_name().unwrap().to_str().unwrap().to_owned(), name)
            })
            .collect();
        threads.sort();
        let of_program = threads.iter().find(|(id, _)| *id == main).map(|(_, name)| name);
        let nameless = threads.iter().filter(|(_, name)| Some(name) == of_program).count();
        when(nameless == 1, || format!("{threads:?}")).map(|()| threads)
    })
}

/// What each descriptor of a process is.
fn descriptors(guest: &Guest) -> BTreeMap<u64, String> {
    let entries = fs::read_dir(format!("/proc/{}/fd", guest.pid())).unwrap();
    entries
        .map(|entry| entry.unwrap().path())
        .filter_map(|path| {
            let number = path.file_name().unwrap().to_str().unwrap().parse().unwrap();
            // Those of API clients come and go.
            Some((number, fs::read_link(path).ok()?.display().to_string()))
        })
        .collect()
}

/// Uses each descriptor as a file, and checks that none leads out of the machine.
fn check_files(scene: &Scene, guest: &Guest, name: &str, words: &[String]) {
    let names = descriptors(guest);
    let found: BTreeMap<u64, Found> = attack(guest, name, words);
    let own = scene.path(OWN_DISK).display().to_string();
    let mut leads = Vec::new();
    for (fd, found) in &found {
        let name = names.get(fd).map_or("opened since", String::as_str);
        let is_own = name == own || name.starts_with("/memfd:");
        let changes = [found.write, found.grow, found.punch, found.resize];
        if found.text.contains(SECRET)
            || found.shows_frames
            || found.advise >= 0
            || !is_own && changes.iter().any(|result| *result >= 0)
        {
            leads.push(format!("{fd}: {name}: {found:?}"));
        }
    }
    assert_eq!(leads, [] as [&str; 0], "descriptors that lead out of the machine");
    let of_disk = found.iter().find(|(fd, _)| names.get(fd) == Some(&own));
    assert!(of_disk.is_some_and(|(_, found)| found.write == 16), "{found:?}");
}

fn descriptors_lead_nowhere(scene: &Scene) {
    let mut stage = Stage::new(scene);
    let guest = stage.start(&[]);
    guest.save_and_end(&scene.path(SNAPSHOT));
    let mut guest = stage.restore();
    // The thread for migrations may make all calls of a disk's thread, and more.
    let threads = threads(&guest);
    let from = |thread: &str| {
        let (id, _) = threads.iter().find(|(_, name)| name == thread).expect("a thread");
        [paths(scene), vec![id.clone()]].concat()
    };
    check_files(scene, &guest, "files", &from("disk0"));
    check_files(scene, &guest, "files and sizes", &from("migrate"));
    stage.check("descriptors as files");

    let id = begin(&guest, "streams", &paths(scene));
    let started = Instant::now();
    while guest.poll(id).is_none() && guest.is_running() && started.elapsed() < STREAMS_LIMIT {
        std::thread::sleep(Duration::from_millis(50));
    }
    stage.check("descriptors as streams");
}

fn the_companion_does_no_more(scene: &Scene) {
    fs::create_dir(scene.path(ALLOWED)).unwrap();
    symlink(scene.path(""), scene.path(ALLOWED).join("link")).unwrap();
    fs::write(scene.path(ALLOWED).join("notes"), SECRET).unwrap();
    let mut stage = Stage::new(scene);
    let allowed = scene.path(ALLOWED).display().to_string();
    let guest = stage.start(&["--allow-dir", &allowed]);
    let create = |path: String| serde_json::json!({ "create": { "path": path } }).to_string();
    let outside = scene.path("").display().to_string();
    let requests = [
        serde_json::json!({ "remove": { "index": 99 } }).to_string(),
        serde_json::json!({ "allow": { "path": "/" } }).to_string(),
        serde_json::json!({ "keep": { "name": { "Unix": b"secret" } } }).to_string(),
        serde_json::json!({ "begin": { "seccomp": "off" } }).to_string(),
        create("/etc/passwd".to_owned()),
        create(format!("{outside}/created")),
        create(format!("{allowed}/../created")),
        create(format!("{allowed}/link/created")),
        create(format!("{allowed}/link/../../created")),
        create("/proc/1/mem".to_owned()),
        create(format!("{allowed}/notes")),
        r#""publish""#.to_owned(),
        "x".repeat(4096),
    ];
    let answers: Vec<String> = attack(&guest, "companion", &requests);
    let refused = answers.iter().filter(|answer| answer.contains(r#""error":""#)).count();
    // Two have no answer, and the last one ends it.
    assert!(refused >= requests.len() - 3, "{answers:#?}");
    stage.check("the companion");
}

//! Bad input that is found before a guest runs: a message that says what to do, exit code 1, and
//! the files as before.

#![allow(clippy::expect_used)]

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read as _;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{CWD, FileType, FlockOperation, Mode};

/// Turns a monitor that hangs into a failure.
const LIMIT: Duration = Duration::from_secs(60);

/// A directory with an image, a FIFO and a socket. Monitors start in it.
struct Scene(tempfile::TempDir);

impl Scene {
    fn new() -> Self {
        let scene = Self(tempfile::tempdir().expect("a directory"));
        fs::write(scene.path("image"), vec![7; 4096]).expect("an image");
        let mode = Mode::RUSR | Mode::WUSR;
        rustix::fs::mknodat(CWD, scene.path("fifo"), FileType::Fifo, mode, 0).expect("a FIFO");
        UnixListener::bind(scene.path("socket")).expect("a socket");
        scene
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// All files with their content.
    fn files(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        let entries = fs::read_dir(self.0.path()).expect("a directory");
        let paths = entries.map(|entry| entry.expect("an entry").path());
        let content = |path: &Path| {
            if path.is_file() { fs::read(path).expect("a file") } else { Vec::new() }
        };
        paths.map(|path| (path.clone(), content(&path))).collect()
    }

    /// Runs `ebb`, which must refuse, with all of these words.
    #[track_caller]
    fn refused(&self, arguments: &[&str], words: &[&str]) {
        let before = self.files();
        let mut monitor = Command::new(env!("CARGO_BIN_EXE_ebb"))
            .args(arguments)
            .args(["--emulated-kvm", "use", "--api", "api"])
            .current_dir(self.0.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("ebb runs");
        let begin = Instant::now();
        let status = loop {
            if let Some(status) = monitor.try_wait().expect("a child") {
                break status;
            }
            if begin.elapsed() > LIMIT {
                let _ = monitor.kill();
                panic!("{arguments:?} hangs");
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        let mut said = String::new();
        monitor.stderr.take().expect("a pipe").read_to_string(&mut said).expect("a message");
        assert_eq!(status.code(), Some(1), "{arguments:?}: {said}");
        for word in words {
            assert!(said.contains(word), "'{word}' is missing for {arguments:?}: {said}");
        }
        assert!(!said.contains("panicked"), "{said}");
        assert_eq!(self.files(), before, "{arguments:?}");
    }

    /// The same for a machine.
    #[track_caller]
    fn run_refused(&self, arguments: &[&str], words: &[&str]) {
        let machine = ["run", "--kernel", env!("CARGO_BIN_EXE_ebb"), "--serial", "null"];
        self.refused(&[&machine[..], arguments].concat(), words);
    }
}

/// Devices are opened after KVM.
fn has_kvm() -> bool {
    File::options().read(true).write(true).open("/dev/kvm").is_ok()
}

#[test]
fn what_is_no_file_does_not_hang() {
    let scene = Scene::new();
    for (name, words) in [("fifo", "it is a FIFO"), ("socket", "socket"), (".", "directory")] {
        scene.refused(&["run", "--kernel", name, "--serial", "null"], &["the kernel", words]);
        scene.run_refused(&["--initrd", name], &["the initrd", words]);
        if has_kvm() {
            scene.run_refused(&["--disk", &format!("path={name}")], &["the disk", words]);
        }
        scene.refused(&["restore", name, "--serial", "null"], &[name, "snapshot"]);
    }
}

#[test]
fn a_missing_account_is_named() {
    let scene = Scene::new();
    let words = if rustix::process::geteuid().is_root() {
        ["no account \"no-such\"", "omit --user"]
    } else {
        ["--user", "root only"]
    };
    scene.run_refused(&["--user", "no-such"], &words);
    let receive = ["receive", "--listen", "unix:moves", "--serial", "null", "--user", "no-such"];
    scene.refused(&receive, &words);
}

#[test]
fn a_cgroup_must_be_one() {
    let scene = Scene::new();
    let path = |name: &str| format!("path={}", scene.path(name).display());
    let limited = format!("{},memory_max=1G", path("new"));
    scene.run_refused(&["--cgroup", &limited], &["version 2", "findmnt -t cgroup2"]);
    scene.run_refused(&["--cgroup", &path(".")], &["version 2"]);
    scene.run_refused(&["--cgroup", &path("no/parent")], &["No such file", "create its parent"]);
    scene.run_refused(&["--cgroup", &path("image")], &["version 2"]);
}

#[test]
fn an_allowed_directory_must_exist() {
    let scene = Scene::new();
    scene.run_refused(&["--allow-dir", "missing"], &["--allow-dir", "missing", "No such file"]);
    scene.run_refused(&["--allow-dir", "image"], &["--allow-dir", "Not a directory"]);
}

#[test]
fn locks_of_others_are_respected() {
    let scene = Scene::new();
    let lock = |name: &str| {
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false);
        let file = options.open(scene.path(name)).expect("a file");
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).expect("a lock");
        file
    };
    if has_kvm() {
        let _held = lock("image");
        for disk in ["path=image", "path=image,readonly=on"] {
            scene.run_refused(&["--disk", disk], &["image", "in use", "readonly=on"]);
        }
    }
    let _held = lock(".api.lock");
    scene.run_refused(&[], &["its lock", ".api.lock", "another process"]);
}

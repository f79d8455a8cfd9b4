//! Guests in files: saving a guest, and restoring it in another monitor.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::Command as Program;
use std::time::Duration;

use ebb_vmm::api::{Client, SnapshotReport};
use ebb_vmm::snapshot;
use serde_json::Value;

use crate::guest::Guest;
use crate::harness::Scene;

/// Time limit for writing a snapshot in an emulated host.
pub const SAVE_LIMIT: Duration = Duration::from_secs(120);

impl Guest {
    /// Writes a snapshot; the guest then runs or is paused as before.
    #[track_caller]
    pub fn save(&self, path: &Path) -> SnapshotReport {
        self.try_save(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    }

    /// Writes a snapshot, or returns the error.
    pub fn try_save(&self, path: &Path) -> Result<SnapshotReport, String> {
        let client = Client::new(self.socket(), SAVE_LIMIT);
        snapshot::take(&client, path).map_err(|error| error.to_string())
    }

    /// Pauses the guest, writes a snapshot and ends the monitor, so that the guest can only
    /// continue from the file.
    #[track_caller]
    pub fn save_and_end(self, path: &Path) -> SnapshotReport {
        self.put("/vm/pause");
        let report = self.save(path);
        self.end();
        report
    }

    /// Ends the monitor without notice to the guest.
    #[track_caller]
    pub fn end(mut self) {
        self.put("/vm/kill");
        let (code, log) = self.wait_end();
        assert_eq!(code, Some(7), "{log}");
    }
}

/// A restore of a saved guest, as a command line of `ebb restore`.
pub struct Restore<'a> {
    scene: &'a Scene,
    file: PathBuf,
    socket: PathBuf,
    arguments: Vec<OsString>,
}

/// Options for the kernel and initramfs from which a restored guest reboots.
pub fn boot_files(scene: &Scene) -> Vec<OsString> {
    let world = &scene.world;
    vec![
        "--kernel".into(),
        world.vmlinux.clone().into(),
        "--initrd".into(),
        world.initrd.clone().into(),
    ]
}

impl<'a> Restore<'a> {
    /// Restores the guest in `file`.
    pub fn new(scene: &'a Scene, file: &Path) -> Self {
        Self { arguments: boot_files(scene), ..Self::without_names(scene, file) }
    }

    /// The same without options for files.
    pub fn without_names(scene: &'a Scene, file: &Path) -> Self {
        Self { scene, file: file.to_owned(), socket: scene.path("api"), arguments: Vec::new() }
    }

    /// Sets the name of the API socket, for a second guest in a test.
    pub fn socket(mut self, name: &str) -> Self {
        self.socket = self.scene.path(name);
        self
    }

    /// Adds arguments.
    pub fn args<S: AsRef<OsStr>>(mut self, arguments: impl IntoIterator<Item = S>) -> Self {
        self.arguments.extend(arguments.into_iter().map(|argument| argument.as_ref().to_owned()));
        self
    }

    /// Adds an option with its value.
    pub fn arg_os(self, option: &str, value: &Path) -> Self {
        self.args([OsStr::new(option), value.as_os_str()])
    }

    /// The command line.
    pub fn program(&self) -> Program {
        let mut program = Program::new(&self.scene.world.ebb);
        program
            .arg("restore")
            .arg(&self.file)
            .args(["--serial", "stdio", "--api"])
            .arg(&self.socket);
        program.args(&self.arguments);
        program
    }

    /// Starts the monitor without waiting.
    pub fn spawn(self) -> Guest {
        Guest::spawn(self.program(), self.socket, &self.scene.guests())
    }

    /// Starts the monitor and waits for its API. The guest's agent already runs: it accepts
    /// commands without reporting that it is ready.
    #[track_caller]
    pub fn start(self) -> Guest {
        let mut guest = self.spawn();
        guest.wait_api();
        guest
    }

    /// Exit code and log of a monitor that must refuse the file.
    #[track_caller]
    pub fn refused(self) -> (Option<i32>, String) {
        let socket = self.socket.clone();
        let end = self.spawn().wait_end();
        assert!(!socket.exists(), "the socket is left behind");
        end
    }
}

/// Output of `ebb snapshot --json` for a file.
#[track_caller]
pub fn describe(scene: &Scene, file: &Path) -> Value {
    let mut program = Program::new(&scene.world.ebb);
    let output = program.arg("snapshot").arg(file).args(["--json", "--verify"]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

//! Migration of guests: the receiving monitor, and the command that sends a guest.

use std::ffi::{OsStr, OsString};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command as Program, Output, Stdio};

use serde_json::Value;

use crate::guest::Guest;
use crate::harness::{Scene, eventually, when};
use crate::saved::boot_files;

/// Message of `ebb receive` before the address that it listens on.
const LISTENING: &str = "listening on ";
/// TCP address of the monitors in these tests, without the port.
const LOOPBACK: &str = "tcp:127.0.0.1:";
/// Exit code of a monitor whose guest was migrated away.
pub const MIGRATED: i32 = 8;

/// Transport between two monitors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Route {
    /// A socket in the test's directory.
    Unix,
    /// Any free port of the loopback interface.
    Tcp,
}

/// A receiving monitor, as a command line of `ebb receive`.
pub struct Receive<'a> {
    scene: &'a Scene,
    socket: PathBuf,
    listen: String,
    arguments: Vec<OsString>,
}

impl<'a> Receive<'a> {
    /// Receives over `route`, unencrypted over TCP; `name` is unique in the test.
    pub fn new(scene: &'a Scene, name: &str, route: Route) -> Self {
        let mut receive = Self::without_names(scene, name, route).args(boot_files(scene));
        if route == Route::Tcp {
            receive = receive.args(["--insecure"]);
        }
        receive
    }

    /// The same without options for files and encryption.
    pub fn without_names(scene: &'a Scene, name: &str, route: Route) -> Self {
        let listen = match route {
            Route::Unix => format!("unix:{}", scene.path(&format!("{name}.migration")).display()),
            Route::Tcp => format!("{LOOPBACK}0"),
        };
        Self { scene, socket: scene.path(name), listen, arguments: Vec::new() }
    }

    /// Adds arguments.
    pub fn args<S: AsRef<OsStr>>(mut self, arguments: impl IntoIterator<Item = S>) -> Self {
        self.arguments.extend(arguments.into_iter().map(|argument| argument.as_ref().to_owned()));
        self
    }

    /// Starts the monitor; returns it with the address once it listens.
    #[track_caller]
    pub fn start(self) -> (Guest, String) {
        let mut program = Program::new(&self.scene.world.ebb);
        program.args(["receive", "--listen", &self.listen, "--serial", "stdio", "--api"]);
        program.arg(&self.socket).args(&self.arguments);
        let mut guest = Guest::spawn(program, self.socket, &self.scene.guests());
        let address = eventually("the monitor listens", 30, || {
            assert!(guest.is_running(), "the monitor has ended: {:?}", guest.wait_end());
            let line =
                guest.log().lines().find_map(|line| Some(line.split_once(LISTENING)?.1.to_owned()));
            line.ok_or_else(|| "not yet".to_owned())
        });
        (guest, address)
    }
}

/// A command line of `ebb migrate`.
pub struct Migrate {
    program: Program,
}

impl Migrate {
    /// Sends `guest` to `address`, unencrypted over TCP.
    pub fn new(scene: &Scene, guest: &Guest, address: &str) -> Self {
        let migrate = Self::with_defaults(scene, guest, address);
        if address.starts_with(LOOPBACK) { migrate.args(["--insecure"]) } else { migrate }
    }

    /// The same without options for encryption.
    pub fn with_defaults(scene: &Scene, guest: &Guest, address: &str) -> Self {
        let mut program = Program::new(&scene.world.ebb);
        program.arg("migrate").arg(guest.socket()).args(["--to", address, "--json"]);
        program.stdin(Stdio::null());
        Self { program }
    }

    /// Adds arguments.
    pub fn args<S: AsRef<OsStr>>(mut self, arguments: impl IntoIterator<Item = S>) -> Self {
        self.program.args(arguments);
        self
    }

    /// Runs it to its end; returns exit code, report (`null` if none) and standard error.
    pub fn run(&mut self) -> (Option<i32>, Value, String) {
        let Output { status, stdout, stderr } = self.program.output().expect("ebb runs");
        let report = serde_json::from_slice(&stdout).unwrap_or(Value::Null);
        (status.code(), report, String::from_utf8_lossy(&stderr).into_owned())
    }

    /// Starts it without waiting.
    pub fn spawn(&mut self) -> std::process::Child {
        self.program.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("ebb runs")
    }
}

/// Migrates `guest` to another monitor, with these arguments of `ebb migrate`, and checks that the
/// source's monitor has ended.
#[track_caller]
pub fn move_to<S: AsRef<OsStr>>(
    receive: Receive<'_>,
    mut guest: Guest,
    arguments: impl IntoIterator<Item = S>,
) -> (Guest, Value) {
    let scene = receive.scene;
    let (mut receiver, address) = receive.start();
    let (code, report, said) = Migrate::new(scene, &guest, &address).args(arguments).run();
    assert_eq!(code, Some(0), "{report} {said}");
    assert_eq!(report["status"], "completed", "{report}");
    let (code, log) = guest.wait_end();
    assert_eq!(code, Some(MIGRATED), "{log}");
    assert!(!guest.socket().exists(), "the source's socket is left behind");
    receiver.continue_from(guest);
    (receiver, report)
}

/// A numeric field of a report.
#[track_caller]
pub fn number(report: &Value, name: &str) -> u64 {
    report[name].as_u64().unwrap_or_else(|| panic!("no {name} in {report}"))
}

/// An address of this machine on which no process listens.
pub fn unused_address() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("an address");
    format!("tcp:{address}")
}

/// The address of a socket in the test's directory.
pub fn unix(path: &Path) -> String {
    format!("unix:{}", path.display())
}

/// Waits until a migration has sent memory.
#[track_caller]
pub fn wait_sending(guest: &Guest, least_bytes: u64) -> Value {
    eventually("memory is sent", 60, || {
        let status: Value =
            guest.client().get("/vm/migration").map_err(|error| error.to_string())?;
        let sent = status["bytes_sent"].as_u64().unwrap_or(0);
        // Not the amount that the previous migration has sent.
        when(status["phase"] == "precopy" && sent >= least_bytes, || status.to_string())?;
        Ok(status)
    })
}

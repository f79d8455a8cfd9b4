//! Configuration of a guest, as a command line of `ebb run`.

use std::ffi::{OsStr, OsString};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command as Program;

use crate::guest::Guest;
use crate::harness::{Scene, additional_mib};

/// Kernel arguments for a fast boot (docs/boot.md), and for an end instead of a hang after a crash.
pub const CMDLINE: &str = "console=ttyS0 quiet loglevel=1 panic=-1 mitigations=off nokaslr \
                           cryptomgr.notests 8250.nr_uarts=1";

/// Clock source of the guest's kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Clocksource {
    /// KVM's paravirtual clock.
    KvmClock,
    /// The time stamp counter alone.
    Tsc,
}

impl Clocksource {
    /// Its name in Linux.
    pub fn name(self) -> &'static str {
        match self {
            Self::KvmClock => "kvm-clock",
            Self::Tsc => "tsc",
        }
    }
}

/// Configuration of a guest; the defaults are one vCPU, 512 MiB and an ELF kernel.
pub struct Setup<'a> {
    scene: &'a Scene,
    kernel: PathBuf,
    initrd: PathBuf,
    words: String,
    clocksource: Option<Clocksource>,
    memory: String,
    balloon: String,
    serial: String,
    arguments: Vec<OsString>,
    socket: PathBuf,
}

impl<'a> Setup<'a> {
    /// The defaults.
    pub fn new(scene: &'a Scene) -> Self {
        let world = &scene.world;
        Self {
            scene,
            kernel: world.vmlinux.clone(),
            initrd: world.initrd.clone(),
            words: String::new(),
            clocksource: None,
            memory: "size=512M".to_owned(),
            balloon: "reporting=off".to_owned(),
            serial: "stdio".to_owned(),
            arguments: Vec::new(),
            socket: scene.path("api"),
        }
    }

    /// Sets the kernel.
    pub fn kernel(mut self, path: &Path) -> Self {
        path.clone_into(&mut self.kernel);
        self
    }

    /// Sets the initramfs.
    pub fn initrd(mut self, path: &Path) -> Self {
        path.clone_into(&mut self.initrd);
        self
    }

    /// Adds kernel arguments.
    pub fn words(mut self, words: &str) -> Self {
        let _ = write!(self.words, " {words}");
        self
    }

    /// Sets the clock source instead of Linux's choice.
    pub fn clocksource(mut self, clocksource: Clocksource) -> Self {
        self.clocksource = Some(clocksource);
        self
    }

    /// Sets the value of `--memory`.
    pub fn memory(mut self, text: &str) -> Self {
        text.clone_into(&mut self.memory);
        self
    }

    /// Sets the value of `--balloon`.
    pub fn balloon(mut self, text: &str) -> Self {
        text.clone_into(&mut self.balloon);
        self
    }

    /// Sets the value of `--serial`.
    pub fn serial(mut self, text: &str) -> Self {
        text.clone_into(&mut self.serial);
        self
    }

    /// Adds arguments.
    pub fn args<S: AsRef<OsStr>>(mut self, arguments: impl IntoIterator<Item = S>) -> Self {
        self.arguments.extend(arguments.into_iter().map(|argument| argument.as_ref().to_owned()));
        self
    }

    /// Adds an option with its value.
    pub fn arg_os(self, option: &str, value: &OsStr) -> Self {
        self.args([OsStr::new(option), value])
    }

    /// Sets the name of the API socket, for a second guest in a test.
    pub fn socket(mut self, name: &str) -> Self {
        self.socket = self.scene.path(name);
        self
    }

    /// The command line.
    pub fn program(&self) -> Program {
        let mut program = Program::new(&self.scene.world.ebb);
        // Linux trusts the time stamp counter of a virtual machine only with an argument.
        let clock = match self.clocksource {
            None => "tsc=reliable",
            Some(Clocksource::KvmClock) => "clocksource=kvm-clock",
            Some(Clocksource::Tsc) => "clocksource=tsc tsc=reliable",
        };
        let cmdline = format!("{CMDLINE} {clock}{}", self.words);
        program.arg("run").arg("--kernel").arg(&self.kernel).arg("--initrd").arg(&self.initrd);
        let memory = with_more(&self.memory, additional_mib());
        program.args(["--cmdline", &cmdline, "--memory", &memory, "--balloon", &self.balloon]);
        program.args(["--serial", &self.serial, "--api"]).arg(&self.socket).args(&self.arguments);
        program
    }

    /// Starts the monitor without waiting.
    pub fn spawn(self) -> Guest {
        Guest::spawn(self.program(), self.socket, &self.scene.guests())
    }

    /// Starts the monitor and waits for the agent.
    #[track_caller]
    pub fn start(self) -> Guest {
        let guest = self.spawn();
        guest.wait_ready(1);
        guest
    }

    /// Starts the monitor and waits for its API, not for the guest.
    #[track_caller]
    pub fn start_api(self) -> Guest {
        let mut guest = self.spawn();
        guest.wait_api();
        guest
    }
}

/// The value of `--memory` with more memory, if its size is in MiB.
fn with_more(memory: &str, more_mib: u64) -> String {
    let size = memory.strip_prefix("size=").and_then(|rest| rest.split_once('M'));
    match size.and_then(|(number, rest)| Some((number.parse::<u64>().ok()?, rest))) {
        Some((mib, rest)) if more_mib > 0 => format!("size={}M{rest}", mib + more_mib),
        _ => memory.to_owned(),
    }
}

//! What process 1 does before it takes commands: mounts, console, modules.

use std::ffi::{CStr, CString};
use std::fs::{self, File};
use std::io;
use std::path::Path;

use ebb_agent::command_line::{BalloonDriver, CommandLine};
use rustix::mount::{MountFlags, mount};

/// One module a line: path, then parameters.
const MODULES_LIST: &str = "/modules.list";
/// In this order: one may lie in another.
const MOUNTS: [(&CStr, &CStr); 5] = [
    (c"/proc", c"proc"),
    (c"/sys", c"sysfs"),
    (c"/sys/kernel/debug", c"debugfs"),
    (c"/dev", c"devtmpfs"),
    (c"/tmp", c"tmpfs"),
];

/// What the guest was made of.
pub struct Prepared {
    /// The balloon driver that was loaded.
    pub balloon_driver: BalloonDriver,
    /// What went wrong and was left out.
    pub warnings: Vec<String>,
}

/// Makes the guest usable; what fails is reported and left out.
pub fn prepare() -> Prepared {
    let mut warnings = Vec::new();
    for (target, kind) in MOUNTS {
        if let Err(error) = mount(kind, target, kind, MountFlags::empty(), None::<&CStr>) {
            warnings.push(format!("cannot mount {}: {error}", kind.to_string_lossy()));
        }
    }
    let text = fs::read_to_string("/proc/cmdline").unwrap_or_else(|error| {
        warnings.push(format!("cannot read /proc/cmdline: {error}"));
        String::new()
    });
    let command_line = CommandLine::new(&text);
    let mut driver = command_line.balloon_driver().unwrap_or_else(|error| {
        warnings.push(error);
        BalloonDriver::VirtioBalloon
    });
    match fs::read_to_string(MODULES_LIST) {
        Ok(list) => {
            for line in list.lines().map(str::trim).filter(|line| !line.is_empty()) {
                let (path, parameters) = line.split_once(' ').unwrap_or((line, ""));
                let stock = BalloonDriver::VirtioBalloon;
                if module_name(path) != stock.name() {
                    load(path, parameters, command_line, &mut warnings);
                } else if driver == stock && !load(path, parameters, command_line, &mut warnings) {
                    driver = BalloonDriver::None;
                }
            }
        }
        Err(error) => warnings.push(format!("cannot read {MODULES_LIST}: {error}")),
    }
    // Last: it needs the transport, and nothing needs it.
    if driver == BalloonDriver::EbbBalloon
        && !load(&ebb_balloon_path(), "", command_line, &mut warnings)
    {
        driver = BalloonDriver::None;
    }
    Prepared { balloon_driver: driver, warnings }
}

/// The place of modules that do not come with the kernel, as in Debian.
fn ebb_balloon_path() -> String {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    format!("/lib/modules/{release}/extra/{}.ko", BalloonDriver::EbbBalloon.name())
}

/// A module's name, from its file's.
fn module_name(path: &str) -> String {
    Path::new(path).file_stem().unwrap_or_default().to_string_lossy().replace('-', "_")
}

/// Loads a module with the parameters that the command line has for it as well; says whether it is
/// loaded.
fn load(
    path: &str,
    parameters: &str,
    command_line: CommandLine<'_>,
    warnings: &mut Vec<String>,
) -> bool {
    let more = command_line.parameters_of(&module_name(path));
    let loaded = load_module(path, format!("{parameters} {more}").trim());
    if let Err(error) = &loaded {
        warnings.push(format!("cannot load {path}: {error}"));
    }
    loaded.is_ok()
}

/// Loads a module; one that is already loaded is no error.
pub fn load_module(path: &str, parameters: &str) -> io::Result<()> {
    let file = File::open(path)?;
    match rustix::system::finit_module(file, &CString::new(parameters)?, 0) {
        Ok(()) | Err(rustix::io::Errno::EXIST) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// Unloads a module that nothing uses.
pub fn unload_module(name: &str) -> io::Result<()> {
    // O_NONBLOCK: fail when the module is in use rather than wait (delete_module(2)).
    Ok(rustix::system::delete_module(&CString::new(name)?, libc::O_NONBLOCK)?)
}

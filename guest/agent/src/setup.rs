//! Set-up by process 1 before it accepts commands: mounts, console, modules.

use std::ffi::{CStr, CString};
use std::fs::{self, File};
use std::io;
use std::path::Path;

use ebb_agent::command_line::{BalloonDriver, CommandLine, TRACKERS_MODULE};
use rustix::mount::{MountFlags, mount};

/// List of modules, one per line: path, then parameters.
const MODULES_LIST: &str = "/modules.list";
/// Mount points and file systems, in mount order, since they may be nested.
const MOUNTS: [(&CStr, &CStr); 5] = [
    (c"/proc", c"proc"),
    (c"/sys", c"sysfs"),
    (c"/sys/kernel/debug", c"debugfs"),
    (c"/dev", c"devtmpfs"),
    (c"/tmp", c"tmpfs"),
];

/// Result of the set-up.
#[derive(Default)]
pub struct Prepared {
    /// The balloon driver that was loaded.
    pub balloon_driver: BalloonDriver,
    /// Failed steps, which were skipped.
    pub warnings: Vec<String>,
    /// The device of the root file system to continue on.
    pub root: Option<String>,
}

/// Sets up the guest; failed steps are reported and skipped.
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
    // Last, because it needs the transport and no other module needs it.
    if driver == BalloonDriver::EbbBalloon {
        if !load(&extra_module(driver.name()), "", command_line, &mut warnings) {
            driver = BalloonDriver::None;
        } else if command_line.trackers() {
            load(&extra_module(TRACKERS_MODULE), "", command_line, &mut warnings);
        }
    }
    let root = command_line.root().map(str::to_owned);
    Prepared { balloon_driver: driver, warnings, root }
}

/// Path of a module in Debian's directory for modules that are not part of the kernel.
fn extra_module(name: &str) -> String {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    format!("/lib/modules/{release}/extra/{name}.ko")
}

/// A module's name from its file name.
fn module_name(path: &str) -> String {
    Path::new(path).file_stem().unwrap_or_default().to_string_lossy().replace('-', "_")
}

/// Loads a module with these parameters and those of the command line; returns whether it is
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

/// Loads a module unless it is already loaded.
pub fn load_module(path: &str, parameters: &str) -> io::Result<()> {
    let file = File::open(path)?;
    match rustix::system::finit_module(file, &CString::new(parameters)?, 0) {
        Ok(()) | Err(rustix::io::Errno::EXIST) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// Unloads an unused module.
pub fn unload_module(name: &str) -> io::Result<()> {
    // O_NONBLOCK: fail when the module is in use rather than wait (delete_module(2)).
    Ok(rustix::system::delete_module(&CString::new(name)?, libc::O_NONBLOCK)?)
}

//! What process 1 does before it takes commands: mounts, console, modules.

use std::ffi::{CStr, CString};
use std::fs::{self, File};
use std::io;

use rustix::mount::{MountFlags, mount};

/// One module a line: path, then parameters.
const MODULES_LIST: &str = "/modules.list";
const MOUNTS: [(&CStr, &CStr); 4] =
    [(c"/proc", c"proc"), (c"/sys", c"sysfs"), (c"/dev", c"devtmpfs"), (c"/tmp", c"tmpfs")];

/// Makes the guest usable; what fails is reported and left out.
pub fn prepare() -> Vec<String> {
    let mut warnings = Vec::new();
    for (target, kind) in MOUNTS {
        if let Err(error) = mount(kind, target, kind, MountFlags::empty(), None::<&CStr>) {
            warnings.push(format!("cannot mount {}: {error}", kind.to_string_lossy()));
        }
    }
    match fs::read_to_string(MODULES_LIST) {
        Ok(list) => {
            for line in list.lines().map(str::trim).filter(|line| !line.is_empty()) {
                let (path, parameters) = line.split_once(' ').unwrap_or((line, ""));
                if let Err(error) = load_module(path, parameters) {
                    warnings.push(format!("cannot load {path}: {error}"));
                }
            }
        }
        Err(error) => warnings.push(format!("cannot read {MODULES_LIST}: {error}")),
    }
    warnings
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

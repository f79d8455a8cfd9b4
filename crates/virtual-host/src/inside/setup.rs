//! Sets up mounts, modules, swap and memory management.

use std::ffi::{CStr, CString};
use std::fs::{self, File};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::mount::{MountFlags, mount, mount_bind, mount_move};

use crate::contents::{SETTINGS_PATH, Settings};

/// Source, mount point, file system and options, in mount order.
const MOUNTS: [(&str, &str, &str, Option<&CStr>); 9] = [
    ("proc", "/proc", "proc", None),
    ("sysfs", "/sys", "sysfs", None),
    ("devtmpfs", "/dev", "devtmpfs", None),
    ("devpts", "/dev/pts", "devpts", Some(c"mode=620,ptmxmode=666")),
    ("tmpfs", "/dev/shm", "tmpfs", Some(c"mode=1777")),
    ("tmpfs", "/run", "tmpfs", Some(c"mode=755")),
    ("tmpfs", "/tmp", "tmpfs", Some(c"mode=1777")),
    ("cgroup2", "/sys/fs/cgroup", "cgroup2", None),
    ("hugetlbfs", "/dev/hugepages", "hugetlbfs", None),
];

/// Where the root file system of a disk is mounted.
const NEW_ROOT: &str = "/newroot";
/// Where the root in memory is visible in it.
const OLD_ROOT: &str = "/initramfs";
/// Time limit for a disk to appear after its module was loaded.
const DISK_LIMIT: Duration = Duration::from_secs(10);

/// Sets up the machine; failed steps are skipped and returned as warnings.
pub fn prepare() -> Vec<String> {
    let mut warnings = Vec::new();
    for (source, target, kind, options) in MOUNTS {
        // Directories below /proc and /sys exist or cannot be created.
        let _ = fs::create_dir_all(target);
        if let Err(error) = mount(source, target, kind, MountFlags::empty(), options) {
            warnings.push(format!("cannot mount {target}: {error}"));
        }
    }
    for (link, target) in [
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
    ] {
        let _ = std::os::unix::fs::symlink(target, Path::new("/dev").join(link));
    }
    match read_settings() {
        Ok(settings) => {
            apply(&settings, &mut warnings);
            if let Some(device) = &settings.root
                && let Err(error) = change_root(device)
            {
                warnings.push(format!("cannot use the root file system of {device}: {error}"));
            }
        }
        Err(error) => warnings.push(error),
    }
    warnings
}

fn read_settings() -> Result<Settings, String> {
    let text =
        fs::read(SETTINGS_PATH).map_err(|error| format!("cannot read {SETTINGS_PATH}: {error}"))?;
    serde_json::from_slice(&text).map_err(|error| format!("{SETTINGS_PATH}: {error}"))
}

fn apply(settings: &Settings, warnings: &mut Vec<String>) {
    for module in &settings.modules {
        if let Err(error) = load_module(module) {
            warnings.push(format!("cannot load {module}: {error}"));
        }
    }
    let mut write = |path: &str, value: &str| {
        if let Err(error) = fs::write(path, value) {
            warnings.push(format!("cannot write {value} to {path}: {error}"));
        }
    };
    write("/proc/sys/kernel/hostname", "ebb-virtual-host");
    write("/sys/kernel/mm/transparent_hugepage/enabled", &settings.transparent_huge_pages);
    if settings.huge_pages > 0 {
        write("/proc/sys/vm/nr_hugepages", &settings.huge_pages.to_string());
    }
    if let Some(device) = &settings.swap
        && let Err(error) = swap_on(device)
    {
        warnings.push(format!("cannot swap on {device}: {error}"));
    }
}

/// Makes the file system of `device` the root, with the mounts of the one in memory, which stays
/// visible in [`OLD_ROOT`]. A program may then change its own root (pivot_root(2)), which the root
/// in memory does not allow.
fn change_root(device: &str) -> std::io::Result<()> {
    fs::create_dir_all(NEW_ROOT)?;
    wait_for(device)?;
    mount(device, NEW_ROOT, "ext4", MountFlags::NOATIME, None)?;
    let inside = |path: &str| format!("{NEW_ROOT}{path}");
    fs::create_dir_all(inside(OLD_ROOT))?;
    mount_bind("/", inside(OLD_ROOT))?;
    for target in ["/proc", "/sys", "/dev", "/run", "/tmp"] {
        mount_move(target, inside(target))?;
    }
    rustix::process::chdir(NEW_ROOT)?;
    mount_move(".", "/")?;
    rustix::process::chroot(".")?;
    rustix::process::chdir("/")?;
    Ok(())
}

/// Waits until a disk's device exists.
fn wait_for(device: &str) -> std::io::Result<()> {
    let deadline = Instant::now() + DISK_LIMIT;
    while !Path::new(device).exists() {
        if Instant::now() > deadline {
            return Err(std::io::ErrorKind::NotFound.into());
        }
        thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

/// Loads a module: its path, then its parameters, if any.
fn load_module(module: &str) -> std::io::Result<()> {
    let (path, parameters) = module.split_once(' ').unwrap_or((module, ""));
    let (file, parameters) = (File::open(path)?, CString::new(parameters)?);
    match rustix::system::finit_module(file, &parameters, 0) {
        Ok(()) | Err(rustix::io::Errno::EXIST) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

fn swap_on(device: &str) -> std::io::Result<()> {
    let path = CString::new(device)?;
    // SAFETY: `path` is a NUL-terminated string that lives until the call returns.
    match unsafe { libc::swapon(path.as_ptr(), 0) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

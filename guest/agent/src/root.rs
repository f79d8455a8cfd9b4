//! Continuing on a root file system on a disk: its own init becomes process 1, and this program a
//! service of it on the serial console.
//!
//! The steps are those of switch_root(8). The agent's program and unit are written to the disk: a
//! copy in memory could not be evicted, and the guest's memory is what experiments measure.

use std::convert::Infallible;
use std::ffi::CStr;
use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use ebb_agent::command_line::BalloonDriver;
use rustix::mount::{MountFlags, UnmountFlags, mount, mount_move, unmount};
use rustix::process::{chdir, chroot};

/// Where the root is mounted before it is entered.
const ROOT: &str = "/newroot";
/// The agent's program in the initramfs.
const SOURCE: &str = "/init";
/// The same on the disk.
const PROGRAM: &str = "/usr/local/sbin/ebb-agent";
/// Its unit, and the link that starts it with the system.
const UNIT: &str = "/etc/systemd/system/ebb-agent.service";
const WANTS: &str = "/etc/systemd/system/multi-user.target.wants";
/// The init of the root.
const INIT: &str = "/sbin/init";
/// File systems that move to the new root, and one that is given up.
const MOVED: [&str; 3] = ["/proc", "/sys", "/dev"];
const GIVEN_UP: &str = "/tmp";

/// Mounts the ext4 file system of `device`, and executes its init; returns only if that fails.
///
/// # Errors
/// Those of the system calls. Process 1 cannot go on then.
pub fn enter(device: &str, driver: BalloonDriver) -> io::Result<Infallible> {
    fs::create_dir(ROOT)?;
    mount(device, ROOT, "ext4", MountFlags::empty(), None::<&CStr>)?;
    add_service(Path::new(ROOT), Path::new(SOURCE), driver)?;
    for target in MOVED {
        mount_move(target, format!("{ROOT}{target}"))?;
    }
    unmount(GIVEN_UP, UnmountFlags::empty())?;
    // The initramfs is memory that would never be free again.
    empty(Path::new("/"), fs::metadata("/")?.dev())?;
    chdir(ROOT)?;
    mount_move(".", "/")?;
    chroot(".")?;
    chdir("/")?;
    Err(Command::new(INIT).exec())
}

/// Adds the agent, of which `source` is the program, to the system below `root`: on the terminal of
/// the kernel's console, after the boot, and never chosen by the out-of-memory killer.
fn add_service(root: &Path, source: &Path, driver: BalloonDriver) -> io::Result<()> {
    let at = |path: &str| root.join(path.trim_start_matches('/'));
    let unit = format!(
        "[Service]\nType=idle\nExecStart={PROGRAM} {}\nTTYPath=/dev/ttyS0\n\
         StandardInput=tty-force\nStandardOutput=tty\nStandardError=journal\n\
         OOMScoreAdjust=-1000\n",
        driver.name()
    );
    fs::create_dir_all(at(PROGRAM).parent().unwrap_or(root))?;
    fs::copy(source, at(PROGRAM))?;
    fs::write(at(UNIT), unit)?;
    fs::create_dir_all(at(WANTS))?;
    let link = at(WANTS).join("ebb-agent.service");
    match symlink(UNIT, link) {
        // A disk that was used before.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        other => other,
    }
}

/// Removes what a directory contains, as far as it is on the file system `device`.
fn empty(directory: &Path, device: u64) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        let metadata = fs::symlink_metadata(&path)?;
        if metadata.dev() != device {
            continue;
        }
        if metadata.is_dir() {
            empty(&path, device)?;
            // A mount point cannot be removed, nor its parents; both are small.
            let _ = fs::remove_dir(&path);
        } else {
            fs::remove_file(&path)?;
        }
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_agent_is_a_service_that_knows_the_driver() {
        let directory = tempfile::tempdir().unwrap();
        let (root, source) = (directory.path().join("root"), directory.path().join("init"));
        fs::write(&source, "program").unwrap();
        fs::create_dir_all(root.join("etc/systemd/system")).unwrap();
        for driver in [BalloonDriver::VirtioBalloon, BalloonDriver::EbbBalloon] {
            add_service(&root, &source, driver).unwrap();
        }
        let program = root.join(PROGRAM.trim_start_matches('/'));
        assert_eq!(fs::read_to_string(program).unwrap(), "program");
        let unit = fs::read_to_string(root.join(UNIT.trim_start_matches('/'))).unwrap();
        assert!(unit.contains(&format!("ExecStart={PROGRAM} ebb_balloon\n")), "{unit}");
        let link = root.join(WANTS.trim_start_matches('/')).join("ebb-agent.service");
        assert_eq!(fs::read_link(link).unwrap(), Path::new(UNIT));
    }

    #[test]
    fn what_is_on_the_device_is_removed_and_links_are_not_followed() {
        let directory = tempfile::tempdir().unwrap();
        let (tree, other) = (directory.path().join("tree"), directory.path().join("other"));
        fs::create_dir_all(tree.join("a/b")).unwrap();
        fs::create_dir(&other).unwrap();
        fs::write(tree.join("a/b/file"), "text").unwrap();
        fs::write(other.join("kept"), "text").unwrap();
        symlink(&other, tree.join("link")).unwrap();
        let device = fs::metadata(&tree).unwrap().dev();
        empty(&tree, device + 1).unwrap();
        assert!(tree.join("a/b/file").exists(), "it is on another device");
        empty(&tree, device).unwrap();
        assert_eq!(fs::read_dir(&tree).unwrap().count(), 0);
        assert!(other.join("kept").exists());
    }
}

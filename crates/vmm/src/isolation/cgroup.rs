//! Placement in a cgroup (Linux Documentation/admin-guide/cgroup-v2.rst).

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::IsolationError;
use crate::size::ByteSize;

/// Where version 2 is mounted.
const MOUNT: &str = "/sys/fs/cgroup";

/// A cgroup, and its limits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CgroupConfig {
    /// Its folder: below /sys/fs/cgroup if it is relative.
    pub path: PathBuf,
    /// `memory.high`: above it, the machine is slowed down and its memory reclaimed.
    pub memory_high: Option<ByteSize>,
    /// `memory.max`.
    pub memory_max: Option<ByteSize>,
    /// `cpu.weight`: 1 to 10000; 100 is that of others.
    pub cpu_weight: Option<u32>,
    /// `pids.max`: most threads.
    pub pids_max: Option<u32>,
}

/// A cgroup that did not exist before.
#[derive(Debug)]
pub(super) struct NewCgroup {
    /// Its parent, opened with `O_PATH`.
    pub parent: OwnedFd,
    /// Its name there.
    pub name: OsString,
}

impl NewCgroup {
    /// The cgroup in `folder`. `None` if it cannot be removed without capabilities: the root cgroup
    /// has mode 0555.
    fn of(folder: &Path) -> Result<Option<Self>, Errno> {
        let (Some(parent), Some(name)) = (folder.parent(), folder.file_name()) else {
            return Ok(None);
        };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let parent = rustix::fs::open(parent, flags, Mode::empty())?;
        let mode = Mode::from_raw_mode(rustix::fs::fstat(&parent)?.st_mode);
        Ok(mode.contains(Mode::WUSR).then(|| Self { parent, name: name.to_owned() }))
    }
}

impl CgroupConfig {
    /// Creates the cgroup unless it exists, sets its limits and moves the process there. A cgroup
    /// that was created is passed to `keep`, to be removed at the end, and removed again if a step
    /// fails.
    pub(super) fn enter(
        &self,
        keep: impl FnOnce(NewCgroup) -> Result<(), IsolationError>,
    ) -> Result<(), IsolationError> {
        // 0 stands for the process that writes.
        self.with_processes(keep, |mut processes| processes.write_all(b"0"))
    }

    /// As [`enter`](Self::enter), for another process, which writes 0 to the file.
    pub(super) fn open(
        &self,
        keep: impl FnOnce(NewCgroup) -> Result<(), IsolationError>,
    ) -> Result<OwnedFd, IsolationError> {
        self.with_processes(keep, |processes| Ok(processes.into()))
    }

    fn with_processes<T>(
        &self,
        keep: impl FnOnce(NewCgroup) -> Result<(), IsolationError>,
        work: impl FnOnce(File) -> io::Result<T>,
    ) -> Result<T, IsolationError> {
        let folder = Path::new(MOUNT).join(&self.path);
        let failed = |action: String, source: io::Error, remedy| IsolationError::Cgroup {
            path: folder.display().to_string(),
            action,
            source,
            remedy,
        };
        // Elsewhere, the files of a cgroup would be ordinary ones.
        let place = if folder.is_dir() { Some(folder.as_path()) } else { folder.parent() };
        let is_cgroup = place.map_or(Ok(false), is_version_2).map_err(|errno| {
            let remedy = "create its parent, or choose another one below /sys/fs/cgroup";
            failed("create it".to_owned(), errno.into(), remedy)
        })?;
        if !is_cgroup {
            let source = io::Error::new(io::ErrorKind::Unsupported, "it is not on a cgroup2 mount");
            let remedy = "choose one below a mount of cgroup version 2 (findmnt -t cgroup2)";
            return Err(failed("use it".to_owned(), source, remedy));
        }
        let created = match fs::create_dir(&folder) {
            Ok(()) => true,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => false,
            Err(error) => {
                let remedy = "create it, or choose one below a cgroup that this user owns";
                return Err(failed("create it".to_owned(), error, remedy));
            }
        };
        let kept = if created {
            NewCgroup::of(&folder)
                .map_err(|errno| failed("open it".to_owned(), errno.into(), "choose another one"))
                .and_then(|new| new.map_or(Ok(()), keep))
        } else {
            Ok(())
        };
        kept.and_then(|()| self.set_up(&folder, work, failed)).inspect_err(|_| {
            if created && let Err(error) = fs::remove_dir(&folder) {
                tracing::warn!("cannot remove the cgroup {}: {error}", folder.display());
            }
        })
    }

    /// Sets the limits and moves a process.
    fn set_up<T>(
        &self,
        folder: &Path,
        work: impl FnOnce(File) -> io::Result<T>,
        failed: impl Fn(String, io::Error, &'static str) -> IsolationError,
    ) -> Result<T, IsolationError> {
        let limits = [
            ("memory.high", self.memory_high.map(|size| size.bytes().to_string())),
            ("memory.max", self.memory_max.map(|size| size.bytes().to_string())),
            ("cpu.weight", self.cpu_weight.map(|weight| weight.to_string())),
            ("pids.max", self.pids_max.map(|count| count.to_string())),
        ];
        for (file, value) in limits {
            let Some(value) = value else { continue };
            fs::write(folder.join(file), &value).map_err(|source| {
                let remedy = "enable the controller in cgroup.subtree_control of its parent";
                failed(format!("write {value} to {file}"), source, remedy)
            })?;
        }
        let processes = File::options().write(true).open(folder.join("cgroup.procs"));
        processes.and_then(work).map_err(|source| {
            let remedy = "give this user the right to write cgroup.procs there and in the common \
                          parent, and choose a cgroup without children";
            failed("move to it".to_owned(), source, remedy)
        })
    }
}

/// Whether `folder` is on a mount of version 2.
fn is_version_2(folder: &Path) -> Result<bool, Errno> {
    Ok(rustix::fs::statfs(folder)?.f_type == libc::CGROUP2_SUPER_MAGIC)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Otherwise files named like a cgroup's would be created there, and the limits be void.
    #[test]
    fn other_file_systems_are_refused_and_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        let config = |path: PathBuf| CgroupConfig {
            path,
            memory_high: None,
            memory_max: Some(ByteSize::from_bytes(1 << 30)),
            cpu_weight: None,
            pids_max: None,
        };
        for path in [directory.path().join("new"), directory.path().to_owned()] {
            let error = config(path).enter(|_| Ok(())).unwrap_err().to_string();
            assert!(error.contains("cgroup2") && error.contains("version 2"), "{error}");
        }
        let error =
            config(directory.path().join("no/parent")).enter(|_| Ok(())).unwrap_err().to_string();
        assert!(error.contains("No such file") && error.contains("create its parent"), "{error}");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    }
}

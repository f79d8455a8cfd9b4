//! Placement in a cgroup (Linux Documentation/admin-guide/cgroup-v2.rst).

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

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

impl CgroupConfig {
    /// Creates the cgroup unless it exists, sets its limits and moves the process there.
    pub(super) fn enter(&self) -> Result<(), IsolationError> {
        let folder = Path::new(MOUNT).join(&self.path);
        let failed = |action: String, source: io::Error, remedy| IsolationError::Cgroup {
            path: folder.display().to_string(),
            action,
            source,
            remedy,
        };
        match fs::create_dir(&folder) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                let remedy = "create it, or choose one below a cgroup that this user owns";
                return Err(failed("create it".to_owned(), error, remedy));
            }
            _ => {}
        }
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
        // 0 stands for the process that writes.
        fs::write(folder.join("cgroup.procs"), "0").map_err(|source| {
            let remedy = "give this user the right to write cgroup.procs there and in the common \
                          parent, and choose a cgroup without children";
            failed("move to it".to_owned(), source, remedy)
        })
    }
}

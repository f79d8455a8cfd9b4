//! The KSM of the machine that runs the tests.

use std::fs::File;
use std::path::Path;

use rustix::fs::{FlockOperation, flock};

use crate::kernel::{Counter, Ksm, KsmGuard, SYSFS, Values};

/// The machine's KSM for one test at a time; its settings are restored in any case. All tests that
/// change them lock the same file.
#[derive(Debug)]
pub struct MachineKsm {
    guard: KsmGuard,
    _lock: File,
}

impl MachineKsm {
    /// `None`, with a message, where KSM is unavailable, or without root.
    pub fn take() -> Option<Self> {
        match Self::lock() {
            Ok(taken) => Some(taken),
            Err(problem) => {
                eprintln!("not tested: {problem}");
                None
            }
        }
    }

    fn lock() -> Result<Self, String> {
        if !rustix::process::geteuid().is_root() {
            return Err("only root may change KSM's settings".to_owned());
        }
        let ksm = Ksm::open(Path::new(SYSFS)).map_err(|error| error.to_string())?;
        let lock = File::open(Path::new(SYSFS).join("run")).map_err(|error| error.to_string())?;
        flock(&lock, FlockOperation::LockExclusive).map_err(|error| error.to_string())?;
        let guard = KsmGuard::new(ksm).map_err(|error| error.to_string())?;
        Ok(Self { guard, _lock: lock })
    }

    /// KSM.
    pub fn ksm(&self) -> &Ksm {
        self.guard.ksm()
    }

    /// The settings at the beginning.
    pub fn before(&self) -> &Values {
        self.guard.before()
    }

    /// Number of pages that are shared on the machine.
    pub fn shared(&self) -> u64 {
        self.ksm().counters().map_or(0, |counters| counters.count(Counter::PagesShared))
    }
}

impl Drop for MachineKsm {
    fn drop(&mut self) {
        let result = self.ksm().apply(self.before());
        assert!(
            result.is_ok() || std::thread::panicking(),
            "KSM's settings could not be restored: {result:?}"
        );
    }
}

//! Same-page merging of a machine: by the monitor itself, or by the kernel.
//!
//! A machine runs even if merging is not possible, and reports the reason.

mod kernel;
mod owner;

use std::os::fd::{AsRawFd as _, RawFd};
use std::sync::Arc;

use ebb_guest_ram::GuestRam;

use crate::api::control::ControlError;
use crate::api::merge::{
    MergeBackend, MergeChange, MergeInfo, MergeRun, MergeSettings, MergeState, MergeStatistics,
};
use crate::config::MergeConfig;
use crate::exit::ExitSignal;
use crate::isolation::ConnectLink;
use crate::seccomp::Filters;

use kernel::KernelMerging;
pub(super) use owner::Given;
use owner::OwnerMerging;

/// State of merging, and the reason if it is limited.
#[derive(Clone, Debug)]
struct Status {
    run: MergeRun,
    state: MergeState,
    reason: Option<String>,
}

impl Default for Status {
    fn default() -> Self {
        Self { run: MergeRun::Merge, state: MergeState::Merging, reason: None }
    }
}

fn failed(error: impl std::fmt::Display) -> ControlError {
    ControlError::failed(error)
}

fn wrong_state(message: impl Into<String>, remedy: &str) -> ControlError {
    ControlError::wrong_state(message, remedy)
}

/// Merging of a machine.
pub(super) struct Merging {
    config: MergeConfig,
    backend: Backend,
}

enum Backend {
    Off,
    /// Configured but not possible, for this reason.
    Unavailable(String),
    Kernel(KernelMerging),
    Owner(OwnerMerging),
}

impl Merging {
    /// Starts merging, if configured; `link` makes further connections with the broker. The machine
    /// is paused, and so is merging until [`resume`](Self::resume).
    pub(super) fn start(
        config: &MergeConfig,
        ram: &Arc<GuestRam>,
        link: Option<ConnectLink>,
        filters: &Filters,
        exit: &Arc<ExitSignal>,
    ) -> Self {
        let started = match config.backend {
            MergeBackend::Off => Ok(Backend::Off),
            MergeBackend::Kernel => KernelMerging::start(config, ram).map(Backend::Kernel),
            MergeBackend::Owner => {
                OwnerMerging::start(config, ram, link, filters, exit).map(Backend::Owner)
            }
        };
        Self::of(config, started)
    }

    /// That of a machine which was forked from the one with `old`, in a process that cannot open
    /// anything. `given` is what the monitor itself needs to merge.
    ///
    /// Pages that the kernel merges are merged in both from now on. The monitor's own merging
    /// begins with the forked machine.
    pub(super) fn in_fork(
        old: &Self,
        config: &MergeConfig,
        given: Option<Given>,
        ram: &Arc<GuestRam>,
        filters: &Filters,
        exit: &Arc<ExitSignal>,
    ) -> Self {
        let started = match (config.backend, &old.backend) {
            (MergeBackend::Off, _) => Ok(Backend::Off),
            (MergeBackend::Kernel, Backend::Kernel(kernel)) => {
                kernel.in_fork().map(Backend::Kernel)
            }
            (MergeBackend::Kernel, Backend::Unavailable(reason)) => Err(reason.clone()),
            (MergeBackend::Kernel, Backend::Off | Backend::Owner(_)) => {
                Err("the machine that it was forked from is not merged by the kernel".to_owned())
            }
            (MergeBackend::Owner, _) => given
                .ok_or_else(|| "nothing was passed to the monitor for it".to_owned())
                .and_then(|given| OwnerMerging::in_fork(config, ram, given, filters, exit))
                .map(Backend::Owner),
        };
        Self::of(config, started)
    }

    /// Descriptors that a forked process needs for the kernel's merging.
    pub(super) fn descriptors(&self) -> Vec<RawFd> {
        match &self.backend {
            Backend::Kernel(kernel) => {
                kernel.descriptors().map(|descriptor| descriptor.as_raw_fd()).collect()
            }
            Backend::Off | Backend::Unavailable(_) | Backend::Owner(_) => Vec::new(),
        }
    }

    fn of(config: &MergeConfig, started: Result<Backend, String>) -> Self {
        let backend = started.unwrap_or_else(|reason| {
            tracing::warn!("the machine runs without merging of equal pages: {reason}");
            Backend::Unavailable(reason)
        });
        Self { config: config.clone(), backend }
    }

    /// Memory of the machine that shares pages with other memory, in bytes; `None` without merging.
    pub(super) fn merged_bytes(&self) -> Option<u64> {
        match &self.backend {
            Backend::Off | Backend::Unavailable(_) => None,
            Backend::Kernel(kernel) => kernel.merged_bytes(),
            Backend::Owner(owner) => Some(owner.merged_bytes()),
        }
    }

    /// Pauses the monitor's own merging. Returns when no operation is in progress. The kernel's
    /// continues, since its effects are not observable.
    pub(super) fn pause(&self) {
        if let Backend::Owner(owner) = &self.backend {
            owner.pause();
        }
    }

    /// Resumes merging.
    pub(super) fn resume(&self) {
        if let Backend::Owner(owner) = &self.backend {
            owner.resume();
        }
    }

    fn status(&self) -> Status {
        let nothing = |state, reason| Status { run: MergeRun::Stop, state, reason };
        match &self.backend {
            Backend::Off => nothing(MergeState::Off, None),
            Backend::Unavailable(reason) => nothing(MergeState::Unavailable, Some(reason.clone())),
            Backend::Kernel(kernel) => kernel.status(),
            Backend::Owner(owner) => owner.status(),
        }
    }

    fn settings(&self) -> Result<Option<MergeSettings>, ControlError> {
        match &self.backend {
            Backend::Off | Backend::Unavailable(_) => Ok(None),
            Backend::Kernel(kernel) => kernel.settings().map(Some),
            Backend::Owner(owner) => Ok(Some(owner.settings())),
        }
    }

    /// The counters of merging.
    pub(super) fn statistics(&self) -> Result<Option<MergeStatistics>, ControlError> {
        match &self.backend {
            Backend::Off | Backend::Unavailable(_) => Ok(None),
            Backend::Kernel(kernel) => kernel.statistics().map(Some),
            Backend::Owner(owner) => Ok(Some(owner.statistics())),
        }
    }

    /// Configuration, state, settings and counters.
    pub(super) fn info(&self) -> Result<MergeInfo, ControlError> {
        let Status { state, reason, .. } = self.status();
        Ok(MergeInfo {
            backend: self.config.backend,
            domain: self.config.domain.clone(),
            broker: self.config.broker.clone(),
            state,
            reason,
            settings: self.settings()?,
            statistics: self.statistics()?,
        })
    }

    /// Changes the settings of merging.
    pub(super) fn change(&self, change: &MergeChange) -> Result<(), ControlError> {
        match &self.backend {
            Backend::Off => Err(wrong_state(
                "same-page merging is off for this virtual machine",
                "start it with --memory size=…,merge=owner or merge=kernel",
            )),
            Backend::Unavailable(reason) => {
                let message = format!("pages of this virtual machine cannot be merged: {reason}");
                Err(wrong_state(message, "restart it when that has changed"))
            }
            Backend::Kernel(kernel) => kernel.change(change),
            Backend::Owner(owner) => owner.change(change),
        }
    }
}

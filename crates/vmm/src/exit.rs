//! Why a virtual machine ended. [`ExitSignal`] is the only place where that is decided.

use std::fmt;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// How long the end of a machine waits for all of its threads. With the waits for readers of the
/// console and of the API's replies, the monitor ends within two seconds.
const END_LIMIT: Duration = Duration::from_secs(1);

/// Why the guest no longer runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GuestExit {
    /// The guest powered off.
    PowerOff,
    /// The guest requested a reset.
    Reboot,
    /// The guest's kernel reported a panic.
    Panic,
    /// A vCPU could not deliver an exception (triple fault).
    TripleFault {
        /// Index of the vCPU.
        vcpu: u8,
    },
    /// KVM could not run a vCPU.
    Kvm {
        /// KVM's error.
        message: String,
    },
    /// A signal ended the monitor.
    Signal {
        /// Name of the signal.
        name: &'static str,
    },
    /// The guest was killed through the API.
    Killed,
    /// The machine now runs in another monitor.
    Migrated {
        /// Address of the destination.
        to: String,
    },
    /// A part of the monitor failed.
    Monitor {
        /// What failed.
        message: String,
    },
}

impl GuestExit {
    /// Name of the kind, for programs.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::PowerOff => "power_off",
            Self::Reboot => "reboot",
            Self::Panic => "panic",
            Self::TripleFault { .. } => "triple_fault",
            Self::Kvm { .. } => "kvm_error",
            Self::Signal { .. } => "signal",
            Self::Killed => "killed",
            Self::Migrated { .. } => "migrated",
            Self::Monitor { .. } => "monitor_error",
        }
    }

    /// Exit code of the process. Codes 1 and 2 are reserved for errors before the guest runs.
    pub fn code(&self) -> u8 {
        match self {
            Self::PowerOff => 0,
            Self::Reboot => 3,
            Self::Panic | Self::TripleFault { .. } => 4,
            Self::Kvm { .. } | Self::Monitor { .. } => 5,
            Self::Signal { .. } => 6,
            Self::Killed => 7,
            Self::Migrated { .. } => 8,
        }
    }
}

impl fmt::Display for GuestExit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PowerOff => f.write_str("the guest powered off"),
            Self::Reboot => f.write_str("the guest rebooted"),
            Self::Panic => f.write_str("the guest's kernel panicked"),
            Self::TripleFault { vcpu } => {
                write!(f, "the guest crashed: triple fault on vCPU {vcpu}")
            }
            Self::Kvm { message } => write!(f, "KVM cannot run the guest: {message}"),
            Self::Signal { name } => write!(f, "ended by {name}"),
            Self::Killed => f.write_str("killed through the API"),
            Self::Migrated { to } => write!(f, "the virtual machine has migrated to {to}"),
            Self::Monitor { message } => write!(f, "the monitor failed: {message}"),
        }
    }
}

/// Whether a reboot can take place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Taken {
    /// It can.
    Reboot,
    /// Not yet.
    NotStopped,
    /// The machine ends.
    OtherIsPending,
}

/// Carries the first reason to end from any thread to the main thread.
#[derive(Debug)]
pub struct ExitSignal {
    reason: Mutex<Option<GuestExit>>,
    event: EventFd,
    deadline: OnceLock<Instant>,
}

impl ExitSignal {
    /// A signal without a reason.
    pub fn new() -> std::io::Result<Self> {
        Ok(Self {
            reason: Mutex::new(None),
            event: EventFd::new(EFD_NONBLOCK)?,
            deadline: OnceLock::new(),
        })
    }

    /// Raises a reason to end. The first one is kept, except that a kill replaces a reboot: after
    /// the reboot the kill would be lost.
    pub fn raise(&self, exit: GuestExit) {
        let mut reason = self.reason.lock().unwrap_or_else(PoisonError::into_inner);
        let replaces = exit == GuestExit::Killed && *reason == Some(GuestExit::Reboot);
        if reason.is_none() || replaces {
            *reason = Some(exit);
            // A full counter is as good as a written one: the reader wakes up either way.
            let _ = self.event.write(1);
        }
    }

    /// The reason, which is kept.
    pub fn pending(&self) -> Option<GuestExit> {
        self.reason.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Takes the reason, so that a later one can be raised (after a reset, for example).
    pub fn take(&self) -> Option<GuestExit> {
        let mut reason = self.reason.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = self.event.read();
        reason.take()
    }

    /// Until when the end of the machine waits for its threads: [`END_LIMIT`] after the first call.
    pub(crate) fn end_deadline(&self) -> Instant {
        *self.deadline.get_or_init(|| Instant::now() + END_LIMIT)
    }

    /// Takes a reboot, if `stop` has stopped all vCPUs: several may request the same reboot. The
    /// caller holds the lock of the machine's state, under which others have seen that it is due.
    /// Any other reason is kept.
    pub fn take_reboot(&self, stop: impl FnOnce() -> bool) -> Taken {
        if !stop() {
            return Taken::NotStopped;
        }
        match self.take() {
            None | Some(GuestExit::Reboot) => Taken::Reboot,
            Some(other) => {
                self.raise(other);
                Taken::OtherIsPending
            }
        }
    }

    /// Makes the event readable only when another reason replaces the pending one.
    pub fn await_other(&self) {
        let _reason = self.reason.lock().unwrap_or_else(PoisonError::into_inner);
        // An event that was not readable is as good.
        let _ = self.event.read();
    }

    /// Readable while a reason is pending, but see [`await_other`](Self::await_other).
    pub fn event(&self) -> &EventFd {
        &self.event
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_reason_wins_until_it_is_taken() {
        let signal = ExitSignal::new().unwrap();
        assert_eq!(signal.take(), None);
        signal.raise(GuestExit::Reboot);
        signal.raise(GuestExit::PowerOff);
        assert_eq!(signal.take(), Some(GuestExit::Reboot));
        assert_eq!(signal.take(), None);
        signal.raise(GuestExit::PowerOff);
        assert_eq!(signal.pending(), Some(GuestExit::PowerOff));
        signal.raise(GuestExit::Killed);
        assert_eq!(signal.take(), Some(GuestExit::PowerOff));
        assert_eq!(signal.pending(), None);
    }

    #[test]
    fn a_kill_replaces_a_pending_reboot() {
        let signal = ExitSignal::new().unwrap();
        signal.raise(GuestExit::Reboot);
        signal.raise(GuestExit::Killed);
        assert_eq!(signal.take(), Some(GuestExit::Killed));
    }

    /// The second vCPU requests it while it is being stopped.
    #[test]
    fn a_reboot_requested_by_two_vcpus_is_taken_once() {
        let signal = ExitSignal::new().unwrap();
        signal.raise(GuestExit::Reboot);
        assert_eq!(signal.take_reboot(|| false), Taken::NotStopped);
        let requested_again = || {
            signal.raise(GuestExit::Reboot);
            true
        };
        assert_eq!(signal.take_reboot(requested_again), Taken::Reboot);
        assert_eq!(signal.pending(), None);
        assert!(signal.event().read().is_err());

        signal.raise(GuestExit::Reboot);
        let killed = signal.take_reboot(|| {
            signal.raise(GuestExit::Killed);
            true
        });
        assert_eq!(killed, Taken::OtherIsPending);
        assert_eq!(signal.pending(), Some(GuestExit::Killed));
    }

    #[test]
    fn a_waiting_reboot_leaves_the_event_to_a_kill() {
        let signal = ExitSignal::new().unwrap();
        signal.raise(GuestExit::Reboot);
        signal.await_other();
        assert!(signal.event().read().is_err());
        signal.raise(GuestExit::Killed);
        assert!(signal.event().read().is_ok());
        assert_eq!(signal.pending(), Some(GuestExit::Killed));
    }

    #[test]
    fn codes_are_distinct_by_kind() {
        let exits = [
            GuestExit::PowerOff,
            GuestExit::Reboot,
            GuestExit::Panic,
            GuestExit::Kvm { message: String::new() },
            GuestExit::Signal { name: "SIGTERM" },
            GuestExit::Killed,
            GuestExit::Migrated { to: String::new() },
        ];
        let codes: std::collections::BTreeSet<_> = exits.iter().map(GuestExit::code).collect();
        assert_eq!(codes.len(), exits.len());
        let kinds: std::collections::BTreeSet<_> = exits.iter().map(GuestExit::kind).collect();
        assert_eq!(kinds.len(), exits.len());
    }
}

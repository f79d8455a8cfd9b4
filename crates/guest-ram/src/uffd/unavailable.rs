//! Reasons why a userfaultfd cannot be used.

use std::io;

/// Reason why the process cannot use userfaultfd as required.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UffdUnavailable {
    /// The process may not use userfaultfd for accesses by the kernel, which KVM's are.
    #[error(
        "no permission for userfaultfd: /dev/userfaultfd: {device}; userfaultfd(2): {call}. Give \
         the process access to /dev/userfaultfd or the capability CAP_SYS_PTRACE, or set \
         vm.unprivileged_userfaultfd to 1"
    )]
    NoPermission {
        /// The error of opening the device.
        device: io::Error,
        /// The error of the system call.
        call: io::Error,
    },

    /// The kernel lacks userfaultfd, or a required feature of it.
    #[error("this kernel has no {feature}; it needs Linux {since} or later")]
    OldKernel {
        /// The missing feature.
        feature: &'static str,
        /// The first version of Linux with it.
        since: &'static str,
    },

    /// Another action was refused.
    #[error("cannot {action}: {source}")]
    Refused {
        /// The failed action.
        action: &'static str,
        /// The system error.
        source: io::Error,
    },
}

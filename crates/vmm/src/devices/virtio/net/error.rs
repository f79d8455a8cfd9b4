//! Why a network device cannot be used.

use std::io;

use thiserror::Error;

/// A network device cannot be used.
#[derive(Debug, Error)]
pub enum NetError {
    /// The kernel's device for tap interfaces cannot be opened.
    #[error(
        "cannot open /dev/net/tun, which --net tap={name} needs: {source}; load the kernel's \
         module `tun`, or use --net user"
    )]
    NoTun {
        /// The interface.
        name: String,
        /// The system's error.
        source: io::Error,
    },
    /// There is no such interface.
    #[error(
        "there is no network interface {name}; create it as root: \
         `ip tuntap add dev {name} mode tap user NAME`, `ip link set {name} up`"
    )]
    NoInterface {
        /// The interface.
        name: String,
    },
    /// Another process has the interface.
    #[error(
        "the tap interface {name} is in use by another process; stop that process, \
         or create an interface for this machine"
    )]
    InUse {
        /// The interface.
        name: String,
    },
    /// The interface belongs to another user.
    #[error(
        "no right to use the tap interface {name}: it belongs to another user; let root create it \
         for this one: `ip tuntap add dev {name} mode tap user NAME`"
    )]
    NoRights {
        /// The interface.
        name: String,
    },
    /// The interface is no tap interface with one queue.
    #[error(
        "the network interface {name} is not a tap interface, or has several queues; \
         create one with `ip tuntap add dev NAME mode tap`"
    )]
    NotTap {
        /// The interface.
        name: String,
    },
    /// Another system call failed.
    #[error("cannot use --net {backend}: {action}: {source}")]
    Failed {
        /// The backend.
        backend: String,
        /// The failed action.
        action: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// A descriptor is of the wrong kind.
    #[error(
        "cannot use --net fd={number}: {problem}; pass a tap interface that was opened with \
         IFF_NO_PI and IFF_VNET_HDR, or a connected stream socket"
    )]
    Descriptor {
        /// Its number.
        number: i32,
        /// What is wrong.
        problem: String,
    },
    /// The program is missing.
    #[error("cannot start passt for --net user: {0}; install it (`apt install passt`)")]
    NoPasst(io::Error),
    /// It has ended at its start.
    #[error("passt, started for --net user, has ended: {said}")]
    PasstEnded {
        /// What it has said.
        said: String,
    },
}

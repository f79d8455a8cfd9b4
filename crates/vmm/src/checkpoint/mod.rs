//! Checkpoints that are kept in memory, and machines that are forked from them, as their clients
//! see them.
//!
//! A checkpoint is a process that a monitor has forked while its machine stood still. It has the
//! machine's memory, shared with the monitor until one of them writes to a page, and the state of
//! vCPUs and devices; it runs nothing. A machine that is forked from it is a process that it forks
//! in turn. What belongs to that machine alone, its sockets, disks, network interfaces and cgroup,
//! is opened by the client, with the client's rights, and passed as descriptors. The processes'
//! side is in [`vm`](crate::vm).

mod client;
mod error;
mod message;
mod opened;

pub use client::{ForkOptions, Forked, Forks, Held, keep};
pub use error::CheckpointError;
pub use message::CheckpointInfo;
#[cfg(test)]
pub(crate) use message::SocketRequest;
pub(crate) use message::{
    Answer, DiskRequest, Files, ForkRequest, MergeRequest, NetRequest, Request, Stage, Start,
};

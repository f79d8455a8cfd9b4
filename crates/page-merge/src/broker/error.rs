//! What can go wrong between a broker and those who talk to it.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use super::name::DomainName;

/// An error of a broker or of a client.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BrokerError {
    /// The broker cannot listen.
    #[error("the merge broker cannot listen: {0}")]
    Listen(#[from] ebb_local_io::ListenError),
    /// Nobody listens, or not for this user.
    #[error("cannot connect to the merge broker at {path}: {source}; start one with `ebb merge-broker --listen unix:{path}`", path = path.display())]
    Connect {
        /// The socket's path.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// The broker belongs to somebody who must not know this process's pages.
    #[error("the merge broker at {path} runs as user {theirs}; only root's and those of user {ours} are trusted", path = path.display())]
    ForeignUser {
        /// The socket's path.
        path: PathBuf,
        /// Its user.
        theirs: u32,
        /// This process's user.
        ours: u32,
    },
    /// The broker said no.
    #[error("the merge broker refuses this process: {reason}")]
    Refused {
        /// Why.
        reason: String,
    },
    /// The broker went away, or has not answered for very long.
    #[error("the merge broker is gone: {0}")]
    Gone(String),
    /// The broker has not answered in time. It may still do so.
    #[error("the merge broker did not answer within {0:?}")]
    Late(Duration),
    /// A system call failed that does not fail.
    #[error("cannot {what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// The system's answer.
        source: io::Error,
    },
}

impl BrokerError {
    pub(super) fn system(what: &'static str) -> impl FnOnce(rustix::io::Errno) -> Self {
        move |errno| Self::System { what, source: errno.into() }
    }
}

/// Why a broker refuses a connection. The other side reads it.
#[derive(Debug, thiserror::Error)]
pub(super) enum Refusal {
    #[error(transparent)]
    Preamble(#[from] super::hello::PreambleError),
    #[error("it sent {0}")]
    Frame(#[from] super::message::FrameError),
    #[error(transparent)]
    NotHeld(#[from] super::ledger::NotHeld),
    #[error("it did not begin with a hello")]
    NoHello,
    #[error("it said hello twice")]
    SecondHello,
    #[error("domain {domain} is not for user {user}; see the broker's --domain")]
    User { domain: DomainName, user: u32 },
    #[error("domain {0} is not served here; see the broker's --domain")]
    Domain(DomainName),
    #[error(
        "the clients of domain {domain} {theirs}, and this one wants to {wish}; all clients of a domain must want the same"
    )]
    Placement { domain: DomainName, theirs: super::hello::Placement, wish: super::hello::Placement },
    #[error(
        "node {node} has no stable pages of their own here: the domain's clients merge across nodes, or the host's nodes with memory are {nodes:?}"
    )]
    Node { node: u32, nodes: Vec<u32> },
    #[error("there are {0} clients already")]
    Clients(usize),
    #[error("its process has {0} connections already")]
    Process(usize),
    #[error(
        "its process cannot be watched, so its end could not be noticed ({0}); the broker and its clients must be in one pid namespace"
    )]
    Unwatched(io::Error),
    #[error("too many connections that have not said who they are; the oldest had to go")]
    Crowded,
    #[error("{what} took longer than {limit:?}")]
    Late { what: &'static str, limit: Duration },
    #[error("user {0} may not see the broker's state; only its own user and root may")]
    StatusUser(u32),
    #[error("the broker has no random numbers: {0}")]
    Random(rustix::io::Errno),
    #[error("the broker has no room for another connection just now: {0}")]
    Shortage(io::Error),
}

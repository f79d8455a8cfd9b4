//! Errors between a broker and its clients.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use super::name::DomainName;
use crate::settings::Nodes;

/// An error of a broker or of a client.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BrokerError {
    /// The broker cannot listen.
    #[error("the merge broker cannot listen: {0}")]
    Listen(#[from] ebb_local_io::ListenError),
    /// No broker listens, or not for this user.
    #[error(
        "cannot connect to the merge broker at {path}: {source}; start one with \
         `ebb merge-broker --listen unix:{path}`",
        path = path.display()
    )]
    Connect {
        /// The socket's path.
        path: PathBuf,
        /// The system error.
        source: io::Error,
    },
    /// The broker's user must not know this process's pages.
    #[error(
        "the merge broker at {path} runs as user {theirs}; only brokers of root and of user {ours} \
         are trusted",
        path = path.display()
    )]
    ForeignUser {
        /// The socket's path.
        path: PathBuf,
        /// The broker's user.
        theirs: u32,
        /// This process's user.
        ours: u32,
    },
    /// The broker refused the connection.
    #[error("the merge broker refuses this process: {reason}")]
    Refused {
        /// The reason.
        reason: String,
    },
    /// The broker has ended the connection, or has not answered for very long.
    #[error("the merge broker is gone: {0}")]
    Gone(String),
    /// The broker has not answered in time. It may answer later.
    #[error("the merge broker did not answer within {0:?}")]
    Late(Duration),
    /// An unexpected failure of a system call.
    #[error("cannot {what}: {source}")]
    System {
        /// The failed action.
        what: &'static str,
        /// The system error.
        source: io::Error,
    },
}

impl BrokerError {
    pub(super) fn system(what: &'static str) -> impl FnOnce(rustix::io::Errno) -> Self {
        move |errno| Self::System { what, source: errno.into() }
    }
}

/// Reason for which a broker refuses a connection. It is sent to the peer.
#[derive(Debug, thiserror::Error)]
pub(super) enum Refusal {
    #[error(transparent)]
    Preamble(#[from] super::hello::PreambleError),
    #[error("it sent {0}")]
    Frame(#[from] super::message::FrameError),
    #[error(transparent)]
    NotHeld(#[from] super::ledger::NotHeld),
    #[error("its first message was not hello")]
    NoHello,
    #[error("another process made the connection, and did not introduce this one")]
    NotIntroduced,
    #[error("it was introduced as a client of domain {domain}, and wants to join {wish}")]
    Introduced { domain: DomainName, wish: DomainName },
    #[error("it sent hello twice")]
    SecondHello,
    #[error("user {user} may not join domain {domain}; see the broker's --domain")]
    User { domain: DomainName, user: u32 },
    #[error("this broker does not serve domain {0}; see its --domain")]
    Domain(DomainName),
    #[error(
        "the clients of domain {domain} {theirs}, and this one wants to {wish}; all clients of a \
         domain must agree"
    )]
    Placement { domain: DomainName, theirs: Nodes, wish: Nodes },
    #[error(
        "node {node} has no stable pages of its own: the domain's clients merge across nodes, or \
         the host's nodes with memory are {nodes:?}"
    )]
    Node { node: u32, nodes: Vec<u32> },
    #[error("the limit of {0} clients is reached")]
    Clients(usize),
    #[error("the limit of {most} clients of domain {domain} is reached")]
    DomainClients { domain: DomainName, most: usize },
    #[error("its process has {0} connections, which is the limit")]
    Process(usize),
    #[error(
        "the end of its process cannot be watched ({0}); the broker and its clients must be in one \
         pid namespace"
    )]
    Unwatched(io::Error),
    #[error("too many connections that have not sent hello; the oldest was closed")]
    Crowded,
    #[error("{what} took longer than {limit:?}")]
    Late { what: &'static str, limit: Duration },
    #[error("user {0} may not see the broker's state; only its own user and root may")]
    StatusUser(u32),
    #[error("the broker cannot get random numbers: {0}")]
    Random(rustix::io::Errno),
    #[error("the broker has no room for another connection at present: {0}")]
    Shortage(io::Error),
}

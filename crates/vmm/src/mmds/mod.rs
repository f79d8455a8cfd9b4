//! Metadata for guests over the network, at an address that no packet leaves the machine for: what
//! Firecracker calls MMDS, its MicroVM metadata service.
//!
//! | module | contents |
//! | --- | --- |
//! | `store` | one JSON document of a limited size |
//! | `token` | session tokens, which are not stored |
//! | `http` | a request -> an answer, pure |
//! | `stack` | Ethernet frames in and out: address resolution, and TCP by smoltcp |
//!
//! A network device that has a `Stack` gives it the guest's frames to the address, and the
//! guest gets its answers like other frames. Each device has a stack of its own; the store is
//! one.

mod http;
mod stack;
mod store;
mod token;

use std::fmt;
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub(crate) use stack::{HEAD_BYTES, Stack};
pub(crate) use store::{Store, StoreError};
use token::Tokens;

#[cfg(any(test, feature = "testing"))]
pub use stack::fuzz_frames;

/// The address that guests know, unless another one is configured.
pub(crate) const DEFAULT_ADDRESS: Ipv4Addr = Ipv4Addr::new(169, 254, 169, 254);

/// Whether a guest must have a session token to read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Sessions {
    /// It need not (version 1).
    #[default]
    Optional,
    /// It must (version 2).
    Required,
}

/// Which form answers have.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Form {
    /// What the request accepts: JSON, or the lines of text of EC2's service.
    #[default]
    Accepted,
    /// Always the latter.
    Text,
}

/// Counters of a service.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Requests that were answered, whatever the answer was.
    pub answered: u64,
    /// Requests without the token that version 2 asks for.
    pub without_token: u64,
    /// Requests with a token that is not valid.
    pub with_invalid_token: u64,
    /// Connections that a guest has made.
    pub connections: u64,
}

/// The store and how it is served.
#[derive(Debug)]
pub(crate) struct Service {
    pub store: Store,
    pub sessions: Sessions,
    pub form: Form,
    pub counts: Counts,
    tokens: Tokens,
}

/// A service that the API and network devices share.
#[derive(Clone)]
pub(crate) struct Metadata(Arc<Mutex<Service>>);

impl Metadata {
    /// An empty store for documents of up to `max_bytes`.
    pub(crate) fn new(max_bytes: usize) -> Self {
        Self(Arc::new(Mutex::new(Service {
            store: Store::new(max_bytes),
            sessions: Sessions::default(),
            form: Form::default(),
            counts: Counts::default(),
            tokens: Tokens::new(),
        })))
    }

    /// The service.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Service> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Metadata {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Its content may be secret.
        f.debug_struct("Metadata").finish_non_exhaustive()
    }
}

impl PartialEq for Metadata {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Metadata {}

/// A service as a network device reaches it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Served {
    pub(crate) service: Metadata,
    pub(crate) address: Ipv4Addr,
}

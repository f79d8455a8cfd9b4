//! Sharing stable pages between processes.
//!
//! A [`Broker`] owns the memory files of all stable pages. Monitors are its clients:
//! [`BrokerStore`] is a [`StableStore`](crate::StableStore) that asks it, for one trust domain.
//!
//! - A client gets nothing of other domains: no hash, no descriptor, and not the secret of the
//!   hashes. Its domain is fixed for life, and its user decides which domains it may join.
//! - Memory files are sealed (`F_SEAL_FUTURE_WRITE`, `SHRINK`, `GROW`, `SEAL`; fcntl(2)) and passed
//!   on read-only, so that a client cannot change anything that others have mapped.
//! - The content of a slot does not change while any client holds it. A client whose connection
//!   ends keeps its holds until its *process* has ended, which the broker watches (pidfd_open(2)):
//!   mapped pages stay mapped however the connection was lost. That is the process which has sent
//!   hello, even if another one has made the connection.
//! - When a broker ends, its clients keep what they have mapped; they get no further shares
//!   ([`StoreError::Gone`](crate::StoreError::Gone)). A broker that is only late
//!   ([`StoreError::Late`](crate::StoreError::Late)) is used again once it has answered.
//! - Published pages are indexed under the hash that the broker computed, and every client compares
//!   before it replaces anything: a client that lies costs others only time, and room up to its
//!   quota.

mod client;
mod connection;
mod domains;
mod error;
#[cfg(feature = "testing")]
#[allow(clippy::missing_panics_doc)]
pub mod fuzzing;
mod hello;
mod interest;
mod ledger;
mod limits;
mod link;
mod message;
mod name;
mod nodes;
mod peer;
mod server;
mod socket;
mod status;

pub use client::{BrokerStore, MemberConfig, SegmentUser};
pub use error::BrokerError;
pub use hello::PROTOCOL_VERSION;
pub use limits::Limits;
pub use link::connect;
pub use name::{DomainName, DomainRule, NameError, RuleError};
pub use server::{Broker, BrokerConfig};
pub use status::{BrokerStatus, DomainStatus, NodeStatus, ask_status};

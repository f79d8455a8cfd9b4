//! State reported by a broker.

use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::client::unexpected;
use super::error::BrokerError;
use super::hello::Role;
use super::link::Link;
use super::message::Reply;
use super::name::DomainName;
use crate::settings::Nodes;

/// The state of a broker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BrokerStatus {
    /// Connected clients.
    pub clients: usize,
    /// Disconnected clients whose processes live and have stable pages mapped.
    pub lost_clients: usize,
    /// Connections that were refused or ended for a violation.
    pub refused: u64,
    /// The domains, by name.
    pub domains: Vec<DomainStatus>,
}

/// The state of a domain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DomainStatus {
    /// The domain's name.
    pub name: DomainName,
    /// Whether its nodes are kept apart.
    pub placement: Nodes,
    /// Connected clients of the domain.
    pub clients: usize,
    /// Memory files of the domain.
    pub segments: usize,
    /// Pages of the memory files that are in use or kept for later use.
    pub segment_pages: u64,
    /// Counts of each node.
    pub nodes: Vec<NodeStatus>,
}

/// The state of a node of a domain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeStatus {
    /// The node; absent if nodes are not kept apart.
    pub node: Option<u32>,
    /// Stable pages.
    pub stable_pages: u64,
    /// Pages of clients that a stable page backs.
    pub sharers: u64,
    /// Sharers in preparation.
    pub reservations: u64,
    /// Hashes that clients queried and that have no stable page.
    pub remembered_hashes: u64,
}

impl NodeStatus {
    /// Pages that the domain's clients save by sharing.
    pub const fn saved_pages(&self) -> u64 {
        self.sharers.saturating_sub(self.stable_pages)
    }
}

/// Queries the state of the broker that listens at `path`.
pub fn ask_status(path: &Path, time_limit: Duration) -> Result<BrokerStatus, BrokerError> {
    let mut link = Link::connect(path, time_limit)?;
    link.begin(&Role::Status.preamble())?;
    match link.reply()? {
        Reply::Status(document) => serde_json::from_slice(&document)
            .map_err(|error| BrokerError::Gone(format!("its state does not parse: {error}"))),
        other => Err(unexpected(&other)),
    }
}

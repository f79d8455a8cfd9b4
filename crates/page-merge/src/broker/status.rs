//! What a broker says of itself.

use serde::{Deserialize, Serialize};

use super::hello::Placement;
use super::name::DomainName;

/// The state of a broker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BrokerStatus {
    /// Clients that are connected.
    pub clients: usize,
    /// Clients that are not connected any more, whose processes live and have stable pages mapped.
    pub lost_clients: usize,
    /// Connections that were refused or ended for what they did.
    pub refused: u64,
    /// The domains, by name.
    pub domains: Vec<DomainStatus>,
}

/// The state of a domain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DomainStatus {
    /// Its name.
    pub name: DomainName,
    /// Whether its nodes are kept apart.
    pub placement: Placement,
    /// Its clients that are connected.
    pub clients: usize,
    /// Its memory files.
    pub segments: usize,
    /// Pages that the memory files have in use or kept for later use.
    pub segment_pages: u64,
    /// What is there on each node.
    pub nodes: Vec<NodeStatus>,
}

/// The state of a node of a domain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeStatus {
    /// The node; none if nodes are not kept apart.
    pub node: Option<u32>,
    /// Stable pages.
    pub stable_pages: u64,
    /// Pages of clients that have one of them in their place.
    pub sharers: u64,
    /// Sharers that are just being made.
    pub reservations: u64,
    /// Hashes that clients asked for and that have no stable page.
    pub remembered_hashes: u64,
}

impl NodeStatus {
    /// Pages that the domain's clients do not need because of sharing.
    pub const fn saved_pages(&self) -> u64 {
        self.sharers.saturating_sub(self.stable_pages)
    }
}

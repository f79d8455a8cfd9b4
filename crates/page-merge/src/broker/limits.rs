//! Limits of the resources that a client may use.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Maximum number of hashes in a query.
pub const BATCH_HASHES: usize = 1024;

/// Maximum number of pages in a publication.
pub const BATCH_PAGES: usize = 64;

/// Maximum number of share and release updates in a message.
pub const BATCH_UPDATES: usize = 4096;

/// Maximum number of notifications in a message.
pub const BATCH_NOTIFICATIONS: usize = 1024;

/// Limits of a broker. Everything that a client can make grow has one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Maximum number of sharers of one stable page, reservations included, over all clients;
    /// further ones get a duplicate of the page (Linux's max_page_sharing,
    /// Documentation/admin-guide/mm/ksm.rst).
    pub max_page_sharing: u32,
    /// Stable pages per domain, and at the same time pages of its memory files, rounded up to 32
    /// MiB; each node may have one file.
    pub domain_pages: u64,
    /// Pages of the memory files of all domains.
    pub all_pages: u64,
    /// Existing stable pages published by one client.
    pub published_pages: u64,
    /// Remembered hashes without a stable page per client and node; the oldest are dropped.
    pub remembered_hashes: u32,
    /// The same for all clients and nodes of a domain: each client's share falls as their number
    /// grows.
    pub domain_hashes: u64,
    /// Simultaneous reservations per client.
    pub reservations: u32,
    /// Pending notifications per client; the oldest are dropped.
    pub notifications: usize,
    /// Clients, including disconnected ones that still hold shares. Domains with a rule have equal
    /// parts of them.
    pub clients: usize,
    /// Clients per process.
    pub clients_of_process: usize,
    /// Connections that have not sent hello. The oldest is closed to admit another one.
    pub strangers: usize,
    /// Time limit for a connection to send hello, to complete a message, and to read its answers.
    pub patience: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_page_sharing: 256,
            domain_pages: 1 << 20,
            all_pages: 1 << 21,
            published_pages: 1 << 19,
            remembered_hashes: 1 << 22,
            domain_hashes: 1 << 23,
            reservations: 1 << 16,
            notifications: 1 << 16,
            clients: 1024,
            clients_of_process: 8,
            strangers: 32,
            patience: Duration::from_secs(10),
        }
    }
}

impl Limits {
    /// The same with a quota of stable pages per domain, half of which one client may publish. The
    /// number of remembered hashes is eight times that of the pages: they take less than an
    /// additional twentieth of the quota.
    #[must_use]
    pub fn with_quota(self, quota_bytes: u64) -> Self {
        let domain_pages = quota_bytes / ebb_abi::PAGE_SIZE_BYTES;
        let domain_hashes = domain_pages.saturating_mul(8);
        Self { domain_pages, published_pages: domain_pages.div_ceil(2), domain_hashes, ..self }
    }

    /// The same with a quota of the stable pages of all domains together.
    #[must_use]
    pub fn with_total(self, total_bytes: u64) -> Self {
        Self { all_pages: total_bytes / ebb_abi::PAGE_SIZE_BYTES, ..self }
    }
}

/// The limits as sent to clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToldLimits {
    /// [`Limits::max_page_sharing`].
    pub max_page_sharing: u32,
    /// [`Limits::domain_pages`].
    pub domain_pages: u64,
    /// [`Limits::reservations`].
    pub reservations: u32,
}

impl From<&Limits> for ToldLimits {
    fn from(limits: &Limits) -> Self {
        Self {
            max_page_sharing: limits.max_page_sharing,
            domain_pages: limits.domain_pages,
            reservations: limits.reservations,
        }
    }
}

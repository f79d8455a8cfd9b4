//! What a client may take of a broker.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Most hashes in one query.
pub const BATCH_HASHES: usize = 1024;

/// Most pages in one publication.
pub const BATCH_PAGES: usize = 64;

/// Most shares taken and given up in one message.
pub const BATCH_UPDATES: usize = 4096;

/// Most notifications in one message.
pub const BATCH_NOTIFICATIONS: usize = 1024;

/// Limits of a broker. Nothing that a client can make grow is without one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Sharers of one stable page, reservations among them, over all clients; more get a duplicate
    /// of the page (Linux's max_page_sharing, Documentation/admin-guide/mm/ksm.rst).
    pub max_page_sharing: u32,
    /// Stable pages of a domain.
    pub domain_pages: u64,
    /// Stable pages that one client may have published and that still exist.
    pub published_pages: u64,
    /// Hashes without a stable page that are remembered for a client and a node; the oldest are
    /// forgotten.
    pub remembered_hashes: u32,
    /// The same for all clients and nodes of a domain: with more of them, less is remembered for
    /// each.
    pub domain_hashes: u64,
    /// Reservations that a client may have at a time.
    pub reservations: u32,
    /// Notifications that are kept for a client; the oldest are forgotten.
    pub notifications: usize,
    /// Clients, those among them that are not connected any more and still hold shares.
    pub clients: usize,
    /// Clients of one process.
    pub clients_of_process: usize,
    /// Connections that have not introduced themselves. The oldest has to go for one more.
    pub strangers: usize,
    /// How long a connection may take to introduce itself, to end a message that it began, and to
    /// read what it asked for.
    pub patience: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_page_sharing: 256,
            domain_pages: 1 << 20,
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
    /// The default with a quota of stable pages for each domain, of which one client may publish
    /// half. Hashes are remembered of eight times as many pages: they take less than a twentieth of
    /// the quota in addition.
    #[must_use]
    pub fn with_quota(self, quota_bytes: u64) -> Self {
        let domain_pages = quota_bytes / ebb_abi::PAGE_SIZE_BYTES;
        let domain_hashes = domain_pages.saturating_mul(8);
        Self { domain_pages, published_pages: domain_pages.div_ceil(2), domain_hashes, ..self }
    }
}

/// What a client is told of the limits.
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

//! Connections with the machine's merge broker: the monitor asks when it has lost the one before.

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Duration;

use ebb_page_merge::broker::{DomainName, connect};

/// The companion's side.
#[derive(Debug)]
pub(super) struct BrokerServer {
    /// The broker's socket.
    pub path: PathBuf,
    /// The only domain that the monitor may join.
    pub domain: DomainName,
}

impl BrokerServer {
    /// Connects, and introduces the monitor. A full queue of the broker is not waited for: the
    /// monitor asks again.
    pub(super) fn connect(&self) -> io::Result<OwnedFd> {
        connect(&self.path, self.domain.clone(), Duration::ZERO).map_err(io::Error::other)
    }
}

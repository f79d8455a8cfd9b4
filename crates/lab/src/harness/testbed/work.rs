//! What a Debian guest with an agent needs of a testbed: its disk, and a host without caches.

use super::Testbed;
use crate::LabError;
use crate::harness::disk_image::{self, OwnDisk, WorkDisk};
use crate::harness::host;

impl<'a> Testbed<'a> {
    /// The same with a disk for a Debian guest with an agent.
    #[must_use]
    pub fn with_work_disk(mut self, work_disk: Option<WorkDisk<'a>>) -> Self {
        self.work_disk = work_disk;
        self
    }

    /// The disk of the series' Debian guest with an agent, which no guest has used yet.
    ///
    /// # Errors
    /// [`LabError::Missing`] and [`LabError::SystemFile`].
    pub fn work_disk(&mut self) -> Result<OwnDisk, LabError> {
        disk_image::required(self.work_disk.take())?.prepare()
    }

    /// Drops the host's caches, unless the host has other users.
    ///
    /// # Errors
    /// [`LabError::SystemFile`].
    pub fn drop_host_caches(&self) -> Result<(), LabError> {
        host::drop_caches(&self.gauge)
    }
}

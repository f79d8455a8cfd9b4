//! Guest memory as seen by the two ends of a migration.

use ebb_abi::PageRange;

/// An error of an implementation that the engine was given: memory, dirty log, guest, connection.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Memory of the guest at the source. The guest writes to it during the migration.
///
/// Each range passed lies within one region.
pub trait SourceMemory: Sync {
    /// Regions of guest memory, in ascending order, without overlaps.
    fn regions(&self) -> Vec<PageRange>;

    /// Appends the populated parts of `range` in ascending order. All other pages read as zeros and
    /// use no memory on the host: never touched, or discarded.
    ///
    /// # Errors
    /// If the host cannot be queried.
    fn held(&self, range: PageRange, held: &mut Vec<PageRange>) -> Result<(), BoxError>;

    /// Copies the content of `range` to `bytes`, which has the same length. A concurrent write of
    /// the guest may be in the copy completely, in part or not at all: it is found in the dirty
    /// log.
    ///
    /// # Errors
    /// If the memory cannot be read.
    fn read(&self, range: PageRange, bytes: &mut [u8]) -> Result<(), BoxError>;
}

/// Memory of the guest at the destination. It must read as zeros when the migration begins, and
/// must have no other user.
///
/// Each range passed lies within one region. Calls come from several threads.
pub trait TargetMemory: Sync {
    /// Regions of guest memory, in ascending order, without overlaps.
    fn regions(&self) -> Vec<PageRange>;

    /// Writes the content of `range`; `bytes` has the same length.
    ///
    /// # Errors
    /// If the memory cannot be written.
    fn write(&self, range: PageRange, bytes: &[u8]) -> Result<(), BoxError>;

    /// Makes pages that were written before read as zeros.
    ///
    /// # Errors
    /// If the memory cannot be written.
    fn zero(&self, range: PageRange) -> Result<(), BoxError>;

    /// Discards pages that were written before; they read as zeros afterwards.
    ///
    /// # Errors
    /// If the host refuses.
    fn discard(&self, range: PageRange) -> Result<(), BoxError>;
}

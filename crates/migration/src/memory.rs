//! Guest memory as the two ends of a migration see it.

use ebb_abi::PageRange;

/// An error of something that the engine was given: memory, dirty log, guest, connection.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Memory of the guest that is to be moved. The guest writes to it meanwhile.
///
/// Ranges that are passed lie within one region.
pub trait SourceMemory: Sync {
    /// The guest's memory, in ascending order, without overlaps.
    fn regions(&self) -> Vec<PageRange>;

    /// Appends the parts of `range` for which the host holds content, in ascending order. All other
    /// pages read as zeros, and the host has no memory for them: never touched, or discarded.
    ///
    /// # Errors
    /// If the host does not tell.
    fn held(&self, range: PageRange, held: &mut Vec<PageRange>) -> Result<(), BoxError>;

    /// Copies the content of `range` to `bytes`, which are as long. A write of the guest at the
    /// same time may be in the copy or not, or in part: it is found in the dirty log.
    ///
    /// # Errors
    /// If the memory cannot be read.
    fn read(&self, range: PageRange, bytes: &mut [u8]) -> Result<(), BoxError>;
}

/// Memory that a guest is moved into. It must read as zeros when the migration begins, and nobody
/// else may use it.
///
/// Ranges that are passed lie within one region; several threads pass them.
pub trait TargetMemory: Sync {
    /// The guest's memory, in ascending order, without overlaps.
    fn regions(&self) -> Vec<PageRange>;

    /// Writes the content of `range`; `bytes` are as long.
    ///
    /// # Errors
    /// If the memory cannot be written.
    fn write(&self, range: PageRange, bytes: &[u8]) -> Result<(), BoxError>;

    /// Makes pages that have been written before read as zeros.
    ///
    /// # Errors
    /// If the memory cannot be written.
    fn zero(&self, range: PageRange) -> Result<(), BoxError>;

    /// Gives pages that have been written before back to the host; they read as zeros afterwards.
    ///
    /// # Errors
    /// If the host refuses.
    fn discard(&self, range: PageRange) -> Result<(), BoxError>;
}

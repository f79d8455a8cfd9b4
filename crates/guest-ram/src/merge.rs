//! Same-page merging of guest memory: pages with the same content are replaced by a stable page that they share.

mod stable;

pub use stable::{Freed, STABLE_FILE_NAME, StableError, StableMemory, StableSegments, StableSlot};

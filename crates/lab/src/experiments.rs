//! The experiments, one file or folder each, and which there are.

pub mod clock;
pub mod density;
pub mod faults;
pub mod free_pages;
pub mod inflate;
pub mod memhog;
pub mod merge_speed;
pub mod migrate;
pub mod numa_merge;

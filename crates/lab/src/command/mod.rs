//! The commands of `ebb-lab`, one file each.

pub mod debian;
pub mod doctor;
pub mod experiments;
pub mod guest_image;
pub mod results;
pub mod virtual_host;

//! The Ebb virtual machine monitor.

pub mod api;
pub mod size;

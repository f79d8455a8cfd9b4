//! The connection of two monitors.

//! switching

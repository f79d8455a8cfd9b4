//! Ebb command line.
fn main() {}

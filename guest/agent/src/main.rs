//! Guest agent.
fn main() {}

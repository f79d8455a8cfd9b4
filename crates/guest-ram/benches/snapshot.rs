//! What saving memory, restoring it, and touching it for the first time cost.

fn main() {}

//! The program `ebbd`.

fn main() {}

//! The program `ebb`.

use std::process::ExitCode;

use ebb_migration::ClearingAllocator;

/// Machines are forked from monitors that may have been sent or received over TLS.
#[global_allocator]
static ALLOCATOR: ClearingAllocator = ClearingAllocator;

fn main() -> ExitCode {
    ebb::main()
}

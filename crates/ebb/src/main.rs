//! The program `ebb`.

use std::process::ExitCode;

fn main() -> ExitCode {
    ebb::main()
}

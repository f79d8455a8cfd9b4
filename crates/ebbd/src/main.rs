//! The program `ebbd`.

use std::process::ExitCode;

fn main() -> ExitCode {
    ebbd::program::main(&["/proc/self/exe"], std::env::args_os().skip(1).collect())
}

//! The program `ebbd`.

use std::process::ExitCode;

fn main() -> ExitCode {
    ebbd::program::main(std::env::args_os())
}

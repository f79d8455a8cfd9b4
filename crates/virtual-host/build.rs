//! Compiles what QEMU loads, its plugin (`plugin/translations.c`) and a library with a slow clock
//! (`plugin/clock.c`), with the C compiler that links Rust programs, too.

use std::env;
use std::error::Error;
use std::path::Path;
use std::process::Command;

const NAMES: [&str; 2] = ["translations", "clock"];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-env-changed=CC");
    let compiler = env::var_os("CC").unwrap_or_else(|| "cc".into());
    let directory = env::var_os("OUT_DIR").ok_or("cargo has not set OUT_DIR")?;
    for name in NAMES {
        let source = format!("plugin/{name}.c");
        println!("cargo::rerun-if-changed={source}");
        let mut command = Command::new(&compiler);
        command.args(["-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-fvisibility=hidden", "-o"]);
        command.arg(Path::new(&directory).join(format!("{name}.so"))).arg(&source);
        let status = command.status().map_err(|error| {
            format!("cannot start the C compiler {}: {error}", compiler.display())
        })?;
        if !status.success() {
            return Err(format!("{} cannot compile {source}: {status}", compiler.display()).into());
        }
    }
    Ok(())
}

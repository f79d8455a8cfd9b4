//! Compiles the plugin that QEMU loads (`plugin/translations.c`), with the C compiler that links
//! Rust programs, too.

use std::env;
use std::error::Error;
use std::path::Path;
use std::process::Command;

const SOURCE: &str = "plugin/translations.c";

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed={SOURCE}");
    println!("cargo::rerun-if-env-changed=CC");
    let compiler = env::var_os("CC").unwrap_or_else(|| "cc".into());
    let directory = env::var_os("OUT_DIR").ok_or("cargo has not set OUT_DIR")?;
    let mut command = Command::new(&compiler);
    command.args(["-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-fvisibility=hidden", "-o"]);
    command.arg(Path::new(&directory).join("translations.so")).arg(SOURCE);
    let status = command
        .status()
        .map_err(|error| format!("cannot start the C compiler {}: {error}", compiler.display()))?;
    if status.success() {
        return Ok(());
    }
    Err(format!("{} cannot compile {SOURCE}: {status}", compiler.display()).into())
}

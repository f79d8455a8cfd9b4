//! Compiles the plugin that QEMU loads (`plugin/translations.c`), with the C compiler that links
//! Rust programs, too.

use std::env;
use std::path::Path;
use std::process::Command;

const SOURCE: &str = "plugin/translations.c";

fn main() {
    println!("cargo::rerun-if-changed={SOURCE}");
    println!("cargo::rerun-if-env-changed=CC");
    let compiler = env::var_os("CC").unwrap_or_else(|| "cc".into());
    let directory = env::var_os("OUT_DIR").expect("cargo sets OUT_DIR for build scripts");
    let output = Path::new(&directory).join("translations.so");
    let mut command = Command::new(&compiler);
    command.args(["-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-fvisibility=hidden", "-o"]);
    let status = command.arg(&output).arg(SOURCE).status();
    match status {
        Ok(status) if status.success() => {}
        Ok(status) => panic!("{} {SOURCE}: {status}", compiler.display()),
        Err(error) => panic!("cannot start the C compiler {}: {error}", compiler.display()),
    }
}

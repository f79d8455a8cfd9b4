//! `ebb extract-vmlinux`: extracts the ELF kernel from a bzImage.

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use ebb_program::write_whole;
use ebb_vmlinux::extract_vmlinux;

/// Extract the ELF kernel (vmlinux) from a bzImage (gzip, xz, LZ4 or zstd).
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The bzImage, such as /boot/vmlinuz-6.1.0-56-cloud-amd64.
    #[arg(value_name = "IN")]
    input: PathBuf,
    /// File to write.
    #[arg(value_name = "OUT")]
    output: PathBuf,
    /// Print path and size of the kernel as JSON.
    #[arg(long)]
    json: bool,
}

/// Writes the kernel; the file gets its name only when it is complete.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let Args { input, output, json } = args;
    let image = fs::read(&input).with_context(|| format!("cannot read {}", input.display()))?;
    let kernel = extract_vmlinux(&image).with_context(|| format!("{}", input.display()))?;
    write_whole(&output, |writer| Ok(writer.write_all(&kernel)?))?;
    if json {
        println!("{}", serde_json::json!({ "path": output, "size_bytes": kernel.len() }));
    }
    Ok(ExitCode::SUCCESS)
}

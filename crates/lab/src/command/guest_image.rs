//! `ebb-lab guest-image`: writes the initramfs of a test guest.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use ebb_program::write_whole;
use ebb_virtual_host::balloon_module;
use ebb_virtual_host::guest_image::{GuestImage, build};
use ebb_virtual_host::kernel::Kernel;
use ebb_virtual_host::programs::find_agent;
use ebb_virtual_host::{HostFile, Inclusion};

/// Write an initramfs for test guests: the guest agent as init, and the virtio modules.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// File to write.
    #[arg(long, value_name = "PATH")]
    out: PathBuf,
    /// Include Debian's memhog (package numactl).
    #[arg(long)]
    memhog: bool,
    /// Load another module after the standard ones, with parameters after a space; repeat for more.
    #[arg(long, value_name = "NAME [PARAMETERS]")]
    module: Vec<String>,
    /// Ebb's balloon driver for guests (default: EBB_BALLOON_MODULE, else the module that
    /// `make module` has built for the kernel).
    #[arg(long, value_name = "PATH")]
    balloon_module: Option<PathBuf>,
    /// Include a file; repeat for more.
    #[arg(long, value_name = "SOURCE:TARGET")]
    add: Vec<HostFile>,
    /// Release of the kernel whose modules are used (default: EBB_KERNEL, else the newest cloud
    /// kernel in /boot).
    #[arg(long, value_name = "RELEASE")]
    kernel_version: Option<String>,
    /// The guest agent (default: EBB_AGENT, else ebb-agent beside this program).
    #[arg(long, value_name = "PATH")]
    agent: Option<PathBuf>,
    /// Print one JSON document with the path and size of the image.
    #[arg(long)]
    json: bool,
}

/// Writes the image; the file gets its name only when it is complete.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let kernel = match &args.kernel_version {
        Some(release) => Kernel::of_release(release)?,
        None => Kernel::find(None)?,
    };
    let agent = find_agent(args.agent.as_deref()).context(
        "no guest agent: build it with `cargo build -p ebb-agent`, or name it with --agent or in \
         EBB_AGENT",
    )?;
    let mut image = GuestImage::new(agent, kernel);
    image.modules = args.module;
    image.files = args.add;
    image.balloon_module =
        balloon_module::find(args.balloon_module.as_deref(), &image.kernel.release);
    if image.balloon_module.is_none() {
        tracing::warn!(
            "no ebb_balloon.ko was built (`make module`): the guest has the stock balloon driver \
             only"
        );
    }
    image.memhog = if args.memhog { Inclusion::Included } else { Inclusion::Excluded };

    let size_bytes = write_whole(&args.out, |writer| Ok(build(&image, writer).map(drop)?))?;
    if args.json {
        let release = &image.kernel.release;
        println!(
            "{}",
            serde_json::json!({ "path": args.out, "size_bytes": size_bytes, "kernel": release })
        );
    } else {
        println!(
            "{}: {} KiB, kernel {}",
            args.out.display(),
            size_bytes / 1024,
            image.kernel.release
        );
    }
    Ok(ExitCode::SUCCESS)
}

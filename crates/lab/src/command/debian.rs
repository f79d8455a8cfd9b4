//! `ebb-lab debian`: root file systems made of Debian's packages, and a guest kernel of its
//! sources.

use std::process::ExitCode;

use clap::ValueEnum;
use ebb_virtual_host::cache::Cache;
use ebb_virtual_host::debian::{Root, guest_kernel, root};

const AFTER_HELP: &str = "\
Examples:
  ebb-lab debian guest-root        # a guest's root file system with systemd, an ext4 image
  ebb-lab debian work-root         # with a C compiler and Python's tests: for `park` and `clones`
  ebb-lab debian guest-kernel      # its kernel: ebb run --kernel VMLINUX --disk path=COPY ...
  ebb-lab virtual-host --root $(ebb-lab debian host-root) -- python3 --version";

/// Make Debian root file systems and a guest kernel, or show them in the cache.
///
/// Root file systems are made as root with mmdebstrap (a minute), the kernel is compiled from the
/// package linux-source (minutes on two cores). Do not write to these files: copy an image first.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER_HELP, after_long_help = AFTER_HELP)]
pub struct Args {
    /// What to make.
    #[arg(value_name = "WHAT")]
    what: What,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum What {
    /// A guest with systemd, ssh, Python, socat, iperf3 and fio.
    GuestRoot,
    /// A guest with systemd, a C compiler with a source, and Python with its tests.
    WorkRoot,
    /// A virtual host with clients of Firecracker's API, passt and ssh.
    HostRoot,
    /// A kernel with all drivers of a guest built in: as ELF, and as bzImage.
    GuestKernel,
}

/// Prints the paths, one in a line.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let cache = Cache::of_user();
    match args.what {
        What::GuestRoot => println!("{}", root(&Root::GUEST, &cache)?.display()),
        What::WorkRoot => println!("{}", root(&Root::WORK, &cache)?.display()),
        What::HostRoot => println!("{}", root(&Root::HOST, &cache)?.display()),
        What::GuestKernel => {
            let kernel = guest_kernel(&cache)?;
            println!("{}\n{}", kernel.vmlinux.display(), kernel.bzimage.display());
        }
    }
    Ok(ExitCode::SUCCESS)
}

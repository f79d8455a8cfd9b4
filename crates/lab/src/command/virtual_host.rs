//! `ebb-lab virtual-host`: runs a command in a complete KVM host of its own.

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context;
use ebb_virtual_host::{
    Command, ExitStatus, HostConfig, HostError, HostFile, HostKernel, Inclusion, NodeConfig,
    Output, VirtualHost, parse_duration, parse_size_mib,
};

/// Exit code that a shell reports for a program killed by SIGPIPE.
const BROKEN_PIPE_CODE: i32 = 141;

const INSIDE: &str = "\
Inside the virtual host:
  /bin/ebb          the monitor; /dev/kvm is a genuine KVM with nested paging
  /ebb/vmlinuz      kernel for guests (bzImage), /ebb/vmlinux the same as ELF
  /ebb/guest.cpio   initramfs of test guests with the guest agent as init
  /ebb/ebb-agent    the guest agent
  /bin/*            busybox with all of its programs, /bin/sh among them
  /tmp, /dev/shm    memory; /dev/hugepages takes 2 MiB pages (--huge-pages)
With --root, all of this is below /initramfs, and the image's programs are in their places.
Programs get an empty standard input. The file system is discarded when the command ends.

Examples:
  ebb-lab virtual-host -- uname -a
  ebb-lab virtual-host --memory 3G --swap 1G -- sh -c 'free -m; ls -l /dev/kvm'
  ebb-lab virtual-host --node size=1G,cpus=0 --node size=1G,cpus=1 -- ls /sys/devices/system/node
  ebb-lab virtual-host --host-kernel newest --nodes 4 -- uname -r";

/// Run a command in a KVM host that works on any machine (QEMU with nested SVM).
#[derive(Debug, clap::Args)]
#[command(after_help = INSIDE, after_long_help = INSIDE)]
pub struct Args {
    /// Memory of the host (K, M, G, T).
    #[arg(
        long,
        value_parser = parse_size_mib,
        default_value = "2G",
        value_name = "SIZE",
        conflicts_with = "node"
    )]
    memory: u64,
    /// Processors of the host.
    #[arg(long, default_value_t = 2, value_name = "NUMBER")]
    cpus: u32,
    /// NUMA node, such as `size=1G,cpus=0-1`; repeat for more. Replaces --memory.
    #[arg(long, value_name = "size=SIZE[,cpus=FIRST-LAST]")]
    node: Vec<NodeConfig>,
    /// Number of NUMA nodes, which share memory and processors evenly.
    #[arg(
        long,
        value_name = "NUMBER",
        conflicts_with = "node",
        value_parser = clap::value_parser!(u32).range(1..=64)
    )]
    nodes: Option<u32>,
    /// Swap of the host; an unnamed sparse file on this machine.
    #[arg(long, value_parser = parse_size_mib, default_value = "0", value_name = "SIZE")]
    swap: u64,
    /// Huge pages of 2 MiB to reserve inside.
    #[arg(long, default_value_t = 0, value_name = "NUMBER")]
    huge_pages: u64,
    /// Put a file of this machine into the host; repeat for more.
    #[arg(long, value_name = "SOURCE:TARGET")]
    add: Vec<HostFile>,
    /// Image of an ext4 file system to use as root; changes are discarded.
    #[arg(long, value_name = "PATH")]
    root: Option<PathBuf>,
    /// Attach a raw image as a disk, after swap and root; changes are discarded. Repeat for more.
    #[arg(long, value_name = "PATH")]
    disk: Vec<PathBuf>,
    /// Put an executable with its libraries into the host at its own path; repeat for more.
    #[arg(long, value_name = "PATH")]
    add_program: Vec<PathBuf>,
    /// Put Debian's memhog into the host and into the test guests' initramfs.
    #[arg(long)]
    memhog: bool,
    /// Put QEMU with its firmware into the host, for comparison.
    #[arg(long)]
    qemu: bool,
    /// Copy a file out of the host after the command; repeat for more.
    #[arg(long, value_name = "INSIDE:TARGET", value_parser = parse_fetch)]
    fetch: Vec<(String, PathBuf)>,
    /// Time limit for the whole run, such as 90s or 10m.
    #[arg(long, value_parser = parse_duration, default_value = "10m", value_name = "TIME")]
    time_limit: Duration,
    /// Kernel of guests, and of the host too unless --host-kernel is given (default: EBB_KERNEL,
    /// else the newest /boot/vmlinuz-*-cloud-amd64).
    #[arg(long, value_name = "PATH")]
    kernel: Option<PathBuf>,
    /// Kernel of the host: `guests` for that of the guests, `newest` for EBB_HOST_KERNEL or else
    /// the newest in /var/lib/ebb/kernels, or the path of an image.
    #[arg(long, value_name = "guests|newest|PATH", default_value = "guests")]
    host_kernel: HostKernel,
    /// Further arguments for the kernel of the host.
    #[arg(long, default_value = "", value_name = "TEXT")]
    kernel_arguments: String,
    /// Print one JSON document with the command's output, exit code and times.
    #[arg(long)]
    json: bool,
    /// Command to run inside, with its arguments.
    #[arg(trailing_var_arg = true, value_name = "COMMAND")]
    command: Vec<String>,
}

/// Runs the command; its exit code becomes this program's.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let Some((program, arguments)) = args.command.split_first() else {
        println!("{INSIDE}\n\nSee also: ebb-lab virtual-host --help");
        return Ok(ExitCode::SUCCESS);
    };
    let command = Command::new(program).args(arguments);
    let started = Instant::now();
    let host = VirtualHost::start(&HostConfig {
        memory_mib: args.memory,
        cpus: args.cpus,
        nodes: match args.nodes {
            Some(nodes) => NodeConfig::even(nodes, args.memory, args.cpus),
            None => args.node,
        },
        swap_mib: args.swap,
        huge_pages: args.huge_pages,
        root: args.root,
        disks: args.disk,
        files: args.add,
        programs: args.add_program,
        time_limit: args.time_limit,
        kernel: args.kernel,
        host_kernel: args.host_kernel,
        kernel_arguments: args.kernel_arguments,
        memhog: inclusion(args.memhog),
        qemu: inclusion(args.qemu),
        ..HostConfig::default()
    })?;
    for warning in &host.hello().warnings {
        tracing::warn!("virtual host: {warning}");
    }
    let boot_ms = started.elapsed().as_millis() as u64;
    tracing::info!(boot_ms, kernel = host.hello().kernel, "virtual host is ready");

    let (status, document) = if args.json {
        let captured = host.output(&command)?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let document = serde_json::json!({
            "command": args.command,
            "exit": captured.status,
            "stdout": text(&captured.stdout),
            "stderr": text(&captured.stderr),
            "kernel": host.hello().kernel,
            "boot_ms": boot_ms,
            "elapsed_ms": started.elapsed().as_millis() as u64,
        });
        (captured.status, Some(document))
    } else {
        (run_live(&host, &command)?, None)
    };
    for (inside, target) in &args.fetch {
        host.get_file(inside, target)
            .with_context(|| format!("cannot fetch {inside} to {}", target.display()))?;
    }
    // The command has ended: a host that does not power off by itself is killed, which is not a
    // failure.
    if let Err(error) = host.shutdown() {
        tracing::debug!(%error, "shutdown");
    }
    if let Some(document) = document {
        println!("{document:#}");
    }
    Ok(ExitCode::from(u8::try_from(status.shell_code()).unwrap_or(1)))
}

fn run_live(host: &VirtualHost, command: &Command) -> Result<ExitStatus, HostError> {
    let mut failed = None;
    let status = host.run(command, &mut |output| {
        let result = match output {
            Output::Stdout(bytes) => write_now(io::stdout(), bytes),
            Output::Stderr(bytes) => write_now(io::stderr(), bytes),
        };
        match result {
            // A reader such as `head` has closed the pipe: end as by SIGPIPE; QEMU ends with this
            // process.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
                std::process::exit(BROKEN_PIPE_CODE)
            }
            Err(error) => {
                failed.get_or_insert(error);
            }
            Ok(()) => {}
        }
    })?;
    match failed {
        Some(error) => {
            Err(HostError::Io { what: "cannot write the command's output".to_owned(), error })
        }
        None => Ok(status),
    }
}

fn write_now(mut stream: impl Write, bytes: &[u8]) -> io::Result<()> {
    stream.write_all(bytes)?;
    stream.flush()
}

fn inclusion(wanted: bool) -> Inclusion {
    if wanted { Inclusion::Included } else { Inclusion::Excluded }
}

fn parse_fetch(text: &str) -> Result<(String, PathBuf), String> {
    match text.split_once(':') {
        Some((inside, target)) if inside.starts_with('/') && !target.is_empty() => {
            Ok((inside.to_owned(), target.into()))
        }
        _ => Err("expected INSIDE:TARGET with an absolute path INSIDE".to_owned()),
    }
}

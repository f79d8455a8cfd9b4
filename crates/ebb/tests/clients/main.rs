//! Ebb with programs that its makers did not write: a Debian guest with systemd, ssh and socat,
//! passt in a Debian host, and three clients of Firecracker's API from PyPI, unmodified.
//!
//! All of it runs in one virtual host whose root file system is made of Debian's packages
//! (`ebb_virtual_host::debian`), with the same kernel for all guests. The first run makes both root
//! file systems and compiles the kernel, which takes minutes; then they are in the cache. So they
//! run with `--ignored` only: `make test-clients`, as root.
//!
//! The agent for `ebb exec` is a separate program: run `cargo build -p ebb-guest-agent` first.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ebb_virtual_host::cache::Cache;
use ebb_virtual_host::debian::{Root, guest_kernel, root};
use ebb_virtual_host::{Command, HostConfig, HostError, HostFile, Output, VirtualHost};
use libtest_mimic::{Arguments, Failed, Trial};

/// Name, script, interpreter and time limit in seconds.
const TESTS: [(&str, &str, &str, u64); 4] = [
    ("debian", "debian.sh", "sh", 240),
    ("microheart", "microheart_client.py", PYTHON, 240),
    ("firecracker_python", "firecracker_client.py", PYTHON, 240),
    ("smolvm", "smolvm_client.py", PYTHON, 240),
];
/// Python's virtual environment with the clients.
const PYTHON: &str = "/opt/python/bin/python";
/// Where the scripts are in the virtual host.
const SCRIPTS: &str = "/srv/tests";
/// Memory of the virtual host: two guests of 512 MiB at once, and the programs around them.
const MEMORY_MIB: u64 = 3072;
const BOOT_LIMIT: Duration = Duration::from_secs(180);
const PREPARE_LIMIT: Duration = Duration::from_secs(120);
const HOST_LIMIT: Duration = Duration::from_secs(1500);

/// The virtual host, started by the first test that runs.
type Shared = Arc<Mutex<Option<VirtualHost>>>;

fn main() -> ExitCode {
    if std::process::id() == 1 {
        ebb_virtual_host::inside::init_main();
    }
    let mut arguments = Arguments::from_args();
    // Guests in an emulated host would only take each other's time.
    arguments.test_threads = Some(1);
    let shared = Shared::default();
    let trials = TESTS.map(|(name, script, interpreter, limit_s)| {
        let shared = shared.clone();
        Trial::test(name, move || run(&shared, script, interpreter, Duration::from_secs(limit_s)))
            .with_ignored_flag(true)
    });
    libtest_mimic::run(&arguments, trials.into()).exit_code()
}

fn run(shared: &Shared, script: &str, interpreter: &str, limit: Duration) -> Result<(), Failed> {
    let mut host = shared.lock().unwrap_or_else(PoisonError::into_inner);
    let host = match &mut *host {
        Some(host) => host,
        none => none.insert(start()?),
    };
    execute(host, interpreter, script, limit)
}

/// Starts the virtual host, and prepares it.
fn start() -> Result<VirtualHost, Failed> {
    let cache = Cache::of_user();
    let kernel = guest_kernel(&cache)?;
    let guest = root(&Root::GUEST, &cache)?;
    let in_srv = |source: PathBuf, name: &str| HostFile {
        source,
        target: Path::new("/srv").join(name),
        mode: None,
    };
    let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients");
    let mut files = vec![
        in_srv(kernel.vmlinux, "vmlinux"),
        in_srv(kernel.bzimage, "bzImage"),
        in_srv(agent()?, "ebb-guest-agent"),
        in_srv(
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../guest/exec/ebb-guest-agent.service"),
            "ebb-guest-agent.service",
        ),
    ];
    for name in ["prepare.sh", "services.py"].into_iter().chain(TESTS.map(|test| test.1)) {
        files.push(in_srv(scripts.join(name), &format!("tests/{name}")));
    }
    let started = Instant::now();
    let host = VirtualHost::start(&HostConfig {
        memory_mib: MEMORY_MIB,
        root: Some(root(&Root::HOST, &cache)?),
        disks: vec![guest],
        files,
        time_limit: HOST_LIMIT,
        boot_limit: BOOT_LIMIT,
        monitor: Some(env!("CARGO_BIN_EXE_ebb").into()),
        ..HostConfig::default()
    })?;
    execute(&host, "sh", "prepare.sh", PREPARE_LIMIT)?;
    eprintln!("clients: the virtual host was ready after {} s", started.elapsed().as_secs());
    Ok(host)
}

/// The agent of `ebb exec`, beside this program or one directory above.
fn agent() -> Result<PathBuf, Failed> {
    let program = std::env::current_exe()?;
    let mut directories = program.ancestors().skip(1).take(2);
    let found = directories.find_map(|directory| {
        Some(directory.join("ebb-guest-agent")).filter(|path| path.is_file())
    });
    found.ok_or_else(|| "no ebb-guest-agent: run `cargo build -p ebb-guest-agent` first".into())
}

/// Runs a script to its end. Its output is shown, with the host's last words if it fails.
fn execute(
    host: &VirtualHost,
    interpreter: &str,
    script: &str,
    limit: Duration,
) -> Result<(), Failed> {
    let command = Command::new(interpreter)
        .args([format!("/initramfs{SCRIPTS}/{script}")])
        .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
        .env("PYTHONUNBUFFERED", "1")
        .time_limit(limit);
    let mut text = Vec::new();
    let status = host.run(&command, &mut |output| {
        let (Output::Stdout(bytes) | Output::Stderr(bytes)) = output;
        text.extend_from_slice(bytes);
    });
    let _ = io::stderr().write_all(&text);
    match status {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{script} ended with {}", status.shell_code()).into()),
        Err(HostError::CommandTimeLimit { .. }) => {
            let console = host.console_lines().join("\n");
            Err(format!("{script} took longer than {} s\n{console}", limit.as_secs()).into())
        }
        Err(error) => Err(error.into()),
    }
}

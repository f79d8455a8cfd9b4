//! Selects where the tests run: on this machine, or in a virtual host that is started for them.

use std::collections::VecDeque;
use std::env;
use std::fmt::Display;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use ebb_virtual_host::guest_image::{self, GuestImage};
use ebb_virtual_host::kernel::Kernel;
use ebb_virtual_host::programs::AGENT_VARIABLE;
use ebb_virtual_host::{
    Command, HostConfig, HostError, HostFile, HostKernel, NodeConfig, Output, VirtualHost,
};
use ebb_vmm::probe::probe;
use tempfile::TempDir;

use crate::harness::{
    Machine, Needs, RUN_VARIABLE, TestEnd, TestResult, World, counts, is_long, results, slowest,
};
use crate::trace::Trace;

/// What the host's kernel says of a timer of the emulator that has not fired (Linux's
/// kernel/rcu/tree_stall.h).
const LOST_TIMER: &str = "timer wakeup didn't happen";
/// Environment variable that is set in the virtual host.
const INSIDE: &str = "EBB_GUEST_TESTS_INSIDE";
/// Environment variable with the comma-separated names of the tests to run in the virtual host.
const ONLY: &str = "EBB_GUEST_TESTS_ONLY";
/// File for the results of the tests in the virtual host.
const RESULTS_INSIDE: &str = "/tmp/results.json";
/// Environment variable for the kernel image of virtual hosts, instead of the guests' kernel.
const HOST_KERNEL_VARIABLE: &str = "EBB_GUEST_TESTS_HOST_KERNEL";
/// Environment variable for a file for the results of a run, with date and commit.
const RESULTS_VARIABLE: &str = "EBB_TEST_RESULTS";
/// Number of slowest tests that are listed with their time.
const SLOWEST: usize = 10;
/// Environment variable for the number of virtual hosts; by default set by processors and memory.
const HOSTS: &str = "EBB_GUEST_TESTS_HOSTS";
/// Maximum number of hosts: more are not worth their start.
const MOST_HOSTS: usize = 4;
/// Minimum number of tests that are distributed over hosts.
const LEAST_TO_SHARE: usize = 8;
/// Memory for each host: its own and the emulator's overhead.
const HOST_NEEDS_MIB: usize = 5 << 10;
/// Divisor of the hosts' clock. The emulated processors need it to get to work between two ticks,
/// but what waits in a test takes that many times as long.
const CLOCK_DIVISOR: u32 = 2;
/// Maximum number of failed tests to repeat; more failures are no coincidence.
const MOST_TRIED_AGAIN: usize = 6;
/// Paths of this program and of its images in the virtual host.
const PROGRAM_INSIDE: &str = "/init";
const INITRD_INSIDE: &str = "/opt/guest.cpio";
const HOSTILE_INITRD_INSIDE: &str = "/opt/hostile.cpio";
const PLANTED_INSIDE: &str = "/opt/ebb-planted-bug";
/// Path of this program in a guest of the hostile image.
pub const PROGRAM_IN_GUEST: &str = "/bin/guests";
/// Path of the agent for `ebb exec` there.
pub const GUEST_AGENT: &str = "/bin/ebb-guest-agent";
/// Static busybox, as Debian installs it.
const BUSYBOX: &str = "/bin/busybox";
/// Modules in addition to the standard ones: the power button, its input device, the panic
/// notifier, the network and sockets of the host.
const MODULES: [&str; 5] =
    ["button", "evdev", "pvpanic-mmio", "virtio_net", "vmw_vsock_virtio_transport"];
/// Time limit for a hanging host; all tests take half an hour on an idle machine.
const HOST_LIMIT: Duration = Duration::from_secs(100 * 60);
/// Time limit for a hanging host in a long run.
const LONG_HOST_LIMIT: Duration = Duration::from_secs(6 * 3600);

/// Place to run the tests.
pub enum Place {
    /// On this machine, with the directory of the guests' files unless they are permanent.
    Here(World, Option<TempDir>),
    /// In a virtual host.
    VirtualHost(Outside),
}

/// Configuration of the virtual hosts.
pub struct Outside {
    files: TempDir,
}

/// Selects the place by running a loop on KVM, and prepares the guests' files.
pub fn choose() -> Result<Place, String> {
    if env::var_os(INSIDE).is_some() {
        let trace = Trace::start()
            .inspect_err(|problem| eprintln!("guests: no trace of KVM: {problem}"))
            .ok();
        let world = World {
            machine: Machine::Emulated(trace),
            ebb: "/bin/ebb".into(),
            planted_ebb: PLANTED_INSIDE.into(),
            bzimage: "/ebb/vmlinuz".into(),
            vmlinux: "/ebb/vmlinux".into(),
            initrd: INITRD_INSIDE.into(),
            hostile_initrd: HOSTILE_INITRD_INSIDE.into(),
            busybox: BUSYBOX.into(),
        };
        return Ok(Place::Here(world, None));
    }
    let agent = beside("ebb-agent", Some(AGENT_VARIABLE))?;
    let kernel = Kernel::find(None).map_err(text)?;
    let files = tempfile::Builder::new().prefix("ebb-guests-").tempdir().map_err(text)?;
    let path = |name: &str| files.path().join(name);
    write_image(&agent, &kernel, &[], &path("guest.cpio"))?;
    let program = file(env::current_exe().map_err(text)?, PROGRAM_IN_GUEST);
    let guest_agent = file(beside("ebb-guest-agent", None)?, GUEST_AGENT);
    write_image(&agent, &kernel, &[program, guest_agent], &path("hostile.cpio"))?;

    let probed = probe();
    if !probed.quality.runs_linux() || !probed.missing_capabilities.is_empty() {
        return Ok(Place::VirtualHost(Outside { files }));
    }
    let vmlinux =
        ebb_virtual_host::vmlinux(&kernel.image, &ebb_virtual_host::cache::Cache::of_user())
            .map_err(text)?;
    std::fs::write(path("vmlinux"), vmlinux).map_err(text)?;
    let world = World {
        machine: Machine::Real,
        ebb: env!("CARGO_BIN_EXE_ebb").into(),
        planted_ebb: planted_ebb(),
        bzimage: kernel.image,
        vmlinux: path("vmlinux"),
        initrd: path("guest.cpio"),
        hostile_initrd: path("hostile.cpio"),
        busybox: BUSYBOX.into(),
    };
    Ok(Place::Here(world, Some(files)))
}

/// Names of the tests to which the run is limited, if any.
pub fn only() -> Option<Vec<String>> {
    let names = env::var(ONLY).ok()?;
    Some(names.split(',').map(str::to_owned).collect())
}

/// Writes the results of a run to the file that [`Outside`] reads, or reports them if this is the
/// outer program.
pub fn leave_results() -> Result<(), String> {
    if env::var_os(INSIDE).is_none() {
        return report(&results());
    }
    let document = serde_json::to_vec(&results()).map_err(text)?;
    std::fs::write(RESULTS_INSIDE, document)
        .map_err(|error| format!("cannot write {RESULTS_INSIDE}: {error}"))
}

/// Prints the slowest tests, and writes all results to the file that [`RESULTS_VARIABLE`] names.
fn report(results: &[TestResult]) -> Result<(), String> {
    println!("guests: slowest: {}", slowest(results, SLOWEST));
    let Some(path) = env::var_os(RESULTS_VARIABLE) else { return Ok(()) };
    let output = |program: &str, arguments: &[&str]| -> Result<String, String> {
        let output = std::process::Command::new(program).args(arguments).output().map_err(text)?;
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let document = serde_json::json!({
        "run": if is_long() { "long" } else { "short" },
        "date": output("date", &["-u", "+%F"])?,
        "commit": output("git", &["rev-parse", "HEAD"])?,
        "tests": results,
    });
    std::fs::write(&path, format!("{document:#}\n"))
        .map_err(|error| format!("cannot write {}: {error}", path.display()))
}

fn text(error: impl Display) -> String {
    error.to_string()
}

fn file(source: PathBuf, target: &str) -> HostFile {
    HostFile { source, target: target.into(), mode: Some(0o755) }
}

/// A program in the directory of `ebb`, where cargo puts all, or the one that a variable names.
fn beside(name: &str, variable: Option<&str>) -> Result<PathBuf, String> {
    let beside = Path::new(env!("CARGO_BIN_EXE_ebb")).with_file_name(name);
    let chosen = variable.and_then(env::var_os).map_or(beside, PathBuf::from);
    if chosen.is_file() {
        return Ok(chosen);
    }
    Err(format!(
        "there is no {name} at {}; build it with `cargo build -p {name}` (with --release if the \
         tests are)",
        chosen.display()
    ))
}

/// The monitor with a planted bug, which is no part of an ordinary build. It may be missing: only
/// its test fails then.
fn planted_ebb() -> PathBuf {
    Path::new(env!("CARGO_BIN_EXE_ebb")).with_file_name("ebb-planted-bug")
}

fn write_image(
    agent: &Path,
    kernel: &Kernel,
    files: &[HostFile],
    path: &Path,
) -> Result<(), String> {
    let mut image = GuestImage::new(agent.to_owned(), kernel.clone());
    image.modules = MODULES.map(str::to_owned).to_vec();
    image.files = [files, &[file(BUSYBOX.into(), BUSYBOX)]].concat();
    let output = std::fs::File::create(path).map_err(text)?;
    guest_image::build(&image, BufWriter::new(output)).map_err(text)?.flush().map_err(text)
}

/// Reason why the tests have no result.
enum Failure {
    /// The virtual host ended by itself, or did not boot because the emulator lost a timer.
    HostEnded(String),
    /// Another error.
    Other(String),
}

impl From<HostError> for Failure {
    fn from(error: HostError) -> Self {
        match &error {
            HostError::Ended { .. } => Self::HostEnded(error.to_string()),
            HostError::BootTimeout { console, .. } if console.contains(LOST_TIMER) => {
                Self::HostEnded(error.to_string())
            }
            _ => Self::Other(error.to_string()),
        }
    }
}

impl From<String> for Failure {
    fn from(problem: String) -> Self {
        Self::Other(problem)
    }
}

/// Outcome of the tests in a virtual host.
struct Outcome {
    /// Exit code of the program in the host.
    code: u8,
    /// Results of the tests.
    results: Vec<TestResult>,
}

impl Outcome {
    /// Combines the outcomes of several hosts.
    fn of_all(outcomes: Vec<Self>) -> Self {
        Self {
            code: outcomes.iter().map(|outcome| outcome.code).max().unwrap_or(0),
            results: outcomes.into_iter().flat_map(|outcome| outcome.results).collect(),
        }
    }

    /// Names of the failed tests.
    fn failed(&self) -> Vec<String> {
        let failed = self.results.iter().filter(|result| result.end != TestEnd::Passed);
        failed.map(|result| result.name.clone()).collect()
    }

    /// Names of the failed tests if they may be repeated: few, and each with a sign that the
    /// emulated host was at fault.
    fn to_try_again(&self) -> Vec<String> {
        let failed = self.failed();
        let excused = self.results.iter().all(|result| result.end != TestEnd::Failed);
        if excused && failed.len() <= MOST_TRIED_AGAIN { failed } else { Vec::new() }
    }
}

/// Number of virtual hosts for the tests. A test uses little more than one processor.
fn hosts(tests: usize) -> usize {
    if let Some(number) = env::var(HOSTS).ok().and_then(|text| text.parse().ok()) {
        return usize::max(number, 1).min(tests);
    }
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let memory_mib = available_memory_mib().unwrap_or(0) / HOST_NEEDS_MIB;
    if tests < LEAST_TO_SHARE { 1 } else { processors.min(memory_mib).clamp(1, MOST_HOSTS) }
}

/// `MemAvailable` of this machine.
fn available_memory_mib() -> Option<usize> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.split_ascii_whitespace().next()?.parse::<usize>().ok()? / 1024)
}

impl Outside {
    /// Runs this program with the same arguments in a virtual host, or in several that share the
    /// tests.
    ///
    /// The host's virtualization is emulated, and emulators have broken guests under any monitor
    /// (CONTRIBUTING.md). Therefore a few tests that failed with a sign of that are repeated in a
    /// new virtual host, after their first failure was printed in full. A test that fails without
    /// such a sign, or twice, has failed.
    pub fn run_again(&self, names: &[&str]) -> ExitCode {
        let outcome = self.run_shared(names).and_then(|mut first| {
            let names = first.to_try_again();
            if names.is_empty() {
                return Ok(first);
            }
            println!("guests: once more, in a new virtual host: {}", names.join(", "));
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            let again = self.run_shared(&names)?;
            println!(
                "guests: failed at first: {}; failed again: {}",
                names.join(", "),
                if again.failed().is_empty() {
                    "none".to_owned()
                } else {
                    again.failed().join(", ")
                }
            );
            first.results.retain(|result| !names.contains(&result.name.as_str()));
            Ok(Outcome { code: again.code, results: [first.results, again.results].concat() })
        });
        let outcome = match outcome {
            Ok(outcome) => outcome,
            Err(Failure::HostEnded(problem) | Failure::Other(problem)) => {
                eprintln!("guests: {problem}");
                return ExitCode::FAILURE;
            }
        };
        match report(&outcome.results) {
            Ok(()) => ExitCode::from(outcome.code),
            Err(problem) => {
                eprintln!("guests: {problem}");
                ExitCode::FAILURE
            }
        }
    }

    /// Runs the tests in concurrent virtual hosts: first those without requirements on the kernel,
    /// in hosts with the guests' kernel, which most users' machines have, unless a variable names
    /// another; then the others, in hosts with a newer kernel.
    fn run_shared(&self, names: &[&str]) -> Result<Outcome, Failure> {
        let hosts = hosts(names.len());
        let usual = env::var_os(HOST_KERNEL_VARIABLE)
            .map_or(HostKernel::OfGuests, |image| HostKernel::At(image.into()));
        let queues = [(Needs::AnyKernel, usual), (Needs::Merging, HostKernel::Newest)].map(
            |(needs, kernel)| {
                let names = names.iter().filter(|name| Needs::of(name) == needs);
                (kernel, Queue::new(names.map(|name| (*name).to_owned()).collect(), hosts))
            },
        );
        let queues = &queues;
        let outcomes = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..hosts)
                .map(|number| {
                    scope.spawn(move || {
                        let runs = queues
                            .iter()
                            .map(|(kernel, queue)| self.run_from(queue, number, kernel));
                        runs.collect::<Result<Vec<_>, _>>().map(Outcome::of_all)
                    })
                })
                .collect();
            let join = |thread: std::thread::ScopedJoinHandle<'_, _>| {
                thread
                    .join()
                    .unwrap_or_else(|_| Err(Failure::Other("a thread has panicked".to_owned())))
            };
            threads.into_iter().map(join).collect::<Result<Vec<_>, _>>()
        })?;
        Ok(Outcome::of_all(outcomes))
    }

    /// Runs tests of the queue in virtual host number `number` until none is left.
    fn run_from(
        &self,
        queue: &Queue,
        number: usize,
        kernel: &HostKernel,
    ) -> Result<Outcome, Failure> {
        let mut outcomes = Vec::new();
        let mut host = None;
        while let Some(names) = queue.take() {
            let mut run = || {
                let host = match &mut host {
                    Some(host) => host,
                    none => none.insert(self.start(kernel)?),
                };
                self.run(host, number, &names)
            };
            outcomes.push(match run() {
                Err(Failure::HostEnded(problem)) => {
                    eprintln!(
                        "guests: {problem}\nguests: its tests once more, in a new virtual host"
                    );
                    host = None;
                    let host = host.insert(self.start(kernel)?);
                    self.run(host, number, &names)?
                }
                result => result?,
            });
        }
        if let Some(host) = host {
            host.shutdown()?;
        }
        Ok(Outcome::of_all(outcomes))
    }

    /// Starts a virtual host.
    fn start(&self, kernel: &HostKernel) -> Result<VirtualHost, Failure> {
        let image = |name: &str, target: &str| HostFile {
            source: self.files.path().join(name),
            target: target.into(),
            mode: Some(0o644),
        };
        let mut files =
            vec![image("guest.cpio", INITRD_INSIDE), image("hostile.cpio", HOSTILE_INITRD_INSIDE)];
        files.extend(
            Some(planted_ebb())
                .filter(|path| path.is_file())
                .map(|path| file(path, PLANTED_INSIDE)),
        );
        Ok(VirtualHost::start(&HostConfig {
            cpus: 2,
            nodes: vec![
                NodeConfig { memory_mib: 2304, cpus: Some(0..=0) },
                NodeConfig { memory_mib: 1920, cpus: Some(1..=1) },
            ],
            swap_mib: 1024,
            huge_pages: 320,
            files,
            time_limit: counts(HOST_LIMIT, LONG_HOST_LIMIT),
            monitor: Some(env!("CARGO_BIN_EXE_ebb").into()),
            agent: Some(beside("ebb-agent", Some(AGENT_VARIABLE))?),
            host_kernel: kernel.clone(),
            clock_divisor: CLOCK_DIVISOR,
            ..HostConfig::default()
        })?)
    }

    /// Runs the tests with these names in a virtual host.
    fn run(&self, host: &VirtualHost, number: usize, names: &[String]) -> Result<Outcome, Failure> {
        let mut command = Command::new(PROGRAM_INSIDE).args(env::args().skip(1)).env(INSIDE, "1");
        if let Ok(run) = env::var(RUN_VARIABLE) {
            command = command.env(RUN_VARIABLE, run);
        }
        command = command.env(ONLY, names.join(","));
        let mut broken = None;
        let (mut results, mut words) = (Lines::default(), Lines::default());
        let status = host.run(&command, &mut |output| {
            let written = match output {
                Output::Stdout(bytes) => results.write(io::stdout(), bytes),
                Output::Stderr(bytes) => words.write(io::stderr(), bytes),
            };
            if let Err(error) = written {
                broken.get_or_insert(error);
            }
        })?;
        let file = self.files.path().join(format!("results.{number}.json"));
        host.get_file(RESULTS_INSIDE, &file)?;
        let results = std::fs::read(&file).map_err(text)?;
        let results = serde_json::from_slice(&results).map_err(text)?;
        match broken {
            Some(error) => Err(format!("cannot print the results: {error}").into()),
            None => Ok(Outcome { code: u8::try_from(status.shell_code()).unwrap_or(1), results }),
        }
    }
}

/// Tests that no host has taken yet.
struct Queue {
    names: Mutex<VecDeque<String>>,
    hosts: usize,
}

impl Queue {
    fn new(names: VecDeque<String>, hosts: usize) -> Self {
        Self { names: Mutex::new(names), hosts }
    }

    /// Takes half of a fair share of what is left, so that all hosts end at about the same time.
    fn take(&self) -> Option<Vec<String>> {
        let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        let number = names.len().div_ceil(2 * self.hosts);
        (number > 0).then(|| names.drain(..number).collect())
    }
}

/// A host's output, passed on in whole lines, because several hosts may write at the same time.
#[derive(Default)]
struct Lines(Vec<u8>);

impl Lines {
    fn write(&mut self, mut stream: impl Write, bytes: &[u8]) -> io::Result<()> {
        self.0.extend_from_slice(bytes);
        let Some(end) = self.0.iter().rposition(|byte| *byte == b'\n') else { return Ok(()) };
        let lines: Vec<u8> = self.0.drain(..=end).collect();
        stream.write_all(&lines)?;
        stream.flush()
    }
}

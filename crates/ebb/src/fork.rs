//! `ebb fork`: machines from a running one, or from a checkpoint in memory.

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io::{self, PipeReader, PipeWriter, Read as _, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread::{Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use ebb_guest_agent::wire::NewMac;
use ebb_vmm::api::Client;
use ebb_vmm::checkpoint::{CheckpointError, ForkOptions, Forked, Forks, Held};
use ebb_vmm::config::merge::MERGE_FORM;
use ebb_vmm::config::net::NET_FORM;
use ebb_vmm::config::options::{CGROUP_FORM, DISK_FORM};
use ebb_vmm::config::vsock::VSOCK_FORM;
use ebb_vmm::config::{
    DiskConfig, MacAddress, MergeConfig, MergeOverrides, NetConfig, Switch, VsockOption,
};
use ebb_vmm::isolation::CgroupConfig;
use ebb_vmm::size::ByteSize;
use serde::Serialize;

use crate::checkpoints;
use crate::flags::word;
use crate::hooks;

const AFTER_HELP: &str = "\
Each machine continues where the checkpoint was made, with memory of its own that is shared until it
is written to, and with its own VM generation id, sockets, disks, interfaces and cgroup. `{}` in an
option stands for the machine's number, from 0 on; with -n, sockets, writable disks and interfaces
need it. The command ends when all machines run; they go on in the background, until their guest
powers off or `ebb ctl SOCKET kill`. `ebb console SOCKET` connects with their serial lines.

A writable disk or overlay that does not exist is made with the content of the moment of the
checkpoint, if that has copies (ebb ctl SOCKET checkpoint NAME --copy-disks DIR). One that exists
must have that content: an image that was written since is refused.

If a machine cannot be made, those that were made go on, and are named.

Example: ebb ctl /run/ebb.sock checkpoint ready
         ebb fork ready -n 3 --api '/run/clone-{}.sock' --vsock 'path=/run/clone-{}.vsock'";

/// How long a monitor may take to make a checkpoint.
const PATIENCE: Duration = Duration::from_secs(60);
/// Guests that may be waited for at a time.
const MOST_ANSWERS: usize = 64;
/// Machines that are made side by side.
const AT_ONCE: usize = 8;
/// Most machines of a call.
const MOST: u32 = 10_000;
/// What stands for a machine's number.
const NUMBER: &str = "{}";

/// Makes machines from a running one, or from a checkpoint.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER_HELP, next_line_help = true)]
pub struct Args {
    /// The API socket of a machine that was started with --forkable, or the name of a checkpoint
    #[arg(value_name = "SOCKET|CHECKPOINT")]
    source: String,
    /// Number of machines
    #[arg(short, value_name = "N", default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=i64::from(MOST)))]
    n: u32,
    /// Sockets for `ebb ctl`
    #[arg(long, value_name = "PATTERN")]
    api: Option<String>,
    /// Sockets of the socket device, if the machine has one; connections of the machine are not
    /// continued
    #[arg(long, value_name = VSOCK_FORM)]
    vsock: Option<String>,
    /// A disk; give all of them in order
    #[arg(long, value_name = DISK_FORM)]
    disk: Vec<String>,
    /// A network device; give all of them in order
    #[arg(long, value_name = NET_FORM)]
    net: Vec<String>,
    /// How equal pages of guest memory are merged, as for `ebb run`; merge=owner begins with what
    /// the machine writes from now on, and such a machine cannot be forked again [default: as those
    /// of the checkpoint]
    #[arg(long, value_name = MERGE_FORM)]
    memory: Option<MergeOverrides>,
    /// Cgroups (version 2), which are created if necessary; pages that a machine shares stay
    /// charged to the one that has written them
    #[arg(long, value_name = CGROUP_FORM)]
    cgroup: Option<String>,
    /// Files that the logs of the machines' monitors are appended to [default: what they say until
    /// they run goes to standard error]
    #[arg(long, value_name = "PATTERN")]
    log_file: Option<String>,
    /// Stay paused until `ebb ctl SOCKET resume`
    #[arg(long, requires = "api")]
    paused: bool,
    /// Continue although a disk was written after the checkpoint was made, or is a copy without the
    /// time of the original
    #[arg(long)]
    accept_changed_disks: bool,
    /// Have the guests' agents make their random numbers new, set network addresses that are new
    /// (--net …,mac=random), and run the scripts in /etc/ebb/fork.d
    #[arg(long, default_value = "on", value_parser = word::<Switch>())]
    hooks: Switch,
    /// Print one JSON document instead of a table
    #[arg(long)]
    json: bool,
}

/// What was made.
#[derive(Debug, Serialize)]
struct Report {
    /// How long a running machine stood still, in microseconds; `None` for a checkpoint that
    /// exists.
    paused_us: Option<u64>,
    /// Duration, in milliseconds.
    elapsed_ms: u64,
    machines: Vec<Made>,
}

/// A new machine.
#[derive(Debug, Serialize)]
struct Made {
    /// Its monitor's process.
    pid: i32,
    api: Option<PathBuf>,
    /// From the request until it ran, in microseconds.
    elapsed_us: u64,
    /// From the request until its guest's agent had answered.
    answered_us: Option<u64>,
    /// Whether the guest has confirmed that its random numbers are its own; false if it has no
    /// agent, `None` if it was not asked.
    reseeded: Option<bool>,
}

/// A machine that runs, and what its guest's agent answers.
struct Running<'scope> {
    made: Made,
    begun: Instant,
    answer: Option<ScopedJoinHandle<'scope, (anyhow::Result<bool>, Instant)>>,
}

impl Running<'_> {
    /// Waits for the answer. A machine whose agent has failed runs all the same.
    fn answered(self) -> (Made, Option<anyhow::Error>) {
        let Self { mut made, begun, answer } = self;
        let Some(answer) = answer else { return (made, None) };
        let lost = |_| (Err(anyhow::anyhow!("a thread has panicked")), Instant::now());
        let (answer, at) = answer.join().unwrap_or_else(lost);
        match answer {
            Ok(reseeded) => {
                made.answered_us = reseeded.then(|| microseconds(at - begun));
                made.reseeded = Some(reseeded);
                (made, None)
            }
            Err(error) => {
                made.reseeded = Some(false);
                let error = error.context("the machine runs, but its guest's agent has failed");
                (made, Some(error))
            }
        }
    }
}

fn microseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let options = (0..args.n).map(|number| options(args, number)).collect::<Result<Vec<_>, _>>()?;
    let started = Instant::now();
    let copies = options.iter().find_map(ForkOptions::place_of_copies);
    let (held, paused_us) = open(&args.source, copies.as_deref(), args.hooks)?;
    let (info, _) = held.info()?;
    for options in &options {
        options.check(&info)?;
    }
    check_room(args.n)?;
    let (machines, failed) = std::thread::scope(|scope| {
        let may_have_agent = args.hooks.is_on() && info.vsock_driver;
        make(args, options, &held, &info.macs, may_have_agent, scope)
    });
    let elapsed_ms = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
    let report = Report { paused_us, elapsed_ms, machines };
    let mut out = io::stdout().lock();
    if args.json {
        serde_json::to_writer_pretty(&mut out, &report)?;
        writeln!(out)?;
    } else {
        for made in &report.machines {
            let api = made.api.as_deref().map_or("-".into(), Path::to_string_lossy);
            let ms = made.elapsed_us as f64 / 1000.0;
            write!(out, "process {}  {api}  {ms:.1} ms", made.pid)?;
            match (made.reseeded, made.answered_us) {
                (Some(true), Some(us)) => {
                    writeln!(out, ", its guest answered after {:.1} ms", us as f64 / 1000.0)?;
                }
                (Some(false), _) => writeln!(out, ", no agent in its guest answered")?,
                _ => writeln!(out)?,
            }
        }
    }
    failed.map_or(Ok(ExitCode::SUCCESS), Err)
}

/// Makes the machines. Returns those that run, in order, and the first problem.
fn make<'scope>(
    args: &Args,
    options: Vec<ForkOptions>,
    held: &Held,
    macs: &[MacAddress],
    may_have_agent: bool,
    scope: &'scope Scope<'scope, '_>,
) -> (Vec<Made>, Option<anyhow::Error>) {
    let mut forks = Forks::of(held);
    let mut coming = BTreeMap::new();
    let (mut running, mut machines) = (VecDeque::new(), BTreeMap::new());
    let mut failed: Option<anyhow::Error> = None;
    let mut options = options.into_iter().enumerate();
    loop {
        // After a failure, those that are under way are still waited for.
        while failed.is_none() && forks.coming() < AT_ONCE {
            let Some((number, options)) = options.next() else { break };
            let begun = Instant::now();
            let log = match Log::open(args, number) {
                Ok(log) => log,
                Err(error) => {
                    failed = Some(error.context(format!("machine {number}")));
                    break;
                }
            };
            match forks.begin(number, &options, log.writer()) {
                Ok(()) => drop(coming.insert(number, (begun, options, log))),
                Err(error) => failed = Some(log.failure(number, error)),
            }
        }
        let Some((number, result)) = forks.wait() else { break };
        let Some((begun, options, log)) = coming.remove(&number) else { continue };
        match result {
            Ok(Forked { pid }) => {
                let made = Made {
                    pid: pid.as_raw_nonzero().get(),
                    api: options.api,
                    elapsed_us: microseconds(begun.elapsed()),
                    answered_us: None,
                    reseeded: None,
                };
                let is_asked = may_have_agent && !options.paused;
                let macs = new_macs(macs, &options.nets);
                let answer = options.vsock.filter(|_| is_asked).map(|vsock| {
                    scope.spawn(move || (hooks::in_fork(&vsock.path, number, macs), Instant::now()))
                });
                running.push_back((number, Running { made, begun, answer }));
            }
            Err(error) if failed.is_none() => failed = Some(log.failure(number, error)),
            Err(_another) => {}
        }
        while running.len() > MOST_ANSWERS {
            collect(&mut running, &mut machines, &mut failed);
        }
    }
    while !running.is_empty() {
        collect(&mut running, &mut machines, &mut failed);
    }
    (machines.into_values().collect(), failed)
}

/// Addresses of a machine's network devices that differ from those of the checkpoint.
fn new_macs(old: &[MacAddress], nets: &[NetConfig]) -> Vec<NewMac> {
    let given = old.iter().zip(nets).filter_map(|(old, net)| Some((*old, net.mac?)));
    let new = given.filter(|(old, new)| old != new);
    new.map(|(old, new)| NewMac { old: old.bytes(), new: new.bytes() }).collect()
}

/// Takes the answer of the guest that was asked first.
fn collect(
    running: &mut VecDeque<(usize, Running<'_>)>,
    machines: &mut BTreeMap<usize, Made>,
    failed: &mut Option<anyhow::Error>,
) {
    let Some((number, first)) = running.pop_front() else { return };
    let (made, error) = first.answered();
    machines.insert(number, made);
    if let (Some(error), None) = (error, &failed) {
        *failed = Some(error.context(format!("machine {number}")));
    }
}

/// Where a machine's monitor writes its log.
enum Log {
    File(File),
    /// Has no reader once this command has ended: later lines are dropped. Standard error itself
    /// would stay open as long as the machine runs.
    Pipe(PipeReader, PipeWriter),
}

impl Log {
    fn open(args: &Args, number: usize) -> anyhow::Result<Self> {
        let Some(pattern) = &args.log_file else {
            let (reader, writer) = io::pipe().context("cannot create a pipe")?;
            return Ok(Self::Pipe(reader, writer));
        };
        let path = pattern.replace(NUMBER, &number.to_string());
        let file = File::options().create(true).append(true).open(&path);
        file.map(Self::File).with_context(|| format!("--log-file: cannot open {path}"))
    }

    fn writer(&self) -> BorrowedFd<'_> {
        match self {
            Self::File(file) => file.as_fd(),
            Self::Pipe(_, writer) => writer.as_fd(),
        }
    }

    /// Shows what the monitor has said before it ended, and describes the failure.
    fn failure(self, number: usize, error: CheckpointError) -> anyhow::Error {
        self.show();
        anyhow::Error::new(error).context(format!("machine {number}"))
    }

    /// Shows what the monitor has said before it ended.
    fn show(self) {
        if let Self::Pipe(mut reader, writer) = self {
            drop(writer);
            let mut text = Vec::new();
            // What is there: a monitor that does not end still has the other end.
            if rustix::io::ioctl_fionbio(&reader, true).is_ok() {
                let _ = reader.by_ref().take(MOST_LOG_BYTES).read_to_end(&mut text);
            }
            eprint!("{}", ebb_program::printable(&String::from_utf8_lossy(&text)));
        }
    }
}

/// Most of a monitor's log that is shown.
const MOST_LOG_BYTES: u64 = 64 << 10;

/// What a machine takes at least that has not run yet: pages of the monitor, of its companion and
/// of KVM, and page tables.
const LEAST_BYTES: u64 = 3 << 20;

/// Refuses more machines than the host has room for when none of them has run.
fn check_room(n: u32) -> anyhow::Result<()> {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.split_ascii_whitespace().next()?.parse::<u64>().ok());
    let Some(available) = kib.map(|kib| kib << 10) else { return Ok(()) };
    let fitting = available / LEAST_BYTES;
    if u64::from(n) > fitting {
        bail!(
            "not so many fit (-n {n}): the host has {} available, and each machine takes {} before \
             it has run, so that there is room for {fitting}",
            ByteSize::from_bytes(available).rounded(),
            ByteSize::from_bytes(LEAST_BYTES),
        );
    }
    Ok(())
}

/// A checkpoint by its name, or one of a running machine that ends with the connection.
fn open(source: &str, copies: Option<&Path>, hooks: Switch) -> anyhow::Result<(Held, Option<u64>)> {
    let is_socket = std::fs::metadata(source).is_ok_and(|file| file.file_type().is_socket());
    if source.contains('/') || is_socket {
        let client = Client::new(source, PATIENCE);
        let (held, report) =
            hooks::around(&client, hooks, || Ok(Held::of_running(&client, copies)?))?;
        return Ok((held, Some(report.paused_us)));
    }
    Ok((Held::connect(&checkpoints::find(source)?)?, None))
}

/// The options of a machine.
fn options(args: &Args, number: u32) -> anyhow::Result<ForkOptions> {
    let number_text = number.to_string();
    let fill = |text: &str| text.replace(NUMBER, &number_text);
    let of_each = |option: &str, text: &str| -> anyhow::Result<String> {
        if args.n > 1 && !text.contains(NUMBER) {
            bail!(
                "{option} {text}: with -n {}, put {NUMBER} where each machine's number goes",
                args.n
            );
        }
        Ok(fill(text))
    };
    let parsed = |text: &str| fill(text);
    let vsock = args
        .vsock
        .as_deref()
        .map(|text| -> anyhow::Result<VsockOption> { Ok(of_each("--vsock", text)?.parse()?) });
    let disks = args.disk.iter().map(|text| -> anyhow::Result<DiskConfig> {
        let disk: DiskConfig = parsed(text).parse()?;
        if !disk.readonly.is_on() {
            of_each("--disk", text)?;
        }
        Ok(disk)
    });
    let nets = args
        .net
        .iter()
        .map(|text| -> anyhow::Result<NetConfig> { Ok(of_each("--net", text)?.parse()?) });
    let cgroup = args
        .cgroup
        .as_deref()
        .map(|text| -> anyhow::Result<CgroupConfig> { Ok(of_each("--cgroup", text)?.parse()?) });
    let merge = args.memory.clone().map(|memory| memory.apply(MergeConfig::default()));
    Ok(ForkOptions {
        api: args.api.as_deref().map(|text| of_each("--api", text)).transpose()?.map(PathBuf::from),
        vsock: vsock.transpose()?,
        disks: disks.collect::<Result<_, _>>()?,
        nets: nets.collect::<Result<_, _>>().context("--net")?,
        merge: merge.transpose()?,
        cgroup: cgroup.transpose()?,
        paused: args.paused,
        accept_changed_disks: args.accept_changed_disks,
    })
}

//! The agent's main loop: it receives commands, runs jobs and sends events.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd as _;
use std::time::{Duration, Instant};

use ebb_agent::churn::Churn;
use ebb_agent::clock::ClockReading;
use ebb_agent::clock_watch::{ClockWatch, Rhythm};
use ebb_agent::count::Count;
use ebb_agent::disk_load;
use ebb_agent::input::{Line, Lines};
use ebb_agent::meminfo::MemInfo;
use ebb_agent::memory::Mapping;
use ebb_agent::page_faults::PageFaults;
use ebb_agent::protocol::{COMMAND_LIMIT_BYTES, Command, Crash, Event, JOB_LIMIT, Request};
use ebb_agent::random_numbers;
use ebb_agent::tcp_echo;
use ebb_agent::timed_reads;
use ebb_agent::trace_load;
use ebb_agent::vsock;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{WaitOptions, wait};
use rustix::system::{RebootCommand, reboot};
use serde_json::{Value, json};

use crate::commands::{self, Outcome, describe};
use crate::console::{Console, Place};
use crate::jobs::Job;
use crate::setup::{self, Prepared};

/// Memory held on the host's behalf, with the seed of its pattern.
struct Held {
    mapping: Mapping,
    seed: u64,
}

/// The agent's state.
pub struct Agent {
    console: Console,
    place: Place,
    jobs: Vec<Job>,
    held: Vec<Held>,
    /// Interval of the samples and time of the next one.
    samples: Option<(Duration, Instant)>,
    watch: Option<ClockWatch>,
    over: bool,
}

/// Reason for the loop to wake up.
enum Wake {
    Input,
    Job(usize),
    Sample,
}

impl Agent {
    /// Creates an agent that communicates over `console`.
    pub fn new(console: Console, place: Place) -> Self {
        Self {
            console,
            place,
            jobs: Vec::new(),
            held: Vec::new(),
            samples: None,
            watch: None,
            over: false,
        }
    }

    /// Reports that it is ready and serves commands until the guest ends or, in an ordinary
    /// process, the input ends.
    pub fn run(mut self, prepared: Prepared) -> io::Result<()> {
        let ready = Event::Ready {
            uptime_ms: uptime_ms(),
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
            cpus: cpus_online(),
            memory: MemInfo::read().unwrap_or_default(),
            balloon_driver: prepared.balloon_driver,
            warnings: prepared.warnings,
        };
        self.console.send(&ready)?;
        let mut lines = Lines::new(COMMAND_LIMIT_BYTES);
        let mut buffer = [0; 4096];
        while !self.over {
            match self.wait()? {
                Wake::Input => {
                    let length = self.console.read(&mut buffer)?;
                    if length == 0 && self.place == Place::Process {
                        return Ok(());
                    }
                    let mut found = Vec::new();
                    lines.push(&buffer[..length], |line| found.push(line));
                    for line in found {
                        self.take(line)?;
                    }
                }
                Wake::Job(index) => {
                    let job = self.jobs.swap_remove(index);
                    let id = job.id;
                    let end = job.finish();
                    self.answer(id, end.elapsed_ms, end.result)?;
                }
                Wake::Sample => {
                    let memory = MemInfo::read().unwrap_or_default();
                    self.console.send(&Event::Sample { uptime_ms: uptime_ms(), memory })?;
                }
            }
            if self.place == Place::Init && self.jobs.is_empty() && self.watch.is_none() {
                collect_orphans();
            }
        }
        Ok(())
    }

    /// Waits for input, the end of a job or the time of the next sample.
    fn wait(&mut self) -> io::Result<Wake> {
        loop {
            let timeout = self.samples.map(|(_, next)| {
                let left = next.saturating_duration_since(Instant::now());
                Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) }
            });
            let jobs = self
                .jobs
                .iter()
                .map(|job| PollFd::from_borrowed_fd(job.descriptor(), PollFlags::IN));
            let mut events = vec![PollFd::from_borrowed_fd(self.console.input(), PollFlags::IN)];
            events.extend(jobs);
            match poll(&mut events, timeout.as_ref()) {
                Err(rustix::io::Errno::INTR) => continue,
                Err(errno) => return Err(errno.into()),
                Ok(_) => {}
            }
            let ready = events.iter().rposition(|event| !event.revents().is_empty());
            match (ready, self.samples) {
                (Some(0), _) => return Ok(Wake::Input),
                (Some(index), _) => return Ok(Wake::Job(index - 1)),
                (None, Some((interval, next))) if next <= Instant::now() => {
                    self.samples = Some((interval, Instant::now() + interval));
                    return Ok(Wake::Sample);
                }
                (None, _) => {}
            }
        }
    }

    fn answer(&mut self, id: u64, elapsed_ms: u64, outcome: Outcome) -> io::Result<()> {
        self.console.send(&match outcome {
            Ok(result) => Event::Done { id, elapsed_ms, result },
            Err(error) => Event::Failed { id, error },
        })
    }

    fn take(&mut self, line: Line) -> io::Result<()> {
        let request = match line {
            Line::TooLong => Err(format!("a command is longer than {COMMAND_LIMIT_BYTES} bytes")),
            Line::Whole(text) => serde_json::from_slice::<Request>(&text)
                .map_err(|error| format!("not a command ({error}): {}", start_of(&text))),
        };
        match request {
            Ok(Request { id, command }) => self.execute(id, command),
            Err(error) => self.console.send(&Event::Failed { id: 0, error }),
        }
    }

    fn execute(&mut self, id: u64, command: Command) -> io::Result<()> {
        let started = Instant::now();
        let outcome = match command {
            Command::AllocTouchExit { bytes } => {
                return self.job(id, || commands::alloc_touch(bytes));
            }
            Command::Memhog { bytes } => return self.job(id, || commands::memhog(bytes)),
            Command::FillUntilOom { leave_bytes } => {
                return self.job(id, || commands::fill_until(leave_bytes));
            }
            Command::PageFaults { kind, tasks, threads: task_kind, seconds, mapping_bytes } => {
                let run = PageFaults { kind, tasks, task_kind, seconds, mapping_bytes };
                return self.job(id, || run.run().and_then(|report| document(&report)));
            }
            Command::FaultInstructions(run) => {
                return self.job(id, || run.run().and_then(|report| document(&report)));
            }
            Command::Churn { bytes, tasks, seed, operations, seconds } => {
                let churn = Churn { bytes, tasks, seed, operations, seconds };
                return self.job(id, || churn.run().and_then(|report| document(&report)));
            }
            Command::Count { bytes, tasks, kinds, burst_pages, pause_us, seconds } => {
                let count = Count { bytes, tasks, kinds, burst_pages, pause_us, seconds };
                return self.job(id, || count.run().and_then(|report| document(&report)));
            }
            Command::TouchFile { path, bytes } => {
                return self.job(id, || commands::touch_file(&path, bytes));
            }
            Command::Sleep { ms } => {
                return self.job(id, || {
                    std::thread::sleep(Duration::from_millis(ms));
                    Ok(Value::Null)
                });
            }
            Command::Exec { argv } => return self.job(id, || commands::exec(&argv)),
            Command::VsockServe { port, service } => {
                return self.job(id, || {
                    vsock::serve(port, service)
                        .map(|()| Value::Null)
                        .map_err(describe(format!("port {port}")))
                });
            }
            Command::GuestAgent => {
                return self.job(id, || {
                    ebb_guest_agent::server::serve(ebb_guest_agent::wire::PORT)
                        .map(|()| Value::Null)
                        .map_err(describe("the agent's port"))
                });
            }
            Command::RandomNumbers { port, pause_us } => {
                return self.job(id, || {
                    random_numbers::run(port, Duration::from_micros(pause_us))
                        .map(|()| Value::Null)
                        .map_err(describe("random numbers"))
                });
            }
            Command::TcpEcho { port } => {
                return self.job(id, move || {
                    let port = std::net::TcpListener::bind(("0.0.0.0", port));
                    port.and_then(|port| tcp_echo::serve(&port))
                        .map(|()| Value::Null)
                        .map_err(describe("echo"))
                });
            }
            Command::VsockExchange { port, connections, bytes } => {
                return self.job(id, || document(&vsock::exchange(port, connections, bytes)));
            }
            Command::DiskLoad(load) => {
                return self.job(id, move || document(&disk_load::run(&load)?));
            }
            Command::TraceLoad(load) => {
                return self.job(id, move || document(&trace_load::run(&load)?));
            }
            Command::DropCaches => {
                return self.job(id, || commands::write_file("/proc/sys/vm/drop_caches", "3"));
            }
            Command::Compact => {
                return self.job(id, || commands::write_file("/proc/sys/vm/compact_memory", "1"));
            }
            Command::Hold { bytes, pattern } => self.hold(bytes, pattern),
            Command::Release => {
                let released_bytes = self.held_bytes();
                self.held.clear();
                Ok(json!({ "released_bytes": released_bytes }))
            }
            Command::VerifyHeld => {
                let wrong: usize =
                    self.held.iter().map(|held| held.mapping.wrong_pages(held.seed)).sum();
                Ok(json!({ "held_bytes": self.held_bytes(), "wrong_pages": wrong }))
            }
            Command::ReadHeld { passes, seed } => {
                let mappings: Vec<&Mapping> = self.held.iter().map(|held| &held.mapping).collect();
                timed_reads::run(&mappings, passes, seed).and_then(|report| document(&report))
            }
            Command::MemInfo => commands::counters("/proc/meminfo"),
            Command::VmStat => commands::counters("/proc/vmstat"),
            Command::ReadFile { path, words } => commands::read_file(&path, &words),
            Command::WriteFile { path, text } => commands::write_file(&path, &text),
            Command::LoadModule { path, parameters } => {
                setup::load_module(&path, &parameters).map(|()| Value::Null).map_err(describe(path))
            }
            Command::UnloadModule { name } => {
                setup::unload_module(&name).map(|()| Value::Null).map_err(describe(name))
            }
            Command::Cancel { id: other } => self.cancel(other),
            Command::Samples { interval_ms } => {
                let interval = Duration::from_millis(interval_ms);
                self.samples = (interval_ms > 0).then(|| (interval, Instant::now() + interval));
                Ok(Value::Null)
            }
            Command::Clock => document(&ClockReading::take()),
            Command::ClockWatchStart { burst_readings, pause_us } => {
                self.start_watch(Rhythm { burst_readings, pause: Duration::from_micros(pause_us) })
            }
            Command::ClockWatchRead => self.read_watch(),
            Command::ClockWatchStop => {
                let report = self.read_watch();
                self.watch = None;
                report
            }
            Command::KernelLog { words } => commands::kernel_log(&words),
            Command::PowerOff => self.end(|| Ok(reboot(RebootCommand::PowerOff)?)),
            Command::Reboot => self.end(|| Ok(reboot(RebootCommand::Restart)?)),
            Command::Kexec { kernel, initrd } => self.end(|| kexec(&kernel, &initrd)),
            Command::Crash { how } => self.end(|| crash(how)),
        };
        if self.over {
            return Ok(());
        }
        self.answer(id, started.elapsed().as_millis() as u64, outcome)
    }

    /// Runs a command in a separate process; the loop reports its end.
    fn job(&mut self, id: u64, work: impl FnOnce() -> Outcome) -> io::Result<()> {
        if self.jobs.len() >= JOB_LIMIT {
            return self.answer(id, 0, Err(format!("{JOB_LIMIT} commands are already running")));
        }
        match Job::start(id, work) {
            Ok(job) => {
                self.jobs.push(job);
                self.console.send(&Event::Started { id })
            }
            Err(error) => self.answer(id, 0, Err(format!("cannot start a process: {error}"))),
        }
    }

    fn cancel(&self, id: u64) -> Outcome {
        let job = self.jobs.iter().find(|job| job.id == id).ok_or("no such command is running")?;
        job.kill();
        Ok(Value::Null)
    }

    fn hold(&mut self, bytes: u64, seed: u64) -> Outcome {
        let mut mapping = Mapping::new(bytes).map_err(describe(format!("{bytes} bytes")))?;
        mapping.fill_pattern(seed);
        self.held.push(Held { mapping, seed });
        Ok(json!({ "held_bytes": self.held_bytes() }))
    }

    fn start_watch(&mut self, rhythm: Rhythm) -> Outcome {
        if self.watch.is_some() {
            return Err("the clocks are already watched".to_owned());
        }
        let watch = ClockWatch::start(rhythm).map_err(describe("cannot watch the clocks"))?;
        let cpus = json!({ "cpus": watch.cpus() });
        self.watch = Some(watch);
        Ok(cpus)
    }

    fn read_watch(&self) -> Outcome {
        let watch = self.watch.as_ref().ok_or("the clocks are not watched")?;
        document(&watch.report().map_err(describe("watch of the clocks"))?)
    }

    fn held_bytes(&self) -> u64 {
        self.held.iter().map(|held| held.mapping.len_bytes() as u64).sum()
    }

    /// Ends the guest, or only the process if it is an ordinary one.
    fn end(&mut self, how: impl FnOnce() -> io::Result<()>) -> Outcome {
        if self.place == Place::Process {
            self.over = true;
            return Ok(Value::Null);
        }
        // On success the call does not return, or the machine ends shortly afterwards.
        how().map(|()| Value::Null).map_err(describe("cannot end the guest"))
    }
}

/// Loads another kernel (kexec_file_load(2)) and starts it; drivers are told before.
fn kexec(kernel: &str, initrd: &str) -> io::Result<()> {
    let (kernel, initrd) = (File::open(kernel)?, File::open(initrd)?);
    let mut words = fs::read("/proc/cmdline")?;
    words.truncate(words.trim_ascii_end().len());
    words.push(0);
    // SAFETY: The kernel reads the files and as many bytes of the command line, which ends with 0.
    let result = unsafe {
        libc::syscall(
            libc::SYS_kexec_file_load,
            kernel.as_raw_fd(),
            initrd.as_raw_fd(),
            words.len(),
            words.as_ptr(),
            0_u64,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(reboot(RebootCommand::Kexec)?)
}

fn crash(how: Crash) -> io::Result<()> {
    match how {
        Crash::Panic => fs::write("/proc/sysrq-trigger", "c"),
        Crash::TripleFault => {
            // Selects how Linux restarts the machine
            // (Documentation/ABI/testing/sysfs-kernel-reboot).
            fs::write("/sys/kernel/reboot/type", "triple")?;
            Ok(reboot(RebootCommand::Restart)?)
        }
    }
}

/// Reaps orphaned processes. Only called without jobs and clock readers, which are waited for by
/// process id.
fn collect_orphans() {
    while let Ok(Some(_)) = wait(WaitOptions::NOHANG) {}
}

fn document(value: &impl serde::Serialize) -> Outcome {
    serde_json::to_value(value).map_err(|error| format!("result: {error}"))
}

fn start_of(text: &[u8]) -> String {
    String::from_utf8_lossy(&text[..text.len().min(100)]).into_owned()
}

fn uptime_ms() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
}

fn cpus_online() -> u32 {
    std::thread::available_parallelism().map_or(1, |count| count.get() as u32)
}

//! A running virtual host, from the side of the program that started it.

use std::collections::HashMap;
use std::io::{self, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::cache::Cache;
use crate::channel::{
    ExitStatus, Hello, MemorySample, Message, PAYLOAD_LIMIT, PROTOCOL_VERSION, Reply, Request,
    read_frame, write_frame,
};
use crate::clock::SlowClock;
use crate::command::{Captured, Command, Output};
use crate::config::HostConfig;
use crate::console::Tail;
use crate::contents::{self, Kernels};
use crate::error::HostError;
use crate::keeper::{End, Keeper};
use crate::kernel::Kernel;
use crate::memory;
use crate::qemu;
use crate::translations;

/// Number of frames queued for a slow reader before the channel blocks.
const QUEUE_FRAMES: usize = 64;
/// A host that accepts no data for this long is considered dead.
const WRITE_LIMIT: Duration = Duration::from_secs(60);
/// Time limit for a short request, such as a memory sample, on an overloaded machine.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);
/// Time limit for an orderly power-off before QEMU is killed.
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(10);

type Answer = (Reply, Vec<u8>);
type Waiters = HashMap<u64, SyncSender<Answer>>;
type Waiting = Arc<Mutex<Waiters>>;

/// A virtual host. Dropping it kills QEMU.
#[derive(Debug)]
pub struct VirtualHost {
    keeper: Keeper,
    writer: Mutex<UnixStream>,
    waiting: Waiting,
    next_id: AtomicU64,
    console: Tail,
    hello: Hello,
    time_limit: Duration,
}

impl VirtualHost {
    /// Builds the host's files, starts QEMU and waits until the host's init is ready.
    pub fn start(config: &HostConfig) -> Result<Self, HostError> {
        config.validate()?;
        let program = qemu::find()?;
        let guests = Kernel::find(config.kernel.as_deref())?;
        let kernels = Kernels { host: config.host_kernel.find(&guests)?, guests };
        memory::check_available(config.total_memory_mib())?;
        let started = Instant::now();
        let boot = contents::build(config, &kernels, &Cache::of_user())?;
        tracing::debug!(elapsed_ms = started.elapsed().as_millis(), "boot files built");
        let swap =
            if config.swap_mib > 0 { Some(contents::swap_disk(config.swap_mib)?) } else { None };

        let socket_error = "cannot make a socket pair";
        let (control, control_inside) = UnixStream::pair().map_err(HostError::io(socket_error))?;
        let (console, console_inside) = UnixStream::pair().map_err(HostError::io(socket_error))?;
        let files = qemu::Files {
            control: control_inside.into(),
            console: console_inside.into(),
            kernel: boot.kernel,
            initramfs: boot.initramfs,
            swap,
            disks: contents::disks(config)?,
            plugin: translations::plugin(&program)?,
            clock: SlowClock::new(config.clock_divisor)?,
        };
        let arguments = qemu::arguments(config, &files);
        let tail = Tail::default();
        tail.collect(console).map_err(HostError::io("cannot start a thread"))?;
        let keeper = Keeper::start(program, arguments, files, tail.clone(), config.time_limit)?;

        let waiting = Waiting::default();
        let (sender, hello) = sync_channel(1);
        lock(&waiting).insert(0, sender);
        control.set_write_timeout(Some(WRITE_LIMIT)).map_err(HostError::io("control channel"))?;
        let reader = control.try_clone().map_err(HostError::io("control channel"))?;
        let table = Arc::clone(&waiting);
        thread::Builder::new()
            .name("control".to_owned())
            .spawn(move || receive(reader, &table))
            .map_err(HostError::io("cannot start a thread"))?;

        let mut host = Self {
            keeper,
            writer: Mutex::new(control),
            waiting,
            next_id: AtomicU64::new(1),
            console: tail,
            hello: Hello { version: 0, kernel: String::new(), uptime_ms: 0, warnings: Vec::new() },
            time_limit: config.time_limit,
        };
        host.hello = host.wait_for_hello(&hello, config.boot_limit)?;
        tracing::debug!(
            elapsed_ms = started.elapsed().as_millis(),
            uptime_ms = host.hello.uptime_ms,
            "virtual host is ready"
        );
        Ok(host)
    }

    fn wait_for_hello(
        &self,
        hello: &Receiver<Answer>,
        limit: Duration,
    ) -> Result<Hello, HostError> {
        match hello.recv_timeout(limit) {
            Ok((Reply::Hello(hello), _)) if hello.version == PROTOCOL_VERSION => Ok(hello),
            Ok((Reply::Hello(hello), _)) => {
                Err(HostError::Version { expected: PROTOCOL_VERSION, found: hello.version })
            }
            Ok((other, _)) => Err(HostError::Protocol(format!("{other:?} instead of a greeting"))),
            Err(RecvTimeoutError::Timeout) => {
                Err(HostError::BootTimeout { limit, console: self.console.describe() })
            }
            Err(RecvTimeoutError::Disconnected) => match self.ended() {
                HostError::Ended { status, console } => {
                    Err(HostError::EndedAtStart { status, console })
                }
                other => Err(other),
            },
        }
    }

    /// The host's description of itself.
    pub fn hello(&self) -> &Hello {
        &self.hello
    }

    /// QEMU's process id.
    pub fn process_id(&self) -> u32 {
        self.keeper.process_id()
    }

    /// The last lines of the host's console.
    pub fn console_lines(&self) -> Vec<String> {
        self.console.lines()
    }

    /// Runs a command and passes on its output as it arrives. Several threads may call this at the
    /// same time.
    ///
    /// A command that reaches its time limit is killed with its process group.
    pub fn run(
        &self,
        command: &Command,
        output: &mut dyn FnMut(Output),
    ) -> Result<ExitStatus, HostError> {
        let request = self.request(&Request::Run(command.program.clone()), &[])?;
        let deadline = command.time_limit.map(|limit| Instant::now() + limit);
        let mut over_limit = false;
        loop {
            let left = match deadline {
                Some(deadline) if !over_limit => deadline.saturating_duration_since(Instant::now()),
                _ => self.time_limit + ANSWER_LIMIT,
            };
            match request.answers.recv_timeout(left) {
                Ok((Reply::Stdout, payload)) => output(Output::Stdout(&payload)),
                Ok((Reply::Stderr, payload)) => output(Output::Stderr(&payload)),
                Ok((Reply::Started { .. }, _)) => {}
                Ok((Reply::Exited(_), _)) if over_limit => {
                    return Err(HostError::CommandTimeLimit {
                        command: command.program.argv.join(" "),
                        limit: command.time_limit.unwrap_or_default(),
                    });
                }
                Ok((Reply::Exited(status), _)) => return Ok(status),
                Ok((Reply::Failed { error }, _)) => return Err(HostError::Inside(error)),
                Ok((other, _)) => {
                    return Err(HostError::Protocol(format!("{other:?} for a command")));
                }
                Err(RecvTimeoutError::Timeout) => {
                    over_limit = true;
                    self.send(request.id, &Request::Kill, &[])?;
                }
                Err(RecvTimeoutError::Disconnected) => return Err(self.ended()),
            }
        }
    }

    /// Runs a command and collects its output.
    pub fn output(&self, command: &Command) -> Result<Captured, HostError> {
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        let status = self.run(command, &mut |output| match output {
            Output::Stdout(bytes) => stdout.extend_from_slice(bytes),
            Output::Stderr(bytes) => stderr.extend_from_slice(bytes),
        })?;
        Ok(Captured { status, stdout, stderr })
    }

    /// Writes a file in the host with `size_bytes` bytes from `content`.
    pub fn put(
        &self,
        path: &str,
        mode: u32,
        size_bytes: u64,
        mut content: impl Read,
    ) -> Result<(), HostError> {
        let request =
            self.request(&Request::PutFile { path: path.to_owned(), mode, size_bytes }, &[])?;
        let mut buffer = vec![0; PAYLOAD_LIMIT];
        let mut left = size_bytes;
        while left > 0 {
            let part = &mut buffer[..left.min(PAYLOAD_LIMIT as u64) as usize];
            content
                .read_exact(part)
                .map_err(HostError::io(format!("cannot read the content of {path}")))?;
            self.send(request.id, &Request::FileData, part)?;
            left -= part.len() as u64;
        }
        match self.answer(&request)? {
            (Reply::FileDone { size_bytes: arrived }, _) if arrived == size_bytes => Ok(()),
            (other, _) => {
                Err(HostError::Protocol(format!("{other:?} for a file of {size_bytes} bytes")))
            }
        }
    }

    /// Copies a file of this machine into the host; `mode` is that of the copy.
    pub fn put_file(&self, source: &Path, target: &str, mode: u32) -> Result<(), HostError> {
        let describe = || format!("cannot read {}", source.display());
        let file = std::fs::File::open(source).map_err(HostError::io(describe()))?;
        let size_bytes = file.metadata().map_err(HostError::io(describe()))?.len();
        self.put(target, mode, size_bytes, file)
    }

    /// Copies a file of the host to `writer`; returns its length in bytes.
    pub fn get(&self, path: &str, mut writer: impl Write) -> Result<u64, HostError> {
        let request = self.request(&Request::GetFile { path: path.to_owned() }, &[])?;
        let mut received = 0_u64;
        loop {
            match self.answer(&request)? {
                (Reply::FileStart { .. }, _) => {}
                (Reply::FileData, payload) => {
                    writer
                        .write_all(&payload)
                        .map_err(HostError::io(format!("cannot write the content of {path}")))?;
                    received += payload.len() as u64;
                }
                (Reply::FileDone { size_bytes }, _) if size_bytes == received => {
                    return Ok(received);
                }
                (other, _) => {
                    return Err(HostError::Protocol(format!(
                        "{other:?} after {received} bytes of a file"
                    )));
                }
            }
        }
    }

    /// Copies a file of the host to a file of this machine, which is created when it is complete.
    pub fn get_file(&self, source: &str, target: &Path) -> Result<u64, HostError> {
        let describe = || format!("cannot write {}", target.display());
        let directory =
            target.parent().filter(|path| !path.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let mut file =
            tempfile::NamedTempFile::new_in(directory).map_err(HostError::io(describe()))?;
        let length = self.get(source, &mut file)?;
        file.persist(target).map_err(|error| HostError::io(describe())(error.error))?;
        Ok(length)
    }

    /// State of the host's memory.
    pub fn sample(&self) -> Result<MemorySample, HostError> {
        let request = self.request(&Request::Sample, &[])?;
        match self.answer(&request)? {
            (Reply::Sample(sample), _) => Ok(sample),
            (other, _) => Err(HostError::Protocol(format!("{other:?} for a memory sample"))),
        }
    }

    /// Powers the host off; QEMU is killed if that takes too long.
    pub fn shutdown(self) -> Result<(), HostError> {
        self.request(&Request::Shutdown, &[])?;
        match self.keeper.wait(SHUTDOWN_LIMIT) {
            Some(End::Exited(status)) if status.success() => Ok(()),
            Some(_) => Err(self.ended()),
            None => Ok(()),
        }
    }

    fn request(&self, request: &Request, payload: &[u8]) -> Result<Pending<'_>, HostError> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let (sender, answers) = sync_channel(QUEUE_FRAMES);
        lock(&self.waiting).insert(id, sender);
        let pending = Pending { waiting: &self.waiting, id, answers };
        self.send(id, request, payload)?;
        Ok(pending)
    }

    fn send(&self, id: u64, request: &Request, payload: &[u8]) -> Result<(), HostError> {
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        match write_frame(&mut *writer, &Message { id, body: request }, payload) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                Err(HostError::Protocol(error.to_string()))
            }
            Err(_) => {
                // Part of a frame may have been sent: the channel is unusable.
                let _ = writer.shutdown(Shutdown::Both);
                drop(writer);
                Err(self.ended())
            }
        }
    }

    fn answer(&self, request: &Pending<'_>) -> Result<Answer, HostError> {
        match request.answers.recv_timeout(ANSWER_LIMIT) {
            Ok((Reply::Failed { error }, _)) => Err(HostError::Inside(error)),
            Ok(answer) => Ok(answer),
            Err(RecvTimeoutError::Disconnected) => Err(self.ended()),
            Err(RecvTimeoutError::Timeout) => Err(HostError::Inside(format!(
                "no answer within {} s{}",
                ANSWER_LIMIT.as_secs(),
                self.console.describe()
            ))),
        }
    }

    /// The reason why the channel is closed.
    fn ended(&self) -> HostError {
        let console = || self.console.describe();
        match self.keeper.wait(Duration::from_secs(2)) {
            Some(End::TimeLimit) => HostError::HostTimeLimit { limit: self.time_limit },
            Some(End::Exited(status)) => {
                HostError::Ended { status: status.to_string(), console: console() }
            }
            Some(End::Killed) | None => HostError::Ended {
                status: "its control channel is closed".to_owned(),
                console: console(),
            },
        }
    }
}

/// A request whose answers are awaited; it is deregistered on drop.
struct Pending<'host> {
    waiting: &'host Waiting,
    id: u64,
    answers: Receiver<Answer>,
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        lock(self.waiting).remove(&self.id);
    }
}

fn lock(waiting: &Waiting) -> std::sync::MutexGuard<'_, Waiters> {
    waiting.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Dispatches frames to the waiting requests, until the channel's end.
fn receive(stream: UnixStream, waiting: &Waiting) {
    let mut reader = BufReader::with_capacity(2 * PAYLOAD_LIMIT, stream);
    loop {
        match read_frame::<Reply>(&mut reader) {
            Ok(Some((message, payload))) => {
                let sender = lock(waiting).get(&message.id).cloned();
                // The frames of an abandoned command, which has no receiver, are dropped.
                if let Some(sender) = sender {
                    let _ = sender.send((message.body, payload));
                }
            }
            Ok(None) => break,
            Err(error) => {
                tracing::debug!(%error, "control channel");
                break;
            }
        }
    }
    let _ = reader.get_ref().shutdown(Shutdown::Both);
    lock(waiting).clear();
}

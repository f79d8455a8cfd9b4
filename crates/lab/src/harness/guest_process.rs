//! A guest as a process: its monitor as a child of this one, its agent on the serial console.
//!
//! Used by the laboratory and by the tests on real guests.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use ebb_agent::protocol::{Event, Request};
use rustix::process::{Signal, getpid, getppid, set_parent_process_death_signal};
use serde_json::Value;

use crate::harness::console::{self, Line, Tail};

/// Time after which a guest has read a command's text from its console.
const BEFORE_END: Duration = Duration::from_millis(4);

/// An event of the agent, and when it arrived.
#[derive(Debug, Clone)]
pub struct Arrival {
    /// Arrival of its first byte.
    pub begun: Instant,
    /// Arrival of its last byte.
    pub at: Instant,
    /// The event.
    pub event: Event,
}

/// Output of the console and of the monitor's log.
#[derive(Debug, Default)]
pub struct Said {
    /// Events of the agent.
    pub events: Vec<Arrival>,
    /// Other lines of the console.
    pub console: Tail,
    /// The last of them, if no end of line follows: a guest that moves to another monitor ends the
    /// line there.
    pub unfinished: Option<String>,
    /// The monitor's log.
    pub log: Tail,
    /// Total number of bytes of the log.
    pub log_bytes: u64,
    /// Whether the console is closed.
    console_closed: bool,
}

/// Outcome of a command: time by the guest's clock, and result; or the reason of the failure.
pub type Outcome<'a> = Result<(Duration, &'a Value), &'a str>;

impl Said {
    /// The end of the command with this number, and its outcome.
    pub fn end_of(&self, id: u64) -> Option<(&Arrival, Outcome<'_>)> {
        self.events.iter().find_map(|arrival| match &arrival.event {
            Event::Done { id: of, elapsed_ms, result } if *of == id => {
                Some((arrival, Ok((Duration::from_millis(*elapsed_ms), result))))
            }
            Event::Failed { id: of, error } if *of == id => Some((arrival, Err(error.as_str()))),
            _ => None,
        })
    }

    /// The events that report a start of the agent.
    pub fn starts(&self) -> impl Iterator<Item = &Arrival> {
        self.events.iter().filter(|arrival| matches!(arrival.event, Event::Ready { .. }))
    }
}

/// Why an awaited output is missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotSaid {
    /// The time limit was reached.
    TimeOut,
    /// The console is closed.
    Closed,
}

/// A guest's output so far, shared with the threads that read it.
#[derive(Debug, Clone, Default)]
pub struct Transcript(Arc<(Mutex<Said>, Condvar)>);

impl Transcript {
    /// Locks the output.
    pub fn lock(&self) -> MutexGuard<'_, Said> {
        // Each line is complete, even if another holder of the lock has panicked.
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `look` finds something in it.
    ///
    /// # Errors
    /// The reason why nothing was found.
    pub fn wait<T>(
        &self,
        deadline: Instant,
        mut look: impl FnMut(&Said) -> Option<T>,
    ) -> Result<T, NotSaid> {
        let mut said = self.lock();
        loop {
            if let Some(found) = look(&said) {
                return Ok(found);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if said.console_closed {
                return Err(NotSaid::Closed);
            }
            if left.is_zero() {
                return Err(NotSaid::TimeOut);
            }
            let waited = self.0.1.wait_timeout(said, left);
            said = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn update(&self, change: impl FnOnce(&mut Said)) {
        change(&mut self.lock());
        self.0.1.notify_all();
    }

    fn read_console(&self, output: impl Read) {
        let mut output = BufReader::new(output);
        let mut begun = Instant::now();
        while let Ok(Some(line)) = console::read_line(&mut output, &mut || begun = Instant::now()) {
            self.update(|said| match line {
                Line::Event(event) => {
                    said.events.push(Arrival { begun, at: Instant::now(), event: *event });
                }
                Line::Text(text) => said.console.push(text),
                Line::Unfinished(text) => {
                    said.console.push(text.clone());
                    said.unfinished = Some(text);
                }
            });
        }
        self.update(|said| said.console_closed = true);
    }

    fn read_log(&self, errors: impl Read) {
        for line in BufReader::new(errors).lines().map_while(Result::ok) {
            self.update(|said| {
                said.log_bytes += line.len() as u64 + 1;
                said.log.push(line);
            });
        }
    }
}

/// How a command is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sending {
    /// At once.
    AtOnce,
    /// The end of its line a moment after the rest, when the guest has read that: the time from the
    /// end to the answer does not include the transfer of the text over the console.
    EndLast,
}

/// A guest; killed and waited for when dropped, and killed when the thread that started it ends in
/// any way.
#[derive(Debug)]
pub struct GuestProcess {
    process: Child,
    input: Mutex<Option<ChildStdin>>,
    transcript: Transcript,
    readers: Vec<JoinHandle<()>>,
}

impl GuestProcess {
    /// Starts a monitor whose guest has its serial console on the monitor's standard input and
    /// output.
    ///
    /// # Errors
    /// The reason why the program cannot be run.
    pub fn start(monitor: &mut Command) -> io::Result<Self> {
        monitor.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        end_with_parent(monitor);
        let mut process = monitor.spawn()?;
        let transcript = Transcript::default();
        let (console, log) = (transcript.clone(), transcript.clone());
        let output =
            process.stdout.take().map(|it| thread::spawn(move || console.read_console(it)));
        let errors = process.stderr.take().map(|it| thread::spawn(move || log.read_log(it)));
        let input = Mutex::new(process.stdin.take());
        let readers = output.into_iter().chain(errors).collect();
        Ok(Self { process, input, transcript, readers })
    }

    /// Number of the monitor's process.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// The output of the guest and its monitor.
    pub fn transcript(&self) -> &Transcript {
        &self.transcript
    }

    /// Sends a command; returns the time right before its end was sent.
    ///
    /// # Errors
    /// Those of the console: a monitor that has ended does not read it.
    pub fn send(&self, request: &Request, sending: Sending) -> io::Result<Instant> {
        let line = request.to_line()?;
        let mut input = self.input.lock().unwrap_or_else(PoisonError::into_inner);
        let input = input.as_mut().ok_or(io::ErrorKind::NotConnected)?;
        let (before, end) = match sending {
            Sending::AtOnce => (&[][..], line.as_slice()),
            Sending::EndLast => line.split_at(line.len().saturating_sub(1)),
        };
        if !before.is_empty() {
            input.write_all(before)?;
            input.flush()?;
            thread::sleep(BEFORE_END);
        }
        let sent = Instant::now();
        input.write_all(end)?;
        input.flush()?;
        Ok(sent)
    }

    /// Closes the console's input.
    pub fn close_input(&self) {
        *self.input.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// The monitor's exit status; `None` while it runs.
    pub fn status(&mut self) -> Option<ExitStatus> {
        self.process.try_wait().ok().flatten()
    }

    /// Waits for the monitor's end; `None` at the time limit.
    pub fn wait_end(&mut self, limit: Duration) -> Option<ExitStatus> {
        let deadline = Instant::now() + limit;
        loop {
            match self.status() {
                None if Instant::now() < deadline => thread::sleep(Duration::from_millis(10)),
                status => return status,
            }
        }
    }

    /// Sends SIGKILL and does not wait.
    pub fn kill(&mut self) {
        // It may have ended already.
        let _ = self.process.kill();
    }

    /// Waits until all output of an ended monitor is in the transcript.
    pub fn finish_reading(&mut self) {
        for reader in self.readers.drain(..) {
            // A thread that has panicked has reported it.
            let _ = reader.join();
        }
    }
}

impl Drop for GuestProcess {
    fn drop(&mut self) {
        self.kill();
        // Its memory is freed only when it has been waited for.
        let _ = self.process.wait();
    }
}

/// Makes the kernel kill the program when this thread ends, so that no guest outlives it.
pub fn end_with_parent(program: &mut Command) {
    let parent = getpid();
    let in_child = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // The parent may have ended before the request was made.
        if getppid() == Some(parent) { Ok(()) } else { Err(io::ErrorKind::BrokenPipe.into()) }
    };
    // SAFETY: between fork and exec only async-signal-safe functions may be called. The closure
    // makes two system calls (prctl, getppid) through rustix, takes no lock and allocates nothing;
    // `ErrorKind` to `Error` is a value.
    unsafe { program.pre_exec(in_child) };
}

//! A running guest: its monitor as a child process, its agent on the serial console.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdin, Command as Program, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use ebb_agent::command_line::BalloonDriver;
use ebb_agent::protocol::{Command, Event, Request};
use rustix::process::{Signal, getpid, getppid, set_parent_process_death_signal};

use crate::LabError;
use crate::error::GuestProblem;
use crate::harness::console::{self, Line, Tail};

/// How often a waiting caller is asked to look around.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// How long a monitor that has closed its console may take to end.
const END_LIMIT: Duration = Duration::from_secs(5);
/// A guest has taken a command's text from its console by then.
const BEFORE_END: Duration = Duration::from_millis(4);

/// A guest; killed with its monitor when dropped, and when this process ends in whatever way.
#[derive(Debug)]
pub struct Guest {
    number: u32,
    process: Child,
    input: Option<ChildStdin>,
    events: Receiver<Arrival>,
    console: SharedTail,
    log: SharedTail,
    started: Instant,
    next_id: u64,
    /// Commands that were begun and not waited for yet, and the ends of those of them that are
    /// over.
    begun: Vec<u64>,
    ends: Vec<Arrival>,
    /// What its agent said of its balloon driver, and what went wrong at its start.
    driver: Option<(BalloonDriver, Vec<String>)>,
}

/// An event of the agent, and when it came.
#[derive(Debug)]
struct Arrival {
    /// When its first byte was here.
    begun: Instant,
    /// When all of it was here.
    at: Instant,
    event: Event,
}

/// How a command is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sending {
    /// At once.
    AtOnce,
    /// The end of its line a moment after the rest, when the guest has taken that: from the end to
    /// the answer is all that the command takes, without the way of its text over the console.
    EndLast,
}

/// What a command came to.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    /// Right before the end of the command's line was sent: the guest did not do it earlier.
    pub sent: Instant,
    /// When the first byte of the answer came: the guest did not do it later.
    pub answered: Instant,
    /// Time it took by the guest's clock.
    pub elapsed: Duration,
    /// Time from sending the command to its answer by the host's clock.
    pub waited: Duration,
    /// What the agent found.
    pub result: serde_json::Value,
}

/// A command that was begun.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Begun {
    id: u64,
    sent: Instant,
}

type SharedTail = Arc<Mutex<Tail>>;

fn push(tail: &SharedTail, line: String) {
    // Each line is whole, whatever happened to another holder of the lock.
    tail.lock().unwrap_or_else(PoisonError::into_inner).push(line);
}

fn show(tail: &SharedTail, heading: &str) -> String {
    tail.lock().unwrap_or_else(PoisonError::into_inner).show(heading)
}

impl Guest {
    /// Starts a monitor whose guest has its serial console on the monitor's standard input and
    /// output.
    ///
    /// The thread that calls this must outlive the guest: the kernel ends the guest together with
    /// it.
    ///
    /// # Errors
    /// [`LabError::StartMonitor`] when the program cannot be run.
    pub fn start(number: u32, mut monitor: Program) -> Result<Self, LabError> {
        monitor.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        end_with_parent(&mut monitor);
        let started = Instant::now();
        let mut process = monitor.spawn().map_err(|cause| LabError::StartMonitor {
            program: monitor.get_program().to_string_lossy().into_owned(),
            cause,
        })?;
        let (sender, events) = mpsc::channel();
        let (console, log) = (SharedTail::default(), SharedTail::default());
        if let Some(output) = process.stdout.take() {
            let console = console.clone();
            thread::spawn(move || read_console(BufReader::new(output), &sender, &console));
        }
        if let Some(errors) = process.stderr.take() {
            let log = log.clone();
            thread::spawn(move || {
                BufReader::new(errors)
                    .lines()
                    .map_while(Result::ok)
                    .for_each(|line| push(&log, line));
            });
        }
        let input = process.stdin.take();
        Ok(Self {
            number,
            process,
            input,
            events,
            console,
            log,
            started,
            next_id: 1,
            begun: Vec::new(),
            ends: Vec::new(),
            driver: None,
        })
    }

    /// The guest of `earlier` in another monitor: its agent goes on with the commands' numbers, and
    /// with those that were begun.
    pub fn goes_on_from(&mut self, earlier: &mut Self) {
        self.next_id = earlier.next_id;
        // A command may have ended before the guest was moved.
        let begun = &earlier.begun;
        let ends = earlier.events.try_iter().filter(|arrival| {
            ended_command(&arrival.event).is_some_and(|command| begun.contains(&command))
        });
        earlier.ends.extend(ends);
        self.begun.append(&mut earlier.begun);
        self.ends.append(&mut earlier.ends);
    }

    /// Number of the guest in its series.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Process of its monitor.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Waits for the agent's first event; the time from the start of the monitor until then.
    ///
    /// # Errors
    /// [`LabError::Guest`] when the monitor ends first, or the limit passes.
    pub fn wait_ready(&mut self, limit: Duration) -> Result<Duration, LabError> {
        const WHAT: &str = "sign of its agent";
        let deadline = self.started + limit;
        loop {
            let Arrival { at, event, .. } = self.next_event(WHAT, deadline, limit, &mut || {})?;
            if let Event::Ready { balloon_driver, warnings, .. } = event {
                self.driver = Some((balloon_driver, warnings));
                return Ok(at - self.started);
            }
        }
    }

    /// Makes sure that the guest has this balloon driver.
    ///
    /// # Errors
    /// [`LabError::Guest`] with what its agent said when it was ready.
    pub fn require_driver(&self, wanted: BalloonDriver) -> Result<(), LabError> {
        let (loaded, warnings) = match &self.driver {
            Some((loaded, _)) if *loaded == wanted => return Ok(()),
            Some((loaded, warnings)) => (loaded.name(), warnings.join("; ")),
            None => ("nothing yet", String::new()),
        };
        let text = format!("it should have {}, and has {loaded} ({warnings})", wanted.name());
        Err(self.failed(GuestProblem::Protocol(text)))
    }

    /// Sends a command and waits for its end; `look` is called a few times a second meanwhile.
    ///
    /// # Errors
    /// [`LabError::Guest`] when the command fails, the monitor ends, or the limit passes.
    pub fn command(
        &mut self,
        command: Command,
        limit: Duration,
        look: &mut dyn FnMut(),
    ) -> Result<Answer, LabError> {
        self.exchange(command, Sending::AtOnce, limit, look)
    }

    /// As [`Self::command`], with a choice of how it is sent.
    ///
    /// # Errors
    /// As [`Self::command`].
    pub fn exchange(
        &mut self,
        command: Command,
        sending: Sending,
        limit: Duration,
        look: &mut dyn FnMut(),
    ) -> Result<Answer, LabError> {
        let id = self.next_id;
        self.next_id += 1;
        let sent = self.send(&Request { id, command }, sending)?;
        self.await_end(Begun { id, sent }, sent + limit, limit, look)
    }

    /// Begins a command that is waited for later, by [`Self::finish`]; other commands may come in
    /// between.
    ///
    /// # Errors
    /// [`LabError::Guest`] when the command cannot be sent.
    pub fn begin(&mut self, command: Command) -> Result<Begun, LabError> {
        let id = self.next_id;
        self.next_id += 1;
        let sent = self.send(&Request { id, command }, Sending::AtOnce)?;
        self.begun.push(id);
        Ok(Begun { id, sent })
    }

    /// Waits for the end of a command that was begun.
    ///
    /// # Errors
    /// As [`Self::command`]; the limit counts from now.
    pub fn finish(&mut self, begun: Begun, limit: Duration) -> Result<Answer, LabError> {
        self.begun.retain(|id| *id != begun.id);
        self.await_end(begun, Instant::now() + limit, limit, &mut || {})
    }

    fn await_end(
        &mut self,
        Begun { id, sent }: Begun,
        deadline: Instant,
        limit: Duration,
        look: &mut dyn FnMut(),
    ) -> Result<Answer, LabError> {
        const WHAT: &str = "end of its command";
        loop {
            let early =
                self.ends.iter().position(|arrival| ended_command(&arrival.event) == Some(id));
            let arrival = match early {
                Some(index) => self.ends.swap_remove(index),
                None => self.next_event(WHAT, deadline, limit, look)?,
            };
            let of = ended_command(&arrival.event);
            if of.is_some_and(|of| self.begun.contains(&of)) {
                self.ends.push(arrival);
                continue;
            }
            let Arrival { begun, at, event } = arrival;
            match event {
                Event::Done { id: of, elapsed_ms, result } if of == id => {
                    return Ok(Answer {
                        sent,
                        answered: begun,
                        elapsed: Duration::from_millis(elapsed_ms),
                        waited: at - sent,
                        result,
                    });
                }
                Event::Failed { id: of, error } if of == id => {
                    return Err(self.failed(GuestProblem::Failed(error)));
                }
                // A second Ready means that the guest has started anew, and forgotten the command.
                Event::Ready { .. } => {
                    return Err(
                        self.failed(GuestProblem::Protocol("the guest restarted".to_owned()))
                    );
                }
                _ => {}
            }
        }
    }

    /// The error for a guest that has ended by itself; `None` while it runs.
    pub fn ended_by_itself(&mut self) -> Option<LabError> {
        match self.process.try_wait() {
            Ok(Some(status)) => Some(self.failed(GuestProblem::EndedIdle(describe(status)))),
            _ => None,
        }
    }

    /// Sends the signal that no process survives, and does not wait.
    pub fn kill(&mut self) {
        // It may have ended already.
        let _ = self.process.kill();
    }

    /// Sends a command; the time right before its end was sent.
    fn send(&mut self, request: &Request, sending: Sending) -> Result<Instant, LabError> {
        let line =
            request.to_line().map_err(|error| self.failed(GuestProblem::Console(error.into())))?;
        let sent = match &mut self.input {
            Some(input) => write_line(input, &line, sending),
            None => Err(std::io::ErrorKind::NotConnected.into()),
        };
        match sent {
            Ok(at) => Ok(at),
            // A console that nobody reads any more: how the monitor ended says more than the broken
            // pipe.
            Err(error) => Err(match self.ended() {
                Some(status) => {
                    self.failed(GuestProblem::Ended(describe(status), "the next command"))
                }
                None => self.failed(GuestProblem::Console(error)),
            }),
        }
    }

    fn next_event(
        &mut self,
        what: &'static str,
        deadline: Instant,
        limit: Duration,
        look: &mut dyn FnMut(),
    ) -> Result<Arrival, LabError> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.events.recv_timeout(left.min(POLL_INTERVAL)) {
                Ok(arrival) => return Ok(arrival),
                Err(RecvTimeoutError::Timeout) if left.is_zero() => {
                    return Err(self.failed(GuestProblem::TimeOut { what, limit }));
                }
                Err(RecvTimeoutError::Timeout) => look(),
                Err(RecvTimeoutError::Disconnected) => {
                    let end =
                        self.ended().map_or_else(|| "its console is closed".to_owned(), describe);
                    return Err(self.failed(GuestProblem::Ended(end, what)));
                }
            }
        }
    }

    /// How the monitor ended; `None` when it has not within a short time.
    fn ended(&mut self) -> Option<ExitStatus> {
        let deadline = Instant::now() + END_LIMIT;
        loop {
            match self.process.try_wait() {
                Ok(Some(status)) => return Some(status),
                Ok(None) if Instant::now() < deadline => thread::sleep(Duration::from_millis(10)),
                _ => return None,
            }
        }
    }

    /// The error for a guest that was found to have ended while something was measured.
    pub fn lost(&mut self, what: &'static str) -> LabError {
        let end = self.ended().map_or_else(|| "it has no memory".to_owned(), describe);
        self.failed(GuestProblem::Ended(end, what))
    }

    /// The error for a guest with this problem.
    pub fn failed(&self, problem: GuestProblem) -> LabError {
        let diagnostics = format!(
            "{}{}",
            show(&self.console, "last lines of its console"),
            show(&self.log, "last lines of its monitor")
        );
        LabError::Guest { guest: self.number, problem, diagnostics }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.kill();
        // Its memory is the host's again only when it has been waited for.
        let _ = self.process.wait();
    }
}

/// The command whose end an event tells.
fn ended_command(event: &Event) -> Option<u64> {
    match event {
        Event::Done { id, .. } | Event::Failed { id, .. } => Some(*id),
        _ => None,
    }
}

/// An exit status as people say it.
fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => status.to_string(),
    }
}

/// Sorts a console until its end.
fn read_console(mut output: impl BufRead, events: &Sender<Arrival>, tail: &SharedTail) {
    let mut begun = Instant::now();
    while let Ok(Some(line)) = console::read_line(&mut output, &mut || begun = Instant::now()) {
        match line {
            Line::Text(text) => push(tail, text),
            // A receiver that is gone is a guest that is being dropped.
            Line::Event(event) => {
                drop(events.send(Arrival { begun, at: Instant::now(), event: *event }));
            }
        }
    }
}

/// Writes a line, which has an end; the time right before the end was written.
fn write_line(input: &mut impl Write, line: &[u8], sending: Sending) -> std::io::Result<Instant> {
    let (before, end) = match sending {
        Sending::AtOnce => (&[][..], line),
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

/// Makes the kernel kill the program when this thread ends, so that no guest outlives the lab.
pub(crate) fn end_with_parent(program: &mut Program) {
    let parent = getpid();
    let in_child = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // The parent may have ended before the request was made.
        if getppid() == Some(parent) { Ok(()) } else { Err(std::io::ErrorKind::BrokenPipe.into()) }
    };
    // SAFETY: between fork and exec only async-signal-safe functions may be called. The closure
    // makes two system calls (prctl, getppid) through rustix, takes no lock and allocates nothing;
    // `ErrorKind` to `Error` is a value.
    unsafe { program.pre_exec(in_child) };
}

#[cfg(test)]
mod tests;

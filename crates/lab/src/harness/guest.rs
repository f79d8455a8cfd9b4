//! A running guest of a series: its commands and answers.

use std::os::unix::process::ExitStatusExt;
use std::process::{Command as Program, ExitStatus};
use std::time::{Duration, Instant};

use ebb_agent::command_line::BalloonDriver;
use ebb_agent::protocol::{Command, Event, Request};

use crate::LabError;
use crate::error::GuestProblem;
use crate::harness::guest_process::{GuestProcess, NotSaid, Said, Sending};

/// Interval at which a waiting caller is called back.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Time limit for the end of a monitor that has closed its console.
const END_LIMIT: Duration = Duration::from_secs(5);

/// A guest; killed with its monitor when dropped, and when this process ends in any way.
#[derive(Debug)]
pub struct Guest {
    number: u32,
    process: GuestProcess,
    started: Instant,
    next_id: u64,
}

/// Result of a command.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    /// Right before the end of the command's line was sent: the guest did not do it earlier.
    pub sent: Instant,
    /// When the first byte of the answer arrived: the guest did not do it later.
    pub answered: Instant,
    /// Time it took by the guest's clock.
    pub elapsed: Duration,
    /// Time from sending the command to its answer by the host's clock.
    pub waited: Duration,
    /// The agent's result.
    pub result: serde_json::Value,
}

/// A started command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Begun {
    id: u64,
    sent: Instant,
}

impl Begun {
    /// When it was sent.
    pub fn sent(self) -> Instant {
        self.sent
    }

    /// Its end in a guest's output.
    fn end_in(self, said: &Said) -> Option<Result<Answer, GuestProblem>> {
        let Some((arrival, outcome)) = said.end_of(self.id) else {
            // After a second start the guest no longer has the command.
            let restarted = said.starts().nth(1).is_some();
            let problem = GuestProblem::Protocol("the guest restarted".to_owned());
            return restarted.then_some(Err(problem));
        };
        Some(match outcome {
            Ok((elapsed, result)) => Ok(Answer {
                sent: self.sent,
                answered: arrival.begun,
                elapsed,
                waited: arrival.at - self.sent,
                result: result.clone(),
            }),
            Err(error) => Err(GuestProblem::Failed(error.to_owned())),
        })
    }
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
        let started = Instant::now();
        let process =
            GuestProcess::start(&mut monitor).map_err(|cause| LabError::StartMonitor {
                program: monitor.get_program().to_string_lossy().into_owned(),
                cause,
            })?;
        Ok(Self { number, process, started, next_id: 1 })
    }

    /// Takes over the state of `earlier`, the same guest in another monitor: the commands' numbers
    /// continue, and started commands stay valid.
    pub fn goes_on_from(&mut self, earlier: &mut Self) {
        self.next_id = earlier.next_id;
        // A command may have ended before the guest was moved.
        let of_earlier = |event: &Event| match event {
            Event::Done { id, .. } | Event::Failed { id, .. } => *id < earlier.next_id,
            Event::Ready { .. } => true,
            _ => false,
        };
        let mut events = std::mem::take(&mut earlier.process.transcript().lock().events);
        events.retain(|arrival| of_earlier(&arrival.event));
        self.process.transcript().lock().events.extend(events);
    }

    /// A guest that was forked from this one, as far as its serial console shows it: `console`
    /// connects with that, and its process is not the guest's monitor. The commands' numbers
    /// continue.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn forked(&self, number: u32, console: Program) -> Result<Self, LabError> {
        Ok(Self { next_id: self.next_id, ..Self::start(number, console)? })
    }

    /// Number of the guest in its series.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Process of its monitor.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Waits for the agent's first event; returns the time since the start of the monitor.
    ///
    /// # Errors
    /// [`LabError::Guest`] when the monitor ends first, or the limit passes.
    pub fn wait_ready(&mut self, limit: Duration) -> Result<Duration, LabError> {
        let deadline = self.started + limit;
        let ready = |said: &Said| said.starts().next().map(|arrival| arrival.at);
        let at = self.wait("sign of its agent", deadline, limit, &mut || {}, ready)?;
        Ok(at - self.started)
    }

    /// Whether its agent has sent its first event.
    pub fn is_ready(&self) -> bool {
        self.process.transcript().lock().starts().next().is_some()
    }

    /// Time from the start of the monitor to this moment.
    pub fn since_start(&self, at: Instant) -> Duration {
        at.saturating_duration_since(self.started)
    }

    /// Checks that the guest has this balloon driver.
    ///
    /// # Errors
    /// [`LabError::Guest`] with the agent's message when it was ready.
    pub fn require_driver(&self, wanted: BalloonDriver) -> Result<(), LabError> {
        let said = self.process.transcript().lock();
        let (loaded, warnings) = match said.starts().next().map(|arrival| &arrival.event) {
            Some(Event::Ready { balloon_driver, .. }) if *balloon_driver == wanted => return Ok(()),
            Some(Event::Ready { balloon_driver, warnings, .. }) => {
                (balloon_driver.name(), warnings.join("; "))
            }
            _ => ("nothing yet", String::new()),
        };
        drop(said);
        let text = format!("expected driver {}, found {loaded} ({warnings})", wanted.name());
        Err(self.failed(GuestProblem::Protocol(text)))
    }

    /// Sends a command and waits for its end; `look` is called a few times per second meanwhile.
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
        let begun = self.send(command, sending)?;
        self.await_end(begun, begun.sent + limit, limit, look)
    }

    /// Starts a command whose end is awaited later, by [`Self::finish`]; other commands may be sent
    /// in between.
    ///
    /// # Errors
    /// [`LabError::Guest`] when the command cannot be sent.
    pub fn begin(&mut self, command: Command) -> Result<Begun, LabError> {
        self.send(command, Sending::AtOnce)
    }

    /// Waits for the end of a started command.
    ///
    /// # Errors
    /// As [`Self::command`]; the limit counts from now.
    pub fn finish(&mut self, begun: Begun, limit: Duration) -> Result<Answer, LabError> {
        self.await_end(begun, Instant::now() + limit, limit, &mut || {})
    }

    fn await_end(
        &mut self,
        begun: Begun,
        deadline: Instant,
        limit: Duration,
        look: &mut dyn FnMut(),
    ) -> Result<Answer, LabError> {
        self.wait("end of its command", deadline, limit, look, |said| begun.end_in(said))?
            .map_err(|problem| self.failed(problem))
    }

    /// The end of a started command; `None` while it is executed.
    ///
    /// # Errors
    /// [`LabError::Guest`] when the command has failed.
    pub fn end_of(&mut self, begun: Begun) -> Result<Option<Answer>, LabError> {
        let end = begun.end_in(&self.process.transcript().lock());
        end.transpose().map_err(|problem| self.failed(problem))
    }

    /// The error for a guest that has ended by itself; `None` while it runs.
    pub fn ended_by_itself(&mut self) -> Option<LabError> {
        let status = self.process.status()?;
        Some(self.failed(GuestProblem::EndedIdle(describe(status))))
    }

    /// Sends SIGKILL and does not wait.
    pub fn kill(&mut self) {
        self.process.kill();
    }

    /// Sends a command.
    fn send(&mut self, command: Command, sending: Sending) -> Result<Begun, LabError> {
        let id = self.next_id;
        self.next_id += 1;
        match self.process.send(&Request { id, command }, sending) {
            Ok(sent) => Ok(Begun { id, sent }),
            // The console is no longer read: the monitor's exit status explains more than the
            // broken pipe.
            Err(error) => Err(match self.process.wait_end(END_LIMIT) {
                Some(status) => {
                    self.failed(GuestProblem::Ended(describe(status), "the next command"))
                }
                None => self.failed(GuestProblem::Console(error)),
            }),
        }
    }

    /// Waits until `find` finds something in the guest's output.
    fn wait<T>(
        &mut self,
        what: &'static str,
        deadline: Instant,
        limit: Duration,
        look: &mut dyn FnMut(),
        find: impl Fn(&Said) -> Option<T>,
    ) -> Result<T, LabError> {
        loop {
            let next_look = deadline.min(Instant::now() + POLL_INTERVAL);
            match self.process.transcript().wait(next_look, &find) {
                Ok(found) => return Ok(found),
                Err(NotSaid::TimeOut) if next_look == deadline => {
                    return Err(self.failed(GuestProblem::TimeOut { what, limit }));
                }
                Err(NotSaid::TimeOut) => look(),
                Err(NotSaid::Closed) => {
                    let status = self.process.wait_end(END_LIMIT);
                    let end = status.map_or_else(|| "its console is closed".to_owned(), describe);
                    return Err(self.failed(GuestProblem::Ended(end, what)));
                }
            }
        }
    }

    /// The error for a guest that was found to have ended while something was measured.
    pub fn lost(&mut self, what: &'static str) -> LabError {
        let status = self.process.wait_end(END_LIMIT);
        let end = status.map_or_else(|| "it has no memory".to_owned(), describe);
        self.failed(GuestProblem::Ended(end, what))
    }

    /// The error for a guest with this problem.
    pub fn failed(&self, problem: GuestProblem) -> LabError {
        let said = self.process.transcript().lock();
        let console = said.console.show("last lines of its console");
        let diagnostics = console + &said.log.show("last lines of its monitor");
        LabError::Guest { guest: self.number, problem, diagnostics }
    }
}

/// Describes an exit status.
fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => status.to_string(),
    }
}

#[cfg(test)]
mod tests;

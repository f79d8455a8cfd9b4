//! Reception of a machine, on a thread of its own.

use std::io::Read;
use std::sync::Arc;
use std::sync::mpsc::{Receiver as Incoming, Sender};
use std::time::{Duration, Instant};

use ebb_guest_ram::SharedRam;
use ebb_migration::session::{
    DestinationAccepted, DestinationCommitted, DestinationSetup, DestinationStreaming, Listener,
};
use ebb_migration::{BoxError, Cancel, Receiver, TargetMemory};
use vmm_sys_util::eventfd::EventFd;

use super::super::description::Description;
use crate::isolation::KeptName;
use crate::snapshot::MachineState;
use crate::vm::{Started, Vm};

/// Most data streams accepted.
const MAX_STREAMS: u16 = 16;

/// The main thread's answer to a description.
pub(super) enum Answer {
    /// The machine was built; `running` is signalled when it runs.
    Vm { vm: Arc<Vm>, running: EventFd },
    /// It cannot be built, for this reason.
    Refused(String),
}

/// State of the receiving thread.
pub(super) struct Arrival {
    pub listener: Listener,
    /// The listener's name in the file system.
    pub name: Option<KeptName>,
    pub time_limit: Option<Duration>,
    pub cancel: Cancel,
    pub descriptions: Sender<Box<Announced>>,
    pub answers: Incoming<Answer>,
    /// Wakes the main thread.
    pub event: EventFd,
}

/// Why the machine does not arrive. The source has been informed.
type Problem = String;

fn problem(error: impl std::fmt::Display) -> Problem {
    error.to_string()
}

/// What the main thread needs to build the machine.
pub(super) struct Announced {
    pub description: Description,
    /// Its memory, if that is shared.
    pub shared: Option<SharedRam>,
}

/// A source that waits for an answer.
enum Source {
    /// Waits to be accepted.
    Answer(DestinationSetup),
    /// Was accepted to get its memory, and may still be refused.
    Taken(DestinationAccepted),
}

impl Source {
    fn refuse(self, reason: &str) {
        match self {
            Self::Answer(setup) => setup.refuse(reason),
            Self::Taken(accepted) => drop(accepted.abort(reason)),
        }
    }

    fn accept(self) -> Result<DestinationAccepted, Problem> {
        match self {
            Self::Answer(setup) => {
                let streams = setup.streams().clamp(1, MAX_STREAMS);
                setup.accept(streams).map_err(problem)
            }
            Self::Taken(accepted) => Ok(accepted),
        }
    }
}

impl Arrival {
    /// Waits for a source, receives its machine and starts it.
    pub(super) fn run(mut self) -> Result<(), Problem> {
        let (setup, description) =
            self.listener.receive_setup::<Description>(self.time_limit).map_err(problem)?;
        let (shares, cpus) = (description.shared.is_some(), description.machine.cpus);
        let (waiting, shared) = take_shared(setup, &description)?;
        // The main thread waits for this, or has ended and closed its end.
        let sent = self.descriptions.send(Box::new(Announced { description, shared }));
        let _ = self.event.write(1);
        let answer = sent.ok().and_then(|()| self.answers.recv().ok());
        let (vm, running) = match answer {
            Some(Answer::Vm { vm, running }) => (vm, running),
            Some(Answer::Refused(reason)) => {
                waiting.refuse(&reason);
                return Err(reason);
            }
            None => {
                let reason = "the receiver was stopped";
                waiting.refuse(reason);
                return Err(reason.to_owned());
            }
        };
        let (mut streaming, streams) =
            waiting.accept()?.join(&mut self.listener).map_err(problem)?;
        // Its name in the file system is free for the next receiver.
        drop(self.name);
        drop(self.listener);
        if !shares {
            let streams = streams.into_iter().map(|stream| {
                let connection = stream.shutdown_handle();
                self.cancel.on_cancel(move || connection.shut_down());
                Box::new(stream) as Box<dyn Read + Send>
            });
            let streams = streams.collect();
            streaming = receive_memory(&vm, streaming, streams, &self.cancel)?;
        }
        let (restoring, bytes) = streaming.receive_state().map_err(problem)?;
        let paused = match restore(&vm, &bytes, cpus) {
            Ok(paused) => paused,
            Err(reason) => {
                restoring.fail(reason.as_str());
                return Err(reason);
            }
        };
        let committed = restoring.ready().map_err(problem)?;
        start(&vm, committed, paused)?;
        // Makes the main thread poll console input from now on.
        let _ = running.write(1);
        Ok(())
    }
}

/// Receives shared memory. The source sends it when the machine is accepted.
fn take_shared(
    setup: DestinationSetup,
    description: &Description,
) -> Result<(Source, Option<SharedRam>), Problem> {
    let Some(layout) = description.shared.clone() else {
        return Ok((Source::Answer(setup), None));
    };
    let mut accepted = setup.accept(1).map_err(problem)?;
    match accepted.receive_descriptors() {
        Ok(files) => Ok((Source::Taken(accepted), Some(SharedRam { layout, files }))),
        Err(error) => {
            let reason = problem(error);
            accepted.abort(reason.as_str());
            Err(reason)
        }
    }
}

/// Receives all memory.
fn receive_memory(
    vm: &Arc<Vm>,
    mut streaming: DestinationStreaming,
    streams: Vec<Box<dyn Read + Send>>,
    cancel: &Cancel,
) -> Result<DestinationStreaming, Problem> {
    let receiver = Receiver {
        memory: &*vm.ram as &dyn TargetMemory,
        streams,
        round_done: &mut |round| {
            streaming.round_done(round).map_err(|error| Box::new(error) as BoxError)
        },
        cancel: cancel.clone(),
    };
    match receiver.run() {
        Ok(report) => {
            tracing::debug!(
                "received {} bytes of memory in {} rounds",
                report.bytes_received,
                report.rounds
            );
            Ok(streaming)
        }
        Err(error) => {
            let reason = error.to_string();
            // An error that the source reported first is the better reason.
            let said = streaming.abort(reason.as_str());
            Err(said.map_or(reason, |said| said.to_string()))
        }
    }
}

/// Restores the received state; returns whether the machine remains paused.
fn restore(vm: &Vm, bytes: &[u8], cpus: u8) -> Result<bool, Problem> {
    let begin = Instant::now();
    let state: MachineState = serde_json::from_slice(bytes)
        .map_err(|error| format!("the machine's state is invalid: {error}"))?;
    tracing::debug!("a state of {} bytes was read in {:?}", bytes.len(), begin.elapsed());
    if state.machine.cpus != cpus {
        return Err(format!(
            "the state has {} vCPUs, but {cpus} were announced",
            state.machine.cpus
        ));
    }
    state
        .validate(vm.ram.size_bytes())
        .map_err(|what| format!("the machine's state is inconsistent: {what}"))?;
    let paused = state.paused;
    vm.restore(state).map_err(problem)?;
    Ok(paused)
}

/// Starts the machine after the source has committed, or reports that it never will run. The latter
/// only while no vCPU has run: after a start, the machine belongs here whatever happens.
fn start(vm: &Arc<Vm>, committed: DestinationCommitted, paused: bool) -> Result<(), Problem> {
    let started = vm
        .acquire_exclusive()
        .and_then(|()| if paused { Ok(vm.start_paused()) } else { vm.start().map_err(problem) });
    let reason = match started {
        Ok(Started::Yes) => {
            committed.running();
            return Ok(());
        }
        Ok(Started::No) => "the receiver was stopped".to_owned(),
        Err(reason) => reason,
    };
    // The source acquires them at once, perhaps before this process has ended.
    if let Err(problem) = vm.release_exclusive() {
        tracing::warn!("the source may not get its devices back: {problem}");
    }
    committed.failed(reason.as_str());
    Err(reason)
}

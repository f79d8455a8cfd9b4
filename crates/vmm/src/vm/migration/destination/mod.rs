//! A monitor that waits for another one's machine and continues it.
//!
//! The main thread builds the machine, since that takes system calls that no thread with a filter
//! may make. Network input is read by a thread with the filter for migrations ([`arrival`]), even
//! before there is a machine.

mod arrival;
mod pending;

use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use ebb_guest_ram::{Backing, SharedRam};
use ebb_kvm_clock::ClockPolicy;
use ebb_migration::Cancel;
use ebb_migration::session::{Address, CancelHandle, Cancellation, Listener, Security, TimeLimits};
use rustix::event::{PollFd, PollFlags, poll};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::MigrationThread;
use super::description::Description;
use super::source::greeting;
use crate::api::ApiSocket;
use crate::devices::virtio::net::{OpenNet, open_all};
use crate::ending::join_until;
use crate::exit::{ExitSignal, GuestExit};
use crate::file::readable;
use crate::isolation::{Isolation, KeptName, Sockets};
use crate::seccomp::{Filters, ThreadKind};
use crate::snapshot::{DescribedPaths, Overrides, SnapshotError};
use crate::vm::build::{Built, build, prepare};
use crate::vm::console::Console;
use crate::vm::event_loop::signals::Signals;
use crate::vm::event_loop::{start_api, start_log, wait_for_end};
use crate::vm::origin::{Arriving, Origin, Resources};
use crate::vm::{Vm, VmError, lock};
use arrival::{Announced, Answer, Arrival};
use pending::PendingVm;

/// Configuration of a monitor that waits for a machine.
pub struct ReceiveConfig {
    /// The address to listen at.
    pub listen: Address,
    /// The peers that it trusts.
    pub security: Security,
    /// How long it waits for a source; `None` for no limit.
    pub time_limit: Option<Duration>,
    /// Settings made here and not by the source.
    pub overrides: Overrides,
    /// Backing of guest memory; `None` for that at the source.
    pub backing: Option<Backing>,
}

/// Waits for a machine, and runs it until it ends. Calls `on_listening` with the address as soon as
/// it listens.
pub fn receive(
    config: ReceiveConfig,
    on_listening: impl FnOnce(&Address),
) -> Result<GuestExit, VmError> {
    // As for a machine that starts here: before any thread starts.
    let signals = Signals::block().map_err(VmError::host("take over signals"))?;
    let exit = Arc::new(ExitSignal::new().map_err(VmError::host("create an event"))?);
    let pending = Arc::new(PendingVm::new(
        exit.clone(),
        config.overrides.clock.unwrap_or(ClockPolicy::Continue),
    ));
    let api = config.overrides.api.as_deref().map(ApiSocket::bind).transpose()?;
    let session = CancelHandle::new().map_err(VmError::host("create an event"))?;
    let limits = TimeLimits::default();
    let mut listener =
        Listener::bind(&config.listen, &config.security, &greeting(), &limits, &session)
            .map_err(|error| VmError::NotReceived(error.to_string()))?;
    let file = listener.take_file();
    // A trusted description may name one.
    let trusts = config.overrides.described_paths == DescribedPaths::Trust;
    let has_vsock = config.overrides.vsock.is_some() || trusts;
    let has_broker = config.overrides.merge.broker.is_some();
    let has_sockets = api.is_some() || file.is_some() || has_vsock || has_broker;
    let sockets = if has_sockets { Sockets::Some } else { Sockets::None };
    let seccomp = config.overrides.seccomp;
    // In the host's network namespace. Whether they fit the machine is found out when it comes.
    let nets = open_all(&config.overrides.nets)?;
    let mut isolation = Isolation::begin(&config.overrides.isolation, seccomp, sockets)?;
    let filters = Filters::new(seccomp)?.with_rights(isolation.rights());
    start_log(&filters, &exit)?;
    on_listening(listener.address());
    let name = file.map(|file| isolation.keep_name(file)).transpose()?;
    let api = api.map(|socket| isolation.keep(socket.into_parts())).transpose()?;
    let _api = api.map(|socket| start_api(socket, pending.clone(), &exit, &filters)).transpose()?;
    let mut waiting = Waiting::start(listener, name, config.time_limit, session, &exit, &filters)?;

    // Until the configuration is known.
    let Announced { description, shared } = match waiting.description(&exit, &signals)? {
        Next::Announced(announced) => *announced,
        Next::End(exit) => return Ok(exit),
    };
    let serial = config.overrides.serial.clone();
    let Built { mut vm, input_read, .. } =
        match build_for(&description, shared, config, nets, &isolation, &filters, &exit) {
            Ok(built) => built,
            Err(error) => {
                waiting.refuse(&error);
                return Err(VmError::NotReceived(error.to_string()));
            }
        };
    let on_reboot = vm.config.on_reboot;
    isolation.complete(vm.needs())?;
    vm.isolation = isolation.info().clone();
    vm.companion = isolation.companion().cloned();
    let vm = Arc::new(vm);
    pending.arrive(&vm);
    let _migrations =
        vm.config.api.is_some().then(|| MigrationThread::start(&vm, &filters)).transpose()?;
    let wake = input_read.try_clone().map_err(VmError::host("duplicate an event"))?;
    let console = Console::open(&serial, input_read, &vm)?;
    filters.for_thread(ThreadKind::Main).apply()?;
    waiting.accept(&vm, wake);
    let end = wait_for_end(&vm, &signals, console, on_reboot);
    match waiting.end() {
        Some(problem) if matches!(end, GuestExit::Monitor { .. }) => {
            Err(VmError::NotReceived(problem))
        }
        _ => Ok(end),
    }
}

/// Builds the machine and compares it with its description.
fn build_for(
    description: &Description,
    shared: Option<SharedRam>,
    config: ReceiveConfig,
    nets: Vec<OpenNet>,
    isolation: &Isolation,
    filters: &Filters,
    exit: &Arc<ExitSignal>,
) -> Result<Built, VmError> {
    let backing = config.backing.unwrap_or(description.machine.backing);
    let mut machine = description.machine.clone().into_vm_config(config.overrides)?;
    if nets.len() != machine.nets.len() {
        // They are opened before the description comes, so that those in it cannot be.
        return Err(SnapshotError::Nets { saved: machine.nets.len(), given: nets.len() }.into());
    }
    machine.memory.backing = shared.as_ref().map_or(backing, |shared| shared.layout.backing);
    if backing != Backing::Hugetlb2M
        && let Some(available_bytes) = available_bytes()
    {
        description.check_memory(available_bytes)?;
    }
    let arriving =
        Arriving { processor: description.processor.clone(), tsc_khz: description.tsc_khz, shared };
    let origin = Origin::Migration(Box::new(arriving));
    prepare(&mut machine)?;
    let resources = Resources::open(&machine, nets, isolation, origin.disk_lock())?;
    let built = build(machine, origin, resources, filters, exit)?;
    description.check(&built.vm.here())?;
    Ok(built)
}

/// `MemAvailable` of this host (Linux Documentation/filesystems/proc.rst, `meminfo`), in bytes.
fn available_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.split_ascii_whitespace().next()?.parse().ok()?;
    Some(kib << 10)
}

/// The main thread's next step.
enum Next {
    Announced(Box<Announced>),
    End(GuestExit),
}

/// The main thread's handle of the receiving thread. Dropping it cancels the reception.
struct Waiting {
    session: CancelHandle,
    cancel: Cancel,
    exit: Arc<ExitSignal>,
    /// Signalled when a description has arrived or the thread has ended.
    event: EventFd,
    descriptions: Receiver<Box<Announced>>,
    answers: Option<Sender<Answer>>,
    /// Why the machine did not arrive.
    problem: Arc<Mutex<Option<String>>>,
    thread: Option<JoinHandle<()>>,
}

impl Waiting {
    fn start(
        listener: Listener,
        name: Option<KeptName>,
        time_limit: Option<Duration>,
        session: CancelHandle,
        exit: &Arc<ExitSignal>,
        filters: &Filters,
    ) -> Result<Self, VmError> {
        let event = EventFd::new(EFD_NONBLOCK).map_err(VmError::host("create an event"))?;
        let wake = event.try_clone().map_err(VmError::host("duplicate an event"))?;
        let (descriptions_sender, descriptions) = mpsc::channel();
        let (answers, answers_receiver) = mpsc::channel();
        let (problem, cancel) = (Arc::new(Mutex::new(None)), Cancel::new());
        let arrival = Arrival {
            listener,
            name,
            time_limit,
            cancel: cancel.clone(),
            descriptions: descriptions_sender,
            answers: answers_receiver,
            event: wake,
        };
        let (filter, exit, told) =
            (filters.for_thread(ThreadKind::Migrate), exit.clone(), problem.clone());
        let ends = exit.clone();
        let thread = std::thread::Builder::new()
            .name("receive".to_owned())
            .spawn(move || {
                let event = arrival.event.try_clone();
                let result =
                    filter.apply().map_err(|error| error.to_string()).and_then(|()| arrival.run());
                if let Err(problem) = result {
                    *lock(&told) = Some(problem.clone());
                    exit.raise(GuestExit::Monitor { message: problem });
                }
                // A full counter has woken the main thread already.
                let _ = event.map(|event| event.write(1));
            })
            .map_err(VmError::host("start the thread that receives"))?;
        Ok(Self {
            session,
            cancel,
            exit: ends,
            event,
            descriptions,
            answers: Some(answers),
            problem,
            thread: Some(thread),
        })
    }

    /// Waits for a description.
    fn description(&mut self, exit: &ExitSignal, signals: &Signals) -> Result<Next, VmError> {
        loop {
            let mut fds = [
                readable(exit.event()),
                PollFd::new(signals, PollFlags::IN),
                readable(&self.event),
            ];
            match poll(&mut fds, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(VmError::host("wait for events")(error)),
            }
            let _ = self.event.read();
            if let Some(name) = signals.take() {
                self.end();
                return Ok(Next::End(GuestExit::Signal { name }));
            }
            if let Ok(description) = self.descriptions.try_recv() {
                return Ok(Next::Announced(description));
            }
            if let Some(exit) = exit.pending() {
                return match self.end() {
                    Some(problem) if exit != GuestExit::Killed => {
                        Err(VmError::NotReceived(problem))
                    }
                    _ => Ok(Next::End(exit)),
                };
            }
        }
    }

    /// Passes the built machine to the thread.
    fn accept(&mut self, vm: &Arc<Vm>, running: EventFd) {
        // A thread that has ended has recorded the reason.
        let _ =
            self.answers.take().map(|answers| answers.send(Answer::Vm { vm: vm.clone(), running }));
    }

    /// Refuses the machine because it cannot be built.
    fn refuse(&mut self, error: &VmError) {
        let _ = self.answers.take().map(|answers| answers.send(Answer::Refused(error.to_string())));
        if let Some(thread) = self.thread.take() {
            // It keeps what it uses.
            let _ = join_until(thread, self.exit.end_deadline());
        }
    }

    /// Cancels an incomplete reception; returns why the machine did not arrive, if it did not.
    fn end(&mut self) -> Option<String> {
        self.answers = None;
        // The session first: it knows whether it is too late.
        if self.session.cancel() == Cancellation::Cancelled {
            self.cancel.cancel();
        }
        if let Some(thread) = self.thread.take() {
            // It keeps what it uses.
            let _ = join_until(thread, self.exit.end_deadline());
        }
        lock(&self.problem).take()
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.end();
    }
}

//! The main thread: waits for the end of the guest, for signals and for console input.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ebb_guest_ram::{Populate, RamError};
use ebb_local_io::SocketFile;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::build::{Built, build, prepare, restrict_writer};
use super::console::{Console, Wish};
use super::migration::MigrationThread;
use super::origin::{Origin, Resources};
use super::reboots::RecentReboots;
use super::start_parts::StartParts;
use super::{Reset, Vm, VmError};
use crate::api::control::Machine;
use crate::api::door::Door;
use crate::api::server::{Clients, Limits};
use crate::api::vm::VmState;
use crate::api::{ApiServer, ApiSocket};
use crate::config::{RebootAction, VmConfig};
use crate::devices::guest_log;
use crate::devices::virtio::net::open_all;
use crate::exit::{ExitSignal, GuestExit};
use crate::file::readable;
use crate::isolation::{Companion, Isolation, KeptName, Sockets};
use crate::own_pages::{end_inherited_merging, release_program_pages};
use crate::seccomp::{Filters, ThreadKind};
use crate::snapshot::working_set::ReadAhead;
use crate::snapshot::{Overrides, SnapshotFile};

pub(super) mod signals;

use signals::Signals;

/// Interval of attempts to reboot a machine that is stopping, or being paused, saved or sent.
const RESET_RETRY: Duration = Duration::from_millis(2);

/// State of a restored machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// The machine runs at once.
    Running,
    /// The machine waits for a resume through the API.
    Paused,
}

/// Boots a virtual machine and runs it until it ends.
pub fn run(config: VmConfig) -> Result<GuestExit, VmError> {
    run_from(config, Origin::Kernel, Start::Running, None)
}

/// An API that was served before its machine was known.
pub(crate) struct Front {
    /// Its clients, one of whom waits for the start.
    pub clients: Clients,
    /// The name of its socket, until the companion keeps it.
    pub name: Option<SocketFile>,
    /// The signals that end the monitor, which are blocked, until the machine takes them over.
    pub signals: Option<Signals>,
    /// What was served, for the last replies if the machine cannot be started.
    pub pre_boot: Arc<dyn Door>,
    /// Makes the API of the machine.
    #[expect(clippy::type_complexity, reason = "it is named by its field")]
    pub door: Box<dyn FnOnce(Arc<dyn Machine>, Option<Companion>) -> Arc<dyn Door>>,
    /// Receives the outcome of the start.
    pub started: Box<dyn Fn(Result<(), String>)>,
}

/// As [`run`], behind an API that has been served before.
pub(crate) fn boot_behind(config: VmConfig, front: Front) -> Result<GuestExit, VmError> {
    run_from(config, Origin::Kernel, Start::Running, Some(front))
}

/// As [`restore`], behind an API that has been served before, whose client has checked the disks.
pub(crate) fn restore_behind(
    snapshot: SnapshotFile,
    overrides: Overrides,
    start: Start,
    front: Front,
) -> Result<GuestExit, VmError> {
    let config = snapshot.state.machine.clone().into_vm_config(overrides)?;
    run_from(config, Origin::Snapshot(Box::new(snapshot)), start, Some(front))
}

/// What to do about a disk that was written after the snapshot was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChangedDisks {
    /// The machine is not continued: its guest caches file systems in memory, and would damage
    /// those that have changed.
    Refuse,
    /// The machine is continued.
    Accept,
}

/// Continues the machine of a snapshot and runs it until it ends.
pub fn restore(
    snapshot: SnapshotFile,
    overrides: Overrides,
    changed_disks: ChangedDisks,
    start: Start,
) -> Result<GuestExit, VmError> {
    let config = snapshot.state.machine.clone().into_vm_config(overrides)?;
    if changed_disks == ChangedDisks::Refuse {
        snapshot.state.check_disks(&config.disks)?;
    }
    run_from(config, Origin::Snapshot(Box::new(snapshot)), start, None)
}

fn run_from(
    config: VmConfig,
    origin: Origin,
    start: Start,
    mut front: Option<Front>,
) -> Result<GuestExit, VmError> {
    let outcome = run_machine(config, origin, start, &mut front);
    // Remains if no thread serves the clients: one that waits for an answer gets the reason.
    if let (Some(front), Err(error)) = (front, &outcome) {
        (front.started)(Err(error.to_string()));
        front.clients.finish(&*front.pre_boot);
    }
    outcome
}

fn run_machine(
    mut config: VmConfig,
    mut origin: Origin,
    start: Start,
    front: &mut Option<Front>,
) -> Result<GuestExit, VmError> {
    let mut parts = StartParts::new();
    // Memory is merged only if the machine's configuration says so.
    end_inherited_merging().map_err(VmError::host("end the inherited merging by ksmd"))?;
    let on_reboot = config.on_reboot;
    // Before any thread starts: signals are handled by this thread, and threads inherit the mask.
    let signals = match front.as_mut().and_then(|front| front.signals.take()) {
        Some(signals) => signals,
        None => Signals::block().map_err(VmError::host("take over signals"))?,
    };
    let serial = config.serial.clone();
    let own = match front {
        Some(_) => None,
        None => config.api.as_deref().map(ApiSocket::bind).transpose()?,
    };
    let has_names = config.api.is_some() || config.vsock.is_some();
    let has_sockets = has_names || config.memory.merge.broker.is_some();
    let sockets = if has_sockets { Sockets::Some } else { Sockets::None };
    // In the host's network namespace.
    prepare(&mut config)?;
    let nets = open_all(&config.nets)?;
    let mut isolation = Isolation::begin(&config.isolation, config.seccomp, sockets)?;
    let own = own.map(|socket| isolation.keep(socket.into_parts())).transpose()?;
    let filters = Filters::new(config.seccomp)?.with_rights(isolation.rights());
    let exit = Arc::new(ExitSignal::new().map_err(VmError::host("create an event"))?);
    start_log(&filters, &exit)?;
    if let Some(read_ahead) = origin.take_read_ahead() {
        start_read_ahead(read_ahead, &filters, &exit)?;
    }
    parts.end("isolate", Instant::now());
    let resources = Resources::open(&config, nets, &isolation, origin.disk_lock())?;
    let Built { mut vm, input_read, ready_at } = build(config, origin, resources, &filters, &exit)?;
    parts.end("build", ready_at);
    parts.end("load", Instant::now());
    if vm.config.memory.populate == Populate::Prealloc {
        // It takes a second for some GiB, and must not delay an end.
        match vm.ram.populate(&|| signals.is_pending()) {
            Err(RamError::PopulateCancelled) => {}
            populated => populated?,
        }
        if let Some(name) = signals.take() {
            return Ok(GuestExit::Signal { name });
        }
    }
    let name = front.as_mut().and_then(|front| front.name.take());
    let name = name.map(|name| isolation.keep_name(name)).transpose()?;
    let companion = isolation.companion().cloned();
    isolation.complete(vm.needs())?;
    vm.isolation = isolation.info().clone();
    vm.companion.clone_from(&companion);
    let vm = Arc::new(vm);
    let mut started = None;
    let _api = match (own, front.take(), name) {
        (Some(socket), _, _) => Some(start_api(socket, vm.clone(), &exit, &filters)?),
        (None, Some(front), Some(name)) => {
            let door = (front.door)(vm.clone(), companion);
            started = Some(front.started);
            let restrict = restrict_api(&exit, &filters);
            Some(ApiServer::start_clients(front.clients, name, door, restrict)?)
        }
        (None, ..) => None,
    };
    // Dropped before the API, which can then report the outcome of a migration.
    let _migrations =
        vm.config.api.is_some().then(|| MigrationThread::start(&vm, &filters)).transpose()?;
    let console = Console::open(&serial, input_read, &vm)?;
    release_program_pages();
    filters.for_thread(ThreadKind::Main).apply()?;
    parts.end("serve", Instant::now());
    // Set here only.
    let _ = vm.start_parts.set(parts);
    // No other call starts it. It may have been killed already, which is detected below.
    let begun = match start {
        Start::Running => vm.start().map(drop),
        Start::Paused => {
            let _ = vm.start_paused();
            Ok(())
        }
    };
    if let Some(started) = started {
        started(begun.as_ref().map(drop).map_err(ToString::to_string));
    }
    begun?;
    Ok(wait_for_end(&vm, &signals, console, on_reboot))
}

/// Begins to read what the guest will need. A failure costs the guest time only.
fn start_read_ahead(
    read_ahead: ReadAhead,
    filters: &Filters,
    exit: &Arc<ExitSignal>,
) -> Result<(), VmError> {
    let (filter, exit) = (filters.for_thread(ThreadKind::ReadAhead), exit.clone());
    let read = move || match filter.apply() {
        Ok(()) => {
            if let Err(error) = read_ahead.carry_out() {
                tracing::warn!("cannot read the working set of the snapshot: {error}");
            }
        }
        Err(error) => exit.raise(GuestExit::Monitor { message: error.to_string() }),
    };
    let thread = std::thread::Builder::new().name("read-ahead".to_owned()).spawn(read);
    thread.map(drop).map_err(VmError::host("start the thread that reads ahead"))
}

/// From here on, no thread waits for standard error.
pub(super) fn start_log(filters: &Filters, exit: &Arc<ExitSignal>) -> Result<(), VmError> {
    crate::log::start(restrict_writer(filters, exit)).map_err(VmError::host("start the log"))
}

/// Serves the API for `vm`; a failure to restrict the thread is raised as `exit`.
pub(super) fn start_api(
    (listener, name): (OwnedFd, KeptName),
    vm: Arc<dyn Machine>,
    exit: &Arc<ExitSignal>,
    filters: &Filters,
) -> Result<ApiServer, VmError> {
    let restrict = restrict_api(exit, filters);
    Ok(ApiServer::start_with(listener, name, vm, Limits::default(), restrict)?)
}

/// What the thread of an API does first.
fn restrict_api(
    exit: &Arc<ExitSignal>,
    filters: &Filters,
) -> impl FnOnce() + Send + use<> + 'static {
    let (filter, exit) = (filters.for_thread(ThreadKind::Api), exit.clone());
    move || {
        if let Err(error) = filter.apply() {
            exit.raise(GuestExit::Monitor { message: error.to_string() });
        }
    }
}

/// Runs the event loop until the machine ends, and gives the rest of the console's output a moment
/// to be read.
pub(super) fn wait_for_end(
    vm: &Vm,
    signals: &Signals,
    mut console: Console,
    on_reboot: RebootAction,
) -> GuestExit {
    let exit = serve_until_end(vm, signals, &mut console, on_reboot);
    console.finish();
    exit
}

fn serve_until_end(
    vm: &Vm,
    signals: &Signals,
    console: &mut Console,
    on_reboot: RebootAction,
) -> GuestExit {
    let mut receiving = true;
    let mut reboots = RecentReboots::default();
    let mut reboot_at = None;
    loop {
        let mut retry = None;
        match vm.pending_exit() {
            None => {}
            Some(GuestExit::Reboot) if on_reboot == RebootAction::Reset => {
                let now = Instant::now();
                let at = *reboot_at.get_or_insert_with(|| now + wait_to_reboot(&mut reboots, now));
                match if at > now { Ok(Reset::Later) } else { vm.reset() } {
                    Ok(Reset::Done) => reboot_at = None,
                    Ok(Reset::Later) => {
                        // The pending reboot would end the wait at once.
                        vm.exit.await_other();
                        retry = Some(at.saturating_duration_since(now).max(RESET_RETRY));
                    }
                    Err(error) => {
                        return GuestExit::Monitor {
                            message: format!("cannot reboot the guest: {error}"),
                        };
                    }
                }
            }
            Some(exit) => return exit,
        }
        let mut fds = vec![
            readable(vm.exit.event()),
            PollFd::new(signals, PollFlags::IN),
            readable(console.event()),
        ];
        // A machine that has not arrived yet would lose the input. Once it has, an operation may
        // hold the lock of the state for long.
        receiving = receiving && vm.state() == VmState::Receiving;
        fds.extend(console.client(!receiving));
        let stdin = console.stdin(!receiving);
        let reads_stdin = stdin.is_some();
        fds.extend(stdin);
        let timeout = retry.map(|left| Timespec {
            tv_sec: left.as_secs() as i64,
            tv_nsec: i64::from(left.subsec_nanos()),
        });
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => {
                return GuestExit::Monitor { message: format!("cannot wait for events: {error}") };
            }
        }
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        if ready[1]
            && let Some(name) = signals.take()
        {
            return GuestExit::Signal { name };
        }
        if ready[2] {
            console.clear_event();
        }
        let typed = reads_stdin && ready.last() == Some(&true);
        if console.serve(vm, !receiving, typed) == Wish::Quit {
            return GuestExit::Signal { name: "Ctrl-A x" };
        }
    }
}

/// Counts a reboot; returns how long it must wait.
fn wait_to_reboot(reboots: &mut RecentReboots, now: Instant) -> Duration {
    let wait = reboots.wait(now);
    if !wait.is_zero() {
        guest_log!("the guest reboots often: it starts again in {wait:?}");
    }
    wait
}

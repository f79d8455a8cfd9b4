//! A machine in a process that was forked from a checkpoint's.

use std::fs::File;
use std::io::ErrorKind;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;

use ebb_guest_ram::merge::MergeFiles;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::DumpableBehavior;
use rustix::thread::CoreSchedulingScope;
use serde::de::IgnoredAny;

use super::Forkable;
use super::holder::Template;
use crate::checkpoint::{DiskRequest, Files, ForkRequest, MergeRequest, NetRequest, Stage, Start};
use crate::config::{MergeBackend, SerialConfig, Switch, VmConfig, VsockOption};
use crate::devices::virtio::block::DiskFiles;
use crate::devices::virtio::net::OpenNet;
use crate::exit::{ExitSignal, GuestExit};
use crate::forked::{put_in_place, redirect};
use crate::isolation::{Companion, ConnectLink, IsolationConfig, KeptName};
use crate::packet;
use crate::seccomp::ThreadKind;
use crate::snapshot::{MachineConfig, Overrides};
use crate::vm::build::{Built, build, prepare};
use crate::vm::console::Console;
use crate::vm::control::ProcessMemory;
use crate::vm::event_loop::{start_api, start_log, wait_for_end};
use crate::vm::merge::{Given, Merging};
use crate::vm::migration::MigrationThread;
use crate::vm::origin::{Inherited, Origin, Resources};
use crate::vm::vsock::VsockSockets;
use crate::vm::{Signals, VmError};

/// Descriptors in the order of a request's fields.
pub(super) struct Descriptors(std::vec::IntoIter<OwnedFd>);

impl Descriptors {
    pub(super) fn new(descriptors: Vec<OwnedFd>) -> Self {
        Self(descriptors.into_iter())
    }

    fn next(&mut self) -> Result<OwnedFd, VmError> {
        self.0.next().ok_or_else(|| failed("too few descriptors came with the request"))
    }
}

fn failed(problem: &str) -> VmError {
    VmError::host("fork a machine")(std::io::Error::other(problem.to_owned()))
}

impl Template<'_> {
    /// Becomes the monitor of a machine, and ends with it.
    pub(super) fn become_machine(&mut self, request: ForkRequest, descriptors: Vec<OwnedFd>) -> ! {
        let mut descriptors = Descriptors::new(descriptors);
        let code = match descriptors.next() {
            Ok(status) => self.run_machine(request, descriptors, &status),
            Err(_without_a_client) => 1,
        };
        crate::log::finish();
        // SAFETY: ends the process without running any more of its code: nothing of the other
        // processes is dropped.
        unsafe { libc::_exit(code) }
    }

    fn run_machine(
        &mut self,
        request: ForkRequest,
        descriptors: Descriptors,
        status: &OwnedFd,
    ) -> i32 {
        // Its dropping, which clients wait for, comes before the process ends.
        match self.try_run_machine(request, descriptors, status) {
            Ok(exit) => {
                tracing::info!("{exit}");
                i32::from(exit.code())
            }
            Err(error) => {
                let error = error.to_string();
                tracing::error!("{error}");
                // A client that has gone does not want to know.
                let _ = packet::send(status, &Stage::Failed { error }, &[]);
                wait_for_client(status);
                1
            }
        }
    }

    fn try_run_machine(
        &mut self,
        request: ForkRequest,
        mut descriptors: Descriptors,
        status: &OwnedFd,
    ) -> Result<GuestExit, VmError> {
        let log = descriptors.next()?;
        redirect(&self.forkable.null, Some(&log))
            .map_err(VmError::host("redirect standard error"))?;
        drop(log);
        rustix::process::setsid().map_err(VmError::host("begin a session"))?;
        let _ = rustix::thread::set_name(c"ebb");
        let mut isolation = self.vm.isolation.clone();
        isolation.cgroup.clone_from(&request.cgroup);
        if request.cgroup.is_some() {
            // Before it allocates anything. 0 stands for the process that writes.
            rustix::io::write(&descriptors.next()?, b"0")
                .map_err(VmError::host("move to its cgroup"))?;
        }
        if isolation.core_scheduling {
            rustix::thread::create_core_scheduling_cookie(
                rustix::process::getpid(),
                CoreSchedulingScope::ThreadGroup,
            )
            .map_err(VmError::host("keep other machines off its processor cores"))?;
        }
        let (process_memory, maps) = self.replace_own_files(status, request.merge.is_some())?;
        let signals = Signals::block().map_err(VmError::host("take over signals"))?;
        let filters = self.forkable.filters.clone().without_rights();
        let exit = Arc::new(ExitSignal::new().map_err(VmError::host("create an event"))?);
        start_log(&filters, &exit)?;

        let state = self.state.take().ok_or_else(|| failed("its state is gone"))?;
        let (paused, accepts_changes) = (request.paused, request.accept_changed_disks);
        let are_copies: Vec<bool> = request.disks.iter().map(|disk| disk.is_copy).collect();
        let own = Own::receive(request, &mut descriptors, &self.vm.config)?;
        let Own { config, resources, companion, api, mut userfaultfd, mut merge } = own;
        if !accepts_changes {
            let files = resources.disks.iter().zip(are_copies).map(|(files, is_copy)| {
                if is_copy { None } else { rustix::fs::fstat(&files.top).ok() }
            });
            state.check_disk_files(&config.disks, files)?;
        }
        if let Some(given) = &mut merge {
            given.files.maps = maps;
            given.files.userfaultfd = userfaultfd.take();
        }
        let (ram, config_of_merging) = (&self.vm.ram, &config.memory.merge);
        let merging =
            Merging::in_fork(&self.vm.merging, config_of_merging, merge, ram, &filters, &exit);
        // SAFETY: nothing of the other processes' machine is used any more.
        let forkable = unsafe { Forkable::taken_over(self.forkable, self.info.name.clone()) }?;
        let inherited = Inherited {
            forkable: Some(forkable),
            ram: self.vm.ram.clone(),
            state,
            image: self.image.take(),
            process_memory,
            merging: Some(merging),
            msrs: self.vm.msrs.clone(),
            userfaultfd,
        };
        let on_reboot = config.on_reboot;
        let origin = Origin::Fork(Box::new(inherited));
        let Built { mut vm, input_read, .. } = build(config, origin, resources, &filters, &exit)?;
        vm.isolation = isolation;
        vm.companion = companion;
        let vm = Arc::new(vm);
        let _api = api.map(|api| start_api(api, vm.clone(), &exit, &filters)).transpose()?;
        let _migrations =
            vm.config.api.is_some().then(|| MigrationThread::start(&vm, &filters)).transpose()?;
        let console = Console::open(&SerialConfig::Null, input_read, &vm)?;
        let received = packet::receive::<Start>(status);
        let received = received.and_then(|start| start.ok_or(ErrorKind::UnexpectedEof.into()));
        received.map_err(VmError::host("wait for its companion"))?;
        filters.for_thread(ThreadKind::Main).apply()?;
        if paused {
            let _ = vm.start_paused();
        } else {
            let _ = vm.start()?;
        }
        // A client that has gone has left the machine to others.
        let _ = packet::send(status, &Stage::Ready, &[]);
        Ok(wait_for_end(&vm, &signals, console, on_reboot))
    }

    /// Has the client open the files of /proc about this process, and puts them in the place of the
    /// old one's; also its map, if the monitor merges pages.
    fn replace_own_files(
        &self,
        status: &OwnedFd,
        merges: bool,
    ) -> Result<(ProcessMemory, Option<File>), VmError> {
        let old = self.vm.ram.process_files();
        let maps = merges.then_some("maps");
        let names = std::iter::once("statm").chain(old.iter().map(|(name, _)| *name)).chain(maps);
        let files = names.map(str::to_owned).collect();
        let failed = VmError::host("learn about its own process");
        // Linux refuses them for a process that is not dumpable, unless root opens them.
        let dumpable = |behavior| {
            rustix::process::set_dumpable_behavior(behavior)
                .map_err(VmError::host("allow its user to read about its process"))
        };
        dumpable(DumpableBehavior::Dumpable)?;
        let received = packet::send(status, &Stage::Born { files }, &[])
            .and_then(|()| packet::receive::<Files>(status));
        dumpable(DumpableBehavior::NotDumpable)?;
        let (_, files) = received
            .and_then(|received| received.ok_or(ErrorKind::UnexpectedEof.into()))
            .map_err(failed)?;
        let mut files = files.into_iter();
        let statm = files.next().map(File::from);
        for ((_, number), file) in old.into_iter().zip(&mut files) {
            put_in_place(file.as_fd(), number).map_err(VmError::host("replace a descriptor"))?;
        }
        Ok((ProcessMemory::of(statm), files.next().map(File::from)))
    }
}

/// Waits until the client has read everything and closed the connection: if this side were closed
/// with unread messages, the client would lose the last ones (Linux net/unix/af_unix.c,
/// `unix_release_sock`).
fn wait_for_client(status: &OwnedFd) {
    loop {
        let mut fds = [PollFd::new(status, PollFlags::IN)];
        match poll(&mut fds, Some(&CLIENT_PATIENCE)) {
            Ok(1..) => {}
            _ => return,
        }
        match packet::receive::<IgnoredAny>(status) {
            Ok(Some(_)) => {}
            _ => return,
        }
    }
}

/// How long a client may take to read why there is no machine.
const CLIENT_PATIENCE: Timespec = Timespec { tv_sec: 5, tv_nsec: 0 };

/// What the machine has for itself.
pub(super) struct Own {
    pub config: VmConfig,
    pub resources: Resources,
    companion: Option<Companion>,
    pub api: Option<(OwnedFd, KeptName)>,
    /// /dev/userfaultfd.
    pub userfaultfd: Option<File>,
    pub merge: Option<Given>,
}

impl Own {
    pub(super) fn receive(
        request: ForkRequest,
        descriptors: &mut Descriptors,
        template: &VmConfig,
    ) -> Result<Self, VmError> {
        let companion = request.companion.then(|| descriptors.next().map(Companion::over));
        let companion = companion.transpose()?;
        let kept = |kept| {
            let name = companion.as_ref().map(|companion| companion.kept(kept));
            name.ok_or_else(|| failed("a socket came without a companion"))
        };
        let api = match &request.api {
            Some(socket) => Some((descriptors.next()?, kept(socket.kept)?)),
            None => None,
        };
        let sockets = match &request.vsock {
            Some(socket) => Some((descriptors.next()?, descriptors.next()?, kept(socket.kept)?)),
            None => None,
        };
        let disks = request.disks.into_iter().map(DiskRequest::into_config).collect::<Vec<_>>();
        let files = disks.iter().map(|disk| {
            let mut next = || descriptors.next().map(File::from);
            let top = next()?;
            let writeback = if disk.readonly.is_on() { None } else { Some(next()?) };
            let base = disk.overlay.as_ref().map(|_| next()).transpose()?;
            Ok(DiskFiles { top, writeback, base })
        });
        let files = files.collect::<Result<_, VmError>>()?;
        let nets = request.nets.into_iter().map(NetRequest::into_config).collect::<Vec<_>>();
        let open = nets
            .iter()
            .map(|_| OpenNet::of(descriptors.next()?).map_err(|problem| failed(&problem)));
        let open = open.collect::<Result<_, VmError>>()?;
        let userfaultfd = request.userfaultfd.then(|| descriptors.next()).transpose()?;
        let given = |MergeRequest { config, only_node }| -> Result<_, VmError> {
            if userfaultfd.is_none() {
                return Err(failed("merging needs /dev/userfaultfd, which did not come"));
            }
            let files = MergeFiles { only_node, ..MergeFiles::default() };
            let mut next = || config.member().map(|_| descriptors.next()).transpose();
            let broker = next()?;
            let link = if companion.is_some() { next()? } else { None };
            let link = link.map(ConnectLink::new).transpose();
            let link = link.map_err(VmError::host("set up a socket"))?;
            Ok((config, Given { files, broker, link }))
        };
        let (merge_config, merge) = request.merge.map(given).transpose()?.unzip();
        let merge_config = merge_config.unwrap_or_else(|| template.memory.merge.clone());
        let overrides = Overrides {
            serial: SerialConfig::Null,
            api: request.api.map(|socket| socket.path),
            seccomp: template.seccomp,
            isolation: IsolationConfig { cgroup: None, ..template.isolation.clone() },
            // As for a machine that was not forked.
            forkable: Switch::from_bool(merge_config.backend != MergeBackend::Owner),
            merge: merge_config.into(),
            on_reboot: Some(template.on_reboot),
            boot: template.boot.clone(),
            disks,
            nets,
            rng_limits: template.rng.unwrap_or_default(),
            vsock: request.vsock.map(|socket| VsockOption { cid: request.cid, path: socket.path }),
            ..Overrides::default()
        };
        let mut config = MachineConfig::of(template).into_vm_config(overrides)?;
        prepare(&mut config)?;
        let vsock = match (&config.vsock, sockets) {
            (Some(config), Some((listener, link, name))) => {
                rustix::io::ioctl_fionbio(&listener, true)
                    .map_err(VmError::host("set up a socket"))?;
                let link = ConnectLink::new(link).map_err(VmError::host("set up a socket"))?;
                Some(VsockSockets { config: config.clone(), listener, link, name })
            }
            _ => None,
        };
        // Merging has begun already when it is built.
        let resources = Resources { disks: files, nets: open, vsock, broker: None };
        let userfaultfd = userfaultfd.map(File::from);
        Ok(Self { config, resources, companion, api, userfaultfd, merge })
    }
}

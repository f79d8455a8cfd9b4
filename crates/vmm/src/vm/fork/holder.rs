//! The process that holds a checkpoint. It has one thread, no guest that runs, and serves its
//! clients one request at a time.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, AsRawFd, OwnedFd, RawFd};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags};

use super::{DiskCopy, Forkable};
use crate::boot::BootImage;
use crate::checkpoint::{Answer, CheckpointInfo, ForkRequest, Request};
use crate::devices::virtio::state::DeviceState;
use crate::forked::{close_others, fork_in_new_thread, put_in_place, redirect};
use crate::packet;
use crate::snapshot::MachineState;
use crate::vm::Vm;

/// Most clients at a time. One more takes the place of the oldest that has said nothing yet, and
/// waits if there is none: the others may be in the middle of their work.
const MOST_CLIENTS: usize = 64;

/// What a checkpoint consists of, and what machines are made from.
pub(super) struct Template<'a> {
    /// The machine in the process that was forked: nothing of it runs here.
    pub vm: &'a Vm,
    pub forkable: &'a Forkable,
    /// Taken by the one machine that is made in a process.
    pub state: Option<MachineState>,
    pub image: Option<BootImage>,
    /// For each disk, if it was copied.
    copies: Vec<Option<DiskCopy>>,
    pub info: CheckpointInfo,
}

/// A client's connection, or how clients connect.
enum Control {
    Listener(OwnedFd),
    /// The only client, with whom the checkpoint ends.
    Only,
}

impl<'a> Template<'a> {
    pub(super) fn new(
        vm: &'a Vm,
        forkable: &'a Forkable,
        state: MachineState,
        image: Option<BootImage>,
        copies: Vec<Option<DiskCopy>>,
        name: String,
        parent: Option<String>,
    ) -> Self {
        let created = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let info = CheckpointInfo {
            name,
            parent,
            created_unix_ms: u64::try_from(created.as_millis()).unwrap_or(u64::MAX),
            memory_bytes: vm.ram.size_bytes(),
            disks: vm.config.disks.len(),
            // They are known once the machine is built.
            macs: vm.config.nets.iter().filter_map(|net| net.mac).collect(),
            vsock: vm.config.vsock.is_some(),
            vsock_driver: state
                .devices
                .iter()
                .any(|saved| saved.active && matches!(saved.device, DeviceState::Vsock { .. })),
            merge: vm.config.memory.merge.backend,
            forks: 0,
        };
        Self { vm, forkable, state: Some(state), image, copies, info }
    }

    /// Holds it until a client ends it. Only in a forked process.
    pub(super) fn hold(mut self, socket: OwnedFd) -> ! {
        let mut keep = self.descriptors();
        keep.push(socket.as_raw_fd());
        close_others(&keep);
        let code = match self.set_up().and_then(|()| self.serve(socket)) {
            Ok(()) => 0,
            Err(_without_a_client) => 1,
        };
        // SAFETY: ends the process without running any more of its code: nothing of the other
        // process is dropped.
        unsafe { libc::_exit(code) }
    }

    /// Descriptors that machines are made from.
    fn descriptors(&self) -> Vec<RawFd> {
        let own = [self.forkable.kvm.as_raw_fd(), self.forkable.null.as_raw_fd()];
        let files = self.vm.ram.process_files().into_iter().map(|(_, file)| file);
        let image = self.image.iter().flat_map(BootImage::descriptors);
        let restored = self.vm.ram.restored_file();
        let copies = self.copies.iter().flatten().map(|copy| copy.file.as_raw_fd());
        let protection = self.vm.ram.protection_descriptor();
        let of_memory =
            files.chain(restored).chain(protection).chain(self.vm.merging.descriptors());
        own.into_iter().chain(image).chain(of_memory).chain(copies).collect()
    }

    /// Leaves the terminal and the signals of the other process.
    fn set_up(&self) -> Result<(), Errno> {
        let null = &self.forkable.null;
        redirect(null, None).map_err(|error| errno(&error))?;
        // It would keep the other process's memory registered.
        if let Some(number) = self.vm.ram.protection_descriptor() {
            put_in_place(null.as_fd(), number).map_err(|error| errno(&error))?;
        }
        rustix::process::setsid()?;
        let _ = rustix::thread::set_name(c"ebb-checkpoint");
        let mut none = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: initializes the set.
        unsafe { libc::sigemptyset(none.as_mut_ptr()) };
        // SAFETY: reads the set, which is initialized.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, none.as_ptr(), std::ptr::null_mut());
        }
        Ok(())
    }

    fn serve(&mut self, socket: OwnedFd) -> Result<(), Errno> {
        let mut clients: Vec<Client> = Vec::new();
        let control = if rustix::net::sockopt::socket_acceptconn(&socket)? {
            Control::Listener(socket)
        } else {
            clients.push(Client { socket, has_come: true });
            Control::Only
        };
        loop {
            let mut fds: Vec<PollFd<'_>> =
                clients.iter().map(|client| PollFd::new(&client.socket, PollFlags::IN)).collect();
            if let Control::Listener(listener) = &control {
                let events = if has_room(&clients) { PollFlags::IN } else { PollFlags::empty() };
                fds.push(PollFd::new(listener, events));
            }
            match poll(&mut fds, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
            let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
            // The client that wanted it has shut its listener: it has no name.
            let is_shut = matches!(control, Control::Listener(_))
                && fds.last().is_some_and(|fd| fd.revents().contains(PollFlags::HUP));
            drop(fds);
            if is_shut {
                return Ok(());
            }
            // From the last one on: places of earlier ones stay as they are.
            for index in (0..clients.len()).rev().filter(|&index| ready[index]) {
                match self.serve_client(&mut clients[index]) {
                    Next::Client => {}
                    Next::End => return Ok(()),
                    Next::NoClient => drop(clients.remove(index)),
                }
            }
            match &control {
                Control::Only if clients.is_empty() => return Ok(()),
                Control::Only => {}
                Control::Listener(listener) => {
                    let accept = || rustix::net::accept_with(listener, SocketFlags::CLOEXEC);
                    if ready.last() == Some(&true)
                        && has_room(&clients)
                        && let Ok(socket) = accept()
                    {
                        if clients.len() >= MOST_CLIENTS
                            && let Some(index) = silent(&clients)
                        {
                            drop(clients.remove(index));
                        }
                        clients.push(Client { socket, has_come: false });
                    }
                }
            }
        }
    }

    /// Takes what a client has sent.
    fn serve_client(&mut self, client: &mut Client) -> Next {
        if client.has_come {
            return self.answer(&client.socket);
        }
        match receive_socket(&client.socket) {
            Some(socket) => {
                *client = Client { socket, has_come: true };
                Next::Client
            }
            None => Next::NoClient,
        }
    }

    /// Carries out a client's request.
    fn answer(&mut self, client: &OwnedFd) -> Next {
        let Ok(Some((request, descriptors))) = packet::receive::<Request>(client) else {
            return Next::NoClient;
        };
        let mut files = Vec::new();
        let (answer, next) = match request {
            Request::Disks => {
                files.extend(self.copies.iter().flatten().map(|copy| copy.file.as_fd()));
                let format = |copy: &Option<DiskCopy>| copy.as_ref().map(|copy| copy.format);
                let formats = self.copies.iter().map(format).collect();
                (Answer::Disks { formats }, Next::Client)
            }
            Request::Info => (Answer::Info(self.info.clone()), Next::Client),
            Request::End => (Answer::Done, Next::End),
            Request::Fork(request) => (self.fork(*request, descriptors), Next::Client),
        };
        match packet::send(client, &answer, &files) {
            Err(_) if matches!(next, Next::Client) => Next::NoClient,
            _ => next,
        }
    }

    fn fork(&mut self, request: ForkRequest, descriptors: Vec<OwnedFd>) -> Answer {
        let template = &mut *self;
        let go_on = move |()| {
            let mut keep = template.descriptors();
            keep.extend(descriptors.iter().map(AsRawFd::as_raw_fd));
            close_others(&keep);
            template.become_machine(request, descriptors)
        };
        // SAFETY: no other thread does anything.
        match unsafe { fork_in_new_thread(|| (), go_on) } {
            Ok(_pid) => {
                self.info.forks += 1;
                Answer::Done
            }
            Err(error) => Answer::Refused {
                error: format!(
                    "cannot fork the checkpoint: {error}; are there too many processes?"
                ),
            },
        }
    }
}

fn errno(error: &io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

enum Next {
    Client,
    NoClient,
    End,
}

/// A client's connection.
struct Client {
    /// The accepted stream, until a packet socket has come over it.
    socket: OwnedFd,
    has_come: bool,
}

/// The oldest client that has said nothing.
fn silent(clients: &[Client]) -> Option<usize> {
    clients.iter().position(|client| !client.has_come)
}

fn has_room(clients: &[Client]) -> bool {
    clients.len() < MOST_CLIENTS || silent(clients).is_some()
}

/// Receives the packet socket that a client sends first, with one byte.
fn receive_socket(stream: &OwnedFd) -> Option<OwnedFd> {
    let mut byte = [0];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    rustix::net::recvmsg(
        stream.as_fd(),
        &mut [IoSliceMut::new(&mut byte)],
        &mut ancillary,
        RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC,
    )
    .ok()?;
    let socket = ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut rights) => rights.next(),
        _ => None,
    })?;
    rustix::io::ioctl_fionbio(&socket, true).ok()?;
    Some(socket)
}

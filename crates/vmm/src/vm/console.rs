//! The main thread's part of the serial line: standard input, and a client of the API.

use std::io::{self, IoSlice, IoSliceMut, IsTerminal};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::fs::FileType;
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendFlags};
use vmm_sys_util::eventfd::EventFd;

use super::terminal::{EscapeSequence, Output, RawTerminal, Typed};
use super::{Vm, VmError, lock};
use crate::api::control::ControlError;
use crate::api::vm::ConsoleInfo;
use crate::config::SerialConfig;
use crate::devices::console::{ConsoleOutput, Recent};

/// Time that a slow reader of the output has at the end of the machine.
const LAST_OUTPUT: Duration = Duration::from_millis(500);
/// Most bytes of a call.
const CHUNK_BYTES: usize = 4096;
/// Most bytes of input that wait for the guest, whose FIFO takes 64 bytes at a time.
const INPUT_BYTES: usize = 512;

#[derive(PartialEq, Eq)]
pub(super) enum Wish {
    GoOn,
    Quit,
}

/// Input for the guest's serial line, and output for a client.
pub(super) struct Console {
    stdin: Option<io::Stdin>,
    terminal: Option<(RawTerminal, EscapeSequence)>,
    client: Option<Client>,
    output: ConsoleOutput,
    /// Signalled when the guest has read all input, and by [`Recent`].
    event: EventFd,
    /// Input that the guest has not taken.
    pending: Vec<u8>,
}

/// A stream socket that came with `PUT /console`. It is never waited for, because its owner may
/// have made it blocking.
struct Client {
    socket: OwnedFd,
    /// Position of the output that it has received.
    position: u64,
    /// It has no room for more output.
    is_full: bool,
    /// It sends no more input.
    ended: bool,
}

impl Console {
    /// Takes over standard input, if the serial line uses it.
    pub(super) fn open(serial: &SerialConfig, event: EventFd, vm: &Vm) -> Result<Self, VmError> {
        let console = |source| VmError::Console { console: "tty".to_owned(), source };
        let terminal = match serial {
            SerialConfig::Tty => Some((
                RawTerminal::enter(Output::Processed).map_err(console)?,
                EscapeSequence::default(),
            )),
            _ => None,
        };
        let stdin = matches!(serial, SerialConfig::Tty | SerialConfig::Stdio).then(io::stdin);
        if terminal.is_some() && io::stderr().is_terminal() {
            tracing::info!("press Ctrl-A x to end the guest");
        }
        let output = lock(&vm.serial).output().clone();
        Ok(Self { stdin, terminal, client: None, output, event, pending: Vec::new() })
    }

    /// Becomes readable when the guest or a client wants to be served.
    pub(super) fn event(&self) -> &EventFd {
        &self.event
    }

    /// Clears the [`event`](Self::event), which was readable.
    pub(super) fn clear_event(&self) {
        let _ = self.event.read();
    }

    /// Standard input, while the guest accepts more of it.
    pub(super) fn stdin(&self, running: bool) -> Option<PollFd<'_>> {
        let wanted = running && self.pending.is_empty();
        let stdin = self.stdin.as_ref().filter(|_| wanted)?;
        Some(PollFd::new(stdin, PollFlags::IN))
    }

    /// The client, while there is something to wait for: the end of its connection would otherwise
    /// be reported again and again.
    pub(super) fn client(&self, running: bool) -> Option<PollFd<'_>> {
        let client = self.client.as_ref()?;
        let mut wanted = PollFlags::empty();
        wanted.set(PollFlags::IN, running && self.pending.is_empty() && !client.ended);
        wanted.set(PollFlags::OUT, client.is_full);
        (!wanted.is_empty()).then(|| PollFd::new(&client.socket, wanted))
    }

    /// Moves what can be moved without waiting. The guest takes input if it is `running`, and
    /// standard input has some if it is `typed`.
    pub(super) fn serve(&mut self, vm: &Vm, running: bool, typed: bool) -> Wish {
        if typed && self.read_stdin() == Wish::Quit {
            return Wish::Quit;
        }
        let recent = self.output.recent();
        if let Some(socket) = recent.and_then(|recent| recent.new_client()) {
            self.client = Some(Client { socket, position: 0, is_full: false, ended: false });
        }
        if let (Some(client), Some(recent)) = (&mut self.client, recent) {
            let wanted = running && self.pending.is_empty();
            let received = if wanted { client.receive() } else { Ok(Vec::new()) };
            match received.and_then(|input| client.send(recent).map(|()| input)) {
                Ok(input) => self.pending.extend(input),
                Err(_gone) => self.client = None,
            }
        }
        if !self.pending.is_empty() {
            let taken = lock(&vm.serial).input(&self.pending);
            self.pending.drain(..taken);
        }
        Wish::GoOn
    }

    fn read_stdin(&mut self) -> Wish {
        let Some(source) = &self.stdin else { return Wish::GoOn };
        let mut buffer = [0; INPUT_BYTES];
        match rustix::io::read(source.as_fd(), &mut buffer) {
            // The end of input does not end the guest.
            Ok(0) => self.stdin = None,
            Ok(length) => match &mut self.terminal {
                None => self.pending.extend_from_slice(&buffer[..length]),
                Some((_, escape)) => match escape.filter(&buffer[..length]) {
                    Typed::Quit => return Wish::Quit,
                    Typed::Input(bytes) => self.pending.extend(bytes),
                },
            },
            Err(Errno::INTR | Errno::AGAIN) => {}
            Err(_) => self.stdin = None,
        }
        Wish::GoOn
    }

    /// Gives the rest of the output a moment to be read.
    pub(super) fn finish(&mut self) {
        if let (Some(client), Some(recent)) = (&mut self.client, self.output.recent()) {
            // Whatever it has no room for is lost.
            let _ = client.send(recent);
        }
        self.output.finish(LAST_OUTPUT);
    }
}

impl Client {
    /// Available input.
    fn receive(&mut self) -> Result<Vec<u8>, Errno> {
        let mut buffer = [0; INPUT_BYTES];
        // Without room for them, the kernel closes descriptors that come with it.
        let received = rustix::net::recvmsg(
            &self.socket,
            &mut [IoSliceMut::new(&mut buffer)],
            &mut RecvAncillaryBuffer::default(),
            RecvFlags::DONTWAIT,
        );
        match received {
            Ok(message) => {
                self.ended = message.bytes == 0;
                Ok(buffer[..message.bytes].to_vec())
            }
            Err(Errno::INTR | Errno::AGAIN) => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }

    /// Sends output as far as there is room.
    fn send(&mut self, recent: &Arc<Recent>) -> Result<(), Errno> {
        loop {
            let (bytes, end) = recent.read(self.position, CHUNK_BYTES);
            self.is_full = false;
            if bytes.is_empty() {
                return Ok(());
            }
            let sent = rustix::net::sendmsg(
                &self.socket,
                &[IoSlice::new(&bytes)],
                &mut SendAncillaryBuffer::default(),
                SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
            );
            match sent {
                Ok(sent) => self.position = end - (bytes.len() - sent) as u64,
                Err(Errno::AGAIN) => {
                    self.is_full = true;
                    return Ok(());
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(error),
            }
        }
    }
}

impl Vm {
    /// Connects the client's socket, its only descriptor, with the serial line.
    pub(super) fn attach_console(
        &self,
        descriptors: Vec<OwnedFd>,
    ) -> Result<ConsoleInfo, ControlError> {
        let wrong = |message: &str| ControlError::Invalid {
            field: "socket",
            message: message.to_owned(),
            remedy: Some(
                "`ebb console SOCKET` sends one end of a socket pair with the request".to_owned(),
            ),
        };
        let [socket] = <[OwnedFd; 1]>::try_from(descriptors)
            .map_err(|_| wrong("the request did not come with one file descriptor"))?;
        let kind = rustix::fs::fstat(&socket).map_err(ControlError::failed)?.st_mode;
        if FileType::from_raw_mode(kind) != FileType::Socket {
            return Err(wrong("the file descriptor of the request is no socket"));
        }
        let output = lock(&self.serial).output().clone();
        let recent = output.recent().ok_or_else(|| wrong("there is no serial line"))?;
        Ok(ConsoleInfo { recent_bytes: recent.attach(socket) })
    }
}

#[cfg(test)]
mod tests;

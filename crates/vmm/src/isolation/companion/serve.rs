//! The companion process.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use ebb_local_io::SocketEntry;

use super::message::{self, Reply, Request};
use crate::config::Switch;
use crate::seccomp::{Filters, ThreadKind};
use crate::vm::Signals;

/// Most names that a companion keeps.
const MAX_NAMES: usize = 8;

/// The state of a companion.
#[derive(Debug, Default)]
struct Server {
    /// Whether `Begin` has come.
    has_begun: bool,
    names: Vec<Option<SocketEntry>>,
}

/// Serves the monitor on standard input until it ends.
///
/// # Errors
/// Standard input is not such a connection, or the process could not give up its rights.
pub fn serve() -> io::Result<()> {
    // The end of the monitor is the only one: signals for its group or its service are for it.
    let _signals = Signals::block()?;
    serve_on(&io::stdin().as_fd().try_clone_to_owned()?)
}

/// Serves the monitor at the other end of `socket`.
pub(super) fn serve_on(socket: &OwnedFd) -> io::Result<()> {
    let mut server = Server::default();
    let served = loop {
        match message::receive::<Request>(socket) {
            Ok(Some((request, descriptors))) => {
                let reply = server
                    .answer(request, descriptors)
                    .unwrap_or_else(|problem| Reply { error: Some(problem), ..Reply::default() });
                // Without a reader, the next read finds the end.
                let _ = message::send(socket, &reply, &[]);
            }
            Ok(None) => break Ok(()),
            Err(error) => break Err(error),
        }
    };
    server.names.iter().flatten().for_each(SocketEntry::remove);
    served
}

impl Server {
    fn answer(&mut self, request: Request, descriptors: Vec<OwnedFd>) -> Result<Reply, String> {
        match request {
            Request::Keep { .. } | Request::Begin { .. } if self.has_begun => {
                Err("the machine has started".to_owned())
            }
            Request::Keep { name, device, inode } => {
                let [directory] = <[OwnedFd; 1]>::try_from(descriptors)
                    .map_err(|_| "the name's directory is missing".to_owned())?;
                if self.names.len() == MAX_NAMES {
                    return Err("too many names".to_owned());
                }
                let index = self.names.len() as u32;
                self.names.push(Some(SocketEntry { directory, name, device, inode }));
                Ok(Reply { index, ..Reply::default() })
            }
            Request::Begin { seccomp } => {
                self.has_begun = true;
                restrict(seccomp).map_err(|error| error.to_string())?;
                Ok(Reply::default())
            }
            Request::Remove { index } => {
                let name = self.names.get_mut(index as usize).and_then(Option::take);
                name.ok_or("there is no such name")?.remove();
                Ok(Reply::default())
            }
        }
    }
}

/// Gives up capabilities and system calls. The user stays: the names belong to it.
fn restrict(seccomp: Switch) -> io::Result<()> {
    let filters = Filters::new(seccomp).map_err(io::Error::other)?;
    filters.for_thread(ThreadKind::Companion).apply().map_err(io::Error::other)
}

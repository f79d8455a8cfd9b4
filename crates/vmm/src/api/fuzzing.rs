//! Fuzz target: a client that sends any bytes with any descriptors.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::time::Instant;

use rustix::event::{PollFd, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::net::Shutdown;

use super::connection::{Connection, Fate, Limits};
use super::door::Door;
use crate::fuzzing::{Input, Leak, prepared, send};

/// Most times that a connection is served for a piece of input.
const ROUNDS: usize = 200;

/// Serves a client that sends `data`: pieces, each of them a length, a number of descriptors and
/// bytes. No descriptor is kept.
pub(crate) fn fuzz_client(data: &[u8], door: &dyn Door) {
    prepared(serve(data, door));
}

fn serve(data: &[u8], door: &dyn Door) -> io::Result<()> {
    let (mut client, server) = UnixStream::pair()?;
    client.set_nonblocking(true)?;
    server.set_nonblocking(true)?;
    let mut connection = Connection::new(server.into(), Limits::default(), Instant::now());
    let leak = Leak::new()?;
    let (peer, socket) = UnixStream::pair()?;
    let directory = File::open("/")?;
    let empty = tempfile::tempfile()?;
    let path = rustix::fs::open("/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    let (peer, socket) = (peer.as_fd(), socket.as_fd());
    // Most often what snapshots and migrations take.
    let kinds =
        [leak.descriptor(), socket, empty.as_fd(), socket, directory.as_fd(), path.as_fd(), peer];
    let mut input = Input::new(data);
    let mut fate = Fate::Keep;
    while fate == Fate::Keep && !input.is_empty() {
        let (length, count) = (usize::from(input.byte()), input.byte());
        let count = if count < 32 { usize::from(count) } else { 0 };
        let bytes = input.take(length.max(1));
        let first = usize::from(bytes.last().copied().unwrap_or_default());
        let descriptors: Vec<_> =
            (0..count).map(|index| kinds[(first + index) % kinds.len()]).collect();
        // A client that is refused may be disconnected.
        if bytes.is_empty() || send(&client, bytes, &descriptors).is_err() {
            break;
        }
        fate = serve_some(&mut connection, door, &mut client)?;
    }
    if fate == Fate::Keep {
        rustix::net::shutdown(&client, Shutdown::Write)?;
        serve_some(&mut connection, door, &mut client)?;
    }
    drop(connection);
    drop(client);
    leak.check()
}

/// Serves the connection until nothing is left to do, and reads its answers.
fn serve_some(
    connection: &mut Connection,
    door: &dyn Door,
    client: &mut UnixStream,
) -> io::Result<Fate> {
    for _ in 0..ROUNDS {
        let mut ready = [PollFd::new(connection.socket(), connection.interest())];
        poll(&mut ready, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))?;
        let ready = ready[0].revents();
        if ready.is_empty() && !connection.awaits_guest() {
            return Ok(Fate::Keep);
        }
        let now = Instant::now();
        if connection.on_ready(ready, door, now) == Fate::Close
            || connection.on_time(door, now) == Fate::Close
        {
            return Ok(Fate::Close);
        }
        let mut answers = [0; 4096];
        while client.read(&mut answers).is_ok_and(|length| length > 0) {}
    }
    panic!("a connection is never done with its input");
}

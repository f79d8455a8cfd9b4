//! Clients of the host that have not named their port yet: `CONNECT port` and a line feed.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, EventFlags};
use rustix::io::Errno;
use rustix::net::SocketFlags;

use super::muxer::client_token;

/// Most clients at this stage; further ones wait in the listener's queue.
const MOST_CLIENTS: usize = 256;
/// How long a client may take for its line.
const LINE_LIMIT: Duration = Duration::from_secs(5);
/// Longest line, with its line feed: more than `CONNECT 4294967295` needs.
const MOST_LINE_BYTES: usize = 32;

/// A client.
#[derive(Debug)]
pub(super) struct Client {
    pub stream: OwnedFd,
    pub deadline: Instant,
    line: Vec<u8>,
}

/// What a client's line says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    /// It is not complete.
    Waits,
    /// It is wrong, or the client has gone.
    Fails,
    /// It asks for this port.
    Connects(u32),
}

/// All of them.
#[derive(Debug, Default)]
pub(super) struct Clients {
    clients: HashMap<u32, Client>,
    next_id: u32,
}

impl Clients {
    pub(super) fn len(&self) -> usize {
        self.clients.len()
    }

    pub(super) fn has_room(&self) -> bool {
        self.clients.len() < MOST_CLIENTS
    }

    /// Accepts the next client, if there is one; returns its number and its time limit.
    pub(super) fn accept(
        &mut self,
        listener: &OwnedFd,
        epoll: &OwnedFd,
        now: Instant,
    ) -> Result<Option<(u32, Instant)>, Errno> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let stream = match rustix::net::accept_with(listener, flags) {
            Ok(stream) => stream,
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => return Ok(None),
            Err(errno) => return Err(errno),
        };
        let id = self.new_id();
        epoll::add(epoll, &stream, client_token(id), EventFlags::IN)?;
        let deadline = now + LINE_LIMIT;
        self.clients.insert(id, Client { stream, deadline, line: Vec::new() });
        Ok(Some((id, deadline)))
    }

    /// A number that no other client has; the largest ones have other meanings.
    fn new_id(&mut self) -> u32 {
        loop {
            self.next_id = (self.next_id + 1) & (u32::MAX >> 1);
            if !self.clients.contains_key(&self.next_id) {
                return self.next_id;
            }
        }
    }

    pub(super) fn remove(&mut self, id: u32) -> Option<Client> {
        self.clients.remove(&id)
    }

    /// Reads from a client; `None` if there is no such client.
    pub(super) fn read(&mut self, id: u32) -> Option<Progress> {
        self.clients.get_mut(&id).map(Client::read)
    }
}

impl Client {
    fn read(&mut self) -> Progress {
        loop {
            // What follows the line is for the guest.
            let mut byte = [0];
            match rustix::io::read(&self.stream, &mut byte) {
                Ok(0) => return Progress::Fails,
                Ok(_) if byte == *b"\n" => return parse(&self.line),
                Ok(_) => self.line.push(byte[0]),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Progress::Waits,
                Err(_) => return Progress::Fails,
            }
            if self.line.len() == MOST_LINE_BYTES {
                return Progress::Fails;
            }
        }
    }
}

/// The line without its end.
fn parse(line: &[u8]) -> Progress {
    let text = std::str::from_utf8(line).ok();
    let mut words = text.into_iter().flat_map(str::split_ascii_whitespace);
    let command = words.next().filter(|word| word.eq_ignore_ascii_case("CONNECT"));
    // No sign, which `parse` would accept.
    let is_number = |word: &&str| word.bytes().all(|byte| byte.is_ascii_digit());
    let port = words.next().filter(is_number).and_then(|word| word.parse().ok());
    match (command, port, words.next()) {
        (Some(_), Some(port), None) => Progress::Connects(port),
        _ => Progress::Fails,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines() {
        for (line, port) in [("CONNECT 0", 0), ("connect 52\r", 52), ("CONNECT  4294967295 ", !0)] {
            assert_eq!(parse(line.as_bytes()), Progress::Connects(port), "{line}");
        }
        for wrong in [
            "",
            "CONNECT",
            "CONNECT -1",
            "CONNECT +1",
            "CONNECT 4294967296",
            "CONNECT 1 2",
            "GET 1",
        ] {
            assert_eq!(parse(wrong.as_bytes()), Progress::Fails, "{wrong}");
        }
        assert_eq!(parse(b"CONNECT \xff"), Progress::Fails);
    }
}

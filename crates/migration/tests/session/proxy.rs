//! A proxy between source and destination that breaks the control connection at a chosen place.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use ebb_migration::session::Address;

/// Bytes that each side sends before its first frame.
const PREAMBLE_BYTES: usize = 32;
/// Size of a frame's header: 32 bits of length, kind.
const HEADER_BYTES: usize = 5;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    ToDestination,
    ToSource,
}

/// The part of the bytes that still passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// All up to the frame with this number.
    Before(usize),
    /// That frame's first half as well.
    Inside(usize),
    /// All of that frame as well.
    After(usize),
    /// This number of bytes, regardless of frames.
    Byte(usize),
    Nowhere,
}

/// Kind of failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Manner {
    /// Both directions end; bytes written later are discarded.
    End,
    /// Both ends are reset.
    Reset,
    /// This direction stalls.
    Stall,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    pub direction: Direction,
    pub place: Place,
    pub manner: Manner,
}

/// A proxy that works until it is dropped.
pub struct Proxy {
    pub address: Address,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    /// Every socket, so that none is closed before the end.
    sockets: Mutex<Vec<TcpStream>>,
    /// Bytes that came from the source on the control connection.
    from_source: Mutex<usize>,
    /// The control connection was cut behind a frame.
    cut: Mutex<bool>,
}

impl Proxy {
    pub fn new(destination: &Address, fault: Fault) -> Self {
        let Address::Tcp { port, .. } = *destination else { panic!("not TCP") };
        let destination = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let shared = Arc::new(Shared::default());
        let state = Arc::clone(&shared);
        // Ends with the process; it is not joined.
        std::thread::spawn(move || {
            for (number, source) in listener.incoming().enumerate() {
                let (Ok(source), Ok(destination)) = (source, TcpStream::connect(destination))
                else {
                    return;
                };
                // The control connection comes first.
                let fault = (number == 0).then_some(fault);
                state.relay(&source, &destination, fault);
            }
        });
        Self { address: Address::Tcp { host: "127.0.0.1".to_owned(), port }, shared }
    }

    /// Bytes that the source has sent on the control connection.
    pub fn bytes_of_source(&self) -> usize {
        *self.shared.from_source.lock().unwrap()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        for socket in self.shared.sockets.lock().unwrap().drain(..) {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

impl Shared {
    fn relay(self: &Arc<Self>, source: &TcpStream, destination: &TcpStream, fault: Option<Fault>) {
        for socket in [source, destination] {
            self.sockets.lock().unwrap().push(socket.try_clone().unwrap());
        }
        for (direction, from, to) in [
            (Direction::ToDestination, source, destination),
            (Direction::ToSource, destination, source),
        ] {
            let pump = Pump {
                from: from.try_clone().unwrap(),
                to: to.try_clone().unwrap(),
                fault: fault.filter(|fault| fault.direction == direction),
                is_control: fault.is_some(),
                direction,
                shared: Arc::clone(self),
            };
            std::thread::spawn(move || pump.run());
        }
    }
}

struct Pump {
    from: TcpStream,
    to: TcpStream,
    fault: Option<Fault>,
    is_control: bool,
    direction: Direction,
    shared: Arc<Shared>,
}

impl Pump {
    fn run(mut self) {
        if self.forward().is_none() {
            // An end on one side becomes one on the other, and bytes that cannot be delivered are
            // discarded.
            let _ = self.to.shutdown(Shutdown::Write);
            let _ = std::io::copy(&mut self.from, &mut std::io::sink());
        }
    }

    /// Returns at the end of the connection, or `Some` after the fault.
    fn forward(&mut self) -> Option<()> {
        let place = self.fault.map_or(Place::Nowhere, |fault| fault.place);
        if let Place::Byte(bytes) = place {
            for _ in 0..bytes {
                self.pass(1)?;
            }
            self.fail();
            return Some(());
        }
        if place == Place::Nowhere {
            let mut buffer = [0; 4096];
            loop {
                let count = self.from.read(&mut buffer).ok().filter(|&count| count > 0)?;
                self.count(count);
                self.deliver(&buffer[..count])?;
            }
        }
        self.pass(PREAMBLE_BYTES)?;
        for number in 0.. {
            let frame = self.read_frame()?;
            if place == Place::Before(number) {
                self.fail();
                return Some(());
            }
            if place == Place::Inside(number) {
                self.deliver(&frame[..frame.len() / 2])?;
                self.fail();
                return Some(());
            }
            if place == Place::After(number) {
                // At the same moment for the other direction: an answer to this frame must not
                // pass.
                let shared = Arc::clone(&self.shared);
                let mut cut = shared.cut.lock().unwrap();
                self.to.write_all(&frame).ok()?;
                *cut = true;
                drop(cut);
                self.fail();
                return Some(());
            }
            self.deliver(&frame)?;
        }
        None
    }

    fn read_frame(&mut self) -> Option<Vec<u8>> {
        let mut frame = vec![0; HEADER_BYTES];
        self.from.read_exact(&mut frame).ok()?;
        let body = u32::from_le_bytes([frame[0], frame[1], frame[2], frame[3]]) as usize;
        frame.resize(HEADER_BYTES + body, 0);
        self.from.read_exact(&mut frame[HEADER_BYTES..]).ok()?;
        self.count(frame.len());
        Some(frame)
    }

    fn pass(&mut self, bytes: usize) -> Option<()> {
        let mut buffer = vec![0; bytes];
        self.from.read_exact(&mut buffer).ok()?;
        self.count(bytes);
        self.deliver(&buffer)
    }

    fn deliver(&mut self, bytes: &[u8]) -> Option<()> {
        let cut = self.shared.cut.lock().unwrap();
        // Bytes after the cut are discarded.
        if self.is_control && *cut { Some(()) } else { self.to.write_all(bytes).ok() }
    }

    fn count(&self, bytes: usize) {
        if self.is_control && self.direction == Direction::ToDestination {
            *self.shared.from_source.lock().unwrap() += bytes;
        }
    }

    fn fail(&mut self) {
        match self.fault.map(|fault| fault.manner) {
            Some(Manner::End) => {
                for socket in [&self.from, &self.to] {
                    let _ = socket.shutdown(Shutdown::Write);
                }
                let _ = std::io::copy(&mut self.from, &mut std::io::sink());
            }
            Some(Manner::Reset) => {
                for socket in [&self.from, &self.to] {
                    // An abort of the connection (RFC 9293 section 3.10.5), while others still hold
                    // the socket.
                    let _ = rustix::net::connect_unspec(socket);
                }
            }
            Some(Manner::Stall) | None => {
                let _ = std::io::copy(&mut self.from, &mut std::io::sink());
            }
        }
    }
}

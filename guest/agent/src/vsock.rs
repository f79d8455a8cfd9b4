//! Connections over AF_VSOCK: content that both sides can check, a server, and a client of the host
//! (vsock(7)).

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::thread;

use rustix::net::{Shutdown, shutdown};
use serde::{Deserialize, Serialize};

/// CID of the host.
const HOST_CID: u32 = 2;
/// Length of the listener's queue.
const BACKLOG: i32 = 1024;
/// Size of a read or write in bytes.
const BLOCK_BYTES: usize = 64 << 10;
/// Stack of a connection's thread in bytes.
const STACK_BYTES: usize = 128 << 10;
/// Up to this size, the data of a connection fits into the buffers on its way.
const SMALL_BYTES: u64 = 2048;

/// What a server does with a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Service {
    /// Sends everything back, and closes after the client's end.
    Echo,
    /// Reads to the client's end, then sends a line: number of bytes and checksum.
    Sum,
    /// Reads nothing and keeps the connection.
    Hold,
    /// Reads a line with a number, and sends as many bytes.
    Source,
}

/// Result of a client.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientReport {
    /// Connections that were opened.
    pub opened: u32,
    /// Bytes sent on all of them.
    pub sent_bytes: u64,
    /// Bytes received on all of them.
    pub received_bytes: u64,
    /// Connections that received other data than they sent.
    pub different: u32,
    /// Errors by text, at most a few.
    pub errors: Vec<String>,
}

/// The content of a stream: different at each position, and for each seed.
#[derive(Debug, Clone, Copy)]
pub struct Content {
    state: u64,
}

impl Content {
    /// The stream of a seed.
    pub fn new(seed: u64) -> Self {
        Self { state: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1 }
    }

    /// Writes the next bytes of the stream. All but the last call have a multiple of 8 bytes.
    pub fn fill(&mut self, buffer: &mut [u8]) {
        for chunk in buffer.chunks_mut(8) {
            // xorshift64 (Marsaglia 2003).
            self.state ^= self.state << 13;
            self.state ^= self.state >> 7;
            self.state ^= self.state << 17;
            chunk.copy_from_slice(&self.state.to_le_bytes()[..chunk.len()]);
        }
    }
}

/// A checksum of a stream, however it is divided.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sum {
    /// Number of bytes.
    pub bytes: u64,
    /// The checksum.
    pub sum: u64,
}

impl Sum {
    /// Adds the next bytes.
    pub fn add(&mut self, data: &[u8]) {
        self.bytes += data.len() as u64;
        for byte in data {
            self.sum = self.sum.wrapping_mul(0x100_0000_01b3).wrapping_add(u64::from(*byte) + 1);
        }
    }

    /// The checksum of `bytes` bytes of a seed's stream.
    pub fn of(seed: u64, bytes: u64) -> Self {
        let mut sum = Self::default();
        // Writing to a sum does not fail.
        let _ = send(&mut sum, seed, bytes);
        sum
    }
}

impl Write for Sum {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.add(data);
        Ok(data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Sends the content of a seed.
///
/// # Errors
/// Those of the stream.
pub fn send(stream: &mut impl Write, seed: u64, bytes: u64) -> io::Result<()> {
    let mut content = Content::new(seed);
    let mut block = vec![0; BLOCK_BYTES];
    let mut left = bytes;
    while left > 0 {
        let part = &mut block[..left.min(BLOCK_BYTES as u64) as usize];
        content.fill(part);
        stream.write_all(part)?;
        left -= part.len() as u64;
    }
    Ok(())
}

/// Reads to the end.
///
/// # Errors
/// Those of the stream.
pub fn receive(stream: &mut impl Read) -> io::Result<Sum> {
    let mut sum = Sum::default();
    let mut block = vec![0; BLOCK_BYTES];
    loop {
        match stream.read(&mut block) {
            Ok(0) => return Ok(sum),
            Ok(count) => sum.add(&block[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

fn checked(result: i32) -> io::Result<i32> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn socket() -> io::Result<OwnedFd> {
    // SAFETY: the call takes numbers only.
    let number = checked(unsafe {
        libc::socket(libc::AF_VSOCK, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0)
    })?;
    // SAFETY: the descriptor is new and has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

fn address(cid: u32, port: u32) -> (libc::sockaddr_vm, libc::socklen_t) {
    let address = libc::sockaddr_vm {
        svm_family: libc::AF_VSOCK as libc::sa_family_t,
        svm_reserved1: 0,
        svm_port: port,
        svm_cid: cid,
        svm_zero: [0; 4],
    };
    (address, size_of::<libc::sockaddr_vm>() as libc::socklen_t)
}

/// Connects to a port of the host.
///
/// # Errors
/// Those of connect(2).
pub fn connect(port: u32) -> io::Result<File> {
    let socket = socket()?;
    let (address, length) = address(HOST_CID, port);
    // SAFETY: the address is valid for its length during the call.
    checked(unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), length) })?;
    Ok(socket.into())
}

pub(crate) fn listen(port: u32) -> io::Result<OwnedFd> {
    let socket = socket()?;
    let (address, length) = address(libc::VMADDR_CID_ANY, port);
    // SAFETY: the address is valid for its length during the call.
    checked(unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), length) })?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// Serves all connections to a port; returns only with an error.
///
/// # Errors
/// Those of the listening socket.
pub fn serve(port: u32, service: Service) -> io::Result<()> {
    let listener = listen(port)?;
    let mut held = Vec::new();
    loop {
        let stream = File::from(rustix::net::accept(&listener)?);
        if service == Service::Hold {
            held.push(stream);
            continue;
        }
        thread::Builder::new().stack_size(STACK_BYTES).spawn(move || {
            // The client sees the end.
            let _ = serve_one(stream, service);
        })?;
    }
}

fn serve_one(mut stream: File, service: Service) -> io::Result<()> {
    match service {
        Service::Echo => {
            let mut block = vec![0; BLOCK_BYTES];
            loop {
                match stream.read(&mut block)? {
                    0 => return Ok(()),
                    count => stream.write_all(&block[..count])?,
                }
            }
        }
        Service::Sum => {
            let sum = receive(&mut stream)?;
            writeln!(stream, "{} {}", sum.bytes, sum.sum)
        }
        Service::Source => {
            let mut line = Vec::new();
            let mut byte = [0];
            while stream.read(&mut byte)? == 1 && byte != *b"\n" {
                line.push(byte[0]);
            }
            let text = String::from_utf8_lossy(&line).into_owned();
            let bytes = text.trim().parse().map_err(io::Error::other)?;
            send(&mut stream, bytes, bytes)
        }
        Service::Hold => Ok(()),
    }
}

/// Opens connections to a port of the host, all at the same time, sends on each, ends sending, and
/// reads to the end: a server that sends everything back is checked.
pub fn exchange(port: u32, connections: u32, bytes: u64) -> ClientReport {
    let mut report = ClientReport::default();
    let mut streams = Vec::new();
    for number in 0..connections {
        match connect(port) {
            Ok(stream) => streams.push((number, stream)),
            Err(error) => report.add_error(&error),
        }
    }
    report.opened = streams.len() as u32;
    let mut writers = Vec::new();
    for (number, stream) in &mut streams {
        let seed = u64::from(*number);
        if bytes <= SMALL_BYTES {
            if let Err(error) = send_all(stream, seed, bytes) {
                report.add_error(&error);
            }
            continue;
        }
        let Ok(mut writer) = stream.try_clone() else { continue };
        writers.push(thread::spawn(move || send_all(&mut writer, seed, bytes)));
    }
    report.sent_bytes = bytes * u64::from(report.opened);
    for (number, stream) in &mut streams {
        match receive(stream) {
            Ok(sum) => {
                report.received_bytes += sum.bytes;
                report.different += u32::from(sum != Sum::of(u64::from(*number), bytes));
            }
            Err(error) => report.add_error(&error),
        }
    }
    for writer in writers {
        if let Ok(Err(error)) = writer.join() {
            report.add_error(&error);
        }
    }
    report
}

fn send_all(stream: &mut File, seed: u64, bytes: u64) -> io::Result<()> {
    send(stream, seed, bytes)?;
    Ok(shutdown(&*stream, Shutdown::Write)?)
}

impl ClientReport {
    fn add_error(&mut self, error: &io::Error) {
        const MOST: usize = 4;
        if self.errors.len() < MOST {
            self.errors.push(error.to_string());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_do_not_depend_on_the_division() {
        let mut all = Vec::new();
        send(&mut all, 7, 200_001).unwrap();
        let mut sum = Sum::default();
        all.chunks(777).for_each(|part| sum.add(part));
        assert_eq!(sum, Sum::of(7, 200_001));
        assert_ne!(sum.sum, Sum::of(8, 200_001).sum);
        all.swap(100_000, 100_001);
        assert_ne!(receive(&mut &all[..]).unwrap().sum, sum.sum);
    }
}

//! What a link carries: one plain TCP connection from one end to the other.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use super::{End, Link, NAMES};
use crate::LabError;

/// Bytes of a read and of a write.
const CHUNK_BYTES: usize = 1 << 20;
/// The beginning of a connection does not count: it is slow, and the token bucket is full.
const BEGINNING: Duration = Duration::from_millis(200);
/// An end that hears nothing for so long gives up.
const SILENCE_LIMIT: Duration = Duration::from_secs(20);

/// Sends from the left to the right for a while; the rate of what arrives, in megabits a second.
///
/// # Errors
/// [`LabError::SystemFile`] with what a socket said.
pub fn megabits_per_s(link: &Link, counted: Duration) -> Result<f64, LabError> {
    transfer(link, counted).map_err(LabError::of_file(NAMES))
}

fn transfer(link: &Link, counted: Duration) -> io::Result<f64> {
    // A socket stays in the namespace that it was made in; a connection is complete before it is
    // accepted.
    let listener =
        link.namespace(End::Right).inside(|| TcpListener::bind((End::Right.address(), 0)))?;
    let address = listener.local_addr()?;
    let sending =
        link.namespace(End::Left).inside(|| TcpStream::connect_timeout(&address, SILENCE_LIMIT))?;
    let (receiving, _) = listener.accept()?;
    sending.set_write_timeout(Some(SILENCE_LIMIT))?;
    receiving.set_read_timeout(Some(SILENCE_LIMIT))?;
    thread::scope(|scope| {
        scope.spawn(|| send(&sending));
        let rate = receive(&receiving, counted);
        // The sender ends by that; a connection that is broken already needs no more.
        for end in [&receiving, &sending] {
            let _ = end.shutdown(Shutdown::Both);
        }
        rate
    })
}

fn receive(mut stream: &TcpStream, counted: Duration) -> io::Result<f64> {
    let mut buffer = vec![0; CHUNK_BYTES];
    let mut read = || match stream.read(&mut buffer)? {
        0 => Err(io::Error::from(io::ErrorKind::UnexpectedEof)),
        length => Ok(length as u64),
    };
    let begun = Instant::now();
    while begun.elapsed() < BEGINNING {
        read()?;
    }
    let (begun, mut bytes) = (Instant::now(), 0);
    while begun.elapsed() < counted {
        bytes += read()?;
    }
    Ok(bytes as f64 * 8.0 / begun.elapsed().as_secs_f64() / 1e6)
}

/// Sends until that fails; the receiver knows why.
fn send(mut stream: &TcpStream) {
    let chunk = vec![0x5a; CHUNK_BYTES];
    while stream.write(&chunk).is_ok() {}
}

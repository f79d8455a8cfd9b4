//! Rate of a plain TCP connection from one end of a link to the other.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use super::{End, Link, NAMES};
use crate::LabError;

/// Size of a read and of a write in bytes.
const CHUNK_BYTES: usize = 1 << 20;
/// Start of a connection that does not count: it is slow, and the token bucket is full.
const BEGINNING: Duration = Duration::from_millis(200);
/// Time limit without data.
const SILENCE_LIMIT: Duration = Duration::from_secs(20);

/// Sends from the left to the right for a while; returns the rate of arrival in Mbit/s.
///
/// # Errors
/// [`LabError::SystemFile`] with the error of a socket.
pub fn megabits_per_s(link: &Link, counted: Duration) -> Result<f64, LabError> {
    transfer(link, counted).map_err(LabError::of_file(NAMES))
}

fn transfer(link: &Link, counted: Duration) -> io::Result<f64> {
    // A socket stays in the namespace in which it was created; a connection is complete before it
    // is accepted.
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
        // This ends the sender; it fails if the connection is already broken.
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

/// Sends until an error, whose reason the receiver reports.
fn send(mut stream: &TcpStream) {
    let chunk = vec![0x5a; CHUNK_BYTES];
    while stream.write(&chunk).is_ok() {}
}

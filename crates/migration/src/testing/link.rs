//! Connections between the two ends of a simulated migration: sockets that can be cut anywhere.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use crate::{BoxError, Cancel, RoundSync};

/// Both ends of a migration's connections.
#[derive(Debug)]
pub struct Link {
    /// Data streams at the source.
    pub send: Vec<Wire>,
    /// Data streams at the destination.
    pub receive: Vec<UnixStream>,
    /// Confirmations of rounds, at the source.
    pub rounds: Rounds,
    /// Confirmations of rounds, at the destination.
    pub confirm: UnixStream,
}

/// Position at which a stream is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Index of the stream.
    pub stream: usize,
    /// Bytes that still pass.
    pub after_bytes: u64,
}

/// Connects both ends. Cancelling either side shuts all connections down.
///
/// # Errors
/// If no sockets can be created.
pub fn link(
    streams: usize,
    cut: Option<Cut>,
    source: &Cancel,
    target: &Cancel,
) -> io::Result<Link> {
    let (mut send, mut receive) = (Vec::new(), Vec::new());
    let (rounds, confirm) = UnixStream::pair()?;
    let mut shut = vec![rounds.try_clone()?];
    for index in 0..streams {
        let (from, to) = UnixStream::pair()?;
        shut.push(from.try_clone()?);
        let left = cut.filter(|cut| cut.stream == index).map(|cut| cut.after_bytes);
        send.push(Wire { stream: from, left });
        receive.push(to);
    }
    for cancel in [source, target] {
        let shut = shut.iter().map(UnixStream::try_clone).collect::<Result<Vec<_>, _>>()?;
        cancel.on_cancel(move || {
            for stream in &shut {
                // It may be shut down already.
                let _ = stream.shutdown(Shutdown::Both);
            }
        });
    }
    Ok(Link { send, receive, rounds: Rounds(rounds), confirm })
}

/// A data stream's end at the source.
#[derive(Debug)]
pub struct Wire {
    stream: UnixStream,
    left: Option<u64>,
}

impl Write for Wire {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let Some(left) = &mut self.left else { return self.stream.write(bytes) };
        let count = bytes.len().min(usize::try_from(*left).unwrap_or(usize::MAX));
        if count == 0 {
            self.stream.shutdown(Shutdown::Both)?;
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let count = self.stream.write(&bytes[..count])?;
        *left -= count as u64;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        // A cut right behind the last byte.
        if self.left == Some(0) {
            self.stream.shutdown(Shutdown::Both)?;
        }
        self.stream.flush()
    }
}

/// Confirmations of rounds, at the source.
#[derive(Debug)]
pub struct Rounds(UnixStream);

impl RoundSync for Rounds {
    fn wait_round_done(&mut self, round: u32) -> Result<(), BoxError> {
        let mut bytes = [0; 4];
        self.0.read_exact(&mut bytes)?;
        let found = u32::from_le_bytes(bytes);
        if found == round { Ok(()) } else { Err(format!("round {found} was confirmed").into()) }
    }
}

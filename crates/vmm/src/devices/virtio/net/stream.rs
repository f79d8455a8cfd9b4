//! Frames over a stream socket, each behind its length in four bytes (QEMU's `-netdev stream`,
//! passt).

use std::io;

use super::parts::Port;

/// Longest frame, in bytes: the largest packet behind an Ethernet header.
pub(super) const MAX_FRAME_BYTES: usize = 65535 + 14;
/// Shortest one: an Ethernet header.
pub(super) const LEAST_FRAME_BYTES: usize = 14;
const PREFIX_BYTES: usize = 4;
/// Room for received frames, in bytes.
const INPUT_BYTES: usize = 128 << 10;
const _: () = assert!(INPUT_BYTES >= PREFIX_BYTES + MAX_FRAME_BYTES);

/// Why a connection cannot be used any more.
pub(super) type Broken = String;

/// A connection.
pub(super) struct Stream {
    pub(super) port: Port,
    input: Vec<u8>,
    /// Bytes of `input` that hold received data.
    start: usize,
    end: usize,
    /// The last read has emptied the socket.
    is_empty: bool,
    /// The end of a frame whose beginning was sent, at most one.
    rest: Vec<u8>,
}

/// Whether there may be more to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    Some,
    /// The socket is empty, or full.
    None,
}

impl Stream {
    /// A connection over a socket that does not block.
    pub(super) fn new(port: Port) -> Self {
        Self { port, input: Vec::new(), start: 0, end: 0, is_empty: false, rest: Vec::new() }
    }

    /// The next whole frame.
    pub(super) fn frame(&self) -> Result<Option<&[u8]>, Broken> {
        let received = &self.input[self.start..self.end];
        let Some((prefix, rest)) = received.split_first_chunk() else { return Ok(None) };
        let length = u32::from_be_bytes(*prefix) as usize;
        if !(LEAST_FRAME_BYTES..=MAX_FRAME_BYTES).contains(&length) {
            return Err(format!("it announces a frame of {length} bytes"));
        }
        Ok(rest.get(..length))
    }

    /// Whether there is one, or a wrong length.
    pub(super) fn has_frame(&self) -> bool {
        !matches!(self.frame(), Ok(None))
    }

    /// Removes that frame, of `length` bytes.
    pub(super) fn skip(&mut self, length: usize) {
        self.start = (self.start + PREFIX_BYTES + length).min(self.end);
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    /// Receives more. After a read that has emptied the socket, the next call does nothing.
    pub(super) fn receive(&mut self) -> Result<Progress, Broken> {
        let Some(socket) = self.port.fd() else { return Ok(Progress::None) };
        if std::mem::take(&mut self.is_empty) {
            return Ok(Progress::None);
        }
        if self.input.is_empty() {
            self.input = vec![0; INPUT_BYTES];
        }
        if self.input.len() - self.start < PREFIX_BYTES + MAX_FRAME_BYTES {
            self.input.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let room = &mut self.input[self.end..];
        if room.is_empty() {
            return Ok(Progress::Some);
        }
        match rustix::io::read(socket, &mut *room) {
            Ok(0) => Err("it has ended".to_owned()),
            Ok(length) => {
                self.is_empty = length < room.len();
                self.end += length;
                Ok(Progress::Some)
            }
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Ok(Progress::None),
            Err(error) => Err(format!("it cannot be read from: {error}")),
        }
    }

    /// Keeps the end of a frame for [`flush`](Self::flush).
    pub(super) fn keep(&mut self, rest: Vec<u8>) {
        self.rest = rest;
    }

    /// Sends the end of a frame; `None` as long as the socket is full.
    pub(super) fn flush(&mut self) -> Result<Progress, Broken> {
        let Some(socket) = self.port.fd() else { return Ok(Progress::Some) };
        while !self.rest.is_empty() {
            match rustix::io::write(socket, &self.rest) {
                Ok(length) => drop(self.rest.drain(..length)),
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {
                    return Ok(Progress::None);
                }
                Err(error) => return Err(broken_write(&error.into())),
            }
        }
        Ok(Progress::Some)
    }

    /// Whether the end of a frame waits.
    pub(super) fn is_waiting(&self) -> bool {
        !self.rest.is_empty()
    }
}

/// Describes a failed write.
pub(super) fn broken_write(error: &io::Error) -> Broken {
    match error.kind() {
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => "it has ended".to_owned(),
        _ => format!("it cannot be written to: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;

    fn pair() -> (Stream, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        (Stream::new(Port::Open(Arc::new(ours.into()))), theirs)
    }

    fn prefixed(frame: &[u8]) -> Vec<u8> {
        [&(frame.len() as u32).to_be_bytes(), frame].concat()
    }

    #[test]
    fn wrong_lengths_break_the_connection() {
        for length in [0_u32, 13, MAX_FRAME_BYTES as u32 + 1, u32::MAX] {
            let (mut stream, mut peer) = pair();
            peer.write_all(&length.to_be_bytes()).unwrap();
            assert_eq!(stream.receive(), Ok(Progress::Some));
            assert!(stream.frame().unwrap_err().contains(&length.to_string()));
        }
        let (mut stream, peer) = pair();
        drop(peer);
        assert!(stream.receive().unwrap_err().contains("ended"));
        stream.keep(vec![1]);
        assert!(stream.flush().unwrap_err().contains("ended"));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// However the bytes arrive, the frames are those that were sent.
        #[test]
        fn frames_survive_any_pieces(
            lengths in prop::collection::vec(14..MAX_FRAME_BYTES, 1..6),
            pieces in prop::collection::vec(1..40_000_usize, 1..20),
        ) {
            let (mut stream, mut peer) = pair();
            let frame = |(index, length): (usize, &usize)| vec![index as u8; *length];
            let frames: Vec<_> = lengths.iter().enumerate().map(frame).collect();
            let bytes: Vec<u8> = frames.iter().flat_map(|frame| prefixed(frame)).collect();
            let (mut left, mut pieces) = (&bytes[..], pieces.iter().cycle());
            let mut received = Vec::new();
            while received.len() < frames.len() {
                let (now, later) = left.split_at((*pieces.next().unwrap()).min(left.len()));
                peer.write_all(now).unwrap();
                left = later;
                while stream.receive() == Ok(Progress::Some) {
                    while let Some(frame) = stream.frame().unwrap() {
                        let frame = frame.to_vec();
                        stream.skip(frame.len());
                        received.push(frame);
                    }
                }
            }
            prop_assert!(received == frames);
        }
    }
}

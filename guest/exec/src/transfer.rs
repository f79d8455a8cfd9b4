//! Sends an archive over a session, or receives one, for either side.

use std::io::{self, Read, Write};

use crate::channel::{Channel, ChannelError};
use crate::wire::{Control, DATA_BYTES, Frame, INPUT_WINDOW_BYTES};

/// Which side sends data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the host.
    ToGuest,
    /// From the guest.
    ToHost,
}

/// Writes the bytes of an archive as frames.
#[derive(Debug)]
pub struct Sender<'a> {
    channel: &'a mut Channel,
    direction: Direction,
}

impl<'a> Sender<'a> {
    /// Sends over `channel`.
    pub fn new(channel: &'a mut Channel, direction: Direction) -> Self {
        Self { channel, direction }
    }
}

impl Write for Sender<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let bytes = &bytes[..bytes.len().min(DATA_BYTES)];
        let frame = match self.direction {
            Direction::ToGuest => Frame::Input(bytes.to_vec()),
            Direction::ToHost => Frame::Output(bytes.to_vec()),
        };
        self.channel.send(&frame).map_err(other)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.channel.send_rest().map_err(other)
    }
}

/// Reads the bytes of an archive from frames, up to its end.
#[derive(Debug)]
pub struct Receiver<'a> {
    channel: &'a mut Channel,
    direction: Direction,
    data: io::Cursor<Vec<u8>>,
    /// What came instead of data; see [`Receiver::finish`].
    last: Option<Control>,
}

impl<'a> Receiver<'a> {
    /// Receives over `channel`.
    pub fn new(channel: &'a mut Channel, direction: Direction) -> Self {
        Self { channel, direction, data: io::Cursor::default(), last: None }
    }

    /// The message that ended the data, if it has come.
    pub fn last(&self) -> Option<&Control> {
        self.last.as_ref()
    }

    /// Reads what is left of the data; returns the message after it.
    ///
    /// # Errors
    /// Those of the connection.
    pub fn finish(mut self) -> Result<Control, ChannelError> {
        let mut rest = vec![0; INPUT_WINDOW_BYTES];
        loop {
            if let Some(last) = self.last {
                return Ok(last);
            }
            self.fill()?;
            while self.read(&mut rest)? > 0 && self.last.is_none() {}
        }
    }

    fn fill(&mut self) -> Result<(), ChannelError> {
        match (self.channel.read()?, self.direction) {
            (Frame::Input(data), Direction::ToGuest) | (Frame::Output(data), Direction::ToHost) => {
                self.data = io::Cursor::new(data);
            }
            (Frame::Control(control), _) => self.last = Some(control),
            // Warnings.
            (Frame::Errors(text), Direction::ToHost) => {
                let _ = io::stderr().write_all(&printable(&text));
            }
            _ => return Err(ChannelError::Protocol("a message out of turn")),
        }
        Ok(())
    }
}

impl Read for Receiver<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.data.read(buffer)? {
                0 if self.last.is_some() => return Ok(0),
                0 => self.fill().map_err(other)?,
                length => return Ok(length),
            }
        }
    }
}

fn other(error: ChannelError) -> io::Error {
    match error {
        ChannelError::Io(error) => error,
        error => io::Error::other(error),
    }
}

/// Replaces bytes with which the guest could control a terminal.
fn printable(text: &[u8]) -> Vec<u8> {
    text.iter()
        .map(|byte| if byte.is_ascii_control() && *byte != b'\n' { b'?' } else { *byte })
        .collect()
}

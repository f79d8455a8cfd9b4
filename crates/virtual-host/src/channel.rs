//! The control channel between a virtual host and the program that started it: messages and their
//! framing.
//!
//! A frame consists of a header length and a payload length (u32, little-endian), a JSON header and
//! a raw payload. Bulk data (output of commands, files) is sent as payload, so that it is neither
//! escaped nor copied through JSON. Both lengths are bounded, so that garbage is detected.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Version of the protocol; the init sends it in its first message.
pub const PROTOCOL_VERSION: u32 = 1;
/// Name of the virtio-serial port.
pub const PORT_NAME: &str = "ebb.control";
/// Maximum length of a JSON header in bytes.
pub const HEADER_LIMIT: usize = 1 << 20;
/// Maximum length of a payload in bytes.
pub const PAYLOAD_LIMIT: usize = 1 << 16;

/// A program to run in the host.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Program {
    /// The program and its arguments.
    pub argv: Vec<String>,
    /// Additions to the standard environment.
    pub environment: Vec<(String, String)>,
    /// Working directory; `None` is `/`.
    pub directory: Option<String>,
}

/// Message from the starter to the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// Start a program; answered by `Started`, `Stdout`, `Stderr`, and `Exited` or `Failed`.
    Run(Program),
    /// Kill the program of this id and its process group.
    Kill,
    /// Create a file; `size_bytes` bytes follow in `FileData`, then the host answers `FileDone`.
    PutFile {
        /// Absolute path in the host.
        path: String,
        /// Permission bits.
        mode: u32,
        /// Length of the content.
        size_bytes: u64,
    },
    /// Part of a file's content, in the payload.
    FileData,
    /// Send a file; answered by `FileStart`, `FileData` … and `FileDone`.
    GetFile {
        /// Absolute path in the host.
        path: String,
    },
    /// Send the state of the host's memory.
    Sample,
    /// Power off.
    Shutdown,
}

/// Message from the host to the starter.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    /// First message, with id 0.
    Hello(Hello),
    /// The program has been started.
    Started {
        /// Its process id in the host.
        pid: u32,
    },
    /// Standard output of the program, in the payload.
    Stdout,
    /// Standard error of the program, in the payload.
    Stderr,
    /// The program ended; comes after all of its output.
    Exited(ExitStatus),
    /// The file's content follows.
    FileStart {
        /// Permission bits.
        mode: u32,
        /// Length of the content.
        size_bytes: u64,
    },
    /// Part of a file's content, in the payload.
    FileData,
    /// The file is complete.
    FileDone {
        /// Length received or sent.
        size_bytes: u64,
    },
    /// State of the host's memory.
    Sample(MemorySample),
    /// The request failed.
    Failed {
        /// The reason.
        error: String,
    },
}

/// Description of a host, sent when it is ready.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Version of the host's protocol.
    pub version: u32,
    /// Kernel release.
    pub kernel: String,
    /// Time since the kernel's start in ms.
    pub uptime_ms: u64,
    /// Failures of the set-up that left the host usable.
    pub warnings: Vec<String>,
}

/// Exit status of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExitStatus {
    /// The exit code.
    Code(i32),
    /// The signal that killed it.
    Signal(i32),
}

impl ExitStatus {
    /// Whether the program returned 0.
    pub fn success(self) -> bool {
        self == Self::Code(0)
    }

    /// The code that a shell would report: the exit code, or 128 plus the signal's number.
    pub fn shell_code(self) -> i32 {
        match self {
            Self::Code(code) => code,
            Self::Signal(signal) => 128 + signal,
        }
    }
}

/// State of the host's memory.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemorySample {
    /// Time since the kernel's start in ms.
    pub uptime_ms: u64,
    /// `/proc/meminfo` in KiB (numbers of huge pages unchanged).
    pub meminfo: BTreeMap<String, u64>,
    /// Pages swapped in since the start (`pswpin` of `/proc/vmstat`).
    pub swapped_in_pages: u64,
    /// Pages swapped out since the start (`pswpout` of `/proc/vmstat`).
    pub swapped_out_pages: u64,
    /// For each NUMA node: `MemTotal`, `MemFree` … in KiB.
    pub nodes: Vec<BTreeMap<String, u64>>,
}

impl MemorySample {
    /// Swap in use, in KiB.
    pub fn swap_used_kib(&self) -> u64 {
        let value = |name| self.meminfo.get(name).copied().unwrap_or(0);
        value("SwapTotal").saturating_sub(value("SwapFree"))
    }
}

/// A message with the number of its request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message<T> {
    /// Number of the request; chosen by the starter, above 0.
    pub id: u64,
    /// The message.
    pub body: T,
}

/// Writes one frame with a single write, so that frames of several threads do not interleave.
pub fn write_frame<T: Serialize>(
    mut writer: impl Write,
    message: &Message<T>,
    payload: &[u8],
) -> io::Result<()> {
    let header = serde_json::to_vec(message)?;
    if header.len() > HEADER_LIMIT || payload.len() > PAYLOAD_LIMIT {
        let text = format!(
            "message of {} + {} bytes exceeds the channel's limit",
            header.len(),
            payload.len()
        );
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    let mut frame = Vec::with_capacity(8 + header.len() + payload.len());
    frame.extend_from_slice(&(header.len() as u32).to_le_bytes());
    frame.extend_from_slice(&(payload.len() as u32).to_le_bytes());
    frame.extend_from_slice(&header);
    frame.extend_from_slice(payload);
    writer.write_all(&frame)
}

/// Reads one frame; `None` at a clean end between two frames.
pub fn read_frame<T: DeserializeOwned>(
    mut reader: impl Read,
) -> io::Result<Option<(Message<T>, Vec<u8>)>> {
    let mut lengths = [0_u8; 8];
    match reader.read(&mut lengths[..1])? {
        0 => return Ok(None),
        _ => reader.read_exact(&mut lengths[1..])?,
    }
    let lengths = u64::from_le_bytes(lengths);
    let (header_len, payload_len) = ((lengths as u32) as usize, (lengths >> 32) as usize);
    if header_len > HEADER_LIMIT || payload_len > PAYLOAD_LIMIT {
        let text =
            format!("frame of {header_len} + {payload_len} bytes exceeds the channel's limit");
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    }
    let mut header = vec![0; header_len];
    reader.read_exact(&mut header)?;
    let mut payload = vec![0; payload_len];
    reader.read_exact(&mut payload)?;
    Ok(Some((serde_json::from_slice(&header)?, payload)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn round_trip<T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(
        body: T,
        payload: &[u8],
    ) {
        let message = Message { id: 7, body };
        let mut bytes = Vec::new();
        write_frame(&mut bytes, &message, payload).unwrap();
        let mut reader = bytes.as_slice();
        let (read, read_payload) = read_frame::<T>(&mut reader).unwrap().unwrap();
        assert_eq!((read, read_payload.as_slice()), (message, payload));
        assert!(reader.is_empty());
    }

    #[test]
    fn messages_survive_the_channel() {
        round_trip(
            Request::Run(Program { argv: vec!["a\n\"b".into()], ..Program::default() }),
            b"",
        );
        round_trip(Request::FileData, &[0, 1, 2, 0xff]);
        round_trip(Reply::Exited(ExitStatus::Signal(9)), b"");
        round_trip(Reply::Sample(MemorySample::default()), b"");
    }

    #[test]
    fn only_a_truncated_frame_is_an_error_at_the_end() {
        assert!(read_frame::<Request>(&[][..]).unwrap().is_none());
        let mut bytes = Vec::new();
        write_frame(&mut bytes, &Message { id: 1, body: Request::Sample }, b"xyz").unwrap();
        for length in 1..bytes.len() {
            assert!(read_frame::<Request>(&bytes[..length]).is_err(), "{length}");
        }
    }

    #[test]
    fn lengths_are_bounded_in_both_directions() {
        let message = Message { id: 1, body: Request::FileData };
        assert!(write_frame(Vec::new(), &message, &vec![0; PAYLOAD_LIMIT + 1]).is_err());
        let mut huge = u32::MAX.to_le_bytes().to_vec();
        huge.extend_from_slice(&[0; 64]);
        assert!(read_frame::<Request>(huge.as_slice()).is_err());
    }

    #[test]
    fn exit_statuses_are_reported_as_by_a_shell() {
        assert_eq!(ExitStatus::Code(3).shell_code(), 3);
        assert_eq!(ExitStatus::Signal(9).shell_code(), 137);
        assert!(ExitStatus::Code(0).success() && !ExitStatus::Signal(0).success());
    }

    proptest! {
        #[test]
        fn garbage_is_an_error_and_never_a_panic(
            bytes in proptest::collection::vec(any::<u8>(), 0..64),
        ) {
            let mut reader = bytes.as_slice();
            while let Ok(Some(_)) = read_frame::<Request>(&mut reader) {}
        }

        #[test]
        fn any_program_and_payload_survive(
            argv in proptest::collection::vec(".*", 0..4),
            payload: Vec<u8>,
        ) {
            round_trip(Request::Run(Program { argv, ..Program::default() }), &payload);
        }
    }
}

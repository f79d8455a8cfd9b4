//! Frames of a session: a kind (1 byte), the payload's length (4 bytes, little-endian), the payload.
//!
//! The host sends a [`Request`] first. Data is carried as it is, everything else as JSON.

use serde::{Deserialize, Serialize};

/// Port on which the agent listens.
pub const PORT: u32 = 0xebb;
/// Port of the host on which the monitor sends random bytes.
pub const RANDOM_PORT: u32 = 0xebb;
/// Bytes of input that the host may send before the agent has [taken](Control::Taken) them.
pub const INPUT_WINDOW_BYTES: usize = 256 << 10;
/// Bytes in a frame of data.
pub const DATA_BYTES: usize = 32 << 10;
/// Longest payload: arguments and environment are the longest.
pub const MAX_PAYLOAD_BYTES: usize = 256 << 10;
const HEADER_BYTES: usize = 5;

/// A frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Frame {
    /// Anything but data.
    Control(Control),
    /// Data for the command's standard input, or of an archive that the guest unpacks.
    Input(Vec<u8>),
    /// The command's standard output, or an archive of the guest's files.
    Output(Vec<u8>),
    /// The command's standard error, or warnings.
    Errors(Vec<u8>),
}

/// A message other than data.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Control {
    /// From the host, once and first.
    Request(Request),
    /// From the host: the input has ended.
    InputEnd,
    /// From the host: the size of its terminal has changed.
    Resize(TerminalSize),
    /// From the host: send this signal to the command's process group.
    Signal(i32),
    /// From the guest: the command runs.
    Started {
        /// Its process id.
        pid: u32,
    },
    /// From the guest: so many more bytes of input were used.
    Taken {
        /// Their number.
        bytes: u32,
    },
    /// From the guest, last: the request was carried out.
    Ended(Ended),
    /// From the guest, last: the request failed.
    Failed(Failure),
}

/// What the host wants.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// Run a command.
    Exec(Exec),
    /// Send the file or directory at this path as an archive.
    Fetch {
        /// Its path in the guest.
        path: String,
    },
    /// Unpack an archive.
    Store {
        /// Where to put it: a directory that exists, else the new name.
        path: String,
        /// Name of what is in the archive, for a directory that exists.
        name: String,
        /// `USER[:GROUP]` who will own it; root without it.
        #[serde(default)]
        user: Option<String>,
    },
    /// Do what is to be done at this moment.
    At(Moment),
}

/// A moment in a machine's life for which the guest has scripts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Moment {
    /// A checkpoint is about to be made.
    Before,
    /// It was made, or not, and the machine goes on.
    Continue {
        /// Random bytes for its kernel: what it read next would be what machines that are made of
        /// the checkpoint read before they have their own.
        random: [u8; 32],
    },
    /// The machine was made from a checkpoint.
    Fork {
        /// Its number among those that were made together.
        number: u32,
        /// Random bytes for its kernel.
        random: [u8; 32],
        /// Addresses of its network interfaces that are new.
        #[serde(default)]
        macs: Vec<NewMac>,
    },
}

/// A network interface gets another address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewMac {
    /// The one that it had when the machine was forked.
    pub old: [u8; 6],
    /// Its own.
    pub new: [u8; 6],
}

/// A command to run.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exec {
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Variables added to the user's environment.
    #[serde(default)]
    pub env: Vec<(String, String)>,
    /// Working directory; the user's home directory without it.
    #[serde(default)]
    pub directory: Option<String>,
    /// `USER[:GROUP]`, names or numbers; root without it.
    #[serde(default)]
    pub user: Option<String>,
    /// Run it on a terminal of this size.
    #[serde(default)]
    pub terminal: Option<TerminalSize>,
    /// Do not wait for it: its standard streams are `/dev/null`.
    #[serde(default)]
    pub detach: bool,
}

/// Size of a terminal in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TerminalSize {
    /// Lines.
    pub rows: u16,
    /// Characters in a line.
    pub columns: u16,
}

/// How a command or transfer has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ended {
    /// With this exit code.
    Code(i32),
    /// By this signal.
    Signal(i32),
}

/// Why a request was not carried out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// The kind of the reason.
    pub kind: FailureKind,
    /// A description for a person.
    pub message: String,
}

/// Kinds of reasons; the exit codes of `ebb exec` follow from them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureKind {
    /// There is no such program.
    NotFound,
    /// The program cannot be executed.
    NotExecutable,
    /// Anything else.
    Other,
}

/// What is wrong with a peer's bytes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// The payload is too long.
    #[error("a frame of {bytes} bytes is longer than the longest of {MAX_PAYLOAD_BYTES}")]
    TooLong {
        /// Its length.
        bytes: usize,
    },
    /// No frame has this kind.
    #[error("frames of kind {0} are unknown; the agent and ebb may be of different versions")]
    Kind(u8),
    /// A message cannot be read.
    #[error("a message cannot be read ({0}); the agent and ebb may be of different versions")]
    Message(String),
}

impl Frame {
    /// Appends the frame's bytes to `bytes`.
    pub fn encode(&self, bytes: &mut impl Extend<u8>) {
        let json;
        let (kind, payload) = match self {
            Self::Control(control) => {
                // Strings and numbers always have a JSON form.
                json = serde_json::to_vec(control).unwrap_or_default();
                (0, &json)
            }
            Self::Input(data) => (1, data),
            Self::Output(data) => (2, data),
            Self::Errors(data) => (3, data),
        };
        bytes.extend([kind]);
        bytes.extend((payload.len() as u32).to_le_bytes());
        bytes.extend(payload.iter().copied());
    }

    fn decode(kind: u8, payload: &[u8]) -> Result<Self, WireError> {
        match kind {
            0 => serde_json::from_slice(payload)
                .map(Self::Control)
                .map_err(|error| WireError::Message(error.to_string())),
            1 => Ok(Self::Input(payload.to_vec())),
            2 => Ok(Self::Output(payload.to_vec())),
            3 => Ok(Self::Errors(payload.to_vec())),
            kind => Err(WireError::Kind(kind)),
        }
    }
}

/// Finds frames in a stream of bytes.
#[derive(Debug, Default)]
pub struct Decoder {
    bytes: Vec<u8>,
    /// Start of the next frame.
    next: usize,
}

impl Decoder {
    /// Adds received bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.drain(..self.next);
        self.next = 0;
        self.bytes.extend_from_slice(bytes);
    }

    /// The next whole frame.
    ///
    /// # Errors
    /// The bytes are not frames. There is no way to go on.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, WireError> {
        let left = &self.bytes[self.next..];
        let Some((&[kind, ref length @ ..], payload)) = left.split_first_chunk::<HEADER_BYTES>()
        else {
            return Ok(None);
        };
        let bytes = u32::from_le_bytes(*length) as usize;
        if bytes > MAX_PAYLOAD_BYTES {
            return Err(WireError::TooLong { bytes });
        }
        let Some(payload) = payload.get(..bytes) else { return Ok(None) };
        let frame = Frame::decode(kind, payload)?;
        self.next += HEADER_BYTES + bytes;
        Ok(Some(frame))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn frame() -> impl Strategy<Value = Frame> {
        let data = proptest::collection::vec(any::<u8>(), 0..300);
        let exec =
            (proptest::collection::vec(".*", 1..4), proptest::option::of(".*"), any::<bool>());
        prop_oneof![
            data.clone().prop_map(Frame::Input),
            data.clone().prop_map(Frame::Output),
            data.prop_map(Frame::Errors),
            any::<u32>().prop_map(|bytes| Frame::Control(Control::Taken { bytes })),
            any::<i32>().prop_map(|code| Frame::Control(Control::Ended(Ended::Code(code)))),
            exec.prop_map(|(argv, user, detach)| {
                let exec = Exec { argv, user, detach, ..Exec::default() };
                Frame::Control(Control::Request(Request::Exec(exec)))
            }),
        ]
    }

    proptest! {
        #[test]
        fn frames_survive_any_cut(
            frames in proptest::collection::vec(frame(), 0..8),
            pieces in proptest::collection::vec(1_usize..50, 1..50),
        ) {
            let mut bytes = Vec::new();
            for frame in &frames {
                frame.encode(&mut bytes);
            }
            let mut decoder = Decoder::default();
            let (mut found, mut rest) = (Vec::new(), &bytes[..]);
            for piece in pieces.iter().cycle() {
                let (now, later) = rest.split_at((*piece).min(rest.len()));
                decoder.push(now);
                while let Some(frame) = decoder.next_frame().unwrap() {
                    found.push(frame);
                }
                rest = later;
                if rest.is_empty() {
                    break;
                }
            }
            prop_assert_eq!(found, frames);
        }
    }

    #[test]
    fn nonsense_is_an_error() {
        let mut decoder = Decoder::default();
        decoder.push(&[1, 0xff, 0xff, 0xff, 0xff]);
        assert_eq!(decoder.next_frame(), Err(WireError::TooLong { bytes: 0xffff_ffff }));
        let mut decoder = Decoder::default();
        decoder.push(&[9, 0, 0, 0, 0]);
        assert_eq!(decoder.next_frame(), Err(WireError::Kind(9)));
        let mut decoder = Decoder::default();
        decoder.push(&[0, 2, 0, 0, 0, b'{', b'}']);
        assert!(matches!(decoder.next_frame(), Err(WireError::Message(_))));
    }
}

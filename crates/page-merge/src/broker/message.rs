//! Messages after the preamble: a frame of length, kind and body each.
//!
//! A client sends a request and waits for the answer; only updates have none. Segments to which an
//! answer refers for the first time are announced before it, each with a descriptor (unix(7),
//! `SCM_RIGHTS`) that accompanies the announcement's bytes, and closed segments are announced
//! before it, too.

use ebb_guest_ram::StableSlot;

use crate::hash::PageHash;
use crate::memory::Node;
use crate::store::Answer;

use super::hello::{Hello, Welcome};
use super::limits::{BATCH_HASHES, BATCH_NOTIFICATIONS, BATCH_PAGES, BATCH_UPDATES};

/// Length of the body (32 bits, little endian) and kind.
pub(super) const HEADER_BYTES: usize = 5;

/// Bytes of a stable page.
pub(super) const PAGE: usize = ebb_abi::PAGE_SIZE_BYTES as usize;

const NODE_BYTES: usize = 4;
const HASH_BYTES: usize = 8;
const SLOT_BYTES: usize = 8;
const UPDATE_BYTES: usize = 1 + SLOT_BYTES;
const ANSWER_BYTES: usize = 1 + SLOT_BYTES;
const NOTIFICATION_BYTES: usize = NODE_BYTES + HASH_BYTES;

/// Maximum length of a text: JSON and reasons.
const TEXT_BYTES: usize = 16 << 10;

/// Maximum length of a broker's state.
const STATUS_BYTES: usize = 4 << 20;

/// Maximum number of closed segments in a message.
pub(super) const BATCH_CLOSED: usize = 4096;

/// Change of a client's hold of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// A reservation became a share.
    Shared,
    /// A share was released.
    Released,
    /// A reservation is not used.
    Unused,
    /// The slot must get no more sharers.
    Retired,
}

/// Message of a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Request<'a> {
    Hello(Hello),
    Query {
        node: Node,
        hashes: Vec<PageHash>,
    },
    /// The node is that of the memory.
    Publish {
        node: Node,
        contents: &'a [u8],
    },
    Updates(Vec<(Change, StableSlot)>),
    Notifications,
}

/// Message of a broker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Reply {
    Welcome(Welcome),
    /// The connection ends for this reason.
    Refused(String),
    Segment {
        number: u32,
        pages: u32,
    },
    Closed(Vec<u32>),
    Answers(Vec<Answer>),
    Slots(Vec<StableSlot>),
    /// Nothing was published.
    NoRoom {
        errno: i32,
        reason: String,
    },
    Notifications(Vec<(Node, PageHash)>),
    /// JSON.
    Status(Vec<u8>),
}

/// Kinds of frames, by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Hello = 1,
    Query = 2,
    Publish = 3,
    Updates = 4,
    AskNotifications = 5,
    Welcome = 65,
    Refused = 66,
    Segment = 67,
    Closed = 68,
    Answers = 69,
    Slots = 70,
    NoRoom = 71,
    Notifications = 72,
    Status = 73,
}

impl Kind {
    const ALL: [Self; 14] = [
        Self::Hello,
        Self::Query,
        Self::Publish,
        Self::Updates,
        Self::AskNotifications,
        Self::Welcome,
        Self::Refused,
        Self::Segment,
        Self::Closed,
        Self::Answers,
        Self::Slots,
        Self::NoRoom,
        Self::Notifications,
        Self::Status,
    ];

    /// Maximum length of the body.
    pub(super) const fn longest_bytes(self) -> usize {
        match self {
            Self::Hello | Self::Welcome | Self::Refused | Self::NoRoom => TEXT_BYTES,
            Self::Query => NODE_BYTES + BATCH_HASHES * HASH_BYTES,
            Self::Publish => NODE_BYTES + BATCH_PAGES * PAGE,
            Self::Updates => BATCH_UPDATES * UPDATE_BYTES,
            Self::AskNotifications => 0,
            Self::Segment => 8,
            Self::Closed => BATCH_CLOSED * 4,
            Self::Answers => BATCH_HASHES * ANSWER_BYTES,
            Self::Slots => BATCH_PAGES * SLOT_BYTES,
            Self::Notifications => BATCH_NOTIFICATIONS * NOTIFICATION_BYTES,
            Self::Status => STATUS_BYTES,
        }
    }
}

/// An invalid frame.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum FrameError {
    #[error("a message of the unknown kind {0}")]
    Kind(u8),
    #[error("{kind:?} of {bytes} bytes, of which at most {} are possible", kind.longest_bytes())]
    Long { kind: Kind, bytes: u32 },
    #[error("{kind:?} that does not parse: {problem}")]
    Body { kind: Kind, problem: String },
    #[error("{0:?}, which the other side sends")]
    Direction(Kind),
}

/// The kind of the frame that begins with `header`, and the length of its body.
pub(super) fn parse_header(header: [u8; HEADER_BYTES]) -> Result<(Kind, usize), FrameError> {
    let [a, b, c, d, number] = header;
    let kind =
        Kind::ALL.into_iter().find(|&kind| kind as u8 == number).ok_or(FrameError::Kind(number))?;
    let bytes = u32::from_le_bytes([a, b, c, d]);
    if bytes as usize > kind.longest_bytes() {
        return Err(FrameError::Long { kind, bytes });
    }
    Ok((kind, bytes as usize))
}

/// A frame's kind and body, and its length with its header.
pub(super) type Frame<'a> = (Kind, &'a [u8], usize);

/// The first frame of `bytes`; `None` if more bytes are needed.
pub(super) fn split_frame(bytes: &[u8]) -> Result<Option<Frame<'_>>, FrameError> {
    let Some((&header, rest)) = bytes.split_first_chunk::<HEADER_BYTES>() else { return Ok(None) };
    let (kind, length) = parse_header(header)?;
    Ok(rest.get(..length).map(|body| (kind, body, HEADER_BYTES + length)))
}

impl<'a> Request<'a> {
    pub(super) fn decode(kind: Kind, body: &'a [u8]) -> Result<Self, FrameError> {
        let mut reader = Reader { kind, rest: body };
        let request = match kind {
            Kind::Hello => return json(kind, body).map(Self::Hello),
            Kind::Query => {
                let node = reader.node()?;
                Self::Query { node, hashes: reader.list(HASH_BYTES, Reader::hash)? }
            }
            Kind::Publish => {
                let node = reader.node()?;
                if !reader.rest.len().is_multiple_of(PAGE) {
                    return Err(reader.problem("part of a page"));
                }
                Self::Publish { node, contents: std::mem::take(&mut reader.rest) }
            }
            Kind::Updates => Self::Updates(reader.list(UPDATE_BYTES, |reader| {
                let change = match reader.byte()? {
                    1 => Change::Shared,
                    2 => Change::Released,
                    3 => Change::Unused,
                    4 => Change::Retired,
                    _ => return Err(reader.problem("an unknown change")),
                };
                Ok((change, reader.slot()?))
            })?),
            Kind::AskNotifications => Self::Notifications,
            _ => return Err(FrameError::Direction(kind)),
        };
        Ok(request)
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        match self {
            Self::Hello(hello) => frame(Kind::Hello, |body| body.extend(to_json(hello))),
            Self::Query { node, hashes } => frame(Kind::Query, |body| {
                put(body, node.0);
                body.extend(hashes.iter().flat_map(|hash| hash.get().to_le_bytes()));
            }),
            Self::Publish { node, contents } => frame(Kind::Publish, |body| {
                put(body, node.0);
                body.extend_from_slice(contents);
            }),
            Self::Updates(updates) => frame(Kind::Updates, |body| {
                for (change, slot) in updates {
                    body.push(match change {
                        Change::Shared => 1,
                        Change::Released => 2,
                        Change::Unused => 3,
                        Change::Retired => 4,
                    });
                    put_slot(body, *slot);
                }
            }),
            Self::Notifications => frame(Kind::AskNotifications, |_| ()),
        }
    }
}

impl Reply {
    pub(super) fn decode(kind: Kind, body: &[u8]) -> Result<Self, FrameError> {
        let mut reader = Reader { kind, rest: body };
        let reply = match kind {
            Kind::Welcome => return json(kind, body).map(Self::Welcome),
            Kind::Refused => return Ok(Self::Refused(printable(body))),
            Kind::Status => return Ok(Self::Status(body.to_vec())),
            Kind::NoRoom => {
                let errno = reader.number()? as i32;
                return Ok(Self::NoRoom { errno, reason: printable(reader.rest) });
            }
            Kind::Segment => Self::Segment { number: reader.number()?, pages: reader.number()? },
            Kind::Closed => Self::Closed(reader.list(4, Reader::number)?),
            Kind::Answers => Self::Answers(reader.list(ANSWER_BYTES, |reader| {
                let tag = reader.byte()?;
                let slot = reader.slot()?;
                match tag {
                    0 => Ok(Answer::Unknown),
                    1 => Ok(Answer::Stable(slot)),
                    2 => Ok(Answer::Wanted),
                    _ => Err(reader.problem("an unknown answer")),
                }
            })?),
            Kind::Slots => Self::Slots(reader.list(SLOT_BYTES, Reader::slot)?),
            Kind::Notifications => Self::Notifications(
                reader.list(NOTIFICATION_BYTES, |reader| Ok((reader.node()?, reader.hash()?)))?,
            ),
            _ => return Err(FrameError::Direction(kind)),
        };
        if reader.rest.is_empty() { Ok(reply) } else { Err(reader.problem("bytes behind its end")) }
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        match self {
            Self::Welcome(welcome) => frame(Kind::Welcome, |body| body.extend(to_json(welcome))),
            Self::Refused(reason) => frame(Kind::Refused, |body| body.extend(short(reason))),
            Self::Segment { number, pages } => frame(Kind::Segment, |body| {
                put(body, *number);
                put(body, *pages);
            }),
            Self::Closed(numbers) => {
                frame(Kind::Closed, |body| numbers.iter().for_each(|&number| put(body, number)))
            }
            Self::Answers(answers) => frame(Kind::Answers, |body| {
                for answer in answers {
                    let (tag, slot) = match answer {
                        Answer::Unknown => (0, StableSlot { segment: 0, index: 0 }),
                        Answer::Stable(slot) => (1, *slot),
                        Answer::Wanted => (2, StableSlot { segment: 0, index: 0 }),
                    };
                    body.push(tag);
                    put_slot(body, slot);
                }
            }),
            Self::Slots(slots) => {
                frame(Kind::Slots, |body| slots.iter().for_each(|&slot| put_slot(body, slot)))
            }
            Self::NoRoom { errno, reason } => frame(Kind::NoRoom, |body| {
                put(body, *errno as u32);
                body.extend(short(reason));
            }),
            Self::Notifications(notifications) => frame(Kind::Notifications, |body| {
                for (node, hash) in notifications {
                    put(body, node.0);
                    body.extend(hash.get().to_le_bytes());
                }
            }),
            Self::Status(document) => frame(Kind::Status, |body| body.extend_from_slice(document)),
        }
    }
}

/// The remaining part of a body.
struct Reader<'a> {
    kind: Kind,
    rest: &'a [u8],
}

impl Reader<'_> {
    fn problem(&self, problem: &str) -> FrameError {
        FrameError::Body { kind: self.kind, problem: problem.to_owned() }
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N], FrameError> {
        let (&bytes, rest) =
            self.rest.split_first_chunk().ok_or_else(|| self.problem("it is too short"))?;
        self.rest = rest;
        Ok(bytes)
    }

    fn byte(&mut self) -> Result<u8, FrameError> {
        self.take().map(|[byte]| byte)
    }

    fn number(&mut self) -> Result<u32, FrameError> {
        self.take().map(u32::from_le_bytes)
    }

    fn node(&mut self) -> Result<Node, FrameError> {
        self.number().map(Node)
    }

    fn slot(&mut self) -> Result<StableSlot, FrameError> {
        Ok(StableSlot { segment: self.number()?, index: self.number()? })
    }

    fn hash(&mut self) -> Result<PageHash, FrameError> {
        let bits = self.take().map(u64::from_le_bytes)?;
        let hash = PageHash::new(bits);
        if hash.get() == bits { Ok(hash) } else { Err(self.problem("a hash of more than 48 bits")) }
    }

    /// All remaining bytes, as records of `bytes` bytes.
    fn list<T>(
        &mut self,
        bytes: usize,
        mut record: impl FnMut(&mut Self) -> Result<T, FrameError>,
    ) -> Result<Vec<T>, FrameError> {
        if !self.rest.len().is_multiple_of(bytes) {
            return Err(self.problem("part of a record"));
        }
        (0..self.rest.len() / bytes).map(|_| record(self)).collect()
    }
}

fn frame(kind: Kind, write: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut bytes = vec![0, 0, 0, 0, kind as u8];
    write(&mut bytes);
    let length = (bytes.len() - HEADER_BYTES) as u32;
    bytes[..4].copy_from_slice(&length.to_le_bytes());
    bytes
}

fn put(body: &mut Vec<u8>, number: u32) {
    body.extend(number.to_le_bytes());
}

fn put_slot(body: &mut Vec<u8>, slot: StableSlot) {
    put(body, slot.segment);
    put(body, slot.index);
}

fn json<T: serde::de::DeserializeOwned>(kind: Kind, body: &[u8]) -> Result<T, FrameError> {
    serde_json::from_slice(body)
        .map_err(|error| FrameError::Body { kind, problem: error.to_string() })
}

/// Serializes a document of a known type; writing it into memory cannot fail.
fn to_json(document: &impl serde::Serialize) -> Vec<u8> {
    serde_json::to_vec(document).unwrap_or_default()
}

/// The first part of a reason.
fn short(reason: &str) -> impl Iterator<Item = u8> {
    reason.bytes().take(1000)
}

/// Text of the peer, made printable.
fn printable(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    text.chars().filter(|character| !character.is_control()).take(1000).collect()
}

#[cfg(test)]
mod tests;

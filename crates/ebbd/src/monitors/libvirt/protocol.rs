//! Messages of libvirt's remote protocol (libvirt src/rpc/virnetprotocol.x, and for procedures
//! src/remote/remote_protocol.x; src/rpc/virkeepaliveprotocol.x for pings).

use super::super::{MOST_BYTES, Trouble, repeatable};
use super::xdr::Reader;

/// Bytes before the content: the length and six numbers.
const HEADER: usize = 28;
const REMOTE: u32 = 0x2000_8086;
const KEEPALIVE: u32 = 0x6b65_6570;
const VERSION: u32 = 1;
const PING: u32 = 1;
const PONG: u32 = 2;
const CALL: u32 = 0;
const REPLY: u32 = 1;
const EVENT: u32 = 2;

/// A procedure that is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Procedure {
    /// Opens the driver of a URI.
    ConnectOpen = 1,
    /// The domain with a UUID.
    DomainLookupByUuid = 24,
    /// Ends a pause.
    DomainResume = 28,
    /// Pauses.
    DomainSuspend = 34,
    /// How a client may authenticate itself.
    AuthList = 66,
    /// By polkit.
    AuthPolkit = 70,
    /// Whether it has a configuration, which outlives its run.
    DomainIsPersistent = 151,
    /// Writes it to a disk and ends it; its next start goes on there.
    DomainManagedSave = 182,
    /// What the balloon leaves.
    DomainSetMemoryFlags = 204,
    /// Whether QEMU can be asked now.
    DomainGetControlInfo = 229,
    /// The domains.
    ConnectListAllDomains = 273,
    /// How often the guest is asked for statistics.
    DomainSetMemoryStatsPeriod = 308,
    /// State and balloon.
    ConnectGetAllDomainStats = 344,
}

/// A message of the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// It wants to know whether this program lives.
    Ping,
    /// Nothing that was asked for.
    Event,
    /// The answer to a request.
    Reply {
        /// The request's number.
        serial: u32,
        /// The number of its procedure.
        procedure: u32,
        /// The content.
        result: Result<Vec<u8>, Refusal>,
    },
}

/// An error as a reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// libvirt's number of it (include/libvirt/virterror.h).
    pub code: i32,
    /// What libvirt says.
    pub text: String,
}

impl From<Refusal> for Trouble {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(repeatable(&refusal.text))
    }
}

fn message(numbers: [u32; 6], content: &[u8]) -> Vec<u8> {
    let length = u32::try_from(HEADER + content.len()).unwrap_or(u32::MAX);
    let mut message = length.to_be_bytes().to_vec();
    message.extend(numbers.into_iter().flat_map(u32::to_be_bytes));
    message.extend(content);
    message
}

/// A request.
pub fn request(serial: u32, procedure: Procedure, content: &[u8]) -> Vec<u8> {
    message([REMOTE, VERSION, procedure as u32, CALL, serial, 0], content)
}

/// The answer to a ping.
pub fn pong() -> Vec<u8> {
    message([KEEPALIVE, VERSION, PONG, EVENT, 0, 0], &[])
}

/// Bytes that arrive, and the messages in them.
#[derive(Debug, Default)]
pub struct Frames(Vec<u8>);

impl Frames {
    /// Adds what has arrived.
    pub fn push(&mut self, bytes: &[u8]) {
        self.0.extend(bytes);
    }

    /// The next message, if it is there as a whole.
    ///
    /// # Errors
    /// It is none, or larger than anything that is asked for.
    pub fn pop(&mut self) -> Result<Option<Message>, Trouble> {
        let Some(length) = self.0.first_chunk().map(|bytes| u32::from_be_bytes(*bytes) as usize)
        else {
            return Ok(None);
        };
        if !(HEADER..=MOST_BYTES).contains(&length) {
            return Err(Trouble::Nonsense(format!("a message of {length} bytes")));
        }
        if self.0.len() < length {
            return Ok(None);
        }
        let bytes: Vec<u8> = self.0.drain(..length).collect();
        parse(&bytes[4..]).map(Some)
    }
}

fn parse(bytes: &[u8]) -> Result<Message, Trouble> {
    let mut reader = Reader::new(bytes);
    let mut numbers = [0; 6];
    for number in &mut numbers {
        *number = reader.u32()?;
    }
    let [program, version, procedure, kind, serial, status] = numbers;
    match (program, version, kind, status) {
        (KEEPALIVE, VERSION, EVENT, _) if procedure == PING => Ok(Message::Ping),
        (_, _, EVENT, _) => Ok(Message::Event),
        (REMOTE, VERSION, REPLY, 0) => {
            let result = Ok(bytes[HEADER - 4..].to_vec());
            Ok(Message::Reply { serial, procedure, result })
        }
        (REMOTE, VERSION, REPLY, 1) => {
            let (code, _domain) = (reader.i32()?, reader.i32()?);
            let text = if reader.u32()? == 0 { String::new() } else { reader.text()? };
            Ok(Message::Reply { serial, procedure, result: Err(Refusal { code, text }) })
        }
        _ => Err(Trouble::Nonsense(format!("a message with the header {numbers:?}"))),
    }
}

/// All messages in these bytes, up to the first that is none.
pub fn messages(bytes: &[u8]) -> Vec<Message> {
    let mut frames = Frames::default();
    frames.push(bytes);
    std::iter::from_fn(|| frames.pop().ok().flatten()).collect()
}

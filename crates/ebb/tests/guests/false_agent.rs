//! An agent that does not keep to its protocol. It runs as a program in a guest, in the place of
//! `ebb-guest-agent`, and answers only what is said about checkpoints and forks.

use std::fs::File;
use std::io::{self, Write as _};
use std::process::ExitCode;

use ebb_guest_agent::channel::Channel;
use ebb_guest_agent::wire::{
    Control, Ended, Failure, FailureKind, Frame, MAX_PAYLOAD_BYTES, Moment, PORT, Request,
};

/// First argument that runs this program as the agent.
pub const ARGUMENT: &str = "--false-agent";

/// Answers in the order of the requests, or of the numbers of forked machines.
#[derive(Clone, Copy, Debug)]
enum Answer {
    /// It failed, in a terminal's language.
    Coloured,
    /// A message of another version, likewise.
    UnknownMessage,
    UnknownFrame,
    EndlessFrame,
    End,
    Nothing,
    Done,
}

/// To `before`: what `ebb` says of each but the last two.
pub const BEFORE: [&str; 5] = [
    "the agent: ",
    "a message cannot be read",
    "frames of kind 9 are unknown",
    "longer than the longest",
    "the connection has ended",
];
const TO_BEFORE: [Answer; BEFORE.len() + 1] = [
    Answer::Coloured,
    Answer::UnknownMessage,
    Answer::UnknownFrame,
    Answer::EndlessFrame,
    Answer::End,
    Answer::Nothing,
];

/// To `fork N`, by number; others get what they wait for.
const TO_FORKS: [Answer; 4] =
    [Answer::Coloured, Answer::UnknownMessage, Answer::Nothing, Answer::End];
/// Number of forked machines whose agent fails.
pub const BAD_FORKS: usize = TO_FORKS.len();

/// Serves the host until the guest ends.
pub fn main() -> ExitCode {
    match serve() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("the false agent: {error}");
            ExitCode::FAILURE
        }
    }
}

fn serve() -> io::Result<()> {
    let listener = ebb_agent::vsock::listen(PORT)?;
    let mut to_before = TO_BEFORE.into_iter();
    // A client that is not answered keeps its connection.
    let mut silent = Vec::new();
    loop {
        let socket = rustix::net::accept(&listener)?;
        let mut stream = File::from(socket.try_clone()?);
        let mut channel = Channel::new(socket)?;
        // Who only tries whether there is an agent asks for nothing.
        let Ok(Frame::Control(Control::Request(Request::At(moment)))) = channel.read() else {
            continue;
        };
        let answer = match moment {
            Moment::Before => to_before.next().unwrap_or(Answer::Done),
            Moment::Continue { .. } => Answer::UnknownMessage,
            Moment::Fork { number, .. } => {
                TO_FORKS.get(number as usize).copied().unwrap_or(Answer::Done)
            }
        };
        let mut bytes = Vec::new();
        match answer {
            Answer::Coloured => {
                let message = "\u{1b}[31mred\u{7}".to_owned();
                let failure = Failure { kind: FailureKind::Other, message };
                Frame::Control(Control::Failed(failure)).encode(&mut bytes);
            }
            Answer::UnknownMessage => bytes.extend(frame(0, br#"{"\u001b[31mred\u0007":1}"#)),
            Answer::UnknownFrame => bytes.extend(frame(9, b"\x1b[31mred")),
            Answer::EndlessFrame => {
                bytes.push(2);
                bytes.extend((MAX_PAYLOAD_BYTES as u32 + 1).to_le_bytes());
            }
            Answer::End => {}
            Answer::Nothing => {
                silent.push(channel);
                continue;
            }
            Answer::Done => Frame::Control(Control::Ended(Ended::Code(0))).encode(&mut bytes),
        }
        // The host may have hung up.
        let _ = stream.write_all(&bytes);
    }
}

fn frame(kind: u8, payload: &[u8]) -> Vec<u8> {
    [&[kind][..], &(payload.len() as u32).to_le_bytes(), payload].concat()
}

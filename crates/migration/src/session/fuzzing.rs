//! Fuzz targets: each takes arbitrary bytes, acts as a hostile peer with them, and panics if this
//! side misbehaves. They also run as ordinary tests.
//!
//! A new target is a function here, a line in [`TARGETS`], and a file of two lines in
//! `fuzz/fuzz_targets`.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::fs::MemfdFlags;

use super::address::Address;
use super::cancel::CancelHandle;
use super::dial::dial;
use super::error::SessionError;
use super::intake::{Intake, examine};
use super::limits::TimeLimits;
use super::listener::Listener;
use super::message::{
    Acceptance, Greeting, HEADER_BYTES, Message, MessageKind, SetupBody, parse_header,
};
use super::preamble::{PREAMBLE_BYTES, Role};
use super::security::{Security, TlsFiles};
use super::source::{Outcome, connect};
use super::tls::{TlsClient, TlsServer};

/// A fuzz target by name.
pub type Target = (&'static str, fn(&[u8]));

/// All targets.
pub const TARGETS: [Target; 6] = [
    ("session_address", address),
    ("session_frame", frame),
    ("session_hello", hello),
    ("session_destination", destination),
    ("session_source", source),
    ("session_tls_files", tls_files),
];

/// Input that fits into a socket's buffer, so that no thread is needed to write it.
const LONGEST_INPUT_BYTES: usize = 64 << 10;

/// `--to` and `--listen`: a parsed address is printed the same way.
pub fn address(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    if let Ok(address) = text.parse::<Address>() {
        assert_eq!(address.to_string().parse(), Ok(address));
    }
}

/// One frame of the control connection: a decoded message survives encoding.
pub fn frame(data: &[u8]) {
    let Some((&header, body)) = data.split_first_chunk::<HEADER_BYTES>() else { return };
    let Ok((kind, bytes)) = parse_header(header) else { return };
    assert!(bytes <= kind.longest_bytes());
    // The length is the frame's; bytes behind it do not matter here.
    let Ok(message) = Message::decode(kind, body.to_vec()) else { return };
    assert_eq!(message.kind(), kind);
    if let Ok(frame) = message.encode() {
        let body = frame[HEADER_BYTES..].to_vec();
        assert_eq!(Message::decode(kind, body), Ok(message));
    }
}

/// The first bytes of a connection as they arrive: never more is requested than is missing, and the
/// result for a prefix is that for the whole.
pub fn hello(data: &[u8]) {
    let mut judged = 0;
    loop {
        match examine(&data[..judged]) {
            Ok(Intake::More(missing)) => {
                assert!(missing > 0);
                judged += missing;
                if judged > data.len() {
                    return;
                }
            }
            Ok(Intake::Done(_)) => return,
            Err(unwanted) => {
                assert!(!unwanted.problem().chars().any(char::is_control));
                return;
            }
        }
    }
}

/// A whole destination. The first byte selects how far a real source proceeds before the other
/// bytes are sent.
pub fn destination(data: &[u8]) {
    let Some((&way, bytes)) = data.split_first() else { return };
    let bytes = &bytes[..bytes.len().min(LONGEST_INPUT_BYTES)];
    let place = Place::new();
    let Ok(cancel) = CancelHandle::new() else { return };
    let Ok(mut listener) =
        Listener::bind(&place.address(), &Security::Local, &greeting(), &limits(), &cancel)
    else {
        return;
    };
    let Ok(mut source) = UnixStream::connect(&place.0) else { return };
    // A destination that has failed may have closed the connection: nothing written here has to
    // arrive.
    let mut write = |bytes: &[u8], last: bool| {
        let _ = source.write_all(bytes);
        if last {
            let _ = source.shutdown(Shutdown::Write);
        }
    };
    if way & 1 == 0 {
        write(bytes, true);
    } else {
        write(&opening(&greeting()), false);
        if way & 2 == 0 {
            write(bytes, true);
        } else {
            let setup =
                serde_json::to_vec(&SetupBody { streams: 1, machine: 7 }).unwrap_or_default();
            write(&encode(&Message::Setup(setup)), way & 4 == 0);
        }
    }
    let Ok(session) = listener.accept(Some(Duration::ZERO)) else { return };
    let Ok((setup, _)) = session.setup::<serde_json::Value>() else { return };
    let Ok(accepted) = setup.accept(1) else { return };
    // The next steps need the session's id, which the destination has sent only to the source.
    let mut data_stream = None;
    if way & 7 == 7 {
        data_stream = join(&mut source, &place);
    }
    let joined = accepted.join(&mut listener);
    let Ok((mut streaming, _streams)) = joined else { return };
    assert!(data_stream.is_some(), "a session without the id of its data streams");
    let _ = source.write_all(bytes);
    let _ = source.shutdown(Shutdown::Write);
    if streaming.round_done(0).is_err() {
        return;
    }
    let Ok((restoring, _)) = streaming.receive_state() else { return };
    if let Ok(committed) = restoring.ready() {
        let commit = [0, 0, 0, 0, MessageKind::Commit as u8];
        assert!(
            bytes.windows(HEADER_BYTES).any(|frame| frame == commit),
            "the guest moved without a decision"
        );
        committed.running();
    }
}

/// A whole source, with a destination that sends a hello and then these bytes.
pub fn source(data: &[u8]) {
    let bytes = data[..data.len().min(LONGEST_INPUT_BYTES)].to_vec();
    let place = Place::new();
    let Ok(listener) = UnixListener::bind(&place.0) else { return };
    let Ok(cancel) = CancelHandle::new() else { return };
    let answers = bytes.clone();
    let hostile = std::thread::spawn(move || play_destination(&listener, &answers));
    let outcome = run_source(&place.address(), &cancel);
    let running = [0, 0, 0, 0, MessageKind::Running as u8];
    let says_running = bytes.windows(HEADER_BYTES).any(|frame| frame == running);
    assert!(
        says_running || !matches!(outcome, Ok(Outcome::Moved)),
        "the guest moved without a destination"
    );
    // The thread accepts connections until one ends at once.
    drop(UnixStream::connect(&place.0));
    assert!(hostile.join().is_ok());
}

/// Files for TLS as they come from another process: three with parts of the bytes, or in place of
/// one of them something else than a file. Errors name the option.
pub fn tls_files(data: &[u8]) {
    let Some((&kind, bytes)) = data.split_first() else { return };
    let parts: Vec<_> = bytes.chunks(bytes.len().div_ceil(3).max(1)).collect();
    let part = |index: usize| parts.get(index).copied().unwrap_or_default();
    let file = |index: usize| {
        let file = match kind {
            0 if index == 0 => io::pipe().map(|(reader, _)| OwnedFd::from(reader)),
            1 if index == 1 => File::open("/").map(OwnedFd::from),
            2 if index == 2 => UnixStream::pair().map(|(socket, _)| OwnedFd::from(socket)),
            _ => memory_file(part(index)),
        };
        Ok::<_, io::Error>((PathBuf::from(format!("descriptor {index}")), file?))
    };
    let (Ok(certificate), Ok(key), Ok(authorities)) = (file(0), file(1), file(2)) else { return };
    let name = String::from_utf8_lossy(part(2)).into_owned();
    let files = TlsFiles::from_descriptors([certificate, key, authorities], vec![name.clone()]);
    let client = TlsClient::load(&files, &name).and_then(|client| client.connection().map(drop));
    let server = TlsServer::load(&files).map(|server| server.connection().map(drop));
    for error in [client.err(), server.err()].into_iter().flatten() {
        match error {
            SessionError::TlsFile { option, problem, .. } => {
                assert!(option.starts_with("--") && !problem.is_empty());
            }
            error => panic!("{error}"),
        }
    }
}

/// A file without a name that holds these bytes.
fn memory_file(bytes: &[u8]) -> io::Result<OwnedFd> {
    let mut file = File::from(rustix::fs::memfd_create("fuzz", MemfdFlags::CLOEXEC)?);
    file.write_all(bytes)?;
    Ok(file.into())
}

fn run_source(address: &Address, cancel: &CancelHandle) -> Result<Outcome, SessionError> {
    let sockets = dial(address, 1, &limits(), cancel)?;
    let session = connect(sockets, address, &Security::Local, &greeting(), &limits(), cancel)?;
    let (mut streaming, _streams) = session.setup(&7, 1)?.open_streams()?;
    streaming.wait_round_done(0)?;
    Ok(streaming.send_state(vec![1, 2, 3])?.commit())
}

/// Sends a hello and then `answers` on the first connection, and lets data streams join. The
/// control connection ends with the answers.
fn play_destination(listener: &UnixListener, answers: &[u8]) {
    let mut held = Vec::new();
    for connection in listener.incoming().flatten() {
        let mut connection = connection;
        let mut preamble = [0; PREAMBLE_BYTES];
        if connection.read_exact(&mut preamble).is_err() {
            return;
        }
        // The source may have disconnected.
        let _ = if held.is_empty() {
            connection
                .write_all(&opening(&greeting()))
                .and_then(|()| connection.write_all(&acceptance()))
                .and_then(|()| connection.write_all(answers))
                .and_then(|()| connection.shutdown(Shutdown::Write))
        } else {
            connection.write_all(&preamble)
        };
        held.push(connection);
    }
}

fn acceptance() -> Vec<u8> {
    let session = super::session_id::SessionId::random();
    session
        .map(|session| encode(&Message::Accept(Acceptance { session, streams: 1 })))
        .unwrap_or_default()
}

/// Reads the destination's preamble, hello and acceptance, and opens the data stream.
fn join(source: &mut UnixStream, place: &Place) -> Option<UnixStream> {
    source.read_exact(&mut [0; PREAMBLE_BYTES]).ok()?;
    loop {
        let mut header = [0; HEADER_BYTES];
        source.read_exact(&mut header).ok()?;
        let (kind, length) = parse_header(header).ok()?;
        let mut body = vec![0; length];
        source.read_exact(&mut body).ok()?;
        if let Message::Accept(Acceptance { session, .. }) = Message::decode(kind, body).ok()? {
            let mut stream = UnixStream::connect(&place.0).ok()?;
            stream.write_all(&Role::Data { session, stream: 0 }.preamble()).ok()?;
            return Some(stream);
        }
    }
}

fn greeting() -> Greeting {
    Greeting { monitor: "fuzz".to_owned(), capabilities: Vec::new() }
}

fn opening(greeting: &Greeting) -> Vec<u8> {
    let mut bytes = Role::Control.preamble().to_vec();
    bytes.extend(encode(&Message::Hello(greeting.clone())));
    bytes
}

fn encode(message: &Message) -> Vec<u8> {
    message.encode().unwrap_or_default()
}

/// No waits: the other side's bytes, or its end, are already there.
fn limits() -> TimeLimits {
    TimeLimits::all(Duration::from_millis(200))
}

/// Path of a run's socket, removed at the end.
struct Place(PathBuf);

impl Place {
    fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        Self(std::env::temp_dir().join(format!("ebb-fuzz-{}-{number}.sock", std::process::id())))
    }

    fn address(&self) -> Address {
        Address::Unix { path: self.0.clone() }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // The listener may have removed it.
        let _ = std::fs::remove_file(&self.0);
    }
}

//! A source and a destination without a machine: they complete a session and return which side runs
//! the guest.

use std::io::{Read, Write};
use std::path::PathBuf;
use std::thread::JoinHandle;
use std::time::Duration;

use ebb_migration::session::{
    Address, CancelHandle, Connection, Greeting, Listener, Outcome, Security, SessionError,
    SourcePrepared, SourceSession, TimeLimits, dial,
};
use serde::{Deserialize, Serialize};

/// Data streams of a session in these tests.
pub const STREAMS: u16 = 3;

/// Description of the machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    pub vcpus: u32,
    pub memory: Vec<(u64, u64)>,
}

/// The side that runs the guest, as known to the source.
#[derive(Debug)]
pub enum SourceEnd {
    Moved,
    RunsOn(SessionError),
    Unknown(SessionError),
}

/// Whether the guest runs at the destination.
#[derive(Debug)]
pub enum DestinationEnd {
    Runs,
    Ends(SessionError),
}

pub fn machine() -> Machine {
    Machine { vcpus: 2, memory: vec![(0, 3 << 30), (4 << 30, 1 << 30)] }
}

pub fn state() -> Vec<u8> {
    (0..20_000_u32).flat_map(u32::to_le_bytes).collect()
}

pub fn greeting(monitor: &str) -> Greeting {
    Greeting { monitor: monitor.to_owned(), capabilities: vec!["hints".to_owned()] }
}

pub fn handle() -> CancelHandle {
    CancelHandle::new().unwrap()
}

pub fn loopback() -> Address {
    "tcp:127.0.0.1:0".parse().unwrap()
}

pub fn unix(path: PathBuf) -> Address {
    Address::Unix { path }
}

pub fn listen(address: &Address, security: &Security, limits: &TimeLimits) -> Listener {
    Listener::bind(address, security, &greeting("destination 1"), limits, &handle()).unwrap()
}

/// Connects to `address` with enough sockets for [`STREAMS`] and exchanges hellos.
pub fn connect(
    address: &Address,
    security: &Security,
    greeting: &Greeting,
    limits: &TimeLimits,
    cancel: &CancelHandle,
) -> Result<SourceSession, SessionError> {
    security.check(address)?;
    let sockets = dial(address, STREAMS, limits, cancel)?;
    ebb_migration::session::connect(sockets, address, security, greeting, limits, cancel)
}

/// Data of a stream in the only round.
fn payload(stream: usize) -> Vec<u8> {
    (0..100_000_usize).map(|index| (index * 7 + stream) as u8).collect()
}

/// Runs all steps of a source.
pub fn source(address: &Address, security: &Security, limits: &TimeLimits) -> SourceEnd {
    source_with(address, security, limits, &handle())
}

pub fn source_with(
    address: &Address,
    security: &Security,
    limits: &TimeLimits,
    cancel: &CancelHandle,
) -> SourceEnd {
    let prepared = || {
        let session = connect(address, security, &greeting("source 1"), limits, cancel)?;
        assert_eq!(session.destination(), &greeting("destination 1"));
        let accepted = session.setup(&machine(), STREAMS)?;
        let (mut streaming, streams) = accepted.open_streams()?;
        // A failed stream is not the reason by itself: the other side may have sent one.
        let sent = streams
            .into_iter()
            .enumerate()
            .try_for_each(|(number, mut stream)| stream.write_all(&payload(number)));
        if let Err(error) = sent {
            let word = streaming.abort(error.to_string());
            return Err(word.unwrap_or(SessionError::System { what: "send memory", source: error }));
        }
        if let Err(error) = streaming.wait_round_done(0) {
            streaming.abort(error.to_string());
            return Err(error);
        }
        streaming.send_state(state())
    };
    match prepared().map(SourcePrepared::commit) {
        Ok(Outcome::Moved) => SourceEnd::Moved,
        Ok(Outcome::Unknown(error)) => SourceEnd::Unknown(error),
        Ok(Outcome::RunsOn(error)) | Err(error) => SourceEnd::RunsOn(error),
    }
}

/// Runs all steps of a destination.
pub fn destination(listener: Listener) -> DestinationEnd {
    destination_within(listener, Duration::from_secs(60))
}

/// Like [`destination`], with a limit on the wait for a source.
pub fn destination_within(mut listener: Listener, limit: Duration) -> DestinationEnd {
    match receive(&mut listener, limit) {
        Ok(()) => DestinationEnd::Runs,
        Err(error) => DestinationEnd::Ends(error),
    }
}

fn receive(listener: &mut Listener, limit: Duration) -> Result<(), SessionError> {
    let session = listener.accept(Some(limit))?;
    assert_eq!(session.source(), &greeting("source 1"));
    let (setup, received) = session.setup::<Machine>()?;
    assert_eq!(received, machine());
    let (mut streaming, streams) = setup.accept(STREAMS)?.join(listener)?;
    assert_eq!(streams.len(), usize::from(STREAMS));
    if let Err(error) = streams.into_iter().enumerate().try_for_each(read_payload) {
        let word = streaming.abort(error.to_string());
        return Err(word.unwrap_or(SessionError::System { what: "receive memory", source: error }));
    }
    if let Err(error) = streaming.round_done(0) {
        let word = streaming.abort(error.to_string());
        return Err(word.unwrap_or(error));
    }
    let (restoring, received) = streaming.receive_state()?;
    assert_eq!(received, state());
    restoring.ready()?.running();
    Ok(())
}

fn read_payload((number, mut stream): (usize, Connection)) -> std::io::Result<()> {
    let expected = payload(number);
    let mut received = vec![0; expected.len()];
    stream.read_exact(&mut received)?;
    assert!(received == expected, "stream {number} carries wrong data");
    Ok(())
}

/// Runs a destination on a separate thread.
pub fn spawn(listener: Listener) -> JoinHandle<DestinationEnd> {
    std::thread::spawn(move || destination(listener))
}

/// Runs source and destination with the same security.
pub fn both(address: &Address, security: &Security) -> (SourceEnd, DestinationEnd) {
    let limits = TimeLimits::default();
    let listener = listen(address, security, &limits);
    let address = listener.address().clone();
    let destination = spawn(listener);
    let source = source(&address, security, &limits);
    (source, destination.join().unwrap())
}

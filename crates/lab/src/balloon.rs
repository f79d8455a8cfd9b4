//! Changing a guest's balloon through its monitor: Ebb's API, or QEMU's machine protocol.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ebb_vmm::api::{BalloonInfo, Client, ClientError, FreePagesReport, TrimReport};
use serde_json::{Value, json};

use crate::counters::Counters;
use crate::monitor::MonitorKind;

/// How long a monitor may take to answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);
/// How long a guest may take to name its free pages.
const FREE_PAGES_LIMIT_MS: u64 = 20_000;
const MIB: u64 = 1 << 20;

/// Why a balloon could not be changed or read.
#[derive(Debug, thiserror::Error)]
pub enum BalloonError {
    /// Ebb's API.
    #[error("{0}")]
    Api(ClientError),
    /// The connection to QEMU.
    #[error("QEMU's control socket {path}: {cause}")]
    Socket {
        /// The socket.
        path: PathBuf,
        /// What the system said.
        cause: io::Error,
    },
    /// QEMU refused, or said something unexpected.
    #[error("QEMU answered {command} with {answer}")]
    Refused {
        /// The command.
        command: &'static str,
        /// The answer.
        answer: String,
    },
}

/// A way to one guest's balloon.
#[derive(Debug)]
pub enum Balloon {
    /// Through Ebb's API.
    Ebb(Client),
    /// Through QEMU's machine protocol.
    Qemu(Box<Qmp>),
}

impl Balloon {
    /// Opens the way that a monitor offers at `socket`, for a guest of `guest_mib`.
    ///
    /// # Errors
    /// [`BalloonError`].
    pub fn open(monitor: MonitorKind, socket: &Path, guest_mib: u64) -> Result<Self, BalloonError> {
        Ok(match monitor {
            MonitorKind::Ebb => Self::Ebb(Client::new(socket, ANSWER_LIMIT)),
            MonitorKind::Qemu => Self::Qemu(Box::new(Qmp::connect(socket, guest_mib)?)),
        })
    }

    /// Asks the guest for a balloon of this size; it gets there by and by.
    ///
    /// # Errors
    /// [`BalloonError`].
    pub fn set_target_mib(&mut self, target_mib: u64) -> Result<(), BalloonError> {
        match self {
            Self::Ebb(client) => {
                let body = json!({ "target_bytes": target_mib * MIB });
                client.put_json::<Value>("/balloon", &body).map(drop).map_err(BalloonError::Api)
            }
            Self::Qemu(qmp) => {
                // QEMU counts what is left to the guest.
                let left = qmp.guest_mib.saturating_sub(target_mib) * MIB;
                qmp.call("balloon", &json!({ "value": left })).map(drop)
            }
        }
    }

    /// Gives back what is all zero, as a whole.
    ///
    /// # Errors
    /// [`BalloonError`]; QEMU has no such thing.
    pub fn trim(&mut self) -> Result<TrimReport, BalloonError> {
        let Self::Ebb(client) = self else {
            return Err(BalloonError::Refused { command: "trim", answer: "only Ebb trims".to_owned() });
        };
        let mut total = TrimReport::default();
        while !total.complete {
            let part: TrimReport = client.put("/vm/trim").map_err(BalloonError::Api)?;
            total.add(&part);
        }
        Ok(total)
    }

    /// The monitor's counters; QEMU has none.
    ///
    /// # Errors
    /// [`BalloonError`].
    pub fn counters(&mut self) -> Result<Option<Counters>, BalloonError> {
        match self {
            Self::Ebb(client) => {
                let reply = client.request("GET", "/metrics", "").map_err(BalloonError::Api)?;
                Ok(Some(Counters::of_monitor(&reply.body)))
            }
            Self::Qemu(_) => Ok(None),
        }
    }

    /// Asks the guest for its free blocks of at least this order.
    ///
    /// # Errors
    /// [`BalloonError`]; QEMU has no such thing.
    pub fn free_pages(&mut self, min_order: u8) -> Result<FreePagesReport, BalloonError> {
        let Self::Ebb(client) = self else {
            return Err(BalloonError::Refused { command: "free-pages", answer: "only Ebb asks".to_owned() });
        };
        let body = json!({ "min_order": min_order, "timeout_ms": FREE_PAGES_LIMIT_MS });
        client.put_json("/balloon/free-pages", &body).map_err(BalloonError::Api)
    }

    /// Size that the guest says its balloon has, MiB.
    ///
    /// # Errors
    /// [`BalloonError`].
    pub fn actual_mib(&mut self) -> Result<u64, BalloonError> {
        match self {
            Self::Ebb(client) => {
                let info: BalloonInfo = client.get("/balloon").map_err(BalloonError::Api)?;
                Ok(info.actual_bytes / MIB)
            }
            Self::Qemu(qmp) => {
                const COMMAND: &str = "query-balloon";
                let answer = qmp.call(COMMAND, &json!({}))?;
                let left = answer["actual"]
                    .as_u64()
                    .ok_or_else(|| BalloonError::Refused { command: COMMAND, answer: answer.to_string() })?;
                Ok(qmp.guest_mib.saturating_sub(left / MIB))
            }
        }
    }
}

/// A connection to QEMU's machine protocol (QEMU docs/interop/qmp-spec.rst): JSON documents, one a line.
#[derive(Debug)]
pub struct Qmp {
    path: PathBuf,
    stream: BufReader<UnixStream>,
    guest_mib: u64,
}

impl Qmp {
    fn connect(path: &Path, guest_mib: u64) -> Result<Self, BalloonError> {
        let failed = |cause| BalloonError::Socket { path: path.to_owned(), cause };
        let stream = UnixStream::connect(path).map_err(failed)?;
        stream.set_read_timeout(Some(ANSWER_LIMIT)).map_err(failed)?;
        let mut qmp = Self { path: path.to_owned(), stream: BufReader::new(stream), guest_mib };
        // The greeting says what it can do; nothing of it matters here.
        qmp.read()?;
        qmp.call("qmp_capabilities", &json!({}))?;
        Ok(qmp)
    }

    fn call(&mut self, command: &'static str, arguments: &Value) -> Result<Value, BalloonError> {
        let line = format!("{}\n", json!({ "execute": command, "arguments": arguments }));
        self.stream.get_mut().write_all(line.as_bytes()).map_err(|cause| self.failed(cause))?;
        loop {
            let mut answer = self.read()?;
            if let Some(value) = answer.get_mut("return") {
                return Ok(value.take());
            }
            // Events such as BALLOON_CHANGE come between a command and its answer.
            if answer.get("event").is_none() {
                return Err(BalloonError::Refused { command, answer: answer.to_string() });
            }
        }
    }

    fn read(&mut self) -> Result<Value, BalloonError> {
        let mut line = String::new();
        let length = self.stream.read_line(&mut line).map_err(|cause| self.failed(cause))?;
        if length == 0 {
            return Err(self.failed(io::ErrorKind::UnexpectedEof.into()));
        }
        serde_json::from_str(&line).map_err(|error| self.failed(error.into()))
    }

    fn failed(&self, cause: io::Error) -> BalloonError {
        BalloonError::Socket { path: self.path.clone(), cause }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;
    use std::thread;

    /// A peer that greets, then answers each line with the next of these texts; what it was sent.
    fn peer(path: &Path, answers: Vec<&'static str>) -> thread::JoinHandle<Vec<Value>> {
        let listener = UnixListener::bind(path).unwrap();
        thread::spawn(move || {
            let mut stream = BufReader::new(listener.accept().unwrap().0);
            stream.get_mut().write_all(b"{\"QMP\": {\"capabilities\": []}}\n").unwrap();
            answers
                .into_iter()
                .map(|answer| {
                    let mut line = String::new();
                    stream.read_line(&mut line).unwrap();
                    stream.get_mut().write_all(answer.as_bytes()).unwrap();
                    serde_json::from_str(&line).unwrap()
                })
                .collect()
        })
    }

    #[test]
    fn qemu_is_told_what_is_left_and_tells_what_is_left() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("qmp");
        let peer = peer(
            &socket,
            vec![
                "{\"return\": {}}\n",
                "{\"event\": \"BALLOON_CHANGE\", \"data\": {\"actual\": 1}}\n{\"return\": {}}\n",
                "{\"return\": {\"actual\": 268435456}}\n",
            ],
        );
        let mut balloon = Balloon::open(MonitorKind::Qemu, &socket, 1024).unwrap();
        balloon.set_target_mib(768).unwrap();
        assert_eq!(balloon.actual_mib().unwrap(), 768);
        let sent = peer.join().unwrap();
        assert_eq!(sent[1], json!({ "execute": "balloon", "arguments": { "value": 268_435_456 } }));
    }

    #[test]
    fn a_refusal_names_the_command_and_the_answer() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("qmp");
        let peer = peer(
            &socket,
            vec![
                "{\"return\": {}}\n",
                "{\"error\": {\"class\": \"DeviceNotActive\", \"desc\": \"no balloon\"}}\n",
            ],
        );
        let mut balloon = Balloon::open(MonitorKind::Qemu, &socket, 1024).unwrap();
        let message = balloon.set_target_mib(1).unwrap_err().to_string();
        assert!(message.contains("balloon with") && message.contains("DeviceNotActive"), "{message}");
        peer.join().unwrap();
    }

    #[test]
    fn a_socket_that_is_not_there_is_named() {
        let error = Balloon::open(MonitorKind::Qemu, Path::new("/no/such/socket"), 1).unwrap_err();
        assert!(error.to_string().contains("/no/such/socket"));
        let mut ebb = Balloon::open(MonitorKind::Ebb, Path::new("/no/such/socket"), 1).unwrap();
        assert!(ebb.actual_mib().unwrap_err().to_string().contains("/no/such/socket"));
    }
}

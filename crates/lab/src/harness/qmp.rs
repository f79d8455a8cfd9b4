//! QEMU's machine protocol (QEMU docs/interop/qmp-spec.rst): JSON documents, one per line, over a
//! socket.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};

/// Time limit for QEMU's answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);

/// Why QEMU did not carry out a command.
#[derive(Debug, thiserror::Error)]
pub enum QmpError {
    /// The connection.
    #[error("QEMU's control socket {path}: {cause}")]
    Socket {
        /// The socket.
        path: PathBuf,
        /// What the system said.
        cause: io::Error,
    },
    /// It refused, or sent an unexpected answer.
    #[error("QEMU answered {command} with {answer}")]
    Refused {
        /// The command.
        command: &'static str,
        /// The answer.
        answer: String,
    },
}

/// A connection to a QEMU.
#[derive(Debug)]
pub struct Qmp {
    path: PathBuf,
    stream: BufReader<UnixStream>,
}

impl Qmp {
    /// Connects to the socket of a running QEMU.
    ///
    /// # Errors
    /// [`QmpError`].
    pub fn connect(path: &Path) -> Result<Self, QmpError> {
        let failed = |cause| QmpError::Socket { path: path.to_owned(), cause };
        let stream = UnixStream::connect(path).map_err(failed)?;
        stream.set_read_timeout(Some(ANSWER_LIMIT)).map_err(failed)?;
        let mut qmp = Self { path: path.to_owned(), stream: BufReader::new(stream) };
        // The greeting lists capabilities, which do not matter here.
        qmp.read()?;
        qmp.call("qmp_capabilities", &json!({}))?;
        Ok(qmp)
    }

    /// Sends a command and returns its result.
    ///
    /// # Errors
    /// [`QmpError`].
    pub fn call(&mut self, command: &'static str, arguments: &Value) -> Result<Value, QmpError> {
        let line = format!("{}\n", json!({ "execute": command, "arguments": arguments }));
        self.stream.get_mut().write_all(line.as_bytes()).map_err(|cause| self.failed(cause))?;
        loop {
            let mut answer = self.read()?;
            if let Some(value) = answer.get_mut("return") {
                return Ok(value.take());
            }
            // Events such as BALLOON_CHANGE may arrive between a command and its answer.
            if answer.get("event").is_none() {
                return Err(QmpError::Refused { command, answer: answer.to_string() });
            }
        }
    }

    fn read(&mut self) -> Result<Value, QmpError> {
        let mut line = String::new();
        let length = self.stream.read_line(&mut line).map_err(|cause| self.failed(cause))?;
        if length == 0 {
            return Err(self.failed(io::ErrorKind::UnexpectedEof.into()));
        }
        serde_json::from_str(&line).map_err(|error| self.failed(error.into()))
    }

    fn failed(&self, cause: io::Error) -> QmpError {
        QmpError::Socket { path: self.path.clone(), cause }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;
    use std::thread;

    /// A peer that greets, then answers each line with the next of these texts; returns the
    /// received lines.
    pub(crate) fn peer(path: &Path, answers: Vec<&'static str>) -> thread::JoinHandle<Vec<Value>> {
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
        let mut qmp = Qmp::connect(&socket).unwrap();
        let message = qmp.call("balloon", &json!({ "value": 1 })).unwrap_err().to_string();
        assert!(
            message.contains("balloon with") && message.contains("DeviceNotActive"),
            "{message}"
        );
        peer.join().unwrap();
    }

    #[test]
    fn a_missing_socket_is_named() {
        let error = Qmp::connect(Path::new("/no/such/socket")).unwrap_err();
        assert!(error.to_string().contains("/no/such/socket"));
    }
}

//! A server on its own socket, and clients that send arbitrary bytes.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ebb_vmm::api::server::Limits;
use ebb_vmm::api::{ApiServer, ApiSocket, Client};
use serde_json::Value;

use crate::double::{Mood, TestVm};

/// Far longer than any operation takes, so that a hanging test ends.
pub const PATIENCE: Duration = Duration::from_secs(30);

pub struct Served {
    pub vm: Arc<TestVm>,
    pub path: PathBuf,
    pub server: Option<ApiServer>,
    _folder: tempfile::TempDir,
}

pub fn serve(mood: Mood) -> Served {
    serve_with(mood, Limits::default())
}

pub fn serve_with(mood: Mood, limits: Limits) -> Served {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("api.sock");
    let vm = Arc::new(TestVm::new(mood));
    let server = Some(start_with(&path, vm.clone(), limits, || ()));
    Served { vm, path, server, _folder: folder }
}

/// A server with other limits than usual.
pub fn start_with(
    path: &Path,
    vm: Arc<TestVm>,
    limits: Limits,
    on_thread_start: impl FnOnce() + Send + 'static,
) -> ApiServer {
    let (listener, name) = ApiSocket::bind(path).unwrap().into_parts();
    ApiServer::start_with(listener, name, vm, limits, on_thread_start).unwrap()
}

impl Served {
    pub fn client(&self) -> Client {
        Client::new(&self.path, PATIENCE)
    }

    pub fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(&self.path).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// Sends `bytes`, shuts down the sending side, and reads everything that comes back.
    pub fn exchange(&self, bytes: &[u8]) -> Vec<Answer> {
        let mut stream = self.connect();
        // A server that has refused already need not read the rest.
        let _ = stream.write_all(bytes);
        let _ = stream.shutdown(Shutdown::Write);
        read_answers(&mut stream)
    }

    pub fn ask(&self, method: &str, target: &str, body: &str) -> Answer {
        let answers = self.exchange(request(method, target, body).as_bytes());
        assert_eq!(answers.len(), 1, "{method} {target}: {answers:?}");
        answers.into_iter().next().unwrap()
    }
}

pub fn request(method: &str, target: &str, body: &str) -> String {
    format!("{method} {target} HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{body}", body.len())
}

#[derive(Clone, Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: String,
}

impl Answer {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(key, _)| key.eq_ignore_ascii_case(name))
            .map(|(_, value)| value.as_str())
    }

    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }

    pub fn message(&self) -> String {
        self.json()["error"]["message"].as_str().expect("an error message").to_owned()
    }
}

/// Reads all answers until the server closes.
pub fn read_answers(stream: &mut UnixStream) -> Vec<Answer> {
    let mut bytes = Vec::new();
    // The server may reset a connection whose input it has not read; earlier answers count.
    match stream.read_to_end(&mut bytes) {
        Ok(_) => {}
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {}
        Err(error) => panic!("{error}; received {:?}", String::from_utf8_lossy(&bytes)),
    }
    let mut answers = Vec::new();
    let mut rest = &bytes[..];
    while !rest.is_empty() {
        let (answer, length) = parse_answer(rest).expect("a complete answer");
        answers.push(answer);
        rest = &rest[length..];
    }
    answers
}

/// Reads one answer; the connection remains open.
pub fn read_answer(stream: &mut UnixStream) -> Answer {
    let mut bytes = Vec::new();
    let mut byte = [0];
    loop {
        stream.read_exact(&mut byte).unwrap();
        bytes.push(byte[0]);
        if let Some((answer, _)) = parse_answer(&bytes) {
            return answer;
        }
    }
}

fn parse_answer(bytes: &[u8]) -> Option<(Answer, usize)> {
    let mut headers = [httparse::EMPTY_HEADER; 32];
    let mut head = httparse::Response::new(&mut headers);
    let httparse::Status::Complete(head_bytes) = head.parse(bytes).unwrap() else {
        return None;
    };
    let headers: Vec<_> = head
        .headers
        .iter()
        .map(|header| (header.name.to_owned(), String::from_utf8(header.value.to_vec()).unwrap()))
        .collect();
    let mut answer = Answer { status: head.code.unwrap(), headers, body: String::new() };
    let body_bytes: usize =
        answer.header("content-length").map_or(0, |length| length.parse().unwrap());
    let body = bytes.get(head_bytes..head_bytes + body_bytes)?;
    answer.body = String::from_utf8(body.to_vec()).unwrap();
    Some((answer, head_bytes + body_bytes))
}

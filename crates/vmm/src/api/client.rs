//! A client of the API: blocking, one connection per request, with one time limit for all of it.

use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileTypeExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::descriptors;
use super::reply::{ErrorDetail, ErrorDocument};

/// Longest reply accepted.
const MAX_REPLY_BYTES: usize = 4 << 20;
/// Most header fields accepted in a reply.
const MAX_HEADERS: usize = 64;
/// Interval of attempts to connect while the server's queue is full.
const CONNECT_RETRY: Duration = Duration::from_millis(10);

/// A client of the API on a socket.
#[derive(Clone, Debug)]
pub struct Client {
    path: PathBuf,
    time_limit: Duration,
}

/// A reply that is not an error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientReply {
    /// The status, 200 to 299.
    pub status: u16,
    /// The body.
    pub body: String,
}

/// Why a request was not executed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// There is no file at the path.
    #[error(
        "there is no socket {path:?}: check the path, and that the machine still runs and was \
         started with --api {path:?}"
    )]
    NoSocket {
        /// The path.
        path: PathBuf,
    },
    /// Another type of file is at the path.
    #[error(
        "{path:?} is not a socket: give the path that the machine was started with \
         (ebb run --api PATH)"
    )]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
    /// The socket belongs to another user.
    #[error(
        "no permission to use the socket {path:?}: only the user who runs the machine (and root) \
         may"
    )]
    PermissionDenied {
        /// The path.
        path: PathBuf,
    },
    /// The process of the socket has ended.
    #[error(
        "no process listens on the socket {path:?}: its machine has ended without removing it; \
         the file can be deleted"
    )]
    NotListening {
        /// The path.
        path: PathBuf,
    },
    /// The path does not fit into a socket address.
    #[error(
        "the socket path {path:?} is too long: at most 107 bytes are possible; \
         use a shorter or relative one"
    )]
    PathTooLong {
        /// The path.
        path: PathBuf,
    },
    /// The server is not an Ebb monitor.
    #[error("the server on {path:?} is not an Ebb monitor: {found}")]
    NotEbb {
        /// The path.
        path: PathBuf,
        /// Description of what was received instead.
        found: String,
    },
    /// The monitor did not answer within the time limit.
    #[error(
        "the monitor behind {path:?} did not answer within {} ms; it may be stopped or overloaded",
        time_limit.as_millis()
    )]
    TimedOut {
        /// The path.
        path: PathBuf,
        /// The time limit.
        time_limit: Duration,
    },
    /// The monitor refused the request.
    #[error("{}{}", detail.message, remedy(detail))]
    Refused {
        /// The status.
        status: u16,
        /// The monitor's explanation.
        detail: Box<ErrorDetail>,
    },
    /// The reply has an unexpected form.
    #[error(
        "the monitor behind {path:?} sent an unexpected reply ({found}); \
         do both have the same version?"
    )]
    Unexpected {
        /// The path.
        path: PathBuf,
        /// Description of the mismatch.
        found: String,
    },
    /// Any other failure of the connection.
    #[error("cannot communicate with the monitor behind {path:?}: {source}")]
    Io {
        /// The path.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

fn remedy(detail: &ErrorDetail) -> String {
    detail.remedy.as_ref().map(|remedy| format!(" ({remedy})")).unwrap_or_default()
}

impl Client {
    /// Creates a client for the socket at `path`; each request may take `time_limit`. Requests for
    /// statistics take the server up to a second.
    pub fn new(path: impl Into<PathBuf>, time_limit: Duration) -> Self {
        Self { path: path.into(), time_limit }
    }

    /// The socket's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the document at `target`.
    pub fn get<T: DeserializeOwned>(&self, target: &str) -> Result<T, ClientError> {
        self.document(&self.request("GET", target, "")?)
    }

    /// Sends an empty PUT and reads the document in the reply.
    pub fn put<T: DeserializeOwned>(&self, target: &str) -> Result<T, ClientError> {
        self.document(&self.request("PUT", target, "")?)
    }

    /// Sends `body` as JSON and reads the document in the reply. Nulls are omitted: they have no
    /// meaning in a request.
    pub fn put_json<T: DeserializeOwned>(
        &self,
        target: &str,
        body: &impl Serialize,
    ) -> Result<T, ClientError> {
        self.put_json_with(target, body, &[])
    }

    /// Like [`put_json`](Self::put_json), with file descriptors for the monitor: at most
    /// [`MAX_DESCRIPTORS`](super::MAX_DESCRIPTORS).
    pub fn put_json_with<T: DeserializeOwned>(
        &self,
        target: &str,
        body: &impl Serialize,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<T, ClientError> {
        let mut body = serde_json::to_value(body).map_err(|error| self.io(error.into()))?;
        if let Value::Object(members) = &mut body {
            members.retain(|_, value| !value.is_null());
        }
        self.document(&self.request_with("PUT", target, &body.to_string(), descriptors)?)
    }

    fn document<T: DeserializeOwned>(&self, reply: &ClientReply) -> Result<T, ClientError> {
        serde_json::from_str(&reply.body).map_err(|error| ClientError::Unexpected {
            path: self.path.clone(),
            found: error.to_string(),
        })
    }

    /// Sends one request and reads the reply. A status of 400 or more is [`ClientError::Refused`].
    pub fn request(
        &self,
        method: &str,
        target: &str,
        body: &str,
    ) -> Result<ClientReply, ClientError> {
        self.request_with(method, target, body, &[])
    }

    fn request_with(
        &self,
        method: &str,
        target: &str,
        body: &str,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<ClientReply, ClientError> {
        let deadline = Instant::now() + self.time_limit;
        let stream = self.connect(deadline)?;
        let request = format!(
            "{method} {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\
             Content-Type: application/json\r\n\
             Content-Length: {}\r\n\r\n{body}",
            body.len()
        );
        let refused_early = self.send(&stream, request.as_bytes(), descriptors, deadline)?;
        let reply = self.receive(&stream, deadline, refused_early)?;
        if reply.status < 400 {
            return Ok(reply);
        }
        match serde_json::from_str::<ErrorDocument>(&reply.body) {
            Ok(document) => {
                Err(ClientError::Refused { status: reply.status, detail: Box::new(document.error) })
            }
            Err(error) => {
                let found = format!("status {}, {error}", reply.status);
                Err(ClientError::Unexpected { path: self.path.clone(), found })
            }
        }
    }

    fn connect(&self, deadline: Instant) -> Result<UnixStream, ClientError> {
        let path = || self.path.clone();
        let address = match SocketAddrUnix::new(&self.path) {
            Ok(address) => address,
            Err(Errno::NAMETOOLONG) => return Err(ClientError::PathTooLong { path: path() }),
            Err(errno) => return Err(self.io(errno.into())),
        };
        // Non-blocking, because connecting to a stopped process with a full queue would block
        // indefinitely.
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
            .map_err(|errno| self.io(errno.into()))?;
        loop {
            match rustix::net::connect(&socket, &address) {
                Ok(()) => {
                    let stream = UnixStream::from(socket);
                    stream.set_nonblocking(false).map_err(|error| self.io(error))?;
                    return Ok(stream);
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) if Instant::now() < deadline => std::thread::sleep(CONNECT_RETRY),
                Err(Errno::AGAIN) => return Err(self.timed_out()),
                Err(Errno::NOENT | Errno::NOTDIR) => {
                    return Err(ClientError::NoSocket { path: path() });
                }
                Err(Errno::ACCESS | Errno::PERM) => {
                    return Err(ClientError::PermissionDenied { path: path() });
                }
                Err(Errno::PROTOTYPE) => {
                    return Err(ClientError::NotEbb {
                        path: path(),
                        found: "a datagram socket".to_owned(),
                    });
                }
                Err(Errno::CONNREFUSED) => {
                    let is_socket = std::fs::metadata(&self.path)
                        .is_ok_and(|metadata| metadata.file_type().is_socket());
                    return Err(if is_socket {
                        ClientError::NotListening { path: path() }
                    } else {
                        ClientError::NotASocket { path: path() }
                    });
                }
                Err(errno) => return Err(self.io(errno.into())),
            }
        }
    }

    /// Sends `bytes`, the first of them with `descriptors`. A server that refuses early closes its
    /// end before it has read everything. That is not a failure: its reply can still be read.
    fn send(
        &self,
        stream: &UnixStream,
        bytes: &[u8],
        descriptors: &[BorrowedFd<'_>],
        deadline: Instant,
    ) -> Result<RefusedEarly, ClientError> {
        let mut sent_bytes = 0;
        while sent_bytes < bytes.len() {
            stream.set_write_timeout(Some(self.left(deadline)?)).map_err(|error| self.io(error))?;
            let descriptors = if sent_bytes == 0 { descriptors } else { &[] };
            let rest = &bytes[sent_bytes..];
            match descriptors::send(stream, rest, descriptors, SendFlags::empty()) {
                Ok(length) => sent_bytes += length,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Err(self.timed_out()),
                Err(Errno::PIPE | Errno::CONNRESET) => return Ok(RefusedEarly::Yes),
                Err(errno) => return Err(self.io(errno.into())),
            }
        }
        Ok(RefusedEarly::No)
    }

    fn receive(
        &self,
        stream: &UnixStream,
        deadline: Instant,
        refused_early: RefusedEarly,
    ) -> Result<ClientReply, ClientError> {
        let mut bytes = Vec::new();
        let mut chunk = [0; 8192];
        loop {
            stream.set_read_timeout(Some(self.left(deadline)?)).map_err(|error| self.io(error))?;
            let length = match rustix::net::recv(stream, &mut chunk, RecvFlags::empty()) {
                Ok((length, _)) => length,
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => return Err(self.timed_out()),
                Err(Errno::CONNRESET) => 0,
                Err(errno) => return Err(self.io(errno.into())),
            };
            bytes.extend_from_slice(&chunk[..length]);
            if let Some(reply) = self.parse(&bytes)? {
                return Ok(reply);
            }
            if length == 0 {
                let found = match (bytes.is_empty(), refused_early) {
                    (true, RefusedEarly::Yes) => {
                        "it closed the connection before it had read the request"
                    }
                    (true, RefusedEarly::No) => "it closed the connection without a reply",
                    (false, _) => "it closed the connection in the middle of its reply",
                };
                return Err(ClientError::NotEbb {
                    path: self.path.clone(),
                    found: found.to_owned(),
                });
            }
            if bytes.len() > MAX_REPLY_BYTES {
                let found = format!("a reply longer than {MAX_REPLY_BYTES} bytes");
                return Err(ClientError::NotEbb { path: self.path.clone(), found });
            }
        }
    }

    /// The reply, if it is complete.
    fn parse(&self, bytes: &[u8]) -> Result<Option<ClientReply>, ClientError> {
        let not_ebb = |found: String| ClientError::NotEbb { path: self.path.clone(), found };
        let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
        let mut head = httparse::Response::new(&mut headers);
        let head_bytes = match head.parse(bytes) {
            Ok(httparse::Status::Complete(head_bytes)) => head_bytes,
            Ok(httparse::Status::Partial) => return Ok(None),
            Err(_) => {
                let start = &bytes[..bytes.len().min(40)];
                return Err(not_ebb(format!(
                    "it does not speak HTTP but sent '{}'",
                    start.escape_ascii()
                )));
            }
        };
        let field = |name: &str| {
            let header = head.headers.iter().find(|header| header.name.eq_ignore_ascii_case(name));
            header.and_then(|header| std::str::from_utf8(header.value).ok())
        };
        let server = field("server").unwrap_or("nothing");
        if !server.starts_with("ebb/") {
            return Err(not_ebb(format!("it identifies as '{}'", server.escape_debug())));
        }
        let body_bytes: usize = field("content-length")
            .and_then(|length| length.parse().ok())
            .filter(|length| *length <= MAX_REPLY_BYTES)
            .ok_or_else(|| not_ebb("its reply has no valid Content-Length".to_owned()))?;
        let Some(body) = bytes.get(head_bytes..head_bytes + body_bytes) else {
            return Ok(None);
        };
        let body = String::from_utf8(body.to_vec())
            .map_err(|_| not_ebb("its reply is not UTF-8".to_owned()))?;
        Ok(Some(ClientReply { status: head.code.unwrap_or(0), body }))
    }

    /// The time left; never zero, which means "no limit" for a socket.
    fn left(&self, deadline: Instant) -> Result<Duration, ClientError> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(self.timed_out()) } else { Ok(left) }
    }

    fn timed_out(&self) -> ClientError {
        ClientError::TimedOut { path: self.path.clone(), time_limit: self.time_limit }
    }

    fn io(&self, source: io::Error) -> ClientError {
        ClientError::Io { path: self.path.clone(), source }
    }
}

/// Whether the server closed the connection while the request was being sent.
#[derive(Clone, Copy)]
enum RefusedEarly {
    Yes,
    No,
}

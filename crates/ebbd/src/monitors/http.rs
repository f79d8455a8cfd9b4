//! HTTP over a monitor's socket: one connection for many requests, and another one when the server
//! has closed it between two of them (RFC 9112 section 9.5). A server with many clients does so.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::header::{CONTENT_TYPE, HOST, SERVER};
use hyper::{Method, Request};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::net::UnixStream;
use tokio::task::JoinHandle;

use super::process::Process;
use super::{MOST_BYTES, Trouble, connect, repeatable};

/// A connection with an HTTP server.
#[derive(Debug)]
pub(super) struct Http {
    wire: Wire,
    path: PathBuf,
    process: Arc<Process>,
}

#[derive(Debug)]
struct Wire {
    sender: SendRequest<Full<Bytes>>,
    connection: JoinHandle<()>,
}

/// An answer.
#[derive(Debug)]
pub(super) struct Answer {
    /// Its status.
    pub(super) status: u16,
    /// What the server calls itself; empty if it does not.
    pub(super) server: String,
    body: Bytes,
}

impl Http {
    pub(super) async fn connect(path: &Path) -> Result<Self, Trouble> {
        let (stream, process) = connect(path).await?;
        Self::start(stream, process, path).await
    }

    /// Uses a connection with the socket `path` on which nothing was said.
    pub(super) async fn start(
        stream: UnixStream,
        process: Arc<Process>,
        path: &Path,
    ) -> Result<Self, Trouble> {
        Ok(Self { wire: Wire::start(stream).await?, path: path.to_owned(), process })
    }

    pub(super) fn process(&self) -> Arc<Process> {
        self.process.clone()
    }

    /// Sends a request, with a document if there is one, and returns the answer, also one that is
    /// a refusal.
    pub(super) async fn ask(
        &mut self,
        method: Method,
        target: &str,
        body: Option<&Value>,
    ) -> Result<Answer, Trouble> {
        let gone = |error: hyper::Error| Trouble::Gone(error.to_string());
        let nonsense = |error: &dyn std::fmt::Display| Trouble::Nonsense(error.to_string());
        let bytes = body.map_or_else(Bytes::new, |body| body.to_string().into());
        let request = Request::builder()
            .method(method)
            .uri(target)
            .header(HOST, "localhost")
            .header(CONTENT_TYPE, "application/json")
            .body(Full::new(bytes))
            .map_err(|error| nonsense(&error))?;
        if self.wire.sender.ready().await.is_err() {
            self.connect_again().await?;
        }
        let response = self
            .wire
            .sender
            .send_request(request)
            .await
            .map_err(|error| if error.is_parse() { nonsense(&error) } else { gone(error) })?;
        let (head, body) = response.into_parts();
        let server = head.headers.get(SERVER).and_then(|name| name.to_str().ok());
        let server = server.unwrap_or_default().to_owned();
        let body = Limited::new(body, MOST_BYTES).collect().await;
        let body = body.map_err(|error| nonsense(&error))?.to_bytes();
        Ok(Answer { status: head.status.as_u16(), server, body })
    }

    async fn connect_again(&mut self) -> Result<(), Trouble> {
        let (stream, process) = connect(&self.path).await?;
        if process.pid() != self.process.pid() {
            return Err(Trouble::Gone("another process serves it now".to_owned()));
        }
        self.wire = Wire::start(stream).await?;
        Ok(())
    }

    /// The document that a `GET` is answered with.
    pub(super) async fn get<T: DeserializeOwned>(&mut self, target: &str) -> Result<T, Trouble> {
        self.ask(Method::GET, target, None).await?.document()
    }
}

impl Wire {
    async fn start(stream: UnixStream) -> Result<Self, Trouble> {
        let gone = |error: hyper::Error| Trouble::Gone(error.to_string());
        let (sender, connection) = handshake(TokioIo::new(stream)).await.map_err(gone)?;
        let connection = tokio::spawn(async move {
            // The sender reports its errors.
            let _ = connection.await;
        });
        Ok(Self { sender, connection })
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

impl Answer {
    /// Whether the server has done what it was asked for.
    ///
    /// # Errors
    /// [`Trouble::Refused`].
    pub(super) fn accepted(&self) -> Result<(), Trouble> {
        if self.status < 400 {
            return Ok(());
        }
        Err(Trouble::Refused(format!("status {}, {}", self.status, repeatable(&self.message()))))
    }

    /// Its document.
    ///
    /// # Errors
    /// [`Trouble::Refused`] and [`Trouble::Nonsense`].
    pub(super) fn document<T: DeserializeOwned>(&self) -> Result<T, Trouble> {
        self.accepted()?;
        self.body()
    }

    /// Its body as a document, also that of a refusal.
    ///
    /// # Errors
    /// [`Trouble::Nonsense`].
    pub(super) fn body<T: DeserializeOwned>(&self) -> Result<T, Trouble> {
        serde_json::from_slice(&self.body).map_err(|error| Trouble::Nonsense(error.to_string()))
    }

    /// Why it was refused, in the form of each of the monitors; empty if in none of them.
    fn message(&self) -> String {
        if let Ok(Problem { error }) = self.body() {
            return error.message;
        }
        if let Ok(Fault { fault_message }) = self.body() {
            return fault_message;
        }
        let causes: Vec<String> = self.body().unwrap_or_default();
        causes.join(": ")
    }
}

/// A refusal of this project's monitors.
#[derive(Deserialize)]
struct Problem {
    error: ProblemText,
}

#[derive(Deserialize)]
struct ProblemText {
    message: String,
}

/// A refusal of Firecracker. (That of Cloud Hypervisor is a list of causes.)
#[derive(Deserialize)]
struct Fault {
    fault_message: String,
}

//! HTTP over a monitor's socket: one connection for many requests.

use std::path::Path;
use std::sync::Arc;

use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::header::{CONTENT_TYPE, HOST, SERVER};
use hyper::{Method, Request};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::task::JoinHandle;

use super::process::Process;
use super::{MOST_BYTES, Trouble, connect};

/// A connection with an HTTP server.
#[derive(Debug)]
pub(super) struct Http {
    sender: SendRequest<Full<Bytes>>,
    process: Arc<Process>,
    connection: JoinHandle<()>,
}

/// An answer.
#[derive(Debug)]
pub(super) struct Answer {
    /// Its status.
    pub(super) status: u16,
    /// What the server calls itself; empty if it does not.
    pub(super) server: String,
    /// Its body; null if there is none.
    pub(super) body: Value,
}

impl Http {
    pub(super) async fn connect(path: &Path) -> Result<Self, Trouble> {
        let (stream, process) = connect(path).await?;
        let gone = |error: hyper::Error| Trouble::Gone(error.to_string());
        let (sender, connection) = handshake(TokioIo::new(stream)).await.map_err(gone)?;
        let connection = tokio::spawn(async move {
            // The sender reports its errors.
            let _ = connection.await;
        });
        Ok(Self { sender, process, connection })
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
        self.sender.ready().await.map_err(gone)?;
        let response = self
            .sender
            .send_request(request)
            .await
            .map_err(|error| if error.is_parse() { nonsense(&error) } else { gone(error) })?;
        let (head, body) = response.into_parts();
        let server = head.headers.get(SERVER).and_then(|name| name.to_str().ok());
        let server = server.unwrap_or_default().to_owned();
        let body = Limited::new(body, MOST_BYTES).collect().await;
        let body = body.map_err(|error| nonsense(&error))?.to_bytes();
        let body = if body.is_empty() {
            Value::Null
        } else {
            serde_json::from_slice(&body).map_err(|error| nonsense(&error))?
        };
        Ok(Answer { status: head.status.as_u16(), server, body })
    }
}

impl Drop for Http {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

//! Replies: statuses, errors as JSON, and their bytes.

use std::borrow::Cow;
use std::io::Write as _;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::balloon::StatisticsDocument;
use super::control::{ControlError, Document, Operation};
use super::prometheus;

/// The OpenAPI 3.1 description of everything the API serves; also at `GET /openapi.json`.
pub const OPENAPI_JSON: &str = include_str!("../../../../docs/openapi.json");

/// The statuses used by this server (RFC 9110 section 15, RFC 6585).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Status {
    /// Done.
    Ok = 200,
    /// Passed on; the guest or the monitor completes the operation later.
    Accepted = 202,
    /// Done, and there is nothing to report (Firecracker's API).
    NoContent = 204,
    /// Not HTTP, not JSON, or an unknown query parameter.
    BadRequest = 400,
    /// No such path, or a device that the machine does not have.
    NotFound = 404,
    /// The path does not support this method.
    MethodNotAllowed = 405,
    /// The request did not arrive in time.
    RequestTimeout = 408,
    /// Not possible in the current state of the machine.
    Conflict = 409,
    /// A body without Content-Length.
    LengthRequired = 411,
    /// The body is longer than [`MAX_BODY_BYTES`](super::http::MAX_BODY_BYTES).
    ContentTooLarge = 413,
    /// JSON, but invalid for this path: unknown field, wrong type, value out of range.
    UnprocessableContent = 422,
    /// Request line and headers are longer than [`MAX_HEAD_BYTES`](super::http::MAX_HEAD_BYTES).
    HeadersTooLarge = 431,
    /// An unexpected failure.
    InternalServerError = 500,
    /// Too many connections, or the monitor is about to exit.
    ServiceUnavailable = 503,
    /// The guest did not answer in time.
    GatewayTimeout = 504,
    /// Neither HTTP/1.0 nor HTTP/1.1.
    VersionNotSupported = 505,
}

impl Status {
    /// The number of the status.
    pub fn code(self) -> u16 {
        self as u16
    }

    /// The reason phrase.
    pub fn reason(self) -> &'static str {
        match self {
            Self::Ok => "OK",
            Self::Accepted => "Accepted",
            Self::NoContent => "No Content",
            Self::BadRequest => "Bad Request",
            Self::NotFound => "Not Found",
            Self::MethodNotAllowed => "Method Not Allowed",
            Self::RequestTimeout => "Request Timeout",
            Self::Conflict => "Conflict",
            Self::LengthRequired => "Length Required",
            Self::ContentTooLarge => "Content Too Large",
            Self::UnprocessableContent => "Unprocessable Content",
            Self::HeadersTooLarge => "Request Header Fields Too Large",
            Self::InternalServerError => "Internal Server Error",
            Self::ServiceUnavailable => "Service Unavailable",
            Self::GatewayTimeout => "Gateway Timeout",
            Self::VersionNotSupported => "HTTP Version Not Supported",
        }
    }
}

/// A request that was not executed: what was requested, what was found, what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The status of the reply.
    pub status: Status,
    /// The body of the reply.
    pub detail: ErrorDetail,
    /// The methods of the path, for the Allow header of [`Status::MethodNotAllowed`].
    pub allow: Option<String>,
}

/// The JSON document of an error.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "Error")]
pub struct ErrorDocument {
    /// The error.
    pub error: ErrorDetail,
}

/// Description of an error.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ErrorDetail {
    /// What was requested and what was found.
    pub message: String,
    /// What to do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
    /// The JSON field that caused the error.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub field: Option<String>,
    /// The last statistics received, if fresh ones were not available.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_known: Option<Box<StatisticsDocument>>,
}

impl Problem {
    /// A problem with only a message.
    pub fn new(status: Status, message: impl Into<String>) -> Self {
        let detail = ErrorDetail { message: message.into(), ..ErrorDetail::default() };
        Self { status, detail, allow: None }
    }

    /// Adds what to do.
    #[must_use]
    pub fn with_remedy(mut self, remedy: impl Into<String>) -> Self {
        self.detail.remedy = Some(remedy.into());
        self
    }

    /// Adds the JSON field that caused the error.
    #[must_use]
    pub fn with_field(mut self, field: impl Into<String>) -> Self {
        self.detail.field = Some(field.into());
        self
    }
}

impl From<ControlError> for Problem {
    fn from(error: ControlError) -> Self {
        let message = error.to_string();
        match error {
            ControlError::NoBalloon => Self::new(Status::NotFound, message)
                .with_remedy("start the machine with --balloon size=0,reporting=on to give it one"),
            ControlError::WrongState { remedy, .. } => {
                let mut problem = Self::new(Status::Conflict, message);
                problem.detail.remedy = remedy;
                problem
            }
            ControlError::Invalid { field, remedy, .. } => {
                let mut problem =
                    Self::new(Status::UnprocessableContent, message).with_field(field);
                problem.detail.remedy = remedy;
                problem
            }
            ControlError::Failed { .. } => Self::new(Status::InternalServerError, message),
            ControlError::NoAnswer { .. } => Self::new(Status::GatewayTimeout, message).with_remedy(
                "it may be busy or dead; 'last_known' has what it said before, and ?max_age_ms=N \
                 accepts such values at once",
            ),
            ControlError::NoFreshStatistics { error, last_known } => {
                let mut problem = Self::from(*error);
                problem.detail.last_known = Some(last_known);
                problem
            }
        }
    }
}

/// Type of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContentType {
    /// `application/json`
    Json,
    /// The Prometheus text exposition format, version 0.0.4.
    Prometheus,
}

impl ContentType {
    /// Value of the Content-Type header.
    pub fn header_value(self) -> &'static str {
        match self {
            Self::Json => "application/json",
            Self::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
        }
    }
}

/// A reply before it is encoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The status.
    pub status: Status,
    /// Type of the body.
    pub content_type: ContentType,
    /// The body. Borrowed for fixed documents, which then take no memory.
    pub body: Cow<'static, str>,
    /// The Allow header.
    pub allow: Option<String>,
    /// Whether the request uses something deprecated (Firecracker's API).
    pub use_of: Use,
}

/// Whether a request is as it should be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Use {
    /// It is.
    #[default]
    Current,
    /// It has a field that will be removed.
    Deprecated,
}

/// Whether the connection is used for another request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Persistence {
    /// The client may send another request.
    KeepAlive,
    /// The connection ends after this reply.
    Close,
}

/// Whether the body is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyMode {
    /// Headers and body.
    Full,
    /// Headers only: the answer to a HEAD request (RFC 9110 section 9.3.2).
    HeadersOnly,
}

impl Status {
    /// The status of `operation` once it is done.
    pub fn of(operation: &Operation) -> Self {
        match operation {
            Operation::PowerButton
            | Operation::Migrate(_)
            | Operation::CancelMigration
            | Operation::Kill => Self::Accepted,
            _ => Self::Ok,
        }
    }
}

impl Reply {
    /// A reply with the result of an operation.
    pub fn document(status: Status, document: &Document) -> Self {
        let (content_type, body) = match document {
            Document::OpenApi => (ContentType::Json, Cow::Borrowed(OPENAPI_JSON)),
            Document::Metrics(metrics) => {
                (ContentType::Prometheus, Cow::Owned(prometheus::render(metrics)))
            }
            document => return Self::json(status, document),
        };
        Self { status, content_type, body, allow: None, use_of: Use::Current }
    }

    /// A reply with `document` as JSON.
    pub fn json(status: Status, document: &impl Serialize) -> Self {
        match serde_json::to_string(document) {
            Ok(body) => Self {
                status,
                content_type: ContentType::Json,
                body: Cow::Owned(body),
                allow: None,
                use_of: Use::Current,
            },
            Err(error) => Self {
                status: Status::InternalServerError,
                content_type: ContentType::Json,
                // In an error's text only quotes and backslashes need escaping in JSON.
                body: Cow::Owned(format!(
                    "{{\"error\":{{\"message\":\"the reply cannot be written as JSON: {}\"}}}}",
                    error.to_string().replace(['"', '\\'], "'")
                )),
                allow: None,
                use_of: Use::Current,
            },
        }
    }

    /// The bytes to send.
    pub fn encode(&self, persistence: Persistence, body: BodyMode) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(256 + self.body.len());
        let connection = match persistence {
            Persistence::KeepAlive => "keep-alive",
            Persistence::Close => "close",
        };
        // Writing into a Vec cannot fail.
        let _ = write!(
            bytes,
            "HTTP/1.1 {} {}\r\nServer: ebb/{}\r\nConnection: {connection}\r\n",
            self.status.code(),
            self.status.reason(),
            env!("CARGO_PKG_VERSION"),
        );
        // A reply without content has no length either (RFC 9110 section 8.6). A client would take
        // a body for the beginning of the next reply.
        let has_content = self.status != Status::NoContent;
        if has_content {
            let (kind, length) = (self.content_type.header_value(), self.body.len());
            let _ = write!(bytes, "Content-Type: {kind}\r\nContent-Length: {length}\r\n");
        }
        if self.use_of == Use::Deprecated {
            bytes.extend_from_slice(b"Deprecation: true\r\n");
        }
        if let Some(allow) = &self.allow {
            let _ = write!(bytes, "Allow: {allow}\r\n");
        }
        bytes.extend_from_slice(b"\r\n");
        if has_content && body == BodyMode::Full {
            bytes.extend_from_slice(self.body.as_bytes());
        }
        bytes
    }
}

impl From<Problem> for Reply {
    fn from(problem: Problem) -> Self {
        let document = ErrorDocument { error: problem.detail };
        Self { allow: problem.allow, ..Self::json(problem.status, &document) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encodes_status_headers_and_body() {
        let reply = Reply::json(Status::Ok, &[1, 2]);
        let text = String::from_utf8(reply.encode(Persistence::KeepAlive, BodyMode::Full)).unwrap();
        assert!(text.starts_with("HTTP/1.1 200 OK\r\n"), "{text}");
        assert!(text.contains("\r\nContent-Length: 5\r\n"), "{text}");
        assert!(text.contains("\r\nConnection: keep-alive\r\n"), "{text}");
        assert!(text.ends_with("\r\n\r\n[1,2]"), "{text}");
    }

    #[test]
    fn a_head_reply_has_the_length_but_not_the_body() {
        let text = String::from_utf8(
            Reply::json(Status::Ok, &[1, 2]).encode(Persistence::Close, BodyMode::HeadersOnly),
        )
        .unwrap();
        assert!(text.contains("Content-Length: 5\r\n"), "{text}");
        assert!(text.contains("Connection: close\r\n"), "{text}");
        assert!(text.ends_with("\r\n\r\n"), "{text}");
    }

    #[test]
    fn a_reply_without_content_has_no_body() {
        let text = String::from_utf8(
            Reply::json(Status::NoContent, &()).encode(Persistence::KeepAlive, BodyMode::Full),
        )
        .unwrap();
        assert!(!text.contains("Content-"), "{text}");
        assert!(text.ends_with("\r\n\r\n"), "{text}");
    }

    #[test]
    fn control_errors_have_their_status_and_remedy() {
        let invalid = ControlError::Invalid {
            field: "target_bytes",
            message: "too much".into(),
            remedy: Some("ask for less".into()),
        };
        let wrong_state = ControlError::WrongState { message: "paused".into(), remedy: None };
        let failed = ControlError::Failed { message: "EIO".into() };
        let table = [
            (ControlError::NoBalloon, 404, "no balloon"),
            (wrong_state, 409, "paused"),
            (invalid, 422, "\"field\":\"target_bytes\""),
            (failed, 500, "EIO"),
        ];
        for (error, code, part) in table {
            let reply = Reply::from(Problem::from(error));
            assert_eq!(reply.status.code(), code);
            assert!(reply.body.contains(part), "{}", reply.body);
        }
    }
}

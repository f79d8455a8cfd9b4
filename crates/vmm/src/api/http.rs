//! Parses HTTP/1.1 requests: a pure function with limits.
//!
//! Lenient where common tools require it (no Host header, any Content-Type: `curl -d` sends JSON as
//! a form), strict where a request is ambiguous (Content-Length, Transfer-Encoding; RFC 9112
//! section 6.3).

use super::reply::{BodyMode, Persistence, Problem, Status};

/// Longest request line with headers.
pub const MAX_HEAD_BYTES: usize = 8 << 10;
/// Most header fields.
pub const MAX_HEADERS: usize = 64;
/// Longest body. The largest valid one has under a hundred bytes.
pub const MAX_BODY_BYTES: usize = 16 << 10;

/// A complete request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request<'a> {
    /// `GET`, `PUT` …
    pub method: &'a str,
    /// The path, without query.
    pub path: &'a str,
    /// What follows `?`, if anything.
    pub query: Option<&'a str>,
    /// The body, empty if there is none.
    pub body: &'a [u8],
    /// Whether the client keeps the connection.
    pub persistence: Persistence,
}

impl Request<'_> {
    /// Whether the reply has a body.
    pub fn reply_body(&self) -> BodyMode {
        if self.method == "HEAD" { BodyMode::HeadersOnly } else { BodyMode::Full }
    }
}

/// Result of parsing the start of a buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Parsed<'a> {
    /// More bytes are needed.
    Incomplete {
        /// The headers are complete and the client waits for permission to send the body (`Expect:
        /// 100-continue`).
        wants_continue: bool,
    },
    /// A request.
    Complete {
        /// The request.
        request: Request<'a>,
        /// Number of bytes of the buffer that the request takes.
        consumed_bytes: usize,
    },
}

/// Parses one request from the start of `buffer`. After a refusal the connection is unusable,
/// because the start of the next request is unknown.
pub fn parse(buffer: &[u8]) -> Result<Parsed<'_>, Problem> {
    parse_within(buffer, MAX_BODY_BYTES)
}

/// As [`parse`], for bodies of up to `max_body_bytes`.
pub(crate) fn parse_within(buffer: &[u8], max_body_bytes: usize) -> Result<Parsed<'_>, Problem> {
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut head = httparse::Request::new(&mut headers);
    let head_bytes = match head.parse(&buffer[..buffer.len().min(MAX_HEAD_BYTES)]) {
        Ok(httparse::Status::Complete(head_bytes)) => head_bytes,
        Ok(httparse::Status::Partial) if buffer.len() < MAX_HEAD_BYTES => {
            return Ok(Parsed::Incomplete { wants_continue: false });
        }
        Ok(httparse::Status::Partial) => {
            let message = format!(
                "the request line and headers are longer than the {MAX_HEAD_BYTES} bytes allowed"
            );
            return Err(Problem::new(Status::HeadersTooLarge, message));
        }
        Err(error) => return Err(malformed(error)),
    };
    let fields = HeaderFields::read(head.headers, max_body_bytes)?;
    let body_bytes = fields.body_bytes;
    let total_bytes = head_bytes + body_bytes;
    if buffer.len() < total_bytes {
        let wants_continue = fields.wants_continue && buffer.len() == head_bytes;
        return Ok(Parsed::Incomplete { wants_continue });
    }
    let (path, query) = split_target(head.path.unwrap_or_default());
    let http_1_1 = head.version == Some(1);
    let persistence = if fields.close || !(http_1_1 || fields.keep_alive) {
        Persistence::Close
    } else {
        Persistence::KeepAlive
    };
    let request = Request {
        method: head.method.unwrap_or_default(),
        path,
        query,
        body: &buffer[head_bytes..total_bytes],
        persistence,
    };
    Ok(Parsed::Complete { request, consumed_bytes: total_bytes })
}

fn malformed(error: httparse::Error) -> Problem {
    match error {
        httparse::Error::TooManyHeaders => {
            let message =
                format!("the request has more than the {MAX_HEADERS} header fields allowed");
            Problem::new(Status::HeadersTooLarge, message)
        }
        httparse::Error::Version => {
            Problem::new(Status::VersionNotSupported, "the request is not HTTP/1.1 (or 1.0)")
        }
        error => Problem::new(Status::BadRequest, format!("the request is not HTTP/1.1: {error}")),
    }
}

/// The relevant header fields.
#[derive(Default)]
struct HeaderFields {
    body_bytes: usize,
    wants_continue: bool,
    keep_alive: bool,
    close: bool,
}

impl HeaderFields {
    fn read(headers: &[httparse::Header<'_>], max_body_bytes: usize) -> Result<Self, Problem> {
        let mut fields = Self::default();
        let mut content_length = None;
        for header in headers {
            if header.name.eq_ignore_ascii_case("content-length") {
                let length = parse_content_length(header.value, max_body_bytes)?;
                if content_length.is_some_and(|earlier| earlier != length) {
                    let message = "the request has two Content-Length fields that differ";
                    return Err(Problem::new(Status::BadRequest, message));
                }
                content_length = Some(length);
            } else if header.name.eq_ignore_ascii_case("transfer-encoding") {
                let message = "the request has a Transfer-Encoding, which is not supported";
                return Err(Problem::new(Status::LengthRequired, message)
                    .with_remedy("send the body in one piece with a Content-Length"));
            } else if header.name.eq_ignore_ascii_case("expect") {
                fields.wants_continue = header.value.eq_ignore_ascii_case(b"100-continue");
            } else if header.name.eq_ignore_ascii_case("connection") {
                for option in header.value.split(|byte| *byte == b',') {
                    let option = option.trim_ascii();
                    fields.close |= option.eq_ignore_ascii_case(b"close");
                    fields.keep_alive |= option.eq_ignore_ascii_case(b"keep-alive");
                }
            }
        }
        fields.body_bytes = content_length.unwrap_or(0);
        Ok(fields)
    }
}

fn parse_content_length(value: &[u8], max_body_bytes: usize) -> Result<usize, Problem> {
    let text = value.trim_ascii();
    if text.is_empty() || !text.iter().all(u8::is_ascii_digit) {
        let message = format!("Content-Length is '{}', not a number", text.escape_ascii());
        return Err(Problem::new(Status::BadRequest, message));
    }
    // A number too large for 64 bits is above the limit anyway.
    let length = std::str::from_utf8(text)
        .ok()
        .and_then(|digits| digits.parse::<u64>().ok())
        .unwrap_or(u64::MAX);
    match usize::try_from(length) {
        Ok(length) if length <= max_body_bytes => Ok(length),
        _ => {
            let message = format!(
                "the body has {} bytes; at most {max_body_bytes} are allowed",
                text.escape_ascii()
            );
            Err(Problem::new(Status::ContentTooLarge, message))
        }
    }
}

/// Path and query of a request target in origin form (`/vm?x=1`) or absolute form
/// (`http://localhost/vm?x=1`), RFC 9112 section 3.2. Other forms yield a path that no route has.
fn split_target(target: &str) -> (&str, Option<&str>) {
    let path = match target.split_once("://") {
        Some((scheme, rest)) if scheme.eq_ignore_ascii_case("http") => {
            rest.find('/').map_or("/", |slash| &rest[slash..])
        }
        _ => target,
    };
    match path.split_once('?') {
        Some((path, query)) => (path, Some(query)),
        None => (path, None),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn complete(text: &str) -> (Request<'_>, usize) {
        match parse(text.as_bytes()) {
            Ok(Parsed::Complete { request, consumed_bytes }) => (request, consumed_bytes),
            other => panic!("{text:?}: {other:?}"),
        }
    }

    fn refused(bytes: &[u8]) -> u16 {
        parse(bytes).unwrap_err().status.code()
    }

    #[test]
    fn parses_a_request_and_leaves_the_next() {
        let text =
            "PUT /balloon?x=1 HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}GET /vm";
        let (request, consumed) = complete(text);
        assert_eq!((request.method, request.path, request.query), ("PUT", "/balloon", Some("x=1")));
        assert_eq!(request.body, b"{}");
        assert_eq!(request.persistence, Persistence::KeepAlive);
        assert_eq!(&text[consumed..], "GET /vm");
    }

    #[test]
    fn the_client_decides_on_the_connection() {
        use Persistence::{Close, KeepAlive};
        for (version, field, expected) in [
            ("1.1", "", KeepAlive),
            ("1.1", "Connection: close\r\n", Close),
            ("1.1", "Connection: foo, Close\r\n", Close),
            ("1.0", "", Close),
            ("1.0", "Connection: Keep-Alive\r\n", KeepAlive),
        ] {
            let text = format!("GET /vm HTTP/{version}\r\n{field}\r\n");
            assert_eq!(complete(&text).0.persistence, expected, "{text}");
        }
    }

    #[test]
    fn absolute_targets_lose_their_authority() {
        for (target, path, query) in [
            ("http://localhost/vm", "/vm", None),
            ("HTTP://localhost/vm?a", "/vm", Some("a")),
            ("http://localhost", "/", None),
            ("*", "*", None),
            ("/a://b/c", "/a://b/c", None),
        ] {
            let text = format!("GET {target} HTTP/1.1\r\n\r\n");
            let (request, _) = complete(&text);
            assert_eq!((request.path, request.query), (path, query), "{target}");
        }
    }

    #[test]
    fn waits_for_the_rest() {
        let text = b"PUT /balloon HTTP/1.1\r\nContent-Length: 3\r\n\r\nab";
        for end in 0..text.len() {
            assert_eq!(
                parse(&text[..end]),
                Ok(Parsed::Incomplete { wants_continue: false }),
                "{end}"
            );
        }
        let text = b"PUT /balloon HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n";
        assert_eq!(parse(text), Ok(Parsed::Incomplete { wants_continue: true }));
    }

    #[test]
    fn refuses_malformed_and_too_large_requests() {
        assert_eq!(refused(b"\x16\x03\x01\x02\x00"), 400);
        assert_eq!(refused(b"GET /vm HTTP/2.0\r\n\r\n"), 505);
        assert_eq!(
            refused(b"GET /vm HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n"),
            400
        );
        assert_eq!(refused(b"GET /vm HTTP/1.1\r\nContent-Length: +1\r\n\r\n"), 400);
        assert_eq!(refused(b"GET /vm HTTP/1.1\r\nContent-Length: -1\r\n\r\n"), 400);
        assert_eq!(refused(b"GET /vm HTTP/1.1\r\nContent-Length: 16385\r\n\r\n"), 413);
        assert_eq!(
            refused(b"GET /vm HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n"),
            413
        );
        assert_eq!(refused(b"PUT /vm HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"), 411);
        let long = format!("GET /{} HTTP/1.1\r\n\r\n", "a".repeat(MAX_HEAD_BYTES));
        assert_eq!(refused(long.as_bytes()), 431);
        let many = format!("GET / HTTP/1.1\r\n{}\r\n", "A: b\r\n".repeat(MAX_HEADERS + 1));
        assert_eq!(refused(many.as_bytes()), 431);
    }

    proptest! {
        #[test]
        fn consumes_only_what_is_there(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
            if let Ok(Parsed::Complete { consumed_bytes, .. }) = parse(&bytes) {
                prop_assert!(consumed_bytes <= bytes.len());
            }
        }

        #[test]
        fn a_verdict_does_not_change_with_more_bytes(
            length in 0_usize..20,
            body in "[ -~]{0,24}",
            more in proptest::collection::vec(any::<u8>(), 0..40),
        ) {
            let head = format!("PUT /balloon HTTP/1.1\r\nContent-Length: {length}\r\n\r\n");
            let text = format!("{head}{body}").into_bytes();
            let mut longer = text.clone();
            longer.extend_from_slice(&more);
            match parse(&text) {
                Ok(Parsed::Incomplete { .. }) => prop_assert!(body.len() < length),
                verdict => prop_assert_eq!(verdict, parse(&longer)),
            }
        }
    }
}

//! Requests of guests and their answers, as Firecracker v1.16.1 gives them: what it accepts is
//! less strict than HTTP in some places and stricter in others.

use std::time::Instant;

use super::store::{Format, NoText};
use super::{Form, Service, Sessions};

/// Where tokens come from.
const TOKENS: &str = "/latest/api/token";
const TOKEN_FIELDS: [&str; 2] = ["x-metadata-token", "x-aws-ec2-metadata-token"];
const LIFETIME_FIELDS: [&str; 2] =
    ["x-metadata-token-ttl-seconds", "x-aws-ec2-metadata-token-ttl-seconds"];
/// A request that a proxy has forwarded gets no token.
const FORWARDED_FIELD: &str = "x-forwarded-for";
/// Shortest first line: `GET / HTTP/1.1`.
const LEAST_LINE_BYTES: usize = 14;

/// The length of the request at the beginning of `bytes`, up to and with its empty line.
pub(super) fn end(bytes: &[u8]) -> Option<usize> {
    (1..=bytes.len()).find(|end| {
        let head = &bytes[..*end];
        head.ends_with(b"\n\n") || head.ends_with(b"\n\r\n")
    })
}

/// What an answer says it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Media {
    Json,
    Text,
}

#[derive(Debug, PartialEq, Eq)]
struct Answer {
    status: u16,
    media: Media,
    /// A further field.
    field: Option<(String, String)>,
    body: String,
}

impl Answer {
    fn text(status: u16, body: impl Into<String>) -> Self {
        Self { status, media: Media::Text, field: None, body: body.into() }
    }

    /// The answer to what is not a request.
    fn unparsed(status: u16, body: impl Into<String>) -> Self {
        Self { media: Media::Json, ..Self::text(status, body) }
    }
}

/// A request as far as it matters.
struct Request<'a> {
    method: &'a str,
    version: &'a str,
    path: &'a str,
    fields: Vec<(&'a str, &'a str)>,
    accepts: Format,
}

impl Request<'_> {
    /// The last field of one of these names, as it is written, and its value.
    fn field(&self, names: &[&str]) -> Option<(&str, &str)> {
        let is_named =
            |(name, _): &&(&str, &str)| names.iter().any(|known| name.eq_ignore_ascii_case(known));
        self.fields.iter().rev().find(is_named).copied()
    }
}

/// The whole answer to a request, which ends with an empty line.
pub(super) fn answer(service: &mut Service, request: &[u8], now: Instant) -> Vec<u8> {
    service.counts.answered += 1;
    let (version, answer) = match parse(request) {
        Ok(request) => (request.version, serve(service, &request, now)),
        Err(answer) => ("HTTP/1.1", answer),
    };
    let Answer { status, media, field, body } = answer;
    let media = match media {
        Media::Json => "application/json",
        Media::Text => "text/plain",
    };
    let field = field.map(|(name, value)| format!("{name}: {value}\r\n")).unwrap_or_default();
    let length = body.len();
    format!(
        "{version} {status} \r\nServer: Firecracker API\r\nConnection: keep-alive\r\n{field}\
         Content-Type: {media}\r\nContent-Length: {length}\r\n\r\n{body}"
    )
    .into_bytes()
}

fn invalid() -> Answer {
    Answer::unparsed(400, "Invalid request.")
}

fn parse(request: &[u8]) -> Result<Request<'_>, Answer> {
    let split = |bytes: &[u8], by: &[u8]| bytes.windows(by.len()).position(|part| part == by);
    let line_end = split(request, b"\r\n").ok_or_else(invalid)?;
    let line = &request[..line_end];
    if line.len() < LEAST_LINE_BYTES {
        return Err(invalid());
    }
    let mut words = line.splitn(3, |byte| *byte == b' ');
    let (Some(method), Some(target), Some(version)) = (words.next(), words.next(), words.next())
    else {
        return Err(invalid());
    };
    let method = match method {
        b"GET" => "GET",
        b"PUT" => "PUT",
        b"PATCH" => "PATCH",
        b"DELETE" => "DELETE",
        _ => return Err(Answer::unparsed(501, "Unsupported HTTP method.")),
    };
    if target.is_empty() {
        return Err(Answer::unparsed(400, "Empty URI not allowed."));
    }
    let target =
        str::from_utf8(target).map_err(|_| Answer::unparsed(400, "Cannot parse URI as UTF-8."))?;
    let version = match version {
        b"HTTP/1.0" => "HTTP/1.0",
        b"HTTP/1.1" => "HTTP/1.1",
        _ => return Err(Answer::unparsed(501, "Unsupported HTTP version.")),
    };
    let rest = &request[line_end..];
    let fields_end = split(rest, b"\r\n\r\n").ok_or_else(invalid)?;
    let fields = str::from_utf8(&rest[..fields_end]).map_err(|_| invalid())?;
    let mut parsed =
        Request { method, version, path: path(target), fields: Vec::new(), accepts: Format::Text };
    for field in fields.split("\r\n").skip(1).take_while(|line| !line.is_empty()) {
        parse_field(&mut parsed, field)?;
    }
    Ok(parsed)
}

/// The path of a target; empty if it has none.
fn path(target: &str) -> &str {
    match target.strip_prefix("http://") {
        Some(rest) => rest.find('/').map_or("", |start| &rest[start..]),
        None if target.starts_with('/') => target,
        None => "",
    }
}

fn parse_field<'a>(request: &mut Request<'a>, field: &'a str) -> Result<(), Answer> {
    let (written, text) = field.split_once(':').ok_or_else(|| {
        Answer::unparsed(400, format!("Header is incorrectly formatted. Key: {field}"))
    })?;
    let (name, value) = (written.trim(), text.trim());
    let is = |known: &str| name.eq_ignore_ascii_case(known);
    if is("content-length") {
        return match value.parse::<u32>() {
            Ok(0) => Ok(()),
            // No request that is served has a body.
            Ok(_) => Err(invalid()),
            Err(_) => {
                Err(Answer::unparsed(400, format!("Invalid value. Key:{written}; Value:{text}")))
            }
        };
    }
    if is("accept") {
        match value {
            "text/plain" => request.accepts = Format::Text,
            "application/json" => request.accepts = Format::Json,
            _ => {}
        }
    } else if is("accept-encoding") {
        check_encodings(value)?;
    } else {
        request.fields.push((name, value));
    }
    Ok(())
}

/// Answers are not encoded, which a client may refuse (RFC 9110 section 12.5.3).
fn check_encodings(value: &str) -> Result<(), Answer> {
    if value.is_empty() {
        return Err(invalid());
    }
    let refuses = |encoding: &&str| {
        let encoding = encoding.trim();
        encoding == "identity;q=0" || encoding == "*;q=0" && !value.contains("identity")
    };
    match value.split(',').find(refuses) {
        None => Ok(()),
        Some(encoding) => {
            let message = format!("Invalid value. Key:Accept-Encoding; Value:{encoding}");
            Err(Answer::unparsed(400, message))
        }
    }
}

fn serve(service: &mut Service, request: &Request<'_>, now: Instant) -> Answer {
    if request.path.is_empty() {
        return Answer::text(400, "Invalid URI.");
    }
    match request.method {
        "GET" => get(service, request, now),
        "PUT" => put(service, request, now),
        _ => Answer {
            field: Some(("Allow".to_owned(), "GET, PUT".to_owned())),
            ..Answer::text(405, "Not allowed HTTP method.")
        },
    }
}

fn get(service: &mut Service, request: &Request<'_>, now: Instant) -> Answer {
    let refusal = match request.field(&TOKEN_FIELDS) {
        None => {
            service.counts.without_token += 1;
            Some(
                "No MMDS token provided. Use `X-metadata-token` or `X-aws-ec2-metadata-token` \
                 header to specify the session token.",
            )
        }
        Some((_, token)) if !service.tokens.is_valid(token, now) => {
            service.counts.with_invalid_token += 1;
            Some("MMDS token not valid.")
        }
        Some(_) => None,
    };
    if let (Sessions::Required, Some(refusal)) = (service.sessions, refusal) {
        return Answer::text(401, refusal);
    }
    let format = match service.form {
        Form::Accepted => request.accepts,
        Form::Text => Format::Text,
    };
    match service.store.show(&without_empty(request.path), format) {
        Ok(body) => {
            let media = match request.accepts {
                Format::Json => Media::Json,
                Format::Text => Media::Text,
            };
            Answer { media, ..Answer::text(200, body) }
        }
        Err(NoText::NotFound) => not_found(request.path),
        Err(NoText::Unsupported) => {
            Answer::text(501, "Cannot retrieve value. The value has an unsupported type.")
        }
    }
}

fn put(service: &mut Service, request: &Request<'_>, now: Instant) -> Answer {
    if let Some((name, _)) = request.field(&[FORWARDED_FIELD]) {
        let message = format!("Invalid header. Reason: Unsupported header name. Key: {name}");
        return Answer::text(400, message);
    }
    if without_empty(request.path) != TOKENS {
        return not_found(request.path);
    }
    let Some((name, seconds)) = request.field(&LIFETIME_FIELDS) else {
        return Answer::text(
            400,
            "Token time to live value not found. Use `X-metadata-token-ttl-seconds` or \
             `X-aws-ec2-metadata-token-ttl-seconds` header to specify the token's lifetime.",
        );
    };
    let Ok(number) = seconds.parse::<u32>() else {
        let reason = format!("Invalid value. Key:{name}; Value:{seconds}");
        return Answer::text(400, format!("Invalid header. Reason: {reason}"));
    };
    match service.tokens.make(number, now) {
        Ok(token) => Answer {
            field: Some((name.to_owned(), number.to_string())),
            ..Answer::text(200, token)
        },
        Err(error) => Answer::text(400, error.to_string()),
    }
}

fn not_found(path: &str) -> Answer {
    Answer::text(404, format!("Resource not found: {path}."))
}

/// The path with single slashes.
fn without_empty(path: &str) -> String {
    let mut single = String::with_capacity(path.len());
    for letter in path.chars() {
        if letter != '/' || !single.ends_with('/') {
            single.push(letter);
        }
    }
    single
}

#[cfg(test)]
mod tests;

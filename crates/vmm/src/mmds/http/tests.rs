//! Answers beside those of Firecracker v1.16.1, by knowledge of its sources: no recording has what
//! guests are answered.

use proptest::prelude::*;
use serde_json::json;

use super::super::Metadata;
use super::*;

fn service(sessions: Sessions, form: Form) -> Metadata {
    let metadata = Metadata::new(1000);
    let mut service = metadata.lock();
    let document = json!({
        "latest": { "meta-data": { "ami-id": "ami-1", "n": 43, "tags": { "b": "c" } } },
    });
    service.store.put(document).unwrap();
    (service.sessions, service.form) = (sessions, form);
    drop(service);
    metadata
}

/// Head and body of an answer.
fn ask(metadata: &Metadata, request: &str) -> (String, String) {
    let answer = answer(&mut metadata.lock(), request.as_bytes(), Instant::now());
    let answer = String::from_utf8(answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.ends_with(&format!("Content-Length: {}", body.len())), "{head}");
    (head.to_owned(), body.to_owned())
}

/// Status, type and body.
fn short(metadata: &Metadata, request: &str) -> (u16, &'static str, String) {
    let (head, body) = ask(metadata, request);
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    let is_json = head.contains("\r\nContent-Type: application/json\r\n");
    (status, if is_json { "json" } else { "text" }, body)
}

#[test]
fn the_document_is_read_without_a_session() {
    let metadata = service(Sessions::Optional, Form::Accepted);
    let json = r#"{"ami-id":"ami-1","n":43,"tags":{"b":"c"}}"#;
    for (target, fields, answer) in [
        ("/latest/meta-data", "", (200, "text", "ami-id\nn\ntags/")),
        ("/latest/meta-data/", "Accept: text/plain\r\n", (200, "text", "ami-id\nn\ntags/")),
        ("//latest///meta-data", "accept:application/json\r\n", (200, "json", json)),
        ("http://169.254.169.254/latest/meta-data/ami-id", "", (200, "text", "ami-1")),
        ("/latest/meta-data/ami-id", "Accept: application/json\r\n", (200, "json", "\"ami-1\"")),
        ("/latest/meta-data/ami-id", "Accept: */*\r\n", (200, "text", "ami-1")),
        (
            "/latest/meta-data/n",
            "X-metadata-token: wrong\r\n",
            (501, "text", "Cannot retrieve value. The value has an unsupported type."),
        ),
        ("/latest/meta-data/n", "Accept: application/json\r\n", (200, "json", "43")),
        ("//none", "", (404, "text", "Resource not found: //none.")),
        ("http://a", "", (400, "text", "Invalid URI.")),
        ("latest", "", (400, "text", "Invalid URI.")),
    ] {
        let (status, media, body) = answer;
        let request = format!("GET {target} HTTP/1.1\r\nHost: a\r\n{fields}\r\n");
        assert_eq!(short(&metadata, &request), (status, media, body.to_owned()), "{request}");
    }
    let counts = metadata.lock().counts;
    assert_eq!((counts.answered, counts.without_token, counts.with_invalid_token), (11, 8, 1));
}

#[test]
fn a_session_needs_its_token() {
    let metadata = service(Sessions::Required, Form::Accepted);
    let get = |fields: &str| {
        let path = "/latest/meta-data/ami-id";
        short(&metadata, &format!("GET {path} HTTP/1.0\r\n{fields}\r\n"))
    };
    let (status, _, body) = get("");
    assert_eq!(status, 401);
    assert!(body.starts_with("No MMDS token provided. Use `X-metadata-token` or"), "{body}");
    let invalid = (401, "text", "MMDS token not valid.".to_owned());
    assert_eq!(get("X-metadata-token: a\r\n"), invalid);
    for (asks, gives) in [
        ("X-metadata-token-ttl-seconds", "X-aws-ec2-metadata-token"),
        ("x-AWS-ec2-metadata-token-ttl-seconds", "x-metadata-TOKEN"),
    ] {
        let request = format!("PUT /latest//api/token HTTP/1.1\r\n{asks}: 60\r\n\r\n");
        let (head, token) = ask(&metadata, &request);
        assert!(head.starts_with("HTTP/1.1 200 \r\n"), "{head}");
        assert!(head.contains(&format!("\r\n{asks}: 60\r\nContent-Type: text/plain\r\n")));
        assert_eq!(get(&format!("{gives}: {token}\r\n")), (200, "text", "ami-1".to_owned()));
        assert_eq!(get(&format!("{gives}: {token}0\r\n")), invalid);
        metadata.lock().tokens = super::super::Tokens::new();
        assert_eq!(get(&format!("{gives}: {token}\r\n")), invalid);
    }
}

#[test]
fn tokens_are_refused() {
    let metadata = service(Sessions::Required, Form::Accepted);
    let put = |path: &str, fields: &str| {
        short(&metadata, &format!("PUT {path} HTTP/1.1\r\n{fields}\r\n"))
    };
    let path = "/latest/api/token";
    let ttl = "X-metadata-token-ttl-seconds";
    for (seconds, body) in [
        (
            "0",
            "Invalid time to live value provided for token: 0. Please provide a value between 1 \
               and 21600.",
        ),
        ("-1", "Invalid header. Reason: Invalid value. Key:X-metadata-token-ttl-seconds; Value:-1"),
    ] {
        assert_eq!(put(path, &format!("{ttl}: {seconds}\r\n")), (400, "text", body.to_owned()));
    }
    let (status, _, body) = put(path, "");
    assert_eq!((status, body.starts_with("Token time to live value not found.")), (400, true));
    let forwarded = format!("{ttl}: 1\r\nX-Forwarded-For: b\r\n");
    let body = "Invalid header. Reason: Unsupported header name. Key: X-Forwarded-For";
    assert_eq!(put(path, &forwarded), (400, "text", body.to_owned()));
    let body = "Resource not found: /latest/api/tokens.";
    assert_eq!(put("/latest/api/tokens", ""), (404, "text", body.to_owned()));
}

#[test]
fn answers_of_ec2s_form_ignore_what_is_accepted() {
    let metadata = service(Sessions::Optional, Form::Text);
    let request = "GET /latest HTTP/1.1\r\nAccept: application/json\r\n\r\n";
    assert_eq!(short(&metadata, request), (200, "json", "meta-data/".to_owned()));
}

#[test]
fn what_is_no_request_is_refused() {
    let metadata = service(Sessions::Optional, Form::Accepted);
    for (request, status, body) in [
        ("\n\n", 400, "Invalid request."),
        ("GET / HTTP/1.1\n\n", 400, "Invalid request."),
        ("GET / HTTP/1.1\r\n\n", 400, "Invalid request."),
        ("G / HTTP/1.1\r\n\r\n", 400, "Invalid request."),
        ("GET /aaaaaaaaaaaaaa\r\n\r\n", 400, "Invalid request."),
        ("POST / HTTP/1.1\r\n\r\n", 501, "Unsupported HTTP method."),
        ("GET  HTTP/1.1 \r\n\r\n", 400, "Empty URI not allowed."),
        ("GET / HTTP/2.0\r\n\r\n", 501, "Unsupported HTTP version."),
        ("GET / HTTP/1.1\r\nA\r\n\r\n", 400, "Header is incorrectly formatted. Key: A"),
        ("PUT / HTTP/1.1\r\nContent-Length: 1\r\n\r\n", 400, "Invalid request."),
        (
            "PUT / HTTP/1.1\r\nContent-Length: x\r\n\r\n",
            400,
            "Invalid value. Key:Content-Length; Value: x",
        ),
        (
            "GET / HTTP/1.1\r\nAccept-Encoding: gzip, identity;q=0\r\n\r\n",
            400,
            "Invalid value. Key:Accept-Encoding; Value: identity;q=0",
        ),
    ] {
        assert_eq!(short(&metadata, request), (status, "json", body.to_owned()), "{request:?}");
    }
    let (head, body) = ask(&metadata, "DELETE /a HTTP/1.1\r\n\r\n");
    assert!(head.starts_with("HTTP/1.1 405 \r\n"), "{head}");
    assert!(head.contains("\r\nAllow: GET, PUT\r\nContent-Type: text/plain\r\n"), "{head}");
    assert_eq!(body, "Not allowed HTTP method.");
}

proptest! {
    /// Any bytes get one answer, and the end of a request is found where it is.
    #[test]
    fn any_request_is_answered(
        words in "(GET|PUT|PATCH| |/|HTTP/1.[01]|latest|api/token|:|\r\n|\n|é|.){0,30}",
    ) {
        let metadata = service(Sessions::Required, Form::Accepted);
        let (head, _) = ask(&metadata, &words);
        prop_assert!(head.starts_with("HTTP/1."));
        let found = end(words.as_bytes());
        let expected = [words.find("\n\n").map(|at| at + 2), words.find("\n\r\n").map(|at| at + 3)];
        prop_assert_eq!(found, expected.into_iter().flatten().min());
    }
}

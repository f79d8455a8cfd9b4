//! QMP's messages (QEMU docs/interop/qmp-spec.rst), without I/O.
//!
//! A server sends one JSON object per line. (`-mon pretty=on` breaks objects into several lines;
//! such a server is not understood.) Events may stand before and after any answer.

use serde_json::{Map, Value, json};

use super::super::{MOST_REPEATED, Trouble, repeatable};

/// A message of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// The first one on a connection.
    Greeting,
    /// Something has happened in the machine.
    Event,
    /// The answer to a request.
    Answer {
        /// The request's number; `None` if the server could not read the request.
        id: Option<u64>,
        /// What it returned, or why it refused.
        result: Result<Value, Refusal>,
    },
}

/// An error that a server has answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Its class, which programs may depend on.
    pub class: String,
    /// Its description, for people.
    pub description: String,
}

impl From<Refusal> for Trouble {
    fn from(Refusal { class, description }: Refusal) -> Self {
        Self::Refused(format!("{}: {}", repeatable(&class), repeatable(&description)))
    }
}

/// A request, with its newline.
pub fn request(id: u64, command: &str, arguments: &Value) -> Vec<u8> {
    let mut request = json!({ "execute": command, "id": id });
    if !arguments.is_null() {
        request["arguments"] = arguments.clone();
    }
    let mut bytes = request.to_string().into_bytes();
    bytes.push(b'\n');
    bytes
}

/// Reads a line.
///
/// # Errors
/// [`Trouble::Nonsense`].
pub fn parse(line: &[u8]) -> Result<Message, Trouble> {
    let nonsense = || {
        let line = String::from_utf8_lossy(&line[..line.len().min(4 * MOST_REPEATED)]);
        Trouble::Nonsense(format!("the line '{}'", repeatable(&line)))
    };
    let mut message: Map<String, Value> = serde_json::from_slice(line).map_err(|_| nonsense())?;
    let result = if message.contains_key("QMP") {
        return Ok(Message::Greeting);
    } else if message.contains_key("event") {
        return Ok(Message::Event);
    } else if let Some(returned) = message.remove("return") {
        Ok(returned)
    } else if let Some(error) = message.get("error") {
        let text = |name: &str| error[name].as_str().unwrap_or_default().to_owned();
        Err(Refusal { class: text("class"), description: text("desc") })
    } else {
        return Err(nonsense());
    };
    let id = match message.get("id") {
        None => None,
        Some(id) => Some(id.as_u64().ok_or_else(nonsense)?),
    };
    Ok(Message::Answer { id, result })
}

/// Cuts a stream of bytes into lines.
#[derive(Debug, Default)]
pub struct Lines {
    bytes: Vec<u8>,
    /// How much of it has no newline.
    searched: usize,
}

impl Lines {
    /// Adds what has arrived.
    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// Removes the first complete line.
    pub fn pop(&mut self) -> Option<Vec<u8>> {
        let found = self.bytes[self.searched..].iter().position(|byte| *byte == b'\n');
        let Some(found) = found else {
            self.searched = self.bytes.len();
            return None;
        };
        let rest = self.bytes.split_off(self.searched + found + 1);
        self.searched = 0;
        Some(std::mem::replace(&mut self.bytes, rest))
    }
}

/// All messages in these bytes, up to the first that is not understood; for fuzzing.
pub fn messages(bytes: &[u8]) -> Vec<Result<Message, Trouble>> {
    let mut lines = Lines::default();
    lines.push(bytes);
    let mut found = Vec::new();
    while let Some(line) = lines.pop() {
        found.push(parse(&line));
        if matches!(found.last(), Some(Err(_))) {
            break;
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_a_server_are_told_apart() {
        let bytes = concat!(
            r#"{"QMP": {"version": {}, "capabilities": ["oob"]}}"#,
            "\r\n",
            r#"{"timestamp": {"seconds": 1}, "event": "STOP"}"#,
            "\r\n",
            r#"{"return": {}, "id": 7}"#,
            "\n",
            r#"{"id": 8, "error": {"class": "DeviceNotActive", "desc": "No balloon"}}"#,
            "\n",
            r#"{"error": {"class": "GenericError", "desc": "JSON parse error"}}"#,
            "\n",
            r#"{"return": {}"#,
        );
        let refusal = |class: &str, description: &str| {
            Err(Refusal { class: class.to_owned(), description: description.to_owned() })
        };
        let expected = [
            Message::Greeting,
            Message::Event,
            Message::Answer { id: Some(7), result: Ok(json!({})) },
            Message::Answer { id: Some(8), result: refusal("DeviceNotActive", "No balloon") },
            Message::Answer { id: None, result: refusal("GenericError", "JSON parse error") },
        ];
        assert_eq!(messages(bytes.as_bytes()), expected.map(Ok));
    }

    #[test]
    fn other_lines_are_nonsense() {
        for line in [
            "",
            "{}",
            "[]",
            "null",
            "HTTP/1.1 400 Bad Request",
            r#"{"return": {}, "id": "7"}"#,
            r#"{"return": {}, "id": -1}"#,
            r#"{"return": {}} {"return": {}}"#,
            &"[".repeat(1000),
        ] {
            let parsed = parse(line.as_bytes());
            assert!(matches!(parsed, Err(Trouble::Nonsense(_))), "{line}: {parsed:?}");
        }
        assert!(parse(b"\xff\xfe").is_err());
    }

    #[test]
    fn a_long_text_is_not_repeated() {
        let line = format!("{}\n", "\u{7}".repeat(100_000));
        let text = parse(line.as_bytes()).unwrap_err().to_string();
        assert!(text.len() < 2000 && !text.contains('\u{7}'), "{}", text.len());
        let refusal = Refusal { class: "C".repeat(1000), description: "d\n".repeat(1000) };
        let text = Trouble::from(refusal).to_string();
        assert!(text.len() < 2000 && !text.contains('\n'), "{text}");
    }

    #[test]
    fn lines_do_not_depend_on_how_they_arrive() {
        let text = b"one\n\ntwo\nthree";
        for size in 1..=text.len() {
            let mut lines = Lines::default();
            let mut found = Vec::new();
            for piece in text.chunks(size) {
                lines.push(piece);
                found.extend(std::iter::from_fn(|| lines.pop()));
            }
            assert_eq!(found, [&b"one\n"[..], b"\n", b"two\n"], "pieces of {size}");
        }
    }

    #[test]
    fn a_request_is_one_line() {
        let line = request(3, "qom-get", &json!({ "path": "/a\n" }));
        assert_eq!(line.iter().position(|byte| *byte == b'\n'), Some(line.len() - 1));
        let sent: Value = serde_json::from_slice(&line).unwrap();
        assert_eq!(sent, json!({ "execute": "qom-get", "id": 3, "arguments": { "path": "/a\n" } }));
        let sent: Value = serde_json::from_slice(&request(4, "stop", &Value::Null)).unwrap();
        assert_eq!(sent, json!({ "execute": "stop", "id": 4 }));
    }
}

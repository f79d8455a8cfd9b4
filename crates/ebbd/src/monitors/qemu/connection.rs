//! A connection with a QMP server: one request at a time, one answer each.

use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;

use super::super::{MOST_BYTES, Trouble};
use super::protocol::{Lines, Message, Refusal, parse, request};
use crate::clock;

/// A connection. It is closed by the first request that is cancelled or meets [`Trouble`]: what
/// arrives after that would be taken for the answer to a later request.
#[derive(Debug)]
pub(super) struct Connection {
    wire: Option<Wire>,
    last_id: u64,
}

#[derive(Debug)]
struct Wire {
    stream: UnixStream,
    lines: Lines,
}

impl Connection {
    /// Reads the greeting, and enters command mode.
    pub(super) async fn start(stream: UnixStream) -> Result<Self, Trouble> {
        let mut wire = Wire { stream, lines: Lines::default() };
        let mut left = MOST_BYTES;
        match wire.next(&mut left).await? {
            Message::Greeting => {}
            _ => return Err(Trouble::Nonsense("the server does not greet as QMP does".to_owned())),
        }
        // An answer to a request of an earlier client has another number.
        let mut connection = Self { wire: Some(wire), last_id: clock::now_ms() };
        connection.ask("qmp_capabilities", Value::Null).await??;
        Ok(connection)
    }

    /// Sends a request and returns its answer.
    pub(super) async fn ask(
        &mut self,
        command: &str,
        arguments: Value,
    ) -> Result<Result<Value, Refusal>, Trouble> {
        let given_up = || Trouble::Gone("an earlier request was given up".to_owned());
        // It is put back only at the end.
        let mut wire = self.wire.take().ok_or_else(given_up)?;
        self.last_id += 1;
        let result = wire.ask(self.last_id, command, &arguments).await?;
        self.wire = Some(wire);
        Ok(result)
    }
}

impl Wire {
    async fn ask(
        &mut self,
        id: u64,
        command: &str,
        arguments: &Value,
    ) -> Result<Result<Value, Refusal>, Trouble> {
        let gone = |error: std::io::Error| Trouble::Gone(error.to_string());
        self.stream.write_all(&request(id, command, arguments)).await.map_err(gone)?;
        let mut left = MOST_BYTES;
        loop {
            match self.next(&mut left).await? {
                Message::Event => {}
                Message::Answer { id: Some(answered), result } if answered == id => {
                    return Ok(result);
                }
                Message::Answer { id: answered, .. } => {
                    let text = format!("an answer to {answered:?} instead of {id}");
                    return Err(Trouble::Nonsense(text));
                }
                Message::Greeting => {
                    return Err(Trouble::Nonsense("a second greeting".to_owned()));
                }
            }
        }
    }

    /// The next message. It reads no more bytes than are `left`.
    async fn next(&mut self, left: &mut usize) -> Result<Message, Trouble> {
        let mut piece = [0; 4096];
        loop {
            if let Some(line) = self.lines.pop() {
                return parse(&line);
            }
            let read = self.stream.read(&mut piece).await;
            let read = read.map_err(|error| Trouble::Gone(error.to_string()))?;
            if read == 0 {
                return Err(Trouble::Gone("the server has closed the connection".to_owned()));
            }
            let over = || Trouble::Nonsense(format!("no answer within {MOST_BYTES} bytes"));
            *left = left.checked_sub(read).ok_or_else(over)?;
            self.lines.push(&piece[..read]);
        }
    }
}

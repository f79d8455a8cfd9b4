//! A connection with a libvirtd: one request at a time, one answer each.

use std::path::Path;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;

use super::super::{MOST_BYTES, Trouble};
use super::documents::{Named, domains};
use super::protocol::{Frames, Message, Procedure, Refusal, pong, request};
use super::xdr::{Reader, put_text};

/// Ways to authenticate (`remote_auth_type`).
const NONE: u32 = 0;
const POLKIT: u32 = 2;
/// The drivers of machines: the host's, or one user's. A libvirtd has one of them.
const URIS: [&str; 2] = ["qemu:///system", "qemu:///session"];
/// Names are names of files, too.
const LONGEST_NAME: usize = 255;

/// A connection. It is closed by the first request that is cancelled or meets [`Trouble`].
#[derive(Debug)]
pub(super) struct Connection {
    wire: Option<(UnixStream, Frames)>,
    last_serial: u32,
}

impl Connection {
    /// Connects and opens the driver.
    pub(super) async fn open(path: &Path) -> Result<Self, Trouble> {
        let stream = UnixStream::connect(path).await;
        let stream = stream.map_err(|error| Trouble::Gone(error.to_string()))?;
        let mut connection = Self { wire: Some((stream, Frames::default())), last_serial: 0 };
        let ways = connection.get(Procedure::AuthList, &[]).await?;
        let ways = Reader::new(&ways).list(Reader::u32)?;
        if ways.contains(&POLKIT) && !ways.contains(&NONE) {
            connection.get(Procedure::AuthPolkit, &[]).await?;
        } else if !ways.is_empty() && !ways.contains(&NONE) {
            return Err(Trouble::Refused("it wants a password".to_owned()));
        }
        let mut refusal = None;
        for uri in URIS {
            let mut content = 1_u32.to_be_bytes().to_vec();
            put_text(&mut content, uri);
            content.extend([0; 4]);
            match connection.ask(Procedure::ConnectOpen, &content).await? {
                Ok(_) => return Ok(connection),
                Err(error) => refusal = refusal.or(Some(error)),
            }
        }
        Err(refusal.map_or(Trouble::Unable, Trouble::from))
    }

    /// The active domains.
    pub(super) async fn domains(&mut self) -> Result<Vec<Named>, Trouble> {
        // A list is wanted, of active ones.
        let content = [0, 0, 0, 1, 0, 0, 0, 1];
        let found = domains(&self.get(Procedure::ConnectListAllDomains, &content).await?)?;
        Ok(found.into_iter().filter(|it| it.id >= 0 && it.name.len() <= LONGEST_NAME).collect())
    }

    /// The content of an answer; an error is [`Trouble::Refused`].
    pub(super) async fn get(
        &mut self,
        procedure: Procedure,
        content: &[u8],
    ) -> Result<Vec<u8>, Trouble> {
        Ok(self.ask(procedure, content).await??)
    }

    /// Sends a request and returns its answer.
    pub(super) async fn ask(
        &mut self,
        procedure: Procedure,
        content: &[u8],
    ) -> Result<Result<Vec<u8>, Refusal>, Trouble> {
        let given_up = || Trouble::Gone("an earlier request was given up".to_owned());
        // It is put back only at the end.
        let (mut stream, mut frames) = self.wire.take().ok_or_else(given_up)?;
        let gone = |error: std::io::Error| Trouble::Gone(error.to_string());
        self.last_serial = self.last_serial.wrapping_add(1);
        let wanted = (self.last_serial, procedure as u32);
        let message = request(self.last_serial, procedure, content);
        stream.write_all(&message).await.map_err(gone)?;
        let mut left = MOST_BYTES;
        let mut piece = [0; 4096];
        loop {
            match frames.pop()? {
                Some(Message::Ping) => stream.write_all(&pong()).await.map_err(gone)?,
                Some(Message::Event) => {}
                Some(Message::Reply { serial, procedure, result }) => {
                    if (serial, procedure) != wanted {
                        let text = format!("a reply to {:?}, not {wanted:?}", (serial, procedure));
                        return Err(Trouble::Nonsense(text));
                    }
                    self.wire = Some((stream, frames));
                    return Ok(result);
                }
                None => {
                    let read = stream.read(&mut piece).await.map_err(gone)?;
                    if read == 0 {
                        let text = "the server has closed the connection";
                        return Err(Trouble::Gone(text.to_owned()));
                    }
                    let over = || Trouble::Nonsense(format!("no answer within {MOST_BYTES} bytes"));
                    left = left.checked_sub(read).ok_or_else(over)?;
                    frames.push(&piece[..read]);
                }
            }
        }
    }
}

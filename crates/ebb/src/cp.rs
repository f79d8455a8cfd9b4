//! `ebb cp`: copies files between the host and a guest.

use std::io::{self, IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;

use anyhow::{Context as _, anyhow, bail};
use ebb_guest_agent::archive::{self, Place, Summary};
use ebb_guest_agent::transfer::{Direction, Receiver, Sender};
use ebb_guest_agent::wire::{Control, Frame, Request};
use ebb_vmm::size::ByteSize;
use serde::Serialize;

use crate::guest::{self, GuestArgs};

const EXAMPLES: &str = "\
Examples:
  ebb cp program /run/vm.sock:/usr/local/bin/
  ebb cp /run/vm.sock:/var/log ./guest-logs

A directory is copied with its contents. Into a directory that exists, the name is kept; otherwise
the destination is the new name. Permissions, times and symbolic links are kept; devices, sockets
and set-user-id bits are not.";

/// Copies files between the host and a guest.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES, after_long_help = EXAMPLES)]
pub struct Args {
    /// A path of the host, or SOCKET:PATH for one of the guest (PATH begins with a slash)
    #[arg(value_name = "SOURCE")]
    source: End,
    /// The same; one of both is in a guest
    #[arg(value_name = "DESTINATION")]
    destination: End,
    /// In the guest, the copy belongs to this user: USER or USER:GROUP [default: root]
    #[arg(short, long, value_name = "USER")]
    user: Option<String>,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    guest: GuestArgs,
}

/// Where something is.
#[derive(Debug, Clone, PartialEq, Eq)]
enum End {
    Host(PathBuf),
    Guest { socket: PathBuf, path: String },
}

impl FromStr for End {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Ok(match text.split_once(":/") {
            Some((socket, path)) if !socket.is_empty() => {
                Self::Guest { socket: socket.into(), path: format!("/{path}") }
            }
            _ => Self::Host(text.into()),
        })
    }
}

/// The command's JSON output.
#[derive(Debug, Serialize)]
struct Copied {
    entries: u64,
    bytes: u64,
    skipped: u64,
}

/// Copies; prints what was copied.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let Args { source, destination, user, json, guest } = args;
    let summary = match (source, destination) {
        (End::Host(source), End::Guest { socket, path }) => {
            store(&source, &socket, path, user, &guest)?
        }
        (End::Guest { socket, path }, End::Host(destination)) => {
            fetch(&socket, path, &destination, &guest)?
        }
        (End::Host(_), End::Host(_)) => {
            bail!("neither path is in a guest: write it as SOCKET:/PATH")
        }
        (End::Guest { .. }, End::Guest { .. }) => {
            bail!("one of both paths must be on this host")
        }
    };
    let Summary { entries, bytes, skipped } = summary;
    if json {
        println!("{}", serde_json::to_string_pretty(&Copied { entries, bytes, skipped })?);
    } else {
        let size = ByteSize::from_bytes(bytes).rounded();
        eprintln!("copied {entries} entries, {size}");
    }
    Ok(ExitCode::SUCCESS)
}

fn store(
    source: &Path,
    socket: &Path,
    path: String,
    user: Option<String>,
    guest: &GuestArgs,
) -> anyhow::Result<Summary> {
    let name = archive::name_of(source).or_else(|| archive::name_of(&source.canonicalize().ok()?));
    let name = name.unwrap_or_default().into_string().ok();
    let name = name.context("the source's name is not UTF-8; copy its directory instead")?;
    source.symlink_metadata().with_context(|| format!("cannot read {}", source.display()))?;
    let mut channel = guest::connect(socket, guest)?;
    channel.send(&Frame::Control(Control::Request(Request::Store { path, name, user })))?;
    let mut sender = Progress::new(Sender::new(&mut channel, Direction::ToGuest));
    let packed = archive::pack(source, &mut sender);
    let summary = match packed {
        Ok(summary) => summary,
        // The guest may have said why it stopped.
        Err(error) => match channel.read() {
            Ok(Frame::Control(Control::Failed(failure))) => return Err(refused(&failure.message)),
            _ => return Err(error),
        },
    };
    channel.send(&Frame::Control(Control::InputEnd))?;
    loop {
        match channel.read()? {
            Frame::Control(Control::Ended(_)) => return Ok(summary),
            Frame::Control(Control::Failed(failure)) => return Err(refused(&failure.message)),
            Frame::Control(Control::Taken { .. }) => {}
            _ => bail!("the agent does not keep to the protocol"),
        }
    }
}

fn fetch(
    socket: &Path,
    path: String,
    destination: &Path,
    guest: &GuestArgs,
) -> anyhow::Result<Summary> {
    // The guest does not choose the name.
    let name = archive::name_of(Path::new(&path));
    let place = Place::find(destination, name.as_deref())?;
    let mut channel = guest::connect(socket, guest)?;
    channel.send(&Frame::Control(Control::Request(Request::Fetch { path })))?;
    channel.send_rest()?;
    let mut receiver = Receiver::new(&mut channel, Direction::ToHost);
    let shows = io::stderr().is_terminal();
    let unpacked = place.unpack(&mut receiver, &mut |bytes| show(shows, bytes));
    clear(shows);
    // What went wrong here, else what went wrong there.
    match (unpacked, receiver.last()) {
        (_, Some(Control::Failed(failure))) => Err(refused(&failure.message)),
        (Ok(summary), _) => match receiver.finish()? {
            Control::Ended(_) => Ok(summary),
            Control::Failed(failure) => Err(refused(&failure.message)),
            _ => bail!("the agent does not keep to the protocol"),
        },
        (Err(error), _) => Err(error),
    }
}

/// The guest's words, without what could control a terminal.
fn refused(message: &str) -> anyhow::Error {
    anyhow!("the guest: {}", ebb_program::printable(message))
}

/// Shows on a terminal how much was written.
struct Progress<W> {
    writer: W,
    bytes: u64,
    shown: u64,
    shows: bool,
}

impl<W> Progress<W> {
    fn new(writer: W) -> Self {
        Self { writer, bytes: 0, shown: 0, shows: io::stderr().is_terminal() }
    }
}

impl<W: io::Write> io::Write for Progress<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.writer.write(bytes)?;
        self.bytes += written as u64;
        if self.bytes - self.shown >= SHOWN_BYTES {
            self.shown = self.bytes;
            show(self.shows, self.bytes);
        }
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        clear(self.shows);
        self.writer.flush()
    }
}

/// Interval of the progress shown.
const SHOWN_BYTES: u64 = 1 << 20;

fn show(shows: bool, bytes: u64) {
    if shows {
        let _ = write!(io::stderr(), "\r{:>8}", ByteSize::from_bytes(bytes).rounded().to_string());
    }
}

fn clear(shows: bool) {
    if shows {
        let _ = write!(io::stderr(), "\r        \r");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guests_path_follows_its_socket() {
        let guest =
            |socket: &str, path: &str| End::Guest { socket: socket.into(), path: path.to_owned() };
        assert_eq!("/run/a.sock:/etc/x".parse(), Ok(guest("/run/a.sock", "/etc/x")));
        assert_eq!("vm:/".parse(), Ok(guest("vm", "/")));
        for host in ["file", "/a/b:c", ":/x", "a:b"] {
            assert_eq!(host.parse(), Ok(End::Host(host.into())));
        }
    }
}

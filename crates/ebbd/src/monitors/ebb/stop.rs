//! A machine is stopped and kept: it stands still, a snapshot is written, and it ends. If any of
//! that fails, it goes on.

use std::fs::{self, File};
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use hyper::Method;
use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, Interest};
use tokio::net::UnixStream;

use crate::monitors::http::Http;
use crate::monitors::{MOST_BYTES, Trouble, repeatable};
use crate::rights::User;

/// Where snapshots are written.
#[derive(Clone, Debug)]
pub(super) struct Stop {
    socket: PathBuf,
    /// The snapshot.
    path: PathBuf,
}

impl Stop {
    /// For the machine behind `socket`, whose snapshot is to be in `directory`; `None` if its
    /// socket is not an operator's: another user's monitor could fill the disk.
    pub(super) fn new(socket: &Path, directory: &Path) -> Option<Self> {
        let owner = fs::symlink_metadata(socket).ok()?.uid();
        let path = with_ending(&directory.join(socket.file_stem()?), ".snapshot");
        User::of(owner).is_operator().then(|| Self { socket: socket.to_owned(), path })
    }

    /// Stops it. Its snapshot replaces an earlier one of the same name.
    pub(super) async fn run(&self, size_bytes: u64) -> Result<(), Trouble> {
        let failed =
            |error: io::Error| Trouble::Refused(format!("{}: {error}", self.path.display()));
        let directory = self.path.parent().unwrap_or(Path::new("/"));
        let room = rustix::fs::statvfs(directory).map_err(|error| failed(error.into()))?;
        let room_bytes = room.f_bavail.saturating_mul(room.f_frsize);
        if room_bytes < size_bytes {
            let text = format!("{} has {room_bytes} bytes left", directory.display());
            return Err(Trouble::Refused(text));
        }
        let mut http = Http::connect(&self.socket).await?;
        http.ask(Method::PUT, "/vm/pause", None).await?.accepted()?;
        let kept = self.keep(directory).await.map_err(|trouble| match trouble {
            Kept::File(error) => failed(error),
            Kept::Monitor(trouble) => trouble,
        });
        let target = if kept.is_ok() { "/vm/kill" } else { "/vm/resume" };
        let answer = http.ask(Method::PUT, target, None).await.and_then(|it| it.accepted());
        kept.and(answer)
    }

    /// Writes the snapshot of a machine that stands still. Until all of it is on the disk, the file
    /// has no name (open(2), `O_TMPFILE`): nothing is left of it if this process is killed.
    async fn keep(&self, directory: &Path) -> Result<(), Kept> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::TMPFILE;
        let file = rustix::fs::open(directory, flags, Mode::RUSR | Mode::WUSR);
        let file = File::from(file.map_err(io::Error::from)?);
        let answer = send(&self.socket, &json!({ "path": self.path }).to_string(), &file).await?;
        if answer.split(' ').nth(1) != Some("200") {
            let text = answer.split_once("\r\n\r\n").map_or(&*answer, |(_, body)| body);
            return Err(Kept::Monitor(Trouble::Refused(repeatable(text))));
        }
        let path = self.path.clone();
        let named = tokio::task::spawn_blocking(move || publish(&file, &path));
        named.await.map_err(io::Error::from)??;
        Ok(())
    }
}

fn with_ending(path: &Path, ending: &str) -> PathBuf {
    let mut path = path.as_os_str().to_owned();
    path.push(ending);
    path.into()
}

/// Gives a file its name, which an earlier snapshot may have.
fn publish(file: &File, path: &Path) -> io::Result<()> {
    file.sync_all()?;
    let partial = with_ending(path, ".partial");
    // Of a process that was killed just here.
    let _ = fs::remove_file(&partial);
    let open = format!("/proc/self/fd/{}", file.as_raw_fd());
    rustix::fs::linkat(CWD, open, CWD, &partial, AtFlags::SYMLINK_FOLLOW)?;
    fs::rename(&partial, path)?;
    File::open(path.parent().unwrap_or(Path::new("/")))?.sync_all()
}

/// Why there is no snapshot.
enum Kept {
    File(io::Error),
    Monitor(Trouble),
}

impl From<io::Error> for Kept {
    fn from(error: io::Error) -> Self {
        Self::File(error)
    }
}

/// Sends the request for a snapshot, with the file (`SCM_RIGHTS`, unix(7)), and returns the answer.
async fn send(socket: &Path, body: &str, file: &File) -> Result<String, Kept> {
    let gone = |error: io::Error| Kept::Monitor(Trouble::Gone(error.to_string()));
    let mut stream = UnixStream::connect(socket).await.map_err(gone)?;
    let text = format!(
        "PUT /vm/snapshot HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    );
    // It is shorter than what a new connection takes at once.
    let pass = || {
        let files = [file.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&files));
        let bytes = [IoSlice::new(text.as_bytes())];
        Ok(sendmsg(&stream, &bytes, &mut control, SendFlags::NOSIGNAL)?)
    };
    let sent = stream.async_io(Interest::WRITABLE, pass).await.map_err(gone)?;
    if sent < text.len() {
        return Err(gone(io::ErrorKind::WriteZero.into()));
    }
    let mut answer = Vec::new();
    let mut limited = (&mut stream).take(MOST_BYTES as u64);
    limited.read_to_end(&mut answer).await.map_err(gone)?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

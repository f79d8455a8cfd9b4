//! Connections of a guest to sockets of the host: the monitor names a port, its companion connects.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};

use ebb_local_io::stream_socket;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::rand::{GetRandomFlags, getrandom};

/// The directory of a device's socket, and its name there.
pub(super) fn place(path: &Path) -> io::Result<(OwnedFd, OsString)> {
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = rustix::fs::open(parent.unwrap_or(Path::new(".")), flags, Mode::empty())?;
    Ok((directory, name.to_owned()))
}

/// A guest that connects to this port of the host receives random bytes and then nothing, until
/// a restore resets the connection: its agent then knows that there may be another machine with the
/// same random numbers. A server of the host on this port comes first.
pub const RANDOM_PORT: u32 = 3771;
/// Random bytes for a guest, whose pool makes no use of more.
const RANDOM_BYTES: usize = 32;

/// The companion's side.
#[derive(Debug)]
pub(super) struct VsockServer {
    /// The directory of the sockets.
    pub directory: OwnedFd,
    /// Beginning of their names.
    pub name: OsString,
    /// The other end of the last connection to [`RANDOM_PORT`]: there is one at a time.
    pub random: Option<OwnedFd>,
}

impl VsockServer {
    /// Connects to the socket of a port; the result does not block. A full queue of its listener is
    /// a refusal: a guest must not wait for another one's server.
    pub(super) fn connect(&mut self, port: u32) -> io::Result<OwnedFd> {
        let mut path = PathBuf::from(format!("/proc/self/fd/{}", self.directory.as_raw_fd()));
        let mut name = self.name.clone();
        name.push(format!("_{port}"));
        path.push(name);
        let stream = stream_socket()?;
        match rustix::net::connect(&stream, &SocketAddrUnix::new(&path)?) {
            Err(Errno::NOENT) if port == RANDOM_PORT => self.random_bytes(),
            connected => Ok(connected.map(|()| stream)?),
        }
    }

    fn random_bytes(&mut self) -> io::Result<OwnedFd> {
        let mut bytes = [0; RANDOM_BYTES];
        getrandom(&mut bytes, GetRandomFlags::empty())?;
        let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (ours, theirs) = rustix::net::socketpair(family, kind, flags, None)?;
        rustix::io::write(&ours, &bytes)?;
        self.random = Some(ours);
        Ok(theirs)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    #[test]
    fn a_guest_gets_random_bytes_unless_a_server_listens() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("vsock");
        let (place, name) = place(&path).unwrap();
        let mut server = VsockServer { directory: place, name, random: None };
        let mut connect = || server.connect(RANDOM_PORT).map(UnixStream::from);
        let read = |stream: &mut UnixStream| {
            let mut bytes = [0; RANDOM_BYTES];
            stream.read_exact(&mut bytes).unwrap();
            bytes
        };
        let waits = |stream: &mut UnixStream| {
            let end = stream.read(&mut [0]);
            end.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
        };
        let mut first = connect().unwrap();
        let bytes = read(&mut first);
        assert!(waits(&mut first), "it stays open");
        let mut second = connect().unwrap();
        assert_ne!(read(&mut second), bytes);
        assert!(waits(&mut second) && !waits(&mut first), "there is one at a time");

        let server_path = directory.path().join("vsock_3771");
        let _listener = UnixListener::bind(&server_path).unwrap();
        let mut third = connect().unwrap();
        assert!(waits(&mut third), "nothing is sent in its place");
        let other = server.connect(RANDOM_PORT + 1).map(drop).unwrap_err();
        assert_eq!(other.kind(), io::ErrorKind::NotFound);
    }
}

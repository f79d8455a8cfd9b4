//! passt: a process that connects a guest with the host's network by ordinary sockets, without any
//! rights (<https://passt.top>).
//!
//! It is started before the monitor gives up its rights, with one end of a socket pair, and ends
//! when the other end is closed.

use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStderr, Command, Stdio};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::announce::probe;
use super::error::NetError;
use super::parts::Port;
use super::stream::{Progress, Stream};
use crate::config::net::PortForward;
use crate::config::{MacAddress, NetConfig};

const PROGRAM: &str = "passt";
/// Time limit for its first answer; it takes about 30 ms.
const START_LIMIT: Timespec = Timespec { tv_sec: 5, tv_nsec: 0 };
/// Most of its words in an error.
const MOST_SAID_BYTES: u64 = 4096;
/// Longest line of it in the log, in characters.
const MOST_LINE_CHARACTERS: usize = 200;

/// A started process.
pub(super) struct Passt {
    child: Child,
    stderr: ChildStderr,
}

/// Starts it. Returns the monitor's end of the connection.
pub(super) fn start(net: &NetConfig, ports: &[PortForward]) -> Result<(Stream, Passt), NetError> {
    let socket_error = |source: io::Error| NetError::Failed {
        backend: "user".to_owned(),
        action: "create a socket",
        source,
    };
    let flags = SocketFlags::CLOEXEC;
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .map_err(|error| socket_error(error.into()))?;
    rustix::io::ioctl_fionbio(&ours, true).map_err(|error| socket_error(error.into()))?;
    let mut child = command(net, ports, theirs).spawn().map_err(NetError::NoPasst)?;
    let stderr = child.stderr.take().ok_or_else(|| socket_error(io::ErrorKind::NotFound.into()))?;
    Ok((Stream::new(Port::Open(ours.into())), Passt { child, stderr }))
}

fn command(net: &NetConfig, ports: &[PortForward], socket: OwnedFd) -> Command {
    let mut command = Command::new(PROGRAM);
    command
        .args(["--foreground", "--quiet", "--stderr", "--fd", "0"])
        // Otherwise the guest reaches services that listen on the host's loopback interface, at the
        // gateway's address.
        .arg("--no-map-gw")
        .stdin(Stdio::from(socket))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        // Signals of the terminal are for the monitor.
        .process_group(0);
    if let Some(mtu) = net.mtu {
        command.args(["--mtu", &mtu.to_string()]);
    }
    if !ports.is_empty() {
        let spec = |port: &PortForward| format!("{}:{}", port.host, port.guest);
        command.args(["--tcp-ports", &ports.iter().map(spec).collect::<Vec<_>>().join(",")]);
    }
    command
}

impl Passt {
    /// Waits until it works: it answers a question for an address, or ends. The question also shows
    /// it the guest's address.
    pub(super) fn wait_ready(
        &mut self,
        stream: &mut Stream,
        mac: MacAddress,
    ) -> Result<(), NetError> {
        if let Some(socket) = stream.port.fd() {
            let frame = probe(mac);
            let bytes = [&(frame.len() as u32).to_be_bytes()[..], &frame].concat();
            // A socket that nothing has been written to takes this at once. If its end is closed,
            // that is found below.
            let _ = rustix::io::write(socket, &bytes);
            let mut fds = [PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::IN)];
            if let Ok(0) = poll(&mut fds, Some(&START_LIMIT)) {
                // It has no IPv4, perhaps.
                return Ok(());
            }
        }
        let received = stream.receive();
        while let Ok(Some(frame)) = stream.frame() {
            let length = frame.len();
            stream.skip(length);
        }
        if received == Ok(Progress::Some) {
            return Ok(());
        }
        // It has closed its end, so this does not take long.
        let _ = self.child.kill();
        let code = self.child.wait();
        let mut said = Vec::new();
        let _ = self.stderr.by_ref().take(MOST_SAID_BYTES).read_to_end(&mut said);
        let lines: Vec<_> = lines(&said).collect();
        let said = match (lines.is_empty(), code) {
            (false, _) => lines.join("; "),
            (true, Ok(code)) => code.to_string(),
            (true, Err(error)) => error.to_string(),
        };
        Err(NetError::PasstEnded { said })
    }

    /// Its words, to be logged by [`log`] on a thread of its own. The process is not waited for:
    /// the monitor can neither reap nor kill it once its system calls are filtered.
    pub(super) fn into_words(self) -> ChildStderr {
        self.stderr
    }
}

/// Logs what it says, until it ends, at a limited rate.
pub(super) fn log(device: &str, mut words: impl Read) {
    let mut buffer = [0; 1024];
    loop {
        match words.read(&mut buffer) {
            Ok(0) => return,
            Ok(length) => {
                for line in lines(&buffer[..length]) {
                    crate::devices::guest_log!("{device}: passt: {line}");
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}

/// Its lines, without those that say nothing, and without control characters.
fn lines(said: &[u8]) -> impl Iterator<Item = String> {
    // A host without a system log, and a passt that root has started.
    let idle = ["Failed to send ", "Don't run as root. Changing to nobody"];
    String::from_utf8_lossy(said)
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && !idle.iter().any(|idle| line.starts_with(idle)))
        .map(|line| line.chars().take(MOST_LINE_CHARACTERS).filter(|c| !c.is_control()).collect())
        .collect::<Vec<String>>()
        .into_iter()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start_with(text: &str) -> Result<(Stream, Passt), NetError> {
        let net: NetConfig = text.parse().unwrap();
        let crate::config::NetBackend::User(ports) = net.backend.clone() else { panic!("{text}") };
        let (mut stream, mut passt) = start(&net, &ports)?;
        passt.wait_ready(&mut stream, MacAddress::random())?;
        Ok((stream, passt))
    }

    /// The real program, from Debian's package.
    #[test]
    fn passt_answers_and_ends_with_its_socket() {
        let (stream, mut passt) = start_with("user,mtu=9000").unwrap();
        drop(stream);
        assert!(passt.child.wait().unwrap().success());
    }

    #[test]
    fn a_passt_that_ends_at_its_start_is_reported() {
        let net: NetConfig = "user".parse().unwrap();
        let (mut stream, mut passt) = start(&net, &[]).unwrap();
        passt.child.kill().unwrap();
        passt.child.wait().unwrap();
        let error = passt.wait_ready(&mut stream, MacAddress::random()).unwrap_err().to_string();
        assert!(error.contains("--net user, has ended: signal: 9"), "{error}");
    }

    #[test]
    fn its_words_are_cleaned() {
        let said = b"Failed to send 8 bytes to syslog\n\x1b[1mno\n\n\
            Don't run as root. Changing to nobody...\n";
        assert_eq!(lines(said).collect::<Vec<_>>(), ["[1mno"]);
    }
}

//! The agent in a guest (`ebb-guest-agent`), reached through the machine's vsock path.

use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use ebb_guest_agent::channel::Channel;
use ebb_guest_agent::wire::{Control, Ended, Exec, Frame, PORT, Request};
use ebb_vmm::api::{Client, VmInfo};
use rustix::event::{PollFd, Timespec, poll};
use rustix::io::Errno;

/// Time for the monitor and the guest to answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// Interval of attempts with `--wait`.
const RETRY: Duration = Duration::from_millis(100);
/// Longest line of the monitor's answer.
const MAX_LINE_BYTES: usize = 32;
/// How much of a command's standard error is kept.
const MAX_ERRORS_BYTES: usize = 4096;

/// How the guest's agent is reached.
#[derive(Debug, clap::Args)]
pub struct GuestArgs {
    /// SOCKET is the machine's vsock path, not its API socket (a machine of `ebb firecracker`)
    #[arg(long)]
    vsock: bool,
    /// Port of the agent
    #[arg(long, value_name = "PORT", default_value_t = PORT)]
    port: u32,
    /// Wait up to SECONDS for a guest that is booting
    #[arg(long, value_name = "SECONDS", default_value_t = 0)]
    wait: u64,
}

impl Default for GuestArgs {
    fn default() -> Self {
        Self { vsock: false, port: PORT, wait: 0 }
    }
}

/// Connects to the agent of the machine behind `socket`.
pub fn connect(socket: &Path, args: &GuestArgs) -> anyhow::Result<Channel> {
    let deadline = Instant::now() + Duration::from_secs(args.wait);
    loop {
        let connected = vsock_path(socket, args).and_then(|path| dial(&path, args.port));
        match connected {
            Err(_) if Instant::now() < deadline => std::thread::sleep(RETRY),
            Err(error) if args.wait > 0 => {
                return Err(error.context(format!("no agent answered within {} s", args.wait)));
            }
            Err(error) => return Err(error),
            Ok(channel) => return Ok(channel),
        }
    }
}

fn vsock_path(socket: &Path, args: &GuestArgs) -> anyhow::Result<PathBuf> {
    if args.vsock {
        return Ok(socket.to_owned());
    }
    let vm: VmInfo = Client::new(socket, PATIENCE).get("/vm")?;
    let vsock = vm.vsock;
    let vsock = vsock.context("the machine has no vsock: start it with --vsock cid=3,path=PATH")?;
    Ok(vsock.path.into())
}

/// Nothing listens on the agent's port of a guest.
#[derive(Debug, thiserror::Error)]
#[error(
    "no agent listens on port {0} of the guest: install ebb-guest-agent in it (docs/guests.md), or \
     use --wait while it boots"
)]
pub struct NoAgent(u32);

/// Asks for the port, as Firecracker's clients do.
pub fn dial(path: &Path, port: u32) -> anyhow::Result<Channel> {
    let describe = || format!("cannot reach the guest through {}", path.display());
    let mut stream = UnixStream::connect(path).with_context(describe)?;
    stream.set_read_timeout(Some(PATIENCE)).with_context(describe)?;
    stream.write_all(format!("CONNECT {port}\n").as_bytes()).with_context(describe)?;
    let mut line = Vec::new();
    let mut byte = [0];
    while !line.ends_with(b"\n") && line.len() < MAX_LINE_BYTES {
        // Byte by byte: what follows the line is the agent's.
        if stream.read(&mut byte).with_context(describe)? == 0 {
            return Err(NoAgent(port).into());
        }
        line.push(byte[0]);
    }
    if !line.starts_with(b"OK ") {
        bail!(
            "{} is not a vsock path of a machine: it answers '{}'",
            path.display(),
            line.escape_ascii()
        );
    }
    stream.set_read_timeout(None).with_context(describe)?;
    Channel::new(OwnedFd::from(stream)).with_context(describe)
}

/// Runs a command in the guest until `deadline`, after which the agent ends it. Returns how it has
/// ended, and the beginning of its standard error; nothing after the deadline.
pub fn run(
    channel: &mut Channel,
    argv: Vec<String>,
    deadline: Instant,
) -> anyhow::Result<Option<(Ended, String)>> {
    carry_out(channel, Request::Exec(Exec { argv, ..Exec::default() }), deadline)
}

/// Has the agent carry out a request without input; returns as [`run`].
pub fn carry_out(
    channel: &mut Channel,
    request: Request,
    deadline: Instant,
) -> anyhow::Result<Option<(Ended, String)>> {
    channel.queue_control(Control::Request(request));
    channel.queue_control(Control::InputEnd);
    let mut errors = Vec::new();
    loop {
        while let Some(frame) = channel.next_frame()? {
            match frame {
                Frame::Errors(data) => {
                    let room = MAX_ERRORS_BYTES - errors.len();
                    errors.extend(data.into_iter().take(room));
                }
                Frame::Control(Control::Ended(ended)) => {
                    return Ok(Some((ended, String::from_utf8_lossy(&errors).into_owned())));
                }
                Frame::Control(Control::Failed(failure)) => {
                    bail!("the agent: {}", ebb_program::printable(&failure.message));
                }
                Frame::Control(Control::Started { .. } | Control::Taken { .. })
                | Frame::Output(_) => {}
                _ => bail!("the agent does not keep to the protocol"),
            }
            if Instant::now() >= deadline {
                return Ok(None);
            }
        }
        channel.flush()?;
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(None);
        }
        let left = Timespec::try_from(left).context("the time limit")?;
        match poll(&mut [PollFd::new(&*channel, channel.wanted())], Some(&left)) {
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => channel.receive()?,
            Err(error) => return Err(error).context("cannot wait for the agent"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use ebb_guest_agent::wire::{Failure, FailureKind};

    use super::*;

    #[test]
    fn the_agent_asks_for_random_bytes_where_the_monitor_has_them() {
        assert_eq!(ebb_guest_agent::wire::RANDOM_PORT, ebb_vmm::isolation::RANDOM_PORT);
    }

    /// Runs a command with an agent that answers like this, again and again if `endless`.
    fn run_with(
        limit_ms: u64,
        frames: &[Frame],
        endless: bool,
    ) -> anyhow::Result<Option<(Ended, String)>> {
        let (here, mut there) = UnixStream::pair().unwrap();
        let mut bytes = Vec::new();
        for frame in frames {
            frame.encode(&mut bytes);
        }
        let agent = thread::spawn(move || {
            while there.write_all(&bytes).is_ok() && endless {}
            there
        });
        let mut channel = Channel::new(OwnedFd::from(here)).unwrap();
        let deadline = Instant::now() + Duration::from_millis(limit_ms);
        let ended = run(&mut channel, vec!["true".to_owned()], deadline);
        drop(channel);
        agent.join().unwrap();
        ended
    }

    #[test]
    fn a_command_ends_whatever_the_agent_says() {
        let control = Frame::Control;
        let ended = control(Control::Ended(Ended::Code(3)));
        let errors = Frame::Errors(vec![b'x'; MAX_ERRORS_BYTES - 1]);
        let said = run_with(60_000, &[errors.clone(), errors, ended], false).unwrap();
        assert_eq!(said, Some((Ended::Code(3), "x".repeat(MAX_ERRORS_BYTES))));

        assert_eq!(run_with(20, &[], false).unwrap(), None);
        assert_eq!(run_with(20, &[Frame::Output(vec![0; 4096])], true).unwrap(), None);

        let message = "no \u{1b}[31msuch program".to_owned();
        let failure = Failure { kind: FailureKind::NotFound, message };
        let error = run_with(60_000, &[control(Control::Failed(failure))], false).unwrap_err();
        let error = error.to_string();
        assert!(error.contains("such program") && !error.contains('\u{1b}'), "{error}");
        let error = run_with(60_000, &[control(Control::InputEnd)], false).unwrap_err();
        assert!(error.to_string().contains("protocol"), "{error}");
    }
}

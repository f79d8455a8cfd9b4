//! Accepts sessions.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use vsock::{VMADDR_CID_ANY, VMADDR_CID_HOST, VsockListener};

use crate::account::Account;
use crate::archive::{self, Place};
use crate::channel::{Channel, ChannelError};
use crate::exec;
use crate::fork;
use crate::reseed;
use crate::transfer::{Direction, Receiver, Sender};
use crate::wire::{Control, Ended, Failure, FailureKind, Frame, Request};

/// Most sessions at a time.
const MAX_SESSIONS: usize = 1024;

/// Serves the host's connections to `port` until the listening socket fails.
///
/// # Errors
/// There is no virtio-vsock, or the port is taken.
pub fn serve(port: u32) -> io::Result<()> {
    let listener = VsockListener::bind_with_cid_port(VMADDR_CID_ANY, port)?;
    if let Err(error) = reseed::spawn() {
        eprintln!("ebb-guest-agent: random numbers are not reseeded after a restore: {error}");
    }
    let sessions = Arc::new(AtomicUsize::new(0));
    loop {
        let (stream, peer) = match listener.accept() {
            Ok(accepted) => accepted,
            // The peer may have gone, or a limit be reached for a moment.
            Err(error) if is_temporary(&error) => {
                std::thread::sleep(std::time::Duration::from_millis(10));
                continue;
            }
            Err(error) => return Err(error),
        };
        // Users of the guest can connect as well, and the agent has root's rights.
        if peer.cid() != VMADDR_CID_HOST {
            continue;
        }
        if sessions.fetch_add(1, Ordering::AcqRel) >= MAX_SESSIONS {
            sessions.fetch_sub(1, Ordering::AcqRel);
            continue;
        }
        let ended = sessions.clone();
        let spawned = std::thread::Builder::new().name("session".to_owned()).spawn(move || {
            if let Err(error) = session(OwnedFd::from(stream)) {
                eprintln!("ebb-guest-agent: a session was broken off: {error}");
            }
            ended.fetch_sub(1, Ordering::AcqRel);
        });
        if spawned.is_err() {
            sessions.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

fn is_temporary(error: &io::Error) -> bool {
    use rustix::io::Errno;
    matches!(
        Errno::from_io_error(error),
        Some(
            Errno::CONNABORTED
                | Errno::CONNRESET
                | Errno::INTR
                | Errno::MFILE
                | Errno::NFILE
                | Errno::NOBUFS
                | Errno::NOMEM
                | Errno::PROTO
        )
    )
}

/// Carries out the request of one connection.
///
/// # Errors
/// The connection failed. Failures of the request are sent to the host.
pub fn session(socket: OwnedFd) -> Result<(), ChannelError> {
    let mut channel = Channel::new(socket)?;
    let Frame::Control(Control::Request(request)) = channel.read()? else {
        return Err(ChannelError::Protocol("no request"));
    };
    match request {
        Request::Exec(request) => exec::run(&mut channel, request),
        Request::Fetch { path } => {
            let mut sender = Sender::new(&mut channel, Direction::ToHost);
            let result = archive::pack(Path::new(&path), &mut sender);
            finish(&mut channel, result)
        }
        Request::At(moment) => {
            let result = fork::at(moment, Path::new(fork::SCRIPTS));
            finish(&mut channel, result.map(|()| archive::Summary::default()))
        }
        Request::Store { path, name, user } => {
            let mut receiver = Receiver::new(&mut channel, Direction::ToGuest);
            let result = store(&path, &name, user.as_deref(), &mut receiver);
            // The host reads the answer after it has sent everything.
            match receiver.finish()? {
                Control::InputEnd => finish(&mut channel, result),
                _ => Err(ChannelError::Protocol("a message out of turn")),
            }
        }
    }
}

fn store(
    path: &str,
    name: &str,
    user: Option<&str>,
    receiver: &mut Receiver<'_>,
) -> anyhow::Result<archive::Summary> {
    let mut place = Place::find(Path::new(path), Some(name.as_ref()))?;
    if user.is_some() {
        place = place.owned_by(&Account::find(user).map_err(anyhow::Error::msg)?);
    }
    place.unpack(receiver, &mut |_| {})
}

fn finish(
    channel: &mut Channel,
    result: anyhow::Result<archive::Summary>,
) -> Result<(), ChannelError> {
    match result {
        Ok(summary) => {
            if summary.skipped > 0 {
                let text = format!("{} special files were left out\n", summary.skipped);
                channel.queue(&Frame::Errors(text.into_bytes()));
            }
            channel.queue_control(Control::Ended(Ended::Code(0)));
        }
        Err(error) => {
            let failure = Failure { kind: FailureKind::Other, message: format!("{error:#}") };
            channel.queue_control(Control::Failed(failure));
        }
    }
    channel.send_rest()
}

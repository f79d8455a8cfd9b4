//! What a guest's agent is told of checkpoints: it runs the scripts in the guest's `fork.d`, and
//! makes the random numbers of the machines on both sides new.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use ebb_guest_agent::wire::{Ended, Moment, NewMac, Request};
use ebb_vmm::api::{Client, VmInfo, VmState};
use ebb_vmm::config::Switch;
use rustix::rand::{GetRandomFlags, getrandom};

use crate::guest::{self, NoAgent};

/// How long the scripts of a guest may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// Tells the agent behind a vsock path; returns false if the guest has none.
fn tell(vsock: &Path, moment: Moment) -> anyhow::Result<bool> {
    let mut channel = match guest::dial(vsock, ebb_guest_agent::wire::PORT) {
        Err(error) if error.is::<NoAgent>() => return Ok(false),
        channel => channel?,
    };
    let deadline = Instant::now() + PATIENCE;
    match guest::carry_out(&mut channel, Request::At(moment), deadline)? {
        Some((Ended::Code(0), _)) => Ok(true),
        Some(_) => bail!("the agent does not keep to the protocol"),
        None => bail!("the scripts of the guest's fork.d have not ended after {PATIENCE:?}"),
    }
}

/// Makes a checkpoint of the machine behind `client`, with its guest prepared for it if that is
/// wanted, and it runs and has an agent.
pub fn around<T>(
    client: &Client,
    hooks: Switch,
    make: impl FnOnce() -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    if !hooks.is_on() {
        return make();
    }
    let vm: VmInfo = client.get("/vm")?;
    let vsock = vm.vsock.filter(|vsock| vsock.driver && vm.state == VmState::Running);
    let Some(vsock) = vsock.map(|vsock| PathBuf::from(vsock.path)) else { return make() };
    let has_agent = tell(&vsock, Moment::Before)
        .context("the guest is not ready for a checkpoint (--hooks off does not ask it)");
    // Also after a script that has failed: those before it have done their work.
    let is_to_continue = !matches!(has_agent, Ok(false));
    let made = has_agent.and_then(|_| make());
    if is_to_continue && let Err(error) = go_on(&vsock) {
        tracing::warn!("the guest's agent, after the checkpoint: {error:#}");
    }
    made
}

fn go_on(vsock: &Path) -> anyhow::Result<bool> {
    tell(vsock, Moment::Continue { random: random()? })
}

fn random() -> anyhow::Result<[u8; 32]> {
    let mut random = [0; 32];
    getrandom(&mut random, GetRandomFlags::empty())?;
    Ok(random)
}

/// Tells the agent of a new machine which one it is, and its network addresses that are new.
/// Returns whether it has confirmed that they and its random numbers are its own; false if the
/// guest has no agent.
///
/// A guest that has not got round to ending the connections of the first machine may end this one
/// with them. It has done that then, and is asked once more.
pub fn in_fork(vsock: &Path, number: usize, macs: Vec<NewMac>) -> anyhow::Result<bool> {
    let number = u32::try_from(number)?;
    let moment = Moment::Fork { number, random: random()?, macs };
    Ok(tell(vsock, moment.clone())? || tell(vsock, moment)?)
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader, Write as _};
    use std::os::unix::net::UnixListener;

    use ebb_guest_agent::channel::Channel;
    use ebb_guest_agent::wire::{Control, Frame};

    use super::*;

    /// A guest that ends the first connections, and answers later ones.
    fn asked(ended: usize) -> bool {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("vsock");
        let listener = UnixListener::bind(&path).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for index in 0..2 {
                    let (stream, _) = listener.accept().unwrap();
                    let mut stream = BufReader::new(stream);
                    stream.read_line(&mut String::new()).unwrap();
                    if index < ended {
                        continue;
                    }
                    let mut stream = stream.into_inner();
                    stream.write_all(b"OK 1024\n").unwrap();
                    let mut channel = Channel::new(stream.try_clone().unwrap().into()).unwrap();
                    let Frame::Control(Control::Request(request)) = channel.read().unwrap() else {
                        panic!("no request");
                    };
                    assert!(matches!(request, Request::At(Moment::Fork { number: 7, .. })));
                    let mut bytes = Vec::new();
                    Frame::Control(Control::Ended(Ended::Code(0))).encode(&mut bytes);
                    stream.write_all(&bytes).unwrap();
                    break;
                }
            });
            in_fork(&path, 7, Vec::new()).unwrap()
        })
    }

    #[test]
    fn a_connection_that_ends_with_those_of_the_first_machine_is_made_again() {
        assert!(asked(0));
        assert!(asked(1));
        assert!(!asked(2), "there is no agent");
    }
}

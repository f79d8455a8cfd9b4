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
pub fn in_fork(vsock: &Path, number: usize, macs: Vec<NewMac>) -> anyhow::Result<bool> {
    let number = u32::try_from(number)?;
    tell(vsock, Moment::Fork { number, random: random()?, macs })
}

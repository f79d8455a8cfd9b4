//! The agent's command line.

use clap::{CommandFactory as _, Parser};

use crate::wire;

/// Runs commands and moves files in this guest for `ebb exec` and `ebb cp` on its host
///
/// The host connects through virtio-vsock. The user who runs the machine's monitor controls the
/// machine already; other users of the host need access to its vsock path.
#[derive(Debug, Parser)]
#[command(name = "ebb-guest-agent", version)]
pub struct Args {
    /// Port to listen on
    #[arg(long, default_value_t = wire::PORT)]
    pub port: u32,
}

/// The command line, for the man page.
pub fn command() -> clap::Command {
    Args::command()
}

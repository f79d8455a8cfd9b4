//! `ebb-guest-agent`: runs in a guest and serves `ebb exec` and `ebb cp`.

use std::process::ExitCode;

use clap::Parser;
use ebb_guest_agent::{server, wire};

/// Runs commands and moves files in this guest for `ebb exec` and `ebb cp` on its host
///
/// The host connects through virtio-vsock. The user who runs the machine's monitor controls the
/// machine already; other users of the host need access to its vsock path.
#[derive(Debug, Parser)]
#[command(name = "ebb-guest-agent", version)]
struct Args {
    /// Port to listen on
    #[arg(long, default_value_t = wire::PORT)]
    port: u32,
}

fn main() -> ExitCode {
    let args = Args::parse();
    match server::serve(args.port) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!(
                "ebb-guest-agent: cannot listen on vsock port {}: {error}; start the machine with \
                 --vsock, and load the module vmw_vsock_virtio_transport",
                args.port
            );
            ExitCode::FAILURE
        }
    }
}

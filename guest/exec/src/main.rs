//! `ebb-guest-agent`: runs in a guest and serves `ebb exec` and `ebb cp`.

use std::process::ExitCode;

use clap::Parser as _;
use ebb_guest_agent::command_line::Args;
use ebb_guest_agent::server;

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

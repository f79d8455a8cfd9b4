//! The init of a virtual host: sets up the system, serves the control channel, reaps orphans and
//! powers off.

mod programs;
mod server;
mod setup;
mod steady;
mod visits;

use std::process;

use rustix::process::{Pid, WaitOptions, wait};
use rustix::system::{RebootCommand, reboot};

/// Runs as process 1 of a virtual host; powers the machine off at the end.
///
/// Process 1 itself only reaps orphans. The server is its child, so that each can wait for its own
/// children.
pub fn init_main() -> ! {
    let mut warnings = setup::prepare();
    // Owned by process 1, which lives as long as the machine.
    let _steady = steady::SteadyMachine::create().inspect_err(|error| {
        warnings.push(format!("cannot keep a virtual machine of KVM: {error}"));
    });
    for warning in &warnings {
        eprintln!("ebb init: {warning}");
    }
    // SAFETY: the process has a single thread here, so that the child may run any code.
    match unsafe { libc::fork() } {
        0 => {
            if let Err(error) = server::serve(warnings) {
                eprintln!("ebb init: control channel: {error}");
                process::exit(1);
            }
            process::exit(0);
        }
        server if server > 0 => {
            if let Err(error) = visits::start() {
                eprintln!("ebb init: visits of processors: {error}");
            }
            collect_until(server);
        }
        _ => eprintln!("ebb init: fork failed"),
    }
    loop {
        if let Err(error) = reboot(RebootCommand::PowerOff) {
            eprintln!("ebb init: power-off: {error}");
        }
    }
}

/// Reaps children until the server has ended.
fn collect_until(server: i32) {
    loop {
        match wait(WaitOptions::empty()) {
            Ok(Some((ended, _))) if Some(ended) == Pid::from_raw(server) => return,
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(_) => return,
        }
    }
}

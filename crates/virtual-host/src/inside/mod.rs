//! The init of a virtual host: sets the system up, serves the control channel, collects orphans,
//! powers off.

mod programs;
mod server;
mod setup;
mod steady;

use std::process;

use rustix::process::{Pid, WaitOptions, wait};
use rustix::system::{RebootCommand, reboot};

/// Runs as process 1 of a virtual host; powers the machine off at the end.
///
/// Process 1 itself only collects orphans: the server is its child, so that both can wait for
/// children of their own.
pub fn init_main() -> ! {
    let mut warnings = setup::prepare();
    // Kept by process 1, whose end is the machine's.
    let _steady = steady::SteadyMachine::create().inspect_err(|error| {
        warnings.push(format!("cannot keep a virtual machine of KVM: {error}"));
    });
    for warning in &warnings {
        eprintln!("ebb init: {warning}");
    }
    // SAFETY: the process has a single thread here, so that the child may go on in any way.
    match unsafe { libc::fork() } {
        0 => {
            if let Err(error) = server::serve(warnings) {
                eprintln!("ebb init: control channel: {error}");
                process::exit(1);
            }
            process::exit(0);
        }
        server if server > 0 => collect_until(server),
        _ => eprintln!("ebb init: fork failed"),
    }
    loop {
        if let Err(error) = reboot(RebootCommand::PowerOff) {
            eprintln!("ebb init: power-off: {error}");
        }
    }
}

/// Collects ended children until the server is one of them.
fn collect_until(server: i32) {
    loop {
        match wait(WaitOptions::empty()) {
            Ok(Some((ended, _))) if Some(ended) == Pid::from_raw(server) => return,
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(_) => return,
        }
    }
}

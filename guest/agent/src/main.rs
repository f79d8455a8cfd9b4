//! Init of test guests: mounts file systems, loads modules, and then serves commands on the
//! console.
//!
//! The kernel's command line selects the balloon driver (`ebb.balloon=virtio_balloon`, which is the
//! default, `ebb.balloon=ebb_balloon` or `ebb.balloon=none`), whether Ebb's driver gets its trackers
//! (`ebb.trackers`), and the parameters of all loaded modules (for example
//! `ebb_balloon.tracker=bitmap`).
//!
//! With `ebb.root=DEVICE` the init of the root file system on that disk takes over after the set-up,
//! and the agent is one of its services.
//!
//! As an ordinary process (with a process id other than 1) it uses the same protocol on standard
//! input and output and does not set up the system. Its only argument is the name of the balloon
//! driver that it reports. Its tests run it in this way, and so does the init of a root file system.

mod agent;
mod commands;
mod console;
mod jobs;
mod root;
mod setup;

use std::process::ExitCode;

use ebb_agent::command_line::BalloonDriver;

use console::{Console, Place};

fn main() -> ExitCode {
    let place = if std::process::id() == 1 { Place::Init } else { Place::Process };
    let prepared = match place {
        Place::Init => setup::prepare(),
        Place::Process => setup::Prepared { balloon_driver: told(), ..setup::Prepared::default() },
    };
    if let Some(device) = &prepared.root {
        // The console shows why the driver is missing, if it is.
        prepared.warnings.iter().for_each(|warning| eprintln!("ebb-agent: {warning}"));
        let Err(error) = root::enter(device, prepared.balloon_driver);
        eprintln!("ebb-agent: cannot continue on {device}: {error}");
        return ExitCode::FAILURE;
    }
    let console = match Console::open(place) {
        Ok(console) => console,
        Err(error) => {
            eprintln!("ebb-agent: cannot open the console: {error}");
            return ExitCode::FAILURE;
        }
    };
    match agent::Agent::new(console, place).run(prepared) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("ebb-agent: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The balloon driver that the first argument names.
fn told() -> BalloonDriver {
    let name = std::env::args().nth(1).unwrap_or_default();
    let named = BalloonDriver::ALL.into_iter().find(|driver| driver.name() == name);
    named.unwrap_or(BalloonDriver::None)
}

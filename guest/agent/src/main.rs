//! Init of test guests: mounts file systems, loads modules, and then serves commands on the
//! console.
//!
//! The kernel's command line selects the balloon driver (`ebb.balloon=virtio_balloon`, which is the
//! default, `ebb.balloon=ebb_balloon` or `ebb.balloon=none`), whether Ebb's driver gets its trackers
//! (`ebb.trackers`), and the parameters of all loaded modules (for example
//! `ebb_balloon.tracker=bitmap`).
//!
//! As an ordinary process (with a process id other than 1) it uses the same protocol on standard
//! input and output and does not set up the system. Its tests run it in this way.

mod agent;
mod commands;
mod console;
mod jobs;
mod setup;

use std::process::ExitCode;

use ebb_agent::command_line::BalloonDriver;

use console::{Console, Place};

fn main() -> ExitCode {
    let place = if std::process::id() == 1 { Place::Init } else { Place::Process };
    let prepared = match place {
        Place::Init => setup::prepare(),
        Place::Process => {
            setup::Prepared { balloon_driver: BalloonDriver::None, warnings: Vec::new() }
        }
    };
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

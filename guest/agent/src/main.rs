//! Init of test guests: mounts, loads modules, then takes commands on the console.
//!
//! The kernel's command line tells it which balloon driver to load (`ebb.balloon=virtio_balloon`,
//! which is the default, `ebb.balloon=ebb_balloon` or `ebb.balloon=none`) and with which parameters
//! (`ebb_balloon.tracker=bitmap`; the same for every other module that it loads).
//!
//! As an ordinary process (any other process id than 1) it speaks the same protocol on standard
//! input and output and leaves the system alone, which is how its tests run it.

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

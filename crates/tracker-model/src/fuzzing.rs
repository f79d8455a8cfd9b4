//! Body of the fuzz target of recordings: any bytes, as a hostile guest's file. It also runs as an
//! ordinary test.

use std::fmt::Write;

use crate::recording::{self, PageEvent, Recording};
use crate::replay::{replay, replay_without_one};

/// A fuzz target by name.
pub type Target = (&'static str, fn(&[u8]));

/// All targets.
pub const TARGETS: [Target; 1] = [("tracker_recording", recording)];

/// Events of one run, so that long inputs do not take long.
const MAX_EVENTS: usize = 48;

/// Reads a recording and replays it: nothing but an error may come of it.
///
/// # Panics
/// If something does.
pub fn recording(data: &[u8]) {
    read_and_replay(&String::from_utf8_lossy(data));
    // Events that the model accepts, one after the other, so that it gets further.
    let mut accepted = Vec::new();
    for bytes in data.as_chunks::<4>().0.iter().take(MAX_EVENTS) {
        accepted.push(line(*bytes));
        let text = heading(&accepted) + &accepted.concat();
        let Ok(recording) = Recording::read(&text) else {
            accepted.pop();
            continue;
        };
        assert_eq!(recording.events.len(), accepted.len());
        match replay(&recording) {
            Err(mismatch) if mismatch.number < accepted.len() => drop(accepted.pop()),
            _ => {}
        }
    }
    read_and_replay(&(heading(&accepted) + &accepted.concat()));
}

fn read_and_replay(text: &str) {
    if let Ok(recording) = Recording::read(text) {
        let whole = replay(&recording);
        for kind in [PageEvent::Isolate, PageEvent::Free] {
            let without = replay_without_one(&recording, kind, 2);
            assert!(whole.is_err() || without.is_ok());
        }
    }
}

fn heading(lines: &[String]) -> String {
    format!("ebb_balloon recording 1 events {} lost 0 percpu_entries 8\n", lines.len())
}

/// An event in one of two zones, near page 0 or the last one.
fn line([name, order, place, cpu]: [u8; 4]) -> String {
    let names: Vec<&str> = recording::names().collect();
    let name = names[usize::from(name) % names.len()];
    let order = [0, 1, 9, 10][usize::from(order % 4)];
    let place = (u64::from(place) << 8 >> order << order) % (1 << 12);
    let place = if cpu & 0x80 == 0 { place } else { recording::PFN_LIMIT - (1 << 12) + place };
    let place = if name.starts_with("sta") || name.starts_with("stop") { place % 4 } else { place };
    let mut line = String::new();
    // Writing to text cannot fail.
    let _ = writeln!(line, "{name} {} {order} {place} {} 0", cpu & 1, cpu >> 1 & 1);
    line
}

//! What the file of users holds, and who of them is still there.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::knobs::{Knob, Values};

/// A process that lets the kernel merge its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct User {
    pub(super) pid: u32,
    /// When it was started, in clock ticks since boot: another process with the same number has
    /// another.
    pub(super) start_ticks: u64,
}

impl User {
    /// The calling process.
    pub(super) fn this(proc: &Path) -> Option<Self> {
        let pid = std::process::id();
        Some(Self { pid, start_ticks: start_ticks(proc, pid)? })
    }

    /// Whether it still runs.
    pub(super) fn is_there(&self, proc: &Path) -> bool {
        start_ticks(proc, self.pid) == Some(self.start_ticks)
    }
}

/// Field 22 of `/proc/PID/stat` (Linux Documentation/filesystems/proc.rst); the name before it may
/// contain anything. `None` for a process that is not there, or is dead and only waited for.
fn start_ticks(proc: &Path, pid: u32) -> Option<u64> {
    let stat = std::fs::read(proc.join(pid.to_string()).join("stat")).ok()?;
    let stat = String::from_utf8_lossy(&stat);
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    if matches!(fields.next()?, "Z" | "X") {
        return None;
    }
    // The state was field 3.
    fields.nth(22 - 4)?.parse().ok()
}

/// The users and what was before them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    /// The trust domain of all users.
    pub(super) domain: String,
    pub(super) users: Vec<User>,
    /// Settings that a user has changed, as they were before.
    pub(super) originals: Values,
}

impl Record {
    /// Forgets users that have ended without a word.
    pub(super) fn forget_dead(&mut self, proc: &Path) {
        self.users.retain(|user| user.is_there(proc));
    }

    /// Notes what `knobs` were before their first change.
    pub(super) fn keep_originals(&mut self, knobs: &[Knob], present: &Values) {
        for &knob in knobs {
            if let (None, Some(value)) = (self.originals.get(knob), present.get(knob)) {
                self.originals.set(knob, value);
            }
        }
    }

    /// The record in `text`, which a zero or the end of the file ends. What follows is the rest of
    /// an older one.
    pub(super) fn parse(text: &[u8]) -> Result<Self, String> {
        let text = text.split(|&byte| byte == 0).next().unwrap_or_default();
        let mut values = serde_json::Deserializer::from_slice(text).into_iter();
        match values.next() {
            None => Ok(Self::default()),
            Some(record) => record.map_err(|error| error.to_string()),
        }
    }

    /// Its text.
    pub(super) fn to_text(&self) -> Result<Vec<u8>, String> {
        let mut text = serde_json::to_vec(self).map_err(|error| error.to_string())?;
        text.extend(b"\n\0");
        Ok(text)
    }
}

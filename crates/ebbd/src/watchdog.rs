//! What a dead daemon leaves behind is undone, for monitors that do not do it themselves.
//!
//! A second process, in a process group of its own, knows what is to be undone. When the daemon has
//! died or says nothing for too long, it ends the daemon and undoes all of it. A file has the same
//! list, for the case that both were killed: the next daemon undoes that. What can be neither told
//! nor written down is not taken.

mod process;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io::{self, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};

use serde::{Deserialize, Serialize};

use crate::monitors::{Place, Undo};

pub use process::main;
pub(crate) use process::undo_last;

/// The argument that runs the program as the second process.
pub const ARGUMENT: &str = "watchdog";
/// An entry that looks undone may still be on its way to the monitor for this time.
const SETTLED_MS: u64 = 10_000;

/// One thing to undo.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Entry {
    /// Its machine.
    #[serde(flatten)]
    pub place: Place,
    /// What was done to its machine.
    pub undo: Undo,
}

/// A line to the second process. An empty object says that the daemon lives.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Line {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    keep: Option<Entry>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    forget: Option<Entry>,
}

/// The list, and the process that has it too.
#[derive(Debug)]
pub struct Watchdog {
    /// What runs this program.
    program: Vec<OsString>,
    journal: PathBuf,
    child: Option<(Child, ChildStdin)>,
    /// When each was recorded last.
    entries: BTreeMap<Entry, u64>,
    /// Those of an earlier daemon.
    inherited: Vec<Entry>,
}

/// Something cannot be recorded.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action}: {source}")]
pub struct Unrecorded {
    action: &'static str,
    source: io::Error,
}

impl Watchdog {
    /// Reads the list of an earlier daemon in `directory`. `program` runs this program: the second
    /// process is started when it is first needed.
    pub fn new(program: Vec<OsString>, directory: &Path) -> Self {
        let journal = directory.join("taken.json");
        let text = fs::read(&journal).unwrap_or_default();
        // A file that was cut off cannot be: it is replaced as a whole.
        let inherited = serde_json::from_slice(&text).unwrap_or_default();
        Self { program, journal, child: None, entries: BTreeMap::new(), inherited }
    }

    /// Whether an earlier daemon has left it, and nothing else has undone it.
    pub fn is_inherited(&self, entry: &Entry) -> bool {
        self.inherited.contains(entry)
    }

    /// Records something before it is done.
    ///
    /// # Errors
    /// It must not be done.
    pub fn keep(&mut self, entry: &Entry, now_ms: u64) -> Result<(), Unrecorded> {
        self.inherited.retain(|other| other != entry);
        if self.entries.insert(entry.clone(), now_ms).is_some() {
            return Ok(());
        }
        let line = Line { keep: Some(entry.clone()), ..Line::default() };
        let told = self.write().and_then(|()| self.tell(&line));
        if told.is_err() {
            self.entries.remove(entry);
        }
        told
    }

    /// Forgets what is undone, as far as that is certain.
    pub fn settle(&mut self, entry: &Entry, now_ms: u64) {
        let is_settled = |kept_ms: &u64| now_ms.saturating_sub(*kept_ms) >= SETTLED_MS;
        if !self.is_inherited(entry) && !self.entries.get(entry).is_some_and(is_settled) {
            return;
        }
        self.inherited.retain(|other| other != entry);
        self.entries.remove(entry);
        let line = Line { forget: Some(entry.clone()), ..Line::default() };
        // If it is not forgotten, it is undone once more.
        let _ = self.write();
        let _ = self.tell(&line);
    }

    /// Everything that is recorded.
    pub fn entries(&self) -> Vec<Entry> {
        self.entries.keys().chain(&self.inherited).cloned().collect()
    }

    /// Tells the second process that this one lives.
    ///
    /// # Errors
    /// There is something to undo, and no process that would.
    pub fn beat(&mut self) -> Result<(), Unrecorded> {
        if self.entries.is_empty() && self.child.is_none() {
            return Ok(());
        }
        self.tell(&Line::default())
    }

    fn write(&self) -> Result<(), Unrecorded> {
        let failed = |source| Unrecorded { action: "write down what is taken", source };
        let new = self.journal.with_extension("new");
        let text = serde_json::to_vec(&self.entries()).map_err(|error| failed(error.into()))?;
        // It has to survive the death of processes, not that of the host, whose machines die too.
        fs::write(&new, text).and_then(|()| fs::rename(&new, &self.journal)).map_err(failed)
    }

    fn tell(&mut self, line: &Line) -> Result<(), Unrecorded> {
        let failed = |source| Unrecorded { action: "tell the watchdog", source };
        if let Some((child, pipe)) = &mut self.child
            && matches!(child.try_wait(), Ok(None))
            && send(pipe, line).is_ok()
        {
            return Ok(());
        }
        // It has ended, or does not read: another one takes its place.
        if let Some((mut child, _)) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        let (child, mut pipe) = self.start().map_err(failed)?;
        for entry in self.entries.keys() {
            let line = Line { keep: Some(entry.clone()), ..Line::default() };
            send(&mut pipe, &line).map_err(failed)?;
        }
        self.child = Some((child, pipe));
        Ok(())
    }

    fn start(&self) -> io::Result<(Child, ChildStdin)> {
        let [program, arguments @ ..] = self.program.as_slice() else {
            return Err(io::ErrorKind::NotFound.into());
        };
        let mut command = Command::new(program);
        command.args(arguments).arg(ARGUMENT);
        // A signal to the daemon's process group is not for this one.
        command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::null());
        // The service manager hears of the daemon only from the daemon.
        for name in crate::service::VARIABLES {
            command.env_remove(name);
        }
        let mut child = command.spawn()?;
        let pipe = child.stdin.take().ok_or(io::ErrorKind::BrokenPipe)?;
        rustix::io::ioctl_fionbio(&pipe, true)?;
        Ok((child, pipe))
    }
}

/// Sends a line without waiting. It is shorter than `PIPE_BUF`, and so is written as a whole or not
/// at all (pipe(7)); sockets' paths have at most 107 bytes.
fn send(pipe: &mut ChildStdin, line: &Line) -> io::Result<()> {
    let mut text = serde_json::to_vec(line)?;
    text.push(b'\n');
    pipe.write_all(&text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &str) -> Entry {
        Entry { place: Place::of(&Path::new("/run").join(name)), undo: Undo::Balloon }
    }

    fn watchdog(program: &str, directory: &Path) -> Watchdog {
        let program = ["sh", "-c", program].map(OsString::from).to_vec();
        Watchdog::new(program, directory)
    }

    #[test]
    fn the_next_daemon_inherits_what_is_written_down() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let mut first = watchdog("cat >/dev/null", path);
        assert_eq!(first.inherited, []);
        first.keep(&entry("a"), 1_000).unwrap();
        first.keep(&entry("b"), 1_000).unwrap();
        // On its way, then settled.
        first.settle(&entry("a"), 2_000);
        assert_eq!(first.entries().len(), 2);
        first.settle(&entry("a"), 11_000);
        assert_eq!(first.entries(), [entry("b")]);
        drop(first);
        let mut second = watchdog("cat >/dev/null", path);
        assert_eq!(second.inherited, [entry("b")]);
        second.settle(&entry("b"), 0);
        assert_eq!(watchdog("", path).inherited, []);
        // What is done again is no longer an earlier daemon's.
        second.keep(&entry("c"), 20_000).unwrap();
        let mut third = watchdog("cat >/dev/null", path);
        third.keep(&entry("c"), 30_000).unwrap();
        assert_eq!(third.inherited, []);
        third.settle(&entry("c"), 31_000);
        assert_eq!(third.entries(), [entry("c")]);
    }

    #[test]
    fn what_cannot_be_recorded_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let mut nowhere = watchdog("cat >/dev/null", &directory.path().join("missing"));
        let error = nowhere.keep(&entry("a"), 0).unwrap_err();
        assert!(error.to_string().contains("write down what is taken"), "{error}");
        assert_eq!(nowhere.entries(), []);
        let program = vec![OsString::from("/nonexistent")];
        let mut alone = Watchdog::new(program, directory.path());
        let error = alone.keep(&entry("a"), 0).unwrap_err();
        assert!(error.to_string().contains("tell the watchdog"), "{error}");
        assert_eq!(alone.entries(), []);
    }

    #[test]
    fn one_that_ended_is_replaced_and_told_everything() {
        let directory = tempfile::tempdir().unwrap();
        let heard = directory.path().join("heard");
        let program = format!("read line; echo \"$line\" >>{}", heard.display());
        let mut watchdog = watchdog(&program, directory.path());
        watchdog.keep(&entry("a"), 0).unwrap();
        let text = || fs::read_to_string(&heard).unwrap_or_default();
        // It ends after one line.
        let mut rounds = 0;
        while text().lines().count() < 3 {
            watchdog.beat().unwrap();
            std::thread::sleep(std::time::Duration::from_millis(20));
            rounds += 1;
            assert!(rounds < 500, "{}", text());
        }
        assert!(text().lines().all(|line| line.contains("/run/a")), "{}", text());
    }
}

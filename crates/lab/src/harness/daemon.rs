//! `ebbd` as a process of an experiment, with what it logs.

use std::env;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use ebb_host_policy::State;
use serde_json::json;

use crate::LabError;
use crate::harness::guest_process::end_with_parent;

/// Where the virtual host has the program.
pub const IN_VIRTUAL_HOST: &str = "/bin/ebbd";

/// An order of the daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ordered {
    /// When its line was read.
    pub at: Instant,
    /// The machine's name.
    pub machine: String,
    /// What was ordered, as the daemon prints it.
    pub action: String,
    /// The rule that has decided it, with its inputs; `None` if the daemon gave none.
    pub why: Option<String>,
}

/// What a daemon is started with.
#[derive(Debug, Default)]
pub struct Beginning<'a> {
    /// Lines of its configuration, besides the directory of the machines.
    pub settings: &'a str,
    /// What it remembers.
    pub state: Option<&'a State>,
}

/// A running daemon; it is killed when dropped, and balloons that it has set are released then.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    orders: Arc<Mutex<Vec<Ordered>>>,
    folder: tempfile::TempDir,
}

impl Daemon {
    /// The program in the directory of this one.
    ///
    /// # Errors
    /// [`LabError::MissingFile`].
    pub fn program() -> Result<PathBuf, LabError> {
        let beside = env::current_exe().ok().map(|program| program.with_file_name("ebbd"));
        let candidates = beside.into_iter().chain([PathBuf::from(IN_VIRTUAL_HOST)]);
        candidates.into_iter().find(|path| path.is_file()).ok_or_else(|| LabError::MissingFile {
            what: "the host daemon",
            path: PathBuf::from("ebbd"),
            remedy: "build it (cargo build -p ebbd) into the directory of ebb-lab",
        })
    }

    /// Starts it for the machines whose sockets are in this directory.
    ///
    /// # Errors
    /// [`LabError::MissingFile`], [`LabError::SystemFile`] and [`LabError::StartMonitor`].
    pub fn start(machines: &Path, beginning: &Beginning<'_>) -> Result<Self, LabError> {
        let folder = tempfile::tempdir().map_err(LabError::of_file(env::temp_dir()))?;
        let at = |name: &str| folder.path().join(name);
        let config = at("ebbd.toml");
        let folder_of_machines = machines.display().to_string();
        let text = format!("machines = [{folder_of_machines:?}]\n{}", beginning.settings);
        fs::write(&config, text).map_err(LabError::of_file(&config))?;
        if let Some(state) = beginning.state {
            // Of its times, only those of this start of the host are used.
            let saved = json!({ "boot": "", "state": state }).to_string();
            let path = at("state").join("state.json");
            let written = fs::create_dir(at("state")).and_then(|()| fs::write(&path, saved));
            written.map_err(LabError::of_file(&path))?;
        }
        let mut program = Command::new(Self::program()?);
        program.args(["--log", "info", "--config"]).arg(config);
        program.arg("--socket").arg(at("ebbd.sock")).arg("--state").arg(at("state"));
        program.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        end_with_parent(&mut program);
        let mut child = program
            .spawn()
            .map_err(|cause| LabError::StartMonitor { program: "ebbd".to_owned(), cause })?;
        let orders = Arc::new(Mutex::new(Vec::new()));
        if let Some(log) = child.stderr.take() {
            let orders = orders.clone();
            thread::spawn(move || {
                for line in BufReader::new(log).lines().map_while(Result::ok) {
                    let at = Instant::now();
                    tracing::debug!("ebbd: {line}");
                    let Some(order) = order_in(&line, at) else { continue };
                    orders.lock().unwrap_or_else(PoisonError::into_inner).push(order);
                }
            });
        }
        Ok(Self { child, orders, folder })
    }

    /// Its socket.
    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("ebbd.sock")
    }

    /// Its orders so far.
    pub fn orders(&self) -> Vec<Ordered> {
        self.orders.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The order in a line of the log that was read at this moment.
fn order_in(line: &str, at: Instant) -> Option<Ordered> {
    let (_, order) = line.split_once(" ordered machine=\"")?;
    let (machine, order) = order.split_once("\" action=")?;
    let (action, why) = order.split_once(" why=").unwrap_or((order, ""));
    let why = why.trim().trim_matches('"');
    Some(Ordered {
        at,
        machine: machine.to_owned(),
        action: action.trim().to_owned(),
        why: (!why.is_empty()).then(|| why.to_owned()),
    })
}

/// How long a machine with these orders was paused until `end`. A pause ends by itself.
pub fn paused<'a>(orders: impl Iterator<Item = &'a Ordered>, end: Instant) -> Duration {
    let mut sum = Duration::ZERO;
    // The pause that was ordered last: when it was seen first, and when it ends by itself.
    let mut pause: Option<(Instant, Instant)> = None;
    let passed = |pause: Option<(Instant, Instant)>, end: Instant| {
        pause.map_or(Duration::ZERO, |(from, until)| until.min(end).saturating_duration_since(from))
    };
    for Ordered { at, action, .. } in orders {
        if let Some(ms) = pause_ms(action) {
            let until = *at + Duration::from_millis(ms);
            pause = match pause {
                Some((from, earlier)) if *at <= earlier => Some((from, until)),
                ended => {
                    sum += passed(ended, end);
                    Some((*at, until))
                }
            };
        } else if action == "Resume" {
            sum += passed(pause.take(), *at);
        }
    }
    sum + passed(pause, end)
}

/// For how long an action pauses its machine.
fn pause_ms(action: &str) -> Option<u64> {
    action.strip_prefix("Pause { for_ms: ")?.strip_suffix(" }")?.parse().ok()
}

#[cfg(test)]
mod tests {
    use ebb_host_policy::Action;

    use super::*;

    #[test]
    fn orders_are_found_in_the_log() {
        let found = |line: &str| {
            let order = order_in(line, Instant::now())?;
            Some((order.machine, order.action, order.why))
        };
        let order = |action: &str, why: Option<&str>| {
            Some(("web-1".to_owned(), action.to_owned(), why.map(str::to_owned)))
        };
        let line = " INFO ordered machine=\"web-1\" action=Balloon { target_bytes: 4096 } \
                    why=\"the host is pressed\"";
        let balloon = "Balloon { target_bytes: 4096 }";
        assert_eq!(found(line), order(balloon, Some("the host is pressed")));
        assert_eq!(found(" INFO ordered machine=\"web-1\" action=Park"), order("Park", None));
        let line = " INFO ordered machine=\"web-1\" action=Park why=\"\"";
        assert_eq!(found(line), order("Park", None));
        assert_eq!(found(" INFO the host is tight"), None);
        assert_eq!(found(" INFO an earlier job has not ended action=Park"), None);
    }

    #[test]
    fn pauses_are_renewed_and_end_by_themselves() {
        let begin = Instant::now();
        let at = |ms| begin + Duration::from_millis(ms);
        let order = |ms, action: &str| Ordered {
            at: at(ms),
            machine: "a".to_owned(),
            action: action.to_owned(),
            why: None,
        };
        let pause = format!("{:?}", Action::Pause { for_ms: 2000 });
        let resume = format!("{:?}", Action::Resume);
        let orders = [
            order(0, &pause),
            order(1000, &pause),
            order(1500, "Park"),
            order(2500, &resume),
            order(2600, &resume),
            // This one is not renewed in time.
            order(5000, &pause),
            order(9000, &pause),
        ];
        let paused_ms = |end| paused(orders.iter(), at(end)).as_millis();
        assert_eq!([paused_ms(9500), paused_ms(20_000)], [5000, 6500]);
    }
}

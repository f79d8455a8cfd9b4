//! `ebbd` as a process of an experiment, with what it logs.

use std::env;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Instant;

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
                    let Some((action, why)) = order_in(&line) else { continue };
                    let why = (!why.is_empty()).then(|| why.to_owned());
                    let order = Ordered { at, action: action.to_owned(), why };
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

/// The action in a line of the log about an order, and the rule behind it.
fn order_in(line: &str) -> Option<(&str, &str)> {
    let (_, order) = line.split_once(" ordered ")?;
    let (_, action) = order.split_once("action=")?;
    let (action, why) = action.split_once(" why=").unwrap_or((action, ""));
    Some((action.trim(), why.trim().trim_matches('"')))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_are_found_in_the_log() {
        let line = " INFO ordered machine=\"web-1\" action=Balloon { target_bytes: 4096 } \
                    why=\"the host is pressed\"";
        let balloon = "Balloon { target_bytes: 4096 }";
        assert_eq!(order_in(line), Some((balloon, "the host is pressed")));
        assert_eq!(order_in(" INFO ordered machine=\"a\" action=Park"), Some(("Park", "")));
        assert_eq!(order_in(" INFO ordered action=Park why=\"\""), Some(("Park", "")));
        assert_eq!(order_in(" INFO the host is tight"), None);
        assert_eq!(order_in(" INFO an earlier job has not ended action=Park"), None);
    }
}

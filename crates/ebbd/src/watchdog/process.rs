//! The second process.

use std::collections::BTreeSet;
use std::process::ExitCode;
use std::time::Duration;

use rustix::process::{PidfdFlags, Signal, getppid, pidfd_open, pidfd_send_signal};
use tokio::io::{AsyncBufReadExt as _, BufReader, Lines};
use tokio::net::unix::pipe::Receiver;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{sleep, timeout};

use super::{Entry, Line};
use crate::monitors::undo;

/// A daemon that says nothing for this time hangs: it would say something every second.
const SILENCE_LIMIT: Duration = Duration::from_secs(15);
/// Time limit for one attempt with one monitor.
const ATTEMPT_LIMIT: Duration = Duration::from_secs(5);
/// How often and with what pause it is tried.
const ATTEMPTS: u32 = 30;
const PAUSE: Duration = Duration::from_secs(1);

/// Waits for the daemon's end, and undoes what it has left.
pub fn main() -> ExitCode {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let left = match runtime {
        Ok(runtime) => runtime.block_on(watch()),
        Err(error) => {
            eprintln!("ebbd watchdog: cannot start: {error}");
            return ExitCode::FAILURE;
        }
    };
    if left == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Returns how much could not be undone.
async fn watch() -> usize {
    // A service manager ends all processes of a service at once: this one ends after the daemon.
    // systemd also sends SIGABRT to all of them, if the daemon hangs.
    let abort = SignalKind::from_raw(Signal::ABORT.as_raw());
    let ignored = [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup(), abort];
    let _ignored: Vec<_> = ignored.into_iter().map(signal).collect();
    let daemon = getppid().and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
    let pipe = rustix::io::dup(rustix::stdio::stdin()).map_err(std::io::Error::from);
    let Ok(pipe) = pipe.and_then(Receiver::from_owned_fd) else {
        eprintln!("ebbd watchdog: only ebbd starts it, with a pipe");
        return 1;
    };
    let mut lines = BufReader::new(pipe).lines();
    let mut entries = BTreeSet::new();
    let has_ended = loop {
        match timeout(SILENCE_LIMIT, next(&mut lines)).await {
            Ok(Some(line)) => {
                line.keep.map(|entry| entries.insert(entry));
                line.forget.map(|entry| entries.remove(&entry));
            }
            Ok(None) => break true,
            Err(_) => break false,
        }
    };
    if entries.is_empty() && has_ended {
        return 0;
    }
    if !has_ended {
        eprintln!("ebbd watchdog: the daemon says nothing for {SILENCE_LIMIT:?}; ending it");
        // Its connections would keep others from a monitor's socket.
        if let Some(daemon) = daemon {
            let _ = pidfd_send_signal(daemon, Signal::KILL);
        }
    }
    let tasks: Vec<_> = entries.into_iter().map(|entry| tokio::spawn(undo_last(entry))).collect();
    let mut left = 0;
    for task in tasks {
        left += usize::from(!task.await.unwrap_or(false));
    }
    left
}

/// The next line that is one; `None` at the end.
async fn next(lines: &mut Lines<BufReader<Receiver>>) -> Option<Line> {
    loop {
        let text = lines.next_line().await.ok()??;
        if let Ok(line) = serde_json::from_str(&text) {
            return Some(line);
        }
    }
}

/// Undoes something, with several attempts. Returns whether it is undone.
pub(crate) async fn undo_last(entry: Entry) -> bool {
    for attempt in 1..=ATTEMPTS {
        let problem = match timeout(ATTEMPT_LIMIT, undo(&entry.place, entry.undo)).await {
            Ok(Ok(())) => return true,
            Ok(Err(trouble)) => trouble.to_string(),
            Err(_) => format!("no answer within {ATTEMPT_LIMIT:?}"),
        };
        // A machine that has ended needs nothing.
        if entry.place.domain.is_none() && !entry.place.socket.exists() {
            return true;
        }
        if attempt == 1 || attempt == ATTEMPTS {
            eprintln!("ebbd: {}: cannot undo what was taken: {problem}", entry.place);
        }
        sleep(PAUSE).await;
    }
    false
}

//! Programs that run in the host on behalf of the starter.

use std::collections::HashMap;
use std::io::{self, Read};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

use crate::channel::{ExitStatus, Program, Reply};
use crate::inside::server::Replies;

const SEARCH_PATH: &str = "/bin:/sbin:/usr/bin:/usr/sbin";
/// Maximum bytes of output in one message.
const CHUNK_BYTES: usize = 32 << 10;
/// Maximum wait for output after a program's end, since a background process may keep the output
/// open.
const DRAIN_LIMIT: Duration = Duration::from_millis(500);

/// The running programs by the number of their request.
#[derive(Debug, Clone, Default)]
pub struct Programs(Arc<Mutex<HashMap<u64, Pid>>>);

impl Programs {
    /// Starts a program in its own process group; threads report its output and end.
    pub fn start(&self, id: u64, program: &Program, replies: &Replies) {
        let name = program.argv.first().cloned().unwrap_or_default();
        // The lock is held so that a `Kill` finds the program as soon as it runs.
        let mut running = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match spawn(program) {
            Ok(child) => {
                running.insert(id, Pid::from_child(&child));
                drop(running);
                let (programs, replies) = (self.clone(), replies.clone());
                replies.send(id, Reply::Started { pid: child.id() }, &[]);
                thread::spawn(move || programs.attend(id, child, &replies));
            }
            Err(error) => replies.fail(id, format!("cannot run `{name}`: {error}")),
        }
    }

    /// Kills a program and its process group; no effect if it has ended.
    pub fn kill(&self, id: u64) {
        let running = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pid) = running.get(&id) {
            let _ = kill_process_group(*pid, Signal::KILL);
        }
    }

    fn attend(&self, id: u64, mut child: Child, replies: &Replies) {
        let over = Arc::new(AtomicBool::new(false));
        let (done, all_done) = channel::<()>();
        if let Some(stream) = child.stdout.take() {
            pump(stream, id, Reply::Stdout, replies.clone(), Arc::clone(&over), done.clone());
        }
        if let Some(stream) = child.stderr.take() {
            pump(stream, id, Reply::Stderr, replies.clone(), Arc::clone(&over), done);
        }
        // Wait without reaping first: the process id stays allocated until it is removed from the
        // table, so that `kill` can never hit another process with the same id.
        let pid = Pid::from_child(&child);
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        while matches!(waitid(WaitId::Pid(pid), options), Err(rustix::io::Errno::INTR)) {}
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&id);
        let status = child.wait();
        // Both pumps drop their senders at the end of their streams, which ends this wait.
        let _ = all_done.recv_timeout(DRAIN_LIMIT);
        over.store(true, Ordering::Release);
        match status {
            Ok(status) => {
                let status = match (status.code(), status.signal()) {
                    (Some(code), _) => ExitStatus::Code(code),
                    (None, signal) => ExitStatus::Signal(signal.unwrap_or(0)),
                };
                replies.send(id, Reply::Exited(status), &[]);
            }
            Err(error) => replies.fail(id, format!("cannot wait for a program: {error}")),
        }
    }
}

fn spawn(program: &Program) -> io::Result<Child> {
    let (name, arguments) = program
        .argv
        .split_first()
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "no program given"))?;
    let mut command = Command::new(name);
    command.args(arguments).env_clear();
    command.env("PATH", SEARCH_PATH).env("HOME", "/root").env("TERM", "dumb");
    command.envs(program.environment.iter().map(|(name, value)| (name, value)));
    command.current_dir(program.directory.as_deref().unwrap_or("/")).process_group(0);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn()
}

/// Sends a stream in chunks; after `over` it is still read, so that its writer does not block.
fn pump(
    mut stream: impl Read + Send + 'static,
    id: u64,
    kind: Reply,
    replies: Replies,
    over: Arc<AtomicBool>,
    done: Sender<()>,
) {
    thread::spawn(move || {
        let mut buffer = vec![0; CHUNK_BYTES];
        loop {
            match stream.read(&mut buffer) {
                Ok(0) => break,
                Ok(length) if !over.load(Ordering::Acquire) => {
                    replies.send(id, kind.clone(), &buffer[..length]);
                }
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        drop(done);
    });
}

//! The machines of a host: their discovery, and a task for each, so that none can delay another.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ebb_host_policy::{Action, Machine, Means};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::clock::now_ms;
use crate::monitors::process::{Process, Usage};
use crate::monitors::{Kind, Monitor, Seen, Trouble, Undo};

/// The most machines; more sockets are ignored.
pub const MOST_MACHINES: usize = 10_000;
/// Time limit of a monitor's answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(3);
/// The first and the longest pause before a monitor is connected with again.
const AGAIN: [Duration; 2] = [Duration::from_millis(500), Duration::from_secs(15)];
/// Orders that wait for a monitor.
const MOST_ORDERS: usize = 4;

/// All machines.
#[derive(Debug, Default)]
pub struct Fleet {
    links: BTreeMap<PathBuf, Link>,
    rhythm: Rhythm,
}

/// One machine: the task that speaks with its monitor, and what that has seen.
#[derive(Debug)]
pub struct Link {
    /// Its name.
    pub name: String,
    orders: mpsc::Sender<Order>,
    view: Arc<Mutex<View>>,
    task: JoinHandle<()>,
}

#[derive(Clone, Copy, Debug)]
struct Order {
    action: Action,
    lease: Duration,
}

/// What is known of a machine.
#[derive(Clone, Debug, Default)]
pub struct View {
    /// The kind of its monitor.
    pub kind: Option<Kind>,
    /// What it has said last.
    seen: Option<Seen>,
    process: Option<Arc<Process>>,
    /// Why it cannot be used now.
    pub trouble: Option<Trouble>,
    /// Whether it undoes by itself what is leased.
    pub undoes_itself: bool,
}

/// How machines are asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rhythm {
    /// Pause between two questions.
    pub interval: Duration,
    /// Guests are asked for statistics when the old ones have this age, in milliseconds.
    pub fresh_ms: u64,
}

impl Fleet {
    /// Begins with machines whose sockets are new, and ends with those whose sockets have gone.
    /// Returns directories that cannot be read, with the reason.
    pub fn discover(&mut self, folders: &[PathBuf], rhythm: Rhythm) -> Vec<(PathBuf, String)> {
        if self.rhythm != rhythm {
            self.links.clear();
            self.rhythm = rhythm;
        }
        let mut unreadable = Vec::new();
        let mut found = Vec::new();
        for folder in folders {
            match sockets(folder) {
                Ok(sockets) => found.extend(sockets),
                Err(error) => {
                    unreadable.push((folder.clone(), error.to_string()));
                    // Not gone, but out of sight.
                    let known = self.links.keys().filter(|path| path.parent() == Some(folder));
                    found.extend(known.cloned());
                }
            }
        }
        found.sort();
        found.truncate(MOST_MACHINES);
        self.links.retain(|path, _| found.binary_search(path).is_ok());
        for path in found {
            let new = |path: &PathBuf| Link::start(path, rhythm);
            self.links.entry(path).or_insert_with_key(new);
        }
        unreadable
    }

    /// Its machines, by their sockets.
    pub fn links(&self) -> impl Iterator<Item = (&Path, &Link)> {
        self.links.iter().map(|(path, link)| (path.as_path(), link))
    }

    /// The machine of this name, and its socket: the first of several.
    pub fn named(&self, name: &str) -> Option<(&Path, &Link)> {
        self.links().find(|(_, link)| link.name == name)
    }

    /// The machine behind a socket.
    pub fn behind(&self, socket: &Path) -> Option<&Link> {
        self.links.get(socket)
    }
}

fn sockets(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)? {
        let Ok(entry) = entry else { continue };
        if entry.file_type().is_ok_and(|kind| kind.is_socket()) {
            found.push(entry.path());
        }
    }
    Ok(found)
}

/// The name of the machine behind a socket: its file's name without the ending.
fn name_of(path: &Path) -> String {
    path.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

impl Link {
    fn start(path: &Path, rhythm: Rhythm) -> Self {
        let (orders, received) = mpsc::channel(MOST_ORDERS);
        let view = Arc::new(Mutex::new(View::default()));
        let task = tokio::spawn(serve(path.to_owned(), rhythm, received, view.clone()));
        Self { name: name_of(path), orders, view, task }
    }

    /// Passes on an order. Without an answer to earlier ones it is dropped.
    pub fn order(&self, action: Action, lease: Duration) {
        if self.orders.try_send(Order { action, lease }).is_err() {
            tracing::debug!(machine = self.name, ?action, "its monitor is busy: not passed on");
        }
    }

    /// What is known of it.
    pub fn view(&self) -> View {
        lock(&self.view).clone()
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl View {
    /// Its part of a snapshot; `None` before it has answered, and after its process has ended.
    pub fn machine(&self, name: &str) -> Option<Machine> {
        let seen = self.seen.as_ref()?;
        let Usage { resident_bytes, swapped_bytes, processor_ms } =
            self.process.as_ref()?.usage().ok()?;
        // Nothing can be ordered while the monitor does not answer.
        let means = if self.trouble.is_none() { seen.means } else { Means::default() };
        Some(Machine {
            name: name.to_owned(),
            size_bytes: seen.size_bytes,
            resident_bytes: Some(resident_bytes),
            swapped_bytes: Some(swapped_bytes),
            processor_ms: Some(processor_ms),
            is_paused: seen.is_paused,
            balloon: seen.balloon,
            statistics: seen.statistics,
            means,
        })
    }

    /// Whether this is known to be undone.
    pub fn is_undone(&self, undo: Undo) -> bool {
        let Some(seen) = self.seen.as_ref().filter(|_| self.trouble.is_none()) else {
            return false;
        };
        match undo {
            Undo::Balloon => seen.balloon.is_none_or(|balloon| balloon.target_bytes == 0),
            Undo::Pause => !seen.is_paused,
        }
    }

    /// Its process.
    pub fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(|process| process.pid())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Speaks with one monitor, for ever.
async fn serve(
    path: PathBuf,
    rhythm: Rhythm,
    mut orders: mpsc::Receiver<Order>,
    view: Arc<Mutex<View>>,
) {
    let [first, longest] = AGAIN;
    let mut pause = first;
    loop {
        let trouble = match within(Monitor::connect(&path)).await {
            Ok(monitor) => {
                {
                    let mut view = lock(&view);
                    (view.kind, view.process) = (Some(monitor.kind()), Some(monitor.process()));
                    view.undoes_itself = monitor.undoes_itself();
                }
                pause = first;
                converse(monitor, rhythm, &mut orders, &view).await
            }
            Err(trouble) => trouble,
        };
        tracing::debug!(?path, "{trouble}");
        lock(&view).trouble = Some(trouble);
        tokio::time::sleep(pause).await;
        pause = longest.min(pause * 2);
        // What was ordered in the meantime is out of date.
        while orders.try_recv().is_ok() {}
    }
}

/// Looks at a machine regularly, and carries orders out. Returns why it ended.
async fn converse(
    mut monitor: Monitor,
    rhythm: Rhythm,
    orders: &mut mpsc::Receiver<Order>,
    view: &Mutex<View>,
) -> Trouble {
    loop {
        match within(monitor.look(now_ms(), rhythm.fresh_ms)).await {
            Ok(seen) => {
                let mut view = lock(view);
                (view.seen, view.trouble) = (Some(seen), None);
            }
            Err(trouble) => return trouble,
        }
        // Orders are followed by a look, which shows what they have led to.
        let order = tokio::select! {
            order = orders.recv() => order,
            () = tokio::time::sleep(rhythm.interval) => continue,
        };
        let Some(Order { action, lease }) = order else {
            return Trouble::Gone("no longer wanted".to_owned());
        };
        match within(monitor.act(action, lease)).await {
            Ok(()) => tracing::debug!(?action, "carried out"),
            Err(trouble @ (Trouble::Refused(_) | Trouble::Unable)) => {
                tracing::info!(?action, "{trouble}");
            }
            Err(trouble) => return trouble,
        }
    }
}

async fn within<T>(answer: impl Future<Output = Result<T, Trouble>>) -> Result<T, Trouble> {
    timeout(ANSWER_LIMIT, answer).await.unwrap_or(Err(Trouble::Silent(ANSWER_LIMIT)))
}

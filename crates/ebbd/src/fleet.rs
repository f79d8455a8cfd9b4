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
use crate::monitors::libvirt::Lister;
use crate::monitors::process::{Process, Usage};
use crate::monitors::{Kind, Monitor, Place, Seen, Trouble, Undo};

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
    links: BTreeMap<Place, Link>,
    /// Those who list the domains of libvirt, by sockets.
    listers: BTreeMap<PathBuf, Lister>,
    terms: Terms,
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
    /// Whether it stands still because it is being stopped.
    pub is_stopping: bool,
}

/// How machines are dealt with.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Terms {
    /// Pause between two questions.
    pub interval: Duration,
    /// Guests are asked for statistics when the old ones have this age, in milliseconds.
    pub fresh_ms: u64,
    /// Where snapshots of stopped machines are written; `None`: no machine is stopped.
    pub snapshots: Option<PathBuf>,
}

impl Fleet {
    /// Begins with machines whose sockets are new, and ends with those whose sockets have gone.
    /// Returns directories that cannot be read, with the reason.
    pub fn discover(
        &mut self,
        folders: &[PathBuf],
        libvirts: &[PathBuf],
        terms: &Terms,
    ) -> Vec<(PathBuf, String)> {
        if self.terms != *terms {
            self.links.clear();
            self.terms = terms.clone();
        }
        let mut unreadable = Vec::new();
        let mut found = BTreeMap::new();
        for folder in folders {
            match sockets(folder) {
                Ok(sockets) => {
                    found.extend(sockets.iter().map(|path| (Place::of(path), name_of(path))));
                }
                Err(error) => {
                    unreadable.push((folder.clone(), error.to_string()));
                    // Not gone, but out of sight.
                    found.extend(
                        self.known(|it| it.domain.is_none() && it.socket.parent() == Some(folder)),
                    );
                }
            }
        }
        self.listers.retain(|path, _| libvirts.contains(path));
        for socket in libvirts {
            let start = |path: &PathBuf| Lister::start(path.clone());
            match self.listers.entry(socket.clone()).or_insert_with_key(start).listed() {
                Some(Ok(domains)) => found.extend(domains.into_iter().map(|(domain, name)| {
                    (Place { socket: socket.clone(), domain: Some(domain) }, name)
                })),
                other => {
                    if let Some(Err(trouble)) = other {
                        unreadable.push((socket.clone(), trouble.to_string()));
                    }
                    found.extend(self.known(|it| it.domain.is_some() && it.socket == *socket));
                }
            }
        }
        let found: BTreeMap<_, _> = found.into_iter().take(MOST_MACHINES).collect();
        self.links.retain(|place, _| found.contains_key(place));
        for (place, name) in found {
            let new = |place: &Place| Link::start(place, name, terms.clone());
            self.links.entry(place).or_insert_with_key(new);
        }
        unreadable
    }

    /// Machines that are known, and fulfil a condition, with their names.
    fn known(&self, is_meant: impl Fn(&Place) -> bool) -> Vec<(Place, String)> {
        let meant = self.links.iter().filter(|(place, _)| is_meant(place));
        meant.map(|(place, link)| (place.clone(), link.name.clone())).collect()
    }

    /// Its machines, by their places.
    pub fn links(&self) -> impl Iterator<Item = (&Place, &Link)> {
        self.links.iter()
    }

    /// Whether a machine without a link has certainly ended.
    pub fn has_gone(&self, place: &Place) -> bool {
        let Some(domain) = &place.domain else { return !place.socket.exists() };
        match self.listers.get(&place.socket).and_then(Lister::listed) {
            Some(Ok(domains)) => domains.iter().all(|(listed, _)| listed != domain),
            _ => false,
        }
    }

    /// Its machines that count, each with what is known of it. One of QEMU that is a domain of
    /// libvirt, too, is libvirt's.
    pub fn counted(&self) -> impl Iterator<Item = (&Place, &Link, View)> {
        let domains = self.domains();
        let views = self.links().map(|(place, link)| (place, link, link.view()));
        views.filter(move |(place, _, view)| view.is_also(place, &domains).is_none())
    }

    /// The names of libvirt's domains, by their processes.
    pub fn domains(&self) -> BTreeMap<u32, &str> {
        let domains = self.links().filter(|(place, _)| place.domain.is_some());
        domains.filter_map(|(_, link)| Some((lock(&link.view).pid()?, &*link.name))).collect()
    }

    /// The machine of this name, and its place: the first of several that count.
    pub fn named(&self, name: &str) -> Option<(&Place, &Link)> {
        let domains = self.domains();
        let mut named = self.links().filter(|(_, link)| link.name == name);
        named.find(|(place, link)| link.view().is_also(place, &domains).is_none())
    }

    /// The machine at a place.
    pub fn at(&self, place: &Place) -> Option<&Link> {
        self.links.get(place)
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
    fn start(place: &Place, name: String, terms: Terms) -> Self {
        let (orders, received) = mpsc::channel(MOST_ORDERS);
        let view = Arc::new(Mutex::new(View::default()));
        let task = tokio::spawn(serve(place.clone(), terms, received, view.clone()));
        Self { name, orders, view, task }
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
    /// Its part of a snapshot, and how much of its resident memory other processes may have, too;
    /// `None` before it has answered, and after its process has ended.
    pub fn machine(&self, name: &str) -> Option<(Machine, u64)> {
        let seen = self.seen.as_ref()?;
        let Usage { resident_bytes, shared_bytes, swapped_bytes, processor_ms } =
            self.process.as_ref()?.usage().ok()?;
        // Nothing can be ordered while the monitor does not answer.
        let means = if self.trouble.is_none() { seen.means } else { Means::default() };
        let machine = Machine {
            name: name.to_owned(),
            size_bytes: seen.size_bytes,
            resident_bytes: Some(resident_bytes),
            swapped_bytes: Some(swapped_bytes),
            processor_ms: Some(processor_ms),
            is_paused: seen.is_paused,
            balloon: seen.balloon,
            statistics: seen.statistics,
            means,
        };
        Some((machine, shared_bytes))
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

    /// The name of the domain of libvirt that it is, too.
    pub fn is_also<'a>(&self, place: &Place, domains: &BTreeMap<u32, &'a str>) -> Option<&'a str> {
        let pid = self.pid().filter(|_| place.domain.is_none())?;
        domains.get(&pid).copied()
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
    place: Place,
    terms: Terms,
    mut orders: mpsc::Receiver<Order>,
    view: Arc<Mutex<View>>,
) {
    let [first, longest] = AGAIN;
    let mut pause = first;
    loop {
        let trouble = match within(Monitor::at(&place)).await {
            Ok(mut monitor) => {
                {
                    let mut view = lock(&view);
                    (view.kind, view.process) = (Some(monitor.kind()), Some(monitor.process()));
                    view.undoes_itself = monitor.undoes_itself();
                }
                pause = first;
                if let Some(directory) = &terms.snapshots {
                    monitor.keep_in(directory);
                }
                converse(monitor, &terms, &mut orders, &view).await
            }
            Err(trouble) => trouble,
        };
        tracing::debug!(%place, "{trouble}");
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
    terms: &Terms,
    orders: &mut mpsc::Receiver<Order>,
    view: &Mutex<View>,
) -> Trouble {
    loop {
        match within(monitor.look(now_ms(), terms.fresh_ms)).await {
            Ok(seen) => {
                let mut view = lock(view);
                (view.seen, view.trouble) = (Some(seen), None);
                view.is_stopping = monitor.is_stopping();
            }
            Err(trouble) => return trouble,
        }
        // Orders are followed by a look, which shows what they have led to.
        let order = tokio::select! {
            order = orders.recv() => order,
            () = tokio::time::sleep(terms.interval) => continue,
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

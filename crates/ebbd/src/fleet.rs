//! The machines of a host: their discovery, and a task for each, so that none can delay another.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
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
    /// Machines whose name another one has, with the place of that one, which is known for longer.
    doubles: BTreeMap<Place, Place>,
    /// Number of machines found so far.
    found: u64,
    terms: Terms,
}

/// One machine: the task that speaks with its monitor, and what that has seen.
#[derive(Debug)]
pub struct Link {
    /// Its name.
    pub name: String,
    /// Its number in the order in which machines were found.
    number: u64,
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
    /// The last order, if its monitor has refused it, and why.
    pub refusal: Option<String>,
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
        let is_new = |(place, _): &(Place, String)| !self.links.contains_key(place);
        let mut new: Vec<_> = found.into_iter().filter(is_new).collect();
        new.sort_by_key(|(place, _)| changed_at(place));
        for (place, name) in new {
            let link = Link::start(&place, name, self.found, terms.clone());
            self.links.insert(place, link);
            self.found += 1;
        }
        self.doubles = self.find_doubles();
        unreadable
    }

    /// The machines whose name an earlier one has, with the place of that one. Otherwise a new
    /// socket with a known name would get the orders for the known machine.
    fn find_doubles(&self) -> BTreeMap<Place, Place> {
        let domains = self.domains();
        let mut named: BTreeMap<&str, (u64, &Place)> = BTreeMap::new();
        let single = self.links.iter().filter(|(place, link)| {
            let view = lock(&link.view);
            view.is_domain(place, &domains).is_none()
        });
        let mut doubles = BTreeMap::new();
        for (place, link) in single {
            let first = named.entry(&link.name).or_insert((link.number, place));
            if link.number < first.0 {
                *first = (link.number, place);
            }
        }
        for (place, link) in &self.links {
            match named.get(&*link.name) {
                Some((_, first)) if *first != place => {
                    doubles.insert(place.clone(), (*first).clone());
                }
                _ => {}
            }
        }
        doubles
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
    /// libvirt, too, is libvirt's; of several with one name, the one counts that was found first.
    pub fn counted(&self) -> impl Iterator<Item = (&Place, &Link, View)> {
        let domains = self.domains();
        let views = self.links().map(|(place, link)| (place, link, link.view()));
        views.filter(move |(place, _, view)| self.counts(place, view, &domains))
    }

    fn counts(&self, place: &Place, view: &View, domains: &BTreeMap<u32, &str>) -> bool {
        !self.doubles.contains_key(place) && view.is_domain(place, domains).is_none()
    }

    /// Why a machine does not count, if it does not.
    pub fn is_also(
        &self,
        place: &Place,
        view: &View,
        domains: &BTreeMap<u32, &str>,
    ) -> Option<String> {
        let domain = view.is_domain(place, domains);
        let domain = domain.map(|domain| format!("it is the domain {domain} of libvirt, too"));
        domain.or_else(|| {
            let first = self.doubles.get(place)?;
            Some(format!("the machine at {first} has the same name; rename one of them"))
        })
    }

    /// The names of libvirt's domains, by their processes.
    pub fn domains(&self) -> BTreeMap<u32, &str> {
        let domains = self.links().filter(|(place, _)| place.domain.is_some());
        domains.filter_map(|(_, link)| Some((lock(&link.view).pid()?, &*link.name))).collect()
    }

    /// The machine of this name that counts, and its place.
    pub fn named(&self, name: &str) -> Option<(&Place, &Link)> {
        let domains = self.domains();
        let mut named = self.links().filter(|(_, link)| link.name == name);
        named.find(|(place, link)| self.counts(place, &link.view(), &domains))
    }

    /// The machine at a place.
    pub fn at(&self, place: &Place) -> Option<&Link> {
        self.links.get(place)
    }
}

fn sockets(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)? {
        let Ok(entry) = entry else { continue };
        if entry.file_type().is_ok_and(|kind| kind.is_socket()) {
            found.push(entry.path());
        }
    }
    Ok(found)
}

/// When a socket was made or its rights were changed; its owner cannot set an earlier time. Domains
/// come first: only libvirt can make them.
fn changed_at(place: &Place) -> Option<(i64, i64)> {
    if place.domain.is_some() {
        return None;
    }
    let data = fs::symlink_metadata(&place.socket);
    Some(data.map_or((i64::MAX, 0), |data| (data.ctime(), data.ctime_nsec())))
}

/// The name of the machine behind a socket: its file's name without the ending.
fn name_of(path: &Path) -> String {
    path.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

impl Link {
    fn start(place: &Place, name: String, number: u64, terms: Terms) -> Self {
        let (orders, received) = mpsc::channel(MOST_ORDERS);
        let view = Arc::new(Mutex::new(View::default()));
        let task = tokio::spawn(serve(place.clone(), terms, received, view.clone()));
        Self { name, number, orders, view, task }
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
    fn is_domain<'a>(&self, place: &Place, domains: &BTreeMap<u32, &'a str>) -> Option<&'a str> {
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
            Ok(()) => {
                tracing::debug!(?action, "carried out");
                lock(view).refusal = None;
            }
            Err(trouble @ (Trouble::Refused(_) | Trouble::Unable)) => {
                tracing::info!(?action, "{trouble}");
                lock(view).refusal = Some(format!("{action:?} is not carried out: {trouble}"));
            }
            Err(trouble) => return trouble,
        }
    }
}

async fn within<T>(answer: impl Future<Output = Result<T, Trouble>>) -> Result<T, Trouble> {
    timeout(ANSWER_LIMIT, answer).await.unwrap_or(Err(Trouble::Silent(ANSWER_LIMIT)))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[tokio::test]
    async fn of_several_machines_with_one_name_the_first_one_counts() {
        let root = tempfile::tempdir().unwrap();
        let folders = ["b", "a"].map(|name| root.path().join(name));
        let socket = |folder: &PathBuf, name: &str| folder.join(name);
        let listen = |path: &PathBuf| UnixListener::bind(path).unwrap();
        for folder in &folders {
            fs::create_dir(folder).unwrap();
        }
        let [known, other, third] = [
            socket(&folders[0], "web.sock"),
            socket(&folders[1], "web.sock"),
            socket(&folders[0], "web.a"),
        ];
        let mut fleet = Fleet::default();
        let (terms, _one) = (Terms::default(), listen(&known));
        let discover = |fleet: &mut Fleet| {
            assert!(fleet.discover(&folders, &[], &terms).is_empty());
            let view = View::default();
            let why = |path: &PathBuf| fleet.is_also(&Place::of(path), &view, &BTreeMap::new());
            let named = fleet.named("web").map(|(place, _)| place.socket.clone());
            (named.unwrap(), fleet.counted().count(), [&known, &other, &third].map(why))
        };
        assert_eq!(discover(&mut fleet), (known.clone(), 1, [None, None, None]));
        // Neither in another directory nor with another ending, and not for a daemon that finds all
        // at once.
        std::thread::sleep(Duration::from_millis(50));
        let _two = [listen(&other), listen(&third)];
        let why =
            format!("the machine at {} has the same name; rename one of them", known.display());
        let whys = [None, Some(why.clone()), Some(why)];
        assert_eq!(discover(&mut fleet), (known.clone(), 1, whys));
        assert_eq!(discover(&mut Fleet::default()).0, known);
        fs::remove_file(&known).unwrap();
        let (named, counted, [_, one, two]) = discover(&mut fleet);
        assert!([&other, &third].contains(&&named) && counted == 1);
        assert!(one.is_none() != two.is_none());
    }
}

//! Domains of libvirt, over the socket of libvirtd or virtqemud.
//!
//! Facts of libvirt 9.0 (src/remote/remote_protocol.x, src/qemu/qemu_driver.c):
//!
//! - The protocol is libvirt's own between its library and its daemon. Procedures keep their
//!   numbers and contents, since libraries and daemons of different versions work together.
//! - libvirt does one job of a domain at a time, and one more waits up to 30 seconds in one of
//!   libvirtd's threads (20). So each domain has a connection of its own, statistics are asked for
//!   with the flag that they must not wait (libvirt 4.5 or newer), and nothing is ordered while
//!   another job runs. libvirtd takes 5000 clients (`max_clients`).
//! - Nothing is undone when this program dies ([watchdog](crate::watchdog)).
//! - A migration, a save and a dump are jobs: there is no balloon and no pause meanwhile.
//! - Memory is the size of the rest, in KiB. A target cannot be read; see [`qemu`](super::qemu).
//! - A domain is resumed only if a client has paused it, not after an error or a migration. A pause
//!   is not counted: one client's resume ends that of another, too.
//! - A domain is stopped by a managed save: libvirt writes it to a directory of its own and ends it,
//!   and its next start (`virsh start`) goes on there. If that fails, it goes on. A transient domain
//!   has nothing to start, and libvirt refuses it. What has begun goes on without its client.
//! - The process behind the socket is libvirtd. That of the domain is in a file beside the socket,
//!   and has the UUID among its arguments.

pub(crate) mod connection;
pub mod documents;
pub mod protocol;
pub mod xdr;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ebb_host_policy::{Balloon, Mean, Means, Statistics};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use super::foreign::{Condition, Foreign, Pause};
use super::job::Job;
use super::process::Process;
use super::qemu::documents::Moment;
use super::{Seen, Trouble};
use connection::Connection;
use documents::{Domain, Named, Stats};
use protocol::Procedure;

const KIB: u64 = 1024;
/// The live machine, not its configuration.
const LIVE: u32 = 1;
/// State and balloon (`VIR_DOMAIN_STATS_STATE`, `VIR_DOMAIN_STATS_BALLOON`).
const GROUPS: u32 = 1 | 4;
/// `VIR_CONNECT_GET_ALL_DOMAINS_STATS_NOWAIT`.
const NO_WAIT: u32 = 1 << 29;
const RUNNING: u64 = 1;
const PAUSED_BY_CLIENT: (u64, u64) = (3, 1);
/// `VIR_ERR_NO_DOMAIN`.
const NO_DOMAIN: i32 = 42;
/// How often QEMU asks the guest for statistics, if they were off or are old.
const PERIOD_S: u32 = 2;
const OLD_MS: u64 = 10_000;
/// Pause between two lists of domains, and the time for one.
const LIST_AGAIN: Duration = Duration::from_secs(2);
const LIST_LIMIT: Duration = Duration::from_secs(5);

/// A connection for one domain.
#[derive(Debug)]
pub struct Libvirt {
    socket: PathBuf,
    connection: Connection,
    domain: Named,
    process: Arc<Process>,
    /// What this connection has set last.
    target_bytes: Option<u64>,
    moment: Option<Moment>,
    /// What the guest has said last, and whether that shows a driver.
    said: Option<Statistics>,
    has_driver: bool,
    has_set_period: bool,
    pause: Pause,
    job: Job,
    /// Whether it may be stopped, as far as libvirt can start it again.
    is_kept: bool,
    is_persistent: bool,
}

impl Libvirt {
    /// Connects with libvirtd for a domain; `None` if that is not active any more.
    ///
    /// # Errors
    /// [`Trouble`] of libvirtd, or the domain's process is not found.
    pub async fn connect(path: &Path, domain: &Domain) -> Result<Option<Self>, Trouble> {
        let not_one = || Trouble::Nonsense("a UUID that is none".to_owned());
        let uuid = domain.uuid_bytes().ok_or_else(not_one)?;
        let mut connection = Connection::open(path).await?;
        let named = match connection.ask(Procedure::DomainLookupByUuid, &uuid).await? {
            Ok(content) => Named::read(&mut xdr::Reader::new(&content))?,
            Err(refusal) if refusal.code == NO_DOMAIN => return Ok(None),
            Err(refusal) => return Err(refusal.into()),
        };
        if named.domain() != *domain {
            return Ok(None);
        }
        let process = Arc::new(process(path, &named)?);
        Ok(Some(Self {
            socket: path.to_owned(),
            connection,
            domain: named,
            process,
            target_bytes: None,
            moment: None,
            said: None,
            has_driver: false,
            has_set_period: false,
            pause: Pause::default(),
            job: Job::default(),
            is_kept: false,
            is_persistent: false,
        }))
    }

    pub(super) fn process(&self) -> Arc<Process> {
        self.process.clone()
    }

    /// It can be stopped.
    pub(super) fn keep(&mut self) {
        self.is_kept = true;
    }

    /// Whether it is being stopped.
    pub(super) fn is_stopping(&self) -> bool {
        self.job.is_stopping()
    }

    pub(super) async fn look(&mut self, now_ms: u64) -> Result<Seen, Trouble> {
        let is_free = self.is_free().await?;
        let stats = self.stats().await?;
        if stats.is_whole {
            self.has_driver = stats.last_update > 0;
            self.said = self.moment(stats.last_update, now_ms).map(|ms| stats.taken(ms));
        }
        let is_old = self.said.is_none_or(|it| it.taken_ms.saturating_add(OLD_MS) <= now_ms);
        if is_free && stats.is_whole && stats.state.0 == RUNNING && is_old && !self.has_set_period {
            self.has_set_period = true;
            let numbers = [PERIOD_S.to_be_bytes(), LIVE.to_be_bytes()].concat();
            // Without a balloon it is refused.
            let _ = self.ask(Procedure::DomainSetMemoryStatsPeriod, &numbers).await?;
        }
        let actual_bytes = stats.inflated_bytes();
        let has_driver = self.has_driver || actual_bytes > 0;
        let mut means = Vec::new();
        if is_free && (stats.state.0 == RUNNING || stats.state == PAUSED_BY_CLIENT) {
            means.push(Mean::Pause);
            if has_driver {
                means.push(Mean::Balloon);
            }
            let can_stop = stats.state.0 == RUNNING && self.is_kept && self.job.may_stop();
            if can_stop && self.is_persistent().await? {
                means.push(Mean::Stop);
            }
        }
        Ok(Seen {
            size_bytes: stats.maximum_bytes,
            is_paused: stats.state.0 != RUNNING,
            balloon: has_driver.then(|| Balloon {
                target_bytes: self.target_bytes.unwrap_or(actual_bytes),
                actual_bytes,
            }),
            statistics: self.said,
            means: means.into_iter().collect::<Means>(),
        })
    }

    /// Asks about this domain.
    async fn ask(
        &mut self,
        procedure: Procedure,
        numbers: &[u8],
    ) -> Result<Result<Vec<u8>, protocol::Refusal>, Trouble> {
        let mut content = Vec::new();
        self.domain.put(&mut content);
        content.extend(numbers);
        self.connection.ask(procedure, &content).await
    }

    /// Whether it has a configuration. One that has one may lose it, but then its stop is refused.
    async fn is_persistent(&mut self) -> Result<bool, Trouble> {
        if !self.is_persistent {
            let content = self.ask(Procedure::DomainIsPersistent, &[]).await??;
            self.is_persistent = xdr::Reader::new(&content).u32()? == 1;
        }
        Ok(self.is_persistent)
    }

    /// Whether no job runs, and QEMU answers.
    async fn is_free(&mut self) -> Result<bool, Trouble> {
        let content = self.ask(Procedure::DomainGetControlInfo, &[0; 4]).await??;
        Ok(xdr::Reader::new(&content).u32()? == 0)
    }

    async fn stats(&mut self) -> Result<Stats, Trouble> {
        let mut content = 1_u32.to_be_bytes().to_vec();
        self.domain.put(&mut content);
        content.extend(GROUPS.to_be_bytes());
        content.extend(NO_WAIT.to_be_bytes());
        let content = self.connection.get(Procedure::ConnectGetAllDomainStats, &content).await?;
        Stats::read(&content)?.ok_or_else(|| Trouble::Gone("the domain has ended".to_owned()))
    }

    /// The moment of statistics, if that is known.
    fn moment(&mut self, last_update: u64, now_ms: u64) -> Option<u64> {
        let last_update = Some(last_update).filter(|last| *last > 0)?;
        let real = SystemTime::now().duration_since(UNIX_EPOCH);
        let real_s = real.map_or(0, |since| since.as_secs());
        let moment = Moment::of(last_update, self.moment.take(), real_s, now_ms);
        self.moment = Some(moment);
        moment.taken_ms
    }

    async fn need_free(&mut self) -> Result<(), Trouble> {
        let busy = || Trouble::Refused("the domain has another job, as a migration".to_owned());
        self.is_free().await?.then_some(()).ok_or_else(busy)
    }
}

impl Foreign for Libvirt {
    async fn condition(&mut self) -> Result<Condition, Trouble> {
        Ok(match self.stats().await? {
            Stats { state: (RUNNING, _), .. } => Condition::Running,
            Stats { state: PAUSED_BY_CLIENT, .. } => Condition::Paused,
            stats => Condition::Other(wrong(stats)),
        })
    }

    async fn stand_still(&mut self) -> Result<(), Trouble> {
        self.need_free().await?;
        self.ask(Procedure::DomainSuspend, &[]).await??;
        Ok(())
    }

    async fn go_on(&mut self) -> Result<(), Trouble> {
        self.need_free().await?;
        self.ask(Procedure::DomainResume, &[]).await??;
        Ok(())
    }

    async fn set_balloon(&mut self, target_bytes: u64) -> Result<(), Trouble> {
        let target_bytes = target_bytes / KIB * KIB;
        self.need_free().await?;
        let stats = self.stats().await?;
        if target_bytes > 0 && stats.state.0 != RUNNING && stats.state != PAUSED_BY_CLIENT {
            return Err(wrong(stats));
        }
        let Some(rest @ 1..) = stats.maximum_bytes.checked_sub(target_bytes) else {
            return Err(Trouble::Refused("the machine is not that large".to_owned()));
        };
        let mut numbers = (rest / KIB).to_be_bytes().to_vec();
        numbers.extend(LIVE.to_be_bytes());
        self.ask(Procedure::DomainSetMemoryFlags, &numbers).await??;
        self.target_bytes = Some(target_bytes);
        Ok(())
    }

    fn pause(&mut self) -> &mut Pause {
        &mut self.pause
    }

    fn stop(&mut self) -> Result<(), Trouble> {
        if !self.is_kept {
            return Err(Trouble::Unable);
        }
        let (socket, domain) = (self.socket.clone(), self.domain.domain());
        self.job.stop(self.domain.name.clone(), async move {
            // It is answered at the end, and this connection goes on meanwhile. Unlike the others, it
            // may wait for another job: most are questions, and soon over.
            let Some(mut other) = Self::connect(&socket, &domain).await? else { return Ok(()) };
            // One that is paused would still be after its next start, and nobody would resume it.
            let stats = other.stats().await?;
            if stats.state.0 != RUNNING {
                return Err(wrong(stats));
            }
            other.ask(Procedure::DomainManagedSave, &[0; 4]).await??;
            Ok(())
        })
    }
}

fn wrong(Stats { state, .. }: Stats) -> Trouble {
    Trouble::Refused(format!("the domain's state is {state:?}"))
}

/// The process of a domain: its number is in a file, and its arguments have the UUID.
fn process(socket: &Path, domain: &Named) -> Result<Process, Trouble> {
    let beside = socket.parent().unwrap_or(Path::new("/run/libvirt"));
    let uuid = domain.domain().uuid;
    let is_name = !domain.name.contains('/');
    for folder in [beside.join("qemu"), beside.join("qemu/run"), "/run/libvirt/qemu".into()] {
        let file = folder.join(format!("{}.pid", domain.name));
        let text = std::fs::read_to_string(file).ok().filter(|_| is_name);
        let Some(pid) = text.and_then(|text| text.trim().parse().ok()) else { continue };
        let Ok(process) = Process::of(pid) else { continue };
        // Its files in /proc are open now: the arguments are those of the same process, or missing.
        let arguments = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let mut words = arguments.split(|byte| *byte == 0);
        if words.any(|word| word == b"-uuid") && words.next() == Some(uuid.as_bytes()) {
            return Ok(process);
        }
    }
    Err(Trouble::Gone(format!("the process of domain {uuid} is not found beside the socket")))
}

/// What a libvirtd has said last: its domains by name.
type Listed = Option<Result<Vec<(Domain, String)>, Trouble>>;

/// Lists the domains of a libvirtd, again and again.
#[derive(Debug)]
pub struct Lister {
    listed: Arc<Mutex<Listed>>,
    task: JoinHandle<()>,
}

impl Lister {
    /// Begins.
    pub fn start(path: PathBuf) -> Self {
        let listed = Arc::new(Mutex::new(None));
        let task = tokio::spawn(list(path, listed.clone()));
        Self { listed, task }
    }

    /// The active domains; `None` before the first answer.
    pub fn listed(&self) -> Listed {
        self.listed.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for Lister {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn list(path: PathBuf, listed: Arc<Mutex<Listed>>) {
    let mut connection = None;
    loop {
        let answer = timeout(LIST_LIMIT, list_once(&path, &mut connection)).await;
        let answer = answer.unwrap_or(Err(Trouble::Silent(LIST_LIMIT)));
        if answer.is_err() {
            connection = None;
        }
        *listed.lock().unwrap_or_else(PoisonError::into_inner) = Some(answer);
        sleep(LIST_AGAIN).await;
    }
}

async fn list_once(
    path: &Path,
    connection: &mut Option<Connection>,
) -> Result<Vec<(Domain, String)>, Trouble> {
    let opened = match connection.take() {
        Some(opened) => opened,
        None => Connection::open(path).await?,
    };
    let found = connection.insert(opened).domains().await?;
    Ok(found.into_iter().map(|it| (it.domain(), it.name)).collect())
}

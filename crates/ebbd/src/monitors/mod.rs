//! Monitors: what each says about its machine, and how it carries out an action.
//!
//! Each has a module of its own, over its real interface. All of them report sizes of the balloon
//! (never of the rest) in bytes.

pub mod cloud_hypervisor;
pub mod ebb;
pub mod firecracker;
mod foreign;
mod http;
mod job;
pub mod libvirt;
pub mod process;
pub mod qemu;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ebb_host_policy::{Action, Balloon, Means, Statistics};
use hyper::Method;
use serde::{Deserialize, Serialize};
use tokio::net::UnixStream;

use cloud_hypervisor::CloudHypervisor;
use ebb::Ebb;
use firecracker::Firecracker;
use foreign::Foreign as _;
use http::Http;
use libvirt::Libvirt;
use libvirt::documents::Domain;
use process::Process;
use qemu::Qemu;

/// Where a machine is found.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Place {
    /// The socket of its monitor, or of libvirt.
    pub socket: PathBuf,
    /// Which of the domains behind the socket, if that is libvirt's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domain: Option<Domain>,
}

impl Place {
    /// That of the only machine behind a socket.
    pub fn of(socket: &Path) -> Self {
        Self { socket: socket.to_owned(), domain: None }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}", self.socket.display())?;
        let Some(domain) = &self.domain else { return Ok(()) };
        write!(formatter, "#{}", domain.uuid)
    }
}

/// What a monitor says about its machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// The machine's memory, as its guest found it at boot.
    pub size_bytes: u64,
    /// Whether its processors stand still.
    pub is_paused: bool,
    /// `None` without a balloon, or while no driver has initialized it.
    pub balloon: Option<Balloon>,
    /// What the guest has last said; `None` if it never did.
    pub statistics: Option<Statistics>,
    /// What the monitor can do now.
    pub means: Means,
}

/// Why a monitor cannot be used. It costs its own machine only.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Trouble {
    /// The socket has gone, or its process has.
    #[error("its socket is not served: {0}")]
    Gone(String),
    /// It did not answer in time.
    #[error("it did not answer within {} ms", .0.as_millis())]
    Silent(Duration),
    /// It answered something that its interface does not have.
    #[error("its answer is not understood: {0}")]
    Nonsense(String),
    /// It refused a request.
    #[error("it refused: {0}")]
    Refused(String),
    /// It cannot do this at all.
    #[error("its monitor cannot do that")]
    Unable,
}

/// A kind of monitor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// This project's.
    Ebb,
    /// QEMU.
    Qemu,
    /// Firecracker, or this project's monitor with Firecracker's API.
    Firecracker,
    /// Cloud Hypervisor.
    CloudHypervisor,
    /// libvirt.
    Libvirt,
}

impl Kind {
    /// Its name in documents.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ebb => "ebb",
            Self::Qemu => "qemu",
            Self::Firecracker => "firecracker",
            Self::CloudHypervisor => "cloud-hypervisor",
            Self::Libvirt => "libvirt",
        }
    }
}

/// A connection with a monitor.
#[derive(Debug)]
pub enum Monitor {
    /// This project's.
    Ebb(Ebb),
    /// QEMU.
    Qemu(Qemu),
    /// Firecracker's API.
    Firecracker(Firecracker),
    /// Cloud Hypervisor.
    CloudHypervisor(CloudHypervisor),
    /// A domain of libvirt.
    Libvirt(Libvirt),
}

/// The longest answer that is read, in bytes.
pub(crate) const MOST_BYTES: usize = 1 << 20;
/// The longest piece of a server's text that a message of trouble repeats, in characters.
pub(crate) const MOST_REPEATED: usize = 200;

impl Monitor {
    /// Connects with the monitor of a machine.
    ///
    /// # Errors
    /// [`Trouble`], also if the domain of libvirt has ended.
    pub async fn at(place: &Place) -> Result<Self, Trouble> {
        let Some(domain) = &place.domain else { return Self::connect(&place.socket).await };
        let libvirt = Libvirt::connect(&place.socket, domain).await?;
        libvirt.map(Self::Libvirt).ok_or_else(|| Trouble::Gone("the domain has ended".to_owned()))
    }

    /// Connects with the monitor behind a socket, whatever it is.
    ///
    /// # Errors
    /// [`Trouble`], also for a server that is none of the known monitors.
    pub async fn connect(path: &Path) -> Result<Self, Trouble> {
        let (stream, process) = connect(path).await?;
        // QMP's servers speak first, those of HTTP never do.
        if qemu::greets(&stream).await {
            return Ok(Self::Qemu(Qemu::start(stream, process).await?));
        }
        if qemu::is_name(&process) {
            return Err(qemu::busy());
        }
        let mut http = Http::start(stream, process, path).await?;
        // All know the path `/`, or refuse it and tell their names.
        let answer = http.ask(Method::GET, "/", None).await?;
        Ok(match answer.server.as_str() {
            "Firecracker API" => Self::Firecracker(Firecracker::new(http)),
            "Cloud Hypervisor API" => Self::CloudHypervisor(CloudHypervisor::new(http)),
            name if name.starts_with("ebb/") && firecracker::is_instance(&answer) => {
                Self::Firecracker(Firecracker::new(http))
            }
            name if name.starts_with("ebb/") => Self::Ebb(Ebb::new(http, path)),
            name => {
                let text = format!("the server calls itself '{}'", repeatable(name));
                return Err(Trouble::Nonsense(text));
            }
        })
    }

    /// Its kind.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Ebb(_) => Kind::Ebb,
            Self::Qemu(_) => Kind::Qemu,
            Self::Firecracker(_) => Kind::Firecracker,
            Self::CloudHypervisor(_) => Kind::CloudHypervisor,
            Self::Libvirt(_) => Kind::Libvirt,
        }
    }

    /// The monitor's process.
    pub fn process(&self) -> Arc<Process> {
        match self {
            Self::Ebb(ebb) => ebb.process(),
            Self::Qemu(qemu) => qemu.process(),
            Self::Firecracker(firecracker) => firecracker.process(),
            Self::CloudHypervisor(cloud) => cloud.process(),
            Self::Libvirt(libvirt) => libvirt.process(),
        }
    }

    /// Whether it undoes a balloon and a pause by itself when their lease ends. Otherwise the
    /// [watchdog](crate::watchdog) does, if this process dies.
    pub fn undoes_itself(&self) -> bool {
        match self {
            Self::Ebb(_) => true,
            Self::Qemu(_) | Self::Firecracker(_) | Self::CloudHypervisor(_) | Self::Libvirt(_) => {
                false
            }
        }
    }

    /// Machines can be stopped, as far as there is a way to start them again: Ebb's have their
    /// snapshots in this directory, and libvirt keeps those of its domains.
    pub fn keep_in(&mut self, directory: &Path) {
        match self {
            Self::Ebb(ebb) => ebb.keep_in(directory),
            Self::Libvirt(libvirt) => libvirt.keep(),
            Self::Qemu(_) | Self::Firecracker(_) | Self::CloudHypervisor(_) => {}
        }
    }

    /// Whether its machine is being stopped: it stands still then.
    pub fn is_stopping(&self) -> bool {
        match self {
            Self::Ebb(ebb) => ebb.is_stopping(),
            Self::Libvirt(libvirt) => libvirt.is_stopping(),
            Self::Qemu(_) | Self::Firecracker(_) | Self::CloudHypervisor(_) => false,
        }
    }

    /// Asks for the machine's state. `now_ms` is the snapshot's clock; the guest is asked for
    /// statistics when those that are there are older than `fresh_ms`.
    ///
    /// # Errors
    /// [`Trouble`]; the connection is of no further use.
    pub async fn look(&mut self, now_ms: u64, fresh_ms: u64) -> Result<Seen, Trouble> {
        match self {
            Self::Ebb(ebb) => ebb.look(now_ms, fresh_ms).await,
            Self::Qemu(qemu) => qemu.look(now_ms).await,
            Self::Firecracker(firecracker) => firecracker.look(now_ms).await,
            Self::CloudHypervisor(cloud) => cloud.look().await,
            Self::Libvirt(libvirt) => libvirt.look(now_ms).await,
        }
    }

    /// Carries out an action. A balloon and a pause are undone by the monitor after `lease`, if it
    /// can do that ([`Self::undoes_itself`]).
    ///
    /// # Errors
    /// [`Trouble`]; after [`Trouble::Refused`] and [`Trouble::Unable`] the connection is still of
    /// use.
    pub async fn act(&mut self, action: Action, lease: Duration) -> Result<(), Trouble> {
        match self {
            Self::Ebb(ebb) => ebb.act(action, lease).await,
            Self::Qemu(qemu) => qemu.act(action).await,
            Self::Firecracker(firecracker) => firecracker.act(action).await,
            Self::CloudHypervisor(cloud) => cloud.act(action).await,
            Self::Libvirt(libvirt) => libvirt.act(action).await,
        }
    }
}

/// What an action leaves behind that has to be undone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Undo {
    /// A balloon is released.
    Balloon,
    /// A pause ends.
    Pause,
}

impl Undo {
    /// What an action leaves behind.
    pub fn of(action: Action) -> Option<Self> {
        match action {
            Action::Balloon { target_bytes } if target_bytes > 0 => Some(Self::Balloon),
            // A stop begins with a pause.
            Action::Pause { .. } | Action::Stop => Some(Self::Pause),
            _ => None,
        }
    }

    /// The action that undoes it.
    pub fn action(self) -> Action {
        match self {
            Self::Balloon => Action::Balloon { target_bytes: 0 },
            Self::Pause => Action::Resume,
        }
    }
}

/// Undoes what was done to a machine, by this process or another one. A domain of libvirt that has
/// ended needs nothing.
///
/// # Errors
/// [`Trouble`]. It may be tried again: a monitor may take a moment to see that a client has left.
pub async fn undo(place: &Place, what: Undo) -> Result<(), Trouble> {
    let mut monitor = match &place.domain {
        None => Monitor::connect(&place.socket).await?,
        Some(domain) => match Libvirt::connect(&place.socket, domain).await? {
            Some(libvirt) => Monitor::Libvirt(libvirt),
            None => return Ok(()),
        },
    };
    monitor.act(what.action(), Duration::ZERO).await
}

/// Connects with a socket, and finds the process behind it.
pub(crate) async fn connect(path: &Path) -> Result<(UnixStream, Arc<Process>), Trouble> {
    let gone = |error: std::io::Error| Trouble::Gone(error.to_string());
    let stream = UnixStream::connect(path).await.map_err(gone)?;
    let process = Process::behind(&stream).map_err(gone)?;
    Ok((stream, Arc::new(process)))
}

/// The start of a server's text, on one line.
pub(crate) fn repeatable(text: &str) -> String {
    text.chars().take(MOST_REPEATED).flat_map(char::escape_debug).collect()
}

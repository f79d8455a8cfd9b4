//! A network link of a chosen rate on one machine: two network namespaces, a veth pair between
//! them, and a token bucket (tbf) on each end.
//!
//! Programs are started in one namespace or the other ([`Namespace::enter`]) and reach each other
//! over the link alone. It is set up by iproute2's `ip` and `tc`, needs root, and is removed when
//! the value is dropped.

use std::fs::File;
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::LabError;

pub mod transfer;

/// Directories of iproute2; a busybox that precedes it in `PATH` may lack half of its functions.
const TOOL_DIRECTORIES: [&str; 3] = ["/usr/sbin", "/sbin", "/usr/bin"];
/// Name of the interface in both namespaces.
const INTERFACE: &str = "link0";
/// Directory of the names of `ip netns`.
const NAMES: &str = "/run/netns";
/// Burst after an idle time: the amount that passes in this time, since the timers of an emulated
/// host are late, within bounds. The lower bound is several of the largest packets of a veth pair
/// (64 KiB), so that the token bucket need not segment them; the upper bound is a small part of the
/// data sent.
const BURST_MS: u64 = 20;
const LEAST_BURST_BYTES: u64 = 256 << 10;
const MOST_BURST_BYTES: u64 = 5_000_000;
/// Maximum time in ms that a packet may wait.
const QUEUE_MS: u64 = 20;

/// One end of the link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// One.
    Left,
    /// The other.
    Right,
}

impl End {
    /// Both.
    pub const BOTH: [Self; 2] = [Self::Left, Self::Right];

    /// The other one.
    #[must_use]
    pub fn other(self) -> Self {
        match self {
            Self::Left => Self::Right,
            Self::Right => Self::Left,
        }
    }

    /// Its address, in a block for tests between networks (RFC 2544).
    pub fn address(self) -> Ipv4Addr {
        match self {
            Self::Left => Ipv4Addr::new(198, 18, 0, 1),
            Self::Right => Ipv4Addr::new(198, 18, 0, 2),
        }
    }

    fn word(self) -> &'static str {
        match self {
            Self::Left => "left",
            Self::Right => "right",
        }
    }
}

/// Rate of the link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rate {
    /// Unlimited.
    Unshaped,
    /// Mbit/s in each direction.
    Megabits(u64),
}

impl Rate {
    /// Describes the rate.
    pub fn describe(self) -> String {
        match self {
            Self::Unshaped => "unshaped".to_owned(),
            Self::Megabits(rate) if rate % 1000 == 0 => format!("{} Gbit/s", rate / 1000),
            Self::Megabits(rate) => format!("{rate} Mbit/s"),
        }
    }

    /// Arguments for `tc qdisc ... dev INTERFACE root`.
    fn discipline(self) -> Option<Vec<String>> {
        let Self::Megabits(rate) = self else { return None };
        let bytes_in = |milliseconds: u64| rate * 1_000_000 / 8 * milliseconds / 1000;
        let burst_bytes = bytes_in(BURST_MS).clamp(LEAST_BURST_BYTES, MOST_BURST_BYTES);
        let limit_bytes = burst_bytes + bytes_in(QUEUE_MS).max(LEAST_BURST_BYTES);
        let words = format!("tbf rate {rate}mbit burst {burst_bytes} limit {limit_bytes}");
        Some(words.split(' ').map(str::to_owned).collect())
    }
}

/// The programs of iproute2.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tools {
    /// `ip`.
    pub ip: PathBuf,
    /// `tc`.
    pub tc: PathBuf,
}

impl Tools {
    /// Finds them.
    ///
    /// # Errors
    /// [`LabError::MissingFile`].
    pub fn find() -> Result<Self, LabError> {
        let find = |name: &str| {
            let places = TOOL_DIRECTORIES.map(|directory| Path::new(directory).join(name));
            places.into_iter().find(|path| path.is_file()).ok_or_else(|| LabError::MissingFile {
                what: "a program that sets up network links",
                path: PathBuf::from(name),
                remedy: "Debian: apt-get install iproute2",
            })
        };
        Ok(Self { ip: find("ip")?, tc: find("tc")? })
    }
}

/// A network namespace.
#[derive(Debug)]
pub struct Namespace {
    path: PathBuf,
    file: File,
}

impl Namespace {
    fn open(name: &str) -> Result<Self, LabError> {
        let path = Path::new(NAMES).join(name);
        let file = File::open(&path).map_err(LabError::of_file(&path))?;
        Ok(Self { path, file })
    }

    /// Makes a program run in this namespace.
    ///
    /// # Errors
    /// [`LabError::SystemFile`] without free descriptors.
    pub fn enter(&self, program: &mut Command) -> Result<(), LabError> {
        let namespace: OwnedFd =
            self.file.as_fd().try_clone_to_owned().map_err(LabError::of_file(&self.path))?;
        let in_child = move || {
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
                .map_err(Into::into)
        };
        // SAFETY: between fork and exec only async-signal-safe functions may be called. The closure
        // makes one system call (setns) on a descriptor that it owns, takes no lock and allocates
        // nothing; an errno becomes an `Error` as a value.
        unsafe { program.pre_exec(in_child) };
        Ok(())
    }

    /// Runs an action in this namespace; sockets that it creates stay there, wherever they are
    /// used.
    fn inside<T: Send>(&self, action: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
        let in_thread = || {
            move_into_link_name_space(self.file.as_fd(), Some(LinkNameSpaceType::Network))?;
            action()
        };
        // Namespaces are per thread, and this thread ends with the action.
        let result = thread::scope(|scope| scope.spawn(in_thread).join());
        result.unwrap_or_else(|_| Err(io::Error::other("a thread has panicked")))
    }
}

/// The link.
#[derive(Debug)]
pub struct Link {
    tools: Tools,
    names: Names,
    namespaces: [Namespace; 2],
}

/// Names of namespaces, deleted when dropped.
#[derive(Debug)]
struct Names {
    ip: PathBuf,
    names: [String; 2],
}

impl Drop for Names {
    fn drop(&mut self) {
        for name in &self.names {
            // The namespace may not exist, and a destructor cannot report errors.
            let _ = run(&self.ip, &["netns", "delete", name]);
        }
    }
}

impl Link {
    /// Creates an unshaped link.
    ///
    /// # Errors
    /// [`LabError::MissingFile`] without iproute2, and [`LabError::Network`] when the system
    /// refuses.
    pub fn create() -> Result<Self, LabError> {
        let tools = Tools::find()?;
        let name = |end: End| format!("ebb-lab-{}-{}", std::process::id(), end.word());
        let names = Names { ip: tools.ip.clone(), names: End::BOTH.map(name) };
        let ip = |words: &str| run(&tools.ip, &words.split(' ').collect::<Vec<_>>());
        let [left, right] = &names.names;
        for name in &names.names {
            ip(&format!("netns add {name}"))?;
        }
        ip(&format!(
            "-n {left} link add {INTERFACE} type veth peer name {INTERFACE} netns {right}"
        ))?;
        for (end, name) in End::BOTH.into_iter().zip(&names.names) {
            ip(&format!("-n {name} address add {}/30 dev {INTERFACE}", end.address()))?;
            ip(&format!("-n {name} link set lo up"))?;
            ip(&format!("-n {name} link set {INTERFACE} up"))?;
        }
        let namespaces = [Namespace::open(left)?, Namespace::open(right)?];
        Ok(Self { tools, names, namespaces })
    }

    /// The namespace at one end.
    pub fn namespace(&self, end: End) -> &Namespace {
        match end {
            End::Left => &self.namespaces[0],
            End::Right => &self.namespaces[1],
        }
    }

    /// Gives the link another rate.
    ///
    /// # Errors
    /// [`LabError::Network`].
    pub fn shape(&self, rate: Rate) -> Result<(), LabError> {
        for name in &self.names.names {
            let place = ["-n", name, "qdisc"];
            let on = ["dev", INTERFACE, "root"];
            // Deleting a missing discipline is refused.
            let _ = run(&self.tools.tc, &[&place[..], &["delete"], &on].concat());
            if let Some(discipline) = rate.discipline() {
                let words: Vec<&str> = discipline.iter().map(String::as_str).collect();
                run(&self.tools.tc, &[&place[..], &["add"], &on, &words].concat())?;
            }
        }
        Ok(())
    }
}

/// Runs a program of iproute2.
fn run(program: &Path, words: &[&str]) -> Result<(), LabError> {
    let failed = |reason: String| LabError::Network {
        command: format!("{} {}", program.display(), words.join(" ")),
        reason,
    };
    let output = Command::new(program)
        .args(words)
        .stdin(Stdio::null())
        .output()
        .map_err(|error| failed(error.to_string()))?;
    if output.status.success() {
        return Ok(());
    }
    Err(failed(String::from_utf8_lossy(&output.stderr).trim().to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_becomes_a_token_bucket_with_room_for_whole_packets() {
        assert_eq!(Rate::Unshaped.discipline(), None);
        let words = |rate: u64| Rate::Megabits(rate).discipline().unwrap().join(" ");
        assert_eq!(words(10_000), "tbf rate 10000mbit burst 5000000 limit 30000000");
        assert_eq!(words(1000), "tbf rate 1000mbit burst 2500000 limit 5000000");
        assert_eq!(words(100), "tbf rate 100mbit burst 262144 limit 524288");
    }

    #[test]
    fn rates_are_described_in_readable_units() {
        assert_eq!(Rate::Megabits(10_000).describe(), "10 Gbit/s");
        assert_eq!(Rate::Megabits(2500).describe(), "2500 Mbit/s");
        assert_eq!(Rate::Unshaped.describe(), "unshaped");
    }

    #[test]
    fn an_error_has_the_command_and_the_reason() {
        let tools = Tools::find().unwrap();
        let message = run(&tools.ip, &["netns", "exec", "no-such-namespace", "true"])
            .unwrap_err()
            .to_string();
        assert!(message.contains("ip netns exec no-such-namespace true"), "{message}");
        assert!(message.contains("no-such-namespace\": No such file"), "{message}");
    }
}

//! What a service manager is told (sd_notify(3)), and the group that may use the daemon's socket.
//!
//! Without the variable `NOTIFY_SOCKET` nothing is told.

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::Path;

use anyhow::Context as _;
use rustix::fs::Gid;
use rustix::time::{ClockId, clock_gettime};

/// The variables that are for the daemon's process alone.
pub const VARIABLES: [&str; 3] = ["NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"];
/// Where groups are listed.
const GROUPS: &str = "/etc/group";

/// The connection to the service manager.
#[derive(Debug, Default)]
pub struct Service {
    manager: Option<(UnixDatagram, SocketAddr)>,
    /// How often it is told that the loop runs, in milliseconds; `None`: never.
    every_ms: Option<u64>,
    beat_ms: u64,
    is_ready: bool,
    status: String,
}

impl Service {
    /// The service manager that the environment names.
    pub fn of_environment() -> Self {
        let number = |name| env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
        let is_other = |pid| pid != u64::from(std::process::id());
        let limit_us = number("WATCHDOG_USEC").filter(|_| {
            // Without a process id it is for each process that has the variable.
            !number("WATCHDOG_PID").is_some_and(is_other)
        });
        let Some(name) = env::var_os("NOTIFY_SOCKET") else { return Self::default() };
        Self::connect(&name, limit_us).unwrap_or_else(|error| {
            tracing::warn!("the service manager at {name:?} is told nothing: {error}");
            Self::default()
        })
    }

    /// `limit_us` is the time after which a silent daemon counts as hanging.
    fn connect(name: &OsStr, limit_us: Option<u64>) -> io::Result<Self> {
        let address = match name.as_bytes() {
            [b'@', abstract_name @ ..] => SocketAddr::from_abstract_name(abstract_name)?,
            _ => SocketAddr::from_pathname(name)?,
        };
        let socket = UnixDatagram::unbound()?;
        // A manager that does not read must not delay decisions.
        socket.set_nonblocking(true)?;
        let every_ms = limit_us.map(|limit_us| limit_us / 2000);
        Ok(Self { manager: Some((socket, address)), every_ms, ..Self::default() })
    }

    fn tell(&self, text: &str) {
        if let Some((socket, address)) = &self.manager {
            // It is told again, or its own limits apply.
            let _ = socket.send_to_addr(text.as_bytes(), address);
        }
    }

    /// The loop has run once. Its first run makes the daemon ready. `status` is a line for people.
    pub fn ran(&mut self, now_ms: u64, status: &str) {
        if self.manager.is_none() {
            return;
        }
        if !self.is_ready {
            self.is_ready = true;
            self.tell("READY=1\n");
        }
        if self.status != status {
            status.clone_into(&mut self.status);
            self.tell(&format!("STATUS={status}\n"));
        }
        // From the loop, so that a loop that hangs is noticed.
        if let Some(every_ms) = self.every_ms
            && now_ms >= self.beat_ms
        {
            self.beat_ms = now_ms + every_ms;
            self.tell("WATCHDOG=1\n");
        }
    }

    /// The configuration is about to be read again. `ready` follows.
    pub fn reloading(&self) {
        let now = clock_gettime(ClockId::Monotonic);
        let now_us = now.tv_sec * 1_000_000 + now.tv_nsec / 1000;
        self.tell(&format!("RELOADING=1\nMONOTONIC_USEC={now_us}\n"));
    }

    /// The configuration was read again, or the old one stays.
    pub fn reloaded(&self) {
        self.tell("READY=1\n");
    }

    /// The daemon is about to end.
    pub fn stopping(&self) {
        self.tell("STOPPING=1\n");
    }
}

/// The group of this name or number. Only groups in /etc/group have names here.
///
/// # Errors
/// There is none of this name.
pub fn group(name: &str) -> anyhow::Result<Gid> {
    if let Ok(number) = name.parse() {
        return Ok(Gid::from_raw(number));
    }
    let groups = fs::read_to_string(GROUPS).with_context(|| format!("cannot read {GROUPS}"))?;
    group_in(&groups, name)
        .with_context(|| format!("there is no group {name:?} in {GROUPS}; create it: groupadd"))
}

fn group_in(groups: &str, name: &str) -> Option<Gid> {
    groups.lines().find_map(|line| {
        let mut fields = line.split(':');
        let is_it = fields.next() == Some(name);
        let number = fields.nth(1).filter(|_| is_it)?;
        number.parse().ok().map(Gid::from_raw)
    })
}

/// Gives a socket's file to a group.
///
/// # Errors
/// This process may not do that.
pub fn give(path: &Path, group: Gid) -> anyhow::Result<()> {
    rustix::fs::chown(path, None, Some(group)).with_context(|| {
        format!("cannot give {} to the group; run ebbd as a member or as root", path.display())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heard(manager: &UnixDatagram) -> Vec<String> {
        manager.set_nonblocking(true).unwrap();
        let mut buffer = [0; 200];
        let mut texts = Vec::new();
        while let Ok(length) = manager.recv(&mut buffer) {
            texts.push(String::from_utf8(buffer[..length].to_vec()).unwrap());
        }
        texts
    }

    #[test]
    fn the_manager_is_told_what_changes() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notify");
        let manager = UnixDatagram::bind(&path).unwrap();
        let mut service = Service::connect(path.as_os_str(), Some(2_000_000)).unwrap();
        service.ran(500, "plenty");
        assert_eq!(heard(&manager), ["READY=1\n", "STATUS=plenty\n", "WATCHDOG=1\n"]);
        service.ran(1499, "plenty");
        assert_eq!(heard(&manager), [""; 0]);
        service.ran(1500, "tight");
        assert_eq!(heard(&manager), ["STATUS=tight\n", "WATCHDOG=1\n"]);
        service.reloading();
        service.reloaded();
        service.stopping();
        let texts = heard(&manager);
        assert!(texts[0].starts_with("RELOADING=1\nMONOTONIC_USEC="), "{texts:?}");
        assert_eq!(texts[1..], ["READY=1\n", "STOPPING=1\n"]);
    }

    #[test]
    fn an_abstract_name() {
        let name = format!("ebbd-test-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let manager = UnixDatagram::bind_addr(&address).unwrap();
        let name = format!("@{name}");
        Service::connect(OsStr::new(&name), None).unwrap().ran(0, "");
        assert_eq!(heard(&manager), ["READY=1\n"]);
    }

    #[test]
    fn groups_have_names_and_numbers() {
        let groups = "root:x:0:\nebbd:x:101:\nebb:x:102:a,b\nbroken\n";
        assert_eq!(group_in(groups, "ebb").unwrap().as_raw(), 102);
        assert!(group_in(groups, "eb").is_none() && group_in(groups, "broken").is_none());
        assert_eq!(group("7").unwrap().as_raw(), 7);
        let error = group("no such group").unwrap_err().to_string();
        assert!(error.contains("there is no group"), "{error}");
    }
}

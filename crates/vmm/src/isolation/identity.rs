//! The user that a monitor becomes when root has started it.

use std::fs::DirBuilder;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;

use rustix::fs::{FlockOperation, Gid, Mode, OFlags, Uid};
use rustix::io::Errno;

use super::IsolationError;

/// Ids without an account, of which each monitor gets its own: those that systemd uses for dynamic
/// users of services, too (systemd's "Users, Groups, UIDs and GIDs on systemd Systems").
const FIRST_ID: u32 = 61184;
const LAST_ID: u32 = 65519;
/// One locked file for each id in use.
const LOCKS: &str = "/run/ebb/users";
/// systemd's, one for each id that one of its services uses.
const SYSTEMD_LOCKS: &str = "/run/systemd/dynamic-uid";

/// The user that a monitor becomes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum UserChoice {
    /// One without an account that no other process has.
    #[default]
    Dynamic,
    /// An account by name, or `UID[:GID]`.
    Named(String),
}

/// A user and a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Identity {
    uid: Uid,
    gid: Gid,
    is_dynamic: bool,
}

impl Identity {
    /// The identity to assume; `None` if the process stays what it is.
    pub(super) fn choose(choice: &UserChoice) -> Result<Option<Self>, IsolationError> {
        if !rustix::process::geteuid().is_root() {
            return match choice {
                UserChoice::Dynamic => Ok(None),
                UserChoice::Named(_) => Err(IsolationError::NotRoot),
            };
        }
        match choice {
            UserChoice::Named(name) => {
                let accounts = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
                named(name, &accounts)
                    .map(Some)
                    .ok_or_else(|| IsolationError::NoAccount { name: name.clone() })
            }
            UserChoice::Dynamic => dynamic().map(Some),
        }
    }

    /// User and group id.
    pub(super) fn ids(&self) -> (u32, u32) {
        (self.uid.as_raw(), self.gid.as_raw())
    }

    /// Whether no other process has this user.
    pub(super) fn is_dynamic(self) -> bool {
        self.is_dynamic
    }

    /// Makes the calling thread one of this user: irrevocably, since all three ids are set.
    pub(super) fn assume(self) -> io::Result<()> {
        rustix::thread::set_thread_groups(&[])?;
        rustix::thread::set_thread_res_gid(self.gid, self.gid, self.gid)?;
        rustix::thread::set_thread_res_uid(self.uid, self.uid, self.uid)?;
        Ok(())
    }
}

/// Parses `UID[:GID]`, or finds the account in the text of /etc/passwd.
fn named(name: &str, accounts: &str) -> Option<Identity> {
    let identity =
        |uid, gid| Identity { uid: Uid::from_raw(uid), gid: Gid::from_raw(gid), is_dynamic: false };
    let (uid, gid) = name.split_once(':').unwrap_or((name, name));
    // The highest number means "unchanged" in system calls.
    let number = |text: &str| text.parse::<u32>().ok().filter(|id| *id != u32::MAX);
    if let (Some(uid), Some(gid)) = (number(uid), number(gid)) {
        return Some(identity(uid, gid));
    }
    accounts.lines().find_map(|line| {
        let mut fields = line.split(':');
        let (found, _, uid, gid) = (fields.next()?, fields.next()?, fields.next()?, fields.next()?);
        (found == name).then(|| Some(identity(number(uid)?, number(gid)?)))?
    })
}

/// Any text of `--user` and of an account file: an id that means "unchanged" is never found.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn fuzz_user(name: &str, accounts: &str) {
    if let Some(identity) = named(name, accounts) {
        let (uid, gid) = identity.ids();
        assert!(uid != u32::MAX && gid != u32::MAX && !name.is_empty());
    }
}

/// Finds a user that no process has, and locks it as long as the process lives.
fn dynamic() -> Result<Identity, IsolationError> {
    let failed = IsolationError::step::<io::Error>;
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(LOCKS)
        .map_err(failed("create /run/ebb/users for locks of user ids"))?;
    let accounts = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    let count = LAST_ID - FIRST_ID + 1;
    // Monitors that start at the same time begin at different ids.
    let start = std::process::id() % count;
    for step in 0..count {
        let id = FIRST_ID + (start + step) % count;
        let is_taken =
            Path::new(SYSTEMD_LOCKS).join(id.to_string()).exists() || named_by(id, &accounts);
        if is_taken {
            continue;
        }
        // Only for reading: a captured monitor cannot fill the host's /run with it.
        let flags = OFlags::RDONLY | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let path = Path::new(LOCKS).join(id.to_string());
        let lock = rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR)
            .map_err(|errno| failed("open the lock of a user id")(errno.into()))?;
        match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => continue,
            Err(errno) => return Err(failed("lock a user id")(errno.into())),
        }
        keep(lock);
        return Ok(Identity { uid: Uid::from_raw(id), gid: Gid::from_raw(id), is_dynamic: true });
    }
    Err(IsolationError::NoFreeId { first: FIRST_ID, last: LAST_ID })
}

/// The lock belongs to the process: a part of the monitor that ends early must not release it.
fn keep(lock: OwnedFd) {
    static KEPT: std::sync::OnceLock<OwnedFd> = std::sync::OnceLock::new();
    // A process becomes another user once.
    let _ = KEPT.set(lock);
}

/// Whether an account has this id as its user or group.
fn named_by(id: u32, accounts: &str) -> bool {
    let id = id.to_string();
    accounts.lines().any(|line| line.split(':').skip(2).take(2).any(|field| field == id))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ACCOUNTS: &str = "root:x:0:0:root:/root:/bin/bash\n\
                            ebb:x:997:996::/nonexistent:/usr/sbin/nologin\n\
                            damaged:x\n\
                            odd:x:a:b::\n";

    fn ids(name: &str) -> Option<(u32, u32)> {
        named(name, ACCOUNTS).map(|identity| identity.ids())
    }

    #[test]
    fn accounts_and_numbers_are_found() {
        assert_eq!(ids("ebb"), Some((997, 996)));
        assert_eq!(ids("1000"), Some((1000, 1000)));
        assert_eq!(ids("1000:100"), Some((1000, 100)));
        for wrong in ["", "nobody", "damaged", "odd", "1000:", "4294967295", "-1", "ebb:996"] {
            assert_eq!(ids(wrong), None, "{wrong}");
        }
        assert!(named_by(997, ACCOUNTS) && named_by(996, ACCOUNTS) && !named_by(99, ACCOUNTS));
    }
}

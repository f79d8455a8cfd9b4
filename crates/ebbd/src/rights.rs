//! What clients may do, by their user.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Arc;

use tokio::net::UnixStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Most clients at a time, of operators and of all other users. Fewer of the others than can wait
/// for room, so that they can keep no operator out.
const MOST_CLIENTS: [usize; 2] = [600, 400];

/// The user behind a connection (`SO_PEERCRED`, unix(7)).
///
/// All who can connect may read everything and ask for room. Holding a machine and releasing it is
/// for operators and for the owner of its socket, the configuration for operators.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct User {
    id: u32,
}

impl User {
    /// The user of the process that has connected.
    ///
    /// # Errors
    /// The system does not know it.
    pub fn behind(stream: &UnixStream) -> io::Result<Self> {
        Ok(Self { id: stream.peer_cred()?.uid() })
    }

    /// The user with this number.
    pub fn of(id: u32) -> Self {
        Self { id }
    }

    /// Whether it is root, or runs this daemon.
    pub fn is_operator(self) -> bool {
        self.id == 0 || self.id == rustix::process::geteuid().as_raw()
    }

    /// Whether it may hold and release the machine behind a socket; `None` if there is none.
    pub fn may_hold(self, socket: Option<&Path>) -> bool {
        // A link is not followed: its owner may have chosen any socket.
        let owner = || Some(fs::symlink_metadata(socket?).ok()?.uid());
        self.is_operator() || owner() == Some(self.id)
    }
}

/// Room for clients. Those of other users cannot take that of operators.
#[derive(Clone, Debug)]
pub struct Places {
    operators: Arc<Semaphore>,
    others: Arc<Semaphore>,
}

impl Default for Places {
    fn default() -> Self {
        let [operators, others] = MOST_CLIENTS.map(|most| Arc::new(Semaphore::new(most)));
        Self { operators, others }
    }
}

impl Places {
    /// A place for a client of this user until it is dropped; `None` if all are taken.
    pub fn take(&self, user: User) -> Option<OwnedSemaphorePermit> {
        let places = if user.is_operator() { &self.operators } else { &self.others };
        places.clone().try_acquire_owned().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn other() -> User {
        User { id: rustix::process::geteuid().as_raw() + 1 }
    }

    #[test]
    fn other_users_hold_their_own_machines_only() {
        let own = User { id: rustix::process::geteuid().as_raw() };
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        assert!(own.is_operator() && own.may_hold(Some(path)) && own.may_hold(None));
        assert!(!other().is_operator());
        assert!(!other().may_hold(Some(path)));
        assert!(!other().may_hold(None));
        assert!(!other().may_hold(Some(&path.join("missing"))));
        if own.id == 0 {
            std::os::unix::fs::chown(path, Some(other().id), None).unwrap();
            assert!(other().may_hold(Some(path)));
            assert!(!User { id: other().id + 1 }.may_hold(Some(path)));
        }
    }

    #[test]
    fn other_users_leave_places_to_operators() {
        let places = Places::default();
        let taken: Vec<_> = std::iter::from_fn(|| places.take(other())).collect();
        assert_eq!(taken.len(), MOST_CLIENTS[1]);
        let operator = places.take(User { id: 0 });
        assert!(operator.is_some());
        drop(taken);
        assert!(places.take(other()).is_some());
    }
}

//! What is remembered, in a file: it survives a crash, a kill and a full disk.
//!
//! The file is replaced as a whole, by a new one of which everything is on disk. Where that is not
//! possible, the old one stays.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use ebb_host_policy::State;
use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};

use crate::ksm::KsmSettings;

/// The file of a daemon's state.
#[derive(Debug)]
pub struct Store {
    directory: PathBuf,
    /// Locked: two daemons would work against each other.
    _lock: File,
    boot: String,
}

/// The file's content.
#[derive(Serialize, Deserialize)]
struct Saved {
    /// The host's start that its times count from.
    boot: String,
    state: State,
}

/// KSM's settings before they were changed.
#[derive(Serialize, Deserialize)]
struct SavedKsm {
    boot: String,
    before: KsmSettings,
}

/// A state that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The directory cannot be used.
    #[error("cannot use {directory:?}: {source}; choose another --state, or run ebbd as root")]
    Directory {
        /// The directory.
        directory: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Another daemon uses the directory.
    #[error("another ebbd uses {directory:?}; end it first, or choose another --state")]
    InUse {
        /// The directory.
        directory: PathBuf,
    },
    /// The file cannot be written.
    #[error("cannot write {path:?}: {source}")]
    Write {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

impl Store {
    /// Opens a directory, which is created if it does not exist.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn open(directory: &Path) -> Result<Self, StoreError> {
        let refused = |source| StoreError::Directory { directory: directory.to_owned(), source };
        fs::create_dir_all(directory).map_err(refused)?;
        let lock = File::open(directory).map_err(refused)?;
        match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                return Err(StoreError::InUse { directory: directory.to_owned() });
            }
            Err(errno) => return Err(refused(errno.into())),
        }
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let boot = boot.trim().to_owned();
        Ok(Self { directory: directory.to_owned(), _lock: lock, boot })
    }

    fn path(&self) -> PathBuf {
        self.directory.join("state.json")
    }

    /// Where KSM's settings are that were there before this daemon's.
    fn ksm_path(&self) -> PathBuf {
        self.directory.join("ksm.json")
    }

    /// KSM's settings before this daemon or an earlier one changed them: those of this start of
    /// the host.
    pub fn ksm(&self) -> KsmSettings {
        let text = fs::read(self.ksm_path()).unwrap_or_default();
        let saved = serde_json::from_slice::<SavedKsm>(&text).ok();
        saved.filter(|saved| saved.boot == self.boot).map(|saved| saved.before).unwrap_or_default()
    }

    /// Records KSM's settings before they are changed, or that they were put back.
    ///
    /// # Errors
    /// [`StoreError::Write`]; the old file is still there.
    pub fn save_ksm(&self, before: &KsmSettings) -> Result<(), StoreError> {
        let path = self.ksm_path();
        if before.is_empty() {
            return match fs::remove_file(&path) {
                Err(source) if source.kind() != io::ErrorKind::NotFound => {
                    Err(StoreError::Write { path, source })
                }
                _ => Ok(()),
            };
        }
        replace(path, &SavedKsm { boot: self.boot.clone(), before: before.clone() })
    }

    /// Reads the state. Without a file, or with one that is damaged, nothing is known; a damaged
    /// one is kept under another name. After a restart of the host, history and holds remain.
    pub fn load(&self) -> State {
        let path = self.path();
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return State::default(),
            Err(error) => {
                tracing::warn!("{}: {error}; beginning without it", path.display());
                return State::default();
            }
        };
        match serde_json::from_str::<Saved>(&text) {
            Ok(saved) if saved.boot == self.boot => saved.state,
            Ok(saved) => {
                let mut state = State::with_history(saved.state.history.clone());
                saved.state.held().for_each(|machine| state.hold(machine, true));
                state
            }
            Err(error) => {
                let aside = self.directory.join("state.json.damaged");
                tracing::warn!(
                    "{}: {error}; beginning without it, and keeping it as {}",
                    path.display(),
                    aside.display()
                );
                // If it cannot be renamed, it is overwritten.
                let _ = fs::rename(&path, &aside);
                State::default()
            }
        }
    }

    /// Replaces the file.
    ///
    /// # Errors
    /// [`StoreError::Write`]; the old file is still there.
    pub fn save(&self, state: &State) -> Result<(), StoreError> {
        replace(self.path(), &Saved { boot: self.boot.clone(), state: state.clone() })
    }
}

fn replace(path: PathBuf, document: &impl Serialize) -> Result<(), StoreError> {
    let new = path.with_extension("json.new");
    let written = serde_json::to_vec(document)
        .map_err(io::Error::from)
        .and_then(|text| {
            let mut file = File::create(&new)?;
            file.write_all(&text)?;
            file.sync_all()
        })
        .and_then(|()| fs::rename(&new, &path));
    written.map_err(|source| {
        // It takes up room.
        let _ = fs::remove_file(&new);
        StoreError::Write { path, source }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(state: &State) -> Vec<&str> {
        state.held().collect()
    }

    #[test]
    fn it_is_read_again() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(&directory.path().join("new")).unwrap();
        assert_eq!(store.load(), State::default());
        let mut state = State::default();
        state.hold("db", true);
        store.save(&state).unwrap();
        assert_eq!(store.load(), state);
    }

    #[test]
    fn after_a_restart_of_the_host_holds_and_history_remain() {
        let directory = tempfile::tempdir().unwrap();
        let mut store = Store::open(directory.path()).unwrap();
        let mut state = State::default();
        state.hold("db", true);
        state.host.since_ms = 1_000_000;
        store.save(&state).unwrap();
        store.boot = "another".into();
        let loaded = store.load();
        assert_eq!((held(&loaded), loaded.host.since_ms), (vec!["db"], 0));
    }

    #[test]
    fn a_damaged_file_is_kept_aside() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(directory.path()).unwrap();
        for text in ["", "{", "{\"boot\": \"\", \"state\": 5}", "\u{0}\u{0}"] {
            fs::write(directory.path().join("state.json"), text).unwrap();
            assert_eq!(store.load(), State::default());
            let aside = fs::read_to_string(directory.path().join("state.json.damaged")).unwrap();
            assert_eq!(aside, text);
        }
        store.save(&State::default()).unwrap();
    }

    #[test]
    fn a_second_daemon_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let first = Store::open(directory.path()).unwrap();
        let error = Store::open(directory.path()).unwrap_err();
        assert!(error.to_string().contains("another ebbd uses"), "{error}");
        drop(first);
        Store::open(directory.path()).unwrap();
    }
}

//! Caches derived files (such as the extracted kernel) between runs.
//!
//! An entry's name contains a hash of all its inputs, so that it never becomes stale. Entries are
//! created by rename, so that concurrent runs see only complete ones. Each ends with a checksum, so
//! that a damaged one is recreated. The cache is optional: without a writable directory everything
//! is only slower.

use std::env;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rustix::fs::{AtFlags, CWD, FlockOperation, Timespec, Timestamps};

use crate::error::HostError;

/// Maximum number of entries; the least recently used ones are removed.
const ENTRY_LIMIT: usize = 8;
/// Subdirectory of the entries that are directories, which have the same limit.
const DIRECTORIES: &str = "directories";

/// A directory of derived files.
#[derive(Debug, Clone)]
pub struct Cache {
    directory: Option<PathBuf>,
}

/// Hash of a derived file's inputs, used as its name.
#[derive(Debug, Clone, Copy)]
pub struct Key(u64);

impl Key {
    /// A key for this kind of derived file. Change `version` when its computation changes.
    pub fn new(kind: &str, version: u32) -> Self {
        Self(0xcbf2_9ce4_8422_2325).with_bytes(kind.as_bytes()).with_bytes(&version.to_le_bytes())
    }

    /// Adds bytes that the file depends on (FNV-1a, 64 bits).
    #[must_use]
    pub fn with_bytes(self, bytes: &[u8]) -> Self {
        let length = (bytes.len() as u64).to_le_bytes();
        Self(
            length
                .iter()
                .chain(bytes)
                .fold(self.0, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)),
        )
    }

    /// Adds a file that the derived one depends on: its path, size, inode and change time.
    pub fn with_file(self, path: &Path) -> io::Result<Self> {
        let metadata = fs::metadata(path)?;
        let numbers = [
            metadata.size(),
            metadata.ino(),
            metadata.mtime() as u64,
            metadata.mtime_nsec() as u64,
        ];
        Ok(numbers
            .iter()
            .fold(self.with_bytes(path.as_os_str().as_encoded_bytes()), |key, number| {
                key.with_bytes(&number.to_le_bytes())
            }))
    }
}

impl Cache {
    /// The user's cache: `$XDG_CACHE_HOME/ebb` or `~/.cache/ebb`.
    pub fn of_user() -> Self {
        let absolute =
            |name| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let base =
            absolute("XDG_CACHE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".cache")));
        Self { directory: base.map(|base| base.join("ebb")) }
    }

    /// A cache in this directory.
    pub fn at(directory: &Path) -> Self {
        Self { directory: Some(directory.to_owned()) }
    }

    /// The content for `key`: from the cache, or made by `make` and then cached.
    pub fn get_or_make<E>(
        &self,
        key: Key,
        make: impl FnOnce() -> Result<Vec<u8>, E>,
    ) -> Result<Vec<u8>, E> {
        let Some(directory) = &self.directory else { return make() };
        let path = directory.join(format!("{:016x}", key.0));
        if let Some(content) = read_entry(&path) {
            return Ok(content);
        }
        let content = make()?;
        if let Err(error) = write_entry(directory, &path, &content) {
            tracing::debug!(path = %path.display(), %error, "not cached");
        }
        Ok(content)
    }

    /// The directory for `key` if it has been made.
    pub fn existing(&self, key: Key) -> Option<PathBuf> {
        Some(self.path_of(key)?).filter(|path| path.is_dir())
    }

    fn path_of(&self, key: Key) -> Option<PathBuf> {
        Some(self.directory.as_ref()?.join(DIRECTORIES).join(format!("{:016x}", key.0)))
    }

    /// The directory for `key`: from the cache, or filled by `make`. For what takes minutes to make
    /// or is too large for memory: another process that wants the same directory waits. Without a
    /// cache this is an error.
    pub fn directory(
        &self,
        key: Key,
        make: impl FnOnce(&Path) -> Result<(), HostError>,
    ) -> Result<PathBuf, HostError> {
        let none = || HostError::Configuration("no cache: set HOME or XDG_CACHE_HOME".to_owned());
        let path = self.path_of(key).ok_or_else(none)?;
        let base = path.parent().unwrap_or(Path::new("/"));
        let describe = || format!("cannot use the cache {}", base.display());
        fs::create_dir_all(base).map_err(HostError::io(describe()))?;
        let lock = fs::File::create(path.with_extension("lock"));
        let lock = lock.map_err(HostError::io(describe()))?;
        rustix::fs::flock(&lock, FlockOperation::LockExclusive)
            .map_err(|errno| HostError::io(describe())(errno.into()))?;
        if path.is_dir() {
            // The time of its last use.
            let _ = rustix::fs::utimensat(CWD, &path, &NOW, AtFlags::empty());
            return Ok(path);
        }
        let new = tempfile::Builder::new().prefix(".new-").tempdir_in(base);
        let new = new.map_err(HostError::io(describe()))?;
        make(new.path())?;
        fs::rename(new.keep(), &path).map_err(HostError::io(describe()))?;
        prune_directories(base).map_err(HostError::io(describe()))?;
        Ok(path)
    }
}

/// Both times of a file: now.
const NOW: Timestamps = {
    let now = Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_NOW };
    Timestamps { last_access: now, last_modification: now }
};

fn checksum(content: &[u8]) -> [u8; 4] {
    let mut crc = flate2::Crc::new();
    crc.update(content);
    crc.sum().to_le_bytes()
}

fn read_entry(path: &Path) -> Option<Vec<u8>> {
    let mut content = fs::read(path).ok()?;
    let end = content.len().checked_sub(4)?;
    if content[end..] != checksum(&content[..end]) {
        return None;
    }
    content.truncate(end);
    Some(content)
}

fn write_entry(directory: &Path, path: &Path, content: &[u8]) -> io::Result<()> {
    fs::create_dir_all(directory)?;
    let mut file = tempfile::Builder::new().prefix(".new-").tempfile_in(directory)?;
    file.write_all(content)?;
    file.write_all(&checksum(content))?;
    file.persist(path).map_err(|error| error.error)?;
    prune(directory)
}

/// The entries of a directory for which `is_kind` holds, newest first.
fn newest_first(
    directory: &Path,
    is_kind: fn(&fs::Metadata) -> bool,
) -> io::Result<Vec<(SystemTime, fs::DirEntry)>> {
    let mut entries: Vec<_> = fs::read_dir(directory)?
        .flatten()
        .filter_map(|entry| {
            let metadata = entry.metadata().ok().filter(is_kind)?;
            Some((metadata.modified().ok()?, entry))
        })
        .collect();
    entries.sort_by_key(|(changed, _)| std::cmp::Reverse(*changed));
    Ok(entries)
}

/// Removes the least recently used directories beyond the limit, with the files that lock them. One
/// that is being made is recent.
fn prune_directories(base: &Path) -> io::Result<()> {
    for (_, entry) in newest_first(base, fs::Metadata::is_dir)?.into_iter().skip(ENTRY_LIMIT) {
        fs::remove_dir_all(entry.path())?;
    }
    Ok(())
}

/// Removes the least recently used entries beyond the limit, and left-overs of killed runs.
fn prune(directory: &Path) -> io::Result<()> {
    for (index, (changed, entry)) in
        newest_first(directory, fs::Metadata::is_file)?.into_iter().enumerate()
    {
        let unfinished = entry.file_name().to_string_lossy().starts_with(".new-");
        let abandoned = unfinished && changed.elapsed().is_ok_and(|age| age.as_secs() > 3600);
        if abandoned || (index >= ENTRY_LIMIT && !unfinished) {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn get(cache: &Cache, key: Key, content: &[u8]) -> (Vec<u8>, bool) {
        let mut made = false;
        let result: Result<_, io::Error> = cache.get_or_make(key, || {
            made = true;
            Ok(content.to_vec())
        });
        (result.unwrap(), made)
    }

    #[test]
    fn entries_are_made_once_and_read_again() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::at(&directory.path().join("deep/er"));
        let key = Key::new("test", 1);
        assert_eq!(get(&cache, key, b"one"), (b"one".to_vec(), true));
        assert_eq!(get(&cache, key, b"two"), (b"one".to_vec(), false));
        assert_eq!(get(&cache, Key::new("test", 2), b"two"), (b"two".to_vec(), true));
    }

    #[test]
    fn a_damaged_entry_is_recreated() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::at(directory.path());
        let key = Key::new("test", 1);
        get(&cache, key, b"content");
        let path = fs::read_dir(directory.path()).unwrap().next().unwrap().unwrap().path();
        for damage in [b"Content\0\0\0\0".as_slice(), b"co", b""] {
            fs::write(&path, damage).unwrap();
            assert_eq!(get(&cache, key, b"content"), (b"content".to_vec(), true));
        }
    }

    #[test]
    fn a_changed_source_changes_the_key() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("source");
        fs::write(&path, b"1").unwrap();
        let before = Key::new("k", 1).with_file(&path).unwrap().0;
        fs::write(&path, b"22").unwrap();
        assert_ne!(before, Key::new("k", 1).with_file(&path).unwrap().0);
        assert_ne!(Key::new("ab", 1).0, Key::new("a", 1).with_bytes(b"b").0);
    }

    #[test]
    fn an_unwritable_directory_disables_the_cache() {
        let cache = Cache::at(Path::new("/proc/no/such"));
        assert_eq!(get(&cache, Key::new("k", 1), b"x"), (b"x".to_vec(), true));
        assert_eq!(get(&cache, Key::new("k", 1), b"y"), (b"y".to_vec(), true));
    }

    #[test]
    fn directories_are_made_once_and_bounded() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::at(directory.path());
        let make = |version: u32, fails: bool| {
            cache.directory(Key::new("k", version), |path| {
                fs::write(path.join("file"), version.to_string()).unwrap();
                if fails { Err(HostError::Configuration("no".to_owned())) } else { Ok(()) }
            })
        };
        assert!(make(1, true).is_err());
        assert_eq!(cache.existing(Key::new("k", 1)), None);
        let path = make(1, false).unwrap();
        assert_eq!(fs::read(path.join("file")).unwrap(), b"1");
        assert_eq!(make(1, true).unwrap(), path);
        assert_eq!(cache.existing(Key::new("k", 1)), Some(path.clone()));
        for version in 2..20 {
            make(version, false).unwrap();
        }
        // An entry that is a file is pruned without them.
        for version in 0..20 {
            get(&cache, Key::new("f", version), b"x");
        }
        let kept = fs::read_dir(path.parent().unwrap()).unwrap().flatten();
        assert_eq!(kept.filter(|entry| entry.path().is_dir()).count(), ENTRY_LIMIT);
        let files = fs::read_dir(directory.path()).unwrap().flatten();
        assert_eq!(files.filter(|entry| entry.path().is_file()).count(), ENTRY_LIMIT);
    }

    #[test]
    fn the_number_of_entries_is_bounded() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::at(directory.path());
        for version in 0..20 {
            get(&cache, Key::new("k", version), b"x");
        }
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), ENTRY_LIMIT);
    }
}

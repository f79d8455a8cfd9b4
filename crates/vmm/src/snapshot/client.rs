//! A client's half of a snapshot: it creates the file with its own rights, hands it to the monitor,
//! and gives it its name when all of it is on the disk. A monitor's companion does the same for
//! clients that pass no file.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags};
use rustix::io::Errno;
use thiserror::Error;

use super::SnapshotError;
use super::file::{MAGIC, read_some};
use crate::api::{Client, ClientError, SnapshotReport, SnapshotTarget};

/// No snapshot was taken.
#[derive(Debug, Error)]
pub enum TakeError {
    /// The file could not be created or named.
    #[error(transparent)]
    File(#[from] SnapshotError),
    /// The monitor has not written it.
    #[error(transparent)]
    Monitor(#[from] ClientError),
}

/// Has the monitor behind `client` write a snapshot, which then gets the name `path`. The file is
/// created with the rights of this process.
///
/// # Errors
/// [`TakeError`]; no new file of that name exists then.
pub fn take(client: &Client, path: &Path) -> Result<SnapshotReport, TakeError> {
    let new = NewSnapshot::create(path)?;
    let target = SnapshotTarget { path: path.to_owned() };
    let report = client.put_json_with("/vm/snapshot", &target, &[new.file().as_fd()])?;
    new.publish()?;
    Ok(report)
}

/// The file of a snapshot that is being written. Dropped before it is published, it is removed.
#[derive(Debug)]
pub struct NewSnapshot {
    /// For messages.
    path: PathBuf,
    directory: OwnedFd,
    name: OsString,
    file: File,
    /// Its name until it is published. Usually it has none: nothing is left of it then, even if
    /// this process is killed.
    temporary: Option<OsString>,
}

impl NewSnapshot {
    /// Creates a file in the directory of `path`. In the end it replaces a snapshot of that name,
    /// but no other file.
    ///
    /// # Errors
    /// [`SnapshotError`] if the file cannot be created.
    pub fn create(path: &Path) -> Result<Self, SnapshotError> {
        let (directory, _) = parts(path)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::open(directory, flags, Mode::empty()).map_err(|errno| {
            SnapshotError::Create { path: path.to_owned(), source: errno.into() }
        })?;
        Self::create_in(directory, path)
    }

    /// As [`create`](Self::create), for a `path` whose directory is open.
    ///
    /// # Errors
    /// [`SnapshotError`] if the file cannot be created.
    pub fn create_in(directory: OwnedFd, path: &Path) -> Result<Self, SnapshotError> {
        let (_, name) = parts(path)?;
        check_replaceable(&directory, name, path)?;
        let created = match create_unnamed(&directory) {
            // The file system has no files without a name, or the kernel does not know the flag.
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::NOENT | Errno::INVAL) => {
                create_temporary(&directory, name).map(|(file, name)| (file, Some(name)))
            }
            unnamed => unnamed.map(|file| (file, None)),
        };
        let (path, name) = (path.to_owned(), name.to_owned());
        match created {
            Ok((file, temporary)) => Ok(Self { path, directory, name, file, temporary }),
            Err(errno) => Err(SnapshotError::Create { path, source: errno.into() }),
        }
    }

    /// The file, for the monitor.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Gives the file its name, once its content is on the disk.
    ///
    /// # Errors
    /// [`SnapshotError`]; the file is removed then.
    pub fn publish(mut self) -> Result<(), SnapshotError> {
        let path = self.path.clone();
        check_replaceable(&self.directory, &self.name, &path)?;
        rustix::fs::fsync(&self.file)
            .map_err(|errno| SnapshotError::Name { path: path.clone(), source: errno.into() })?;
        let failed =
            |errno: Errno| SnapshotError::Name { path: path.clone(), source: errno.into() };
        if self.temporary.is_none() {
            match self.link(&self.name) {
                Ok(()) => {
                    sync(&self.directory);
                    return Ok(());
                }
                // A snapshot to be replaced, which only a rename can do.
                Err(Errno::EXIST) => {}
                Err(errno) => return Err(failed(errno)),
            }
            let temporary = temporary_name(&self.name).map_err(failed)?;
            self.link(&temporary).map_err(failed)?;
            self.temporary = Some(temporary);
        }
        if let Some(temporary) = &self.temporary {
            rustix::fs::renameat(&self.directory, temporary, &self.directory, &self.name)
                .map_err(failed)?;
        }
        self.temporary = None;
        sync(&self.directory);
        Ok(())
    }

    /// Gives a file without a name one (open(2), `O_TMPFILE`).
    fn link(&self, name: &OsStr) -> Result<(), Errno> {
        let open = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        rustix::fs::linkat(CWD, open, &self.directory, name, AtFlags::SYMLINK_FOLLOW)
    }
}

impl Drop for NewSnapshot {
    fn drop(&mut self) {
        if let Some(temporary) = &self.temporary
            && let Err(error) = rustix::fs::unlinkat(&self.directory, temporary, AtFlags::empty())
        {
            tracing::warn!("cannot remove the unfinished snapshot {temporary:?}: {error}");
        }
    }
}

/// Guest memory is confidential.
const MODE: Mode = Mode::RUSR.union(Mode::WUSR);

/// Open for reading, too: a monitor reads again what it has written before its turn.
fn create_unnamed(directory: &OwnedFd) -> Result<File, Errno> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::TMPFILE;
    rustix::fs::openat(directory, ".", flags, MODE).map(File::from)
}

fn create_temporary(directory: &OwnedFd, name: &OsStr) -> Result<(File, OsString), Errno> {
    let temporary = temporary_name(name)?;
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::CREATE | OFlags::EXCL;
    let file = rustix::fs::openat(directory, &temporary, flags, MODE)?;
    Ok((file.into(), temporary))
}

/// Directory and name of an absolute path.
fn parts(path: &Path) -> Result<(&Path, &OsStr), SnapshotError> {
    match (path.parent(), path.file_name()) {
        (Some(directory), Some(name)) if path.is_absolute() => Ok((directory, name)),
        _ => Err(SnapshotError::Path { path: path.to_owned() }),
    }
}

/// Refuses to replace a file that is not a snapshot.
fn check_replaceable(directory: &OwnedFd, name: &OsStr, path: &Path) -> Result<(), SnapshotError> {
    // A FIFO without a writer must not block.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOFOLLOW;
    let file = match rustix::fs::openat(directory, name, flags, Mode::empty()) {
        Ok(file) => File::from(file),
        Err(Errno::NOENT) => return Ok(()),
        // A symbolic link.
        Err(Errno::LOOP) => return Err(SnapshotError::Exists { path: path.to_owned() }),
        Err(errno) => {
            return Err(SnapshotError::Create { path: path.to_owned(), source: errno.into() });
        }
    };
    let mut magic = [0; MAGIC.len()];
    let is_snapshot = rustix::fs::fstat(&file)
        .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile)
        && read_some(&file, &mut magic).ok() == Some(MAGIC.len())
        && magic == *MAGIC;
    if is_snapshot { Ok(()) } else { Err(SnapshotError::Exists { path: path.to_owned() }) }
}

/// A name for a short time. Random and not a process id: processes of two containers may have the
/// same id.
fn temporary_name(name: &OsStr) -> Result<OsString, Errno> {
    let mut chance = [0; 8];
    rustix::rand::getrandom(&mut chance, rustix::rand::GetRandomFlags::empty())?;
    let mut temporary = OsString::from(".");
    temporary.push(name);
    temporary.push(format!(".{:016x}.partial", u64::from_ne_bytes(chance)));
    Ok(temporary)
}

/// The file has its name. A file system that cannot sync a directory has made it as durable as it
/// can.
fn sync(directory: &OwnedFd) {
    let _ = rustix::fs::fsync(directory);
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn names(directory: &Path) -> Vec<OsString> {
        let entries = std::fs::read_dir(directory).unwrap();
        entries.map(|entry| entry.unwrap().file_name()).collect()
    }

    fn temporary(path: &Path) -> NewSnapshot {
        let (directory, name) = parts(path).unwrap();
        let directory = OwnedFd::from(File::open(directory).unwrap());
        let (file, temporary) = create_temporary(&directory, name).unwrap();
        let (path, name) = (path.to_owned(), name.to_owned());
        NewSnapshot { path, directory, name, file, temporary: Some(temporary) }
    }

    /// Both kinds of files are published, replace a snapshot but no other file, and leave nothing.
    #[test]
    fn files_with_and_without_a_name_are_published_or_removed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a");
        let unnamed = |path: &Path| NewSnapshot::create(path).unwrap();
        for (create, visible) in [(&unnamed as &dyn Fn(&Path) -> NewSnapshot, 0), (&temporary, 1)] {
            let abandoned = create(&path);
            assert_eq!(names(directory.path()).len(), visible);
            drop(abandoned);
            assert!(names(directory.path()).is_empty());

            for round in [b"1", b"2"] {
                let new = create(&path);
                new.file().write_all(MAGIC).unwrap();
                new.file().write_all(round).unwrap();
                new.publish().unwrap();
                assert_eq!(names(directory.path()), ["a"]);
                assert_eq!(std::fs::read(&path).unwrap(), [&MAGIC[..], round].concat());
                let mode = std::fs::metadata(&path).unwrap().permissions().mode();
                assert_eq!(mode & 0o777, 0o600);
            }

            // Another file got the name while the snapshot was written.
            let late = create(&path);
            std::fs::write(&path, "diary").unwrap();
            let error = late.publish().unwrap_err();
            assert!(matches!(error, SnapshotError::Exists { .. }), "{error}");
            assert_eq!(std::fs::read(&path).unwrap(), b"diary");
            assert_eq!(names(directory.path()), ["a"]);
            std::fs::remove_file(&path).unwrap();
        }
    }
}
